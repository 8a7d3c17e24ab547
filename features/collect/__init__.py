"""From rollouts and a target's forward to windows in the lake.

Where to go: ``rollouts`` (files and values), ``sampling`` (which rows), ``proofs`` (are the
features authentic), ``collector`` (the framework-free core), ``run`` (collect with a live
model), ``taps`` (where features come from). This file imports nothing.
"""
