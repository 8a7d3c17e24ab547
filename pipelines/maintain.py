"""Keep a lake quick to open: cover commits by snapshots, and delete the markers that became superfluous."""

from dataclasses import dataclass
from datetime import timedelta

from features.compaction import Compaction, PrunePlan, plan_compaction, plan_prune, prune
from features.compaction import compact as make_snapshot
from features.lake import Lake
from pipelines.context import RunContext


@dataclass(frozen=True, slots=True)
class CompactReport:
    """What a compaction did, or would do."""

    lake: str
    outcome: str
    """``written``, ``adopted`` (somebody else was first), ``nothing``; ``planned`` in a dry run."""
    snapshot: int | None
    """Number of the newest snapshot; in a dry run, before it."""
    windows: int | None
    """Rows of it."""
    new_commits: int
    """Commits that it covers and its parent does not."""
    dropped_fragments: int
    """Left out because retention gave them up."""
    pruned_commits: int
    """Markers of commits that were covered for the whole grace, deleted."""
    pruned_objects: int
    """Objects of superseded snapshots, deleted."""

    @property
    def empty(self) -> bool:
        """Whether there was nothing to do."""
        return not (self.new_commits or self.dropped_fragments or self.pruned_commits or self.pruned_objects)


def compact(
    lake_url: str,
    ctx: RunContext,
    *,
    grace: timedelta,
    min_commits: int = 1,
    force: bool = False,
    dry_run: bool = False,
) -> CompactReport:
    """Make a snapshot when there are ``min_commits`` new commits, then delete what was covered for ``grace``.

    Raises:
        InputError: ``grace`` is too short for writers at work, and not forced.
    """
    lake = Lake.open(lake_url)
    # Planned first, so that a grace that is too short is refused before anything is written.
    pruning = plan_prune(lake, grace=grace, now=ctx.now(), force=force)
    if dry_run:
        plan = plan_compaction(lake.snapshots.listing())
        enough = bool(plan.dropped) or len(plan.new_commits) >= min_commits
        made = Compaction(
            "nothing",
            lake.snapshots.newest(),
            len(plan.new_commits) if enough else 0,
            len(plan.dropped),
        )
        return _report(lake, made, pruning, outcome="planned")
    with ctx.progress.bar("compacting", 1) as advance:
        made = make_snapshot(lake, now=ctx.now, min_commits=min_commits)
        advance(1)
    pruning = plan_prune(lake, grace=grace, now=ctx.now(), force=force)
    with ctx.progress.bar("pruning", len(pruning.commits) + len(pruning.snapshots)) as advance:
        prune(lake, pruning, on_step=lambda _path: advance(1))
    return _report(lake, made, pruning, outcome=made.outcome)


def _report(lake: Lake, made: Compaction, pruning: PrunePlan, *, outcome: str) -> CompactReport:
    return CompactReport(
        lake=lake.url,
        outcome=outcome,
        snapshot=made.snapshot.number if made.snapshot is not None else None,
        windows=made.snapshot.windows if made.snapshot is not None else None,
        new_commits=made.new_commits,
        dropped_fragments=made.dropped,
        pruned_commits=len(pruning.commits),
        pruned_objects=len(pruning.snapshots),
    )
