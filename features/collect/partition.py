"""Collect one partition of historical rollouts: what is killed, run again and counted as one.

A partition is cut into chunks by what its source holds, never by what the lake holds already: a
chunk closes after so many planned rows or records. Its refusals are kept, then its windows are
committed. Whoever runs it again after a kill meets the same chunks, so completes with the same plans.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.collect.collector import Collector
from features.collect.committed import CommittedSpans
from features.collect.forwards import TapModule, batches, longest_sequence
from features.collect.proofs import AgreementSummary, LogprobTolerance
from features.collect.report import CollectReport
from features.collect.rollouts import Reason, Rollout
from features.collect.sampling import SamplingPolicy
from features.collect.sampling_proof import MAX_TOKENS_TESTED, SamplingEvidence, sampling_evidence
from features.collect.scan import Fate
from features.collect.trial import candidate_spans
from features.errors import InputError
from features.heads import HeadSnapshot
from features.lake import Lake
from features.quarantine import Refusal
from features.schema import FragmentLayout, VersionRecord

MAX_RECORDS = 4096
"""Records after which a chunk closes, however few rows they plan: bounds what is held of refused ones."""

KeepRefusals = Callable[[Sequence[Refusal], int], None]
"""Takes the refusals of a chunk, in order of their place, and the chunk's number."""


@dataclass(frozen=True, slots=True)
class Session:
    """A proven target and the lake it collects into: made once per process, used for many partitions."""

    lake: Lake
    model: Any
    tap: TapModule
    head: HeadSnapshot
    record: VersionRecord
    layout: FragmentLayout
    policy: SamplingPolicy
    tolerance: LogprobTolerance
    committed: CommittedSpans
    writer_id: str
    chunk_tokens: int
    batch_tokens: int

    def collector(self) -> Collector:
        """A collector for one partition; it commits when it is told to."""
        return Collector(
            self.lake, version=self.record.version, head_id=self.record.head_id, layout=self.layout,
            policy=self.policy, writer_id=self.writer_id, fragment_tokens=sys.maxsize,
            tolerance=self.tolerance, committed=self.committed, head=self.head,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """What became of the sequences of a partition.

    ``received == collected + in_lake + repeated + skipped_by_sampling + sum(quarantined.values())``;
    what a quota left is not received.
    """

    received: int = 0
    collected: int = 0
    """Rollouts whose windows this run committed."""
    in_lake: int = 0
    """Rollouts whose windows the lake had already, from an interrupted run or another source."""
    repeated: int = 0
    skipped_by_sampling: int = 0
    quarantined: Mapping[str, int] = field(default_factory=dict)
    windows: int = 0
    tokens: int = 0
    fragments: int = 0
    nbytes: int = 0
    verified: int = 0
    unverified: int = 0
    complete: bool = True
    """False when a quota ended it."""
    agreement: AgreementSummary = field(default_factory=AgreementSummary)
    sampling: SamplingEvidence = field(default_factory=SamplingEvidence)
    """Of the first tokens that this run collected."""

    @property
    def kept(self) -> int:
        """Rollouts of this partition that are in the lake now."""
        return self.collected + self.in_lake


def collect_partition(
    session: Session,
    items: Iterable[Rollout | Refusal],
    *,
    keep_refusals: KeepRefusals,
    fates: NDArray[np.uint8],
    max_tokens: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> PartitionReport:
    """Collect what is wanted of a partition; safe to kill and run again at any moment.

    Args:
        items: the partition's records in order, streamed.
        keep_refusals: given what a chunk refused, before its windows are committed.
        fates: planning's verdict on each candidate, see ``features.collect.scan``.
        max_tokens: feature rows to commit at most; the first rollout that does not fit ends it.
        progress: told the tokens of each forward.

    Raises:
        InputError: there are more candidates than were planned for.
        PlanConflictError: the lake holds a chunk's plan with other tokens.
    """
    return _Run(session, keep_refusals, fates, max_tokens, progress or _silent).collect(items)


def _silent(_tokens: int) -> None:
    return None


class _Run:
    """One pass over a partition."""

    def __init__(
        self,
        session: Session,
        keep_refusals: KeepRefusals,
        fates: NDArray[np.uint8],
        max_tokens: int | None,
        progress: Callable[[int], None],
    ) -> None:
        self._session, self._fates, self._progress = session, fates, progress
        self._keep_refusals = keep_refusals
        self._collector = session.collector()
        self._room = max_tokens
        self._longest = longest_sequence(session.model)
        self._stopped = False
        self._candidates = self._repeated = 0
        self._reasons: Counter[str] = Counter()
        self._sampling = SamplingEvidence()

    def collect(self, items: Iterable[Rollout | Refusal]) -> PartitionReport:
        stream, session, number = iter(items), self._session, 0
        while not self._stopped:
            chunk = _Chunk(stream, session.chunk_tokens)
            for batch in batches(self._admitted(chunk), session.batch_tokens):
                self._forward(batch)
            if not chunk.records:
                break
            # Of a chunk that a quota cut, the refusals come again when the rest is collected.
            if not self._stopped:
                self._settle_refusals(chunk, number)
            self._collector.flush()
            number += 1
        # Not close(): what other versions' heads would say is asked once per run, not per partition.
        return self._report(self._collector.report())

    def _admitted(self, chunk: "_Chunk") -> Iterator[Rollout]:
        """The rollouts of a chunk whose features are wanted."""
        for item in chunk:
            spans = candidate_spans(item, self._session.record.version, self._session.policy)
            if spans:
                chunk.rows += sum(span.num_rows for span in spans)
                assert isinstance(item, Rollout)
                fate = self._next_fate(item)
                if fate == Fate.REPEATED:
                    self._repeated += 1
                    continue
                if fate == Fate.CONFLICT:
                    self._collector.admit(_conflict(item))
                    continue
            elif isinstance(item, Rollout) and item.version is None:
                chunk.rows += len(item.token_ids)  # refused, and kept whole for another try
            wanted = self._collector.admit(item)
            if not wanted:
                continue
            assert isinstance(item, Rollout)  # a refusal is never admitted
            if self._longest is not None and len(item.token_ids) > self._longest:
                detail = f"{len(item.token_ids)} tokens, the model has {self._longest} positions"
                self._collector.refuse(item, Reason.TOO_LONG, detail)
            elif self._take_room(sum(span.num_rows for span in wanted)):
                yield item
            else:
                self._collector.withdraw(item)
                self._stopped = True
                return

    def _next_fate(self, item: Rollout) -> Fate:
        if self._candidates == len(self._fates):
            raise InputError(
                f"{item.source_file} holds more rollouts than when the backfill was planned: it "
                f"was written to meanwhile. What is committed stays; run the backfill again when nobody writes it."
            )
        self._candidates += 1
        return Fate(self._fates[self._candidates - 1])

    def _take_room(self, rows: int) -> bool:
        if self._room is None:
            return True
        self._room -= rows
        return self._room >= 0

    def _forward(self, batch: Sequence[Rollout]) -> None:
        session = self._session
        ids = [rollout.token_ids for rollout in batch]
        features = session.tap.forward_features(session.model, ids, session.layout.layer_ids)
        for rollout, (aux, final) in zip(batch, features, strict=True):
            refused = len(self._collector.refusals)
            self._collector.add(rollout, aux, final)
            room = MAX_TOKENS_TESTED - self._sampling.tokens
            if room > 0 and len(self._collector.refusals) == refused:
                self._sampling += sampling_evidence(rollout, final, session.head, max_tokens=room)
        self._progress(sum(map(len, ids)))

    def _settle_refusals(self, chunk: "_Chunk", number: int) -> None:
        # By place: a rerun refuses the same records, though perhaps in other batches.
        refusals = [_placed(refusal, chunk.places) for refusal in self._collector.drain_refusals()]
        refusals.sort(key=lambda refusal: (refusal.source, refusal.line or 0, refusal.detail))
        self._keep_refusals(refusals, number)
        self._reasons.update(refusal.reason for refusal in refusals)

    def _report(self, report: CollectReport) -> PartitionReport:
        found = PartitionReport(
            collected=report.collected, in_lake=report.duplicates, repeated=self._repeated,
            skipped_by_sampling=report.skipped_by_sampling, quarantined=dict(sorted(self._reasons.items())),
            windows=report.windows, tokens=report.tokens, fragments=report.fragments, nbytes=report.nbytes,
            verified=report.verified, unverified=report.unverified, complete=not self._stopped,
            agreement=report.agreement, sampling=self._sampling,
        )  # fmt: skip
        settled = found.kept + found.repeated + found.skipped_by_sampling
        return replace(found, received=settled + sum(found.quarantined.values()))


class _Chunk:
    """Records until so many rows are planned, and where each of them came from."""

    def __init__(self, stream: Iterator[Rollout | Refusal], max_rows: int) -> None:
        self._stream, self._max_rows = stream, max_rows
        self.rows = 0
        """What the records so far weigh; whoever iterates adds it."""
        self.records = 0
        self.places: dict[str, tuple[str, int | None]] = {}
        """File and row of each rollout, by sample id."""

    def __iter__(self) -> Iterator[Rollout | Refusal]:
        while self.rows < self._max_rows and self.records < MAX_RECORDS:
            item = next(self._stream, None)
            if item is None:
                return
            self.records += 1
            if isinstance(item, Rollout) and item.source_file is not None:
                self.places[item.sample_id] = item.source_file, item.source_row
            yield item


def _conflict(item: Rollout) -> Refusal:
    detail = "the same sample id came before, here or in an earlier partition, with other tokens or masks"
    return Refusal(item.sample_id, None, Reason.SAMPLE_CONFLICT.value, detail, item.to_json_dict())


def _placed(refusal: Refusal, places: Mapping[str, tuple[str, int | None]]) -> Refusal:
    """The refusal with file and row: the collector knows a rollout by its sample id only."""
    if refusal.line is not None or refusal.source not in places:
        return refusal
    source, line = places[refusal.source]
    return replace(refusal, source=source, line=line)
