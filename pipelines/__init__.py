"""The product in plain Python: a typed spec in, a typed report out, effects through one context.

Where to go:

- ``context``     every effect a pipeline may have
- ``device``      where tensors are computed
- ``progress``    what long work shows while it runs
- ``start``       create a lake; look at the machine, the store and the engines (``init``, ``doctor``)
- ``collect``     rollouts and a target's weights to windows in the lake
- ``replay``      vLLM engines that ``collect`` replays rollouts on
- ``backfill``    old rollouts of any known format to windows: ``backfill_spec``, ``_plan``, ``_worker``, ``_process``
- ``quarantine``  what was refused, shown and tried again
- ``inspect``     what is in the lake (``ls``, ``show``, ``explain``)
- ``train``       a version range to a candidate draft in the registry
- ``evaluate``    offline tau on held-out groups, and the gate's evidence
- ``promote``     approve, reject, publish, roll back, status
- ``maintain``    compact the catalog
- ``housekeeping`` let versions go, collect garbage, check the lake (``retain``, ``gc``, ``fsck``)
- ``narrowing``   what narrows a selection, the same for ``explain``, ``train`` and ``export``
- ``export``      a selection in another trainer's offline format; formats in ``export_formats``
- ``bench``       ratios to a ceiling and to rivals, measured in the same run
- ``hooks``       what other packages may be told about decisions
- ``demo``        the whole loop on one machine
- ``cli``         the ``draftlake`` command
"""
