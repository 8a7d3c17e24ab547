"""Intervals by bootstrap over rollout groups, of a ratio of sums.

Rounds of one prompt are not independent, so whole groups are drawn. tau = 1 + sum(accepted) /
sum(rounds) over the drawn groups. With fewer than two groups nothing is known about the spread,
and the interval is as wide as the quantity allows.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.artifact import Interval

RESAMPLES = 2000
_CHUNK = 250
_TAIL = 2.5
"""Percent cut off at each end: a 95 % interval."""

Counts = NDArray[np.integer[Any]]


def bootstrap_tau(
    rounds: Counts, accepted: Counts, *, k: int, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """tau of per-group sums ``rounds`` and ``accepted`` ``[G]``, with its 95 % interval."""
    value = _tau(rounds.sum(), accepted.sum())
    if np.count_nonzero(rounds) < 2:
        return Interval(value=float(value), low=1.0, high=1.0 + k)
    draws = np.concatenate([_tau(w @ rounds, w @ accepted) for w in _weights(len(rounds), seed, resamples)])
    return _interval(float(value), draws)


def paired_gain(
    rounds: Counts,
    accepted: Counts,
    baseline_rounds: Counts,
    baseline_accepted: Counts,
    *,
    k: int,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """tau minus the baseline's tau over the same groups ``[G]``; each draw takes the same groups for both."""
    if not len(rounds) == len(accepted) == len(baseline_rounds) == len(baseline_accepted):
        raise ValueError("a paired bootstrap needs the same groups on both sides")
    value = float(_tau(rounds.sum(), accepted.sum()) - _tau(baseline_rounds.sum(), baseline_accepted.sum()))
    if min(np.count_nonzero(rounds), np.count_nonzero(baseline_rounds)) < 2:
        return Interval(value=value, low=-float(k), high=float(k))
    draws = [
        _tau(w @ rounds, w @ accepted) - _tau(w @ baseline_rounds, w @ baseline_accepted)
        for w in _weights(len(rounds), seed, resamples)
    ]
    return _interval(value, np.concatenate(draws))


def _tau(rounds: Any, accepted: Any) -> NDArray[np.float64]:
    # A draw without any round is no observation; it is left out of the percentiles.
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(1.0 + np.asarray(accepted, np.float64) / np.asarray(rounds, np.float64))


def _weights(groups: int, seed: int, resamples: int) -> Iterator[NDArray[np.int64]]:
    """How often each group is drawn, ``[chunk, G]``."""
    rng = np.random.default_rng(seed)
    for done in range(0, resamples, _CHUNK):
        yield rng.multinomial(groups, np.full(groups, 1.0 / groups), size=min(_CHUNK, resamples - done))


def _interval(value: float, draws: NDArray[np.float64]) -> Interval:
    low, high = np.nanpercentile(draws, [_TAIL, 100 - _TAIL])
    return Interval(value=value, low=float(low), high=float(high))
