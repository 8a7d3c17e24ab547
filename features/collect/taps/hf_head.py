"""The head snapshot of a live transformers module, whole even where its weights are sharded.

Imports torch: reach this module by its dotted name only.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from features.errors import InputError
from features.heads import HeadSnapshot, logit_scale
from features.schema import FeatureDtype


def head_from_model(model: Any) -> HeadSnapshot:
    """The head snapshot of a live model: LM head, input embedding, and what shapes the logits.

    Equal to ``head_from_checkpoint`` of the same weights saved in the module's own types. Sharded
    weights (FSDP2, tensor parallel) are gathered: every rank of their mesh must call this.

    Raises:
        InputError: the model has no plain LM head or embedding.
    """
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if output is None or embedding is None:
        raise InputError(f"{type(model).__name__} has no LM head or no input embedding to record")
    config = model.config.get_text_config()
    bias = getattr(output, "bias", None)
    both = {output.weight.dtype, embedding.weight.dtype}
    dtype = FeatureDtype.BFLOAT16 if both == {torch.bfloat16} else FeatureDtype.FLOAT32
    lm_head = _array(output.weight, dtype)
    shared = embedding.weight is output.weight
    embed_tokens = lm_head if shared else _array(embedding.weight, dtype)
    tied = embed_tokens.shape == lm_head.shape and np.array_equal(_bits(embed_tokens), _bits(lm_head))
    return HeadSnapshot(
        lm_head=lm_head, dtype=dtype, embed_tokens=None if tied else embed_tokens,
        bias=None if bias is None else _array(bias, FeatureDtype.FLOAT32),
        logit_scale=logit_scale(config.to_dict()), softcap=getattr(config, "final_logit_softcapping", None),
    )  # fmt: skip


def _array(weight: Tensor, dtype: FeatureDtype) -> NDArray[Any]:
    """A copy on the host, gathered."""
    whole = weight.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    # A copy before numpy sees it: memory that numpy has shared cannot be resized, and FSDP resizes.
    cpu = whole.to("cpu", copy=True).contiguous()
    if dtype is FeatureDtype.BFLOAT16:
        return cpu.view(torch.int16).numpy().view(np.uint16)
    return cpu.float().numpy()


def _bits(array: NDArray[Any]) -> NDArray[Any]:
    return array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint32)
