"""Before a backfill collects: what its sources hold, what is finished, and how much is left."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from features.collect.backfill_record import (
    FinishedPartition,
    finished_key,
    samples_held,
    scan_keys,
    store_scan,
    stored_finished,
    stored_scans,
)
from features.collect.scan import Fate, PartitionScan, fates_of
from features.collect.sources import SourcePartition, open_source
from features.errors import InputError
from features.lake import Lake
from features.schema import FragmentLayout, VersionRecord
from pipelines.backfill_spec import BackfillPlan, BackfillSpec, merged_counts
from pipelines.backfill_worker import Crew, layout_of_spec
from pipelines.context import RunContext
from pipelines.progress import Advance


@dataclass(frozen=True, slots=True)
class Part:
    """A partition, what was found in it, and what is known to have become of it."""

    partition: SourcePartition
    scan: PartitionScan
    fates: NDArray[np.uint8]
    key: str
    finished: FinishedPartition | None

    @property
    def sequences(self) -> int:
        """Everything that its lines hold, padding and copies too."""
        totals = self.scan.totals
        return totals.sequences + totals.source_duplicates + totals.pad_rows

    @property
    def wanted(self) -> NDArray[np.bool_]:
        """Which candidates are to be collected."""
        found: NDArray[np.bool_] = self.fates == Fate.WANTED
        return found

    @property
    def tokens(self) -> int:
        """Feature rows that are planned."""
        return int(self.scan.num_rows[self.wanted].sum(dtype=np.int64))

    @property
    def forward_tokens(self) -> int:
        """Tokens of the whole sequences behind them."""
        return int(self.scan.length[self.wanted].sum(dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Prepared:
    """A lake and the parts of a backfill."""

    lake: Lake
    layout: FragmentLayout
    parts: tuple[Part, ...]

    @property
    def open_parts(self) -> list[Part]:
        """Parts that are not finished."""
        return [part for part in self.parts if part.finished is None]


class StepBar:
    """Where the workers' steps go: to whichever bar is shown."""

    def __init__(self) -> None:
        self._advance: Advance = _ignore
        self.steps = 0

    def __call__(self, steps: int) -> None:
        self.steps += steps
        self._advance(steps)

    def show(self, advance: Advance) -> None:
        """Send the steps to this bar from now on, counted from zero."""
        self._advance, self.steps = advance, 0


def _ignore(_steps: int) -> None:
    return None


def open_partitions(spec: BackfillSpec) -> Sequence[SourcePartition]:
    """The partitions of the sources, in order.

    Raises:
        InputError: nothing is found, or a format is unknown or ambiguous.
    """
    return open_source(spec.sources, format=spec.format, options=spec.source_options)


def prepare(
    spec: BackfillSpec,
    record: VersionRecord,
    ctx: RunContext,
    workers: Crew,
    bar: StepBar,
    *,
    keep_scans: bool,
) -> Prepared:
    """Scan what was not scanned before, and find out what is finished.

    Args:
        record: describes the target's weights.
        keep_scans: write each scan to the lake as it comes.

    Raises:
        InputError: no source holds anything, or a layer id does not fit.
    """
    lake, version = Lake.open(spec.lake), record.version
    layout = layout_of_spec(spec, lake, record)
    partitions = open_partitions(spec)
    if not partitions:
        raise InputError(f"no partition in {', '.join(spec.sources)}: name files that hold rollouts")
    keys = scan_keys(partitions, spec.source_options, version=version, policy=spec.policy)
    scans = stored_scans(lake, keys)
    absent = [(key, p) for key, p in zip(keys, partitions, strict=True) if key not in scans]
    if absent:
        with ctx.progress.bar("scan", total=len(absent)) as advance:
            bar.show(advance)
            fresh = workers.scan([partition for _, partition in absent])
            for (key, _), scan in zip(absent, fresh, strict=True):
                scans[key] = scan
                if keep_scans:
                    store_scan(lake, key, scan)
        bar.show(_ignore)
    ordered = [scans[key] for key in keys]
    fates = fates_of(ordered)
    names = [
        finished_key(
            key, fates=fate, weights_digest=str(record.weights_digest), layout=layout,
            engine_noise=spec.tolerance.engine_noise,
        )
        for key, fate in zip(keys, fates, strict=True)
    ]  # fmt: skip
    known = stored_finished(lake, names)
    held = samples_held(lake, version, layout) if known else np.zeros(0, np.uint64)
    return Prepared(lake, layout, tuple(
        Part(partition, scan, fate, name, _still_true(known.get(name, ()), scan, fate, held))
        for partition, scan, fate, name in zip(partitions, ordered, fates, names, strict=True)
    ))  # fmt: skip


def _still_true(
    records: Sequence[FinishedPartition],
    scan: PartitionScan,
    fates: NDArray[np.uint8],
    held: NDArray[np.uint64],
) -> FinishedPartition | None:
    """The record whose rollouts the lake still holds; retention may have given some up since."""
    wanted = scan.sample[fates == Fate.WANTED]
    present = int(np.isin(wanted, held).sum()) if len(wanted) else 0
    return next((record for record in records if record.kept == present), None)


def estimate(prepared: Prepared, workers: Crew | None) -> BackfillPlan:
    """What is to do; timed by ``workers``, where given."""
    parts = prepared.open_parts
    totals = [part.scan.totals for part in parts]
    tokens, forward_tokens = sum(p.tokens for p in parts), sum(p.forward_tokens for p in parts)
    first = next((part for part in parts if part.wanted.any()), None)
    trial = workers.trial(first.partition) if workers and first else None
    fates = [int(fate) for part in parts for fate in part.fates]
    conflicts = {"sample_conflict": fates.count(Fate.CONFLICT)} if Fate.CONFLICT in fates else {}
    return BackfillPlan(
        partitions=len(prepared.parts),
        partitions_finished=len(prepared.parts) - len(parts),
        source_bytes=sum(part.partition.nbytes for part in parts),
        rows_read=sum(part.sequences for part in prepared.parts),
        refused=merged_counts([*(t.refused for t in totals), conflicts]),
        version_missing=sum(t.version_missing for t in totals),
        version_mismatch=sum(t.version_mismatch for t in totals),
        duplicates=fates.count(Fate.REPEATED) + sum(t.source_duplicates for t in totals),
        skipped_by_sampling=sum(t.skipped_by_sampling for t in totals),
        rollouts=fates.count(Fate.WANTED),
        windows=sum(int(part.scan.windows[part.wanted].sum(dtype=np.int64)) for part in parts),
        tokens=tokens,
        nbytes=tokens * prepared.layout.row_bytes,
        forward_tokens=forward_tokens,
        tokens_per_second=trial and trial.tokens_per_second,
        seconds=trial and forward_tokens / trial.tokens_per_second,
        trial_windows=trial.windows_compared if trial else 0,
        trial_agreeing=trial.windows_agreeing if trial else 0,
    )


def said(plan: BackfillPlan) -> str:
    """The estimate in a line."""
    takes = "" if plan.seconds is None else f"; about {plan.seconds:,.0f} s of forwards"
    return (
        f"{plan.rollouts:,} rollouts of {plan.rows_read:,} sequences in {plan.partitions:,} partitions "
        f"({plan.partitions_finished:,} finished): up to {plan.windows:,} windows, {plan.tokens:,} tokens, "
        f"{plan.nbytes / 2**20:,.1f} MiB{takes}"
    )
