"""Retention, garbage collection and fsck of a lake: what is needed, planned, done. Clock and progress come in."""

from dataclasses import dataclass

from features import check, gc, retention
from features.catalog import Catalog
from features.lake import Lake
from features.retention import Need, RetentionPlan, RetentionPolicy, VersionDecision
from features.snapshots import pinned_paths
from features.survey import survey
from pipelines.context import RunContext
from publish.registry import Registry


@dataclass(frozen=True, slots=True)
class RetainReport:
    """What retention decided, and whether it was done."""

    dry_run: bool
    versions: tuple[VersionDecision, ...]
    dropped: tuple[int, ...]
    """Target versions that readers do not see any more."""
    fragments: int
    nbytes: int
    """Of the given-up fragments; `draftlake gc` frees them after its grace."""
    pins_released: tuple[str, ...]
    tombstone: str | None
    drafts_unpinned: int
    """Registered drafts whose lake revision is neither pinned nor the present one: nothing can be kept for them."""

    @property
    def empty(self) -> bool:
        return not self.fragments and not self.pins_released


@dataclass(frozen=True, slots=True)
class GcSummary:
    """What gc deleted, or with ``dry_run`` would delete."""

    dry_run: bool
    deleted: dict[str, int]
    """Things by kind."""
    nbytes: int
    waiting: dict[str, int]
    """What stays for now, by reason."""
    kept: dict[str, str]
    """Planned and not done after all, by path."""
    actions: tuple[gc.GcAction, ...]

    @property
    def empty(self) -> bool:
        return not self.actions


@dataclass(frozen=True, slots=True)
class FsckReport:
    """What was found, and what was done about it."""

    level: int
    ok: bool
    """Nothing harmful is left: there was none, or it is in quarantine now."""
    harmful: int
    counts: dict[str, int]
    """Findings by code."""
    quarantined: tuple[str, ...]
    """Commits put into quarantine (with a dry run: that would be)."""
    released: tuple[str, ...]
    findings: tuple[check.Finding, ...]


def retain(
    url: str,
    policy: RetentionPolicy,
    ctx: RunContext,
    *,
    reason: str,
    force: bool = False,
    dry_run: bool = False,
) -> RetainReport:
    """Give up the versions that exceed a limit and that nobody needs.

    Raises:
        CorruptDataError: a commit, lease, tombstone or registered draft is unreadable, so what is needed is not known.
    """
    lake, now = Lake.open(url), ctx.now()
    catalog = Catalog.load(lake)
    drafts, unpinned = draft_needs(lake, catalog)
    plan = retention.plan_retention(
        retention.fragment_facts(lake, lake.store.scan("data")),
        policy,
        (*retention.lease_needs(lake, now), *drafts),
        pins=retention.pins(lake),
        now=now,
        force=force,
    )
    tombstone = None
    if not dry_run and not plan.empty:
        with ctx.progress.bar("retain", total=len(plan.pins) + len(plan.fragments)) as advance:
            tombstone = retention.apply_retention(lake, plan, now=now, reason=reason, advance=advance)
    return _retain_report(plan, tombstone, unpinned, dry_run)


def collect_garbage(
    url: str, policy: gc.GcPolicy, ctx: RunContext, *, force: bool = False, dry_run: bool = False
) -> GcSummary:
    """Delete what no reader can need.

    Raises:
        CorruptDataError: a commit, lease, tombstone or registered draft is unreadable, so what is needed is not known.
    """
    lake = Lake.open(url)
    needs, _ = draft_needs(lake, Catalog.load(lake))
    plan = gc.plan_gc(survey(lake), policy, needs, now=ctx.now(), force=force)
    waiting = dict(plan.waiting)
    if dry_run:
        return GcSummary(True, plan.counts, plan.nbytes, waiting, {}, plan.actions)
    with ctx.progress.bar("gc", total=len(plan.actions)) as advance:
        report = gc.apply_gc(lake, plan, on_step=lambda _path: advance(1))
    return GcSummary(False, dict(report.deleted), report.nbytes, waiting, dict(report.kept), plan.actions)


def fsck(
    url: str,
    ctx: RunContext,
    *,
    level: check.Level = 0,
    share: float = 1.0,
    seed: int = 0,
    quarantine: bool = False,
    release: bool = False,
    dry_run: bool = False,
) -> FsckReport:
    """Check a lake; hide damaged fragments with ``quarantine``, show restored ones again with ``release``."""
    lake = Lake.open(url)
    total = len(lake.store.list("commits"))
    with ctx.progress.bar(f"fsck level {level}", total=total) as advance:
        findings = check.check_lake(lake, level, share=share, seed=seed, advance=advance)
    harmful = [finding for finding in findings if finding.harmful]
    damaged = {finding.fragment for finding in harmful if finding.fragment is not None}
    marked = tuple(sorted(name.commit_path for name in damaged)) if quarantine else ()
    released = [f.fragment.commit_path for f in findings if release and f.code == "restored" and f.fragment]
    if not dry_run:
        if quarantine:
            check.quarantine_damaged(lake, harmful, ctx.now())
        if release:
            check.release_restored(lake, findings)
    counts: dict[str, int] = {}
    for finding in findings:
        counts[finding.code] = counts.get(finding.code, 0) + 1
    left = [f for f in harmful if dry_run or not quarantine or f.fragment is None]
    return FsckReport(
        level, not left, len(harmful), dict(sorted(counts.items())), marked, tuple(sorted(released)), findings
    )


def draft_needs(lake: Lake, catalog: Catalog) -> tuple[tuple[Need, ...], int]:
    """What registered drafts were trained on, and the number of drafts of which that is not on record.

    Raises:
        CorruptDataError: a draft's manifest is unreadable.
    """
    registry = Registry(lake.store, lake.target.target_id)
    needs, unknown = [], 0
    for digest in registry.digests():
        revision = registry.manifest(digest).lake_revision
        commits = _commits_of(lake, catalog, revision)
        if commits is None:
            unknown += 1
        else:
            needs.append(Need(f"draft {digest[:12]}", commits))
    return tuple(needs), unknown


def _commits_of(lake: Lake, catalog: Catalog, revision: str) -> frozenset[str] | None:
    if revision == catalog.revision.digest:
        return frozenset(catalog.commit_paths)
    try:
        return frozenset(pinned_paths(lake, revision))
    except FileNotFoundError:
        return None


def _retain_report(plan: RetentionPlan, tombstone: str | None, unpinned: int, dry_run: bool) -> RetainReport:
    return RetainReport(
        dry_run=dry_run,
        versions=plan.versions,
        dropped=tuple(decision.version for decision in plan.versions if decision.dropped),
        fragments=len(plan.fragments),
        nbytes=plan.nbytes,
        pins_released=plan.pins,
        tombstone=tombstone,
        drafts_unpinned=unpinned,
    )
