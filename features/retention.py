"""Which target versions to give up: a plan first, a tombstone second. Nothing is deleted here.

Whole versions go, the oldest first. A version stays when a pinned revision, a live lease or a
registered draft needs any of its fragments, unless that is overruled by force; the newest version
stays always. ``features.gc`` deletes what a tombstone names once no reader needs it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from features.commits import CommitName
from features.errors import CorruptDataError, InputError
from features.lake import Lake
from features.leases import leases
from features.snapshots import pinned_paths, read_commits
from features.storage import ObjectFacts
from features.tombstones import FragmentName, Tombstone, hidden, retire
from features.zarr_layout import GROUP_FILE

if TYPE_CHECKING:
    from features.catalog import Catalog


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """What to keep. Each limit that is set gives versions up; None sets none."""

    max_age: timedelta | None = None
    """Give up versions whose newest fragment is older."""
    keep_versions: int | None = None
    """Keep so many of the newest versions that hold windows."""
    max_bytes: int | None = None
    """Keep the newest versions whose features fit into so many bytes."""
    max_pin_age: timedelta | None = None
    """Release pinned revisions older than this that no lease and no registered draft needs."""

    def __post_init__(self) -> None:
        limits = (self.max_age, self.keep_versions, self.max_bytes, self.max_pin_age)
        if all(limit is None for limit in limits):
            raise InputError(
                "retention needs a limit: an age, a number of versions, a number of bytes, or an age of pins"
            )
        if (self.keep_versions is not None and self.keep_versions < 1) or (
            self.max_bytes is not None and self.max_bytes < 0
        ):
            raise InputError(
                f"retention keeps at least the newest version and no negative number of bytes, got "
                f"{self.keep_versions} versions, {self.max_bytes} bytes"
            )


@dataclass(frozen=True, slots=True)
class FragmentFacts:
    """What retention knows of a fragment."""

    name: FragmentName
    version: int
    nbytes: int
    """Of its data objects."""
    written_at: datetime


@dataclass(frozen=True, slots=True)
class Pin:
    """A pinned revision: ``revisions/<digest>.txt``."""

    path: str
    digest: str
    pinned_at: datetime
    commits: frozenset[str]


@dataclass(frozen=True, slots=True)
class Need:
    """Who needs which commits."""

    who: str
    commits: frozenset[str] | None
    """None: it may need any."""

    def of(self, commits: Collection[str]) -> bool:
        return self.commits is None or not self.commits.isdisjoint(commits)


@dataclass(frozen=True, slots=True)
class VersionDecision:
    """What becomes of one version, and why."""

    version: int
    fragments: int
    nbytes: int
    newest: datetime
    dropped: bool
    reasons: tuple[str, ...]
    """Limits that it exceeds; none: it stays."""
    needed_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """Pure outcome of a policy; what ``--dry-run`` shows."""

    versions: tuple[VersionDecision, ...]
    """Newest first."""
    fragments: tuple[FragmentName, ...]
    """To give up."""
    nbytes: int
    pins: tuple[str, ...]
    """Pinned revisions to release, by path."""
    forced: bool

    @property
    def empty(self) -> bool:
        return not self.fragments and not self.pins


def tombstoned(lake: Lake) -> frozenset[str]:
    """Data prefixes that readers leave out: given up by retention, or in quarantine."""
    return hidden(lake.store).prefixes


def plan_retention(
    fragments: Sequence[FragmentFacts],
    policy: RetentionPolicy,
    needs: Iterable[Need],
    *,
    pins: Iterable[Pin] = (),
    now: datetime,
    force: bool = False,
) -> RetentionPlan:
    """Decide which versions go. Pure: no storage, no clock.

    ``needs`` are live leases and registered drafts; ``pins`` need their own commits for as long as they last.
    """
    others = tuple(needs)
    released = tuple(sorted(pin.path for pin in pins if _releasable(pin, policy, others, now)))
    kept_pins = (
        Need(f"pinned revision {pin.digest[:12]}", pin.commits) for pin in pins if pin.path not in released
    )
    everyone = (*others, *kept_pins)
    by_version: dict[int, list[FragmentFacts]] = {}
    for fragment in fragments:
        by_version.setdefault(fragment.version, []).append(fragment)
    decisions: list[VersionDecision] = []
    total = 0
    for rank, version in enumerate(sorted(by_version, reverse=True)):
        members = by_version[version]
        commits = {member.name.commit_path for member in members}
        needed_by = tuple(need.who for need in everyone if need.of(commits))
        nbytes, newest = sum(member.nbytes for member in members), max(m.written_at for m in members)
        reasons = _exceeded(policy, rank, newest, total + nbytes, now)
        dropped = bool(reasons) and (force or not needed_by)
        total += nbytes  # an older version never outlives a younger one that does not fit
        decisions.append(VersionDecision(version, len(members), nbytes, newest, dropped, reasons, needed_by))
    gone = [fragment for d in decisions if d.dropped for fragment in by_version[d.version]]
    return RetentionPlan(
        versions=tuple(decisions),
        fragments=tuple(sorted(fragment.name for fragment in gone)),
        nbytes=sum(fragment.nbytes for fragment in gone),
        pins=released,
        forced=force,
    )


def apply_retention(
    lake: Lake,
    plan: RetentionPlan,
    *,
    now: datetime,
    reason: str,
    advance: Callable[[int], None] | None = None,
) -> str | None:
    """Release pins, then hide the fragments; running it again after a crash completes it.

    ``advance`` is told each released pin, and the number of fragments that were hidden, all at once.
    Returns the tombstone's path; None when no fragment goes.
    """
    for path in plan.pins:
        lake.store.delete(path)
        if advance is not None:
            advance(1)
    if not plan.fragments:
        return None
    tombstone = retire(lake.store, Tombstone(now, reason, plan.forced, plan.fragments))
    if advance is not None:
        advance(len(plan.fragments))
    return tombstone


def fragment_names(catalog: "Catalog") -> frozenset[FragmentName]:
    """The fragments that a catalog holds."""
    table = catalog.frame.select("target_version", "plan_id", "attempt", "data_prefix").unique().to_arrow()
    return frozenset(
        FragmentName(
            CommitName(row["target_version"], row["plan_id"], row["attempt"]).path, row["data_prefix"]
        )
        for row in table.to_pylist()
    )


def fragment_facts(lake: Lake, data: Mapping[str, ObjectFacts]) -> list[FragmentFacts]:
    """Every fragment that was not given up, with age and bytes from a scan of ``data``.

    Those that do not count now are among them, in quarantine or behind a lower attempt: they must go with
    their version, or they would count once the others are hidden.

    Raises:
        CorruptDataError: a commit is unreadable and not in quarantine.
    """
    listing, tail = read_commits(lake)
    prefixes = {name: covered.data_prefix for name, covered in listing.covered.items()}
    prefixes |= {name: table["data_prefix"][0].as_py() for name, table in tail.items() if table.num_rows}
    names = {FragmentName(name.path, prefix) for name, prefix in prefixes.items() if prefix}
    names -= set(listing.hidden.retired)
    sizes: dict[str, int] = {}
    for path, facts in data.items():
        prefix = "/".join(path.split("/")[:3])
        sizes[prefix] = sizes.get(prefix, 0) + facts.size
    return [_facts(name, sizes, data) for name in sorted(names, key=lambda n: n.commit_path)]


def pins(lake: Lake) -> tuple[Pin, ...]:
    """Every pinned revision.

    Raises:
        CorruptDataError: as :func:`features.snapshots.pinned_paths`.
    """
    found = []
    for path, facts in lake.store.scan("revisions").items():
        digest = path.removeprefix("revisions/").removesuffix(".txt")
        if path.endswith(".txt"):
            found.append(Pin(path, digest, facts.written_at, frozenset(pinned_paths(lake, digest))))
    return tuple(found)


def lease_needs(lake: Lake, now: datetime) -> tuple[Need, ...]:
    """What live leases need."""
    live = [lease for lease in leases(lake) if lease.expires_at > now]
    return tuple(Need(f"lease of {lease.reader}", lease.commits) for lease in live)


def _exceeded(
    policy: RetentionPolicy, rank: int, newest: datetime, total: int, now: datetime
) -> tuple[str, ...]:
    """The limits that a version exceeds; ``rank`` 0 is the newest, ``total`` the bytes up to and with it."""
    if rank == 0:
        return ()
    reasons = []
    if policy.max_age is not None and now - newest > policy.max_age:
        reasons.append(f"older than {policy.max_age}")
    if policy.keep_versions is not None and rank >= policy.keep_versions:
        reasons.append(f"beyond the {policy.keep_versions} newest versions")
    if policy.max_bytes is not None and total > policy.max_bytes:
        reasons.append(f"beyond {policy.max_bytes:,} bytes")
    return tuple(reasons)


def _releasable(pin: Pin, policy: RetentionPolicy, needs: tuple[Need, ...], now: datetime) -> bool:
    if policy.max_pin_age is None or now - pin.pinned_at <= policy.max_pin_age:
        return False
    return not any(need.of(pin.commits) for need in needs)


def _facts(name: FragmentName, sizes: Mapping[str, int], data: Mapping[str, ObjectFacts]) -> FragmentFacts:
    parsed = CommitName.parse(name.commit_path)
    if parsed is None:
        raise CorruptDataError(f"{name.commit_path!r} is no path of a commit")
    group = data.get(f"{name.data_prefix}/{GROUP_FILE}")
    # A damaged fragment may lack it: then it is as old as can be, and does not keep its version young.
    written_at = group.written_at if group else datetime.min.replace(tzinfo=UTC)
    return FragmentFacts(name, parsed.version, sizes.get(name.data_prefix or "", 0), written_at)
