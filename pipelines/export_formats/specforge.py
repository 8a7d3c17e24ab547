"""The offline data of sgl-project/SpecForge, as release 0.2.0 reads it.

Any ``.ckpt`` file under the folder is one sequence, a dict of tensors made by ``torch.save``. EAGLE-3 reads
``input_ids``, ``loss_mask`` ``[T]``, ``aux_hidden_state [1, T, m * H]`` and ``hidden_state [1, T, H]``, the LM
head's input; DFlash, Domino and DSpark read the same values as ``hidden_states`` and ``target_last_hidden_states``.
Both names are written and share their bytes. The mask says of each token whether it is supervised; the trainer
shifts. Layers are numbered by the block that gives them, from 0: one less than ours.
"""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.bfloat16 import Stored
from features.errors import InputError
from features.schema import FeatureDtype
from pipelines.export_formats.samples import Sample

_FILES_PER_FOLDER = 2000


class SpecForgeFormat:
    """See ``TrainerFormat``."""

    name = "specforge"
    before_final_norm = False
    token_files = None

    def layer_names(self, layer_ids: Sequence[int]) -> tuple[int, ...]:
        if 0 in layer_ids:
            raise InputError(
                "layer id 0 is the embedding's output, and SpecForge can name outputs of blocks only. Choose "
                "others of the recorded ones with --layer-ids"
            )
        return tuple(layer_id - 1 for layer_id in layer_ids)

    def refusal(self, mask: NDArray[np.bool_]) -> str | None:
        if not mask.any():
            return "nothing_supervised"
        # A DFlash block needs an anchor and a token after it; that trainer stops at a sequence without.
        return None if (mask[:-1] & mask[1:]).any() else "no_two_supervised_in_a_row"

    def path(self, index: int) -> str:
        first = index - index % _FILES_PER_FOLDER
        return f"rows_{first}-{first + _FILES_PER_FOLDER}/data_{index}.ckpt"

    def encode(self, sample: Sample) -> bytes:
        import torch

        aux, last = (_tensor(array, sample.dtype).unsqueeze(0) for array in (sample.aux, sample.last))
        tensors = {
            "input_ids": torch.from_numpy(np.array(sample.token_ids)),
            "loss_mask": torch.from_numpy(sample.mask.astype(np.int64)),
            "aux_hidden_state": aux,
            "hidden_state": last,
            "hidden_states": aux,
            "target_last_hidden_states": last,
        }
        sink = io.BytesIO()
        torch.save(tensors, sink)
        return sink.getvalue()


def _tensor(array: Stored, dtype: FeatureDtype) -> Any:
    import torch

    own = np.array(array)
    if dtype is FeatureDtype.FLOAT32:
        return torch.from_numpy(own)
    return torch.from_numpy(own.view(np.int16)).view(torch.bfloat16)
