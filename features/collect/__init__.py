"""From rollouts and a target's forward to windows in the lake.

Where to go: ``rollout`` (the value), ``rollouts`` (its files), ``sources`` (other people's files),
``sampling`` (which rows), ``proofs`` (are the features authentic), ``collector`` (the framework-free
core), ``run`` (collect with a model of one's own), ``live`` (inside a trainer's forward), ``replay``
(on an engine), ``shards`` (rows of a sharded batch), ``taps`` (where features come from). For
backfills: ``scan`` (what a source holds and who owns what comes twice), ``partition`` (collect a part
of a source), ``backfill_record`` (what a lake remembers of that), ``sampling_proof`` (were the tokens
sampled as recorded). This file imports nothing.
"""
