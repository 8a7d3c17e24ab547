"""What gc decides from: every object, who names it, who needs it. Refused when listings contradict each other.

What a listing leaves out looks like something that nobody needs. So all listings are compared with
one scan that is older than they: a name that the scan has and they lack is asked for, and if it
exists, they are behind.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from features.commits import CommitName
from features.errors import CorruptDataError, LakeContractError
from features.lake import Lake
from features.leases import LeaseRecord, leases
from features.retention import Pin, pins
from features.snapshot_format import marker_number
from features.snapshots import Listing
from features.storage import ObjectFacts
from features.tombstones import Hidden, mark_path
from features.zarr_layout import GROUP_FILE

_LISTINGS = 5


@dataclass(frozen=True, slots=True)
class LakeState:
    """All that gc decides from; read by :func:`survey`."""

    objects: Mapping[str, ObjectFacts]
    committed: frozenset[str]
    """Data prefixes that a commit names, visible or not."""
    taken: frozenset[str]
    """Commit names in use: commits, fences, and commits that only a snapshot still holds."""
    attempts: Mapping[str, str | None]
    """The commit name of each orphan prefix's writer; None: not known."""
    hidden: Hidden
    leases: tuple[LeaseRecord, ...]
    pinned: frozenset[str]
    """Commits that pinned revisions list."""
    dropped: frozenset[str]
    """Commits that the newest snapshot holds as dropped: nothing of them can be seen, without a tombstone too."""


def survey(lake: Lake) -> LakeState:
    """Read what gc decides from. The data are listed before the commits, so a fragment is never half seen.

    Raises:
        CorruptDataError: a commit is unreadable, so what it names is not known: run fsck first; or
            listings stay behind what exists.
    """
    objects = lake.store.scan("")
    for _ in range(_LISTINGS):
        try:
            listing, held, kept = lake.snapshots.listing(), leases(lake), pins(lake)
            missed = next(_not_listed(lake, objects, listing, held, kept), None)
            if missed is None:
                return _state(lake, objects, listing, held, kept)
        except FileNotFoundError as error:  # deleted since it was listed, or an answer that is behind
            missed = str(error)
    raise CorruptDataError(
        f"{lake.url}: listings and reads do not show {missed}, which another answer showed. Nothing was deleted; run "
        f"gc again when nothing else is at work."
    )


def prefixes(objects: Mapping[str, ObjectFacts] | set[str]) -> set[str]:
    """Data prefixes that have an object."""
    return {
        "/".join(path.split("/")[:3]) for path in objects if path.startswith("data/") and path.count("/") > 2
    }


def prefix_parts(prefix: str) -> tuple[int, str] | None:
    """Version and plan id of a data prefix; None for data under no name of ours."""
    _, version, name = prefix.split("/")
    plan_id, dot, _ = name.rpartition(".")
    parsed = CommitName.parse(f"commits/{version}/{plan_id}.0.parquet") if dot else None
    return (parsed.version, parsed.plan_id) if parsed else None


def named_by(lake: Lake, commit_path: str) -> set[str]:
    """The data prefix that a commit names; none for a fence.

    Raises:
        FileNotFoundError: there is no such commit, or it was pruned.
        CorruptDataError: it is unreadable.
    """
    try:
        rows = lake.read_commit(commit_path).slice(0, 1).to_pylist()
    except LakeContractError as error:
        raise CorruptDataError(
            f"{error} Until then nothing is deleted, for it may name any data: restore it, or run draftlake fsck "
            f"--quarantine."
        ) from error
    return {str(row["data_prefix"]) for row in rows}


def _state(
    lake: Lake,
    objects: Mapping[str, ObjectFacts],
    listing: Listing,
    held: tuple[LeaseRecord, ...],
    kept: tuple[Pin, ...],
) -> LakeState:
    committed = _committed(lake, listing)
    taken = {name.path for name in (*listing.covered, *listing.markers)}
    orphans = sorted(prefixes(objects) - committed)
    return LakeState(
        objects=objects,
        committed=frozenset(committed),
        taken=frozenset(taken),
        attempts={prefix: _attempt_of(lake, prefix, objects, taken) for prefix in orphans},
        hidden=listing.hidden,
        leases=held,
        pinned=frozenset(commit for pin in kept for commit in pin.commits),
        dropped=frozenset(name.path for name, c in listing.covered.items() if c.state == "dropped"),
    )


def _committed(lake: Lake, listing: Listing) -> set[str]:
    marks = listing.hidden
    found = {name.data_prefix for name in (*marks.retired, *marks.quarantined) if name.data_prefix}
    found |= {covered.data_prefix for covered in listing.covered.values() if covered.data_prefix}
    for name in listing.tail:
        if name.path not in marks.unreadable:
            found |= named_by(lake, name.path)
    return found


def _not_listed(
    lake: Lake,
    objects: Mapping[str, ObjectFacts],
    listing: Listing,
    held: tuple[LeaseRecord, ...],
    kept: tuple[Pin, ...],
) -> Iterator[str]:
    """Objects of the older scan that the listings lack, though they exist."""
    marks, newest = listing.hidden, listing.snapshot.number if listing.snapshot is not None else 0
    shown = {name.path for name in (*listing.covered, *listing.markers)}
    shown |= {tombstone.path for tombstone in marks.tombstones}
    shown |= {mark_path(name) for name in marks.quarantined}
    shown |= {pin.path for pin in kept}
    leased = {lease.path for lease in held}
    for path in objects:
        folder, _, name = path.partition("/")
        match folder:
            case "commits":
                compared = CommitName.parse(path) is not None
            case "snapshots":
                number = marker_number(path)
                compared = number is not None and number > newest
            case "leases":
                compared = "/until." in path and path.rpartition("/")[0] not in leased
            case "tombstones" | "revisions":
                compared = name.endswith((".json", ".txt"))
            case _:
                compared = False
        if compared and path not in shown and lake.store.exists(path):
            yield path


def _attempt_of(lake: Lake, prefix: str, objects: Mapping[str, ObjectFacts], taken: set[str]) -> str | None:
    """The commit name that the writer of an orphan would take."""
    parsed = prefix_parts(prefix)
    if parsed is None:
        return None
    version, plan_id = parsed
    group = f"{prefix}/{GROUP_FILE}"
    try:
        attributes = json.loads(lake.store.read(group))["attributes"]["draftlake"]
        return CommitName(version, plan_id, int(attributes["attempt"])).path
    except (FileNotFoundError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, FileNotFoundError) and group in objects and lake.store.exists(group):
            raise
        # Cut or deleted by an earlier gc. A writer starts at the first free attempt, so that is the one.
        attempt = 0
        while CommitName(version, plan_id, attempt).path in taken:
            attempt += 1
        return CommitName(version, plan_id, attempt).path
