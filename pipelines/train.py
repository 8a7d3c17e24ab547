"""A version range of the lake to a candidate draft in the registry."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field

from features.catalog import Catalog, Selection
from features.lake import Lake
from features.leases import held
from features.retention import fragment_names
from features.schema import ReadPlan, SelectionFilter, Split, TargetVersion
from pipelines.context import RunContext
from pipelines.inspect import version_range
from pipelines.narrowing import Narrowing
from pipelines.progress import Advance
from publish.registry import Registry
from training.artifact import Document
from training.spec import Spec, TrainSpec

_SELECTION = SelectionFilter()


class TrainJob(Spec):
    """Which windows, from which draft, with which training spec."""

    lake: str
    first_version: Annotated[int, Field(ge=0)]
    stop_version: Annotated[int, Field(gt=0)]
    """Exclusive."""
    parent: str | None = None
    """Digest of the registered draft to start from; None trains from scratch."""
    revision: str | None = None
    """Lake revision to pin; None takes the newest and records it."""
    held_out_percent: Annotated[int, Field(ge=0, le=90)] = _SELECTION.held_out_percent
    verified_only: bool = True
    """Leave out windows whose logprobs could not be checked."""
    narrowing: Narrowing = Narrowing()
    train: TrainSpec = TrainSpec()


class TrainReport(Document):
    """What was trained, on what, and how it went."""

    artifact: str
    lake_revision: str
    selection_digest: str
    windows: int
    tokens: int
    steps: int
    first_loss: float
    last_loss: float
    counts: dict[str, int]
    """Dropped windows and skipped steps, by reason."""


def plan_training(job: TrainJob) -> ReadPlan:
    """What the job would read; trains nothing."""
    return _select(Catalog.load(Lake.open(job.lake), revision=job.revision), job).plan


def train(job: TrainJob, ctx: RunContext) -> TrainReport:
    """Train a draft and register it as a candidate.

    Raises:
        EmptySelectionError: no window matches.
        HeadMissingError: a selected version has no head snapshot.
        DraftLayoutError: the parent does not fit the target or the method.
    """
    from training.loop import train_draft

    lake = Lake.open(job.lake)
    catalog = Catalog.load(lake, revision=job.revision)
    selection = _select(catalog, job)
    selection.require_nonempty()
    for version in selection.plan.heads_missing:
        lake.head_of(TargetVersion(version))  # raises, with the remedy
    registry = Registry(lake.store, lake.target.target_id)
    lease = held(
        lake, revision=catalog.revision.digest, fragments=fragment_names(catalog), reader="train", now=ctx.now
    )  # retention keeps what is read until the revision is pinned
    with lease, tempfile.TemporaryDirectory(prefix="draftlake-train-") as scratch:
        parent = registry.fetch(job.parent, Path(scratch) / "parent") if job.parent else None
        with ctx.progress.bar("train", total=100) as advance:
            result = train_draft(
                lake,
                selection,
                job.train,
                out=Path(scratch) / "draft",
                parent=parent,
                target_config=lake.target_config(),
                on_progress=_percent(advance),
            )
        catalog.pin(lake)
        digest = registry.import_artifact(result.folder)
    losses = [row["loss"] for row in result.metrics]
    return TrainReport(
        artifact=digest,
        lake_revision=selection.revision.digest,
        selection_digest=selection.digest,
        windows=len(selection),
        tokens=result.artifact.manifest.tokens,
        steps=result.artifact.manifest.steps,
        first_loss=losses[0],
        last_loss=losses[-1],
        counts=result.counts,
    )


def _select(catalog: Catalog, job: TrainJob) -> Selection:
    wanted = job.narrowing.filter(
        version_range(job.first_version, job.stop_version),
        split=Split.TRAIN,
        held_out_percent=job.held_out_percent,
        verified_only=job.verified_only,
    )
    return catalog.select(wanted)


def _percent(advance: Advance) -> Callable[[Mapping[str, float]], None]:
    """Turn a step's metrics into whole-percent advances of a bar."""
    shown = 0

    def report(metrics: Mapping[str, float]) -> None:
        nonlocal shown
        percent = int(100 * metrics["step"] / metrics["total_steps"])
        advance(percent - shown)
        shown = percent

    return report
