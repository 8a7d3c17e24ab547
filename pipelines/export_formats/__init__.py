"""Offline formats of other trainers, one module each; all of them are listed in ``TRAINERS``.

- ``samples``      what every format is given, and what it has to answer
- ``final_norm``   from the LM head's input back to what the final norm was given
- ``speculators``  vllm-project/speculators: an Arrow data set and one safetensors file per sequence
- ``specforge``    sgl-project/SpecForge: one file of ``torch.save`` per sequence
"""

from collections.abc import Mapping
from types import MappingProxyType

from pipelines.export_formats.samples import TrainerFormat
from pipelines.export_formats.specforge import SpecForgeFormat
from pipelines.export_formats.speculators import SpeculatorsFormat

TRAINERS: Mapping[str, TrainerFormat] = MappingProxyType(
    {trainer.name: trainer for trainer in (SpeculatorsFormat(), SpecForgeFormat())}
)
