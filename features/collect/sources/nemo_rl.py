"""NeMo-RL ``train_data_step{N}.jsonl``: every field is a list of one element, right-padded."""

from collections.abc import Iterator
from typing import Any

from features.collect.rollout import Reason
from features.collect.rollouts import RecordError
from features.collect.sources import records
from features.collect.sources.records import Record
from features.collect.sources.row import Item, Row
from features.collect.sources.versions import UNKNOWN, inferred

_STEP = r"train_data_step(\d+)\.jsonl"


def is_nemo_rl(record: Record) -> bool:
    """Whether a record has NeMo-RL's own field names."""
    return {"token_ids", "input_lengths", "token_loss_mask"} <= record.keys()


def read(record: Record, row: Row) -> Iterator[Item]:
    """One sequence, cut at ``input_lengths``: the pad id may be the end-of-sequence token.

    ``token_loss_mask`` marks what was generated; ``sample_loss_mask`` takes whole samples out of the
    loss that were sampled all the same. The step trains on what version ``N - 1`` sampled, unless the
    run was asynchronous, which the file does not say.
    """
    padded = records.token_ids("token_ids", _only(record, "token_ids"))
    length = records.integer("input_lengths", _only(record, "input_lengths"))
    if length is None or length > len(padded):
        raise RecordError(Reason.LENGTH_MISMATCH, f"input_lengths is {length} for {len(padded)} token ids")
    generated = records.mask("token_loss_mask", _only(record, "token_loss_mask"))
    records.require_length("token_loss_mask", generated, len(padded))
    sampled = generated[:length]
    counts = records.number("sample_loss_mask", _only(record, "sample_loss_mask"))
    step = row.step_in_name(_STEP)
    yield row.sequence(
        token_ids=padded[:length],
        prompt_length=records.first_sampled(sampled),
        sampled=sampled,
        loss=None if counts is None else [s and counts != 0 for s in sampled],
        logprobs=_per_token(record, "generation_logprobs", len(padded), length),
        inferred=UNKNOWN if step is None else inferred(step - 1),
        trainer_logprobs=_without_zeros(_per_token(record, "prev_logprobs", len(padded), length)),
        advantages=_per_token(record, "advantages", len(padded), length),
        reward=_reward(record),
        file_step=step,
    )


def _only(record: Record, name: str) -> Any:
    """The element of a one-element list; None when the field or its element is absent."""
    value = record.get(name)
    if value is None or value == []:
        return None
    if not isinstance(value, list) or len(value) != 1:
        raise records.bad(name, "a list of one element", value)
    return value[0]


def _per_token(record: Record, name: str, padded: int, length: int) -> tuple[float | None, ...] | None:
    values = records.numbers(name, _only(record, name))
    records.require_length(name, values, padded, logprobs="logprobs" in name)
    return None if values is None else values[:length]


def _without_zeros(values: tuple[float | None, ...] | None) -> tuple[float | None, ...] | None:
    return None if values is None else tuple(v or None for v in values)


def _reward(record: Record) -> float | None:
    """With dynamic sampling ``rewards`` is of other rows, and ``filtered_rewards`` of these."""
    name = "filtered_rewards" if "filtered_rewards" in record else "rewards"
    return records.number(name, _only(record, name))
