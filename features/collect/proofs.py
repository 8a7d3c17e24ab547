"""Are the features authentic? The logprob-agreement proof, and faults that features show alone.

The engine recorded the logprob of each token it sampled. Recomputing it from the *stored*
(rounded) final hidden state and the head of the same version shows that weights, tokens and
the final-norm convention belong together. It says nothing about aux layers: those are proven
by the tap's aux probe.
"""

# Shape legend: R = rows of a window, H = hidden size, V = vocabulary, N = tokens compared.

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from features.bfloat16 import Float32, to_float32
from features.collect.rollouts import MISSING_LOGPROB, Reason
from features.heads import HeadSnapshot
from features.schema import FeatureDtype, FragmentLayout, TargetVersion
from features.windows import Window

MAX_TOKENS_COMPARED = 256
"""Tokens compared per window, evenly spread: a head costs ``2 * N * H * V`` operations twice."""
SPREAD = 6.0
"""See `LogprobTolerance`."""
NOISE_DRAWS = 64
"""Least number of random roundings behind a storage-noise estimate, however few the tokens."""
BFLOAT16_OVERFLOW = float(np.ldexp(2.0 - 2.0**-8, 127))
"""Smallest magnitude that rounds to infinity in bfloat16."""
NEIGHBOUR_TOKENS = 512
"""Rows on which the heads of neighbouring versions are compared, per run."""


@dataclass(frozen=True, slots=True)
class LogprobTolerance:
    """How far the recomputed logprobs of one window may lie from the recorded ones, in nats.

    The limit on the mean absolute error is ``engine_noise + storage * (1 + 6 / sqrt(N))``.
    ``storage`` is measured, not assumed: the mean change of the same logprobs when every stored
    element moves by a random fraction of its own rounding interval (0 for float32). The spread
    of a mean of N absolute errors, and that of the estimate, are each about ``0.8 * storage /
    sqrt(N)``; 6 is more than five standard deviations of their difference. ``engine_noise``
    covers the arithmetic in which the engine and the tap differ (kernels, batching, precision).
    """

    engine_noise: float = 0.03
    """Mean absolute error between two correct forwards of one model. The default is for bfloat16
    engines: 0.012 was measured on an 8-layer Llama (worst window of 72 tokens 0.017; eager
    against fused attention 0.014)."""

    @classmethod
    def for_compute_dtype(cls, dtype: FeatureDtype) -> "LogprobTolerance":
        """The default for engines that compute in ``dtype``.

        float32: vLLM and transformers differed by 2e-6 nats on a CPU; 0.002 leaves room for
        GPU kernels that round products to 10 bits (TF32).
        """
        return cls() if dtype is FeatureDtype.BFLOAT16 else cls(engine_noise=0.002)

    def limit(self, *, storage_noise: float, tokens: int) -> float:
        """Largest mean absolute error, in nats, that still agrees."""
        return self.engine_noise + storage_noise * (1 + SPREAD / math.sqrt(tokens))


@dataclass(frozen=True, slots=True)
class Agreement:
    """Outcome of the proof on one window. Errors in nats; NaN where nothing was compared."""

    verdict: Literal["agrees", "disagrees", "unverified"]
    tokens: int
    mean_error: float
    max_error: float
    limit: float
    reason: str
    """Why the window is unverified or disagrees; empty when it agrees."""


@dataclass(frozen=True, slots=True)
class NeighbourGap:
    """How far another version's *head alone* moves the logprobs of this version's rows."""

    version: TargetVersion
    tokens: int
    mean_gap: float
    """Mean absolute change in nats; a wrong version also has other hidden states."""
    needed: float
    """The run's smallest gap that must have been refused."""
    resolved: bool
    """True when this gap alone, head for head, is large enough to have been refused."""


@dataclass(frozen=True, slots=True)
class AgreementSummary:
    """The proof over a run: token-weighted means over the compared windows."""

    windows_compared: int = 0
    windows_refused: int = 0
    tokens: int = 0
    mean_error: float = math.nan
    """Over the windows that agreed."""
    max_error: float = math.nan
    limit: float = math.nan
    smallest_gap: float = math.nan
    """Smallest mean logprob change in nats that must have been refused: limit + mean error
    (a version further away than that cannot come within the limit: triangle inequality)."""
    neighbours: tuple[NeighbourGap, ...] = ()
    """Empty when no other version is registered: the gap is then stated in nats only."""


class AgreementTally:
    """Adds up the agreements of a run."""

    def __init__(self) -> None:
        self._compared = self._refused = self._tokens = 0
        self._error = self._limit = 0.0
        self._max = math.nan

    def add(self, agreement: Agreement) -> None:
        """Count one window."""
        if agreement.verdict == "unverified":
            return
        self._compared += 1
        if agreement.verdict == "disagrees":
            self._refused += 1
            return
        self._tokens += agreement.tokens
        self._error += agreement.mean_error * agreement.tokens
        self._limit += agreement.limit * agreement.tokens
        self._max = float(np.fmax(self._max, agreement.max_error))

    def summary(self) -> AgreementSummary:
        """What was compared so far."""
        base = AgreementSummary(windows_compared=self._compared, windows_refused=self._refused)
        if not self._tokens:
            return base
        mean, limit = self._error / self._tokens, self._limit / self._tokens
        base = replace(base, tokens=self._tokens, mean_error=mean, max_error=self._max)
        return replace(base, limit=limit, smallest_gap=limit + mean)


def usable_logprobs(logprobs: Float32) -> NDArray[np.bool_]:
    """Which entries are values: not NaN or infinite, not exactly 0.0, not -9999."""
    usable: NDArray[np.bool_] = np.isfinite(logprobs) & (logprobs != 0.0) & (logprobs > MISSING_LOGPROB)
    return usable


def comparison_temperature(window: Window) -> tuple[float | None, str]:
    """The temperature at which the window's logprobs can be recomputed, or why they cannot."""
    meta = window.meta
    match meta.logprob_kind:
        case "engine_raw":
            return 1.0, ""
        case "engine_processed":
            if meta.temperature is None or not meta.temperature > 0.0:
                return None, "processed logprobs without a temperature above 0"
            if meta.top_p != 1.0 or meta.top_k not in (None, 0, -1):
                return None, "processed logprobs of truncated sampling (top_p or top_k)"
            return meta.temperature, ""
        case None:
            return None, "no logprobs of the engine"
        case kind:
            return None, f"logprobs of kind {kind}"


def logprob_agreement(
    window: Window, head: HeadSnapshot, tolerance: LogprobTolerance, *, max_tokens: int = MAX_TOKENS_COMPARED
) -> Agreement:
    """Recompute the engine's logprobs from stored rows and the version's head, and compare.

    Row ``i`` predicts token ``i + 1``; only sampled tokens with a value count. A window with
    nothing to compare is ``unverified``, never passed. At most ``max_tokens`` are compared, evenly spread.
    """
    temperature, why_not = comparison_temperature(window)
    usable = window.sampled_mask[1:] & usable_logprobs(window.logprobs[1:])
    rows = np.flatnonzero(usable)
    if temperature is None or not len(rows):
        reason = why_not or "no sampled token with a logprob"
        return Agreement("unverified", 0, math.nan, math.nan, math.nan, reason)
    rows = rows[np.unique(np.linspace(0, len(rows) - 1, min(len(rows), max_tokens)).astype(int))]
    final_NH = to_float32(window.final[rows], window.layout.dtype)
    ids_N, recorded_N = window.token_ids[1:][rows], window.logprobs[1:][rows]
    recomputed_N = head.token_logprobs(final_NH, ids_N, temperature=temperature)
    errors_N = np.abs(recomputed_N.astype(np.float64) - recorded_N)
    storage = 0.0
    if window.layout.dtype is FeatureDtype.BFLOAT16:
        storage = _storage_noise(final_NH, ids_N, recomputed_N, head=head, temperature=temperature)
    limit = tolerance.limit(storage_noise=storage, tokens=len(rows))
    mean = float(np.mean(errors_N))
    agrees = mean <= limit  # NaN does not agree
    reason = (
        ""
        if agrees
        else f"mean logprob error {mean:.4f} nats over {len(rows)} tokens, at most {limit:.4f} agrees"
    )
    return Agreement(
        "agrees" if agrees else "disagrees", len(rows), mean, float(np.max(errors_N)), limit, reason
    )  # fmt: skip


def neighbour_gap(
    final_NH: Float32,
    ids_N: NDArray[np.int32],
    *,
    own: HeadSnapshot,
    other: HeadSnapshot,
    version: TargetVersion,
    needed: float,
) -> NeighbourGap:
    """Compare the logprobs of the same rows under this version's head and ``version``'s."""
    gap = np.abs(
        own.token_logprobs(final_NH, ids_N).astype(np.float64) - other.token_logprobs(final_NH, ids_N)
    )
    mean = float(np.mean(gap))
    return NeighbourGap(version, len(ids_N), mean, needed, resolved=mean > needed)


def feature_fault(
    aux: Float32, final: Float32, *, rows: int, layout: FragmentLayout
) -> tuple[Reason, str] | None:
    """The first fault that features show without any reference, or None.

    ``aux`` must be ``[rows, m * H]`` and ``final`` ``[rows, H]``, float32, one row per token:
    shorter features (a prefix-cache hit) are refused, never padded or cut.
    """
    expected = {"aux": (rows, layout.aux_width), "final": (rows, layout.hidden_size)}
    for name, array in (("aux", aux), ("final", final)):
        if array.shape != expected[name]:
            return (
                Reason.FEATURE_SHAPE,
                f"{name} is {array.shape}, expected {expected[name]} for {rows} tokens",
            )
        if array.dtype != np.float32:
            return Reason.FEATURE_SHAPE, f"{name} is {array.dtype}, expected float32"
    largest = BFLOAT16_OVERFLOW if layout.dtype is FeatureDtype.BFLOAT16 else np.inf
    per_layer = aux.reshape(rows, len(layout.layer_ids), layout.hidden_size)
    named = [(f"aux id {k}", per_layer[:, i]) for i, k in enumerate(layout.layer_ids)] + [("final", final)]
    for name, block in named:
        bad = np.flatnonzero(~(np.abs(block) < largest).all(axis=1))  # NaN is not below anything
        if len(bad):
            detail = f"{name} has NaN, infinity or more than {layout.dtype} can hold"
            return Reason.NONFINITE_FEATURES, f"{detail} at {len(bad)} rows, first at {bad[0]}"
        zero = np.flatnonzero(~block.any(axis=1))
        if len(zero):
            return Reason.ZERO_FEATURES, f"{name} is all zero at {len(zero)} rows, first at {zero[0]}"
    return None


def _storage_noise(
    final_NH: Float32,
    ids_N: NDArray[np.int32],
    logprobs_N: Float32,
    *,
    head: HeadSnapshot,
    temperature: float,
) -> float:
    """Mean absolute change of ``logprobs_N`` when the stored rows move within their rounding."""
    draws = math.ceil(NOISE_DRAWS / len(ids_N))
    moved_NH = _within_rounding(np.tile(final_NH, (draws, 1)))
    moved_N = head.token_logprobs(moved_NH, np.tile(ids_N, draws), temperature=temperature)
    return float(np.mean(np.abs(moved_N.astype(np.float64) - np.tile(logprobs_N, draws))))


def _within_rounding(values: Float32) -> Float32:
    """``values`` moved by an independent uniform fraction of half a bfloat16 unit in the last place.

    Seeded by a constant: the estimate must not make a verdict irreproducible.
    """
    _, exponent = np.frexp(values)
    half_unit = np.ldexp(np.float32(1.0), exponent - 9)  # 8 significant bits: ulp = 2**(e - 8)
    draw = np.random.default_rng(0).uniform(-1.0, 1.0, size=values.shape).astype(np.float32)
    moved: Float32 = values + half_unit * draw
    return moved
