"""Taps by name, and rollouts in batches for their forwards.

Loads no deep-learning framework itself: a tap is named by module path and imported on use.
"""

import importlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from features.collect.rollout import Rollout

HF_TAP = "features.collect.taps.hf"
DEFAULT_BATCH_TOKENS = 4096
"""Tokens of one forward, padding included."""


class TapModule(Protocol):
    """What a tap module offers; ``model`` is whatever that tap reads."""

    def forward_features(
        self, model: Any, token_ids: Sequence[Sequence[int]], layer_ids: Sequence[int]
    ) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
        """``(aux [T, m * H], final [T, H])`` of each sequence."""
        ...

    def aux_probe(self, model: Any, layer_ids: Sequence[int], token_ids: Sequence[int]) -> Any:
        """Raise ProofFailedError unless the tap's layer ids mean blocks applied."""
        ...


def open_tap(tap: str) -> TapModule:
    """The tap module of that name."""
    return cast(TapModule, importlib.import_module(tap))


def longest_sequence(model: Any) -> int | None:
    """Positions that the model was built for, or None when its config does not say."""
    config = getattr(model, "config", None)
    return getattr(config, "max_position_embeddings", None)


def batches(rollouts: Iterable[Rollout], batch_tokens: int) -> Iterator[list[Rollout]]:
    """Consecutive rollouts whose padded batch stays within ``batch_tokens``; a longer one goes alone."""
    batch: list[Rollout] = []
    longest = 0
    for rollout in rollouts:
        length = max(longest, len(rollout.token_ids))
        if batch and length * (len(batch) + 1) > batch_tokens:
            yield batch
            batch, length = [], len(rollout.token_ids)
        batch.append(rollout)
        longest = length
    if batch:
        yield batch
