"""Draftlake's own rollout lines: every field is what its name says, and the sample names itself."""

from collections.abc import Iterator

from features.collect.rollout import Rollout
from features.collect.rollouts import rollout_from_record
from features.collect.sources.records import Record
from features.collect.sources.row import Row


def read(record: Record, row: Row) -> Iterator[Rollout]:
    """The rollout of one line, with the user's statements where the line is silent."""
    yield row.completed(rollout_from_record(record))


def is_ours(record: Record) -> bool:
    """Whether a record has the required keys."""
    return {"sample_id", "group_id", "token_ids", "prompt_length", "sampled_mask"} <= record.keys()
