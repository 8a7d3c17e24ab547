"""The parts of a transformers causal LM that taps read: blocks, streams, inputs.

Imports torch: reach this module by its dotted name only. Works for decoders of the Llama
family (Llama, Qwen2/3, Gemma, Mistral and others): ``get_decoder()`` with ``layers`` and
``norm``, blocks that take the residual stream first and return it.
"""

# Shape legend: B = sequences in a batch, T = tokens.

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from features.errors import InputError


def check_layer_ids(layer_ids: Sequence[int], *, num_layers: int) -> tuple[int, ...]:
    """The ids as a tuple, refused unless ascending, distinct and within ``[0, num_layers]``.

    Raises:
        InputError: with the number of blocks and the convention.
    """
    ids = tuple(int(k) for k in layer_ids)
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] > num_layers:
        raise InputError(
            f"layer ids {list(ids)} do not fit a target of {num_layers} blocks: a layer id is the number "
            f"of blocks applied, so expected ascending, distinct ids in [0, {num_layers}]"
        )
    return ids


def decoder_of(model: Any) -> Any:
    """The decoder inside a causal LM, whatever wraps that.

    Raises:
        InputError: the model has none of the kind this package's taps read.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList) or not hasattr(decoder, "norm"):
        raise InputError(
            f"{type(model).__name__} has no decoder with 'layers' and 'norm'; this tap reads "
            "causal LMs of the Llama family (Llama, Qwen2/3, Gemma, Mistral)"
        )
    return decoder


def padded(decoder: Any, token_ids: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Inputs ``[B, T]`` of sequences padded on the right, on the decoder's device."""
    longest = max(len(sequence) for sequence in token_ids)
    device = decoder.get_input_embeddings().weight.device
    ids_BT = torch.zeros((len(token_ids), longest), dtype=torch.long)
    mask_BT = torch.zeros_like(ids_BT)
    for row, sequence in enumerate(token_ids):
        ids_BT[row, : len(sequence)] = torch.tensor(list(sequence), dtype=torch.long)
        mask_BT[row, : len(sequence)] = 1
    positions_BT = torch.arange(longest).expand_as(ids_BT)
    named = {"input_ids": ids_BT, "attention_mask": mask_BT, "position_ids": positions_BT}
    return {name: tensor.to(device) for name, tensor in named.items()}


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Dropout off for the forward; each module is put back into its own mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def stream_of(output: Any) -> Tensor:
    """The residual stream in a block's output; older blocks return a tuple."""
    stream: Tensor = output[0] if isinstance(output, tuple) else output
    return stream
