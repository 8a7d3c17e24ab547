"""Commit objects and token tables: rows to bytes and back. No storage, no decisions.

A commit with no rows is a fence: retention takes an attempt's key with it, so that a late
writer of that attempt finds the key taken and starts over under the next one.
"""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from features.errors import CorruptDataError, LakeContractError
from features.schema import (
    COMMIT_SCHEMA,
    FORMAT_VERSION,
    NO_TOKEN,
    TOKENS_SCHEMA,
    TargetVersion,
    Verification,
)
from features.seals import check_seal, sealed
from features.windows import Window, WindowMeta
from features.zarr_layout import crc32c

_COMMIT_NAME = re.compile(r"commits/v=(\d{9,})/([0-9a-z_-]+)\.(\d+)\.parquet")
_SHARD_BYTES_KEY = "draftlake.shard_bytes."
_SCALES_KEY = b"draftlake.aux_scales"
_SCALES_CRC_KEY = b"draftlake.aux_scales_crc32c"
# Sign and payload of an unknown logprob mean nothing: all of them are null on disk.
_ONE_NAN = np.float32(np.nan)


@dataclass(frozen=True, slots=True, order=True)
class CommitName:
    """What the path of a commit says."""

    version: int
    plan_id: str
    attempt: int

    @property
    def path(self) -> str:
        return f"commits/{TargetVersion(self.version).folder}/{self.plan_id}.{self.attempt}.parquet"

    @staticmethod
    def parse(path: str) -> "CommitName | None":
        """None for an object that is no commit."""
        match = _COMMIT_NAME.fullmatch(path)
        return CommitName(int(match[1]), match[2], int(match[3])) if match else None


def revision_path(digest: str) -> str:
    """Where a pinned revision lists its commits, one path per line."""
    return f"revisions/{digest}.txt"


@dataclass(frozen=True, slots=True)
class TokenRow:
    """Token arrays of one window, as :class:`features.windows.Window` shapes them."""

    start: int
    token_ids: NDArray[np.int32]
    sampled_mask: NDArray[np.bool_]
    loss_mask: NDArray[np.bool_] | None
    logprobs: NDArray[np.float32]

    @property
    def crc32c(self) -> int:
        """Over token ids (i32), sampled mask (u8), loss mask (u8; nothing if none), logprobs (f32)."""
        logprobs = np.where(np.isnan(self.logprobs), _ONE_NAN, self.logprobs).astype("<f4")
        loss = b"" if self.loss_mask is None else self.loss_mask.astype("u1").tobytes()
        parts = (self.token_ids.astype("<i4").tobytes(), self.sampled_mask.astype("u1").tobytes(), loss)
        return crc32c(b"".join((*parts, logprobs.tobytes())))

    def same_tokens(self, other: "TokenRow") -> bool:
        """Equal position, tokens and masks; logprobs are a measurement and do not count."""
        if (self.loss_mask is None) != (other.loss_mask is None) or self.start != other.start:
            return False
        pairs = [(self.token_ids, other.token_ids), (self.sampled_mask, other.sampled_mask)]
        if self.loss_mask is not None and other.loss_mask is not None:
            pairs.append((self.loss_mask, other.loss_mask))
        return all(np.array_equal(left, right) for left, right in pairs)

    @staticmethod
    def of(window: Window) -> "TokenRow":
        return TokenRow(
            window.meta.start, window.token_ids, window.sampled_mask, window.loss_mask, window.logprobs
        )


@dataclass(frozen=True, slots=True)
class TokenTable:
    """``tokens.arrow`` in memory."""

    rows: tuple[TokenRow, ...]
    shard_bytes: Mapping[str, int]
    """Exact length of the shard object of each array."""
    aux_scales: NDArray[np.float32] | None = None
    """What each aux channel was divided by before it was encoded, ``[m * H]``; None when it was not."""


def encode_commit(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Commit rows as one Parquet file, sealed."""
    sink = io.BytesIO()
    pq.write_table(sealed(pa.Table.from_pylist(list(rows), COMMIT_SCHEMA)), sink, compression="zstd")
    return sink.getvalue()


def decode_commit(raw: bytes, *, where: str) -> pa.Table:
    """A commit's rows in ``COMMIT_SCHEMA``; columns that a later writer added are left out.

    Raises:
        CorruptDataError: the bytes are no commit, or its rows were changed after it was written.
        LakeContractError: a newer format wrote it.
    """
    try:
        table = pq.read_table(io.BytesIO(raw))
    except (pa.ArrowException, OSError) as error:
        raise CorruptDataError(
            f"{where} ({len(raw):,} bytes) is no complete Parquet file: {error}. Restore it from a copy."
        ) from error
    versions = table["schema_version"].to_pylist() if "schema_version" in table.column_names else []
    newest = max((version for version in versions if isinstance(version, int)), default=0)
    if newest > FORMAT_VERSION:
        raise LakeContractError(
            f"{where} was written in format {newest} and this program reads up to {FORMAT_VERSION}. "
            f"Upgrade draftlake to read this lake."
        )
    _require_columns(table, where)
    check_seal(table, where=where)
    return as_commit_rows(table, where=where)


def as_commit_rows(table: pa.Table, *, where: str) -> pa.Table:
    """A table that was read as ``COMMIT_SCHEMA``: unknown columns left out, nullable ones that it lacks null.

    Raises:
        CorruptDataError: it lacks columns or values, or has them in another type.
    """
    _require_columns(table, where)
    empty = [f.name for f in COMMIT_SCHEMA if not f.nullable and table[f.name].null_count]
    if empty:
        raise CorruptDataError(f"{where} has no value in some rows of {', '.join(empty)}: it is no commit")
    try:
        columns = [
            table[field.name].cast(field.type)
            if field.name in table.column_names
            else pa.nulls(table.num_rows, field.type)
            for field in COMMIT_SCHEMA
        ]
    except pa.ArrowException as error:
        raise CorruptDataError(f"{where} has a column of another type ({error}): it is no commit") from error
    return pa.Table.from_arrays(columns, schema=COMMIT_SCHEMA)


def _require_columns(table: pa.Table, where: str) -> None:
    absent = [f.name for f in COMMIT_SCHEMA if f.name not in table.column_names and not f.nullable]
    if absent:
        raise CorruptDataError(f"{where} lacks the columns {', '.join(absent)}: it is no commit of this lake")


def check_commit(table: pa.Table, name: CommitName, target_id: str, *, where: str) -> None:
    """Refuse rows that are not of the fragment their commit's path names; a fence has none.

    Raises:
        CorruptDataError: the commit was moved or copied from another place, lake or target.
    """
    expected = {
        "target_id": target_id,
        "target_version": name.version,
        "plan_id": name.plan_id,
        "attempt": name.attempt,
    }
    for column, value in expected.items():
        found = table[column].unique().to_pylist()
        if found not in ([], [value]):
            raise CorruptDataError(
                f"{where} holds rows of {column} {', '.join(map(repr, found))}, expected {value!r}: it was moved "
                f"or copied from elsewhere. Remove it, and collect into this lake what is missing."
            )
    for column in ("head_id", "data_prefix", "write_uuid"):
        if len(found := table[column].unique().to_pylist()) > 1:
            raise CorruptDataError(
                f"{where} mixes {column} {', '.join(map(repr, found))}; a commit is of one fragment"
            )


def encode_tokens(
    windows: Sequence[Window],
    shard_bytes: Mapping[str, int],
    aux_scales: NDArray[np.float32] | None = None,
) -> bytes:
    """``tokens.arrow``: one row per window; the end of a sequence and unknown logprobs are null."""
    rows = [_token_fields(index, window) for index, window in enumerate(windows)]
    metadata: dict[str | bytes, str | bytes] = {
        _SHARD_BYTES_KEY + name: str(size) for name, size in shard_bytes.items()
    }
    if aux_scales is not None:
        raw = aux_scales.astype("<f4").tobytes()
        metadata |= {_SCALES_KEY: raw, _SCALES_CRC_KEY: str(crc32c(raw))}
    table = pa.Table.from_pylist(rows, TOKENS_SCHEMA).replace_schema_metadata(metadata)
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def decode_tokens(raw: bytes, *, where: str) -> TokenTable:
    """Read :func:`encode_tokens`.

    Raises:
        CorruptDataError: the bytes are cut or hold something else.
    """
    try:
        table = pa.ipc.open_file(pa.BufferReader(raw)).read_all()
        table.validate(
            full=True
        )  # Arrow follows offsets unchecked: one that was changed would end the process
        metadata = table.schema.metadata or {}
        table = table.select(TOKENS_SCHEMA.names)
        if table.schema.types != TOKENS_SCHEMA.types:
            raise ValueError(f"its columns are {table.schema.types}, expected {TOKENS_SCHEMA.types}")
        shard_bytes = {
            key.decode().removeprefix(_SHARD_BYTES_KEY): int(value)
            for key, value in metadata.items()
            if key.decode().startswith(_SHARD_BYTES_KEY)
        }
        rows = tuple(_token_row(table, index) for index in range(table.num_rows))
        if table["window_index"].to_pylist() != list(range(table.num_rows)):
            raise ValueError("window_index does not count from 0")
        scales = _aux_scales(metadata)
    except (
        pa.ArrowException,
        AttributeError,
        OSError,
        KeyError,
        ValueError,
    ) as error:  # no list where one was
        raise CorruptDataError(
            f"{where} ({len(raw):,} bytes) is no complete token table: {error}. "
            f"Restore it from a copy, or collect the fragment again."
        ) from error
    return TokenTable(rows, shard_bytes, scales)


def _aux_scales(metadata: Mapping[bytes, bytes]) -> NDArray[np.float32] | None:
    raw = metadata.get(_SCALES_KEY)
    if raw is None:
        return None
    if crc32c(raw) != int(metadata[_SCALES_CRC_KEY]):
        raise ValueError("the aux scales do not match their checksum")
    return np.frombuffer(raw, "<f4").astype(np.float32)


def window_meta(row: Mapping[str, Any]) -> WindowMeta:
    """What a commit row says of its window."""
    names = [name for name in WindowMeta.__dataclass_fields__ if name not in ("version", "verification")]
    return WindowMeta(
        version=TargetVersion(row["target_version"]),
        verification=Verification(row["verification"]),
        **{name: row[name] for name in names},
    )


def meta_fields(meta: WindowMeta) -> dict[str, Any]:
    """The columns of a commit row that come from a window's meta."""
    fields = asdict(meta)
    version = fields.pop("version")
    return {**fields, "target_version": version["number"], "verification": meta.verification.value}


def _token_fields(index: int, window: Window) -> dict[str, Any]:
    ids, loss = window.token_ids.tolist(), window.loss_mask
    return {
        "window_index": index,
        "start": window.meta.start,
        "token_ids": [None if token == NO_TOKEN else token for token in ids],
        "sampled_mask": window.sampled_mask.tolist(),
        "loss_mask": None if loss is None else loss.tolist(),
        "logprobs": [None if np.isnan(value) else float(value) for value in window.logprobs],
    }


def _token_row(table: pa.Table, index: int) -> TokenRow:
    row = {name: table[name][index] for name in table.column_names}
    loss = row["loss_mask"]
    return TokenRow(
        start=row["start"].as_py(),
        token_ids=row["token_ids"].values.fill_null(NO_TOKEN).to_numpy(zero_copy_only=False).astype(np.int32),
        sampled_mask=row["sampled_mask"].values.to_numpy(zero_copy_only=False).astype(np.bool_),
        loss_mask=loss.values.to_numpy(zero_copy_only=False).astype(np.bool_) if loss.is_valid else None,
        logprobs=row["logprobs"].values.fill_null(np.nan).to_numpy(zero_copy_only=False).astype(np.float32),
    )
