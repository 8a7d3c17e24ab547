"""Old rollouts plus the weights that sampled them, to windows in the lake: resumable, by partition.

A run scans its sources (or takes earlier scans from the lake), decides which partition owns each
sample, estimates, and collects what is not finished. Killed at any moment and run again, it ends
with the same windows as a run that nobody disturbed.
"""

import math
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from features.catalog import Catalog
from features.collect.backfill_record import FinishedPartition, store_finished
from features.collect.partition import PartitionReport
from features.collect.sampling_proof import Z_LIMIT, SamplingEvidence
from features.collect.trial import is_registered, require_agreement
from features.content import content_digest
from features.errors import InputError
from features.lake import Lake
from features.schema import TargetVersion
from pipelines.backfill_plan import Part, Prepared, StepBar, estimate, open_partitions, prepare, said
from pipelines.backfill_spec import (
    BackfillPlan,
    BackfillReport,
    BackfillSpec,
    merged_agreement,
    merged_counts,
    merged_sampling,
)
from pipelines.backfill_worker import Crew, Job, crew
from pipelines.collect import describe_version
from pipelines.context import RunContext


def plan_backfill(
    spec: BackfillSpec, ctx: RunContext, *, keep_scans: bool = False, measure: bool = True
) -> BackfillPlan:
    """Count what :func:`backfill` would do, and time a short forward; writes nothing.

    Args:
        keep_scans: write what was found in the sources to the lake after all, so that they are not
            scanned again.
        measure: load the target and time it.

    Raises:
        InputError, VersionConflictError: as :func:`backfill` would raise them.
    """
    bar, described = (
        StepBar(),
        describe_version(Lake.open(spec.lake), Path(spec.target), TargetVersion(spec.version)),
    )
    with crew(spec, described, bar) as workers:
        prepared = prepare(spec, described[0], ctx, workers, bar, keep_scans=keep_scans)
        return estimate(prepared, workers if measure else None)


def partition_names(spec: BackfillSpec) -> tuple[str, ...]:
    """Names of the sources' partitions in order: what ``only`` of :func:`backfill` takes.

    Raises:
        InputError: nothing is found, or a format is unknown.
    """
    return tuple(part.name for part in open_partitions(spec))


def backfill(spec: BackfillSpec, ctx: RunContext, only: Collection[str] | None = None) -> BackfillReport:
    """Recompute features for old rollouts and commit their windows.

    Both authenticity proofs are on: the aux probe once per process before its first window, logprob
    agreement for every window. Running it again commits nothing twice.

    Args:
        only: names of the partitions to collect and report on; what each of them owns is decided
            over all of them. None: all.

    Raises:
        InputError: a source is missing or changes meanwhile, a layer id does not fit, or the target
            is not the lake's.
        VersionConflictError: the version number is taken by other weights.
        ProofFailedError: the tap does not read what it claims to read, or no rollout of the trial agrees
            with weights whose number is not registered.
    """
    bar, described = (
        StepBar(),
        describe_version(Lake.open(spec.lake), Path(spec.target), TargetVersion(spec.version)),
    )
    with crew(spec, described, bar) as workers:
        prepared = prepare(spec, described[0], ctx, workers, bar, keep_scans=True)
        chosen = [part for part in prepared.parts if only is None or part.partition.name in only]
        if any(part.finished is None for part in chosen):
            planned = estimate(prepared, workers)
            ctx.progress.say(said(planned))
            if not is_registered(prepared.lake, described[0]):
                require_agreement(
                    described[0], compared=planned.trial_windows, agreeing=planned.trial_agreeing
                )
        started = time.monotonic()
        reports = _collect(spec, prepared, chosen, ctx, workers, bar)
        seconds = time.monotonic() - started
    report = _report(spec, prepared.lake, chosen, reports, seconds=seconds, forward_tokens=bar.steps)
    if merged_sampling([report]).suspicious:
        ctx.progress.say(
            f"warning: {report.sampling_tokens:,} sampled tokens deviate by {report.sampling_z:+.1f} standard "
            f"deviations from what the recorded temperature and these weights give (more than {Z_LIMIT:.0f} is no "
            f"accident). Is the temperature recorded as it was, and are these the weights? The windows are kept."
        )
    return report


def _collect(
    spec: BackfillSpec,
    prepared: Prepared,
    chosen: Sequence[Part],
    ctx: RunContext,
    workers: Crew,
    bar: StepBar,
) -> dict[str, PartitionReport]:
    """Collect the chosen parts that are not finished, within the quota; reports by the parts' keys."""
    jobs = _jobs(spec, prepared, [part for part in chosen if part.finished is None])
    reports: dict[str, PartitionReport] = {}
    if not jobs:
        return reports
    planned = sum(part.forward_tokens for part, _ in jobs)
    with ctx.progress.bar(f"backfill {TargetVersion(spec.version)}", total=planned, unit="tokens") as advance:
        bar.show(advance)
        workers.collect([job for _, job in jobs], _keeper(prepared.lake, [part for part, _ in jobs], reports))
    return reports


def _keeper(
    lake: Lake, parts: Sequence[Part], reports: dict[str, PartitionReport]
) -> Callable[[int, PartitionReport], None]:
    """Takes in a part's report, and writes down that it is finished."""

    def keep(index: int, report: PartitionReport) -> None:
        part = parts[index]
        if report.complete and report.received != part.scan.totals.sequences:
            raise InputError(
                f"{part.partition.url} holds {report.received} sequences and held {part.scan.totals.sequences} "
                f"when the backfill was planned: it was written to meanwhile. Run the backfill again."
            )
        if report.complete:
            store_finished(lake, part.key, FinishedPartition.of(report))
        reports[part.key] = report

    return keep


def _jobs(spec: BackfillSpec, prepared: Prepared, parts: Sequence[Part]) -> list[tuple[Part, Job]]:
    """Parts with what each may write. A quota is dealt out beforehand, in order, whoever does which."""
    room = _quota_tokens(spec, prepared)
    jobs = []
    for part in parts:
        share = None if room is None else min(room, part.tokens)
        if room is not None and share is not None:
            room -= share
            if part.tokens and not share:
                continue
        run_id = f"backfill-{TargetVersion(spec.version)}-{part.key[:16]}"
        jobs.append((part, Job(part.partition, run_id, part.fates, share)))
    return jobs


def _quota_tokens(spec: BackfillSpec, prepared: Prepared) -> int | None:
    limits = [] if spec.quota_tokens is None else [spec.quota_tokens]
    if spec.quota_bytes is not None:
        limits.append(spec.quota_bytes // prepared.layout.row_bytes)
    return min(limits, default=None)


def _report(
    spec: BackfillSpec,
    lake: Lake,
    parts: Sequence[Part],
    reports: dict[str, PartitionReport],
    *,
    seconds: float,
    forward_tokens: int,
) -> BackfillReport:
    before = [part.finished for part in parts if part.finished is not None]
    found = list(reports.values())
    totals = [part.scan.totals for part in parts]
    left = [p for p in parts if p.finished is None]
    agreement = merged_agreement(report.agreement for report in found)
    sampling = sum((report.sampling for report in found), SamplingEvidence())
    version = TargetVersion(spec.version)
    return BackfillReport(
        version=spec.version,
        partitions=len(parts),
        partitions_finished=len(before) + sum(report.complete for report in found),
        partitions_finished_before=len(before),
        rows_read=sum(part.sequences for part in parts),
        collected=sum(report.collected for report in found),
        duplicates=sum(t.source_duplicates for t in totals)
        + sum(record.kept + record.repeated for record in before)
        + sum(report.in_lake + report.repeated for report in found),
        pad_rows=sum(t.pad_rows for t in totals),
        skipped_by_sampling=sum(
            [r.skipped_by_sampling for r in before] + [r.skipped_by_sampling for r in found]
        ),
        quarantined=merged_counts([r.quarantined for r in before] + [r.quarantined for r in found]),
        over_quota=sum(p.scan.totals.sequences for p in left) - sum(report.received for report in found),
        windows_written=sum(report.windows for report in found),
        tokens_written=sum(report.tokens for report in found),
        nbytes_written=sum(report.nbytes for report in found),
        fragments=sum(report.fragments for report in found),
        verified=sum(report.verified for report in found),
        unverified=sum(report.unverified for report in found),
        windows_compared=agreement.windows_compared,
        logprob_mean_error=None if math.isnan(agreement.mean_error) else agreement.mean_error,
        smallest_gap=None if math.isnan(agreement.smallest_gap) else agreement.smallest_gap,
        sampling_tokens=sampling.tokens,
        sampling_deviation=sampling.deviation,
        sampling_variance=sampling.variance,
        sampling_z=sampling.z,
        seconds=seconds,
        tokens_per_second=forward_tokens / seconds if found and forward_tokens else None,
        lake_revision=Catalog.load(lake).revision.digest,
        content_digest=content_digest(lake, version),
    )
