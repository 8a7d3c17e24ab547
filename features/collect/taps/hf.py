"""Features from a transformers causal LM, through hooks on its decoder blocks.

Imports torch: reach this module by its dotted name only. Which models: see ``hf_model``. For the
forward of a live trainer: ``hf_live``.
"""

# Shape legend: B = sequences in a batch, T = tokens, H = hidden size, m = aux layers.

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from features.collect.taps.hf_head import head_from_model
from features.collect.taps.hf_model import check_layer_ids, decoder_of, evaluating, padded, stream_of
from features.collect.taps.hf_probe import Features, ProbeReport, Tap, probe_tap
from features.errors import InputError

__all__ = [
    "Features",
    "ProbeReport",
    "Tap",
    "aux_probe",
    "check_layer_ids",
    "forward_features",
    "head_from_model",
]


@torch.no_grad()
def forward_features(
    model: Any, token_ids: Sequence[Sequence[int]], layer_ids: Sequence[int]
) -> list[Features]:
    """Run the decoder once over a batch and return every sequence's own rows.

    Sequences of unequal length are padded on the right inside: a causal row never sees what
    comes after it, and positions start at 0 in each. No logits are computed.

    Raises:
        InputError: an empty sequence, unusable layer ids, or a model without the expected parts.
    """
    decoder = decoder_of(model)
    ids = check_layer_ids(layer_ids, num_layers=len(decoder.layers))
    if not token_ids or not all(len(sequence) for sequence in token_ids):
        raise InputError("forward_features needs at least one sequence, each with at least one token")
    with evaluating(model), _capture(decoder, ids) as streams:
        last_BTH = decoder(**padded(decoder, token_ids), use_cache=False).last_hidden_state
    aux_BTM = torch.cat([streams[k] for k in ids], dim=-1)
    return [
        (_to_numpy(aux_BTM[row, : len(sequence)]), _to_numpy(last_BTH[row, : len(sequence)]))
        for row, sequence in enumerate(token_ids)
    ]


def aux_probe(
    model: Any, layer_ids: Sequence[int], token_ids: Sequence[int], *, tap: Tap = forward_features
) -> ProbeReport:
    """Prove that layer ids of ``tap`` mean blocks applied; see :func:`~features.collect.taps.hf_probe.probe_tap`.

    Raises:
        ProofFailedError: naming the layer id, what was found and what was expected.
    """
    return probe_tap(model, layer_ids, token_ids, tap=tap)


@contextmanager
def _capture(decoder: Any, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Residual streams by layer id: the input of block k, and for the last id the last block's output."""
    streams: dict[int, Tensor] = {}
    num_layers = len(decoder.layers)

    def take_input(k: int) -> Callable[..., None]:
        def hook(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            streams[k] = args[0] if args else kwargs["hidden_states"]

        return hook

    def take_output(_block: nn.Module, _args: Any, output: Any) -> None:
        streams[num_layers] = stream_of(output)

    with ExitStack() as hooks:
        for k in layer_ids:
            if k < num_layers:
                handle = decoder.layers[k].register_forward_pre_hook(take_input(k), with_kwargs=True)
            else:
                handle = decoder.layers[-1].register_forward_hook(take_output)
            hooks.callback(handle.remove)
        yield streams


def _to_numpy(tensor: Tensor) -> NDArray[np.float32]:
    return tensor.float().cpu().contiguous().numpy()
