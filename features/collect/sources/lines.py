"""Rows of a partition: JSON lines one by one, Parquet row group by row group. Nothing is held whole."""

import io
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from features.collect.rollout import Reason
from features.collect.rollouts import RecordError, decode_object
from features.collect.sources.files import READ_BYTES, Decompressed, StoredFile, kind_of, open_bytes
from features.collect.sources.partitions import SourcePartition

MAX_LINE_BYTES = 256 * 2**20
"""A longer line is refused unread: it would have to be held whole."""
PARQUET_ROWS = 64
"""Rows of a Parquet file that are decoded at a time at most."""
PARQUET_VALUES = 2**20
"""Values of one column that are decoded at a time, except by a longer row: list columns are never put
together whole, so no offset overflows however many tokens a file holds."""
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One line or row: a record, what is wrong with it, or blank (both None)."""

    number: int
    record: Mapping[str, Any] | None = None
    error: RecordError | None = None
    of_file: bool = False
    """The error is the file's own: it stands for no line."""


def read_rows(partition: SourcePartition, storage_options: Mapping[str, Any]) -> Iterator[SourceRow]:
    """Every line or row of a partition, streaming, in file order."""
    if partition.damage is not None:
        detail = f"its bytes were changed, and none of its rows is believed: {partition.damage}; restore it from a copy"
        yield SourceRow(0, error=RecordError(Reason.DAMAGED_FILE, detail), of_file=True)
        return
    url, start, stop = partition.url, partition.start, partition.stop
    source = StoredFile(url, storage_options)
    kind = kind_of(source.read(16))
    if kind == "parquet":
        yield from _parquet_rows(source, start, stop, partition.first_row)
        return
    if kind == "pickle":
        error = RecordError(Reason.DAMAGED_FILE, "since the source was opened, a pickle took its place")
        yield SourceRow(0, error=error, of_file=True)
        return
    if kind == "plain":
        yield from json_rows(open_bytes(url, storage_options, start, stop), partition.first_row)
        return
    stream = Decompressed(url, storage_options, kind)
    number = 0
    for row in json_rows(io.BufferedReader(stream, 2**16), partition.first_row):
        number = row.number
        yield row
    if stream.damage is not None:
        detail = f"the {kind} stream breaks off behind line {number}: {stream.damage}; restore the file from a copy"
        yield SourceRow(number, error=RecordError(Reason.TRUNCATED_FILE, detail), of_file=True)


def json_rows(
    file: io.BufferedReader, first_row: int = 1, *, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[SourceRow]:
    """Objects of a JSONL stream. Only ``\\n`` ends a line; a byte-order mark and CRLF are tolerated."""
    number = first_row - 1
    with file:
        while raw := file.readline(max_line_bytes + 1):
            number += 1
            if len(raw) > max_line_bytes:
                while raw and not raw.endswith(b"\n"):
                    raw = file.readline(2**20)
                detail = f"longer than {max_line_bytes:,} bytes; is the file JSON lines?"
                yield SourceRow(number, error=RecordError(Reason.LINE_TOO_LONG, detail))
                continue
            line = (raw.removeprefix(_BOM) if number == 1 else raw).rstrip(b"\r\n")
            if not line.strip():
                yield SourceRow(number)
                continue
            try:
                yield SourceRow(number, decode_object(line))
            except RecordError as error:
                yield SourceRow(number, error=error)


def _parquet_rows(source: StoredFile, start: int, stop: int | None, first_row: int) -> Iterator[SourceRow]:
    """Rows of the row groups ``[start, stop)``; one that cannot be read is refused whole."""
    number = first_row - 1
    try:
        parquet = pq.ParquetFile(io.BufferedReader(source, READ_BYTES))
    except (OSError, pa.ArrowException) as error:
        if source.failed:
            raise
        detail = f"no readable Parquet file: {error}; restore it from a copy"
        yield SourceRow(number, error=RecordError(Reason.TRUNCATED_FILE, detail), of_file=True)
        return
    repeated = [name for name, count in Counter(parquet.schema_arrow.names).items() if count > 1]
    for group in range(start, parquet.num_row_groups if stop is None else stop):
        last = number + parquet.metadata.row_group(group).num_rows
        if repeated:
            twice = RecordError(Reason.BAD_FIELD, f"column {repeated[0]!r} is given twice; leave one out")
            yield from (SourceRow(row, error=twice) for row in range(number + 1, last + 1))
            number = last
            continue
        try:
            rows = rows_at_a_time(parquet.metadata.row_group(group))
            for batch in parquet.iter_batches(batch_size=rows, row_groups=[group]):
                for record in batch.to_pylist():
                    number += 1
                    yield SourceRow(number, record)
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
            if source.failed:
                raise
            detail = f"{last - number} rows of row group {group} cannot be read: {error}"
            yield SourceRow(number, error=RecordError(Reason.TRUNCATED_FILE, detail), of_file=True)
            number = last


def rows_at_a_time(group: Any) -> int:
    """Rows of a row group to decode together, from the number of values in its longest column."""
    longest = max((group.column(i).num_values for i in range(group.num_columns)), default=0)
    return max(1, min(PARQUET_ROWS, PARQUET_VALUES * group.num_rows // max(longest, 1)))
