"""A toy target's windows and heads, and a lake in memory, for tests of draft training."""

import uuid
from collections.abc import Mapping, Sequence

import numpy as np

from features.heads import HeadSnapshot
from features.lake import Lake
from features.schema import (
    NO_TOKEN,
    FeatureDtype,
    FragmentLayout,
    LakeRevision,
    ReadPlan,
    SelectionFilter,
    TargetIdentity,
    TargetVersion,
)
from features.selection import Selection
from features.testing import register_tiny_version
from features.windows import Window, WindowMeta
from features.writer import write_fragment

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


class ToyLake(Lake):
    """A lake in memory, of windows that a test may still change until it selects them."""

    def __init__(
        self,
        windows: Sequence[Window],
        heads: Mapping[int, HeadSnapshot] | None = None,
        target: TargetIdentity = TARGET,
    ) -> None:
        """``heads`` are those of versions 0 to 2 when none are given."""
        url = f"memory://toy-{uuid.uuid4().hex}"
        super().__init__(Lake.init(url, target).store, target)
        self.windows = list(windows)
        self._selected = 0
        self.heads = dict(heads) if heads is not None else {v: make_head(v) for v in range(3)}
        self._head_ids = {v: register_tiny_version(self, v, head) for v, head in self.heads.items()}

    def has_revision(self, digest: str) -> bool:
        """Whether it is the one that selections of this lake name."""
        return digest == "revision"

    def select(self, wanted: SelectionFilter = SelectionFilter()) -> Selection:  # noqa: B008 - frozen
        """Every window as it is, stored and in the order given, said to be what ``wanted`` asks for."""
        self._selected += 1  # windows changed since are other data, so of another plan
        commits = [self._stored(place, window) for place, window in enumerate(self.windows)]
        return selection_of(self, commits, wanted)

    def _stored(self, place: int, window: Window) -> str:
        done = write_fragment(
            self, version=window.meta.version, head_id=self._head_ids[window.meta.version.number],
            plan_id=f"toy-{self._selected}-{place}", windows=[window], writer_id="training.testing",
        )  # fmt: skip
        return done.commit_path


def selection_of(
    lake: Lake,
    commit_paths: Sequence[str],
    wanted: SelectionFilter = SelectionFilter(),  # noqa: B008 - frozen
) -> Selection:
    """Every window of some commits, said to be what ``wanted`` asks for; needs no catalog."""
    rows = [row for path in commit_paths for row in lake.read_commit(path).to_pylist()]
    plan = ReadPlan(
        windows=len(rows),
        tokens=sum(row["num_rows"] for row in rows),
        nbytes=sum(row["nbytes"] for row in rows),
        versions=tuple(sorted({row["target_version"] for row in rows})),
        heads_missing=(),
    )
    return Selection(wanted, LakeRevision("revision", len(commit_paths)), rows, plan, "toy windows")
