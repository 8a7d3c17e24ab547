"""What collecting refused: by run and reason, one by one, and tried again."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from features.collect.partition import Session, collect_partition
from features.collect.rollouts import Reason, RecordError, Rollout, rollout_from_record, rollout_problem
from features.collect.sources.partitions import SourceOptions, SourcePartition
from features.collect.sources.row import Row
from features.collect.trial import is_registered, require_agreement
from features.errors import InputError
from features.lake import Lake
from features.quarantine import QuarantinedRun, Refusal, iter_quarantine, resolve
from features.schema import TargetVersion
from pipelines.backfill_spec import TargetSpec, merged_counts
from pipelines.backfill_worker import open_session, try_spec
from pipelines.collect import describe_version, load_target
from pipelines.context import RunContext
from pipelines.device import compute_device
from training.spec import Spec

_LAST = (Reason.VERSION_MISMATCH, Reason.SAMPLE_CONFLICT)
"""Never tried again: other weights' rollouts, and samples whose name another rollout has."""


class QuarantineSpec(TargetSpec):
    """Which refused rollouts to try again, and with which weights and statements."""

    run: str
    """Id of the run that refused them."""
    reason: str | None = None
    """Only those of this reason."""


class RetryPlan(Spec):
    """Which refusals can be tried again: ``open == retried + not_retriable``."""

    run: str
    open: int
    """Refusals of the run (and reason) that were open."""
    not_retriable: int
    """Of them, those that cannot be tried again: their record could not be read, was not kept whole, or
    has no place in this version."""
    retried: int


class RetryReport(RetryPlan):
    """What became of them: ``retried == collected + duplicates + sum(refused.values()) + skipped``."""

    collected: int
    duplicates: int
    """Rollouts that the lake held meanwhile."""
    skipped_by_sampling: int
    refused: dict[str, int]
    """Refused again, by reason; they stay open."""
    resolved: int
    """Marked as taken: collected, or found in the lake."""
    windows_written: int
    verified: int
    unverified: int


def list_runs(lake_url: str) -> list[dict[str, Any]]:
    """A row per run: how much it refused, what of it is open and what resolved, and open ones by reason."""
    rows: dict[str, dict[str, Any]] = {}
    for part in iter_quarantine(Lake.open(lake_url)):
        row = rows.setdefault(
            part.run_id, {"run": part.run_id, "refused": 0, "open": 0, "resolved": 0, "reasons": Counter()}
        )
        row["refused"] += len(part.refusals)
        row["open"] += len(part.open)
        row["resolved"] += len(part.resolved)
        row["reasons"].update(refusal.reason for _, refusal in part.open)
    return [row | {"reasons": dict(sorted(row["reasons"].items()))} for row in rows.values()]


def show_run(lake_url: str, run: str, reason: str | None = None) -> Iterator[dict[str, Any]]:
    """A row per refusal of a run: where, why, whether resolved, and the record as far as it was kept.

    Raises:
        InputError: nothing of that run is in quarantine.
    """
    for part in _parts(Lake.open(lake_url), run):
        for place, refusal in enumerate(part.refusals):
            if reason is None or refusal.reason == reason:
                yield {
                    "source": refusal.source,
                    "line": refusal.line,
                    "reason": refusal.reason,
                    "detail": refusal.detail,
                    "resolved": place in part.resolved,
                    "sample": refusal.sample,
                }


def retry(spec: QuarantineSpec, ctx: RunContext) -> RetryReport:
    """Read refused rollouts again from quarantine and collect those that pass; mark them as resolved.

    Both authenticity proofs are on. What is refused again stays open. Killed and run again, it
    finds what it committed in the lake and marks that.

    Raises:
        InputError: nothing of that run is in quarantine, or as :func:`pipelines.backfill.backfill`.
        ProofFailedError: as :func:`pipelines.backfill.backfill`; nothing was registered.
    """
    lake = Lake.open(spec.lake)
    session: Session | None = None
    reports: list[RetryReport] = []
    for part in _parts(lake, spec.run):
        tries = _tries(part, spec)
        if tries.rollouts and session is None:
            ctx.progress.say(f"loading the target of v{spec.version}")
            session = _opened(spec, lake)
        reports.append(_retry_part(session, part, tries, spec))
    return _added(spec.run, reports)


def plan_retry(spec: QuarantineSpec) -> RetryPlan:
    """What :func:`retry` would try; runs no model and writes nothing.

    Raises:
        InputError: as :func:`retry` would raise it before its first forward.
    """
    lake = Lake.open(spec.lake)
    describe_version(lake, Path(spec.target), TargetVersion(spec.version))
    tries = [_tries(part, spec) for part in _parts(lake, spec.run)]
    opened, tried = sum(t.open for t in tries), sum(len(t.rollouts) for t in tries)
    return RetryPlan(run=spec.run, open=opened, not_retriable=opened - tried, retried=tried)


def _opened(spec: QuarantineSpec, lake: Lake) -> Session:
    """What collects with the given weights; a number that is not registered must pass a trial over the whole run."""
    described = describe_version(lake, Path(spec.target), TargetVersion(spec.version))
    model = load_target(Path(spec.target), compute_device())
    rollouts = (rollout for part in _parts(lake, spec.run) for _, rollout in _tries(part, spec).rollouts)
    trial = try_spec(spec, rollouts, *described, target=lambda: model)
    if trial is not None and not is_registered(lake, described[0]):
        require_agreement(described[0], compared=trial.windows_compared, agreeing=trial.windows_agreeing)
    return open_session(spec, model, *described)


@dataclass(frozen=True, slots=True)
class _Tries:
    """What of a part is tried again: rollouts with their places."""

    open: int
    rollouts: tuple[tuple[int, Rollout], ...]


def _parts(lake: Lake, run: str) -> Iterator[QuarantinedRun]:
    found = False
    for part in iter_quarantine(lake, run):
        found = True
        yield part
    if not found:
        raise InputError(
            f"{lake.url} has no run {run!r} in quarantine; list them with: draftlake quarantine ls --lake {lake.url}"
        )


def _tries(part: QuarantinedRun, spec: QuarantineSpec) -> _Tries:
    chosen = [(n, r) for n, r in part.open if spec.reason in (None, r.reason)]
    rollouts: dict[str, tuple[int, Rollout]] = {}
    for place, refusal in chosen:
        rollout = _whole(refusal, spec.source_options)
        # A second one of a name would be a conflict with the first, or is a copy of it.
        if rollout is not None and rollout.version == spec.version and rollout.sample_id not in rollouts:
            rollouts[rollout.sample_id] = place, rollout
    return _Tries(len(chosen), tuple(rollouts.values()))


def _whole(refusal: Refusal, options: SourceOptions) -> Rollout | None:
    """The rollout as it was refused, with the user's statements; None when it was not kept whole."""
    if refusal.sample is None or refusal.reason in _LAST:
        return None
    try:
        rollout = rollout_from_record(refusal.sample)
    except RecordError:
        return None
    place = SourcePartition(refusal.source, refusal.source, rollout.source or "", 0, "")
    completed = Row(place, refusal.line or 0, options).completed(rollout)
    return None if rollout_problem(completed) else completed


def _retry_part(
    session: Session | None, part: QuarantinedRun, tries: _Tries, spec: QuarantineSpec
) -> RetryReport:
    refused: list[Refusal] = []
    # Told apart by place: the collector gives it back with a refusal.
    rollouts = [replace(r, source_file=part.path, source_row=place) for place, r in tries.rollouts]
    skipped = {
        place for place, r in tries.rollouts if session and not session.policy.plan(r, session.record.version)
    }
    counts: dict[str, int] = {}
    if session is not None and rollouts:
        report = collect_partition(
            session,
            rollouts,
            keep_refusals=lambda again, _part: refused.extend(again),
            fates=np.zeros(len(rollouts), np.uint8),
        )
        counts = {
            "collected": report.collected, "duplicates": report.in_lake, "windows_written": report.windows,
            "verified": report.verified, "unverified": report.unverified,
        }  # fmt: skip
    taken = {place for place, _ in tries.rollouts} - {r.line for r in refused} - skipped
    if taken:
        how = {"version": spec.version, "take_unversioned": spec.take_unversioned, "dtype": spec.dtype}
        resolve(session.lake if session else Lake.open(spec.lake), part, taken, how)
    empty = dict.fromkeys(("collected", "duplicates", "windows_written", "verified", "unverified"), 0)
    return RetryReport(
        run=spec.run,
        open=tries.open,
        not_retriable=tries.open - len(rollouts),
        retried=len(rollouts),
        skipped_by_sampling=len(skipped),
        refused=dict(Counter(refusal.reason for refusal in refused)),
        resolved=len(taken),
        **empty | counts,
    )


def _added(run: str, reports: Sequence[RetryReport]) -> RetryReport:
    names = [name for name in RetryReport.model_fields if name not in ("run", "refused")]
    sums = {name: sum(getattr(report, name) for report in reports) for name in names}
    return RetryReport(run=run, refused=merged_counts(report.refused for report in reports), **sums)
