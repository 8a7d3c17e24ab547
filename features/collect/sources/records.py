"""Typed fields of a foreign record: nothing is converted, and what does not fit is refused by name."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from features.collect.rollout import Reason
from features.collect.rollouts import RecordError

Record = Mapping[str, Any]


def bad(name: str, expected: str, found: object) -> RecordError:
    """A field of the wrong type or value."""
    return RecordError(Reason.BAD_FIELD, f"{name}: expected {expected}, found {found!r:.60}")


def require_length(name: str, values: Sequence[Any] | None, length: int, *, logprobs: bool = False) -> None:
    """Refuse a list that does not have one entry per token; it is never cut or padded."""
    if values is not None and len(values) != length:
        reason = Reason.LOGPROB_MISMATCH if logprobs else Reason.LENGTH_MISMATCH
        raise RecordError(reason, f"{name} has {len(values)} entries for {length} tokens")


def items(name: str, value: object) -> list[Any]:
    """A JSON list."""
    if not isinstance(value, list | tuple):
        raise bad(name, "a list", value)
    return list(value)


def mapping(name: str, value: object) -> Record:
    """A JSON object."""
    if not isinstance(value, Mapping):
        raise bad(name, "an object", value)
    return value


def token_ids(name: str, value: object, *, remedy: str = "") -> tuple[int, ...]:
    """Token ids, all >= 0; null or absent means that the record does not hold them."""
    if value is None:
        raise RecordError(
            Reason.TOKEN_IDS_MISSING, f"{name} is missing or null{'; ' + remedy if remedy else ''}"
        )
    ids = items(name, value)
    wrong = [v for v in ids if type(v) is not int or v < 0]
    if wrong:
        raise bad(name, "token ids >= 0", wrong[0])
    return tuple(ids)


def mask(name: str, value: object) -> tuple[bool, ...]:
    """A mask of true/false or 0/1 (also 0.0/1.0)."""
    flags = items(name, value)
    wrong = [v for v in flags if v not in (0, 1)]
    if wrong:
        raise bad(name, "a mask of 0 and 1", wrong[0])
    return tuple(bool(v) for v in flags)


def numbers(name: str, value: object) -> tuple[float | None, ...] | None:
    """Floats, null where an entry is null, NaN or infinite; None when there is no list."""
    return (
        None if value is None else tuple(number(f"{name}[{i}]", v) for i, v in enumerate(items(name, value)))
    )


def number(name: str, value: object) -> float | None:
    """A float; null, NaN and infinity are None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad(name, "a number", value)
    try:
        result = float(value)
    except OverflowError:
        raise bad(name, "a number that a float can hold", value) from None
    return result if math.isfinite(result) else None


def integer(name: str, value: object) -> int | None:
    """An integer >= 0, or None when absent."""
    if value is None:
        return None
    if type(value) is not int or value < 0:
        raise bad(name, "an integer >= 0", value)
    return value


def text(name: str, value: object) -> str | None:
    """A string without half surrogate pairs, or None when absent."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise bad(name, "a string", value)
    if not value.isascii() and any(0xD800 <= ord(c) < 0xE000 for c in value):
        raise bad(name, "whole characters", "half of a surrogate pair")
    return value


def name_of(value: object) -> str | None:
    """An identifier that frameworks write as a string or as a number; None when it is neither, or empty."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return text("identifier", str(value)) or None


def first_sampled(sampled: Sequence[bool]) -> int:
    """Length of the prompt where a record has a mask only: everything before the first sampled token."""
    return next((i for i, s in enumerate(sampled) if s), len(sampled))


def on_response(prompt_length: int, values: Sequence[Any] | None, fill: Any) -> tuple[Any, ...] | None:
    """Entries of the response as entries of the whole sequence."""
    return None if values is None else (*([fill] * prompt_length), *values)
