"""Features from a transformers causal LM, through hooks on its decoder blocks.

Imports torch: reach this module by its dotted name only. Works for decoders of the Llama
family (Llama, Qwen2/3, Gemma, Mistral and others): ``get_decoder()`` with ``layers`` and
``norm``, blocks that take the residual stream first and return it.
"""

# Shape legend: B = sequences in a batch, T = tokens, H = hidden size, m = aux layers,
#               V = vocabulary.

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from features.errors import InputError, ProofFailedError
from features.heads import HeadSnapshot, logit_scale
from features.schema import FeatureDtype

log = logging.getLogger(__name__)

Features = tuple[NDArray[np.float32], NDArray[np.float32]]
"""``(aux [T, m * H], final [T, H])`` of one sequence, one row per token, unshifted."""
Tap = Callable[[Any, Sequence[Sequence[int]], Sequence[int]], list[Features]]

PROBE_ROWS = 8
"""Rows, evenly spread, on which block k is applied to the tap's id k."""
RELATIVE_TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-4, torch.float64: 1e-4}
"""Largest relative L2 error of a row between two forwards of one model. Reordered sums move
float32 by about 1e-6; ids one apart differ by far more (1e-2 and up)."""
LOW_PRECISION_TOLERANCE = 2e-2
"""The same for bfloat16 and float16: one forward differs from another by up to about 1 %."""


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What the aux probe compared; it raises rather than report a failure."""

    layer_ids: tuple[int, ...]
    tokens: int
    compute_dtype: str
    tolerance: float
    """Largest relative L2 error of a row that passes."""
    row_error: Mapping[int, float]
    """Per layer id: largest relative row error against the plain forward."""
    block_error: Mapping[int, float]
    """Per layer id k < n: largest relative row error of block k applied to id k, against id k + 1."""


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
    decoder = _decoder(model)
    ids = check_layer_ids(layer_ids, num_layers=len(decoder.layers))
    if not token_ids or not all(len(sequence) for sequence in token_ids):
        raise InputError("forward_features needs at least one sequence, each with at least one token")
    with _evaluating(model), _capture(decoder, ids) as streams:
        last_BTH = decoder(**_padded(decoder, token_ids), use_cache=False).last_hidden_state
    aux_BTM = torch.cat([streams[k] for k in ids], dim=-1)
    return [
        (_to_numpy(aux_BTM[row, : len(sequence)]), _to_numpy(last_BTH[row, : len(sequence)]))
        for row, sequence in enumerate(token_ids)
    ]


@torch.no_grad()
def aux_probe(
    model: Any, layer_ids: Sequence[int], token_ids: Sequence[int], *, tap: Tap = forward_features
) -> ProbeReport:
    """Prove what a tap calls layer id ``k``: the second authenticity proof, once per tap and version.

    Three comparisons: id k < n with a plain ``output_hidden_states`` forward; id n, which that
    forward gives only after the final norm, with the norm applied; and block k, run inside the
    model on the tap's rows of id k, with id k + 1. The final hidden state is not judged here
    (the logprob proof does), except that the model's LM head must read the decoder's output.

    Raises:
        ProofFailedError: naming the layer id, what was found and what was expected.
    """
    decoder = _decoder(model)
    num_layers = len(decoder.layers)
    ids = check_layer_ids(layer_ids, num_layers=num_layers)
    tolerance = RELATIVE_TOLERANCE.get(_compute_dtype(model), LOW_PRECISION_TOLERANCE)
    aux, _ = tap(model, [token_ids], ids)[0]
    hidden = decoder.config.hidden_size
    if aux.shape != (len(token_ids), len(ids) * hidden):
        expected = (len(token_ids), len(ids) * hidden)
        raise ProofFailedError(f"aux probe: the tap gave rows of shape {aux.shape}, expected {expected}")
    rows_by_id = {k: torch.from_numpy(aux[:, i * hidden : (i + 1) * hidden]) for i, k in enumerate(ids)}
    with _evaluating(model):
        plain = _plain_hidden_states(model, decoder, token_ids)
        row_error = {
            k: _largest_error(_comparable(decoder, k, rows), plain[k]) for k, rows in rows_by_id.items()
        }
        _require(row_error, tolerance, "differ from id {k} of a plain forward")
        block_error = {
            k: _block_error(decoder, k, rows, token_ids, plain[k + 1])
            for k, rows in rows_by_id.items()
            if k < num_layers
        }
        _require(block_error, tolerance, "do not become id {next} when block {k} is applied to them")
    return ProbeReport(
        layer_ids=ids, tokens=len(token_ids), compute_dtype=str(_compute_dtype(model)).removeprefix("torch."),
        tolerance=tolerance, row_error=row_error, block_error=block_error,
    )  # fmt: skip


def head_from_model(model: Any) -> HeadSnapshot:
    """The head snapshot of a live model: LM head, input embedding, and what shapes the logits.

    Raises:
        InputError: the model has no plain LM head or embedding.
    """
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if output is None or embedding is None:
        raise InputError(f"{type(model).__name__} has no LM head or no input embedding to record")
    config = model.config.get_text_config()
    tied = output.weight.data_ptr() == embedding.weight.data_ptr()
    bias = getattr(output, "bias", None)
    dtype = FeatureDtype.BFLOAT16 if output.weight.dtype == torch.bfloat16 else FeatureDtype.FLOAT32
    return HeadSnapshot(
        lm_head=_head_array(output.weight, dtype),
        dtype=dtype,
        embed_tokens=None if tied else _head_array(embedding.weight, dtype),
        bias=None if bias is None else _head_array(bias, dtype),
        logit_scale=logit_scale(config.to_dict()),
        softcap=getattr(config, "final_logit_softcapping", None),
    )


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


def _decoder(model: Any) -> Any:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList) or not hasattr(decoder, "norm"):
        raise InputError(
            f"{type(model).__name__} has no decoder with 'layers' and 'norm'; this tap reads "
            "causal LMs of the Llama family (Llama, Qwen2/3, Gemma, Mistral)"
        )
    return decoder


def _padded(decoder: Any, token_ids: Sequence[Sequence[int]]) -> dict[str, Tensor]:
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
def _evaluating(model: Any) -> Iterator[None]:
    """Dropout off for the forward; a training model is put back."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


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
        streams[num_layers] = _stream(output)

    with ExitStack() as hooks:
        for k in layer_ids:
            if k < num_layers:
                handle = decoder.layers[k].register_forward_pre_hook(take_input(k), with_kwargs=True)
            else:
                handle = decoder.layers[-1].register_forward_hook(take_output)
            hooks.callback(handle.remove)
        yield streams


def _stream(output: Any) -> Tensor:
    """The residual stream in a block's output; older blocks return a tuple."""
    stream: Tensor = output[0] if isinstance(output, tuple) else output
    return stream


def _plain_hidden_states(model: Any, decoder: Any, token_ids: Sequence[int]) -> list[Tensor]:
    """``hidden_states[k]`` of the whole model for every k, float32 ``[T, H]``; the last is post-norm."""
    seen: list[Tensor] = []
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    try:
        out = model(**_padded(decoder, [token_ids]), output_hidden_states=True, use_cache=False)
    finally:
        handle.remove()
    states = [state[0].float().cpu() for state in out.hidden_states]
    if not seen or not torch.equal(seen[0][0].float().cpu(), states[-1]):
        raise ProofFailedError(
            f"{type(model).__name__}: the LM head does not read the decoder's output as it is, so "
            "stored final rows could not be scored with the head; this architecture is not supported"
        )
    return states


def _comparable(decoder: Any, k: int, rows_TH: Tensor) -> Tensor:
    """Rows of id k in the form of ``hidden_states[k]``: the last id goes through the final norm."""
    return _normed(decoder, rows_TH) if k == len(decoder.layers) else rows_TH


def _normed(decoder: Any, rows_TH: Tensor) -> Tensor:
    weight = next(decoder.norm.parameters())
    normed_TH: Tensor = decoder.norm(rows_TH.to(weight.device, weight.dtype)[None])[0]
    return normed_TH.float().cpu()


def _block_error(
    decoder: Any, k: int, rows_TH: Tensor, token_ids: Sequence[int], expected_TH: Tensor
) -> float:
    """Run the decoder with block k's input replaced by ``rows_TH`` and compare what comes out."""
    outputs: list[Tensor] = []

    def replace(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        stream = args[0] if args else kwargs["hidden_states"]
        given = rows_TH.to(stream.device, stream.dtype)[None]
        return ((given, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": given})

    with ExitStack() as hooks:
        block = decoder.layers[k]
        hooks.callback(block.register_forward_pre_hook(replace, with_kwargs=True).remove)
        hooks.callback(block.register_forward_hook(lambda _b, _a, out: outputs.append(_stream(out))).remove)
        decoder(**_padded(decoder, [token_ids]), use_cache=False)
    found_TH = _comparable(decoder, k + 1, outputs[0][0].float().cpu())
    sampled = torch.linspace(0, len(token_ids) - 1, min(PROBE_ROWS, len(token_ids))).long()
    return _largest_error(found_TH[sampled], expected_TH[sampled])


def _largest_error(found_TH: Tensor, expected_TH: Tensor) -> float:
    """Largest relative L2 error of a row; infinite when anything is not finite."""
    error = (found_TH.double() - expected_TH.double()).norm(dim=-1) / expected_TH.double().norm(
        dim=-1
    ).clamp_min(1e-12)
    return float(error.max()) if bool(error.isfinite().all()) else float("inf")


def _require(errors: Mapping[int, float], tolerance: float, claim: str) -> None:
    for k, error in errors.items():
        if not error <= tolerance:
            raise ProofFailedError(
                f"aux probe: the tap's rows of layer id {k} {claim.format(k=k, next=k + 1)} (largest "
                f"relative row error {error:.2e}, at most {tolerance:.0e} passes). A layer id is the number "
                "of blocks applied; check the tap's convention (off by one?) and that it reads before the "
                "final norm."
            )


def _compute_dtype(model: Any) -> torch.dtype:
    dtype: torch.dtype = next(model.parameters()).dtype
    return dtype


def _to_numpy(tensor: Tensor) -> NDArray[np.float32]:
    return tensor.float().cpu().contiguous().numpy()


def _head_array(weight: Tensor, dtype: FeatureDtype) -> NDArray[Any]:
    cpu = weight.detach().cpu().contiguous()
    if dtype is FeatureDtype.BFLOAT16:
        return cpu.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).copy()
    return cpu.float().numpy().copy()
