"""The framework-free core of collection: rollouts and feature rows in, committed fragments out.

It imports no deep-learning framework, so it can live inside a trainer or an engine. A caller
does ``spans = collector.admit(rollout)``; when spans come back it computes the features of
that sequence and calls ``collector.add(rollout, aux, final)``; ``close()`` gives the report.

Samples keep their order, and a fragment closes by *planned* rows. Hence the same input gives
the same plans whoever runs it: a killed run, run again, completes with the same windows.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from features.bfloat16 import Float32, to_float32
from features.collect.committed import CommittedSpans
from features.collect.cut import window_of_rows
from features.collect.proofs import (
    NEIGHBOUR_TOKENS,
    Agreement,
    AgreementTally,
    LogprobTolerance,
    NeighbourGap,
    feature_fault,
    logprob_agreement,
    neighbour_gap,
)  # fmt: skip
from features.collect.report import CollectReport
from features.collect.rollouts import Reason, Rollout, rollout_problem
from features.collect.sampling import SamplingPolicy, WindowSpan
from features.errors import VersionConflictError
from features.heads import HeadSnapshot
from features.lake import Lake
from features.quarantine import Refusal
from features.schema import (
    FragmentLayout,
    HeadId,
    TargetVersion,
    Verification,
    VersionRecord,
)  # fmt: skip
from features.windows import Window
from features.writer import plan_digest, write_fragment

log = logging.getLogger(__name__)

DEFAULT_FRAGMENT_TOKENS = 32_768
"""Planned rows at which a fragment closes; 256 MiB of bfloat16 at H=1024 with three aux ids."""


class Collector:
    """Collects windows of one target version with one layout; see the module's docstring.

    Raises:
        UnknownVersionError, HeadMissingError: the version or its head is not in the lake.
        VersionConflictError: ``head_id`` is not the head of ``version``.
    """

    def __init__(
        self,
        lake: Lake,
        *,
        version: TargetVersion,
        head_id: HeadId,
        layout: FragmentLayout,
        policy: SamplingPolicy,
        writer_id: str,
        fragment_tokens: int = DEFAULT_FRAGMENT_TOKENS,
        tolerance: LogprobTolerance = LogprobTolerance(),  # noqa: B008 - frozen
        on_step: Callable[[str], None] | None = None,
        committed: CommittedSpans | None = None,
        head: HeadSnapshot | None = None,
    ) -> None:
        record = lake.version(version)
        if record.head_id != head_id:
            raise VersionConflictError(
                f"{version} is registered with head {record.head_id}, the collector was given {head_id}; "
                "windows would be scored with another version's head. Use the version's own head."
            )
        self._lake, self._version, self._record, self._layout = lake, version, record, layout
        self._policy, self._writer_id, self._on_step = policy, writer_id, on_step
        self._fragment_tokens, self._tolerance = fragment_tokens, tolerance
        self._head = lake.head(head_id) if head is None else head
        self._committed = committed or CommittedSpans(lake, version=version, layout=layout)
        self._seen: dict[str, str] = {}
        self._pending: dict[str, tuple[WindowSpan, ...]] = {}
        self._refusals: list[Refusal] = []
        self._reasons: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._commits: list[str] = []
        self._tally = AgreementTally()
        self._gap_rows: list[tuple[Float32, NDArray[np.int32]]] = []
        self._begin_fragment()

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """Everything refused so far, with reasons, for the lake's quarantine."""
        return tuple(self._refusals)

    def admit(self, item: Rollout | Refusal) -> tuple[WindowSpan, ...]:
        """Take in one rollout; returns the spans whose features are wanted, in the caller's hands now.

        Empty: nothing to compute (refused, duplicate or sampled out), and counted as such.
        """
        self._counts["received"] += 1
        if isinstance(item, Refusal):
            self._count_refusal(item)
            return ()
        problem = rollout_problem(item) or admission_problem(item, self._record)
        if problem is not None:
            self._refuse(item, *problem)
            return ()
        if item.sample_id in self._seen:
            if self._seen[item.sample_id] != item.content_digest:
                self._refuse(
                    item, Reason.SAMPLE_CONFLICT, "the same sample id came before with other tokens or masks"
                )
            else:
                self._counts["duplicates"] += 1
            return ()
        self._seen[item.sample_id] = item.content_digest
        spans = self._policy.plan(item, self._version)
        if not spans:
            self._counts["skipped_by_sampling"] += 1
            return ()
        match self._committed.compare(item, spans):
            case "same":
                self._counts["duplicates"] += 1
                return ()
            case "conflict":
                detail = "the lake holds this sample id at this version with other tokens or masks"
                self._refuse(item, Reason.SAMPLE_CONFLICT, detail)
                return ()
        self._pending[item.sample_id] = spans
        return spans

    def refuse(self, rollout: Rollout, reason: Reason, detail: str) -> None:
        """Give up an admitted rollout for which no features can be had."""
        del self._pending[rollout.sample_id]
        self._refuse(rollout, reason, detail)

    def withdraw(self, rollout: Rollout) -> None:
        """Hand an admitted rollout back, as if it had never been offered."""
        del self._pending[rollout.sample_id], self._seen[rollout.sample_id]
        self._counts["received"] -= 1

    def drain_refusals(self) -> tuple[Refusal, ...]:
        """What was refused since this was last asked; the collector keeps only the counts."""
        drained, self._refusals = tuple(self._refusals), []
        return drained

    def add(self, rollout: Rollout, aux: Float32, final: Float32) -> None:
        """Take the features of an admitted rollout, in the order of admission.

        ``aux`` is ``[T, m * H]`` pre-norm, ``final`` ``[T, H]``, float32, one row per token of
        the *whole* sequence. Features that do not fit, are not finite, are all zero or disagree
        with the recorded logprobs send the sample to quarantine; the others are kept.
        """
        spans = self._pending.pop(rollout.sample_id)
        fault = feature_fault(aux, final, rows=len(rollout.token_ids), layout=self._layout)
        pieces = [] if fault else [(aux[s.start : s.stop], final[s.start : s.stop]) for s in spans]
        self._take(rollout, spans, pieces, fault)

    def add_windows(self, rollout: Rollout, pieces: Sequence[tuple[Float32, Float32]]) -> None:
        """Like :meth:`add`, from the rows of the admitted spans alone.

        ``pieces`` holds ``(aux [R, m * H], final [R, H])`` of each span, in the order ``admit`` gave them.
        """
        spans = self._pending.pop(rollout.sample_id)
        assert len(pieces) == len(spans), f"{len(spans)} spans were planned, features came for {len(pieces)}"
        faults = (
            feature_fault(aux, final, rows=span.num_rows, layout=self._layout)
            for span, (aux, final) in zip(spans, pieces, strict=True)
        )
        self._take(rollout, spans, pieces, next((fault for fault in faults if fault), None))

    def _take(
        self,
        rollout: Rollout,
        spans: tuple[WindowSpan, ...],
        pieces: Sequence[tuple[Float32, Float32]],
        fault: tuple[Reason, str] | None,
    ) -> None:
        """Buffer the windows, or refuse the rollout; either counts towards the fragment."""
        self._planned_ids.append(rollout.sample_id)
        self._planned_rows += sum(span.num_rows for span in spans)
        if fault is None:
            pairs = [
                self._proven(
                    rollout,
                    window_of_rows(
                        rollout,
                        span,
                        aux,
                        final,
                        version=self._version,
                        layout=self._layout,
                        sampling=self._policy.recorded,
                    ),
                )
                for span, (aux, final) in zip(spans, pieces, strict=True)
            ]
            refused = [agreement for _, agreement in pairs if agreement.verdict == "disagrees"]
            fault = (Reason.LOGPROB_DISAGREEMENT, refused[0].reason) if refused else None
        if fault is not None:
            self._refuse(rollout, *fault)
        else:
            self._buffer.extend(window for window, _ in pairs)
            self._samples += 1
            self._outside += len(rollout.token_ids) - sum(span.num_rows for span in spans)
        if self._planned_rows >= self._fragment_tokens:
            self.flush()

    def flush(self) -> None:
        """Commit what is buffered as one fragment, data first and marker last."""
        if self._buffer:
            self._commit()
        self._begin_fragment()

    def close(self) -> CollectReport:
        """Flush, and report. Rollouts admitted but never added are an error of the caller."""
        assert not self._pending, f"{len(self._pending)} admitted rollouts were neither added nor refused"
        self.flush()
        summary = self._tally.summary()
        gaps = self._neighbour_gaps(summary.smallest_gap)
        return replace(self.report(), agreement=replace(summary, neighbours=gaps))

    def report(self) -> CollectReport:
        """Counts so far; buffered windows are not in it before they are committed."""
        return CollectReport(
            version=self._version, quarantined=dict(self._reasons), commits=tuple(self._commits),
            agreement=self._tally.summary(), **self._counts,
        )  # fmt: skip

    def _begin_fragment(self) -> None:
        self._buffer: list[Window] = []
        self._planned_ids: list[str] = []
        self._planned_rows = self._samples = self._outside = 0

    def _commit(self) -> None:
        target_id, sampling = self._lake.target.target_id, self._policy.as_mapping()
        plan_id = plan_digest(target_id, self._version, self._planned_ids, sampling, self._layout)
        result = write_fragment(
            self._lake, version=self._version, head_id=self._record.head_id, plan_id=plan_id,
            windows=self._buffer, writer_id=self._writer_id, on_step=self._on_step,
        )  # fmt: skip
        if result.outcome == "duplicate_plan":
            self._counts["duplicates"] += self._samples
            return
        verified = sum(w.meta.verification is Verification.VERIFIED for w in self._buffer)
        self._counts.update(
            collected=self._samples, tokens_outside_windows=self._outside, windows=len(self._buffer),
            tokens=sum(w.num_rows for w in self._buffer), fragments=1, nbytes=result.nbytes,
            verified=verified, unverified=len(self._buffer) - verified,
        )  # fmt: skip
        self._commits.append(result.commit_path)
        log.info("collected %s: %d windows in %s", self._version, len(self._buffer), result.commit_path)

    def _proven(self, rollout: Rollout, window: Window) -> tuple[Window, Agreement]:
        """The window with the proof's outcome in its metadata."""
        agreement = logprob_agreement(window, self._head, self._tolerance)
        if agreement.verdict == "agrees" and not rollout.may_verify:
            reason = "tokens or version were not recorded, and agreement cannot stand in for a record"
            agreement = replace(agreement, verdict="unverified", reason=reason)
        self._tally.add(agreement)
        if agreement.verdict != "agrees":
            return window, agreement
        self._remember_rows(window)
        meta = replace(
            window.meta, verification=Verification.VERIFIED, logprob_tokens=agreement.tokens,
            logprob_mean_error=agreement.mean_error, logprob_max_error=agreement.max_error,
        )  # fmt: skip
        return replace(window, meta=meta), agreement

    def _remember_rows(self, window: Window) -> None:
        """Keep a few rows, to ask at the end how far neighbouring versions' heads would move them."""
        room = NEIGHBOUR_TOKENS - sum(len(ids) for _, ids in self._gap_rows)
        rows = np.flatnonzero(window.sampled_mask[1:])[:room]
        if len(rows):
            final = window.final[rows]
            self._gap_rows.append((to_float32(final, self._layout.dtype), window.token_ids[1:][rows]))

    def _neighbour_gaps(self, needed: float) -> tuple[NeighbourGap, ...]:
        if not self._gap_rows:
            return ()
        final = np.concatenate([rows for rows, _ in self._gap_rows])
        ids = np.concatenate([tokens for _, tokens in self._gap_rows])
        return tuple(
            neighbour_gap(
                final, ids, own=self._head, other=self._lake.head(r.head_id), version=r.version, needed=needed
            )
            for r in _neighbours(self._lake.versions(), self._version)
        )

    def _refuse(self, rollout: Rollout, reason: Reason, detail: str) -> None:
        sample = rollout.to_json_dict()
        if reason is Reason.VERSION_MISMATCH:  # a file of many versions: its other runs take these
            sample = {name: sample[name] for name in ("sample_id", "group_id", "version")}
        source = rollout.source_file or rollout.sample_id
        line = rollout.source_row if rollout.source_file else None
        self._count_refusal(
            Refusal(source=source, line=line, reason=str(reason), detail=detail, sample=sample)
        )

    def _count_refusal(self, refusal: Refusal) -> None:
        self._refusals.append(refusal)
        self._reasons[refusal.reason] += 1


def admission_problem(rollout: Rollout, record: VersionRecord) -> tuple[Reason, str] | None:
    """Why weights that are described by ``record`` cannot give the features of ``rollout``, or None."""
    if rollout.multimodal:
        return (
            Reason.MULTIMODAL,
            "its images or sound are not in the record: text alone gives other states",
        )
    if rollout.version is None and rollout.mixed_versions:
        return (
            Reason.VERSION_MIXED,
            f"sampled by versions {rollout.version_min} to {rollout.version_max}: no one set of weights gives "
            f"all of its hidden states",
        )
    if rollout.version is None:
        return (
            Reason.VERSION_MISSING,
            f"no version is recorded (label {rollout.version_label!r}); never taken as current",
        )
    if rollout.version != record.version.number:
        return (
            Reason.VERSION_MISMATCH,
            f"sampled by version {rollout.version}, this run collects {record.version}",
        )
    worst = max(rollout.token_ids)
    if worst >= record.vocab_size:
        return (
            Reason.TOKEN_OUT_OF_VOCAB,
            f"a token id (largest {worst}) is outside [0, {record.vocab_size})",
        )
    if not any(rollout.sampled_mask):
        return Reason.NOTHING_SAMPLED, "no token is marked as sampled: nothing to learn or to verify"
    return None


def _neighbours(records: tuple[VersionRecord, ...], version: TargetVersion) -> list[VersionRecord]:
    """The nearest registered versions below and above."""
    below = [r for r in records if r.version < version]
    above = [r for r in records if version < r.version]
    nearest = [
        max(below, key=lambda r: r.version, default=None),
        min(above, key=lambda r: r.version, default=None),
    ]
    return [r for r in nearest if r is not None]
