"""Replay rollouts on a rollout engine that writes their windows itself: no row leaves its worker.

Tokens go in as prompts at the engine's current weights; a collector inside the worker takes the
planned rows and commits them. This module drives it and imports no engine: ``engine`` is a
:class:`features.collect.taps.vllm_engine.ReplayEngine`.
"""

import logging
import math
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from features.collect.collector import DEFAULT_FRAGMENT_TOKENS
from features.collect.proofs import AgreementSummary, LogprobTolerance, NeighbourGap
from features.collect.report import CollectReport
from features.collect.rollouts import Rollout, rollout_problem
from features.collect.run import register_proven
from features.collect.sampling import SamplingPolicy, WindowSpan
from features.errors import InputError, TargetMismatchError, VersionConflictError
from features.heads import HeadSnapshot
from features.lake import Lake
from features.quarantine import Refusal
from features.schema import FeatureDtype, TargetVersion, VersionRecord

log = logging.getLogger(__name__)

VLLM_TAP = "features.collect.taps.vllm_engine"
DEFAULT_BATCH_TOKENS = 16_384
"""Tokens handed to the engine at once, which schedules them itself; bounds the rows held on its host."""
_MAX_ITEMS = 256
"""Rollouts and refusals of one call into the worker, however short they are."""
_LABEL = re.compile(r"v?(\d+)")
"""Labels that name a version: ``7``, as docs/serving.md has it, or ``v000000007``. Others only must not change."""


def replay_rollouts(
    lake: Lake,
    rollouts: Iterable[Rollout | Refusal],
    *,
    engine: Any,
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
) -> CollectReport:
    """Like :func:`features.collect.run.collect_rollouts`, with the collector inside the engine.

    The lake's URL is opened in the worker too: credentials of a remote store must be there.
    Checksum and label of the engine's weights are asked before, after every batch and at the
    end. Safe to kill and run again.

    Raises:
        VersionConflictError: the engine's weights carry another version's label, or changed on
            the way: nothing of the batch in flight is written.
        TargetMismatchError, InputError: the engine serves a model of other sizes, or does not
            extract a layer id.
        ProofFailedError: the engine's rows are not those of the checkpoint; nothing was written.
        EngineError: the engine cannot be replayed on.
    """
    _check_engine(engine, record, layer_ids)
    register_proven(lake, model=engine, head=head, record=record, layer_ids=layer_ids, tap=VLLM_TAP)
    session = uuid.uuid4().hex
    engine.call(
        "open",
        spec={
            "session": session,
            "lake": lake.url,
            "version": record.version.number,
            "head_id": record.head_id,
            "layer_ids": list(layer_ids),
            "dtype": dtype.value,
            "policy": dict(policy.as_mapping()),
            "tolerance": asdict(tolerance),
            "writer_id": writer_id,
            "fragment_tokens": fragment_tokens,
            "longest": engine.config.max_position_embeddings,
            "weights_checksum": engine.weights[0],
        },
    )
    for batch in _batches(rollouts, batch_tokens):
        spans = engine.call("admit", session=session, items=[_as_item(entry) for entry in batch])["spans"]
        wanted = [(entry, plan) for entry, plan in zip(batch, spans, strict=True) if plan]
        if wanted:
            engine.prefill([_as_request(engine, entry, plan) for entry, plan in wanted])
        report = _as_report(engine.call("settle", session=session)["report"])
        if progress is not None:
            progress(report)
    engine.require_same_weights()
    report = _as_report(engine.call("close", session=session)["report"])
    if report.agreement.windows_refused and not report.verified:
        log.warning(
            "%s: not one of %d windows with logprobs agrees with its features; were they sampled by these weights?",
            record.version, report.agreement.windows_compared,
        )  # fmt: skip
    return report


def _check_engine(engine: Any, record: VersionRecord, layer_ids: Sequence[int]) -> None:
    """Refuse an engine that cannot be this version's, before anything is computed."""
    facts = engine.facts()
    sizes = {"hidden_size": record.hidden_size, "vocab_size": record.vocab_size}
    wrong = [
        f"{name} is {getattr(facts, name)}, expected {v}"
        for name, v in sizes.items()
        if getattr(facts, name) != v
    ]
    if wrong:
        raise TargetMismatchError(f"the engine does not serve {record.target_id}: {'; '.join(wrong)}")
    absent = sorted(set(layer_ids) - set(facts.layer_ids))
    if absent:
        raise InputError(
            f"the engine extracts layer ids {list(facts.layer_ids)}, asked were {list(layer_ids)}: {absent} are "
            "absent. Start it with all of them"
        )
    label = engine.weights[1]
    named = _LABEL.fullmatch(label or "")
    if named and TargetVersion(int(named[1])) != record.version:
        raise VersionConflictError(
            f"the engine's target weights are labelled {label}, this run collects {record.version}. Load the "
            "weights of that version into the engine, or collect the version that it serves"
        )


def _batches(entries: Iterable[Rollout | Refusal], batch_tokens: int) -> Iterator[list[Rollout | Refusal]]:
    """Consecutive entries of at most ``batch_tokens`` tokens together; a longer rollout goes alone."""
    batch: list[Rollout | Refusal] = []
    tokens = 0
    for entry in entries:
        length = len(entry.token_ids) if isinstance(entry, Rollout) else 0
        if batch and (tokens + length > batch_tokens or len(batch) == _MAX_ITEMS):
            yield batch
            batch, tokens = [], 0
        batch.append(entry)
        tokens += length
    if batch:
        yield batch


def _as_item(entry: Rollout | Refusal) -> dict[str, Any]:
    """An entry as JSON values. What cannot be said in JSON is refused here, as the collector would."""
    if isinstance(entry, Rollout):
        problem = rollout_problem(entry)
        if problem is None:
            return {"rollout": entry.to_json_dict()}
        entry = Refusal(entry.sample_id, None, str(problem[0]), problem[1], entry.to_json_dict())
    return {"refusal": asdict(entry)}


def _as_request(engine: Any, entry: Rollout | Refusal, plan: Sequence[Sequence[int]]) -> tuple[Any, ...]:
    assert isinstance(entry, Rollout)  # nothing is planned of a refusal
    spans = tuple(WindowSpan(start, stop) for start, stop in plan)
    return entry.token_ids, engine.request(entry.sample_id, len(entry.token_ids), spans)


def _as_report(answer: Mapping[str, Any]) -> CollectReport:
    """A report from its JSON values, in which null stands for NaN."""
    agreement = dict(answer["agreement"])
    agreement["neighbours"] = tuple(
        NeighbourGap(**_numbers(gap) | {"version": TargetVersion(**gap["version"])})
        for gap in agreement["neighbours"]
    )
    return CollectReport(
        **dict(answer)
        | {
            "version": TargetVersion(**answer["version"]),
            "agreement": AgreementSummary(**_numbers(agreement)),
            "commits": tuple(answer["commits"]),
        }
    )


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: math.nan if value is None else value for name, value in values.items()}
