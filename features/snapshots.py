"""Snapshots: many commits read as one. Made by ``features.compaction``, numbered, never overwritten.

A snapshot covers commits: it says what became of each and holds the rows of those that count. The
catalog is the newest snapshot and the tail of commits that it does not cover. Whoever reads both
lists the commits *first*: a marker that is deleted because a snapshot covers it was then either
still listed, or is covered by the snapshot found afterwards.
"""

import hashlib
import io
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from features.commits import CommitName, as_commit_rows, revision_path
from features.errors import CorruptDataError
from features.schema import COMMIT_SCHEMA, LakeRevision, TargetVersion
from features.snapshot_format import (
    Covered,
    Part,
    Snapshot,
    decode_covered,
    decode_marker,
    marker_number,
    marker_path,
)
from features.storage import Store
from features.tombstones import Hidden, hidden

if TYPE_CHECKING:
    from features.lake import Lake

MIN_GRACE = timedelta(hours=1)
"""Shortest time between covering a commit and deleting its marker. Far longer than :data:`MAX_VIEW_AGE_S`."""
MAX_VIEW_AGE_S = 600.0
"""How old a writer's knowledge of the newest snapshot may be when it commits."""

CATALOG_ORDER = ("target_version", "sample_id", "start", "plan_id", "window_index", "attempt")
"""How the rows of a snapshot and of a catalog are ordered."""

_READS = 5
_READERS = 8


def revision_of(commit_paths: Iterable[str]) -> LakeRevision:
    """The revision that a set of commits makes: SHA-256 over their sorted paths."""
    paths = sorted(commit_paths)
    return LakeRevision(hashlib.sha256("\n".join(paths).encode()).hexdigest(), len(paths))


@dataclass(frozen=True, slots=True)
class Listing:
    """The commits of a lake at one moment."""

    hidden: Hidden
    snapshot: Snapshot | None
    covered: Mapping[CommitName, Covered]
    tail: tuple[CommitName, ...]
    """Commits that the snapshot does not cover, sorted."""
    markers: frozenset[CommitName]
    """Every commit object there is, covered ones too."""

    @property
    def usable(self) -> list[CommitName]:
        """Commits that the snapshot keeps and nothing hides."""
        gone = self.hidden.prefixes
        return [n for n, c in self.covered.items() if c.state == "kept" and c.data_prefix not in gone]


def first_attempts(names: Iterable[CommitName]) -> list[CommitName]:
    """Of each version and plan the lowest attempt, sorted."""
    plans: dict[tuple[int, str], CommitName] = {}
    for name in sorted(names):
        plans.setdefault((name.version, name.plan_id), name)
    return list(plans.values())


class Snapshots:
    """The snapshots of one lake. Remembers what never changes, and for writers the newest for a while."""

    def __init__(self, store: Store, target_id: str) -> None:
        self._store = store
        self._target_id = target_id
        self._lock = threading.Lock()
        self._states: tuple[str, Mapping[CommitName, Covered]] | None = None
        self._view: tuple[float, Snapshot | None] | None = None
        self._rows: tuple[str, bytes] | None = None

    def all(self) -> tuple[Snapshot, ...]:
        """Every snapshot there is, oldest first, asked anew."""
        found = [self._read_if_there(number) for number in self._numbers()]
        return tuple(snapshot for snapshot in found if snapshot is not None)

    def newest(self) -> Snapshot | None:
        """The snapshot with the highest number, asked anew: a listing, one look for a successor, one read.

        Raises:
            CorruptDataError: its marker was changed, or is of another lake.
            LakeContractError: a newer format wrote it.
        """
        for _ in range(_READS):
            asked_at, numbers = time.monotonic(), self._numbers()
            with self._lock:
                seen = self._view[1].number if self._view is not None and self._view[1] is not None else 0
            # A listing never leads back behind what was seen before.
            number = max([seen, *numbers])
            # Listings may be behind, names are not. Pruning goes upwards and spares the first marker, so a
            # marker that is read after its successor was found absent is the newest or lacks its objects.
            while self._store.exists(marker_path(number + 1)):
                number += 1
            snapshot = self._read_if_there(number) if number else None
            # Gone since it was listed: a newer one is there by then.
            if snapshot is not None or not number:
                with self._lock:
                    self._view = (asked_at, snapshot)
                return snapshot
        raise CorruptDataError(f"{self._store.url}/{marker_path(number)} was there and cannot be read")

    def read(self, number: int) -> Snapshot:
        """One snapshot's marker; ``FileNotFoundError`` when there is none.

        Raises:
            CorruptDataError: it was changed, or is of another lake.
            LakeContractError: a newer format wrote it.
        """
        path = marker_path(number)
        snapshot = decode_marker(self._store.read(path), where=f"{self._store.url}/{path}")
        if snapshot.number != number or snapshot.target_id != self._target_id:
            raise CorruptDataError(
                f"{self._store.url}/{path} is snapshot {snapshot.number} of target {snapshot.target_id!r}, "
                f"expected {number} of {self._target_id!r}: it was moved or copied from elsewhere. Remove it."
            )
        return snapshot

    def states(self, snapshot: Snapshot) -> Mapping[CommitName, Covered]:
        """What a snapshot says of each commit it covers; kept for the snapshot asked last."""
        with self._lock:
            if self._states is not None and self._states[0] == snapshot.commits.sha256:
                return self._states[1]
        path = f"{self._store.url}/{snapshot.commits.path}"
        states = decode_covered(self._part(snapshot.commits), where=path)
        with self._lock:
            self._states = (snapshot.commits.sha256, states)
        return states

    def rows(self, snapshot: Snapshot) -> bytes:
        """The Parquet file of a snapshot's rows, checked; ``FileNotFoundError`` once it was pruned.

        Raises:
            CorruptDataError: it was cut or changed.
        """
        return self._part(snapshot.rows)

    def table(self, snapshot: Snapshot, **equal: Any) -> pa.Table:
        """Rows of a snapshot, ``COMMIT_SCHEMA``; only those whose columns have the values of ``equal``.

        Who asks for some asks again: the file then stays in memory, compressed.
        """
        with self._lock:
            raw = self._rows[1] if self._rows and self._rows[0] == snapshot.rows.sha256 else None
        if raw is None:
            raw = self.rows(snapshot)
            with self._lock:
                self._rows = (snapshot.rows.sha256, raw) if equal else None
        filters = [(name, "==", value) for name, value in equal.items()] or None
        found = pq.read_table(io.BytesIO(raw), filters=filters)
        return as_commit_rows(found, where=f"{self._store.url}/{snapshot.rows.path}")

    def listing(self) -> Listing:
        """What is committed now: three listings, a look, two reads when there is a snapshot, one per tombstone.

        What is hidden is asked first: a tombstone goes when no snapshot has its rows any more.
        """
        for _ in range(_READS):
            gone = hidden(self._store)
            found = map(CommitName.parse, self._store.list("commits"))
            markers = frozenset(name for name in found if name is not None)
            snapshot = self.newest()
            try:
                covered = self.states(snapshot) if snapshot is not None else {}
            except FileNotFoundError:  # pruned meanwhile: there is a newer one
                continue
            return Listing(gone, snapshot, covered, tuple(sorted(markers - covered.keys())), markers)
        raise CorruptDataError(
            f"{self._store.url}/snapshots: snapshot {snapshot.number if snapshot else 0} is the newest that can be "
            f"found, and its objects are absent: the listing is behind, or they were deleted. Try again; if it "
            f"persists, restore the folder from a copy."
        )

    def committed(self, name: CommitName) -> pa.Table | None:
        """What the newest snapshot knows of one commit, for writers: None when it does not cover it.

        A table without rows is a fence, or an attempt that retention dropped: start over under the next.
        The newest snapshot is asked for again when it was last asked :data:`MAX_VIEW_AGE_S` ago.
        Markers are deleted only :data:`MIN_GRACE` or more after they were covered, so a marker that
        is gone is covered by what is known here.
        """
        with self._lock:
            view = self._view
        snapshot = (
            view[1] if view is not None and time.monotonic() - view[0] < MAX_VIEW_AGE_S else self.newest()
        )
        if snapshot is None:
            return None
        try:
            covered = self.states(snapshot).get(name)
            if covered is None:
                return None
            if covered.state != "kept":
                return COMMIT_SCHEMA.empty_table()
            found = self.table(
                snapshot, target_version=name.version, plan_id=name.plan_id, attempt=name.attempt
            )
            return found.sort_by("window_index")
        except FileNotFoundError as error:
            raise CorruptDataError(f"{self._store.url}: an object of {snapshot.path} is absent") from error

    def dropped(self, name: CommitName) -> bool:
        """Whether the newest snapshot, asked anew, says that retention gave a commit up."""
        snapshot = self.newest()
        covered = self.states(snapshot).get(name) if snapshot is not None else None
        return covered is not None and covered.state == "dropped"

    def _numbers(self) -> list[int]:
        numbers = map(marker_number, self._store.list("snapshots"))
        return sorted(number for number in numbers if number is not None)

    def _read_if_there(self, number: int) -> Snapshot | None:
        try:
            return self.read(number)
        except FileNotFoundError:
            return None

    def _part(self, part: Part) -> bytes:
        data = self._store.read(part.path)
        if len(data) != part.nbytes or hashlib.sha256(data).hexdigest() != part.sha256:
            raise CorruptDataError(
                f"{self._store.url}/{part.path} ({len(data):,} bytes) is not the object its snapshot names "
                f"({part.nbytes:,} bytes, {part.sha256[:12]}): it was cut or changed. Restore it from a copy."
            )
        return data


def pinned_paths(lake: "Lake", digest: str) -> list[str]:
    """The commits of a pinned revision.

    Raises:
        FileNotFoundError: it was never pinned.
        CorruptDataError: the list was cut or changed: it does not make the revision it is named by.
    """
    path = revision_path(digest)
    paths = lake.store.read(path).decode(errors="replace").splitlines()
    if revision_of(paths).digest != digest:
        raise CorruptDataError(
            f"{lake.url}/{path} does not list the commits it is named by: it was cut or changed. Restore it from a "
            f"copy, or delete it if nobody needs that revision any more."
        )
    return paths


def commit_paths(lake: "Lake") -> list[str]:
    """Paths of the commits that count, sorted; a plan's only attempt is not read, so a lone fence is among them."""
    listing = lake.snapshots.listing()
    known = listing.usable
    tail = [name for name in listing.tail if name.path not in listing.hidden.unreadable]
    attempts = Counter((name.version, name.plan_id) for name in (*known, *tail))
    looked_at = [
        name
        for name in tail
        if attempts[name.version, name.plan_id] > 1 or name.path in listing.hidden.suspects
    ]
    tables = {name: lake.read_commit(name.path) for name in looked_at}
    usable = [n for n in tail if n not in tables or is_usable(tables[n], listing.hidden)]
    return [name.path for name in first_attempts((*known, *usable))]


def is_usable(table: pa.Table, gone: Hidden) -> bool:
    """Whether a commit's rows count: a fence has none, and what is hidden is as if it were not there."""
    return table.num_rows > 0 and table["data_prefix"][0].as_py() not in gone.prefixes


def read_commits(
    lake: "Lake", wanted: Callable[[CommitName], bool] | None = None
) -> tuple[Listing, dict[CommitName, pa.Table]]:
    """The listing and the rows of its tail, read side by side; those marked unreadable are left out.

    Raises:
        CorruptDataError: a commit is unreadable, or vanishes each time.
    """
    for _ in range(_READS):
        listing = lake.snapshots.listing()
        readable = [name for name in listing.tail if name.path not in listing.hidden.unreadable]
        names = [name for name in readable if wanted is None or wanted(name)]
        try:
            with ThreadPoolExecutor(_READERS) as pool:
                tables = list(pool.map(lambda name: lake.read_commit(name.path), names))
        except FileNotFoundError as error:  # covered and deleted meanwhile: list again
            vanished = error
            continue
        return listing, dict(zip(names, tables, strict=True))
    raise CorruptDataError(
        f"{lake.url}: a commit vanished each time the catalog was read ({vanished}); load it again, and if that "
        f"persists check the lake"
    ) from vanished


def commits_of(lake: "Lake", version: TargetVersion) -> Iterator[pa.Table]:
    """The rows of one version's commits that count, from the snapshot and from the tail."""
    listing, tail = read_commits(lake, lambda name: name.version == version.number)
    usable = [name for name, table in tail.items() if is_usable(table, listing.hidden)]
    known = [name for name in listing.usable if name.version == version.number]
    counting = set(first_attempts((*known, *usable)))
    if listing.snapshot is not None and known:
        table = lake.snapshots.table(listing.snapshot, target_version=version.number)
        names = zip(table["plan_id"].to_pylist(), table["attempt"].to_pylist(), strict=True)
        yield table.filter(pa.array([CommitName(version.number, *n) in counting for n in names], pa.bool_()))
    yield from (tail[name] for name in usable if name in counting)
