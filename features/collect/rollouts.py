"""Rollouts on disk: token ids as the engine saw and sampled them.

The file is JSON lines, one rollout per line, keys equal to the field names of
:class:`~features.collect.rollout.Rollout` plus ``"format": "draftlake-rollout-1"`` (may be left out, must be right when
there). Types are explicit and nothing is converted: a line that does not fit becomes a
:class:`~features.quarantine.Refusal` with its number, and the lines around it are read.
"""

import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from features.collect.rollout import (
    LOGPROB_KINDS,
    MISSING_LOGPROB,
    ROLLOUT_FORMAT,
    TOKEN_SOURCES,
    VERSION_SOURCES,
    Reason,
    Rollout,
    VersionSpan,
    logprob_value,
    rollout_problem,
)
from features.errors import InputError
from features.quarantine import Refusal

log = logging.getLogger(__name__)
T = TypeVar("T")

__all__ = [
    "LOGPROB_KINDS", "MISSING_LOGPROB", "ROLLOUT_FORMAT", "ReadCounts", "Reason", "RecordError", "Rollout",
    "decode_object", "logprob_value", "read_rollouts", "rollout_from_record", "rollout_problem",
    "write_rollouts",
]  # fmt: skip

_BOM = b"\xef\xbb\xbf"


@dataclass(slots=True)
class ReadCounts:
    """What a pass over a file saw; ``rollouts + refused + blank == lines``."""

    lines: int = 0
    rollouts: int = 0
    refused: int = 0
    blank: int = 0
    nbytes: int = 0
    """Bytes of all lines, line ends included: the size of the file after a whole pass."""


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


class RecordError(ValueError):
    """One record cannot be taken, for a reason that is counted."""

    def __init__(self, reason: Reason, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(detail)


def decode_object(line: bytes) -> dict[str, Any]:
    """The JSON object of one line; bare NaN and Infinity are taken.

    Raises:
        RecordError: it is not UTF-8, not one JSON object, or names a key twice.
    """
    try:
        record = json.loads(line.decode("utf-8"), object_pairs_hook=_object_without_repeats)
    except UnicodeDecodeError as error:
        raise RecordError(Reason.BAD_ENCODING, f"not UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        detail = f"{len(line)} bytes are not one JSON object: {error}"
        raise RecordError(Reason.BAD_JSON, detail) from None
    if not isinstance(record, dict):
        raise RecordError(Reason.BAD_JSON, f"expected an object, found {type(record).__name__}")
    return record


def _parse_line(line: bytes, *, source: str, number: int) -> Rollout | Refusal:
    record: dict[str, Any] = {}
    try:
        record = decode_object(line)
        rollout = rollout_from_record(record)
        problem = rollout_problem(rollout)
        if problem is None:
            return rollout
    except RecordError as error:
        problem = error.reason, error.detail
    return Refusal(
        source=source, line=number, reason=str(problem[0]), detail=problem[1], sample=identity_of(record)
    )


def identity_of(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """What lets a person find the sample again, without its token lists."""
    names = ("sample_id", "group_id", "version")
    return {k: record[k] for k in names if isinstance(record.get(k), str | int)} if record else None


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("a key is given twice")
    return record


def rollout_from_record(record: Mapping[str, Any]) -> Rollout:
    """The rollout of a decoded line; its parts are typed, and not yet held against each other.

    Raises:
        RecordError: a field is unknown, missing or of the wrong type.
    """
    declared = record.get("format", ROLLOUT_FORMAT)
    if declared != ROLLOUT_FORMAT:
        raise _FieldError(f"format is {declared!r}, expected {ROLLOUT_FORMAT!r}")
    given = {name: value for name, value in record.items() if name != "format"}
    unknown = sorted(set(given) - set(_PARSERS))
    if unknown:
        raise _FieldError(f"unknown field {unknown[0]!r}; known are {', '.join(_PARSERS)}")
    absent = sorted(_REQUIRED - {k for k, v in given.items() if v is not None})
    if absent:
        raise _FieldError(f"field {absent[0]!r} is missing or null")
    values = {name: _PARSERS[name](name, value) for name, value in given.items() if value is not None}
    return Rollout(**values)


class _FieldError(RecordError):
    """One field of a line has the wrong type."""

    def __init__(self, detail: str) -> None:
        super().__init__(Reason.BAD_FIELD, detail)


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


def _one_of(*known: str) -> Callable[[str, object], str]:
    def parse(name: str, value: object) -> str:
        if value not in known:
            raise _FieldError(f"{name} must be one of {', '.join(known)}, found {value!r:.40}")
        return str(value)

    return parse


def _numbers(name: str, value: object) -> tuple[float | None, ...]:
    return _list_of(name, value, lambda n, v: None if v is None else _number(n, v))


def _span(name: str, value: object) -> VersionSpan:
    if not isinstance(value, list) or len(value) != 3:
        raise _FieldError(f"{name} must be [label, start, stop], found {value!r:.40}")
    return VersionSpan(_text(name, value[0]), _count(name, value[1]), _count(name, value[2]))


_PARSERS: Mapping[str, Callable[[str, object], Any]] = {
    "sample_id": _text,
    "group_id": _text,
    "token_ids": lambda name, value: _list_of(name, value, _count),
    "prompt_length": _count,
    "sampled_mask": lambda name, value: _list_of(name, value, _flag),
    "loss_mask": lambda name, value: _list_of(name, value, _flag),
    "logprobs": lambda name, value: _list_of(name, value, _logprob),
    "logprob_kind": _one_of(*LOGPROB_KINDS),
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
    "version_min": _count,
    "version_max": _count,
    "version_spans": lambda name, value: _list_of(name, value, _span),
    "version_source": _one_of(*VERSION_SOURCES),
    "token_source": _one_of(*TOKEN_SOURCES),
    "trainer_logprobs": _numbers,
    "advantages": _numbers,
    "multimodal": _flag,
    "source": _text,
    "source_file": _text,
    "source_row": _count,
    "branch": _count,
    "row_id": _text,
    "file_step": _count,
    "source_group": _text,
    "session_id": _text,
}
_REQUIRED = {f.name for f in fields(Rollout) if f.default is MISSING}
