"""Delete what no reader can need: data of retired fragments, orphans, temporary files, expired leases.

Plan first, delete second. An orphan's attempt is fenced off before its data go, so that its
writer, if it still lives, fails to commit and starts over; running a killed gc again completes it.
Head snapshots, version records and registry objects are never deleted; commits only by ``compact``,
once a snapshot covers them.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

from features.commits import CommitName, encode_commit
from features.errors import InputError, ObjectExistsError
from features.lake import Lake
from features.retention import Need
from features.storage import TEMPORARY_SUFFIX, ObjectFacts
from features.survey import LakeState, named_by, prefix_parts, prefixes
from features.tombstones import FragmentName, Tombstone, mark_path

log = logging.getLogger(__name__)

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


def plan_gc(
    state: LakeState,
    policy: GcPolicy,
    needs: Iterable[Need] = (),
    *,
    now: datetime,
    force: bool = False,
) -> GcPlan:
    """Decide what goes. Pure. ``needs`` are registered drafts; ``force`` overrules leases, pins and needs."""
    planner = _Planner(state, policy, now, _folders(state.objects))
    holders = () if force else tuple(needs)
    actions = (*planner.retired(holders, force=force), *planner.orphans(), *planner.leftovers())
    return GcPlan(actions, dict(sorted(planner.waiting.items())))


def apply_gc(lake: Lake, plan: GcPlan, *, on_step: StepHook | None = None) -> GcReport:
    """Carry a plan out. ``on_step`` is told the path of each finished action."""
    done: dict[str, int] = {}
    kept: dict[str, str] = {}
    nbytes = 0
    for action in plan.actions:
        reason = None if action.fence is None else _fenced(lake, action.fence, action.path)
        if reason is not None:
            kept[action.path] = reason
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


@dataclass(slots=True)
class _Planner:
    """What goes of each kind, and why the rest waits."""

    state: LakeState
    policy: GcPolicy
    now: datetime
    folders: Mapping[str, _Folder]
    waiting: Counter[str] = field(default_factory=Counter)

    def retired(self, needs: tuple[Need, ...], *, force: bool) -> Iterator[GcAction]:
        """Data of fragments that retention gave up, and tombstones that hide nothing any more."""
        live = tuple(
            Need(f"lease of {lease.reader}", lease.commits)
            for lease in self.state.leases
            if lease.expires_at + self.policy.grace > self.now
        )
        pinned = Need("a pinned revision", self.state.pinned)
        present = prefixes(self.state.objects)
        for tombstone in self.state.hidden.tombstones:
            holders = () if force else (*live, *(() if tombstone.forced else (pinned, *needs)))
            left = [name for name in tombstone.fragments if name.data_prefix in present]
            for name in left:
                reason = self._reason_to_wait(name, tombstone, holders)
                if reason is not None:
                    self.waiting[reason] += 1
                elif name.data_prefix is not None:
                    yield self._folder("retired_data", name.data_prefix)
            if not left and self._spent(tombstone):
                marks = [mark_path(name) for name in tombstone.fragments]
                yield from (self._object("spent_tombstone", p) for p in marks if p in self.state.objects)
                yield self._object("spent_tombstone", tombstone.path)

    def orphans(self) -> Iterator[GcAction]:
        """Data that no commit names."""
        unreadable = {CommitName.parse(path) for path in self.state.hidden.unreadable}
        plans = {(name.version, name.plan_id) for name in unreadable if name}
        for prefix in sorted(prefixes(self.state.objects) - self.state.committed):
            parsed = prefix_parts(prefix)
            if parsed is None:
                self.waiting["data under no name of ours"] += 1
            elif parsed in plans:
                self.waiting["a commit of its plan is unreadable, and may name it"] += 1
            elif self.now - self.folders[prefix].newest <= self.policy.orphan_ttl:
                self.waiting["orphan younger than its ttl"] += 1
            else:
                fence = self.state.attempts.get(prefix)
                yield self._folder("orphan", prefix, None if fence in self.state.taken else fence)

    def leftovers(self) -> Iterator[GcAction]:
        """Temporary files of killed writers and leases that ran out."""
        for path in sorted(path for path in self.state.objects if path.endswith(TEMPORARY_SUFFIX)):
            if self.now - self.state.objects[path].written_at > self.policy.orphan_ttl:
                yield self._object("temporary_file", path)
            else:
                self.waiting["temporary file younger than the ttl"] += 1
        for lease in self.state.leases:
            if lease.expires_at + self.policy.grace <= self.now:
                yield self._folder("expired_lease", lease.path)

    def _reason_to_wait(
        self, name: FragmentName, tombstone: Tombstone, holders: tuple[Need, ...]
    ) -> str | None:
        if self.now - tombstone.at <= self.policy.grace:
            return "retired less than the grace ago"
        return next((f"needed by {need.who}" for need in holders if need.of({name.commit_path})), None)

    def _spent(self, tombstone: Tombstone) -> bool:
        dropped = self.state.dropped.issuperset(name.commit_path for name in tombstone.fragments)
        return dropped and self.now - tombstone.at > self.policy.orphan_ttl

    def _folder(self, kind: Kind, folder: str, fence: str | None = None) -> GcAction:
        found = self.folders[folder]
        return GcAction(kind, folder, found.nbytes, found.objects, fence)

    def _object(self, kind: Kind, path: str) -> GcAction:
        facts = self.state.objects.get(path)
        return GcAction(kind, path, facts.size if facts else 0, 1)


def _fenced(lake: Lake, fence: str, prefix: str) -> str | None:
    """Take an orphan's commit name. Otherwise why it may be no orphan."""
    try:
        lake.store.create(fence, encode_commit([]))
    except ObjectExistsError:
        try:
            return "its writer committed it meanwhile" if prefix in named_by(lake, fence) else None
        except FileNotFoundError:
            return "its commit's name is taken, and does not say by whom"
    return None
