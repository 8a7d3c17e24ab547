"""Rollouts in memory and on disk: token ids as the engine saw and sampled them.

The file is JSON lines, one rollout per line, keys equal to the field names of
:class:`Rollout` plus ``"format": "draftlake-rollout-1"`` (may be left out, must be right when
there). Types are explicit and nothing is converted: a line that does not fit becomes a
:class:`~features.quarantine.Refusal` with its number, and the lines around it are read.
"""

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from features.errors import InputError
from features.quarantine import Refusal

log = logging.getLogger(__name__)
T = TypeVar("T")

ROLLOUT_FORMAT = "draftlake-rollout-1"
"""Value of the optional ``format`` key of a line."""

LOGPROB_KINDS = ("engine_raw", "engine_processed", "engine_unknown")
"""``raw`` is temperature-free; ``processed`` includes temperature, top-k and top-p."""

_BOM = b"\xef\xbb\xbf"
MISSING_LOGPROB = -9999.0
"""vLLM's spelling of "no logprob"; nothing at or below it is a value."""
_MAX_LOGPROB = 1e-3
"""A logprob is <= 0; engines overshoot by rounding only."""


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
    VERSION_MISMATCH = "version_mismatch"
    SAMPLE_CONFLICT = "sample_conflict"
    TOO_LONG = "too_long"
    FEATURE_SHAPE = "feature_shape"
    NONFINITE_FEATURES = "nonfinite_features"
    ZERO_FEATURES = "zero_features"
    LOGPROB_DISAGREEMENT = "logprob_disagreement"


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
        return {"format": ROLLOUT_FORMAT} | {f.name: _jsonable(getattr(self, f.name)) for f in fields(self)}


@dataclass(slots=True)
class ReadCounts:
    """What a pass over a file saw; ``rollouts + refused + blank == lines``."""

    lines: int = 0
    rollouts: int = 0
    refused: int = 0
    blank: int = 0
    nbytes: int = 0
    """Bytes of all lines, line ends included: the size of the file after a whole pass."""


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
    if not 0 <= rollout.prompt_length <= length:
        return Reason.LENGTH_MISMATCH, f"prompt_length {rollout.prompt_length} is outside [0, {length}]"
    masks = {"sampled_mask": rollout.sampled_mask, "loss_mask": rollout.loss_mask}
    for name, mask in masks.items():
        if mask is not None and len(mask) != length:
            return Reason.LENGTH_MISMATCH, f"{name} has {len(mask)} entries for {length} token ids"
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
    return None


def read_rollouts(path: str | Path, counts: ReadCounts | None = None) -> Iterator[Rollout | Refusal]:
    """Read a rollout file line by line; a bad line is yielded as a refusal, never raised.

    Only ``\\n`` ends a line (U+2028 may stand inside a string); a byte-order mark, CRLF and
    blank lines are tolerated.

    Raises:
        InputError: there is no such file.
    """
    path = Path(path)
    counts = ReadCounts() if counts is None else counts
    if not path.is_file():
        raise InputError(
            f"no rollout file at {str(path)!r}: expected JSON lines in the "
            f"{ROLLOUT_FORMAT!r} format. Check the path."
        )
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            counts.lines += 1
            counts.nbytes += len(raw)
            line = (raw.removeprefix(_BOM) if number == 1 else raw).rstrip(b"\r\n")
            if not line.strip():
                counts.blank += 1
                continue
            item = _parse_line(line, source=str(path), number=number)
            if isinstance(item, Refusal):
                counts.refused += 1
            else:
                counts.rollouts += 1
            yield item


def write_rollouts(path: str | Path, rollouts: Iterable[Rollout]) -> int:
    """Write rollouts as JSON lines, whole or not at all; returns how many.

    Raises:
        ValueError: a rollout's parts do not fit each other.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    count = 0
    try:
        with partial.open("w", encoding="utf-8", newline="\n") as file:
            for rollout in rollouts:
                problem = rollout_problem(rollout)
                if problem is not None:
                    raise ValueError(f"rollout {rollout.sample_id!r} cannot be written: {problem[1]}")
                file.write(json.dumps(rollout.to_json_dict(), allow_nan=False) + "\n")
                count += 1
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return count


class _FieldError(ValueError):
    """One field of a line has the wrong type."""


def _parse_line(line: bytes, *, source: str, number: int) -> Rollout | Refusal:
    def refuse(reason: Reason, detail: str, sample: dict[str, Any] | None = None) -> Refusal:
        return Refusal(source=source, line=number, reason=str(reason), detail=detail, sample=sample)

    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return refuse(Reason.BAD_ENCODING, f"not UTF-8 at byte {error.start}")
    try:
        record = json.loads(text, object_pairs_hook=_object_without_repeats)
    except (ValueError, RecursionError) as error:
        return refuse(Reason.BAD_JSON, f"{len(line)} bytes are not one JSON object: {error}")
    if not isinstance(record, dict):
        return refuse(Reason.BAD_JSON, f"expected an object, found {type(record).__name__}")
    try:
        rollout = _from_record(record)
    except _FieldError as error:
        return refuse(Reason.BAD_FIELD, str(error), _identity_of(record))
    problem = rollout_problem(rollout)
    if problem is not None:
        return refuse(problem[0], problem[1], _identity_of(record))
    return rollout


def _identity_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """What lets a person find the sample again, without its token lists."""
    return {
        k: record[k] for k in ("sample_id", "group_id", "version") if isinstance(record.get(k), str | int)
    }


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("a key is given twice")
    return record


def _from_record(record: dict[str, Any]) -> Rollout:
    declared = record.pop("format", ROLLOUT_FORMAT)
    if declared != ROLLOUT_FORMAT:
        raise _FieldError(f"format is {declared!r}, expected {ROLLOUT_FORMAT!r}")
    unknown = sorted(set(record) - set(_PARSERS))
    if unknown:
        raise _FieldError(f"unknown field {unknown[0]!r}; known are {', '.join(_PARSERS)}")
    absent = sorted(_REQUIRED - {k for k, v in record.items() if v is not None})
    if absent:
        raise _FieldError(f"field {absent[0]!r} is missing or null")
    values = {name: _PARSERS[name](name, value) for name, value in record.items() if value is not None}
    return Rollout(**values)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _FieldError(f"{name} must be a string, found {type(value).__name__}")
    if not value.isascii() and any(0xD800 <= ord(c) < 0xE000 for c in value):
        raise _FieldError(f"{name} holds half of a surrogate pair")
    return value


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _FieldError(f"{name} must be an integer >= 0, found {value!r:.40}")
    return value


def _top_k(name: str, value: object) -> int:
    return -1 if value == -1 and not isinstance(value, bool) else _count(name, value)


def _number(name: str, value: object) -> float | None:
    """A float; NaN and infinity, which Python's writers emit for "unknown", become None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _FieldError(f"{name} must be a number, found {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        raise _FieldError(f"{name} is too large for a float") from None
    return number if math.isfinite(number) else None


def _list_of(name: str, value: object, parse: Callable[[str, object], T]) -> tuple[T, ...]:
    if not isinstance(value, list):
        raise _FieldError(f"{name} must be a list, found {type(value).__name__}")
    return tuple(parse(f"{name}[{i}]", item) for i, item in enumerate(value))


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _FieldError(f"{name} must be true or false, found {value!r:.40}")
    return value


def _logprob(name: str, value: object) -> float | None:
    return None if value is None else logprob_value(_number(name, value))


def _kind(name: str, value: object) -> str:
    if value not in LOGPROB_KINDS:
        raise _FieldError(f"{name} must be one of {', '.join(LOGPROB_KINDS)}, found {value!r:.40}")
    return str(value)


_PARSERS: Mapping[str, Callable[[str, object], Any]] = {
    "sample_id": _text,
    "group_id": _text,
    "token_ids": lambda name, value: _list_of(name, value, _count),
    "prompt_length": _count,
    "sampled_mask": lambda name, value: _list_of(name, value, _flag),
    "loss_mask": lambda name, value: _list_of(name, value, _flag),
    "logprobs": lambda name, value: _list_of(name, value, _logprob),
    "logprob_kind": _kind,
    "version": _count,
    "version_label": _text,
    "temperature": _number,
    "top_p": _number,
    "top_k": _top_k,
    "reward": _number,
    "domain": _text,
    "finish": _text,
    "acceptance_length": _number,
    "acceptance_rate": _number,
}
_REQUIRED = {f.name for f in fields(Rollout) if f.default is MISSING}


def _jsonable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return [_jsonable(item) for item in value] if isinstance(value, tuple) else value
