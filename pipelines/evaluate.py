"""Offline tau on held-out groups: the gate's evidence."""

import tempfile
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from features.catalog import Catalog
from features.lake import Lake
from features.schema import SelectionFilter, Split, VersionRange
from pipelines.context import RunContext
from pipelines.inspect import newest_version, version_range
from publish.registry import Registry
from training.artifact import EvalReport
from training.spec import Spec


class EvalJob(Spec):
    """Which draft, against which other, on which held-out windows."""

    lake: str
    artifact: str
    baseline: str | None = None
    """Draft to compare with; None takes the production draft, if there is one."""
    first_version: Annotated[int, Field(ge=0)] | None = None
    """None: only the newest version that has windows (what a gate wants)."""
    stop_version: Annotated[int, Field(gt=0)] | None = None
    mode: Literal["greedy", "sampled-onehot"] = "sampled-onehot"
    """How the engine drafts: vLLM's default draft sampling is greedy, hence one-hot."""
    num_speculative_tokens: Annotated[int, Field(ge=1, le=16)] = 3
    held_out_percent: Annotated[int, Field(ge=1, le=90)] = 20
    split: Split = Split.HELD_OUT
    domains: tuple[str, ...] = ()
    verified_only: bool = True
    """Leave out windows whose logprobs could not be checked."""
    revision: str | None = None


def evaluate(job: EvalJob, ctx: RunContext) -> EvalReport:
    """Walk the held-out sequences with the draft, and with the baseline; store the report as evidence.

    Raises:
        EmptySelectionError: no whole held-out sequence matches.
    """
    from training.evaluate import evaluate_draft

    lake = Lake.open(job.lake)
    registry = Registry(lake.store, lake.target.target_id)
    selection = Catalog.load(lake, revision=job.revision).select(evaluation_filter(lake, job))
    selection.require_nonempty()
    with tempfile.TemporaryDirectory(prefix="draftlake-eval-") as scratch:
        draft = registry.fetch(job.artifact, Path(scratch) / "draft")
        head = registry.channel(registry.manifest(job.artifact).method).head()
        baseline = job.baseline or (head.artifact if head else None)
        other = None
        if baseline is not None and baseline != job.artifact:
            other = registry.fetch(baseline, Path(scratch) / "baseline")
        ctx.progress.say(f"evaluate {job.artifact[:12]} on {selection.plan.summary()}")
        report = evaluate_draft(
            lake, selection, draft, k=job.num_speculative_tokens, mode=job.mode, baseline_folder=other
        )
    registry.add_evidence(job.artifact, report)
    return report


def evaluation_filter(lake: Lake, job: EvalJob) -> SelectionFilter:
    """Whole held-out sequences of the asked versions; by default of the newest with windows."""
    if job.first_version is None:
        newest = newest_version(lake)
        versions = VersionRange(newest, newest + 1)
    else:
        versions = version_range(job.first_version, job.stop_version)
    return SelectionFilter(
        versions=versions,
        split=job.split,
        held_out_percent=job.held_out_percent,
        domains=job.domains,
        verified_only=job.verified_only,
        whole_sequences_only=True,
    )
