"""The acceptance walk: a draft's proposals against stored tokens, counted as vLLM counts.

A request whose first decoded token has index f is prefilled over rows 0..f-1. Prefill yields
token f, and the draft at once reads rows 0..f-1 with the tokens that follow them: the first
round starts from row f-1 and proposes tokens f+1..f+K. The target accepts the longest prefix
(a tokens) and adds one of its own, so that the newest token is f+a+1 and the next round starts
from row f+a. ``spec_decode_num_drafts`` counts rounds, ``..._num_accepted_tokens`` sums a.

The round that reaches the request's last token is left out, on this side and on the engine's:
vLLM counts what it accepted past the stop before it trims, and the stored tokens end there.

Along tokens that the target sampled, a proposal made by argmax is accepted exactly when it equals
the stored token: with x ~ p, P(x = d) = p(d), which is the acceptance of a one-hot draft under
rejection sampling, and a rejection resamples from p without d. So one walk serves greedy and
sampled rollouts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Round:
    """One drafting round."""

    newest: int
    """Index of the newest token when it started."""
    accepted: int


@dataclass(frozen=True, slots=True)
class WalkCounts:
    """Sums over rounds, as an engine's counters report them."""

    rounds: int
    accepted: int
    per_position: tuple[int, ...]
    """Rounds that accepted the draft token at position i (0-based), length K."""

    @classmethod
    def of(cls, rounds: Sequence[Round], k: int) -> "WalkCounts":
        """Total a list of rounds."""
        accepted = [r.accepted for r in rounds]
        return cls(len(accepted), sum(accepted), tuple(sum(a > i for a in accepted) for i in range(k)))


def decoded_spans(sampled_mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Maximal runs of sampled tokens as inclusive ``(first, last)`` indices.

    Each run is one request: what stands before it was prefilled, as a prompt or a tool's answer.
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], sampled_mask, [False]]).astype(np.int8)))
    return [(int(first), int(stop) - 1) for first, stop in zip(edges[::2], edges[1::2], strict=True)]


def walk(
    token_ids: NDArray[np.integer[Any]],
    proposals: NDArray[np.integer[Any]],
    *,
    first: int,
    last: int,
    k: int,
) -> list[Round]:
    """Rounds of one request, without the one that reaches its last token.

    Args:
        token_ids: all tokens of the sequence, ``[T]``.
        proposals: row p holds the draft's tokens for positions ``p + 2 ... p + 1 + k``, ``[>= T - 1, >= k]``.
        first: index of the first decoded token, at least 1.
        last: index of the request's last token.
    """
    if not 1 <= first <= last < len(token_ids):
        raise ValueError(
            f"a request needs 1 <= first <= last < {len(token_ids)}, got first {first}, last {last}"
        )
    rounds, newest = [], first
    while newest < last:
        following = token_ids[newest + 1 : min(newest + k, last) + 1]
        agree = proposals[newest - 1, : len(following)] == following
        accepted = int(np.argmin(agree)) if not agree.all() else len(following)
        if newest + accepted + 1 >= last:
            break
        rounds.append(Round(newest, accepted))
        newest += accepted + 1
    return rounds
