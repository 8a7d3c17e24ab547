"""Collect a target version's rollouts into the lake with a live model: the pipelines' entry.

Loads no deep-learning framework itself: the tap is named by module path and imported on use.
"""

import hashlib
import importlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from features.collect.collector import DEFAULT_FRAGMENT_TOKENS, Collector
from features.collect.proofs import LogprobTolerance
from features.collect.report import CollectReport
from features.collect.rollouts import Reason, Rollout
from features.collect.sampling import SamplingPolicy
from features.errors import VersionConflictError
from features.heads import HeadSnapshot
from features.lake import Lake
from features.quarantine import Refusal, quarantine
from features.schema import FeatureDtype, FragmentLayout, VersionRecord

log = logging.getLogger(__name__)

HF_TAP = "features.collect.taps.hf"
DEFAULT_BATCH_TOKENS = 4096
"""Tokens of one forward, padding included."""
PROBE_TOKENS = 16
"""Length of the sequence that the aux probe runs."""


class TapModule(Protocol):
    """What a tap module offers; ``model`` is whatever that tap reads."""

    def forward_features(
        self, model: Any, token_ids: Sequence[Sequence[int]], layer_ids: Sequence[int]
    ) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
        """``(aux [T, m * H], final [T, H])`` of each sequence."""
        ...

    def aux_probe(self, model: Any, layer_ids: Sequence[int], token_ids: Sequence[int]) -> Any:
        """Raise ProofFailedError unless the tap's layer ids mean blocks applied."""
        ...


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
    what is committed stays, the rest is completed, nothing is collected twice.

    Args:
        progress: called with the counts so far after each forward.
        tolerance: of the logprob proof. The default allows for a bfloat16 engine; give
            ``LogprobTolerance.for_compute_dtype(FLOAT32)`` when the engine computes in float32.
        on_step: called with the name of each storage step (crash tests).

    Raises:
        VersionConflictError: ``head`` is not the one ``record`` names, or the version is taken.
        ProofFailedError: the aux probe failed; nothing was collected.
        InputError: the layer ids do not fit the model.
    """
    layout = FragmentLayout(layer_ids=tuple(layer_ids), dtype=dtype, hidden_size=record.hidden_size)
    reader = register_proven(lake, model=model, head=head, record=record, layer_ids=layout.layer_ids, tap=tap)
    collector = Collector(
        lake,
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
    for batch in batches(_admitted(collector, rollouts, longest), batch_tokens):
        features = reader.forward_features(model, [r.token_ids for r in batch], layout.layer_ids)
        for rollout, (aux, final) in zip(batch, features, strict=True):
            collector.add(rollout, aux, final)
        if progress is not None:
            progress(collector.report())
    report = collector.close()
    record_refusals(lake, collector.refusals, record)
    if report.agreement.windows_refused and not report.verified:
        log.warning(
            "%s: not one of %d windows with logprobs agrees with its features; were they sampled by these weights?",
            record.version,
            report.agreement.windows_compared,
        )
    return report


def open_tap(tap: str) -> TapModule:
    """The tap module of that name."""
    return cast(TapModule, importlib.import_module(tap))


def register_proven(
    lake: Lake, *, model: Any, head: HeadSnapshot, record: VersionRecord, layer_ids: Sequence[int], tap: str
) -> TapModule:
    """Prove the tap on this model, then store head and version; the tap, ready to be used.

    Raises:
        VersionConflictError: ``head`` is not the one ``record`` names, or the version is taken.
        ProofFailedError: the aux probe failed; nothing was stored.
        InputError: the layer ids do not fit the model.
    """
    _check_head(head, record)
    reader = open_tap(tap)
    probe = reader.aux_probe(model, layer_ids, _probe_tokens(record))
    log.info("aux probe of %s passed: %s", record.version, probe)
    lake.put_head(head)
    lake.register_version(record)
    return reader


def _check_head(head: HeadSnapshot, record: VersionRecord) -> None:
    if head.head_id != record.head_id:
        raise VersionConflictError(
            f"{record.version} names head {record.head_id}, the given snapshot is {head.head_id}. "
            "Take the head from the same weights as the features."
        )


def _probe_tokens(record: VersionRecord) -> list[int]:
    """A short sequence of scattered token ids, the same for every version."""
    return [int(t) for t in np.random.default_rng(0).integers(0, record.vocab_size, PROBE_TOKENS)]


def longest_sequence(model: Any) -> int | None:
    """Positions that the model was built for, or None when its config does not say."""
    config = getattr(model, "config", None)
    return getattr(config, "max_position_embeddings", None)


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


def batches(rollouts: Iterable[Rollout], batch_tokens: int) -> Iterator[list[Rollout]]:
    """Consecutive rollouts whose padded batch stays within ``batch_tokens``; a longer one goes alone."""
    batch: list[Rollout] = []
    longest = 0
    for rollout in rollouts:
        length = max(longest, len(rollout.token_ids))
        if batch and length * (len(batch) + 1) > batch_tokens:
            yield batch
            batch, length = [], len(rollout.token_ids)
        batch.append(rollout)
        longest = length
    if batch:
        yield batch


def record_refusals(lake: Lake, refusals: Sequence[Refusal], record: VersionRecord) -> None:
    """Write what was refused to the lake, under a name made of the refusals: a rerun writes nothing new."""
    if not refusals:
        return
    digest = hashlib.blake2b(digest_size=8)
    for refusal in refusals:
        digest.update(repr((refusal.source, refusal.line, refusal.reason, refusal.detail)).encode())
    run_id = f"collect-{record.version}-{digest.hexdigest()}"
    quarantine(lake, refusals, run_id)
