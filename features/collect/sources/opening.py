"""Open sources: find the files, tell their format, cut them into partitions and digest their bytes."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from features.collect.sources.files import (
    PART_BYTES,
    READ_BYTES,
    Part,
    SourceFile,
    digest_compressed,
    digest_file,
    find_files,
    jsonl_parts,
    kind_of,
    open_bytes,
    pickle_error,
    refuse_pickles,
)
from features.collect.sources.formats import EMPTY, MAPPING, detect, known_format
from features.collect.sources.lines import read_rows
from features.collect.sources.mapping import checked_columns
from features.collect.sources.partitions import SourceOptions, SourcePartition
from features.collect.sources.prime_rl import without_copies
from features.collect.sources.row import digest_of
from features.errors import InputError

_LINES_TO_TELL = 16
"""Lines that are looked at for a record that tells the format."""


def open_source(
    urls: Sequence[str], *, format: str | None, options: SourceOptions, part_bytes: int = PART_BYTES
) -> Sequence[SourcePartition]:
    """Find the files behind ``urls`` and say how each is read; reads every byte once for the digests.

    A url is a file, a folder or a glob, local or ``s3://``. ``format`` None tells the format by the
    first record of each file. An uncompressed JSONL file is cut into partitions of about
    ``part_bytes`` between lines, a Parquet file between row groups; other files are one each.

    Raises:
        InputError: nothing is found, a format is unknown or ambiguous, or a file is a pickle.
    """
    format = _asked_format(format, options)
    files = without_copies(find_files(urls, options.storage_options))
    refuse_pickles(files)
    partitions: list[SourcePartition] = []
    for file in files:
        partitions.extend(_partitions(file, format, options, part_bytes))
    return partitions


def _asked_format(format: str | None, options: SourceOptions) -> str | None:
    """The format that is asked for, in words or by a column mapping."""
    if format is not None:
        known_format(format)
    if options.columns is None:
        if format == MAPPING:
            raise InputError("the format 'mapping' needs a column mapping: give --columns FILE")
        return format
    checked_columns(options.columns)
    if format not in (None, MAPPING):
        raise InputError(
            f"--columns describes files of your own, and --format says {format}: give one of them"
        )
    return MAPPING


def _partitions(
    file: SourceFile, format: str | None, options: SourceOptions, part_bytes: int
) -> Iterator[SourcePartition]:
    with open_bytes(file.url, options.storage_options) as stream:
        kind = kind_of(stream.read(16))
        if kind == "pickle":
            raise pickle_error([file.url])
        stream.seek(0)
        name = format or _told_format(file, options)
        if kind == "plain":
            chunks = iter(lambda: stream.read(READ_BYTES), b"")
            parts = list(jsonl_parts(chunks, part_bytes))
        elif kind == "parquet":
            parts = _row_groups(stream, part_bytes, digest_file(stream))
        else:
            digest, damage = digest_compressed(stream, kind)
            parts = [Part(0, None, 1, digest, file.nbytes, damage)]
    for part in parts:
        yield SourcePartition(
            name=file.name if len(parts) == 1 else f"{file.name}#{part.start}",
            url=file.url, format=name, nbytes=part.nbytes, digest=digest_of(name, part.digest),
            start=part.start, stop=part.stop, first_row=part.first_row, damage=part.damage,
        )  # fmt: skip


def _told_format(file: SourceFile, options: SourceOptions) -> str:
    """The format that the first record tells; ``empty`` for a file without any line.

    Raises:
        InputError: the first lines hold no record, or it tells no single format.
    """
    whole = SourcePartition(file.name, file.url, EMPTY, file.nbytes, "")
    rows = (row for row in read_rows(whole, options.storage_options) if row.record or row.error)
    first = list(itertools.islice(rows, _LINES_TO_TELL))
    record = next((row.record for row in first if row.record is not None), None)
    if record is not None:
        return detect(record, file.url)
    if first:
        raise InputError(
            f"cannot tell the format of {file.url!r}: none of its first {len(first)} lines is a record "
            f"({first[0].error}). Is it JSON lines or Parquet? If it is, give --format"
        )
    return EMPTY


def _row_groups(stream: Any, part_bytes: int, digest: str) -> list[Part]:
    """Parts of whole row groups, of about ``part_bytes`` decoded bytes."""
    stream.seek(0)
    try:
        metadata = pq.ParquetFile(stream).metadata
    except (OSError, pa.ArrowException):
        if stream.raw.failed:
            raise
        return [Part(0, None, 1, digest, 0)]  # reading it gives the refusal
    parts: list[Part] = []
    start, first_row, row, nbytes = 0, 1, 1, 0
    for group in range(metadata.num_row_groups):
        row += metadata.row_group(group).num_rows
        nbytes += metadata.row_group(group).total_byte_size
        if nbytes >= part_bytes or group == metadata.num_row_groups - 1:
            parts.append(Part(start, group + 1, first_row, f"{digest}#{start}-{group + 1}", nbytes))
            start, first_row, nbytes = group + 1, row, 0
    return parts or [Part(0, None, 1, digest, 0)]
