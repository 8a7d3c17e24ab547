"""Read a partition as rollouts: every line has one fate, and each is counted."""

from collections.abc import Iterator
from typing import Any

from features.collect.rollout import Reason, Rollout, rollout_problem
from features.collect.rollouts import RecordError
from features.collect.sources.formats import FORMATS
from features.collect.sources.lines import SourceRow, read_rows
from features.collect.sources.partitions import SourceCounts, SourceOptions, SourcePartition
from features.collect.sources.records import Record
from features.collect.sources.row import Item, Padding, Row, digest_of
from features.quarantine import Refusal

_SAMPLE_TEXT = 200
"""Characters of a refused record's text fields that are kept."""


def read_partition(
    partition: SourcePartition, options: SourceOptions, counts: SourceCounts | None = None
) -> Iterator[Rollout | Refusal]:
    """Rollouts and refusals of a partition, streaming, in file order; ``counts`` is filled along the way.

    A line gives at least one rollout or refusal, or is counted as a duplicate, padding or blank.

    Raises:
        OSError: the storage failed; a damaged file is a refusal, not an error.
    """
    counts = SourceCounts() if counts is None else counts
    seen: dict[bytes, str] = {}
    named = FORMATS[partition.format].named_samples and "sample_id" in (options.columns or {"sample_id": ""})
    for source_row in read_rows(partition, options.storage_options):
        if source_row.of_file:
            counts.truncated += 1
        else:
            counts.lines += 1
        items = _items_of(source_row, partition, options)
        counts.more_records += max(len(items) - 1, 0)
        if not items:
            counts.blank += 1
        for item in items:
            match item:
                case Padding():
                    counts.pad_rows += 1
                case Rollout() if _is_duplicate(item, seen, named=named):
                    counts.duplicates += 1
                case Rollout():
                    counts.rollouts += 1
                    yield item
                case RecordError():
                    counts.refused += 1
                    yield _refusal(item, source_row, partition)


def _items_of(source_row: SourceRow, partition: SourcePartition, options: SourceOptions) -> list[Item]:
    """Sequences of a line, each checked; empty for a blank line."""
    if source_row.error is not None:
        return [source_row.error]
    if source_row.record is None:
        return []
    row = Row(partition, source_row.number, options)
    try:
        items = list(FORMATS[partition.format].read(source_row.record, row))
    except RecordError as error:
        return [error]
    if not items:
        return [RecordError(Reason.BAD_FIELD, "the record holds no sequence")]
    return [_checked(item) for item in items]


def _checked(item: Item) -> Item:
    problem = rollout_problem(item) if isinstance(item, Rollout) else None
    return item if problem is None else RecordError(*problem)


def _is_duplicate(rollout: Rollout, seen: dict[bytes, str], *, named: bool) -> bool:
    """Whether (token ids, version) came before. Unknown versions are not equal to each other."""
    if rollout.version is None:
        return False
    key = bytes.fromhex(digest_of(rollout.version, rollout.token_ids))
    if key not in seen:
        seen[key] = rollout.sample_id
        return False
    return not (named and seen[key] == rollout.sample_id)


def _refusal(error: RecordError, row: SourceRow, partition: SourcePartition) -> Refusal:
    sample = None if row.record is None else _sample_of(row.record)
    return Refusal(
        source=partition.url,
        line=row.number or None,
        reason=str(error.reason),
        detail=error.detail,
        sample=sample,
    )


def _sample_of(record: Record) -> dict[str, Any]:
    """The record's scalars: enough to find it again, without its lists."""
    scalars = {str(k): v for k, v in record.items() if isinstance(v, str | int | float)}
    return {k: v[:_SAMPLE_TEXT] if isinstance(v, str) else v for k, v in scalars.items()}
