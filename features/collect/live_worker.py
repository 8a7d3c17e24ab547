"""The background thread of a live collector: waits for copies, cuts, proves, and sees windows into the lake.

A store that fails does not end collecting: windows stay here, within the budget that their
plans took, and are offered to another stream writer after a while. Uploads have a writer of their own
with its threads; this thread never waits for one except when a writer failed or at the end.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from features.bfloat16 import Stored, to_float32
from features.collect.cut import window_of_rows
from features.collect.live_ledger import Ledger
from features.collect.live_options import LiveOptions
from features.collect.live_plan import LivePlan, RowsOnTheWay
from features.collect.proofs import LogprobTolerance, feature_fault, logprob_agreement
from features.collect.rollout import Reason, Rollout
from features.collect.sampling import SamplingPolicy, WindowSpan
from features.errors import DraftlakeError, LakeContractError, VersionConflictError
from features.heads import HeadSnapshot
from features.lake import Lake
from features.quarantine import Refusal, quarantine
from features.schema import FeatureDtype, FragmentLayout, HeadId, TargetVersion, Verification, VersionRecord
from features.stream_options import StreamOptions
from features.stream_writer import StreamWriter
from features.windows import Window

log = logging.getLogger(__name__)

_POLL_S = 0.5
"""How soon an idle thread notices that an upload failed."""
_MAX_REFUSALS = 256
"""Refusals of one version that quarantine keeps with their identity; all are counted."""
_MAX_BACKOFF = 16


@dataclass(frozen=True, slots=True)
class NewVersion:
    """From here on rows belong to this version."""

    record: VersionRecord
    head: HeadSnapshot


@dataclass(frozen=True, slots=True)
class Offered:
    """Rows of a plan."""

    plan: LivePlan
    rows: RowsOnTheWay


@dataclass(frozen=True, slots=True)
class FlushAll:
    """Commit everything that came before; ``done`` is told what went wrong, if anything."""

    done: Callable[[BaseException | None], None]


Job = NewVersion | Offered | FlushAll


class LiveWorker:
    """Takes jobs in order; see the module's docstring."""

    def __init__(
        self,
        lake: Lake,
        ledger: Ledger,
        *,
        layout: FragmentLayout,
        policy: SamplingPolicy,
        writer_id: str,
        options: LiveOptions,
        tolerance: LogprobTolerance,
    ) -> None:
        self._lake, self._ledger, self._layout, self._policy = lake, ledger, layout, policy
        self._writer_id, self._options, self._tolerance = writer_id, options, tolerance
        self._jobs: deque[Job] = deque()
        self._closing = False
        self._version: NewVersion | None = None
        self._heads: dict[TargetVersion, HeadId] = {}
        self._refused_versions: dict[TargetVersion, BaseException] = {}
        self._refusals: dict[TargetVersion, list[Refusal]] = {}
        self._backlog: deque[Window] = deque()
        self._writer: StreamWriter | None = None
        self._retry_at, self._backoff = 0.0, 1
        self.error: BaseException | None = None
        """What the last windows could not be stored for, or a version was refused for."""
        self.crashed = False
        """The thread met an error that it does not know, and ended."""
        self._thread = threading.Thread(target=self._run, name="draftlake-collect", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Queue a job; returns at once."""
        with self._ledger.changed:
            if not self.crashed:
                self._jobs.append(job)
                self._ledger.changed.notify_all()
                return
        if isinstance(job, FlushAll):
            job.done(self.error)

    def refuse(self, version: TargetVersion, refusal: Refusal) -> None:
        """Keep a refused sequence for quarantine; counting is the caller's."""
        with self._ledger.changed:
            kept = self._refusals.setdefault(version, [])
            if len(kept) < _MAX_REFUSALS:
                kept.append(refusal)

    def close(self, timeout_s: float | None) -> bool:
        """Finish the jobs and end; False when it took longer than ``timeout_s``."""
        with self._ledger.changed:
            self._closing = True
            self._ledger.changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            # A fault of ours must neither end the trainer nor pass unseen: nothing is planned from
            # here on, and flush and close raise it.
            log.exception("the collector of %s stopped", self._lake.url)
            with self._ledger.changed:
                self._ledger.failed(error)
                self.error, self.crashed = error, True
                waiting, self._jobs = self._jobs, deque()
            for job in waiting:
                if isinstance(job, FlushAll):
                    job.done(error)

    def _work(self) -> None:
        while (job := self._next()) is not None or not self._closing:
            match job:
                case NewVersion():
                    self._begin(job)
                case Offered():
                    self._take(job)
                case FlushAll():
                    job.done(self._flush())
            self._push()
        self._finish()

    def _next(self) -> Job | None:
        """The next job; None after a while without one, so that a failed writer is seen to."""
        with self._ledger.changed:
            if not self._jobs and not self._closing:
                self._ledger.changed.wait(_POLL_S)
            return self._jobs.popleft() if self._jobs else None

    def _begin(self, job: NewVersion) -> None:
        """Store head and version; a store that fails is tried again, a contradiction refuses the version."""
        version = job.record.version
        self._store_refusals()
        while True:
            try:
                if job.head.head_id != job.record.head_id:
                    raise VersionConflictError(
                        f"{version} names head {job.record.head_id}, the given snapshot is {job.head.head_id}. "
                        f"Take the head from the same weights as the features."
                    )
                self._lake.put_head(job.head)
                self._lake.register_version(job.record)
            except DraftlakeError as error:
                log.error("%s is not collected: %s", version, error)
                self._ledger.failed(error)
                self._refused_versions[version] = self.error = error
                return
            except Exception as error:  # a store may raise anything; the trainer must live on
                self._failed(error)
                if not self._pause():
                    self._refused_versions[version] = error
                    return
                continue
            self._version, self._heads[version] = job, job.record.head_id
            return

    def _pause(self) -> bool:
        """Wait until the store is to be tried again; False when the collector is being closed."""
        with self._ledger.changed:
            while not self._closing and (left := self._retry_at - time.monotonic()) > 0:
                self._ledger.changed.wait(left)
            return not self._closing

    def _take(self, job: Offered) -> None:
        """Cut, prove and hand over the windows of one plan."""
        plan = job.plan
        refused = self._refused_versions.get(plan.version)
        if refused is not None:
            self._ledger.refuse_windows("version_refused", plan.num_windows, plan.nbytes)
            return
        try:
            aux, final = job.rows.wait()
        except LakeContractError as error:
            log.error("rows of %d windows are not those of the plan: %s", plan.num_windows, error)
            self._ledger.refuse_windows("batch_mismatch", plan.num_windows, plan.nbytes)
            return
        except Exception as error:  # a device error: the rows are gone, and the trainer sees it as well
            log.error("rows of %d windows never came: %s", plan.num_windows, error)
            self._ledger.refuse_windows("copy_failed", plan.num_windows, plan.nbytes)
            return
        started = time.perf_counter()
        found, at = {"aux": aux, "final": final}, 0
        fault = _shape_fault(found, len(plan.index), self._layout)
        for rollout, spans in plan.pieces:
            rows = sum(span.num_rows for span in spans)
            part = {name: array[at : at + rows] for name, array in found.items()}
            at += rows
            self._take_sequence(plan.version, rollout, spans, part, fault)
        self._ledger.spend(background_s=time.perf_counter() - started)

    def _take_sequence(
        self,
        version: TargetVersion,
        rollout: Rollout,
        spans: tuple[WindowSpan, ...],
        rows: dict[str, Stored],
        fault: tuple[Reason, str] | None,
    ) -> None:
        windows: list[Window] = []
        at = 0
        for span in spans if fault is None else ():
            piece = {name: _wide(array[at : at + span.num_rows]) for name, array in rows.items()}
            at += span.num_rows
            fault = feature_fault(**piece, rows=span.num_rows, layout=self._layout)
            if fault is not None:
                break
            cut = window_of_rows(
                rollout, span, **piece, version=version, layout=self._layout, sampling=self._policy.recorded
            )
            window, fault = self._proven(rollout, cut)
            if fault is not None:
                break
            windows.append(window)
        if fault is None:
            self._backlog.extend(windows)
            verified = sum(w.meta.verification is Verification.VERIFIED for w in windows)
            self._ledger.count(verified=verified, unverified=len(windows) - verified)
            self._push()
            return
        nbytes = sum(span.num_rows for span in spans) * self._layout.row_bytes
        self._ledger.refuse_windows(fault[0].value, len(spans), nbytes)
        self.refuse(version, refusal_of(rollout, *fault))

    def _proven(self, rollout: Rollout, window: Window) -> tuple[Window, tuple[Reason, str] | None]:
        """The window with the proof's outcome, and the fault when it disagrees."""
        assert self._version is not None
        assert self._version.record.version == window.meta.version, (
            "plans of another version are refused on offer"
        )
        started = time.perf_counter()
        head, most = self._version.head, self._options.proof_tokens
        agreement = logprob_agreement(window, head, self._tolerance, max_tokens=most)
        if agreement.verdict == "agrees" and not rollout.may_verify:
            agreement = replace(agreement, verdict="unverified", reason="tokens or version were not recorded")
        with self._ledger.changed:
            self._ledger.tally.add(agreement)
            self._ledger.spend(proof_s=time.perf_counter() - started)
        match agreement.verdict:
            case "disagrees":
                return window, (Reason.LOGPROB_DISAGREEMENT, agreement.reason)
            case "unverified":
                return window, None
        meta = replace(
            window.meta, verification=Verification.VERIFIED, logprob_tokens=agreement.tokens,
            logprob_mean_error=agreement.mean_error, logprob_max_error=agreement.max_error,
        )  # fmt: skip
        return replace(window, meta=meta), None

    def _push(self) -> None:
        """Give the backlog to the writer, as far as it and the store take it."""
        if self._writer is not None and self._writer.failure is not None:
            self._give_up_writer(self._writer.failure)
        while self._backlog:
            if self._writer is None and time.monotonic() < self._retry_at:
                return
            writer = self._open_writer()
            window = self._backlog[0]
            nbytes = window.aux.nbytes + window.final.nbytes
            try:
                writer.append(window, head_id=self._heads[window.meta.version])
            except Exception as error:
                if writer.failure is not None:
                    self._give_up_writer(writer.failure)
                    return
                if not isinstance(error, DraftlakeError):  # the version could not be read: the store again
                    self._failed(error)
                    return
                log.error("a window is refused by the writer: %s", error)
                self._backlog.popleft()
                self._ledger.refuse_windows("writer_refused", 1, nbytes)
                continue
            self._backlog.popleft()
            self._ledger.release(1, nbytes)

    def _open_writer(self) -> StreamWriter:
        if self._writer is None:
            options = self._options
            self._writer = StreamWriter(
                self._lake, writer_id=self._writer_id, sampling=self._policy.as_mapping(),
                options=StreamOptions(
                    max_bytes=options.max_bytes, deadline_s=options.deadline_s,
                    # Small beside the budget: what waits in an open fragment leaves room for its successors.
                    flush_bytes=max(1, min(options.fragment_bytes, options.max_bytes // 4)),
                ),
                on_commit=lambda _result: self._recovered(),
            )  # fmt: skip
            self._ledger.use_writer(self._writer.report)
        return self._writer

    def _recovered(self) -> None:
        self._backoff = 1

    def _give_up_writer(self, error: BaseException) -> None:
        """Take back what a failed writer did not commit; it is offered to another one later."""
        writer = self._writer
        assert writer is not None
        try:
            writer.close()  # waits for uploads that are still on their way
        except Exception as again:
            log.debug("the writer ended with: %s", again)
        back = writer.uncommitted
        with self._ledger.changed:  # at no moment may these windows be nowhere
            self._ledger.close_writer(writer.report())
            self._ledger.pend(len(back), sum(w.aux.nbytes + w.final.nbytes for w in back))
        self._backlog.extendleft(reversed(back))
        self._writer = None
        self._failed(error)

    def _failed(self, error: BaseException) -> None:
        delay = self._options.retry_s * self._backoff
        self._retry_at = time.monotonic() + delay
        self._backoff = min(2 * self._backoff, _MAX_BACKOFF)
        self._ledger.failed(error)
        self.error = error
        log.error("%s failed, tried again in %.0f s: %s", self._lake.url, delay, error)

    def _flush(self) -> BaseException | None:
        """Commit everything now; what failed, if anything."""
        self._retry_at = 0.0
        self._push()
        if self._writer is not None:
            try:
                self._writer.flush()
            except Exception as error:
                self._give_up_writer(error)
        self._store_refusals()
        return self.error if self._backlog else None

    def _finish(self) -> None:
        """One last try; what is left then is lost, and counted."""
        failure = self._flush()
        if self._writer is not None:
            self._writer.close()
            self._ledger.close_writer(self._writer.report())
            self._writer = None
        if failure is None and not self._refused_versions:
            self.error = None
        left = len(self._backlog)
        self._ledger.count(lost=left)
        self._ledger.release(left, sum(w.aux.nbytes + w.final.nbytes for w in self._backlog))
        self._backlog.clear()

    def _store_refusals(self) -> None:
        with self._ledger.changed:
            kept, self._refusals = self._refusals, {}
        for version, refusals in kept.items():
            try:
                quarantine(self._lake, refusals, f"live-{self._writer_id}-{version}".replace("/", "_"))
            except Exception as error:
                # The counts stay in the report; identities are worth no second budget of memory.
                log.error("%d refusals of %s could not be stored: %s", len(refusals), version, error)


def refusal_of(rollout: Rollout, reason: Reason, detail: str) -> Refusal:
    """A refused sequence, by identity: its tokens are the trainer's to keep."""
    sample = {"sample_id": rollout.sample_id, "group_id": rollout.group_id, "version": rollout.version}
    return Refusal(source=rollout.sample_id, line=None, reason=reason.value, detail=detail, sample=sample)


def _shape_fault(found: dict[str, Stored], rows: int, layout: FragmentLayout) -> tuple[Reason, str] | None:
    """States of fewer or more rows than planned are refused, never padded or cut."""
    for name, width in (("aux", layout.aux_width), ("final", layout.hidden_size)):
        if found[name].shape != (rows, width):
            return Reason.FEATURE_SHAPE, f"{name} is {found[name].shape}, expected {(rows, width)} as planned"
    return None


def _wide(array: Stored) -> np.ndarray:
    dtype = FeatureDtype.BFLOAT16 if array.dtype == np.uint16 else FeatureDtype.FLOAT32
    return to_float32(array, dtype)
