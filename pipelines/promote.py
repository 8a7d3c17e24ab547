"""From candidate to production and back: approve, reject, publish, roll back, status."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from features.errors import (
    DraftlakeError,
    DraftLayoutError,
    EngineError,
    GateRefusedError,
    InputError,
    TargetMismatchError,
)
from features.lake import Lake
from pipelines.context import RunContext
from pipelines.hooks import tell_hooks
from pipelines.inspect import newest_version
from publish.channels import Action, ArtifactState, Channel, ChannelEntry, rollback_target
from publish.engines import RolloutEngine
from publish.gates import GateDecision, GateSpec, decide
from publish.registry import Registry
from publish.swap import PublishedDraft, SwapReport, plan_swap, serves, swap_draft
from training.artifact import Document, load_artifact

DEFAULT_GATE = GateSpec()
_PAUSE_PARTS = ("pause", "load", "verify", "resume", "total")


class Verdict(Document):
    """What was decided about an artifact, and the state it has now."""

    artifact: str
    decision: str
    state: str
    document: str
    """Evidence id of the decision."""


class Publication(Document):
    """One publish or rollback: what every engine serves now."""

    artifact: str
    action: str
    sequence: int
    lag: int | None
    """Newest version in the lake minus newest version trained on; None while the lake holds none."""
    engines: dict[str, str]
    """Outcome by engine: ``swapped`` or ``already_current``."""
    seconds: dict[str, float]
    """Longest pause over the engines, by parts."""


def open_registry(url: str) -> tuple[Lake, Registry]:
    """The lake and the registry beside it."""
    lake = Lake.open(url)
    return lake, Registry(lake.store, lake.target.target_id)


def import_draft(url: str, folder: Path) -> str:
    """Register a draft folder as a candidate and return its digest.

    Raises:
        TargetMismatchError: it was trained for another target, tokenizer or size.
        DraftLayoutError: the folder is incomplete, or it reads layers that this target does not have.
    """
    lake, registry = open_registry(url)
    manifest, target = load_artifact(folder).manifest, lake.target
    names = ("target_id", "tokenizer_digest", "hidden_size", "vocab_size")
    differing = [n for n in names if getattr(manifest, n) != getattr(target, n)]
    if differing:
        found = "; ".join(f"{n} {getattr(manifest, n)!r}, here {getattr(target, n)!r}" for n in differing)
        raise TargetMismatchError(
            f"the draft in {folder} is not for the target of {lake.url}: {found}. Import it into the lake it "
            f"was trained from, or train one here: draftlake train"
        )
    if not manifest.layer_ids or max(manifest.layer_ids) > target.num_layers:
        raise DraftLayoutError(
            f"the draft in {folder} reads aux layers {list(manifest.layer_ids)}, and the target of {lake.url} "
            f"has {target.num_layers} blocks (ids 0..{target.num_layers}). Train a draft for this target"
        )
    return registry.import_artifact(folder)


def judge(url: str, digest: str, spec: GateSpec = DEFAULT_GATE) -> GateDecision:
    """Judge an artifact's evaluations, and file nothing: a passing verdict, else the last.

    Raises:
        GateRefusedError: nothing was measured yet.
    """
    lake, registry = open_registry(url)
    digest = registry.resolve(digest)
    reports = registry.evaluations(digest)
    if not reports:
        raise GateRefusedError(
            f"{digest[:12]} has no evaluation: nothing was measured. Run: draftlake eval {digest[:12]} --lake {url}"
        )
    newest = newest_version(lake)
    decisions = [decide(report, spec, newest_version=newest) for report in reports]
    return next((d for d in decisions if d.passed), decisions[-1])


def gate(url: str, digest: str, spec: GateSpec = DEFAULT_GATE) -> GateDecision:
    """Judge an artifact's evaluations and file the verdict as evidence: a passing one, else the last.

    Raises:
        GateRefusedError: nothing was measured yet.
    """
    chosen = judge(url, digest, spec)
    _, registry = open_registry(url)
    registry.add_evidence(registry.resolve(digest), chosen)
    return chosen


def approve(
    url: str, digest: str, ctx: RunContext, *, reviewer: str, reason: str, force: bool = False
) -> Verdict:
    """Approve an artifact whose gate passed; ``force`` overrides the gate and is recorded.

    Raises:
        GateRefusedError: the gate refused and ``force`` is off.
    """
    _, registry = open_registry(url)
    digest = registry.resolve(digest)
    if registry.evaluations(digest):
        gate(url, digest)
    document = registry.approve(digest, reviewer=reviewer, reason=reason, at=ctx.now(), force=force)
    return _decided(registry, digest, "approve", document)


def reject(url: str, digest: str, ctx: RunContext, *, reviewer: str, reason: str) -> Verdict:
    """Reject an artifact; it can no longer be published."""
    _, registry = open_registry(url)
    digest = registry.resolve(digest)
    document = registry.reject(digest, reviewer=reviewer, reason=reason, at=ctx.now())
    return _decided(registry, digest, "reject", document)


def _decided(registry: Registry, digest: str, decision: str, document: str) -> Verdict:
    tell_hooks(digest, decision)
    return Verdict(artifact=digest, decision=decision, state=registry.state(digest), document=document)


def publish(
    url: str, digest: str, engine_urls: tuple[str, ...], ctx: RunContext, *, by: str, reason: str = "approved"
) -> Publication:
    """Swap an approved draft into every engine, verify, then move the production channel.

    Publishing the production draft again re-asserts it on engines that lost it.

    Raises:
        GateRefusedError: the artifact is not approved.
        EngineError: the swap failed; the previous draft was put back.
    """
    _, registry = open_registry(url)
    digest = registry.resolve(digest)
    _require_approved(registry, digest)
    return _move(url, digest, engine_urls, ctx, action="publish", by=by, reason=reason)


def _require_approved(registry: Registry, digest: str) -> None:
    """Refuse what nobody approved. Of a retired draft the channel asks whether it was approved anew."""
    state = registry.state(digest)
    if state in (ArtifactState.CANDIDATE, ArtifactState.REJECTED):
        raise GateRefusedError(
            f"{digest[:12]} is {state}, expected approved. Evaluate and approve it first: "
            f"draftlake eval {digest[:12]}, then draftlake approve {digest[:12]}"
        )


def rollback(
    url: str, method: str, engine_urls: tuple[str, ...], ctx: RunContext, *, by: str, reason: str
) -> Publication:
    """Put the previous production draft back on every engine and on the channel.

    Raises:
        InputError: there is no earlier production draft.
    """
    _, registry = open_registry(url)
    return _move(
        url, _previous(registry, url, method), engine_urls, ctx, action="rollback", by=by, reason=reason
    )


def plan_publish(url: str, digest: str, engine_urls: tuple[str, ...], ctx: RunContext) -> dict[str, Any]:
    """Which engines a publish would swap; asks them for their state and changes nothing.

    Raises:
        GateRefusedError, EngineError: as :func:`publish` would raise them now.
    """
    _, registry = open_registry(url)
    digest = registry.resolve(digest)
    _require_approved(registry, digest)
    return _plan(registry, digest, engine_urls, ctx, action="publish")


def plan_rollback(url: str, method: str, engine_urls: tuple[str, ...], ctx: RunContext) -> dict[str, Any]:
    """Which draft a rollback would put back, and where."""
    _, registry = open_registry(url)
    return _plan(registry, _previous(registry, url, method), engine_urls, ctx, action="rollback")


def _plan(
    registry: Registry, digest: str, engine_urls: tuple[str, ...], ctx: RunContext, *, action: Action
) -> dict[str, Any]:
    artifact = registry.artifact(digest)
    _head_before(registry.channel(artifact.manifest.method), digest, action)
    states = [engine.state() for engine in _open_engines(engine_urls, ctx)]
    plan = plan_swap({s.engine: s for s in states}, artifact)
    return {"artifact": digest, "state": registry.state(digest), **asdict(plan)}


def _previous(registry: Registry, url: str, method: str) -> str:
    entry = rollback_target(registry.channel(method).history())
    if entry is None:
        raise InputError(f"{url}: the production channel of {method} has no earlier draft to go back to")
    return entry.artifact


def bootstrap(url: str, digest: str, ctx: RunContext, *, by: str) -> None:
    """Record the draft that engines were started with as the first production draft."""
    _, registry = open_registry(url)
    reason = "the draft that the engines were started with"
    registry.approve(digest, reviewer=by, reason=reason, at=ctx.now(), force=True)
    channel = registry.channel(registry.manifest(digest).method)
    channel.advance(expected_seq=0, artifact=digest, action="publish", reason=reason, by=by, at=ctx.now())


def status(url: str, engine_urls: tuple[str, ...], ctx: RunContext) -> dict[str, Any]:
    """Production by method, and what each engine really serves; a dead one has its ``error`` only."""
    lake, registry = open_registry(url)
    methods = sorted({registry.manifest(digest).method for digest in registry.digests()})
    production = {m: head.artifact for m in methods if (head := registry.channel(m).head())}
    rows: list[dict[str, Any]] = []
    for engine in _open_engines(engine_urls, ctx) if engine_urls else ():
        try:
            state = engine.state()
        except EngineError as error:
            rows.append({"engine": engine.name, "serves_production": False, "error": str(error)})
            continue
        wanted = production.get(state.method)
        same = wanted is not None and serves(state, registry.artifact(wanted))
        rows.append(asdict(state) | {"serves_production": same, "error": None})
    versions = [r.version.number for r in lake.versions()]
    return {
        "lake": url,
        "newest_version": max(versions, default=None),
        "production": production,
        "engines": rows,
    }


def _move(
    url: str,
    digest: str,
    engine_urls: tuple[str, ...],
    ctx: RunContext,
    *,
    action: Action,
    by: str,
    reason: str,
) -> Publication:
    lake, registry = open_registry(url)
    artifact = registry.artifact(digest)
    channel = registry.channel(artifact.manifest.method)
    head = _head_before(channel, digest, action)
    engines = _open_engines(engine_urls, ctx)
    newest = max((r.version.number for r in lake.versions()), default=None)
    ctx.progress.say(f"{action} {digest[:12]} on {len(engines)} engine(s)")
    previous = PublishedDraft(head.artifact, registry.artifact_uri(head.artifact)) if head else None
    report = swap_draft(engines, artifact, registry.artifact_uri(digest), previous)
    report.require_success()
    try:
        sequence = _advance(channel, head, digest, action=action, by=by, reason=reason, ctx=ctx)
    except Exception:
        # Whatever kept the ledger from moving: what engines serve has to be what it says.
        _undo(engines, report, _served_by(channel, registry, otherwise=previous), registry)
        raise
    publication = Publication(
        artifact=digest,
        action=action,
        sequence=sequence,
        lag=None if newest is None else newest - max(artifact.manifest.versions),
        engines={o.engine: o.outcome for o in report.outcomes},
        seconds={name: max(o.seconds.get(name, 0.0) for o in report.outcomes) for name in _PAUSE_PARTS},
    )
    registry.add_evidence(digest, {"kind": "publication", **publication.model_dump(mode="json")})
    return publication


def _head_before(channel: Channel, digest: str, action: Action) -> ChannelEntry | None:
    """The channel's head, once the move to ``digest`` is known to be allowed or not needed."""
    head = channel.head()
    if head is None or head.artifact != digest:
        channel.check(digest, action)
    return head


def _open_engines(urls: tuple[str, ...], ctx: RunContext) -> tuple[RolloutEngine, ...]:
    """The engines behind ``urls``.

    Raises:
        InputError: none, or one of them twice.
    """
    if not urls:
        raise InputError("no engine given: name at least one with --engine http://HOST:PORT")
    engines = tuple(ctx.open_engine(url) for url in urls)
    names = [engine.name for engine in engines]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"engine {', '.join(twice)} is named more than once; give each --engine once")
    return engines


def _served_by(
    channel: Channel, registry: Registry, *, otherwise: PublishedDraft | None
) -> PublishedDraft | None:
    """What the channel names now: another run may have moved it. ``otherwise`` when it cannot be read."""
    try:
        head = channel.head()
    except (DraftlakeError, OSError):
        return otherwise
    return PublishedDraft(head.artifact, registry.artifact_uri(head.artifact)) if head else None


def _undo(
    engines: tuple[RolloutEngine, ...],
    report: SwapReport,
    previous: PublishedDraft | None,
    registry: Registry,
) -> None:
    """Put the draft that the ledger names on the engines; with an empty ledger, back to the boot draft."""
    if previous is not None:
        swap_draft(engines, registry.artifact(previous.digest), previous.uri).require_success()
        return
    swapped = {outcome.engine for outcome in report.outcomes if outcome.outcome == "swapped"}
    for engine in engines:
        if engine.name in swapped:
            engine.revert()


def _advance(
    channel: Channel,
    head: ChannelEntry | None,
    digest: str,
    *,
    action: Action,
    by: str,
    reason: str,
    ctx: RunContext,
) -> int:
    if head is not None and head.artifact == digest:
        return head.seq
    entry = channel.advance(
        expected_seq=head.seq if head else 0,
        artifact=digest,
        action=action,
        reason=reason,
        by=by,
        at=ctx.now(),
    )
    return entry.seq
