"""All engines or none: plans, canaries, and what is put back when one fails."""

from dataclasses import replace
from pathlib import Path

import pytest

from features.errors import DraftLayoutError, EngineError
from publish.swap import PublishedDraft, expected_fingerprint, plan_swap, serves, swap_draft
from publish.testing import OWNED_TENSORS, FakeEngine, write_artifact
from training.artifact import DraftArtifact, load_artifact


@pytest.fixture
def old(tmp_path: Path) -> DraftArtifact:
    return load_artifact(write_artifact(tmp_path / "old", seed=1))


@pytest.fixture
def new(tmp_path: Path) -> DraftArtifact:
    return load_artifact(write_artifact(tmp_path / "new", seed=2))


def fleet(old: DraftArtifact, new: DraftArtifact, **faults: set[str]) -> list[FakeEngine]:
    known = {old.digest: old, new.digest: new}
    return [FakeEngine(name, known.__getitem__, old, faults.get(name, set())) for name in ("a", "b", "c")]


def outcomes(report) -> list[str]:
    return [outcome.outcome for outcome in report.outcomes]


def test_a_swap_reaches_every_engine_and_prepares_all_before_the_first_commit(
    old: DraftArtifact, new: DraftArtifact
) -> None:
    engines = fleet(old, new)
    log: list[tuple[str, str]] = []
    for engine in engines:
        engine.on_step = lambda *step: log.append(step)
    report = swap_draft(engines, new, "uri")
    report.require_success()
    assert outcomes(report) == ["swapped"] * 3
    assert all(engine.serving is new for engine in engines)
    first_commit = next(i for i, (_, step) in enumerate(log) if step == "commit")
    assert log[first_commit][0] == "a"
    assert [who for who, step in log[:first_commit] if step == "prepare"] == ["a", "b", "c"]


def test_the_artifact_is_judged_by_the_tensors_an_engine_owns(old: DraftArtifact, new: DraftArtifact) -> None:
    state = fleet(old, new)[0].state()
    assert serves(state, old)
    assert not serves(state, new)
    assert not serves(replace(state, draft_fingerprint="0" * 64), old), "a label alone must not convince"
    assert serves(replace(state, draft_artifact=None), old), "a restarted engine may have booted with it"
    assert expected_fingerprint(old, [*OWNED_TENSORS, "embed_tokens.weight"]) is None


def test_a_plan_skips_engines_that_hold_the_draft(old: DraftArtifact, new: DraftArtifact) -> None:
    engines = fleet(old, new)
    engines[1].serving = new
    plan = plan_swap({engine.name: engine.state() for engine in engines}, new)
    assert plan.to_swap == ("a", "c")
    assert plan.already_current == ("b",)


def test_an_engine_that_holds_the_draft_is_neither_paused_nor_prepared(
    old: DraftArtifact, new: DraftArtifact
) -> None:
    engines = fleet(old, new)
    engines[1].serving = new
    assert outcomes(swap_draft(engines, new, "uri")) == ["swapped", "already_current", "swapped"]
    assert engines[1].calls == ["state"]


@pytest.mark.parametrize("step", ["state", "prepare"])
def test_a_failure_before_the_first_commit_changes_no_engine(
    old: DraftArtifact, new: DraftArtifact, step: str
) -> None:
    engines = fleet(old, new, c={step})
    report = swap_draft(engines, new, "uri")
    assert outcomes(report) == ["untouched"] * 3
    assert report.error is not None
    assert f"{step} failed" in report.error
    assert not any("commit" in engine.calls for engine in engines)
    with pytest.raises(EngineError, match="was not published"):
        report.require_success()


@pytest.mark.parametrize("fault", ["commit", "commits_then_fails", "lies"])
def test_when_one_engine_fails_all_serve_the_old_draft_again(
    old: DraftArtifact, new: DraftArtifact, fault: str
) -> None:
    engines = fleet(old, new, b={fault})
    report = swap_draft(engines, new, "uri")
    assert not report.succeeded
    assert outcomes(report) == ["put_back", "put_back", "untouched"]
    assert report.unknown == ()
    assert all(engine.serving is old for engine in engines)
    assert "commit" not in engines[2].calls


def test_a_dead_engine_is_named_and_the_others_go_back(old: DraftArtifact, new: DraftArtifact) -> None:
    engines = fleet(old, new, b={"dies"})
    report = swap_draft(engines, new, "uri", PublishedDraft(old.digest, "old-uri"))
    assert outcomes(report) == ["put_back", "unknown", "untouched"]
    assert report.unknown == ("b",)
    assert engines[0].serving is old
    assert "revert failed" in report.outcomes[1].detail
    assert "prepare failed" in report.outcomes[1].detail


def test_an_engine_that_lost_its_copy_gets_the_published_draft_from_the_registry(
    old: DraftArtifact, new: DraftArtifact
) -> None:
    engines = fleet(old, new, a={"revert"}, b={"commit"})
    assert outcomes(swap_draft(engines, new, "uri", PublishedDraft(old.digest, "old-uri")))[0] == "put_back"
    assert engines[0].serving is old
    engines = fleet(old, new, a={"revert"}, b={"commit"})
    report = swap_draft(engines, new, "uri")
    assert report.unknown == ("a",)
    assert "no published draft is known" in report.outcomes[0].detail


def test_a_swap_that_wrote_the_target_is_never_called_a_success(
    old: DraftArtifact, new: DraftArtifact
) -> None:
    engines = fleet(old, new, a={"writes_target"})
    report = swap_draft(engines, new, "uri")
    assert report.error is not None
    assert "target of engine a changed" in report.error
    assert outcomes(report) == ["unknown", "untouched", "untouched"]
    assert engines[0].serving is old


def test_engines_must_have_distinct_names(old: DraftArtifact, new: DraftArtifact) -> None:
    with pytest.raises(ValueError, match="distinct names"):
        swap_draft(fleet(old, new)[:1] * 2, new, "uri")
    with pytest.raises(ValueError, match="distinct names"):
        swap_draft([], new, "uri")


def test_a_layout_refusal_is_reported_with_its_reason(old: DraftArtifact, new: DraftArtifact) -> None:
    engines = fleet(old, new)

    def refuse(artifact_uri: str, digest: str) -> None:
        raise DraftLayoutError("fc.weight has shape [2, 2], expected [2, 6]")

    engines[0].prepare = refuse  # type: ignore[method-assign]
    report = swap_draft(engines, new, "uri")
    assert report.error is not None
    assert "expected [2, 6]" in report.error
