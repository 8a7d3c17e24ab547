"""Responses of vLLM's HTTP endpoints, one JSON response per line as the user logged them.

Token ids must have been asked for (``return_token_ids``). Only ``/inference/v1/generate`` says which
weights sampled which tokens; its labels are free strings, so a number is a version only as far as the
trainer made it one (``SourceOptions.label_offset`` moves it).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from features.collect.rollout import Reason, VersionSpan
from features.collect.rollouts import RecordError
from features.collect.sources import records
from features.collect.sources.records import Record
from features.collect.sources.row import Item, Row
from features.collect.sources.versions import UNKNOWN, VersionFacts, from_spans, numeric_label

_FINISH = {"stop": "stop", "tool_calls": "stop", "length": "length", "abort": "abort", "error": "error"}
_TOKEN_AS_ID = re.compile(r"token_id:(\d+)")
_ASK = "log responses of requests with return_token_ids=true"

Values = list[float | None] | None
ReadLogprobs = Callable[[Record, int, tuple[int, ...]], Values]


def is_generate(record: Record) -> bool:
    """A response of ``/inference/v1/generate``."""
    choices = record.get("choices")
    mappings = [c for c in choices if isinstance(c, Mapping)] if isinstance(choices, list) else []
    return "object" not in record and any("token_ids" in choice for choice in mappings)


def is_chat(record: Record) -> bool:
    """A response of ``/v1/chat/completions``."""
    return record.get("object") == "chat.completion"


def is_completion(record: Record) -> bool:
    """A response of ``/v1/completions``."""
    return record.get("object") == "text_completion"


def read_generate(record: Record, row: Row) -> Iterator[Item]:
    """A sequence per choice, with the weights of its spans."""
    return _choices(record, row, _content_logprobs)


def read_chat(record: Record, row: Row) -> Iterator[Item]:
    """A sequence per choice; ``token_id:N`` tokens stand in for hidden ``token_ids``."""
    return _choices(record, row, _content_logprobs)


def read_completion(record: Record, row: Row) -> Iterator[Item]:
    """A sequence per choice; with ``echo`` the logprobs cover the prompt too."""
    return _choices(record, row, _flat_logprobs)


def _choices(record: Record, row: Row, read_logprobs: ReadLogprobs) -> Iterator[Item]:
    for place, choice in enumerate(records.items("choices", record.get("choices"))):
        choice = records.mapping(f"choices[{place}]", choice)
        if "delta" in choice:
            raise records.bad(
                "choices", "whole responses", "a chunk of a stream; put the chunks together first"
            )
        index = records.integer("index", choice.get("index"))
        try:
            yield _sequence(record, choice, row, place if index is None else index, read_logprobs)
        except RecordError as error:
            yield error


def _sequence(record: Record, choice: Record, row: Row, branch: int, read_logprobs: ReadLogprobs) -> Item:
    prompt_value = choice.get("prompt_token_ids", record.get("prompt_token_ids"))
    prompt = records.token_ids("prompt_token_ids", prompt_value, remedy=_ASK)
    response = records.token_ids("token_ids", _response_ids(choice), remedy=_ASK)
    logprobs = read_logprobs(choice, len(prompt), response)
    sampled = (*([False] * len(prompt)), *([True] * len(response)))
    return row.sequence(
        token_ids=prompt + response,
        prompt_length=len(prompt),
        sampled=sampled,
        logprobs=records.on_response(len(prompt), logprobs, None),
        logprob_kind="engine_raw",
        facts=_facts(choice, len(prompt), sampled, row),
        branch=branch,
        finish=_FINISH.get(str(choice.get("finish_reason"))),
        session_id=records.name_of(record.get("request_id", record.get("id"))),
    )


def _response_ids(choice: Record) -> Any:
    """``token_ids``, or the ids that the logprob entries spell as ``token_id:N``."""
    if choice.get("token_ids") is not None:
        return choice["token_ids"]
    matches = [_TOKEN_AS_ID.fullmatch(str(entry.get("token"))) for entry in _content(choice)]
    return [int(m[1]) for m in matches if m] if matches and all(matches) else None


def _content(choice: Record) -> list[Record]:
    logprobs = choice.get("logprobs")
    content = None if logprobs is None else records.mapping("logprobs", logprobs).get("content")
    entries = [] if content is None else records.items("logprobs.content", content)
    return [records.mapping(f"logprobs.content[{i}]", entry) for i, entry in enumerate(entries)]


def _content_logprobs(choice: Record, prompt_length: int, response: tuple[int, ...]) -> Values:
    """One entry per token, each of which names its token where the endpoint lets it."""
    del prompt_length
    entries = _content(choice)
    if not entries and response:
        return None
    records.require_length("logprobs.content", entries, len(response), logprobs=True)
    for i, (entry, token) in enumerate(zip(entries, response, strict=True)):
        named = _named_token(entry, f"logprobs.content[{i}]")
        if named is not None and named != token:
            raise RecordError(
                Reason.LOGPROB_MISMATCH,
                f"logprobs.content[{i}] is of token {named}, token_ids[{i}] is {token}",
            )
    return [records.number(f"logprobs.content[{i}].logprob", e.get("logprob")) for i, e in enumerate(entries)]


def _named_token(entry: Record, place: str) -> int | None:
    """The token id of an entry; None only for chat's entries, which name it by text."""
    if "token" in entry:
        match = _TOKEN_AS_ID.fullmatch(str(entry["token"]))
        return int(match[1]) if match else None
    if type(entry.get("token_id")) is not int:
        raise RecordError(
            Reason.LOGPROB_MISMATCH,
            f"{place} names no token_id: which token its logprob belongs to is unknown",
        )
    return int(entry["token_id"])


def _flat_logprobs(choice: Record, prompt_length: int, response: tuple[int, ...]) -> Values:
    logprobs = choice.get("logprobs")
    values = None if logprobs is None else records.mapping("logprobs", logprobs).get("token_logprobs")
    numbers = records.numbers("logprobs.token_logprobs", values)
    if numbers is None:
        return None
    if len(numbers) == prompt_length + len(response):  # echo
        return list(numbers[prompt_length:])
    records.require_length("logprobs.token_logprobs", numbers, len(response), logprobs=True)
    return list(numbers)


def _facts(choice: Record, prompt_length: int, sampled: tuple[bool, ...], row: Row) -> VersionFacts:
    """Spans over output tokens, as absolute positions."""
    if choice.get("weight_versions") is None:
        return UNKNOWN
    spans = []
    for i, value in enumerate(records.items("weight_versions", choice["weight_versions"])):
        span = records.mapping(f"weight_versions[{i}]", value)
        label = records.text(f"weight_versions[{i}].version", span.get("version"))
        start, stop = (records.integer(f"weight_versions[{i}].{k}", span.get(k)) for k in ("start", "end"))
        if label is None or start is None or stop is None:
            raise records.bad(f"weight_versions[{i}]", "version, start and end", dict(span))
        spans.append(VersionSpan(label, prompt_length + start, prompt_length + stop))
    return from_spans(spans, sampled, numeric_label(row.options.label_offset)) if spans else UNKNOWN
