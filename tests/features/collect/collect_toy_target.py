"""A target in plain numpy, and a tap for it: exact logprobs, no framework, no download.

Its hidden states are a fixed mixing of the tokens so far; each version moves the weights a
little. As a module it is a tap for ``collect_rollouts(tap="collect_toy_target")``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.collect.rollouts import Rollout
from features.heads import HeadSnapshot
from features.lake import Lake
from features.schema import FeatureDtype, TargetIdentity, VersionRecord
from features.testing import tiny_record

VOCAB, HIDDEN, LAYERS = 48, 16, 4
IDENTITY = TargetIdentity(
    target_id="toy", architecture="Toy", hidden_size=HIDDEN, num_layers=LAYERS, vocab_size=VOCAB,
    tokenizer_digest="t" * 64, config_digest="c" * 64,
)  # fmt: skip
F32 = NDArray[np.float32]


@dataclass(frozen=True)
class ToyTarget:
    """One version of the target. ``step`` is how far each version moves every weight."""

    version: int = 0
    step: float = 0.3

    @lru_cache(maxsize=256)  # noqa: B019 - frozen, and few
    def _weight(self, name: str, *shape: int) -> F32:
        seed = sum(map(ord, name))
        weight = np.random.default_rng(seed).normal(size=shape)
        for v in range(1, self.version + 1):
            weight = weight + self.step * np.random.default_rng(seed + 1000 * v).normal(size=shape)
        return weight.astype(np.float32)

    @property
    def head(self) -> HeadSnapshot:
        return HeadSnapshot(lm_head=self._weight("lm_head", VOCAB, HIDDEN), dtype=FeatureDtype.FLOAT32)

    @property
    def record(self) -> VersionRecord:
        return tiny_record(self.head.head_id, self.version, target=IDENTITY)

    def stream(self, token_ids: Sequence[int], k: int) -> F32:
        """The residual stream of layer id ``k``, shape [T, H]."""
        state = self._weight("embed", VOCAB, HIDDEN)[list(token_ids)]
        for block in range(k):
            decay = np.cumsum(state, axis=0) / np.arange(1, len(state) + 1)[:, None]
            state = state + np.tanh(decay @ self._weight(f"block{block}", HIDDEN, HIDDEN))
        return state.astype(np.float32)

    def final(self, token_ids: Sequence[int]) -> F32:
        """The LM head's input: the last stream, normalised, shape [T, H]."""
        last = self.stream(token_ids, LAYERS)
        return (last / np.sqrt(np.mean(last**2, axis=-1, keepdims=True))).astype(np.float32)

    def rollout(self, number: int, *, prompt: int = 3, response: int = 12, **changes: Any) -> Rollout:
        """Rollout ``number``, sampled from this version, with the logprobs an engine would record."""
        return replace(self._sampled(number, prompt, response), **changes)

    @lru_cache(maxsize=256)  # noqa: B019 - frozen, and few
    def _sampled(self, number: int, prompt: int, response: int) -> Rollout:
        rng = np.random.default_rng(7_000 + number)
        ids = [int(t) for t in rng.integers(0, VOCAB, prompt)]
        logprobs: list[float | None] = [None] * prompt
        for _ in range(response):
            row = self.head.logits(self.final(ids)[-1:])[0].astype(np.float64)
            log_p = row - np.log(np.exp(row - row.max()).sum()) - row.max()
            ids.append(int(rng.choice(VOCAB, p=np.exp(log_p) / np.exp(log_p).sum())))
            logprobs.append(float(log_p[ids[-1]]))
        return Rollout(
            sample_id=f"s{number}",
            group_id=f"g{number // 2}",
            token_ids=tuple(ids),
            prompt_length=prompt,
            sampled_mask=(False,) * prompt + (True,) * response,
            logprobs=tuple(logprobs),
            logprob_kind="engine_raw",
            version=self.version,
            temperature=1.0,
            top_p=1.0,
            domain="toy",
            finish="length",
        )

    def lake(self, url: str) -> Lake:
        """A lake that knows this version and its head."""
        lake = Lake.init(url, IDENTITY)
        lake.put_head(self.head)
        lake.register_version(self.record)
        return lake


def forward_features(
    model: ToyTarget, token_ids: Sequence[Sequence[int]], layer_ids: Sequence[int]
) -> list[tuple[F32, F32]]:
    """The tap's features of each sequence."""
    return [
        (np.concatenate([model.stream(ids, k) for k in layer_ids], axis=1), model.final(ids))
        for ids in token_ids
    ]


def aux_probe(model: ToyTarget, layer_ids: Sequence[int], token_ids: Sequence[int]) -> str:
    """The toy's rows are right by construction."""
    return "toy"
