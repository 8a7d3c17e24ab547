"""Taps: one module per source of features, imported by dotted name on use only."""
