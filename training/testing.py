"""A toy target's windows and heads, and a lake in memory, for tests of draft training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from features.heads import HeadSnapshot
from features.schema import (
    NO_TOKEN,
    FeatureDtype,
    FragmentLayout,
    SelectionFilter,
    TargetIdentity,
    TargetVersion,
)
from features.windows import Window, WindowMeta

HIDDEN, VOCAB, LAYERS = 16, 40, (1, 2, 3)
TARGET_CONFIG = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 24,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 256,
}  # fmt: skip
TARGET = TargetIdentity("toy", "LlamaForCausalLM", HIDDEN, 6, VOCAB, "tok", "cfg")


def make_head(
    version: int = 0, *, vocab: int = VOCAB, hidden: int = HIDDEN, tied: bool = True
) -> HeadSnapshot:
    """A random float32 head, another one for each version."""
    rng = np.random.default_rng(1000 + version)
    lm_head = rng.standard_normal((vocab, hidden)).astype(np.float32)
    embed = None if tied else rng.standard_normal((vocab, hidden)).astype(np.float32)
    return HeadSnapshot(lm_head=lm_head, dtype=FeatureDtype.FLOAT32, embed_tokens=embed)


def make_window(
    name: str = "s0",
    *,
    length: int = 12,
    prompt: int = 4,
    version: int = 0,
    start: int = 0,
    stop: int | None = None,
    seed: int = 0,
    group: str | None = None,
    temperature: float | None = 1.0,
    domain: str | None = None,
    layers: tuple[int, ...] = LAYERS,
    tokens: Sequence[int] | None = None,
    predictable: bool = False,
) -> Window:
    """A window of rows ``[start, stop)``; with ``predictable`` the final states decide the next token."""
    rng = np.random.default_rng([seed, version])
    ids = np.array(tokens if tokens is not None else rng.integers(0, VOCAB, length), np.int32)
    length = len(ids)
    stop = length if stop is None else stop
    aux = rng.standard_normal((length, len(layers) * HIDDEN)).astype(np.float32)
    final = rng.standard_normal((length, HIDDEN)).astype(np.float32)
    if predictable:
        head = make_head(version)
        final[:-1] = 1.5 * head.lm_head[ids[1:]]
        for place in range(len(layers)):
            aux[:, place * HIDDEN : (place + 1) * HIDDEN] = final
    extended = np.concatenate([ids, [NO_TOKEN]]).astype(np.int32)
    sampled = np.zeros(length + 1, np.bool_)
    sampled[prompt:length] = True
    meta = WindowMeta(
        sample_id=name, group_id=group or name, version=TargetVersion(version), start=start,
        sequence_length=length, prompt_length=prompt, temperature=temperature, domain=domain,
    )  # fmt: skip
    return Window(
        meta=meta,
        layout=FragmentLayout(layers, FeatureDtype.FLOAT32, HIDDEN),
        token_ids=extended[start : stop + 1],
        sampled_mask=sampled[start : stop + 1],
        loss_mask=None,
        logprobs=np.full(stop - start + 1, np.nan, np.float32),
        aux=aux[start:stop],
        final=final[start:stop],
    )


@dataclass
class FakeLake:
    """The parts of a lake that training reads."""

    windows: list[Window]
    heads: Mapping[int, HeadSnapshot] = field(default_factory=lambda: {v: make_head(v) for v in range(3)})
    target: TargetIdentity = TARGET

    def read_window(self, row: Mapping[str, Any]) -> Window:
        """As ``Lake.read_window``."""
        return self.windows[int(row["window_index"])]

    def read_tokens(self, row: Mapping[str, Any]) -> Any:
        """As ``Lake.read_tokens``: a window has the same arrays as a row of a token table."""
        return self.windows[int(row["window_index"])]

    def has_revision(self, digest: str) -> bool:
        """As ``Lake.has_revision``."""
        return digest == "revision"

    def head_of(self, version: TargetVersion) -> HeadSnapshot:
        """As ``Lake.head_of``."""
        return self.heads[version.number]

    def select(self, wanted: SelectionFilter = SelectionFilter()) -> Any:  # noqa: B008 - frozen
        """Every window, in the order given, said to be what ``wanted`` asks for."""
        rows = [_row(i, w) for i, w in enumerate(self.windows)]
        return SimpleNamespace(
            rows=rows,
            filter=wanted,
            digest="selection",
            revision=SimpleNamespace(digest="revision"),
            require_nonempty=lambda: None,
        )


def _row(place: int, window: Window) -> dict[str, Any]:
    meta = window.meta
    return {
        "window_index": place, "data_prefix": "data", "sample_id": meta.sample_id, "group_id": meta.group_id,
        "target_version": meta.version.number, "start": meta.start, "num_rows": window.num_rows,
        "sequence_length": meta.sequence_length, "num_sampled": int(window.sampled_mask.sum()),
        "layer_ids": list(window.layout.layer_ids), "temperature": meta.temperature, "domain": meta.domain,
    }  # fmt: skip
