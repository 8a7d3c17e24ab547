"""Make snapshots and delete what they made superfluous. Anyone may, at any time, side by side.

Compaction writes two objects named by their content and then a numbered marker, create-only: who
loses the race for a number leaves at most objects that nothing names, and looks at what the winner
covers. Pruning deletes markers and snapshots that a snapshot has covered for longer than a grace.
"""

import io
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from features.commits import CommitName
from features.errors import InputError, ObjectExistsError
from features.lake import Lake
from features.schema import COMMIT_SCHEMA
from features.snapshot_format import Covered, Part, Snapshot, encode_covered, encode_marker, marker_path
from features.snapshots import CATALOG_ORDER, MIN_GRACE, Listing, read_commits

log = logging.getLogger(__name__)

COMPACTION_STEPS = ("rows", "commits", "marker")
"""Names that ``on_step`` of :func:`compact` is called with, in order."""

_ROW_GROUP = 65_536
_MAX_RACES = 10

StepHook = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Compaction:
    """What became of a compaction."""

    outcome: Literal["written", "adopted", "nothing"]
    """``adopted``: another compactor was first and covers the same; ``nothing``: there was too little to cover."""
    snapshot: Snapshot | None
    """The newest one."""
    new_commits: int
    """Commits it covers that its parent does not, fences among them."""
    dropped: int
    """Fragments whose rows it leaves out, because retention gave them up."""


@dataclass(frozen=True, slots=True)
class CompactionPlan:
    """What a snapshot would change; what ``--dry-run`` shows."""

    parent: int | None
    new_commits: tuple[CommitName, ...]
    dropped: tuple[CommitName, ...]

    @property
    def empty(self) -> bool:
        return not self.new_commits and not self.dropped


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """Objects that nobody needs any more, in the order in which they go."""

    commits: tuple[str, ...]
    """Markers of commits that a snapshot has covered for the whole grace."""
    snapshots: tuple[str, ...]
    """Superseded snapshots and leftovers of compactors that were killed or lost."""

    @property
    def empty(self) -> bool:
        return not self.commits and not self.snapshots


def plan_compaction(listing: Listing) -> CompactionPlan:
    """What a snapshot of these commits would cover and drop. Pure."""
    retired = {fragment.data_prefix for fragment in listing.hidden.retired}
    new = [name for name in listing.tail if name.path not in listing.hidden.unreadable]
    dropped = [n for n, c in listing.covered.items() if c.state == "kept" and c.data_prefix in retired]
    parent = listing.snapshot.number if listing.snapshot is not None else None
    return CompactionPlan(parent, tuple(new), tuple(sorted(dropped)))


def compact(
    lake: Lake, *, now: Callable[[], datetime], min_commits: int = 1, on_step: StepHook | None = None
) -> Compaction:
    """Cover every commit that can be read by a new snapshot, and leave out what retention gave up.

    Commits stay the same to every reader: the lake's revision does not change. Nothing is deleted.
    With fewer than ``min_commits`` new ones and nothing to drop, nothing is written. ``on_step``
    is told each finished storage step (:data:`COMPACTION_STEPS`).

    Raises:
        CorruptDataError: a commit or the newest snapshot is unreadable.
    """
    step = on_step or _ignore
    for _ in range(_MAX_RACES):
        listing, tables = read_commits(lake)
        plan = plan_compaction(listing)
        if plan.empty or (not plan.dropped and len(plan.new_commits) < min_commits):
            return Compaction("nothing", listing.snapshot, 0, 0)
        try:
            frame = _parent_rows(lake, listing)
        except FileNotFoundError:  # pruned meanwhile: there is a newer one
            continue
        covered = _covered(listing, tables)
        snapshot = _write(lake, listing, covered, _merged(frame, tables, covered), now, step)
        if snapshot is not None:
            return Compaction("written", snapshot, len(plan.new_commits), len(plan.dropped))
        winner = lake.snapshots.newest()
        if winner is not None and lake.snapshots.states(winner) == covered:
            return Compaction("adopted", winner, len(plan.new_commits), len(plan.dropped))
    log.info("compaction of %s lost %d races; leaving it to the others", lake.url, _MAX_RACES)
    return Compaction("adopted", lake.snapshots.newest(), 0, 0)


def plan_prune(lake: Lake, *, grace: timedelta, now: datetime, force: bool = False) -> PrunePlan:
    """Which commit markers and snapshots nobody needs any more.

    A marker goes when a snapshot that is older than ``grace`` covers it and the newest one still
    does; a snapshot when one that is older than ``grace`` follows it. Writers and readers that
    pause for longer than ``grace`` in the middle of an operation are not protected.

    Raises:
        InputError: ``grace`` is shorter than writers may go without looking for a new snapshot.
    """
    if grace < MIN_GRACE and not force:
        raise InputError(
            f"a grace of {grace} is shorter than {MIN_GRACE}: a writer at work may not know of the snapshot yet, "
            f"and commit a plan again. Wait longer, or use --force when no writer is at work."
        )
    listing = lake.snapshots.listing()
    settled = [s for s in lake.snapshots.all() if now - s.created_at >= grace]
    if not settled or listing.snapshot is None:
        return PrunePlan((), ())
    oldest_kept = settled[-1]
    covered = lake.snapshots.states(oldest_kept).keys() & listing.covered.keys()
    commits = tuple(name.path for name in sorted(covered & listing.markers))
    return PrunePlan(commits, _superseded(lake.store.list("snapshots"), oldest_kept))


def prune(lake: Lake, plan: PrunePlan, *, on_step: StepHook | None = None) -> int:
    """Delete what a plan names; returns how many objects. Running it again completes it."""
    step = on_step or _ignore
    for path in (*plan.commits, *plan.snapshots):
        lake.store.delete(path)
        step(path)
    log.info("pruned %d commits, %d objects of snapshots", len(plan.commits), len(plan.snapshots))
    return len(plan.commits) + len(plan.snapshots)


def prune_commits(lake: Lake, *, grace: timedelta, now: datetime, force: bool = False) -> PrunePlan:
    """:func:`plan_prune` carried out; returns what went.

    Raises:
        InputError: as :func:`plan_prune`.
    """
    plan = plan_prune(lake, grace=grace, now=now, force=force)
    prune(lake, plan)
    return plan


def _ignore(step: str) -> None:
    return None


def _parent_rows(lake: Lake, listing: Listing) -> pl.DataFrame:
    if listing.snapshot is None:
        return pl.DataFrame(pl.from_arrow(COMMIT_SCHEMA.empty_table()))
    return pl.DataFrame(pl.from_arrow(lake.snapshots.table(listing.snapshot)))


def _covered(listing: Listing, tables: Mapping[CommitName, pa.Table]) -> dict[CommitName, Covered]:
    gone = {fragment.data_prefix for fragment in listing.hidden.retired}
    covered = dict(listing.covered)
    for name, table in tables.items():
        covered[name] = Covered("kept", table["data_prefix"][0].as_py()) if table.num_rows else _FENCE
    return {n: _DROPPED if c.state == "kept" and c.data_prefix in gone else c for n, c in covered.items()}


_FENCE = Covered("fence", None)
_DROPPED = Covered("dropped", None)


def _merged(
    parent: pl.DataFrame, tables: Mapping[CommitName, pa.Table], covered: Mapping[CommitName, Covered]
) -> pl.DataFrame:
    frames = [pl.DataFrame(pl.from_arrow(table)) for table in tables.values() if table.num_rows]
    kept = [c.data_prefix for c in covered.values() if c.state == "kept"]
    merged = pl.concat([parent, *frames])
    return merged.filter(pl.col("data_prefix").is_in(kept)).sort(CATALOG_ORDER)


def _write(
    lake: Lake,
    listing: Listing,
    covered: Mapping[CommitName, Covered],
    frame: pl.DataFrame,
    now: Callable[[], datetime],
    step: StepHook,
) -> Snapshot | None:
    """Write a snapshot, its marker last; None when another compactor took the number."""
    parent = listing.snapshot.number if listing.snapshot is not None else None
    number = (parent or 0) + 1
    parts: dict[str, Part] = {}
    for kind, data in (("rows", encode_rows(frame)), ("commits", encode_covered(covered))):
        parts[kind] = Part.of(number, kind, data)
        with suppress(ObjectExistsError):  # named by its content: it is the same
            lake.store.create(parts[kind].path, data)
        step(kind)
    pairs = frame.select("target_version", "head_id").unique().rows()
    snapshot = Snapshot(
        number=number,
        parent=parent,
        created_at=now(),
        write_uuid=uuid.uuid4().hex,
        target_id=lake.target.target_id,
        windows=frame.height,
        heads=_registered_heads(lake, pairs),
        commits=parts["commits"],
        rows=parts["rows"],
    )
    try:
        lake.store.create(marker_path(number), encode_marker(snapshot))
    except ObjectExistsError:
        with suppress(FileNotFoundError):
            if lake.snapshots.read(number).write_uuid == snapshot.write_uuid:  # the answer was lost
                return snapshot
        return None
    step("marker")
    log.info("snapshot number=%d commits=%d windows=%d", number, len(covered), frame.height)
    return snapshot


def _registered_heads(lake: Lake, pairs: Sequence[tuple[int, str]]) -> dict[int, str]:
    """The pairs of version and head that are as registered; the catalog looks at the others each time."""
    registered = {record.version.number: record.head_id for record in lake.versions()}
    return {version: head for version, head in sorted(pairs) if registered.get(version) == head}


def encode_rows(frame: pl.DataFrame) -> bytes:
    """The Parquet file of a snapshot's rows, which are in ``CATALOG_ORDER``."""
    sink = io.BytesIO()
    table = frame.to_arrow().cast(COMMIT_SCHEMA)
    pq.write_table(table, sink, compression="zstd", row_group_size=_ROW_GROUP)
    return sink.getvalue()


def _superseded(objects: Sequence[str], oldest_kept: Snapshot) -> tuple[str, ...]:
    """Objects of snapshots before the oldest that is kept, and leftovers beside it, upwards.

    Of each snapshot the marker goes first. That of the first stays for ever, by which a reader whose
    listing is empty knows that there are snapshots; its objects go before any other marker, so that
    it is never taken for the newest.
    """
    own = {marker_path(1), oldest_kept.path, oldest_kept.commits.path, oldest_kept.rows.path}
    gone = [path for path in objects if _number_of(path) <= oldest_kept.number and path not in own]
    return tuple(sorted(gone, key=lambda path: (_number_of(path), not path.endswith(".json"), path)))


def _number_of(path: str) -> int:
    digits = path.removeprefix("snapshots/").partition(".")[0]
    return int(digits) if digits.isdecimal() else 2**63
