"""Were the tokens sampled from these weights at the recorded temperature? A cheap third proof.

A token drawn from a distribution p has the expected logprob ``sum(p log p)``. Over many tokens the
sum of ``log p(token)`` less its expectation, over its standard deviation, is a standard normal
number z. It needs no recorded logprob, so it also speaks where an engine kept none; and it sees what
logprob agreement cannot: a temperature that was recorded wrongly, or tokens that were edited later.
"""

# Shape legend: N = tokens, H = hidden size, V = vocabulary.

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from features.bfloat16 import Float32
from features.collect.rollout import Rollout
from features.heads import HeadSnapshot

Z_LIMIT = 6.0
"""A larger |z| does not come from chance: 2e-9 for a standard normal number."""
ENOUGH_TOKENS = 300
"""Below it a sum of logprobs is too skewed for a limit that is meant for a normal number."""
MAX_TOKENS_TESTED = 1024
"""Tokens per partition: a head costs ``2 * N * H * V`` operations."""
_BLOCK_LOGITS = 2**22
"""Logits held at a time."""


@dataclass(frozen=True, slots=True)
class SamplingEvidence:
    """Sums over tokens; of several partitions they add up."""

    tokens: int = 0
    deviation: float = 0.0
    """Logprobs of the tokens less the expected ones, in nats."""
    variance: float = 0.0
    """Variance of that sum under the distributions the tokens are said to come from."""

    def __add__(self, other: "SamplingEvidence") -> "SamplingEvidence":
        return SamplingEvidence(
            self.tokens + other.tokens, self.deviation + other.deviation, self.variance + other.variance
        )

    @property
    def z(self) -> float | None:
        """Standard score of the deviation; None without any doubt about which token would come."""
        return self.deviation / math.sqrt(self.variance) if self.variance > 0 else None

    @property
    def suspicious(self) -> bool:
        """Whether so many tokens deviate so far that they were not sampled as recorded."""
        return self.tokens >= ENOUGH_TOKENS and self.z is not None and abs(self.z) > Z_LIMIT


def sampling_evidence(
    rollout: Rollout, final: Float32, head: HeadSnapshot, *, max_tokens: int = MAX_TOKENS_TESTED
) -> SamplingEvidence:
    """Evidence of a rollout's first sampled tokens; ``final`` is ``[T, H]``, one row per token.

    None of it without a temperature above 0, and where top-p or top-k cut the distribution or may
    have: the token's distribution is then not the head's.
    """
    rows = [i - 1 for i, sampled in enumerate(rollout.sampled_mask) if sampled and i > 0][:max_tokens]
    if not rows or not _plainly_sampled(rollout):
        return SamplingEvidence()
    assert rollout.temperature is not None
    block, total = max(1, _BLOCK_LOGITS // head.vocab_size), SamplingEvidence()
    for first in range(0, len(rows), block):
        rows_N = np.array(rows[first : first + block])
        scaled_NV = head.logits(final[rows_N]).astype(np.float64) / rollout.temperature
        total += _evidence(scaled_NV, np.array(rollout.token_ids)[rows_N + 1])
    return total


def _plainly_sampled(rollout: Rollout) -> bool:
    warm = rollout.temperature is not None and rollout.temperature > 0
    return warm and rollout.top_p == 1.0 and rollout.top_k in (None, 0, -1)


def _evidence(scaled_NV: NDArray[np.float64], ids_N: NDArray[np.int64]) -> SamplingEvidence:
    shifted_NV = scaled_NV - scaled_NV.max(axis=1, keepdims=True)
    logp_NV = shifted_NV - np.log(np.exp(shifted_NV).sum(axis=1, keepdims=True))
    p_NV = np.exp(logp_NV)
    expected_N = (p_NV * logp_NV).sum(axis=1)
    variance_N = (p_NV * logp_NV**2).sum(axis=1) - expected_N**2
    found_N = logp_NV[np.arange(len(ids_N)), ids_N]
    return SamplingEvidence(
        len(ids_N), float((found_N - expected_N).sum()), float(np.clip(variance_N, 0, None).sum())
    )
