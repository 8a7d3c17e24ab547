"""Acceptance over time: labelled intervals of an engine's counters, kept as Parquet.

Engines count accepted tokens without saying for which draft or target version. Two readings
around a period in which neither changed make an interval; only then does a number belong to
something. Files are named by their content: writing the same intervals twice is one file.
"""

import hashlib
import io
import logging
import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from features.digests import canonical_json
from features.errors import CorruptDataError, InputError, ObjectExistsError
from features.storage import Store
from publish.channels import path_segment
from publish.engines import AcceptanceCounters, EngineState

logger = logging.getLogger(__name__)

_TIME = pa.timestamp("us", tz="UTC")

TELEMETRY_SCHEMA = pa.schema(
    [
        pa.field("engine", pa.string(), nullable=False),
        pa.field("target_id", pa.string(), nullable=False),
        pa.field("target_version", pa.int64()),
        pa.field("draft_artifact", pa.string()),
        pa.field("draft_fingerprint", pa.string(), nullable=False),
        pa.field("method", pa.string(), nullable=False),
        pa.field("num_speculative_tokens", pa.int32(), nullable=False),
        pa.field("started_at", _TIME, nullable=False),
        pa.field("ended_at", _TIME, nullable=False),
        pa.field("drafts", pa.int64(), nullable=False),
        pa.field("draft_tokens", pa.int64(), nullable=False),
        pa.field("accepted", pa.int64(), nullable=False),
        pa.field("accepted_per_position", pa.list_(pa.field("item", pa.int64())), nullable=False),
        pa.field("label", pa.string()),
    ]
)
"""One row per interval."""


@dataclass(frozen=True, slots=True)
class AcceptanceInterval:
    """Acceptance of one draft on one engine over a period without a change of weights."""

    engine: str
    target_id: str
    target_version: int | None
    """None: the engine's target version was not known."""
    draft_artifact: str | None
    """None: the draft the engine booted with."""
    draft_fingerprint: str
    method: str
    num_speculative_tokens: int
    started_at: datetime
    ended_at: datetime
    drafts: int
    """Draft rounds."""
    draft_tokens: int
    accepted: int
    accepted_per_position: tuple[int, ...]
    label: str | None = None
    """What the period was, for people: ``before swap``."""

    @property
    def counters(self) -> AcceptanceCounters:
        """The counts alone."""
        return AcceptanceCounters(self.drafts, self.draft_tokens, self.accepted, self.accepted_per_position)

    @property
    def tau(self) -> float:
        """Acceptance length ``1 + accepted / drafts``; NaN without a round."""
        return self.counters.tau


def measure_interval(
    before: AcceptanceCounters,
    after: AcceptanceCounters,
    *,
    state: EngineState,
    target_id: str,
    target_version: int | None,
    started_at: datetime,
    ended_at: datetime,
    label: str | None = None,
) -> AcceptanceInterval:
    """Label the difference of two readings with what the engine held between them. Pure.

    Raises:
        InputError: the counters went backwards (the engine restarted in between), the two
            readings count other positions, or the times are naive or out of order.
    """
    if len(before.accepted_per_position) != len(after.accepted_per_position):
        raise InputError(
            f"engine {state.engine}: readings over {len(before.accepted_per_position)} and "
            f"{len(after.accepted_per_position)} draft positions cannot be subtracted; read both again"
        )
    delta = after - before
    if min(delta.drafts, delta.draft_tokens, delta.accepted, *delta.accepted_per_position) < 0:
        raise InputError(
            f"engine {state.engine}: its counters went backwards ({before.drafts} drafts, then "
            f"{after.drafts}): it restarted between the readings. Measure the interval again."
        )
    if started_at.tzinfo is None or ended_at.tzinfo is None or ended_at < started_at:
        raise InputError(
            f"an interval needs two aware times in order, got {started_at.isoformat()} and "
            f"{ended_at.isoformat()}"
        )
    return AcceptanceInterval(
        engine=state.engine,
        target_id=target_id,
        target_version=target_version,
        draft_artifact=state.draft_artifact,
        draft_fingerprint=state.draft_fingerprint,
        method=state.method,
        num_speculative_tokens=state.num_speculative_tokens,
        started_at=started_at.astimezone(UTC),
        ended_at=ended_at.astimezone(UTC),
        drafts=delta.drafts,
        draft_tokens=delta.draft_tokens,
        accepted=delta.accepted,
        accepted_per_position=delta.accepted_per_position,
        label=label,
    )


def pooled(intervals: Iterable[AcceptanceInterval]) -> AcceptanceCounters:
    """Sum of the counts: tau over several intervals is a ratio of sums, not a mean of taus.

    Raises:
        InputError: the intervals draft different numbers of tokens, or there is none.
    """
    rows = list(intervals)
    widths = {len(row.accepted_per_position) for row in rows}
    if len(widths) != 1:
        raise InputError(f"can only pool intervals of one number of draft positions, got {sorted(widths)}")
    return AcceptanceCounters(
        drafts=sum(row.drafts for row in rows),
        draft_tokens=sum(row.draft_tokens for row in rows),
        accepted=sum(row.accepted for row in rows),
        accepted_per_position=tuple(
            sum(position) for position in zip(*(row.accepted_per_position for row in rows), strict=True)
        ),
    )


def write_telemetry(store: Store, intervals: Sequence[AcceptanceInterval]) -> tuple[str, ...]:
    """Store intervals, one file per engine and UTC day of their end; returns the paths."""
    by_place: dict[tuple[str, date], list[AcceptanceInterval]] = defaultdict(list)
    for row in intervals:
        by_place[row.engine, row.ended_at.astimezone(UTC).date()].append(row)
    paths = []
    for (engine, day), rows in sorted(by_place.items()):
        path = f"telemetry/{path_segment(engine)}/{day.isoformat()}/{_content_uuid(rows)}.parquet"
        sink = io.BytesIO()
        pq.write_table(pa.Table.from_pylist([_as_row(row) for row in rows], schema=TELEMETRY_SCHEMA), sink)
        try:
            store.create(path, sink.getvalue())
        except ObjectExistsError:
            logger.debug("%s holds these intervals already", path)
        paths.append(path)
    return tuple(paths)


def read_telemetry(store: Store, engine: str | None = None) -> tuple[AcceptanceInterval, ...]:
    """All stored intervals, of one engine when named, ordered by end, engine and start.

    Raises:
        CorruptDataError: a file is cut short or has other columns.
    """
    prefix = "telemetry" if engine is None else f"telemetry/{path_segment(engine)}"
    paths = [path for path in store.list(prefix) if path.startswith(f"{prefix}/")]
    rows = [row for path in paths for row in _read_file(store, path)]
    return tuple(sorted(rows, key=lambda row: (row.ended_at, row.engine, row.started_at)))


def _read_file(store: Store, path: str) -> list[AcceptanceInterval]:
    try:
        table = pq.read_table(io.BytesIO(store.read(path)))
        known = table.select([field.name for field in fields(AcceptanceInterval)]).cast(TELEMETRY_SCHEMA)
    except (pa.ArrowException, KeyError, ValueError, FileNotFoundError) as error:
        raise CorruptDataError(
            f"{path} is no telemetry file: {error}. Delete it, or restore it from a copy."
        ) from error
    return [AcceptanceInterval(**row | _restored(row)) for row in known.to_pylist()]


def _restored(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "accepted_per_position": tuple(row["accepted_per_position"]),
        "started_at": row["started_at"].astimezone(UTC),
        "ended_at": row["ended_at"].astimezone(UTC),
    }


def _as_row(row: AcceptanceInterval) -> dict[str, Any]:
    return asdict(row) | {"accepted_per_position": list(row.accepted_per_position)}


def _content_uuid(rows: Sequence[AcceptanceInterval]) -> uuid.UUID:
    """A name from what is stored, not from chance: a retry finds its own file."""
    body = [
        _as_row(row) | {"started_at": row.started_at.isoformat(), "ended_at": row.ended_at.isoformat()}
        for row in rows
    ]
    return uuid.UUID(bytes=hashlib.sha256(canonical_json(body)).digest()[:16])
