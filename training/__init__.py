"""Draft training: from windows of the lake to a checked draft artifact.

Where to go:

- ``spec``        what a training run is told
- ``methods``     the draft methods; ``DRAFT_METHODS`` is the one table
- ``vocab``       draft vocabulary maps (``d2t`` offsets, ``t2d`` masks)
- ``losses``      teacher distributions and reference losses
- ``batches``     windows to tensors
- ``loop``        the training loop
- ``evaluate``    the only tau code: walks, paired bootstrap
- ``drift``       how far the target moved
- ``artifact``    a draft on disk, its digest and its evidence (torch-free)
- ``provenance``  package versions and seeds
"""
