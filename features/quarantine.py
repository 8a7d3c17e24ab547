"""Input that was refused: with its place, a reason code and the record itself. Nothing is dropped unseen."""

import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from features.errors import CorruptDataError, ObjectExistsError
from features.lake import Lake
from features.paths import checked_path

QUARANTINE_SCHEMA = pa.schema(
    [
        pa.field("source", pa.string(), nullable=False),
        pa.field("line", pa.int64()),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
        pa.field("sample", pa.string()),
    ]
)
"""One row per refused record; ``sample`` is its JSON when it could be parsed."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """One record of input that was not taken."""

    source: str
    """File or stream it came from."""
    line: int | None
    """1-based line in the source, when it has lines."""
    reason: str
    """Code to count by, e.g. ``version_missing``."""
    detail: str
    """Expected, found, remedy."""
    sample: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class QuarantinedRun:
    """What one run refused."""

    run_id: str
    path: str
    refusals: tuple[Refusal, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Number of refusals by reason code."""
        return dict(sorted(Counter(refusal.reason for refusal in self.refusals).items()))


def quarantine(lake: Lake, refusals: Sequence[Refusal], run_id: str) -> None:
    """Store what a run refused. Storing the same again changes nothing; other content is added beside it."""
    if not refusals:
        return
    if "/" in run_id:
        raise ValueError(f"a run id is one path segment, got {run_id!r}")
    sequence = 0
    while True:
        path = checked_path(f"quarantine/{run_id}.{sequence}.parquet")
        try:
            lake.store.create(path, _encode(refusals))
            return
        except ObjectExistsError:
            stored = _decode(lake.store.read(path), where=f"{lake.url}/{path}")
            if stored == _decode(_encode(refusals), where=path):
                return
            sequence += 1


def list_quarantine(lake: Lake) -> tuple[QuarantinedRun, ...]:
    """Everything in quarantine, by path."""
    runs = []
    for path in lake.store.list("quarantine"):
        run_id = path.removeprefix("quarantine/").rsplit(".", 2)[0]
        runs.append(QuarantinedRun(run_id, path, _decode(lake.store.read(path), where=f"{lake.url}/{path}")))
    return tuple(runs)


def _encode(refusals: Sequence[Refusal]) -> bytes:
    rows = [
        {
            "source": refusal.source,
            "line": refusal.line,
            "reason": refusal.reason,
            "detail": refusal.detail,
            # default=str: a refused record may hold anything, and keeping it beats refusing it twice.
            "sample": None if refusal.sample is None else json.dumps(refusal.sample, default=str),
        }
        for refusal in refusals
    ]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, QUARANTINE_SCHEMA), sink, compression="zstd")
    return sink.getvalue()


def _decode(raw: bytes, *, where: str) -> tuple[Refusal, ...]:
    try:
        rows = pq.read_table(io.BytesIO(raw)).select(QUARANTINE_SCHEMA.names).to_pylist()
        return tuple(
            Refusal(**{**row, "sample": None if row["sample"] is None else json.loads(row["sample"])})
            for row in rows
        )
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise CorruptDataError(f"{where} is no quarantine file ({error}); restore it from a copy") from error
