"""Delete what no reader can need: data of retired fragments, orphans, temporary files, expired leases.

Plan first, delete second. An orphan's attempt is fenced off before its data go, so that its
writer, if it still lives, fails to commit and starts over; running a killed gc again completes it.
Head snapshots, version records and registry objects are never deleted; commits only by ``compact``,
once a snapshot covers them.
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

from features.commits import CommitName, encode_commit
from features.errors import CorruptDataError, InputError, LakeContractError, ObjectExistsError
from features.lake import Lake
from features.leases import LeaseRecord, leases
from features.retention import Need, pins
from features.snapshot_format import marker_path
from features.snapshots import Listing
from features.storage import TEMPORARY_SUFFIX, ObjectFacts
from features.tombstones import FragmentName, Hidden, Tombstone, mark_path
from features.zarr_layout import GROUP_FILE

log = logging.getLogger(__name__)

_LISTINGS = 5

Kind = Literal["retired_data", "orphan", "temporary_file", "expired_lease", "spent_tombstone"]
StepHook = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class GcPolicy:
    """How long gc waits. Both are longer than clocks differ and than a writer or reader pauses."""

    orphan_ttl: timedelta = timedelta(hours=24)
    """Age of data without a commit, of temporary files and of spent tombstones before they go."""
    grace: timedelta = timedelta(hours=1)
    """Age of a tombstone, and time past a lease's end, before either counts: for readers without a lease."""

    def __post_init__(self) -> None:
        if min(self.orphan_ttl, self.grace) < timedelta(0):
            raise InputError(f"waiting times are not negative, got {self.orphan_ttl} and {self.grace}")


@dataclass(frozen=True, slots=True)
class GcAction:
    """One thing to delete."""

    kind: Kind
    path: str
    nbytes: int
    objects: int
    fence: str | None = None
    """The commit to take before an orphan goes; None: its name is taken already."""


@dataclass(frozen=True, slots=True)
class GcPlan:
    """What to delete, in order, and what must wait."""

    actions: tuple[GcAction, ...]
    waiting: Mapping[str, int]
    """Fragments, leases and files that stay for now, by reason."""

    @property
    def nbytes(self) -> int:
        return sum(action.nbytes for action in self.actions)

    @property
    def counts(self) -> dict[str, int]:
        """Actions by kind."""
        found: dict[str, int] = {}
        for action in self.actions:
            found[action.kind] = found.get(action.kind, 0) + 1
        return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class GcReport:
    """What was deleted."""

    deleted: Mapping[str, int]
    """Actions done, by kind."""
    nbytes: int
    kept: Mapping[str, str] = field(default_factory=dict)
    """Planned, and not done after all: path and why."""


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


@dataclass(slots=True)
class _Folder:
    """What lies under a data prefix or a lease."""

    newest: datetime
    nbytes: int = 0
    objects: int = 0


def _folders(objects: Mapping[str, ObjectFacts]) -> dict[str, _Folder]:
    found: dict[str, _Folder] = {}
    for path, facts in objects.items():
        folder = "/".join(path.split("/")[: 2 if path.startswith("leases/") else 3])
        here = found.setdefault(folder, _Folder(facts.written_at))
        here.newest = max(here.newest, facts.written_at)
        here.nbytes += facts.size
        here.objects += 1
    return found


def survey(lake: Lake) -> LakeState:
    """Read what gc decides from. The data are listed before the commits, so a fragment is never half seen.

    Raises:
        CorruptDataError: a commit is unreadable, so what it names is not known: run fsck first.
    """
    objects = lake.store.scan("")
    listing = _listing(lake)
    marks = listing.hidden
    committed = {name.data_prefix for name in (*marks.retired, *marks.quarantined) if name.data_prefix}
    committed |= {covered.data_prefix for covered in listing.covered.values() if covered.data_prefix}
    for name in listing.tail:
        if name.path not in marks.unreadable:
            committed |= _prefix_of(lake, name.path)
    taken = {name.path for name in (*listing.covered, *listing.markers)}
    orphans = sorted(prefixes(objects) - committed)
    return LakeState(
        objects=objects,
        committed=frozenset(committed),
        taken=frozenset(taken),
        attempts={prefix: _attempt_of(lake, prefix, taken) for prefix in orphans},
        hidden=marks,
        leases=leases(lake),
        pinned=frozenset(commit for pin in pins(lake) for commit in pin.commits),
        dropped=frozenset(name.path for name, c in listing.covered.items() if c.state == "dropped"),
    )


def plan_gc(
    state: LakeState,
    policy: GcPolicy,
    needs: Iterable[Need] = (),
    *,
    now: datetime,
    force: bool = False,
) -> GcPlan:
    """Decide what goes. Pure. ``needs`` are registered drafts; ``force`` overrules leases, pins and needs."""
    waiting: dict[str, int] = {}
    folders = _folders(state.objects)
    actions = [
        *_retired(state, folders, policy, tuple(needs), waiting, now, force),
        *_orphans(state, folders, policy, waiting, now),
        *_leftovers(state, folders, policy, waiting, now),
    ]
    return GcPlan(tuple(actions), dict(sorted(waiting.items())))


def apply_gc(lake: Lake, plan: GcPlan, *, on_step: StepHook | None = None) -> GcReport:
    """Carry a plan out. ``on_step`` is told the path of each finished action."""
    done: dict[str, int] = {}
    kept: dict[str, str] = {}
    nbytes = 0
    for action in plan.actions:
        if action.fence is not None and not _fenced(lake, action.fence, action.path):
            kept[action.path] = "its writer committed it meanwhile"
            continue
        if action.kind in ("retired_data", "orphan", "expired_lease"):
            lake.store.delete_prefix(action.path)
        else:
            lake.store.delete(action.path)
        log.info("gc kind=%s path=%s bytes=%d", action.kind, action.path, action.nbytes)
        done[action.kind] = done.get(action.kind, 0) + 1
        nbytes += action.nbytes
        if on_step is not None:
            on_step(action.path)
    return GcReport(done, nbytes, kept)


def prefixes(objects: Iterable[str]) -> set[str]:
    """Data prefixes that have an object."""
    return {
        "/".join(path.split("/")[:3]) for path in objects if path.startswith("data/") and path.count("/") > 2
    }


def _retired(
    state: LakeState,
    folders: Mapping[str, _Folder],
    policy: GcPolicy,
    needs: tuple[Need, ...],
    waiting: dict[str, int],
    now: datetime,
    force: bool,
) -> Iterable[GcAction]:
    live = tuple(
        Need(f"lease of {lease.reader}", lease.commits)
        for lease in state.leases
        if lease.expires_at + policy.grace > now
    )
    pinned = Need("a pinned revision", state.pinned)
    present = prefixes(state.objects)
    for tombstone in state.hidden.tombstones:
        holders = () if force else (*live, *(() if tombstone.forced else (pinned, *needs)))
        left = False
        for name in tombstone.fragments:
            reason = _reason_to_wait(name, tombstone, holders, policy, now)
            if name.data_prefix not in present:
                continue
            left = True
            if reason is not None:
                waiting[reason] = waiting.get(reason, 0) + 1
            elif name.data_prefix is not None:
                yield _folder_action("retired_data", name.data_prefix, folders)
        seen = not state.dropped.issuperset(name.commit_path for name in tombstone.fragments)
        if not left and not seen and now - tombstone.at > policy.orphan_ttl:
            marks = [mark_path(name) for name in tombstone.fragments]
            yield from (_object_action("spent_tombstone", p, state) for p in marks if p in state.objects)
            yield _object_action("spent_tombstone", tombstone.path, state)


def _reason_to_wait(
    name: FragmentName, tombstone: Tombstone, holders: tuple[Need, ...], policy: GcPolicy, now: datetime
) -> str | None:
    if now - tombstone.at <= policy.grace:
        return "retired less than the grace ago"
    return next((f"needed by {need.who}" for need in holders if need.of({name.commit_path})), None)


def _orphans(
    state: LakeState,
    folders: Mapping[str, _Folder],
    policy: GcPolicy,
    waiting: dict[str, int],
    now: datetime,
) -> Iterable[GcAction]:
    unreadable = {CommitName.parse(path) for path in state.hidden.unreadable}
    plans = {(name.version, name.plan_id) for name in unreadable if name}
    for prefix in sorted(prefixes(state.objects) - state.committed):
        parsed = _prefix_parts(prefix)
        if parsed is None:
            reason: str | None = "data under no name of ours"
        elif parsed in plans:
            reason = "a commit of its plan is unreadable, and may name it"
        else:
            reason = (
                "orphan younger than its ttl" if now - folders[prefix].newest <= policy.orphan_ttl else None
            )
        if reason is not None:
            waiting[reason] = waiting.get(reason, 0) + 1
            continue
        fence = state.attempts.get(prefix)
        yield _folder_action("orphan", prefix, folders, None if fence in state.taken else fence)


def _leftovers(
    state: LakeState,
    folders: Mapping[str, _Folder],
    policy: GcPolicy,
    waiting: dict[str, int],
    now: datetime,
) -> Iterable[GcAction]:
    for path in sorted(path for path in state.objects if path.endswith(TEMPORARY_SUFFIX)):
        if now - state.objects[path].written_at > policy.orphan_ttl:
            yield _object_action("temporary_file", path, state)
        else:
            waiting["temporary file younger than the ttl"] = (
                waiting.get("temporary file younger than the ttl", 0) + 1
            )
    for lease in state.leases:
        if lease.expires_at + policy.grace <= now:
            yield _folder_action("expired_lease", lease.path, folders)


def _listing(lake: Lake) -> Listing:
    """The commits, by listings that are not behind: what a newer snapshot covers would look like an orphan."""
    for _ in range(_LISTINGS):
        listing = lake.snapshots.listing()
        number = listing.snapshot.number if listing.snapshot is not None else 0
        if not lake.store.exists(marker_path(number + 1)):
            return listing
    raise CorruptDataError(
        f"{lake.url}: listings do not show {marker_path(number + 1)}, which exists. Nothing was deleted; run gc again "
        f"when no compaction is at work."
    )


def _folder_action(
    kind: Kind, folder: str, folders: Mapping[str, _Folder], fence: str | None = None
) -> GcAction:
    found = folders[folder]
    return GcAction(kind, folder, found.nbytes, found.objects, fence)


def _object_action(kind: Kind, path: str, state: LakeState) -> GcAction:
    facts = state.objects.get(path)
    return GcAction(kind, path, facts.size if facts else 0, 1)


def _fenced(lake: Lake, fence: str, prefix: str) -> bool:
    """Take an orphan's commit name. False: its writer took it first, so it is no orphan."""
    try:
        lake.store.create(fence, encode_commit([]))
    except ObjectExistsError:
        return prefix not in _prefix_of(lake, fence)
    return True


def _prefix_of(lake: Lake, commit_path: str) -> set[str]:
    try:
        rows = lake.read_commit(commit_path).slice(0, 1).to_pylist()
    except FileNotFoundError:  # pruned since it was listed: a snapshot holds it
        return set()
    except LakeContractError as error:
        raise CorruptDataError(
            f"{error} Until then nothing is deleted, for it may name any data: restore it, or run draftlake fsck "
            f"--quarantine."
        ) from error
    return {str(row["data_prefix"]) for row in rows}


def _prefix_parts(prefix: str) -> tuple[int, str] | None:
    """Version and plan id of a data prefix."""
    _, version, name = prefix.split("/")
    plan_id, dot, _ = name.rpartition(".")
    parsed = CommitName.parse(f"commits/{version}/{plan_id}.0.parquet") if dot else None
    return (parsed.version, parsed.plan_id) if parsed else None


def _attempt_of(lake: Lake, prefix: str, taken: set[str]) -> str | None:
    """The commit name that the writer of an orphan would take."""
    parsed = _prefix_parts(prefix)
    if parsed is None:
        return None
    version, plan_id = parsed
    try:
        attributes = json.loads(lake.store.read(f"{prefix}/{GROUP_FILE}"))["attributes"]["draftlake"]
        return CommitName(version, plan_id, int(attributes["attempt"])).path
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        # Cut or deleted by an earlier gc. A writer starts at the first free attempt, so that is the one.
        attempt = 0
        while CommitName(version, plan_id, attempt).path in taken:
            attempt += 1
        return CommitName(version, plan_id, attempt).path
