"""What one process of a backfill does: scan a partition, time a forward, collect a partition.

With one worker that is the caller's process; with more, spawned ones, each with the target loaded
once, that end when their parent does.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from features.collect.committed import CommittedSpans
from features.collect.forwards import DEFAULT_BATCH_TOKENS, HF_TAP, TapModule, open_tap
from features.collect.partition import PartitionReport, Session, collect_partition
from features.collect.rollouts import Rollout
from features.collect.run import register_proven
from features.collect.scan import Fate, PartitionScan, scan_partition
from features.collect.sources import SourceCounts, SourcePartition, read_partition
from features.collect.trial import Trial, try_rollouts, unregistered
from features.errors import DraftlakeError
from features.heads import HeadSnapshot
from features.lake import Lake
from features.quarantine import Refusal, quarantine
from features.schema import FeatureDtype, FragmentLayout, TargetVersion, VersionRecord
from pipelines.backfill_spec import BackfillSpec, TargetSpec
from pipelines.collect import describe_version, layer_ids_of, load_target
from pipelines.device import compute_device

Described = tuple[VersionRecord, HeadSnapshot]
"""What ``describe_version`` found in a target's directory."""


@dataclass(frozen=True, slots=True)
class Job:
    """A partition to collect."""

    partition: SourcePartition
    run_id: str
    """Names its refusals in the lake's quarantine."""
    fates: NDArray[np.uint8]
    max_tokens: int | None
    """Feature rows it may add to the lake; None: no limit."""


class Worker:
    """Scans, times and collects for one backfill; loads the target when it is first needed."""

    def __init__(
        self, spec: BackfillSpec, progress: Callable[[int], None], described: Described | None = None
    ) -> None:
        self._spec, self._progress, self._described = spec, progress, described
        self._version = TargetVersion(spec.version)
        self._model: Any = None
        self._session: Session | None = None
        self._bystander: Session | None = None

    def scan(self, partition: SourcePartition) -> PartitionScan:
        """Read a partition once, without a model."""
        counts = SourceCounts()
        items = read_partition(partition, self._spec.source_options, counts)
        scan = scan_partition(items, counts, version=self._version, policy=self._spec.policy)
        self._progress(1)
        return scan

    def trial(self, partition: SourcePartition) -> Trial | None:
        """Run the partition's first wanted rollouts twice and time the second; None without any. Writes nothing."""
        items = read_partition(partition, self._spec.source_options, SourceCounts())
        return try_spec(self._spec, items, *self._describe(), target=self._target)

    def collect(self, job: Job) -> PartitionReport:
        """Collect a partition.

        Raises:
            DraftlakeError: as ``collect_partition`` and ``register_proven`` do.
        """
        lake = Lake.open(self._spec.lake)
        session = self._open() if (job.fates == Fate.WANTED).any() else self._refusing()
        return collect_partition(
            session,
            read_partition(job.partition, self._spec.source_options, SourceCounts()),
            keep_refusals=lambda refusals, part: quarantine(lake, refusals, job.run_id, part=part),
            fates=job.fates,
            max_tokens=job.max_tokens,
            progress=self._progress,
        )

    def _target(self) -> Any:
        if self._model is None:
            self._model = load_target(Path(self._spec.target), compute_device())
        return self._model

    def _open(self) -> Session:
        if self._session is None:
            self._session = open_session(self._spec, self._target(), *self._describe())
        return self._session

    def _refusing(self) -> Session:
        """A session for partitions without a wanted rollout: it loads no target and registers no version.

        A version number that was typed wrongly is not taken for ever. The version is known to a lake in memory only.
        """
        if self._bystander is None:
            (record, head), spec = self._describe(), self._spec
            lake = unregistered(Lake.open(spec.lake), record, head)
            self._bystander = session_of(spec, None, open_tap(HF_TAP), record, head, lake)
        return self._bystander

    def _describe(self) -> Described:
        if self._described is None:
            lake = Lake.open(self._spec.lake)
            self._described = describe_version(lake, Path(self._spec.target), self._version)
        return self._described


def try_spec(
    spec: TargetSpec,
    items: Iterable[Rollout | Refusal],
    record: VersionRecord,
    head: HeadSnapshot,
    *,
    target: Callable[[], Any],
) -> Trial | None:
    """:func:`features.collect.trial.try_rollouts` as a spec asks for it; ``target`` loads the model when it is needed.

    Raises:
        InputError: a layer id does not fit the target.
    """
    layout = layout_of_spec(spec, Lake.open(spec.lake), record)
    return try_rollouts(
        items, tap=open_tap(HF_TAP), target=target, record=record, head=head, layout=layout, policy=spec.policy,
        tolerance=spec.tolerance,
    )  # fmt: skip


def layout_of_spec(spec: TargetSpec, lake: Lake, record: VersionRecord) -> FragmentLayout:
    """The layout that a spec asks for.

    Raises:
        InputError: a layer id does not fit the target.
    """
    return FragmentLayout(layer_ids_of(spec.layer_ids, lake), FeatureDtype(spec.dtype), record.hidden_size)


def open_session(spec: TargetSpec, model: Any, record: VersionRecord, head: HeadSnapshot) -> Session:
    """Prove the target and register its version; what collects with it.

    Raises:
        InputError: a layer id does not fit the target.
        VersionConflictError: the version number is taken by other weights.
        ProofFailedError: the tap does not read what it claims to read; nothing was registered.
    """
    lake = Lake.open(spec.lake)
    layout = layout_of_spec(spec, lake, record)
    tap = register_proven(lake, model=model, head=head, record=record, layer_ids=layout.layer_ids, tap=HF_TAP)
    return session_of(spec, model, tap, record, head, lake)


def session_of(
    spec: TargetSpec, model: Any, tap: TapModule, record: VersionRecord, head: HeadSnapshot, lake: Lake
) -> Session:
    """What collects into ``lake``, where the version is registered, with a tap that is proven."""
    layout = layout_of_spec(spec, lake, record)
    return Session(
        lake=lake, model=model, tap=tap, head=head, record=record, layout=layout, policy=spec.policy,
        tolerance=spec.tolerance, committed=CommittedSpans(lake, version=record.version, layout=layout),
        writer_id=spec.writer_id, chunk_tokens=spec.fragment_tokens, batch_tokens=DEFAULT_BATCH_TOKENS,
    )  # fmt: skip


class Crew(Protocol):
    """Whoever does the work: this process, or several."""

    def scan(self, partitions: Sequence[SourcePartition]) -> Iterator[PartitionScan]: ...
    def trial(self, partition: SourcePartition) -> Trial | None: ...
    def collect(self, jobs: Sequence[Job], finished: Callable[[int, PartitionReport], None]) -> None: ...


class _Alone:
    """One worker, in this process."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def scan(self, partitions: Sequence[SourcePartition]) -> Iterator[PartitionScan]:
        return map(self._worker.scan, partitions)

    def trial(self, partition: SourcePartition) -> Trial | None:
        return self._worker.trial(partition)

    def collect(self, jobs: Sequence[Job], finished: Callable[[int, PartitionReport], None]) -> None:
        for index, job in enumerate(jobs):
            finished(index, self._worker.collect(job))


class _Several:
    """Spawned workers; a partition goes to whoever is free."""

    def __init__(self, pool: ProcessPoolExecutor, workers: int) -> None:
        self._pool, self._workers = pool, workers

    def scan(self, partitions: Sequence[SourcePartition]) -> Iterator[PartitionScan]:
        return self._pool.map(_scan, partitions)

    def trial(self, partition: SourcePartition) -> Trial | None:
        found = self._pool.submit(_trial, partition).result()
        return found and replace(found, tokens_per_second=found.tokens_per_second * self._workers)

    def collect(self, jobs: Sequence[Job], finished: Callable[[int, PartitionReport], None]) -> None:
        futures: dict[Future[PartitionReport], int] = {
            self._pool.submit(_collect, job): index for index, job in enumerate(jobs)
        }
        pending = set(futures)
        try:
            while pending:
                done, pending = wait(pending, return_when=FIRST_EXCEPTION, timeout=1.0)
                for future in done:
                    finished(futures[future], future.result())
        except BrokenProcessPool as error:
            raise DraftlakeError(
                "a worker of the backfill was killed (out of memory, or stopped from outside). What it "
                "committed stays: run the same command again, with fewer --workers if memory was short."
            ) from error
        finally:
            for future in pending:
                future.cancel()


@contextmanager
def crew(spec: BackfillSpec, described: Described, progress: Callable[[int], None]) -> Iterator[Crew]:
    """The workers of a backfill while the context is open; ``progress`` is told what each of them did."""
    if spec.workers == 1:
        yield _Alone(Worker(spec, progress, described))
        return
    context = multiprocessing.get_context("spawn")
    steps = context.SimpleQueue()
    listener = threading.Thread(target=_listen, args=(steps, progress), daemon=True)
    listener.start()
    pool = ProcessPoolExecutor(
        spec.workers, mp_context=context, initializer=_start, initargs=(spec, steps, os.getpid())
    )
    try:
        yield _Several(pool, spec.workers)
    finally:
        pool.shutdown(cancel_futures=True)
        steps.put(None)
        listener.join()


def _listen(steps: Any, progress: Callable[[int], None]) -> None:
    while (step := steps.get()) is not None:
        progress(step)


_worker: Worker | None = None
"""The worker of a spawned process."""


def _start(spec: BackfillSpec, steps: Any, parent: int) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _worker = Worker(spec, steps.put)


def _end_with(parent: int) -> None:
    """End this process at once when its parent has gone: nobody would take its result."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _this_worker() -> Worker:
    assert _worker is not None
    return _worker


def _scan(partition: SourcePartition) -> PartitionScan:
    return _this_worker().scan(partition)


def _trial(partition: SourcePartition) -> Trial | None:
    return _this_worker().trial(partition)


def _collect(job: Job) -> PartitionReport:
    return _this_worker().collect(job)
