"""Measure the lake beside what it competes with, in ratios that a shared machine cannot blur."""
