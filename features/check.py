"""Check a lake against its commits: what is absent, cut, changed, or left over; and hide what is damaged.

Reading a check deletes nothing. Repair is a quarantine mark, which readers skip and count: the
plan can then be collected again, under its next attempt, or the objects be put back and released.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

from features.commits import CommitName
from features.errors import LakeContractError
from features.fragments import TOKENS_FILE
from features.lake import Lake
from features.schema import HeadId, TargetVersion
from features.snapshots import Listing
from features.storage import LocalStore
from features.survey import prefixes
from features.tombstones import FragmentName, Hidden, hidden, mark_damaged, unmark
from features.writer import ARRAYS
from features.zarr_layout import ARRAY_FILE, GROUP_FILE, SHARD_KEY, ShardLayout

Level = Literal[0, 1, 2]
Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as a commit, version or writer would leave it."""

    code: str
    """``commit_unreadable``, ``snapshot_unreadable``, ``tombstone_unreadable``, ``object_absent``,
    ``version_unusable``, ``wrong_length``, ``wrong_index``, ``wrong_rows``, ``wrong_bytes``;
    harmless: ``orphan_data``, ``temporary_file``, ``quarantined``, ``restored``."""
    path: str
    detail: str
    harmful: bool
    """False for what no reader ever sees: leftovers of killed writers, and what is in quarantine."""
    fragment: FragmentName | None = None
    """The fragment that a reader cannot use because of it."""


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """How much to look at."""

    level: Level = 0
    share: float = 1.0
    """Share of the windows whose bytes level 2 reads, the same ones for one seed."""
    seed: int = 0

    def takes(self, row: dict[str, Any]) -> bool:
        """Whether a window is in the sample."""
        key = f"{self.seed} {row['data_prefix']} {row['window_index']}".encode()
        drawn = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        return drawn < self.share * 2**64


@dataclass(slots=True)
class _Lists:
    """What a lake says of itself."""

    hidden: Hidden = field(default_factory=Hidden)
    listing: Listing | None = None
    findings: list[Finding] = field(default_factory=list)


def check_lake(
    lake: Lake,
    level: Level = 0,
    *,
    share: float = 1.0,
    seed: int = 0,
    advance: Callable[[int], None] | None = None,
) -> tuple[Finding, ...]:
    """Check a lake; each level includes those below.

    0: the listing against the commits, snapshots and versions. 1: lengths, shard indexes and row
    ranges. 2: checksums of every head, and of every window or a ``share`` of them.
    ``advance`` is told each checked fragment.
    """
    options = CheckOptions(level, share, seed)
    lake = Lake(lake.store.origin, lake.target)  # what was read or cached before must not hide a fault
    objects = set(lake.store.list(""))
    lists = _lists(lake)
    findings = lists.findings
    hidden_prefixes, in_quarantine = lists.hidden.prefixes, frozenset(lists.hidden.quarantined)
    committed = set(hidden_prefixes)
    heads: set[tuple[int, HeadId]] = set()
    for name, rows in _fragments(lake, lists, objects):
        committed.add(str(name.data_prefix))
        if name.data_prefix in hidden_prefixes and name not in in_quarantine:
            continue
        found = _check_fragment(lake, name, rows, objects, options)
        if found:  # an answer that is wrong once is no damage
            lake = Lake(lake.store, lake.target)
            found = _check_fragment(lake, name, rows, objects, options)
        if name in in_quarantine:
            found = [_quarantined(name, found, options)]
        else:
            heads.add((rows[0]["target_version"], rows[0]["head_id"]))
        findings += found
        if advance is not None:
            advance(1)
    unreadable = sorted(lists.hidden.unreadable)
    findings += [
        Finding("quarantined", path, "the commit is unreadable", harmful=False) for path in unreadable
    ]
    findings += _left_over(lake, objects, committed)
    for number, head_id in sorted(heads):
        version = TargetVersion(number)
        findings += _caught(
            "version_unusable", str(version), _look_at_head, lake, version, head_id, level >= 2
        )
    return tuple(dict.fromkeys(findings))


def quarantine_damaged(lake: Lake, findings: Iterable[Finding], at: datetime) -> tuple[FragmentName, ...]:
    """Hide the fragments that harmful findings name; those of heads, versions and snapshots name none.

    Returns the fragments that were marked now.
    """
    problems: dict[FragmentName, list[str]] = {}
    for finding in findings:
        if finding.harmful and finding.fragment is not None:
            problems.setdefault(finding.fragment, []).append(f"{finding.code}: {finding.detail}")
    return tuple(
        name for name in sorted(problems, key=str) if mark_damaged(lake.store, name, problems[name], at)
    )


def release_restored(lake: Lake, findings: Iterable[Finding]) -> tuple[FragmentName, ...]:
    """Show fragments again that a full level-2 check found ``restored``."""
    restored = tuple(f.fragment for f in findings if f.code == "restored" and f.fragment is not None)
    for name in restored:
        unmark(lake.store, name)
    return restored


def _lists(lake: Lake) -> _Lists:
    lists = _Lists()
    try:
        lists.hidden = hidden(lake.store)
    except LakeContractError as error:
        lists.findings.append(Finding("tombstone_unreadable", "tombstones", str(error), harmful=True))
        return lists
    try:
        lists.listing = lake.snapshots.listing()
    except LakeContractError as error:
        lists.findings.append(Finding("snapshot_unreadable", "snapshots", str(error), harmful=True))
    return lists


def _fragments(lake: Lake, lists: _Lists, objects: set[str]) -> Iterator[tuple[FragmentName, Rows]]:
    """Every fragment that a commit or the newest snapshot names, with its rows; what is unreadable is noted."""
    if lists.listing is None:
        tail = sorted(name for name in map(CommitName.parse, objects) if name is not None)
    else:
        tail = list(lists.listing.tail)
        yield from _in_snapshot(lake, lists)
    known_bad = lists.hidden.unreadable
    for name in tail:
        if name.path in known_bad:
            continue
        try:
            rows = _read_twice(lake, name.path)
        except FileNotFoundError:  # covered and deleted since it was listed
            continue
        except LakeContractError as error:
            damaged = FragmentName(name.path, None)
            lists.findings.append(Finding("commit_unreadable", name.path, str(error), True, damaged))
            continue
        if rows:
            yield FragmentName(name.path, rows[0]["data_prefix"]), rows


def _read_twice(lake: Lake, path: str) -> Rows:
    """A commit's rows; read again when an answer was wrong, for once is no damage."""
    try:
        return list(lake.read_commit(path).to_pylist())
    except (FileNotFoundError, LakeContractError):
        return list(lake.read_commit(path).to_pylist())


def _in_snapshot(lake: Lake, lists: _Lists) -> Iterator[tuple[FragmentName, Rows]]:
    listing = lists.listing
    if listing is None or listing.snapshot is None:
        return
    kept = {name for name, covered in listing.covered.items() if covered.state == "kept"}
    for version in sorted({name.version for name in kept}):
        try:
            rows = lake.snapshots.table(listing.snapshot, target_version=version).to_pylist()
        except (LakeContractError, FileNotFoundError) as error:
            path = listing.snapshot.rows.path
            lists.findings.append(Finding("snapshot_unreadable", path, str(error), harmful=True))
            return
        rows.sort(key=itemgetter("plan_id", "attempt", "window_index"))
        for (plan_id, attempt), members in groupby(rows, key=itemgetter("plan_id", "attempt")):
            fragment = list(members)
            name = CommitName(version, plan_id, attempt)
            kept.discard(name)
            yield FragmentName(name.path, fragment[0]["data_prefix"]), fragment
    for name in sorted(kept):
        detail = f"{listing.snapshot.path} covers it and holds no row of it"
        lists.findings.append(Finding("snapshot_unreadable", name.path, detail, harmful=True))


def _check_fragment(
    lake: Lake, name: FragmentName, rows: Rows, objects: set[str], options: CheckOptions
) -> list[Finding]:
    prefix = str(name.data_prefix)
    absent = [p for p in _fragment_paths(prefix) if p not in objects and not lake.store.exists(p)]
    found = [Finding("object_absent", path, "a commit names it", harmful=True) for path in absent]
    if options.level >= 1 and not absent:
        found += _lengths(lake, prefix, rows)
        if options.level >= 2 and not found:
            found += _checksums(lake, [row for row in rows if options.takes(row)])
    return [f if f.code == "version_unusable" else replace(f, fragment=name) for f in found]


def _quarantined(name: FragmentName, found: list[Finding], options: CheckOptions) -> Finding:
    if not found and options.level == 2 and options.share >= 1:
        detail = "in quarantine, and every checksum holds: release it"
        return Finding("restored", name.commit_path, detail, harmful=False, fragment=name)
    detail = f"{found[0].code}: {found[0].detail}" if found else f"nothing wrong at level {options.level}"
    return Finding("quarantined", name.commit_path, detail, harmful=False, fragment=name)


def _fragment_paths(prefix: str) -> tuple[str, ...]:
    arrays = [f"{prefix}/{array}/{name}" for array in ARRAYS for name in (ARRAY_FILE, SHARD_KEY)]
    return (f"{prefix}/{GROUP_FILE}", *arrays, f"{prefix}/{TOKENS_FILE}")


def _left_over(lake: Lake, objects: set[str], committed: set[str]) -> Iterator[Finding]:
    for prefix in sorted(prefixes(objects) - committed):
        detail = "no commit names it: a writer is at work, was killed, or lost to an earlier one"
        yield Finding("orphan_data", prefix, detail, harmful=False)
    if isinstance(lake.store, LocalStore):
        for path in lake.store.list_temporary():
            yield Finding("temporary_file", path, "a writer is at work or was killed", harmful=False)


def _look_at_head(lake: Lake, version: TargetVersion, head_id: HeadId, read_heads: bool) -> None:
    lake.check_version(version, head_id, where=f"a fragment in {lake.url}")
    record = lake.version(version)
    if read_heads or not lake.has_head(record.head_id):
        lake.head(record.head_id)


def _lengths(lake: Lake, prefix: str, rows: Rows) -> Iterator[Finding]:
    ends = [row["row_offset"] + row["num_rows"] for row in rows]
    if [row["row_offset"] for row in rows] != [0, *ends[:-1]] or any(row["num_rows"] < 1 for row in rows):
        yield Finding("wrong_rows", prefix, "the windows' rows are not back to back from 0", harmful=True)
    yield from _caught("wrong_length", prefix, lake.fragment_tokens, prefix)
    for array in ARRAYS:
        yield from _caught(
            "wrong_index", f"{prefix}/{array}", _look_at_index, lake, f"{prefix}/{array}", ends[-1]
        )


def _look_at_index(lake: Lake, folder: str, num_rows: int) -> None:
    layout = ShardLayout.from_metadata(
        lake.store.read(f"{folder}/{ARRAY_FILE}"), where=f"{folder}/{ARRAY_FILE}"
    )
    path = f"{folder}/{SHARD_KEY}"
    found = lake.store.size(path)
    if layout.num_rows != num_rows or found != layout.object_bytes:
        raise LakeContractError(
            f"{path}: metadata says {layout.num_rows} rows in {layout.object_bytes:,} bytes, "
            f"the commit {num_rows} rows, the object has {found:,} bytes"
        )
    if lake.store.read_range(path, layout.payload_bytes, layout.object_bytes) != layout.index():
        raise LakeContractError(f"{path}: the shard index is not that of rows in order")


def _checksums(lake: Lake, rows: Rows) -> Iterator[Finding]:
    version = TargetVersion(rows[0]["target_version"]) if rows else None
    if version is not None:
        where = f"a fragment in {lake.url}"
        unusable = _caught(
            "version_unusable",
            str(version),
            partial(lake.check_version, where=where),
            version,
            rows[0]["head_id"],
        )
        if unusable:  # the fragment may be whole, and is not to be hidden for its version's sake
            yield from unusable
            return
    for row in rows:
        yield from _caught("wrong_bytes", row["data_prefix"], lake.read_window, row)


def _caught(code: str, path: str, look: Callable[..., object], *arguments: Any) -> list[Finding]:
    try:
        look(*arguments)
    except LakeContractError as error:
        return [Finding(code, path, str(error), harmful=True)]
    return []
