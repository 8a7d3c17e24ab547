"""Files of one's own: a declared mapping from our fields to their columns.

::

    token_ids = "tokens"                  # or prompt_ids and response_ids
    prompt_length = "meta.prompt_len"     # a dot descends into objects
    sampled_mask = "mask"                 # or response_mask, over the response only
    logprobs = "sampling_logprobs"        # or response_logprobs
    logprob_kind = { value = "engine_raw" }
    version = "weights.step"

``response_mask = { value = "all" }`` declares that the target sampled every response token.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from features.collect.rollout import LOGPROB_KINDS, Reason
from features.collect.rollouts import RecordError
from features.collect.sources import records
from features.collect.sources.records import Record
from features.collect.sources.row import Item, Row
from features.collect.sources.versions import UNKNOWN, VersionFacts, from_bounds, from_labels, numeric_label
from features.errors import InputError

_TOKENS = ("token_ids", "prompt_length", "prompt_ids", "response_ids")
_LISTS = (
    "sampled_mask", "response_mask", "loss_mask", "response_loss_mask", "logprobs", "response_logprobs",
    "trainer_logprobs",
)  # fmt: skip
_NUMBERS = ("temperature", "top_p", "reward", "acceptance_length", "acceptance_rate")
_NAMES = ("sample_id", "group_id", "source_group", "session_id", "domain", "finish")
_OTHERS = (
    "version",
    "version_min",
    "version_max",
    "version_label",
    "logprob_kind",
    "top_k",
    "file_step",
    "multimodal",
)
FIELDS = (*_TOKENS, *_LISTS, *_NUMBERS, *_NAMES, *_OTHERS)
"""What a mapping may name."""


def load_columns(path: str | Path) -> Mapping[str, Any]:
    """Read a mapping from a ``.toml`` or JSON file.

    Raises:
        InputError: it cannot be read, names an unknown field, or leaves tokens or masks open.
    """
    path = Path(path)
    try:
        raw = path.read_text(encoding="utf-8")
        found = tomllib.loads(raw) if path.suffix == ".toml" else json.loads(raw)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the column mapping {str(path)!r}: {error}") from error
    return checked_columns(found)


def checked_columns(columns: object) -> Mapping[str, Any]:
    """``columns`` when it is a mapping that settles tokens and masks.

    Raises:
        InputError: it is not.
    """
    if not isinstance(columns, Mapping):
        raise InputError(f"a column mapping is a table of our field = their column, found {columns!r:.60}")
    unknown = sorted(set(columns) - set(FIELDS))
    if unknown:
        raise InputError(f"the column mapping names {unknown[0]!r}; fields are {', '.join(FIELDS)}")
    wrong = [name for name, value in columns.items() if not _is_column(value)]
    if wrong:
        raise InputError(f"{wrong[0]} in the column mapping: expected a column name or {{value = ...}}")
    whole, parts = (
        {"token_ids", "prompt_length"} <= set(columns),
        {"prompt_ids", "response_ids"} <= set(columns),
    )
    if whole == parts:
        raise InputError("a column mapping names token_ids and prompt_length, or prompt_ids and response_ids")
    if ("sampled_mask" in columns) == ("response_mask" in columns):
        raise InputError(
            "a column mapping says which tokens the target sampled: sampled_mask, or response_mask; "
            'response_mask = {value = "all"} when that is every response token'
        )
    return dict(columns)


def read(record: Record, row: Row) -> Iterator[Item]:
    """One sequence, from the columns that the mapping names."""
    values = {name: _value(record, column) for name, column in (row.options.columns or {}).items()}
    ids, prompt = _tokens(values)
    kind = values.get("logprob_kind")
    if kind is not None and kind not in LOGPROB_KINDS:
        raise records.bad("logprob_kind", f"one of {', '.join(LOGPROB_KINDS)}", kind)
    described: dict[str, Any] = {name: records.number(name, values.get(name)) for name in _NUMBERS}
    described |= {name: records.name_of(values.get(name)) for name in _NAMES}
    multimodal = values.get("multimodal")
    yield row.sequence(
        token_ids=ids,
        prompt_length=prompt,
        sampled=_sampled(values, prompt, len(ids)),
        loss=_mask(values, "loss_mask", "response_loss_mask", prompt),
        logprobs=_logprobs(values, prompt, len(ids)),
        logprob_kind=kind or "engine_unknown",
        facts=_facts(values, row),
        trainer_logprobs=records.numbers("trainer_logprobs", values.get("trainer_logprobs")),
        top_k=_top_k(values.get("top_k")),
        file_step=records.integer("file_step", values.get("file_step")),
        multimodal=None if multimodal is None else bool(records.mask("multimodal", [multimodal])[0]),
        **described,
    )


def _is_column(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, Mapping) and set(value) == {"value"})


def _value(record: Record, column: Any) -> Any:
    """The constant, the column of that very name, or what its dotted path leads to; None when absent."""
    if isinstance(column, Mapping):
        return column["value"]
    if column in record:
        return record[column]
    found: Any = record
    for part in column.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _tokens(values: Record) -> tuple[tuple[int, ...], int]:
    if "prompt_ids" in values:
        prompt, response = (records.token_ids(n, values.get(n)) for n in ("prompt_ids", "response_ids"))
        return prompt + response, len(prompt)
    length = records.integer("prompt_length", values.get("prompt_length"))
    if length is None:
        raise RecordError(Reason.LENGTH_MISMATCH, "prompt_length is missing or null")
    return records.token_ids("token_ids", values.get("token_ids")), length


def _sampled(values: Record, prompt: int, length: int) -> tuple[bool, ...]:
    if values.get("response_mask") == "all":
        return (*([False] * prompt), *([True] * (length - prompt)))
    mask = _mask(values, "sampled_mask", "response_mask", prompt)
    if mask is None:
        raise RecordError(Reason.BAD_FIELD, "the mask of sampled tokens is missing or null")
    return mask


def _mask(values: Record, whole: str, response: str, prompt: int) -> tuple[bool, ...] | None:
    if values.get(whole) is not None:
        return records.mask(whole, values[whole])
    given = values.get(response)
    return None if given is None else records.on_response(prompt, records.mask(response, given), False)


def _logprobs(values: Record, prompt: int, length: int) -> tuple[float | None, ...] | None:
    if values.get("logprobs") is not None:
        return records.numbers("logprobs", values["logprobs"])
    given = records.numbers("response_logprobs", values.get("response_logprobs"))
    records.require_length("response_logprobs", given, length - prompt, logprobs=True)
    return records.on_response(prompt, given, None)


def _facts(values: Record, row: Row) -> VersionFacts:
    """Recorded bounds before one recorded version, which may be a number or a numeric label."""
    low, high = (records.integer(name, values.get(name)) for name in ("version_min", "version_max"))
    if low is not None or high is not None:
        return from_bounds(low, high)
    version = values.get("version")
    if type(version) is int and version >= 0:
        return VersionFacts(version=version, version_source="label", version_label=_label(values))
    label = records.name_of(version)
    return UNKNOWN if label is None else from_labels([label], numeric_label(row.options.label_offset))


def _label(values: Record) -> str | None:
    return records.name_of(values.get("version_label"))


def _top_k(value: object) -> int | None:
    return -1 if value == -1 and type(value) is int else records.integer("top_k", value)
