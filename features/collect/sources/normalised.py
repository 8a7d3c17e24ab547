"""Rollouts as Arrow: an explicit schema, so that a column of nulls keeps its type.

Lists per token are ``large_list``: their offsets are 64-bit, so no number of tokens overflows them.
``group_id`` is the group as its framework numbered it; ``split_group`` is the prompt's identity.
"""

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from features.collect.rollout import Rollout, VersionSpan
from features.collect.rollouts import rollout_from_record
from features.collect.sources import records
from features.collect.sources.records import Record
from features.collect.sources.row import Item, Padding, Row

ROWS_PER_GROUP = 1024
"""Rows of one Parquet row group; readers hold fewer at a time."""

_CODE = pa.dictionary(pa.int8(), pa.string())
_SPAN = pa.struct([("label", pa.string()), ("start", pa.int32()), ("end", pa.int32())])
_BOOLS, _FLOATS = pa.large_list(pa.bool_()), pa.large_list(pa.float32())


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


normalised_schema = pa.schema(
    [
        _required("row_id", pa.string()),
        _required("sample_id", pa.string()),
        _required("source", _CODE),
        _required("source_file", pa.string()),
        _required("source_row", pa.int64()),
        pa.field("group_id", pa.string()),
        _required("split_group", pa.string()),
        pa.field("session_id", pa.string()),
        _required("branch", pa.int16()),
        _required("token_ids", pa.large_list(pa.int32())),
        _required("prompt_len", pa.int32()),
        _required("sampled_mask", _BOOLS),
        pa.field("loss_mask", _BOOLS),
        _required("token_source", _CODE),
        pa.field("file_step", pa.int64()),
        pa.field("version", pa.int64()),
        pa.field("version_min", pa.int64()),
        pa.field("version_max", pa.int64()),
        pa.field("version_label", pa.string()),
        pa.field("version_spans", pa.list_(_SPAN)),
        _required("version_source", _CODE),
        pa.field("logprob", _FLOATS),
        pa.field("logprob_kind", _CODE),
        pa.field("trainer_logprob", _FLOATS),
        pa.field("advantage", _FLOATS),
        pa.field("reward", pa.float32()),
        pa.field("temperature", pa.float32()),
        pa.field("top_p", pa.float32()),
        pa.field("top_k", pa.int32()),
        pa.field("finish", _CODE),
        pa.field("domain", pa.string()),
        pa.field("acceptance_length", pa.float32()),
        pa.field("acceptance_rate", pa.float32()),
        _required("multimodal", pa.bool_()),
        _required("pad_row", pa.bool_()),
        _required("verify", _CODE),
    ]
)
"""One row per sequence. Every list spans the whole sequence, spans are absolute positions."""

_RENAMED = {
    "group_id": "source_group", "split_group": "group_id", "prompt_len": "prompt_length", "logprob": "logprobs",
    "trainer_logprob": "trainer_logprobs", "advantage": "advantages",
}  # fmt: skip
"""Columns whose field of a rollout has another name."""
_DERIVED = {"verify", "pad_row"}


def to_batch(rollouts: Iterable[Rollout]) -> pa.RecordBatch:
    """Rollouts as rows of :data:`normalised_schema`; what a rollout without a file lacks is filled in."""
    return pa.RecordBatch.from_pylist([_row_of(rollout) for rollout in rollouts], normalised_schema)


def write_normalised(path: str | Path, rollouts: Iterable[Rollout]) -> int:
    """Write rollouts as Parquet, whole or not at all, a row group at a time; returns how many."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    count, stream = 0, iter(rollouts)
    try:
        with pq.ParquetWriter(partial, normalised_schema, compression="zstd") as writer:
            while chunk := list(islice(stream, ROWS_PER_GROUP)):
                writer.write_batch(to_batch(chunk), row_group_size=ROWS_PER_GROUP)
                count += len(chunk)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return count


def is_normalised(record: Record) -> bool:
    """Whether a record has the columns that only this schema has."""
    return {"row_id", "split_group", "token_ids", "prompt_len", "token_source", "verify"} <= record.keys()


def read(record: Record, row: Row) -> Iterator[Item]:
    """The rollout of a row, with the place and the statements it was stored with."""
    if record.get("pad_row") is True:
        yield Padding.ROW
        return
    values = {
        _RENAMED.get(name, name): record.get(name) for name in normalised_schema.names if name not in _DERIVED
    }
    if values["version_spans"] is not None:
        spans = records.items("version_spans", values["version_spans"])
        entries = [records.mapping("version_spans", span) for span in spans]
        values["version_spans"] = [[span.get(key) for key in ("label", "start", "end")] for span in entries]
    yield row.completed(rollout_from_record({k: v for k, v in values.items() if v is not None}))


def _row_of(rollout: Rollout) -> dict[str, Any]:
    values = {name: getattr(rollout, _RENAMED.get(name, name), None) for name in normalised_schema.names}
    usable = rollout.version is not None and any(v is not None for v in rollout.logprobs or ())
    defaults = {
        "row_id": rollout.sample_id, "source": "memory", "source_file": "", "source_row": 0, "branch": 0,
        "token_source": "ids", "version_source": "unknown" if rollout.version is None else "label",
    }  # fmt: skip
    return {
        **values,
        **{name: value for name, value in defaults.items() if values[name] is None},
        "version_spans": _spans(rollout.version_spans),
        "multimodal": bool(rollout.multimodal),
        "pad_row": False,
        "verify": "verifiable" if usable and rollout.may_verify else "unverified",
    }


def _spans(spans: tuple[VersionSpan, ...] | None) -> list[dict[str, Any]] | None:
    return None if spans is None else [{"label": s.label, "start": s.start, "end": s.stop} for s in spans]
