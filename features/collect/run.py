"""Collect a target version's rollouts into the lake with a live model: the pipelines' entry.

Loads no deep-learning framework itself: the tap is named by module path and imported on use.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from features.collect.collector import DEFAULT_FRAGMENT_TOKENS, Collector
from features.collect.forwards import (
    DEFAULT_BATCH_TOKENS,
    HF_TAP,
    TapModule,
    batches,
    longest_sequence,
    open_tap,
)
from features.collect.proofs import LogprobTolerance
from features.collect.report import CollectReport
from features.collect.rollouts import Reason, Rollout
from features.collect.sampling import SamplingPolicy
from features.collect.trial import Candidates, Trial, is_registered, none_agrees, try_rollouts, unregistered
from features.errors import ProofFailedError, VersionConflictError
from features.heads import HeadSnapshot
from features.lake import Lake
from features.quarantine import Refusal, quarantine
from features.schema import FeatureDtype, FragmentLayout, VersionRecord

log = logging.getLogger(__name__)

PROBE_TOKENS = 16
"""Length of the sequence that the aux probe runs."""


def collect_rollouts(
    lake: Lake,
    rollouts: Iterable[Rollout | Refusal],
    *,
    model: Any,
    head: HeadSnapshot,
    record: VersionRecord,
    layer_ids: Sequence[int],
    dtype: FeatureDtype,
    policy: SamplingPolicy,
    writer_id: str,
    progress: Callable[[CollectReport], None] | None = None,
    tolerance: LogprobTolerance = LogprobTolerance(),  # noqa: B008 - frozen
    fragment_tokens: int = DEFAULT_FRAGMENT_TOKENS,
    batch_tokens: int = DEFAULT_BATCH_TOKENS,
    tap: str = HF_TAP,
    on_step: Callable[[str], None] | None = None,
) -> CollectReport:
    """Register the version, prove the tap, and collect every rollout that this version sampled.

    Rollouts without a version, or of another one, go to quarantine. Nothing is written under
    ``data/`` before the aux probe has passed. Safe to kill and run again with the same input:
    what is committed stays, the rest is completed, nothing is collected twice. A version that the
    lake does not have is registered only when there is a rollout to collect and, of several that
    can be compared, at least one of the first agrees with its features; otherwise all are refused.

    Args:
        progress: called with the counts so far after each forward.
        tolerance: of the logprob proof. The default allows for a bfloat16 engine; give
            ``LogprobTolerance.for_compute_dtype(FLOAT32)`` when the engine computes in float32.
        on_step: called with the name of each storage step (crash tests).

    Raises:
        VersionConflictError: ``head`` is not the one ``record`` names, or the version is taken.
        ProofFailedError: the aux probe failed, or only later rollouts agree with the weights; nothing was collected.
        InputError: the layer ids do not fit the model.
    """
    layout = FragmentLayout(layer_ids=tuple(layer_ids), dtype=dtype, hidden_size=record.hidden_size)
    reader = open_tap(tap)
    candidates = Candidates(rollouts, record, policy)
    registers = is_registered(lake, record) or _agree(
        try_rollouts(
            candidates.some(), tap=reader, target=lambda: model, record=record, head=head, layout=layout,
            policy=policy, tolerance=tolerance,
        )
    )  # fmt: skip
    if registers:
        register_proven(lake, model=model, head=head, record=record, layer_ids=layout.layer_ids, tap=tap)
    else:
        prove(reader, model=model, head=head, record=record, layer_ids=layout.layer_ids)
    collector = Collector(
        lake if registers else unregistered(lake, record, head),
        version=record.version,
        head_id=record.head_id,
        layout=layout,
        policy=policy,
        writer_id=writer_id,
        fragment_tokens=fragment_tokens,
        tolerance=tolerance,
        on_step=on_step,
    )
    longest = longest_sequence(model)
    for batch in batches(_admitted(collector, candidates.everything(), longest), batch_tokens):
        features = reader.forward_features(model, [r.token_ids for r in batch], layout.layer_ids)
        for rollout, (aux, final) in zip(batch, features, strict=True):
            collector.add(rollout, aux, final)
        if progress is not None:
            progress(collector.report())
        _require_nothing_taken(collector.report(), registers)
    report = collector.close()
    _require_nothing_taken(report, registers)
    record_refusals(lake, collector.refusals, record)
    if report.agreement.windows_refused and not report.verified:
        log.warning(
            "%s: not one of %d windows with logprobs agrees with its features; were they sampled by these weights?",
            record.version,
            report.agreement.windows_compared,
        )
    return report


def register_proven(
    lake: Lake, *, model: Any, head: HeadSnapshot, record: VersionRecord, layer_ids: Sequence[int], tap: str
) -> TapModule:
    """Prove the tap on this model, then store head and version; the tap, ready to be used.

    Raises:
        VersionConflictError: ``head`` is not the one ``record`` names, or the version is taken.
        ProofFailedError: the aux probe failed; nothing was stored.
        InputError: the layer ids do not fit the model.
    """
    reader = open_tap(tap)
    prove(reader, model=model, head=head, record=record, layer_ids=layer_ids)
    lake.put_head(head)
    lake.register_version(record)
    return reader


def prove(
    reader: TapModule, *, model: Any, head: HeadSnapshot, record: VersionRecord, layer_ids: Sequence[int]
) -> None:
    """Run the aux probe, with the head that ``record`` names; as :func:`register_proven`, and stores nothing."""
    _check_head(head, record)
    probe = reader.aux_probe(model, layer_ids, _probe_tokens(record))
    log.info("aux probe of %s passed: %s", record.version, probe)


def _agree(trial: Trial | None) -> bool:
    """Whether there is something to collect, and the trial does not speak against these weights."""
    return trial is not None and not none_agrees(
        compared=trial.windows_compared, agreeing=trial.windows_agreeing
    )


def _require_nothing_taken(report: CollectReport, registered: bool) -> None:
    if report.windows and not registered:
        raise ProofFailedError(
            f"{report.version}: none of the first rollouts agrees with these weights and later ones do, so the input "
            f"holds rollouts of several versions under one number. Nothing was written and the number is still free. "
            f"Sort the rollouts by the version that sampled them."
        )


def _check_head(head: HeadSnapshot, record: VersionRecord) -> None:
    if head.head_id != record.head_id:
        raise VersionConflictError(
            f"{record.version} names head {record.head_id}, the given snapshot is {head.head_id}. "
            "Take the head from the same weights as the features."
        )


def _probe_tokens(record: VersionRecord) -> list[int]:
    """A short sequence of scattered token ids, the same for every version."""
    return [int(t) for t in np.random.default_rng(0).integers(0, record.vocab_size, PROBE_TOKENS)]


def _admitted(
    collector: Collector, rollouts: Iterable[Rollout | Refusal], longest: int | None
) -> Iterator[Rollout]:
    """The rollouts whose features are wanted."""
    for item in rollouts:
        if not collector.admit(item):
            continue
        assert isinstance(item, Rollout)  # a refusal is never admitted
        if longest is not None and len(item.token_ids) > longest:
            collector.refuse(
                item, Reason.TOO_LONG, f"{len(item.token_ids)} tokens, the model has {longest} positions"
            )
            continue
        yield item


def record_refusals(lake: Lake, refusals: Sequence[Refusal], record: VersionRecord) -> None:
    """Write what was refused to the lake, under a name made of the refusals: a rerun writes nothing new."""
    if not refusals:
        return
    digest = hashlib.blake2b(digest_size=8)
    for refusal in refusals:
        digest.update(repr((refusal.source, refusal.line, refusal.reason, refusal.detail)).encode())
    run_id = f"collect-{record.version}-{digest.hexdigest()}"
    quarantine(lake, refusals, run_id)
