"""The aux probe of a transformers model: does a tap's layer id ``k`` mean ``k`` blocks applied?

Everything runs through the whole model's own forward, so that sharded modules (FSDP2) gather
their weights as they do in training. Imports torch: reach this module by its dotted name only.
"""

# Shape legend: T = tokens, H = hidden size.

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from features.collect.taps.hf_model import check_layer_ids, decoder_of, evaluating, padded, stream_of
from features.errors import ProofFailedError

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
    """Type of the final hidden state of the model's own forward."""
    tolerance: float
    """Largest relative L2 error of a row that passes."""
    row_error: Mapping[int, float]
    """Per layer id: largest relative row error against the plain forward."""
    block_error: Mapping[int, float]
    """Per layer id k < n: largest relative row error of block k applied to id k, against id k + 1."""


@torch.no_grad()
def probe_tap(model: Any, layer_ids: Sequence[int], token_ids: Sequence[int], *, tap: Tap) -> ProbeReport:
    """Prove what ``tap`` calls layer id ``k``: the second authenticity proof, once per tap and version.

    Three comparisons: id k < n with a plain ``output_hidden_states`` forward; id n, which that
    forward gives only after the final norm, with the norm applied; and block k, run inside the
    model on the tap's rows of id k, with id k + 1. The final hidden state is not judged here
    (the logprob proof does), except that the model's LM head must read the decoder's output.

    Raises:
        ProofFailedError: naming the layer id, what was found and what was expected.
    """
    decoder = decoder_of(model)
    num_layers = len(decoder.layers)
    ids = check_layer_ids(layer_ids, num_layers=num_layers)
    with evaluating(model):
        # First: the root of a sharded model must be run before any of its parts.
        plain, dtype = _plain_hidden_states(model, token_ids)
        tolerance = RELATIVE_TOLERANCE.get(dtype, LOW_PRECISION_TOLERANCE)
        aux, _ = tap(model, [token_ids], ids)[0]
        hidden = decoder.config.hidden_size
        if aux.shape != (len(token_ids), len(ids) * hidden):
            expected = (len(token_ids), len(ids) * hidden)
            raise ProofFailedError(f"aux probe: the tap gave rows of shape {aux.shape}, expected {expected}")
        rows_by_id = {k: torch.from_numpy(aux[:, i * hidden : (i + 1) * hidden]) for i, k in enumerate(ids)}
        row_error = {}
        for k, rows in rows_by_id.items():
            comparable = _rerun(model, decoder, k, rows, token_ids) if k == num_layers else rows
            row_error[k] = _largest_error(comparable, plain[k])
        _require(row_error, tolerance, "differ from id {k} of a plain forward")
        sampled = torch.linspace(0, len(token_ids) - 1, min(PROBE_ROWS, len(token_ids))).long()
        block_error = {
            k: _largest_error(_rerun(model, decoder, k, rows, token_ids)[sampled], plain[k + 1][sampled])
            for k, rows in rows_by_id.items()
            if k < num_layers
        }
        _require(block_error, tolerance, "do not become id {next} when block {k} is applied to them")
    return ProbeReport(
        layer_ids=ids, tokens=len(token_ids), compute_dtype=str(dtype).removeprefix("torch."),
        tolerance=tolerance, row_error=row_error, block_error=block_error,
    )  # fmt: skip


def _plain_hidden_states(model: Any, token_ids: Sequence[int]) -> tuple[list[Tensor], torch.dtype]:
    """``hidden_states[k]`` of the whole model for every k, float32 ``[T, H]``, the last post-norm; its type."""
    seen: list[Tensor] = []
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    try:
        out = model(**padded(decoder_of(model), [token_ids]), output_hidden_states=True, use_cache=False)
    finally:
        handle.remove()
    states = [state[0].float().cpu() for state in out.hidden_states]
    if not seen or not torch.equal(seen[0][0].float().cpu(), states[-1]):
        raise ProofFailedError(
            f"{type(model).__name__}: the LM head does not read the decoder's output as it is, so "
            "stored final rows could not be scored with the head; this architecture is not supported"
        )
    return states, out.hidden_states[-1].dtype


def _rerun(model: Any, decoder: Any, k: int, rows_TH: Tensor, token_ids: Sequence[int]) -> Tensor:
    """``hidden_states[k + 1]`` of a forward in which id k is replaced by ``rows_TH``; of id n, the last state."""
    num_layers = len(decoder.layers)
    outputs: list[Tensor] = []

    def given(stream: Tensor) -> Tensor:
        return rows_TH.to(stream.device, stream.dtype)[None]

    def replace_input(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        stream = args[0] if args else kwargs["hidden_states"]
        rows = given(stream)
        return ((rows, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": rows})

    def replace_output(_block: nn.Module, _args: Any, output: Any) -> Any:
        rows = given(stream_of(output))
        return (rows, *output[1:]) if isinstance(output, tuple) else rows

    with ExitStack() as hooks:
        if k < num_layers:
            handle = decoder.layers[k].register_forward_pre_hook(replace_input, with_kwargs=True)
        else:
            handle = decoder.layers[-1].register_forward_hook(replace_output)
        hooks.callback(handle.remove)
        if k + 1 < num_layers:
            handle = decoder.layers[k].register_forward_hook(
                lambda _b, _a, out: outputs.append(stream_of(out))
            )
        else:
            handle = decoder.register_forward_hook(lambda _d, _a, out: outputs.append(out.last_hidden_state))
        hooks.callback(handle.remove)
        model(**padded(decoder, [token_ids]), use_cache=False)
    return outputs[0][0].float().cpu()


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
