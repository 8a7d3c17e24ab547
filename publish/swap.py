"""Put one draft into every engine, or into none: plan, prepare, commit, verify, put back.

Every engine prepares before any is paused, so a draft that does not fit changes nothing. The
first engine is the canary. When one fails, engines already swapped get the draft back that
they served before, from their own memory; the report says of each engine what it serves.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from features.errors import DraftlakeError, EngineError, EnginePausedError
from publish.engines import EngineState, RolloutEngine
from training.artifact import DraftArtifact, fingerprint

logger = logging.getLogger(__name__)

_NOT_LIVE = frozenset({"t2d", "d2t"})
"""Tensors that an engine may have no counterpart of: it derives one, and a full vocabulary needs no map."""

Outcome = Literal["swapped", "already_current", "untouched", "put_back", "unknown"]
"""``unknown`` is the only one after which an engine may serve something else than before or asked for."""


@dataclass(frozen=True, slots=True)
class PublishedDraft:
    """A registered artifact and where engines fetch it."""

    digest: str
    uri: str


@dataclass(frozen=True, slots=True)
class SwapPlan:
    """Who needs the draft, in the order they get it; the first is the canary."""

    to_swap: tuple[str, ...]
    already_current: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EngineOutcome:
    """What one engine serves now, and how that came about."""

    engine: str
    outcome: Outcome
    before: EngineState | None = None
    after: EngineState | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    """The pause window by parts; empty when the engine was not paused for this draft."""
    detail: str = ""
    paused: bool = False
    """It could not be resumed after a failure: whatever draft it holds, it serves nobody."""


@dataclass(frozen=True, slots=True)
class SwapReport:
    """One swap over all engines. ``error`` is None exactly when all serve the artifact."""

    artifact: str
    outcomes: tuple[EngineOutcome, ...]
    error: str | None

    @property
    def succeeded(self) -> bool:
        """Every engine serves the artifact."""
        return self.error is None

    @property
    def unknown(self) -> tuple[str, ...]:
        """Engines whose draft is not known: repair or restart these."""
        return tuple(outcome.engine for outcome in self.outcomes if outcome.outcome == "unknown")

    def require_success(self) -> None:
        """Turn a failed swap into an error.

        Raises:
            EngineError: saying why, and what each engine serves.
        """
        if self.error is not None:
            serving = "; ".join(f"{outcome.engine}: {outcome.outcome}" for outcome in self.outcomes)
            raise EngineError(
                f"draft {self.artifact} was not published: {self.error} Engines now: {serving}."
            )


def expected_fingerprint(artifact: DraftArtifact, owned: Sequence[str]) -> str | None:
    """Fingerprint of the artifact's tensors that an engine owns.

    None when the two have other tensors: one that the artifact lacks, or one that the engine does
    not own and so takes from elsewhere. An engine that owns nothing serves no artifact.
    """
    if not owned or not set(owned) <= set(artifact.tensors):
        return None
    if set(artifact.tensors) - set(owned) - _NOT_LIVE:
        return None
    return fingerprint({name: artifact.tensors[name] for name in owned})


def serves(state: EngineState, artifact: DraftArtifact) -> bool:
    """Whether an engine really holds this artifact: by its tensors, not by what it was told."""
    same_label = state.draft_artifact in (None, artifact.digest)
    return same_label and state.draft_fingerprint == expected_fingerprint(artifact, state.draft_tensors)


def plan_swap(states: Mapping[str, EngineState], artifact: DraftArtifact) -> SwapPlan:
    """Decide which engines need ``artifact``, in the mapping's order. Pure."""
    current = {name: serves(state, artifact) for name, state in states.items()}
    return SwapPlan(
        to_swap=tuple(name for name in states if not current[name]),
        already_current=tuple(name for name in states if current[name]),
    )


def swap_draft(
    engines: Sequence[RolloutEngine],
    artifact: DraftArtifact,
    uri: str,
    previous: PublishedDraft | None = None,
) -> SwapReport:
    """Swap ``artifact`` into all engines, canary first, and prove it; on any failure put the old draft back.

    Args:
        uri: where the engines fetch the artifact.
        previous: the published draft before, fetched again if an engine cannot put its own copy back.

    Returns:
        A report on every engine; read ``succeeded`` or call ``require_success``.
    """
    by_name = {engine.name: engine for engine in engines}
    if len(by_name) != len(engines) or not engines:
        raise ValueError(
            f"a swap needs engines with distinct names, got {[engine.name for engine in engines]}"
        )
    before: dict[str, EngineState] = {}
    try:
        for name, engine in by_name.items():
            before[name] = engine.state()
        plan = plan_swap(before, artifact)
        # A draft that an engine booted with was never compared with this artifact's config: preparing does.
        booted = [name for name in plan.already_current if before[name].draft_artifact is None]
        for name in (*plan.to_swap, *booted):
            by_name[name].prepare(uri, artifact.digest)
    except Exception as error:
        untouched = [EngineOutcome(name, "untouched", before.get(name), before.get(name)) for name in by_name]
        return SwapReport(artifact.digest, tuple(untouched), f"{_told(error)} No engine was changed.")

    current = [
        EngineOutcome(name, "already_current", before[name], before[name]) for name in plan.already_current
    ]
    swapped, failure = _swap_in_turn([by_name[name] for name in plan.to_swap], artifact, before)
    reason = None if failure is None else _told(failure)
    if failure is not None:
        swapped = [
            outcome
            if outcome.outcome == "untouched"
            else _put_back(by_name[outcome.engine], outcome, before[outcome.engine], previous)
            for outcome in swapped
        ]
    outcomes = {outcome.engine: outcome for outcome in (*current, *swapped)}
    report = SwapReport(artifact.digest, tuple(outcomes[name] for name in by_name), reason)
    if failure is not None and not isinstance(failure, Exception):
        serving = {outcome.engine: outcome.outcome for outcome in report.outcomes}
        logger.warning("swap interrupted artifact=%s engines=%s", artifact.digest, serving)
        raise failure
    return report


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, DraftlakeError) else f"{type(error).__name__}: {error}."


def _swap_in_turn(
    engines: Sequence[RolloutEngine], artifact: DraftArtifact, before: Mapping[str, EngineState]
) -> tuple[list[EngineOutcome], BaseException | None]:
    """Swap one engine after the other until one fails; that one is ``unknown``, those after it untouched."""
    outcomes: list[EngineOutcome] = []
    failure: BaseException | None = None
    for engine in engines:
        state = before[engine.name]
        if failure is not None:
            outcomes.append(EngineOutcome(engine.name, "untouched", state, state))
            continue
        try:
            outcomes.append(_swap_one(engine, artifact, state))
        except BaseException as error:  # whatever it is, even Ctrl-C: engines swapped before it go back
            failure = error
            logger.warning("swap failed artifact=%s engine=%s error=%r", artifact.digest, engine.name, error)
            paused = isinstance(error, EnginePausedError)
            outcomes.append(EngineOutcome(engine.name, "unknown", state, detail=_told(error), paused=paused))
    return outcomes, failure


def _swap_one(engine: RolloutEngine, artifact: DraftArtifact, before: EngineState) -> EngineOutcome:
    seconds = engine.commit(artifact.digest)
    after = engine.state()
    if not serves(after, artifact):
        raise EngineError(
            f"engine {engine.name} reports draft fingerprint {after.draft_fingerprint} after the swap, "
            f"expected {expected_fingerprint(artifact, after.draft_tensors)}: it does not serve what was published."
        )
    if after.target_fingerprint != before.target_fingerprint:
        raise EngineError(
            f"the target of engine {engine.name} changed during the swap, from {before.target_fingerprint} "
            f"to {after.target_fingerprint}. Either it was synced meanwhile (hold syncs during a swap), or the "
            f"swap wrote it: restart that engine before using its rollouts."
        )
    logger.info("swapped artifact=%s engine=%s pause_s=%.3f", artifact.digest, engine.name, seconds["total"])
    return EngineOutcome(engine.name, "swapped", before, after, seconds)


def _put_back(
    engine: RolloutEngine, attempted: EngineOutcome, before: EngineState, previous: PublishedDraft | None
) -> EngineOutcome:
    """Bring an engine back to the draft it served before; tries its own copy, then the registry's."""
    details = [attempted.detail] if attempted.detail else []
    try:
        state = engine.state()
        if state.draft_fingerprint == before.draft_fingerprint and not attempted.paused:
            return _restored(attempted, before, state, details)
    except Exception as error:
        details.append(f"state: {_told(error)}")
    for step, put_back in (
        ("own copy", engine.revert),
        ("registry", lambda: _publish_again(engine, previous)),
    ):
        try:
            put_back()
            state = engine.state()
        except Exception as error:
            details.append(f"{step}: {_told(error)}")
            continue
        if state.draft_fingerprint == before.draft_fingerprint:
            return _restored(replace(attempted, paused=False), before, state, details)
        details.append(
            f"{step}: draft fingerprint is {state.draft_fingerprint}, was {before.draft_fingerprint}"
        )
    return replace(attempted, outcome="unknown", after=None, detail=" | ".join(details))


def _restored(
    attempted: EngineOutcome, before: EngineState, state: EngineState, details: Sequence[str]
) -> EngineOutcome:
    if state.target_fingerprint != before.target_fingerprint:
        note = (
            f"draft as before, but the target is {state.target_fingerprint}, was {before.target_fingerprint}"
        )
        return replace(attempted, outcome="unknown", after=state, detail=" | ".join([*details, note]))
    return replace(attempted, outcome="put_back", after=state, detail=" | ".join(details))


def _publish_again(engine: RolloutEngine, previous: PublishedDraft | None) -> None:
    if previous is None:
        raise EngineError("no published draft is known to go back to")
    engine.prepare(previous.uri, previous.digest)
    engine.commit(previous.digest)
