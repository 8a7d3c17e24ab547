"""A rollout in memory, and the reasons why one is not taken."""

import hashlib
import json
import math
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

ROLLOUT_FORMAT = "draftlake-rollout-1"
"""Value of the optional ``format`` key of a line."""

LOGPROB_KINDS = ("engine_raw", "engine_processed", "engine_unknown")
"""``raw`` is temperature-free; ``processed`` includes temperature, top-k and top-p."""

VERSION_SOURCES = ("spans", "min_max", "label", "inferred", "user", "unknown")
"""How a version was learned, by falling trust; ``inferred`` is from the step of a synchronous run."""

TOKEN_SOURCES = ("ids", "retokenised")
"""``ids``: as the engine saw them; ``retokenised``: text tokenised again, which need not give the same."""

MISSING_LOGPROB = -9999.0
"""vLLM's spelling of "no logprob"; nothing at or below it is a value."""
_MAX_LOGPROB = 1e-3
"""A logprob is <= 0; engines overshoot by rounding only."""


_MAX_TOKEN_ID = 2**31 - 1
"""What the lake's columns hold, and more than any vocabulary has."""
_FLOAT32 = 3.4028234663852886e38
_RANGES = (
    ("temperature", 0.0, _FLOAT32),
    ("top_p", 0.0, 1.0),
    ("top_k", -1, 2**31 - 1),
    ("reward", -_FLOAT32, _FLOAT32),
    ("acceptance_length", 0.0, _FLOAT32),
    ("acceptance_rate", 0.0, 1.0),
)
"""Smallest and largest value of each number that describes a rollout."""


class Reason(StrEnum):
    """Why a rollout was not taken. Every refusal is counted under exactly one of these."""

    BAD_ENCODING = "bad_encoding"
    BAD_JSON = "bad_json"
    BAD_FIELD = "bad_field"
    LENGTH_MISMATCH = "length_mismatch"
    LOGPROB_MISMATCH = "logprob_mismatch"
    TOKEN_OUT_OF_VOCAB = "token_out_of_vocab"
    NOTHING_SAMPLED = "nothing_sampled"
    VERSION_MISSING = "version_missing"
    VERSION_MIXED = "version_mixed"
    VERSION_MISMATCH = "version_mismatch"
    SAMPLE_CONFLICT = "sample_conflict"
    TOO_LONG = "too_long"
    FEATURE_SHAPE = "feature_shape"
    NONFINITE_FEATURES = "nonfinite_features"
    ZERO_FEATURES = "zero_features"
    LOGPROB_DISAGREEMENT = "logprob_disagreement"
    MULTIMODAL = "multimodal"
    TEXT_ONLY = "text_only"
    TOKEN_IDS_MISSING = "token_ids_missing"
    LINE_TOO_LONG = "line_too_long"
    TRUNCATED_FILE = "truncated_file"
    DAMAGED_FILE = "damaged_file"


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens ``[start, stop)`` of a sequence that weights with one engine label sampled."""

    label: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One sequence, prompt and response. ``None`` is unknown, never a default.

    Every per-token tuple spans the whole sequence; entry ``i`` belongs to token ``i`` itself.
    """

    sample_id: str
    group_id: str
    """The prompt's identity: the train/held-out split is by group."""
    token_ids: tuple[int, ...]
    prompt_length: int
    sampled_mask: tuple[bool, ...]
    """Tokens that the target sampled (not prompt, tool output or appended tokens)."""
    loss_mask: tuple[bool, ...] | None = None
    """Tokens that the RL loss counted."""
    logprobs: tuple[float | None, ...] | None = None
    """The engine's logprob of each token; a None entry has no value."""
    logprob_kind: str | None = None
    version: int | None = None
    """Number of completed policy updates of the weights that sampled this rollout."""
    version_label: str | None = None
    """The engine's own label, kept for reference; never read as a version."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    reward: float | None = None
    domain: str | None = None
    finish: str | None = None
    acceptance_length: float | None = None
    acceptance_rate: float | None = None
    version_min: int | None = None
    """Smallest version that took part, as recorded."""
    version_max: int | None = None
    version_spans: tuple[VersionSpan, ...] | None = None
    """Which weights sampled which tokens, where the engine said so."""
    version_source: str | None = None
    """How ``version`` was learned; one of ``VERSION_SOURCES``."""
    token_source: str | None = None
    """One of ``TOKEN_SOURCES``."""
    trainer_logprobs: tuple[float | None, ...] | None = None
    """The trainer's recomputation; never compared with features."""
    advantages: tuple[float | None, ...] | None = None
    multimodal: bool | None = None
    """True: tokens stand for images or sound, which are not in the record."""
    source: str | None = None
    """Format that it was read from."""
    source_file: str | None = None
    source_row: int | None = None
    """Line or row in the source file, counted from 1."""
    branch: int | None = None
    """Which of several sequences of the row."""
    row_id: str | None = None
    """Digest of (bytes of the source, row, branch)."""
    file_step: int | None = None
    """Step that the file or the record names."""
    source_group: str | None = None
    """The group as the framework numbered it, mostly anew at each step; hence not ``group_id``."""
    session_id: str | None = None

    @property
    def may_verify(self) -> bool:
        """Whether agreeing logprobs make its windows verified: not with text tokenised again, nor
        with a version that only the user named."""
        return self.token_source != "retokenised" and self.version_source != "user"

    @property
    def mixed_versions(self) -> bool:
        """Whether the record names more than one version or label."""
        labels = {span.label for span in self.version_spans or ()}
        bounds = {self.version_min, self.version_max} - {None}
        return len(labels) > 1 or len(bounds) > 1

    @property
    def content_digest(self) -> str:
        """Digest of what may never differ under one sample id: version, group, tokens and masks."""
        parts = [
            self.version,
            self.group_id,
            self.prompt_length,
            self.token_ids,
            self.sampled_mask,
            self.loss_mask,
        ]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def to_json_dict(self) -> dict[str, Any]:
        """The line of this rollout; values that JSON cannot say (NaN) become null."""
        values = {f.name: _jsonable(getattr(self, f.name)) for f in fields(self)}
        kept = {name: v for name, v in values.items() if v is not None or name not in PROVENANCE}
        return {"format": ROLLOUT_FORMAT} | kept


PROVENANCE = (
    "version_min", "version_max", "version_spans", "version_source", "token_source", "trainer_logprobs",
    "advantages", "multimodal", "source", "source_file", "source_row", "branch", "row_id", "file_step",
    "source_group", "session_id",
)  # fmt: skip
"""Fields that a line leaves out when they are unknown."""


def logprob_value(value: float | None) -> float | None:
    """The logprob, or None when it stands for "no value".

    Writers use exactly 0.0 for prompt, tool, pad and appended tokens, vLLM uses -9999.0, and
    NaN or infinity come from reductions over nothing. A true 0.0 costs only one comparison.
    """
    if value is None or not math.isfinite(value) or value == 0.0 or value <= MISSING_LOGPROB:
        return None
    return value


def rollout_problem(rollout: Rollout) -> tuple[Reason, str] | None:
    """The first reason why the parts of ``rollout`` do not fit each other, or None."""
    length = len(rollout.token_ids)
    if length == 0:
        return Reason.LENGTH_MISMATCH, "token_ids is empty"
    if (problem := _value_problem(rollout)) is not None:
        return Reason.BAD_FIELD, problem
    least, largest = min(rollout.token_ids), max(rollout.token_ids)
    if least < 0 or largest > _MAX_TOKEN_ID:
        wrong = least if least < 0 else largest
        return Reason.TOKEN_OUT_OF_VOCAB, f"token id {wrong!r:.40} is outside [0, {_MAX_TOKEN_ID}]"
    if not 0 <= rollout.prompt_length <= length:
        return Reason.LENGTH_MISMATCH, f"prompt_length {rollout.prompt_length} is outside [0, {length}]"
    for name in ("sampled_mask", "loss_mask", "trainer_logprobs", "advantages"):
        values = getattr(rollout, name)
        if values is not None and len(values) != length:
            return Reason.LENGTH_MISMATCH, f"{name} has {len(values)} entries for {length} token ids"
    if any(rollout.sampled_mask[: rollout.prompt_length]):
        return Reason.BAD_FIELD, f"sampled_mask marks a token before prompt_length {rollout.prompt_length}"
    if rollout.logprobs is not None and len(rollout.logprobs) != length:
        found = len(rollout.logprobs)
        return Reason.LOGPROB_MISMATCH, f"logprobs has {found} entries for {length} token ids"
    above = [i for i, v in enumerate(rollout.logprobs or ()) if (logprob_value(v) or 0.0) > _MAX_LOGPROB]
    if above:
        return Reason.LOGPROB_MISMATCH, f"logprob of token {above[0]} is above 0"
    return None


def _value_problem(rollout: Rollout) -> str | None:
    """The first field whose value nothing real can have, or that the lake's columns cannot hold."""
    for name in ("sample_id", "group_id"):
        if not getattr(rollout, name):
            return f"{name} is empty: rollouts without a name cannot be told apart or split by prompt"
    for name, low, high in _RANGES:
        value = getattr(rollout, name)
        if value is not None and not low <= value <= high:  # NaN is in no range
            return f"{name} is {value!r}, expected {low:g} to {high:g}; leave it out when it is unknown"
    return _version_problem(rollout)


def _version_problem(rollout: Rollout) -> str | None:
    """How the version contradicts what the record says about it."""
    if rollout.version is not None and rollout.version_source != "user" and rollout.mixed_versions:
        return f"version is {rollout.version}, but more than one version is recorded; leave it out"
    spans = rollout.version_spans or ()
    edges = [edge for span in spans for edge in (span.start, span.stop)]
    if edges != sorted(edges) or (edges and not 0 <= edges[0] <= edges[-1] <= len(rollout.token_ids)):
        return "version_spans overlap, run backwards or leave the sequence"
    return None


def _jsonable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, VersionSpan):
        return [value.label, value.start, value.stop]
    return [_jsonable(item) for item in value] if isinstance(value, tuple) else value
