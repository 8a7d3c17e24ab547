"""Value types and Arrow schemas: the words of the lake.

Nothing here reads or writes. Every type is frozen and printable.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

import pyarrow as pa

FORMAT_VERSION = 1
"""Version of the on-disk contract, written to ``lake.json`` and every commit row."""

HeadId = NewType("HeadId", str)
"""Digest of a head snapshot's decoded tensors (64 hex digits)."""

NO_TOKEN = -1
"""In memory, the token one past a window's rows when the sequence ends there (null on disk)."""

MAX_VERSION = 2**63 - 1
"""Largest number of a target version: what a column of 64-bit integers holds."""


@dataclass(frozen=True, slots=True, order=True)
class TargetVersion:
    """Monotonic id of the target weights that produced a feature; 0 is the initial model.

    Raises:
        ValueError: the number is negative, or larger than the lake's columns hold.
    """

    number: int

    def __post_init__(self) -> None:
        if not 0 <= self.number <= MAX_VERSION:
            raise ValueError(f"target version must be in [0, {MAX_VERSION}], got {self.number}")

    def __str__(self) -> str:
        return f"v{self.number:09d}"

    @property
    def folder(self) -> str:
        """The path segment of this version: ``v=000000042``."""
        return f"v={self.number:09d}"


@dataclass(frozen=True, slots=True)
class VersionRange:
    """Half-open range ``[first, stop)`` of target versions; ``stop=None`` is open."""

    first: int = 0
    stop: int | None = None

    def __post_init__(self) -> None:
        if self.first < 0 or (self.stop is not None and self.stop <= self.first):
            raise ValueError(f"version range needs 0 <= first < stop, got [{self.first}, {self.stop})")

    def __contains__(self, version: TargetVersion) -> bool:
        return self.first <= version.number and (self.stop is None or version.number < self.stop)

    def __str__(self) -> str:
        return f"[{self.first}, {'...' if self.stop is None else self.stop})"


class FeatureDtype(StrEnum):
    """Element type of stored features and heads. bfloat16 is held as raw ``uint16`` bits."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"

    @property
    def itemsize(self) -> int:
        return 2 if self is FeatureDtype.BFLOAT16 else 4

    @property
    def numpy_name(self) -> str:
        """The numpy dtype that carries the raw bytes."""
        return "uint16" if self is FeatureDtype.BFLOAT16 else "float32"


class AuxCodec(StrEnum):
    """How a fragment's aux features are stored; the final hidden state is always stored as it is."""

    NONE = "none"
    """Raw little-endian elements."""
    INT8 = "int8-whitened-128"
    """One byte per element (``features.aux_codec``), with an error that the commit states per window."""


class Split(StrEnum):
    """Which rollout groups a selection takes. The split is by group, never by window."""

    ALL = "all"
    TRAIN = "train"
    HELD_OUT = "held_out"


class Verification(StrEnum):
    """Outcome of the logprob-agreement proof of one window."""

    VERIFIED = "verified"
    UNVERIFIED = "unverified"


@dataclass(frozen=True, slots=True)
class TargetIdentity:
    """What must stay equal over all versions of one target."""

    target_id: str
    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    """Rows of the embedding and the LM head, padding included."""
    tokenizer_digest: str
    config_digest: str


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """``version.json``: one version of the target and the head that belongs to it."""

    version: TargetVersion
    target_id: str
    config_digest: str
    tokenizer_digest: str
    hidden_size: int
    vocab_size: int
    head_id: HeadId
    weights_digest: str | None
    """Digest of the target's weights when the collector saw a checkpoint; None for a live module."""


@dataclass(frozen=True, slots=True)
class FragmentLayout:
    """What belongs to a fragment rather than to a window or to the lake."""

    layer_ids: tuple[int, ...]
    """Aux layer ids, ascending: number of decoder blocks applied (0 = embedding output)."""
    dtype: FeatureDtype
    hidden_size: int

    def __post_init__(self) -> None:
        if not self.layer_ids or list(self.layer_ids) != sorted(set(self.layer_ids)):
            raise ValueError(f"layer ids must be ascending and distinct, got {self.layer_ids}")

    @property
    def aux_width(self) -> int:
        """Elements per aux row: ``len(layer_ids) * hidden_size``."""
        return len(self.layer_ids) * self.hidden_size

    @property
    def row_bytes(self) -> int:
        """Bytes of one feature row, aux and final, as elements of ``dtype``."""
        return (self.aux_width + self.hidden_size) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LakeRevision:
    """An immutable set of fragments, named by the digest of their sorted commit paths."""

    digest: str
    num_fragments: int

    def __str__(self) -> str:
        return self.digest


@dataclass(frozen=True, slots=True)
class SelectionFilter:
    """What a selection asks for; resolving it against a revision gives an exact window list."""

    versions: VersionRange = VersionRange()
    split: Split = Split.ALL
    held_out_percent: int = 20
    """Share of rollout groups (by hash) that are never trained on, at any version."""
    domains: tuple[str, ...] = ()
    """Empty: every domain."""
    verified_only: bool = False
    whole_sequences_only: bool = False
    """Only windows that start at position 0 and reach the sequence's end (tau needs them)."""
    max_windows: int | None = None
    """Keep at most so many, the same ones every time (by digest of sample id)."""
    samples: tuple[str, ...] = ()
    """Sample ids; empty: every one."""
    groups: tuple[str, ...] = ()
    """Group ids; empty: every one."""
    writers: tuple[str, ...] = ()
    """Writer ids; empty: every one."""
    newest_versions: int | None = None
    """Only windows of so many of the newest versions that the revision holds."""
    min_reward: float | None = None
    """Inclusive, as each bound below; a window without the value is left out where a bound is set."""
    max_reward: float | None = None
    min_acceptance_length: float | None = None
    max_acceptance_length: float | None = None
    min_acceptance_rate: float | None = None
    max_acceptance_rate: float | None = None
    min_tokens: int | None = None
    """Rows of a window."""
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.held_out_percent <= 90:
            raise ValueError(f"held_out_percent must be in [0, 90], got {self.held_out_percent}")
        if self.newest_versions is not None and self.newest_versions < 1:
            raise ValueError(f"newest_versions must be at least 1, got {self.newest_versions}")


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What a training run would read, known before any hidden state is fetched."""

    windows: int
    tokens: int
    nbytes: int
    versions: tuple[int, ...]
    heads_missing: tuple[int, ...]
    """Versions in the selection whose head snapshot is absent."""
    heads_present: tuple[int, ...] = ()
    """The other versions."""
    fragments: int = 0
    requests: int = 0
    """Storage requests to read every window once, neighbours not coalesced: two per window, three per fragment."""

    def summary(self) -> str:
        """One line for people."""
        span = f"v{self.versions[0]}..v{self.versions[-1]}" if self.versions else "no version"
        missing = f", heads missing for {list(self.heads_missing)}" if self.heads_missing else ""
        return f"{self.windows:,} windows, {self.tokens:,} tokens, {self.nbytes / 2**20:.1f} MiB, {span}{missing}"


_NULLABLE = {
    "reward", "domain", "temperature", "top_p", "top_k", "acceptance_length", "acceptance_rate",
    "logprob_kind", "logprob_max_error", "logprob_mean_error", "logprob_tokens", "finish",
    "sampling", "aux_error",
}  # fmt: skip


def _field(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=name in _NULLABLE)


COMMIT_SCHEMA = pa.schema(
    [
        _field("schema_version", pa.int16()),
        _field("target_id", pa.string()),
        _field("target_version", pa.int64()),
        _field("head_id", pa.string()),
        _field("plan_id", pa.string()),
        _field("attempt", pa.int32()),
        _field("write_uuid", pa.string()),
        _field("writer_id", pa.string()),
        _field("data_prefix", pa.string()),
        _field("window_index", pa.int32()),
        _field("sample_id", pa.string()),
        _field("group_id", pa.string()),
        _field("start", pa.int32()),
        _field("num_rows", pa.int32()),
        _field("sequence_length", pa.int32()),
        _field("prompt_length", pa.int32()),
        _field("num_sampled", pa.int32()),
        _field("row_offset", pa.int64()),
        _field("layer_ids", pa.list_(pa.int32())),
        _field("dtype", pa.string()),
        _field("hidden_size", pa.int32()),
        _field("codec", pa.string()),
        _field("nbytes", pa.int64()),
        _field("crc32c_aux", pa.uint32()),
        _field("crc32c_final", pa.uint32()),
        _field("crc32c_tokens", pa.uint32()),
        _field("verification", pa.string()),
        _field("logprob_kind", pa.string()),
        _field("logprob_tokens", pa.int32()),
        _field("logprob_mean_error", pa.float32()),
        _field("logprob_max_error", pa.float32()),
        _field("reward", pa.float32()),
        _field("acceptance_length", pa.float32()),
        _field("acceptance_rate", pa.float32()),
        _field("domain", pa.string()),
        _field("temperature", pa.float32()),
        _field("top_p", pa.float32()),
        _field("top_k", pa.int32()),
        _field("finish", pa.string()),
        _field("sampling", pa.string()),
        _field("aux_error", pa.float32()),
    ]
)
"""One row per window in a commit: everything a reader needs without opening the data."""

TOKENS_SCHEMA = pa.schema(
    [
        pa.field("window_index", pa.int32(), nullable=False),
        pa.field("start", pa.int32(), nullable=False),
        pa.field("token_ids", pa.list_(pa.field("item", pa.int32())), nullable=False),
        pa.field("sampled_mask", pa.list_(pa.field("item", pa.bool_())), nullable=False),
        pa.field("loss_mask", pa.list_(pa.field("item", pa.bool_()))),
        pa.field("logprobs", pa.list_(pa.field("item", pa.float32())), nullable=False),
    ]
)
"""``tokens.arrow``: one row per window; every list has ``num_rows + 1`` entries (start..stop inclusive)."""
