"""Publish, roll back, status: the ledger says what every engine serves, whatever fails on the way."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import pipelines.hooks
from features.errors import (
    EngineError,
    GateRefusedError,
    InputError,
    RegistryConflictError,
    TargetMismatchError,
)
from features.lake import Lake
from features.schema import TargetIdentity
from features.testing import TINY_TARGET, tiny_lake
from pipelines import promote
from pipelines.context import RunContext
from publish.registry import Registry
from publish.testing import FakeEngine, make_report, write_artifact

TARGET_ID = "tiny"


@dataclass
class World:
    """A lake with drafts, and a fleet behind a context."""

    url: str
    registry: Registry
    engines: dict[str, FakeEngine]
    ctx: RunContext

    def import_draft(self, folder: Path, seed: int) -> str:
        return self.registry.import_artifact(
            write_artifact(folder / str(seed), seed=seed, target_id=TARGET_ID)
        )

    def approve(self, digest: str, **more: Any) -> promote.Verdict:
        return promote.approve(self.url, digest, self.ctx, reviewer="ada", reason="measured", **more)

    def publish(self, digest: str) -> promote.Publication:
        return promote.publish(self.url, digest, tuple(self.engines), self.ctx, by="ada")

    def rollback(self) -> promote.Publication:
        return promote.rollback(
            self.url, "eagle3", tuple(self.engines), self.ctx, by="ada", reason="acceptance fell"
        )

    def status(self) -> dict[str, Any]:
        return promote.status(self.url, tuple(self.engines), self.ctx)

    @property
    def serving(self) -> list[str | None]:
        return [e.serving.digest if e.serving else None for e in self.engines.values()]

    @property
    def production(self) -> str | None:
        head = self.registry.channel("eagle3").head()
        return head.artifact if head else None

    @property
    def moves(self) -> list[tuple[str, str]]:
        return [(e.action, e.artifact) for e in self.registry.channel("eagle3").history()]


@pytest.fixture
def world(tmp_path: Path) -> World:
    lake = tiny_lake(str(tmp_path / "lake"), versions=(0, 1, 2, 3, 4), samples_per_version=1)
    assert lake.target.target_id == TARGET_ID
    registry = Registry(lake.store, TARGET_ID)
    engines = {f"http://{name}": FakeEngine(name, registry.artifact) for name in "abc"}
    clock = iter(datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=n) for n in range(10_000))
    ctx = RunContext(now=lambda: next(clock), open_engine=lambda url: engines[url])
    return World(lake.url, registry, engines, ctx)


@pytest.fixture
def first(world: World, tmp_path: Path) -> str:
    """A draft in production on every engine."""
    digest = world.import_draft(tmp_path, 1)
    world.approve(digest, force=True)
    world.publish(digest)
    return digest


@pytest.fixture
def second(world: World, first: str, tmp_path: Path) -> str:
    """An approved draft, not yet published."""
    digest = world.import_draft(tmp_path, 2)
    world.approve(digest, force=True)
    return digest


def test_an_unapproved_draft_reaches_no_engine(world: World, tmp_path: Path) -> None:
    digest = world.import_draft(tmp_path, 1)
    for attempt in (
        world.publish,
        lambda d: promote.plan_publish(world.url, d, tuple(world.engines), world.ctx),
    ):
        with pytest.raises(GateRefusedError, match="candidate, expected approved"):
            attempt(digest)
    assert all(engine.calls == [] for engine in world.engines.values())
    assert world.production is None


def test_a_rejected_draft_reaches_no_engine(world: World, tmp_path: Path) -> None:
    digest = world.import_draft(tmp_path, 1)
    world.approve(digest, force=True)
    promote.reject(world.url, digest, world.ctx, reviewer="ada", reason="worse")
    with pytest.raises(GateRefusedError, match="rejected"):
        world.publish(digest)


def test_publishing_swaps_every_engine_and_then_moves_the_channel(world: World, first: str) -> None:
    assert world.serving == [first] * 3
    assert {e.staged_from for e in world.engines.values()} == {world.registry.artifact_uri(first)}
    assert world.moves == [("publish", first)]
    assert world.status()["production"] == {"eagle3": first}
    assert [row["serves_production"] for row in world.status()["engines"]] == [True] * 3


def test_the_report_gives_lag_pauses_and_outcomes_and_is_kept(world: World, tmp_path: Path) -> None:
    digest = world.import_draft(tmp_path, 1)  # trained on versions 0 and 2; the lake has 0..4
    world.approve(digest, force=True)
    report = world.publish(digest)
    assert report.lag == 2
    assert report.engines == dict.fromkeys("abc", "swapped")
    assert report.seconds["total"] == 0.03
    (kept,) = world.registry.evidence(digest, "publication")
    assert kept.document["lag"] == 2


def test_publishing_from_a_lake_without_a_version_leaves_the_lag_open(tmp_path: Path) -> None:
    identity = TargetIdentity(**{f: getattr(TINY_TARGET, f) for f in TINY_TARGET.__dataclass_fields__})
    lake = Lake.init(str(tmp_path / "bare"), identity)
    registry = Registry(lake.store, TARGET_ID)
    engine = FakeEngine("a", registry.artifact)
    ctx = RunContext(open_engine=lambda _url: engine)
    digest = registry.import_artifact(write_artifact(tmp_path / "d", target_id=TARGET_ID))
    promote.approve(lake.url, digest, ctx, reviewer="ada", reason="first", force=True)
    assert promote.publish(lake.url, digest, ("http://a",), ctx, by="ada").lag is None


def test_the_channel_moves_only_after_every_engine_serves_the_draft(
    world: World, first: str, second: str
) -> None:
    seen: list[str | None] = []
    for engine in world.engines.values():
        engine.on_commit = lambda: seen.append(world.production)
    world.publish(second)
    assert seen == [first] * 3
    assert world.production == second


@pytest.mark.parametrize("step", ["state", "prepare", "commit"])
@pytest.mark.parametrize("broken", ["a", "b", "c"])
def test_when_one_engine_fails_none_changes_and_the_channel_stays(
    world: World, first: str, second: str, broken: str, step: str
) -> None:
    world.engines[f"http://{broken}"].fail = {step}
    with pytest.raises(EngineError, match="was not published"):
        world.publish(second)
    assert world.serving == [first] * 3
    assert world.moves == [("publish", first)]
    assert world.registry.state(second) == "approved"


def move_channel_during_the_swap(world: World, artifact: str) -> None:
    """Somebody else publishes ``artifact`` while the last engine is being swapped."""

    def interfere() -> None:
        last.on_commit = lambda: None
        channel = world.registry.channel("eagle3")
        head = channel.head()
        channel.advance(
            expected_seq=head.seq if head else 0, artifact=artifact, action="publish", reason="I was first",
            by="bob", at=world.ctx.now(),
        )  # fmt: skip

    last = list(world.engines.values())[-1]
    last.on_commit = interfere


def test_losing_the_channel_leaves_engines_on_the_draft_that_won(
    world: World, first: str, second: str, tmp_path: Path
) -> None:
    other = world.import_draft(tmp_path, 3)
    world.approve(other, force=True)
    move_channel_during_the_swap(world, other)
    with pytest.raises(RegistryConflictError, match="'bob'.*I was first"):
        world.publish(second)
    assert world.serving == [other] * 3
    assert world.moves == [("publish", first), ("publish", other)]


def test_losing_the_first_publish_leaves_engines_on_the_draft_that_won(world: World, tmp_path: Path) -> None:
    mine, theirs = world.import_draft(tmp_path, 1), world.import_draft(tmp_path, 2)
    world.approve(mine, force=True)
    world.approve(theirs, force=True)
    move_channel_during_the_swap(world, theirs)
    with pytest.raises(RegistryConflictError):
        world.publish(mine)
    assert world.serving == [theirs] * 3


def test_a_store_that_fails_after_the_swap_puts_the_previous_draft_back(
    world: World, first: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_self: Any, path: str, _data: bytes) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("features.storage.LocalStore.create", refuse)
    with pytest.raises(PermissionError):
        world.publish(second)
    assert world.serving == [first] * 3
    assert world.production == first


def test_publishing_the_production_draft_again_reasserts_it_where_it_was_lost(
    world: World, first: str
) -> None:
    restarted = world.engines["http://b"]
    restarted.serving = None
    assert [row["serves_production"] for row in world.status()["engines"]] == [True, False, True]
    report = world.publish(first)
    assert report.engines == {"a": "already_current", "b": "swapped", "c": "already_current"}
    assert world.serving == [first] * 3
    assert world.moves == [("publish", first)]
    assert report.sequence == 1


def test_an_engine_that_serves_the_draft_already_is_left_alone(world: World, first: str, second: str) -> None:
    ready = world.engines["http://b"]
    ready.serving = world.registry.artifact(second)
    ready.calls.clear()
    plan = promote.plan_publish(world.url, second, tuple(world.engines), world.ctx)
    assert (plan["to_swap"], plan["already_current"]) == (("a", "c"), ("b",))
    world.publish(second)
    assert set(ready.calls) == {"state"}


def test_a_plan_touches_nothing(world: World, first: str, second: str) -> None:
    for engine in world.engines.values():
        engine.calls.clear()
    promote.plan_publish(world.url, second, tuple(world.engines), world.ctx)
    assert all(set(engine.calls) == {"state"} for engine in world.engines.values())
    assert world.moves == [("publish", first)]


def test_rolling_back_goes_to_the_draft_before(world: World, first: str, second: str) -> None:
    world.publish(second)
    assert promote.plan_rollback(world.url, "eagle3", tuple(world.engines), world.ctx)["artifact"] == first
    report = world.rollback()
    assert (report.artifact, report.action) == (first, "rollback")
    assert world.serving == [first] * 3
    assert world.moves == [("publish", first), ("publish", second), ("rollback", first)]
    assert world.registry.state(second) == "retired"
    with pytest.raises(InputError, match="no earlier draft"):
        world.rollback()


def test_a_retired_draft_can_be_approved_anew_and_published(world: World, first: str, second: str) -> None:
    world.publish(second)
    world.rollback()
    world.approve(second, force=True)
    world.publish(second)
    assert world.production == second
    assert world.serving == [second] * 3


def test_an_approval_against_another_baseline_does_not_hold(
    world: World, first: str, second: str, tmp_path: Path
) -> None:
    newer = world.import_draft(tmp_path, 3)
    newest = 4
    by_version = {newest: make_report(newer).overall}
    report = make_report(newer, first, head_version=newest, by_version=by_version)
    world.registry.add_evidence(newer, report)
    verdict = world.approve(newer)
    assert (verdict.state, verdict.decision) == ("approved", "approve")
    world.publish(second)
    for attempt in (
        world.publish,
        lambda d: promote.plan_publish(world.url, d, tuple(world.engines), world.ctx),
    ):
        with pytest.raises(GateRefusedError, match="compared with"):
            attempt(newer)
    assert world.serving == [second] * 3


def test_judging_files_nothing_and_gating_files_the_verdict(world: World, first: str, tmp_path: Path) -> None:
    digest = world.import_draft(tmp_path, 2)
    report = make_report(digest, first, head_version=4, by_version={4: make_report(digest).overall})
    world.registry.add_evidence(digest, report)
    assert promote.judge(world.url, digest).passed
    assert world.registry.evidence(digest, "gate") == ()
    assert promote.gate(world.url, digest).passed
    assert len(world.registry.evidence(digest, "gate")) == 1


def test_no_engine_or_one_named_twice_is_refused(world: World, first: str, second: str) -> None:
    with pytest.raises(InputError, match="no engine given"):
        promote.publish(world.url, second, (), world.ctx, by="ada")
    with pytest.raises(InputError, match="more than once"):
        promote.publish(world.url, second, ("http://a", "http://a"), world.ctx, by="ada")
    assert world.production == first


def test_status_tells_a_dead_engine_from_a_wrong_one(world: World, first: str) -> None:
    world.engines["http://a"].fail = {"state"}
    world.engines["http://c"].serving = None
    rows = world.status()["engines"]
    assert [row["serves_production"] for row in rows] == [False, True, False]
    assert [bool(row["error"]) for row in rows] == [True, False, False]
    assert world.status()["newest_version"] == 4


def test_hooks_hear_of_decisions_after_they_are_filed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[str, str, str]] = []

    def hear(artifact: str, decision: str) -> None:
        heard.append((artifact, decision, str(world.registry.state(artifact))))

    hook = pipelines.hooks.Hooks(on_decision=hear)
    monkeypatch.setattr(pipelines.hooks, "load_hooks", lambda: (hook,))
    digest = world.import_draft(tmp_path, 1)
    with pytest.raises(GateRefusedError):
        world.approve(digest)
    world.approve(digest[:10], force=True)
    promote.reject(world.url, digest[:10], world.ctx, reviewer="ada", reason="worse")
    assert heard == [(digest, "approve", "approved"), (digest, "reject", "rejected")]


def test_a_draft_of_another_target_is_not_imported(world: World, tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "stranger", target_id=TARGET_ID)  # its tokenizer is another one
    with pytest.raises(TargetMismatchError, match="tokenizer_digest"):
        promote.import_draft(world.url, folder)
    assert world.registry.digests() == ()
