"""Draft training: from windows of the lake to a checked draft artifact.

Where to go:

- ``spec``        what a training run is told
- ``methods``     the draft methods; ``DRAFT_METHODS`` is the one table
- ``vocab``       draft vocabulary maps (``d2t`` offsets, ``t2d`` masks)
- ``heads``       a version's frozen head and embedding as tensors
- ``losses``      teacher distributions, losses, and sums that add up over processes
- ``reading``     a selection's windows: planned epochs for many ranks, read ahead, leased meanwhile
- ``feed``        heads, and batches of what was read, on the training device
- ``batches``     windows to tensors
- ``setup``       what is settled before the first step: layers, vocabulary map, parent
- ``held_out``    was a draft trained on what it is to be measured on?
- ``loop``        the training loop
- ``export``      writing a draft folder, whole or not at all
- ``evaluate``    the only tau code, with ``walk`` (rounds) and ``bootstrap`` (intervals)
- ``drift``       how far the target moved
- ``artifact``    a draft on disk, its digest and its evidence (torch-free)
- ``provenance``  package versions
- ``numerics``    deterministic kernels for the length of a run
- ``testing``     a toy target and an in-memory lake for tests
"""
