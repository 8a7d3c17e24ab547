"""Collecting inside a live trainer: plan before the forward, hand rows over after it, never wait beyond a budget.

A step is ``plan = collector.plan(batch)``, the trainer's own forward, in which a tap gathers the
rows ``plan.index`` and starts their copy to the host, and ``collector.offer(plan, rows)``. A
background thread waits for the copy, cuts windows, runs the logprob proof and hands them to a
:class:`~features.stream_writer.StreamWriter`. After each weight update: ``collector.advance``.

Imports no framework; taps live in ``features.collect.taps``. Windows are uploaded as they come, so
a trainer that runs a version again may store a window twice; a selection takes each once.
"""

import logging
import threading
import time
from collections import Counter
from types import TracebackType

import numpy as np

from features.collect.collector import admission_problem
from features.collect.live_batch import LiveBatch
from features.collect.live_ledger import Ledger
from features.collect.live_options import DEFAULT_LIVE, LiveOptions, LiveReport
from features.collect.live_plan import LivePlan, RowsAtHand, RowsOnTheWay
from features.collect.live_worker import FlushAll, LiveWorker, NewVersion, Offered, refusal_of
from features.collect.proofs import LogprobTolerance
from features.collect.rollout import Reason, Rollout, rollout_problem
from features.collect.sampling import SamplingPolicy, WindowSpan
from features.errors import InputError
from features.heads import HeadSnapshot
from features.lake import Lake
from features.schema import FragmentLayout, TargetVersion, VersionRecord

log = logging.getLogger(__name__)

__all__ = [
    "LiveBatch",
    "LiveCollector",
    "LiveOptions",
    "LivePlan",
    "LiveReport",
    "RowsAtHand",
    "RowsOnTheWay",
]

_Pieces = list[tuple[int, Rollout, tuple[WindowSpan, ...]]]


class LiveCollector:
    """One trainer rank's collector; see the module's docstring. Call it from one thread.

    Where several ranks hold shards of one batch, one rank plans and sends ``plan.index`` to the
    others; where each rank has a batch of its own, each has its own collector and writer id.
    """

    def __init__(
        self,
        lake: Lake,
        *,
        layout: FragmentLayout,
        policy: SamplingPolicy,
        writer_id: str,
        options: LiveOptions = DEFAULT_LIVE,
        tolerance: LogprobTolerance = LogprobTolerance(),  # noqa: B008 - frozen
    ) -> None:
        """Start the background thread. :meth:`advance` comes next: rows belong to a version."""
        self.lake, self.layout, self.policy = lake, layout, policy
        self._ledger = Ledger(options)
        self._worker = LiveWorker(
            lake, self._ledger, layout=layout, policy=policy, writer_id=writer_id, options=options,
            tolerance=tolerance,
        )  # fmt: skip
        self._record: VersionRecord | None = None
        self._seen: dict[str, bytes] = {}
        self._planned_tokens = 0
        self._open_plans: dict[int, LivePlan] = {}
        self._closed = False

    @property
    def version(self) -> TargetVersion | None:
        """The version that rows belong to; None before the first :meth:`advance`."""
        return None if self._record is None else self._record.version

    def advance(self, record: VersionRecord, head: HeadSnapshot) -> None:
        """The module's weights are now version ``record``, with LM head ``head``; returns at once.

        Head and version are stored on the background thread, a head that the lake has is not
        stored again. A version that contradicts the lake, or whose head is another than
        ``record`` names, is collected no further: its windows count as ``version_refused``, and
        :meth:`close` raises what was wrong.

        Raises:
            InputError: the version is below the one before it.
        """
        if self.version is not None and record.version < self.version:
            raise InputError(
                f"{record.version} comes after {self.version}: versions of a live target only grow"
            )
        if record == self._record:
            return
        self._record, self._seen, self._planned_tokens = record, {}, 0
        self._worker.put(NewVersion(record, head))

    def plan(self, batch: LiveBatch) -> LivePlan:
        """Which rows of ``batch`` are wanted; call it before the forward.

        Sequences that another version sampled, or whose parts do not fit each other, are refused
        and counted, never raised. Waits for room only as long as the options allow.

        Raises:
            InputError: :meth:`advance` was never called.
        """
        if self._record is None:
            raise InputError("no version to collect: call advance(record, head) before the first plan")
        started, counts = time.perf_counter(), Counter(steps=1, sequences=len(batch))
        pieces: _Pieces = []
        reserved = 0
        for sequence in range(len(batch)):
            found = self._wanted(batch, sequence, counts)
            if found is None:
                continue
            rollout, spans = found
            counts.update(planned_sequences=1, planned_windows=len(spans))
            nbytes = self._reserve(rollout, spans, counts)
            if nbytes:
                pieces.append((sequence, rollout, spans))
                reserved += nbytes
        rows = [batch.layout.rows(n, s.start, s.stop) for n, _, spans in pieces for s in spans]
        plan = LivePlan(
            self._record.version, tuple((rollout, spans) for _, rollout, spans in pieces),
            np.concatenate([np.zeros(0, np.int64), *rows]), batch.layout, reserved,
        )  # fmt: skip
        if plan:
            self._open_plans[id(plan)] = plan
        self._ledger.count(**counts)
        self._ledger.spend(plan_s=time.perf_counter() - started)
        return plan

    def offer(self, plan: LivePlan, rows: RowsOnTheWay) -> None:
        """Hand over the rows of a plan; returns at once.

        Rows of a version that is no longer the module's are refused and counted
        (``version_mismatch``), rows of another number than planned likewise (``feature_shape``).
        """
        if not plan:
            return
        started = time.perf_counter()
        self._settle(plan)
        if plan.version != self.version:
            self._ledger.refuse_windows(Reason.VERSION_MISMATCH.value, plan.num_windows, plan.nbytes)
        else:
            self._worker.put(Offered(plan, rows))
        self._ledger.spend(offer_s=time.perf_counter() - started)

    def abandon(self, plan: LivePlan) -> None:
        """Give a plan up whose forward gave no rows; its windows are counted, its samples may come again."""
        if not plan:
            return
        self._settle(plan)
        for rollout, _ in plan.pieces:
            self._seen.pop(rollout.sample_id, None)
        with self._ledger.changed:
            self._ledger.count(abandoned_windows=plan.num_windows)
            self._ledger.release(plan.num_windows, plan.nbytes)

    def flush(self, timeout_s: float | None = None) -> LiveReport:
        """Wait until everything offered so far is committed or refused.

        Raises:
            TimeoutError: that took longer than ``timeout_s``; collecting goes on.
            Exception: what the store failed with; the windows are kept and tried again.
        """
        done = threading.Event()
        outcome: list[BaseException | None] = []

        def settle(error: BaseException | None) -> None:
            outcome.append(error)
            done.set()

        self._worker.put(FlushAll(settle))
        if not done.wait(timeout_s):
            raise TimeoutError(f"not everything is committed to {self.lake.url} after {timeout_s} s")
        if outcome[0] is not None:
            raise outcome[0]
        return self.report()

    def close(self, timeout_s: float | None = None) -> LiveReport:
        """Commit what was taken, end the threads, and report. Plans still open are abandoned.

        Raises:
            TimeoutError: not everything was committed within ``timeout_s``; may be called again.
            Exception: what the store failed with, or a version was refused for; windows that could
                not be stored are counted as lost. :meth:`report` still answers.
        """
        for plan in list(self._open_plans.values()):
            self.abandon(plan)
        if not self._worker.close(timeout_s):
            raise TimeoutError(f"not everything is committed to {self.lake.url} after {timeout_s} s")
        first, self._closed = not self._closed, True
        if first and self._worker.error is not None:
            raise self._worker.error
        return self.report()

    def report(self) -> LiveReport:
        """Counts so far."""
        return self._ledger.report()

    def __enter__(self) -> "LiveCollector":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception:
            # What the block failed with matters more; this one is kept in the log.
            log.exception("closing the live collector failed: %s", self.report())

    def _wanted(
        self, batch: LiveBatch, sequence: int, counts: Counter[str]
    ) -> tuple[Rollout, tuple[WindowSpan, ...]] | None:
        """The sequence and its spans, or None with the reason counted."""
        record = self._record
        assert record is not None
        sampled_by, sample_id = batch.version_of(sequence), batch.sample_ids[sequence]
        if sampled_by == record.version.number and not self.policy.may_keep(sample_id, record.version):
            counts["skipped_by_sampling"] += 1
            return None
        rollout = batch.rollout(sequence)
        problem = rollout_problem(rollout) or admission_problem(rollout, record)
        digest = batch.content_digest(sequence)
        if problem is None and (known := self._seen.get(sample_id)) is not None:
            if known == digest:
                counts["repeated_sequences"] += 1
                return None
            problem = Reason.SAMPLE_CONFLICT, "the same sample id came before with other tokens or masks"
        if problem is not None:
            self._ledger.refuse_sequence(problem[0].value)
            self._worker.refuse(record.version, refusal_of(rollout, *problem))
            return None
        spans = self.policy.plan(rollout, record.version)
        if not spans:
            counts["skipped_by_sampling"] += 1
            return None
        self._seen[sample_id] = digest
        return rollout, spans

    def _reserve(self, rollout: Rollout, spans: tuple[WindowSpan, ...], counts: Counter[str]) -> int:
        """Bytes set aside for the spans; 0 when they are left out, with the reason counted."""
        rows = sum(span.num_rows for span in spans)
        budget = self.policy.token_budget
        if budget is not None and self._planned_tokens + rows > budget.tokens:
            counts["over_budget_windows"] += len(spans)
            return 0
        if self._worker.crashed or not self._ledger.reserve(len(spans), rows * self.layout.row_bytes):
            counts.update(dropped_windows=len(spans), dropped_tokens=rows)
            del self._seen[rollout.sample_id]  # it may be taken when it comes again
            return 0
        self._planned_tokens += rows
        return rows * self.layout.row_bytes

    def _settle(self, plan: LivePlan) -> None:
        found = self._open_plans.pop(id(plan), None)
        assert found is plan, "a plan is offered or abandoned once, to the collector that made it"
