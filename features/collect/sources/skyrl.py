"""SkyRL ``global_step_{N}_training_input.pkl``, converted by the script in docs/rollouts.md.

Sequences are left-padded; masks and logprobs of the response are aligned with its right end.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from features.collect.rollout import Reason, logprob_value
from features.collect.rollouts import RecordError
from features.collect.sources import records
from features.collect.sources.records import Record
from features.collect.sources.row import Item, Padding, Row
from features.collect.sources.versions import UNKNOWN, inferred

_STEP = r"global_step_(\d+)_training_input"


def is_skyrl(record: Record) -> bool:
    """Whether a record is a converted row."""
    return {"sequences", "attention_mask", "response_mask"} <= record.keys()


def read(record: Record, row: Row) -> Iterator[Item]:
    """One sequence; a response token without a logprob was appended or is tool output, not sampled.

    Without any logprob, what the loss counted is taken as sampled.
    """
    if record.get("pad_row") is True:
        yield Padding.ROW
        return
    padded = records.token_ids("sequences", record.get("sequences"))
    real = records.mask("attention_mask", record.get("attention_mask"))
    records.require_length("attention_mask", real, len(padded))
    response = _aligned(
        "response_mask", records.mask("response_mask", record.get("response_mask")), real, False
    )
    loss = _optional(record, "loss_mask", real)
    values = _values(record, "rollout_logprobs", real)
    if values is not None:
        sampled = [r and logprob_value(v) is not None for r, v in zip(response, values, strict=True)]
    else:
        sampled = [r and counts for r, counts in zip(response, loss or response, strict=True)]
    step = row.step_in_name(_STEP)
    yield row.sequence(
        token_ids=[t for t, keep in zip(padded, real, strict=True) if keep],
        prompt_length=records.first_sampled(response),
        sampled=sampled,
        loss=loss,
        logprobs=values,
        inferred=UNKNOWN if step is None else inferred(step - 1),
        trainer_logprobs=_values(record, "action_log_probs", real),
        advantages=_values(record, "advantages", real),
        source_group=records.name_of(record.get("group_index")),
        file_step=step,
    )


def _aligned(name: str, values: Sequence[Any], real: Sequence[bool], fill: Any) -> list[Any]:
    """Values of the last ``len(values)`` padded positions, for each real token."""
    before = len(real) - len(values)
    if before < 0:
        raise RecordError(
            Reason.LENGTH_MISMATCH, f"{name} has {len(values)} entries for {len(real)} positions"
        )
    return [v for v, keep in zip([fill] * before + list(values), real, strict=True) if keep]


def _optional(record: Record, name: str, real: Sequence[bool]) -> list[bool] | None:
    value = record.get(name)
    return None if value is None else _aligned(name, records.mask(name, value), real, False)


def _values(record: Record, name: str, real: Sequence[bool]) -> tuple[float | None, ...] | None:
    values = records.numbers(name, record.get(name))
    return None if values is None else tuple(_aligned(name, values, real, None))
