"""Offline tau on held-out groups: the gate's evidence."""

import tempfile
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from features.catalog import Catalog, Selection
from features.errors import EmptySelectionError, InputError
from features.lake import Lake
from features.schema import SelectionFilter, Split, VersionRange
from pipelines.context import RunContext
from pipelines.device import compute_device
from pipelines.inspect import newest_version, version_range
from publish.registry import Registry
from training.artifact import EvalReport
from training.spec import Spec

_SELECTION = SelectionFilter()


class EvalJob(Spec):
    """Which draft, against which other, on which held-out windows."""

    lake: str
    artifact: str
    baseline: str | None = None
    """Draft to compare with; None takes the production draft, if there is one."""
    first_version: Annotated[int, Field(ge=0)] | None = None
    """None: the newest registered version only, which is what a gate wants."""
    stop_version: Annotated[int, Field(gt=0)] | None = None
    mode: Literal["greedy", "sampled-onehot"] = "sampled-onehot"
    """How the engine drafts: vLLM's default draft sampling is greedy, hence one-hot."""
    num_speculative_tokens: Annotated[int, Field(ge=1, le=16)] = 3
    held_out_percent: Annotated[int, Field(ge=1, le=90)] = _SELECTION.held_out_percent
    split: Split = Split.HELD_OUT
    domains: tuple[str, ...] = ()
    verified_only: bool = True
    """Leave out windows whose logprobs could not be checked."""
    revision: str | None = None


def evaluate(job: EvalJob, ctx: RunContext) -> EvalReport:
    """Walk the held-out sequences with the draft, and with the baseline; store the report as evidence.

    Raises:
        EmptySelectionError: no whole held-out sequence matches; parts of one cannot be walked.
        InputError: the versions asked for are none, no sequence was sampled in this mode, or retention
            gave up a fragment since it was selected.
    """
    from training.evaluate import evaluate_draft
    from training.reading.lease import read_lease

    lake = Lake.open(job.lake)
    registry = Registry(lake.store, lake.target.target_id)
    selection = Catalog.load(lake, revision=job.revision).select(evaluation_filter(lake, job))
    _require_whole_sequences(selection)
    # Retention keeps what is read until the walk is over.
    lease = read_lease(lake, selection, reader="eval", now=ctx.now)
    with lease, tempfile.TemporaryDirectory(prefix="draftlake-eval-") as scratch:
        draft = registry.fetch(job.artifact, Path(scratch) / "draft")
        head = registry.channel(registry.manifest(job.artifact).method).head()
        baseline = job.baseline or (head.artifact if head else None)
        other = None
        if baseline is not None and baseline != job.artifact:
            other = registry.fetch(baseline, Path(scratch) / "baseline")
        ctx.progress.say(f"evaluate {job.artifact[:12]} on {selection.plan.summary()}")
        report = evaluate_draft(
            lake,
            selection,
            draft,
            k=job.num_speculative_tokens,
            mode=job.mode,
            baseline_folder=other,
            device=compute_device(),
        )
    registry.add_evidence(job.artifact, report)
    return report


def evaluation_filter(lake: Lake, job: EvalJob) -> SelectionFilter:
    """Held-out windows of the asked versions; by default of the newest.

    Raises:
        InputError: a stop version without a first one, or a range that holds no version.
    """
    if job.first_version is None and job.stop_version is not None:
        raise InputError(
            f"--stop-version {job.stop_version} has no first version to go with: add --first-version, or leave "
            f"both out to evaluate on the newest version"
        )
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
    )


def _require_whole_sequences(selection: Selection) -> None:
    """Refuse a selection of parts only; parts beside whole sequences are counted as skipped in the report."""
    selection.require_nonempty()
    if not any(row["num_rows"] == row["sequence_length"] for row in selection.rows):
        longest = max(row["sequence_length"] for row in selection.rows)
        raise EmptySelectionError(
            f"none of {len(selection)} windows is a whole rollout, and a walk needs all of one: they were cut to "
            f"--max-tokens. Collect these rollouts again with --max-tokens {longest}, which stores whole ones too"
        )
