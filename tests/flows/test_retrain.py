"""The retrain flow's tasks and what it does with their answers, without a server."""

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.states import Failed

from features.catalog import Catalog
from features.errors import DraftLayoutError, GateRefusedError, InputError
from features.lake import Lake
from features.testing import commit_tiny, register_tiny_version, tiny_head, tiny_lake, tiny_window
from flows import record, retrain
from flows.record import Pinned, RetrainReport
from publish.gates import GateCheck, GateDecision, GateSpec
from training.artifact import EvalReport, Interval, TauEstimate

ARTIFACT, PARENT = "a" * 64, "b" * 64


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return tiny_lake(str(tmp_path / "lake"), versions=2, samples_per_version=24)


def grow(lake: Lake) -> None:
    head = tiny_head(2)
    commit_tiny(lake, 2, register_tiny_version(lake, 2, head), [tiny_window(head, version=2, sample=100)])


def pinned_to(lake: str = "/lake", **fields: Any) -> Pinned:
    values = {
        "lake": lake, "lake_revision": "r" * 64, "parent": None, "newest_version": 1, "windows": 2,
        "tokens": 10, "nbytes": 2**20, "versions": (0, 1), "heads_missing": (), "summary": "2 windows",
    }  # fmt: skip
    return Pinned.model_validate(values | fields)


def estimate(value: float) -> TauEstimate:
    tau = Interval(value=value, low=value - 0.1, high=value + 0.1)
    return TauEstimate(tau=tau, rounds=300, accepted=30, accepted_per_position=(20, 10), groups=9)


def evaluation(**fields: Any) -> EvalReport:
    values = {
        "artifact": ARTIFACT, "lake_revision": "r" * 64, "selection_digest": "s" * 64, "head_version": 1,
        "mode": "sampled-onehot", "num_speculative_tokens": 3, "temperature": 0.8, "overall": estimate(2.0),
        "by_version": {1: estimate(2.0)}, "by_domain": {}, "skipped": {"partial": 2},
    }  # fmt: skip
    return EvalReport.model_validate(values | fields)


def decision(passed: bool) -> GateDecision:
    return GateDecision(
        artifact=ARTIFACT, baseline=None, evaluation="e" * 64, newest_version=1, spec=GateSpec(), passed=passed,
        checks=(GateCheck(name="gain", passed=passed, detail="needs the gain's interval above 0"),),
    )  # fmt: skip


class Steps:
    """Stands in for the flow's tasks and records what the flow asked of them."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, gate_passes: bool, production: str | None = None
    ) -> None:
        self.calls: list[str] = []
        self.shown: list[RetrainReport] = []
        self.tags: list[str] = []
        self.gate_passes = gate_passes
        found = {"production": {"eagle3": production} if production else {}}
        for name, answer in {
            "pin": pinned_to(),
            "train": SimpleNamespace(artifact=ARTIFACT),
            "evaluate": evaluation(),
            "gate": decision(gate_passes),
            "publish": None,
        }.items():
            monkeypatch.setattr(retrain, name, self._step(name, answer))
        monkeypatch.setattr(retrain, "approve", self._approve)
        monkeypatch.setattr(retrain, "show", lambda _pinned, report, _evaluation: self.shown.append(report))
        monkeypatch.setattr(retrain, "tag_run", self.tags.append)
        monkeypatch.setattr(retrain.promote, "status", lambda *_: found)

    def _step(self, name: str, answer: Any) -> Any:
        def step(*_args: Any) -> Any:
            self.calls.append(name)
            return answer

        return step

    def _approve(self, *_args: Any) -> None:
        self.calls.append("approve")
        if not self.gate_passes:
            raise GateRefusedError("the gain's interval touches 0")


def run(**parameters: Any) -> Any:
    return retrain.retrain.fn(first_version=0, stop_version=2, lake="/lake", **parameters)


# -- pinning: one revision for the run and its retries


def test_pin_resolves_the_revision_and_counts_what_training_would_read(lake: Lake) -> None:
    found = retrain.pin.fn(lake.url, 0, 2, None, True)
    assert found.lake_revision == Catalog.load(lake).revision.digest
    assert found.versions == (0, 1)
    assert found.windows > 0
    assert found.parent is None


def test_a_pin_survives_the_json_that_prefect_stores(lake: Lake) -> None:
    found = retrain.pin.fn(lake.url, 0, 2, None, True)
    assert Pinned.model_validate_json(found.model_dump_json()) == found


def test_training_uses_the_pinned_revision_after_the_lake_has_grown(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = retrain.pin.fn(lake.url, 0, 2, None, True)
    grow(lake)
    assert Catalog.load(lake).revision.digest != found.lake_revision
    asked: list[list[str]] = []

    def stop_there(arguments: list[str]) -> None:
        asked.append(arguments)
        raise InputError("stop")

    monkeypatch.setattr(retrain, "run_draftlake", stop_there)
    with pytest.raises(InputError, match="stop"):
        retrain.train.fn(found, 0, 2, 3, True)
    arguments = asked[0]
    assert arguments[arguments.index("--revision") + 1] == found.lake_revision
    assert arguments[arguments.index("--epochs") + 1] == "3"
    assert "--parent" not in arguments
    assert "--include-unverified" not in arguments


def test_evaluation_uses_the_pinned_revision_and_its_newest_version(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = []
    monkeypatch.setattr(retrain.evaluating, "evaluate", lambda job, _ctx: jobs.append(job) or evaluation())
    retrain.evaluate.fn(pinned_to(), ARTIFACT, include_unverified=False)
    assert (jobs[0].first_version, jobs[0].stop_version) == (1, 2)
    assert jobs[0].revision == "r" * 64
    assert jobs[0].artifact == ARTIFACT
    assert jobs[0].verified_only


def test_a_draft_trained_on_another_revision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    report = {
        "artifact": ARTIFACT, "lake_revision": "r" * 64, "selection_digest": "s" * 64, "windows": 2, "tokens": 10,
        "steps": 1, "first_loss": 2.0, "last_loss": 1.0, "counts": {},
    }  # fmt: skip
    registered = SimpleNamespace(manifest=SimpleNamespace(lake_revision="f" * 64))
    monkeypatch.setattr(retrain, "run_draftlake", lambda _arguments: report)
    monkeypatch.setattr(
        retrain.promote,
        "open_registry",
        lambda _: (None, SimpleNamespace(artifact=lambda _digest: registered)),
    )
    with pytest.raises(DraftLayoutError, match="expected the pinned"):
        retrain.train.fn(pinned_to(), 0, 2, None, True)


@pytest.mark.parametrize("task", [retrain.pin, retrain.train, retrain.evaluate, retrain.gate])
def test_steps_persist_their_results_as_json_within_one_run(task: Any) -> None:
    assert task.persist_result
    assert task.result_serializer == "json"
    assert task.cache_policy == retrain.PER_RUN


@pytest.mark.parametrize("task", [retrain.train, retrain.approve, retrain.publish])
def test_steps_that_cost_or_change_something_are_not_retried_by_themselves(task: Any) -> None:
    assert task.retries == 0


@pytest.mark.parametrize(
    ("error", "again"),
    [(ConnectionError("reset"), True), (InputError("no lake"), False), (KeyError("x"), False)],
)
def test_only_trouble_that_can_pass_is_retried(error: Exception, again: bool) -> None:
    assert asyncio.run(retrain.may_pass(None, None, Failed(data=error))) is again


# -- which lake, which parent


def test_a_run_without_a_lake_takes_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTLAKE_LAKE", "s3://bucket/lake")
    assert retrain.lake_of(None) == "s3://bucket/lake"
    assert retrain.lake_of("/mine") == "/mine"


def test_a_run_without_any_lake_names_the_parameter_and_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRAFTLAKE_LAKE", raising=False)
    with pytest.raises(InputError, match=r"-p lake=.*flows up --lake"):
        retrain.lake_of(None)


def test_a_relative_lake_is_refused_since_a_run_starts_elsewhere() -> None:
    with pytest.raises(InputError, match=r"-p lake=\$PWD/demo/lake"):
        retrain.lake_of("demo/lake")


@pytest.mark.parametrize(("parent", "expected"), [(None, PARENT), ("", None)])
def test_the_production_draft_is_the_default_parent_and_an_empty_one_means_scratch(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, parent: str | None, expected: str | None
) -> None:
    monkeypatch.setattr(retrain.promote, "status", lambda *_: {"production": {"eagle3": PARENT}})
    assert retrain.pin.fn(lake.url, 0, 2, parent, True).parent == expected


def test_our_loggers_are_heard_at_info_and_a_chosen_level_is_kept() -> None:
    ours = [logging.getLogger(name) for name in ("features", "flows", "training")]
    before = [logger.level for logger in ours]
    try:
        for logger, level in zip(ours, (logging.NOTSET, logging.DEBUG, logging.ERROR), strict=True):
            logger.setLevel(level)
        record.log_at_info()
        assert [logger.level for logger in ours] == [logging.INFO, logging.DEBUG, logging.ERROR]
    finally:
        for logger, level in zip(ours, before, strict=True):
            logger.setLevel(level)


# -- how a run ends


@pytest.mark.parametrize("passes", [True, False])
def test_without_approval_a_run_completes_with_a_candidate_and_the_gates_verdict(
    monkeypatch: pytest.MonkeyPatch, passes: bool
) -> None:
    steps = Steps(monkeypatch, gate_passes=passes)
    state = run(engines=["http://engine"])
    assert state.is_completed()
    assert steps.calls == ["pin", "train", "evaluate", "gate"]
    assert state.data.outcome == "candidate"
    assert state.data.gate_passed is passes
    assert ("approve" in state.data.next_step) is passes
    assert ("refused" in state.message) is not passes
    assert steps.shown == [state.data]
    assert steps.tags == [ARTIFACT]


def test_a_run_that_should_approve_fails_when_the_gate_refuses_and_publishes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(monkeypatch, gate_passes=False)
    with pytest.raises(GateRefusedError):
        run(engines=["http://engine"], approve_automatically=True)
    assert "publish" not in steps.calls
    assert steps.shown[0].gate_reasons, "the reasons are on the run's page all the same"


@pytest.mark.parametrize(
    ("engines", "outcome"), [([], "approved"), (None, "approved"), (["http://e"], "published")]
)
def test_publishing_needs_both_approval_and_engines(
    monkeypatch: pytest.MonkeyPatch, engines: list[str] | None, outcome: str
) -> None:
    steps = Steps(monkeypatch, gate_passes=True)
    state = run(engines=engines, approve_automatically=True)
    assert state.data.outcome == outcome
    assert ("publish" in steps.calls) is bool(engines)


def test_a_rerun_that_makes_the_production_draft_again_does_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(monkeypatch, gate_passes=True, production=ARTIFACT)
    state = run(engines=["http://engine"], approve_automatically=True)
    assert state.is_completed()
    assert steps.calls == ["pin", "train"]
    assert state.data.outcome == "in production already"


# -- the run's page


def test_the_page_shows_revision_parent_tau_gain_and_every_gate_reason() -> None:
    report = retrain._report(pinned_to(parent=PARENT), ARTIFACT, "candidate", decision(False))
    gain = Interval(value=0.25, low=0.125, high=0.375)
    page = record.render(report, evaluation(baseline=PARENT, baseline_overall=estimate(1.5), gain=gain))
    for part in (
        "r" * 64,
        PARENT,
        ARTIFACT,
        "| candidate | 2.000 |",
        "1.500",
        "+0.250 [+0.125, +0.375]",
        "2 partial",
    ):
        assert part in page
    assert all(reason in page for reason in report.gate_reasons)
    assert "Gate: refused" in page


def test_the_read_plan_names_the_revision_and_missing_heads() -> None:
    rows = {row["what"]: row["value"] for row in record.plan_rows(pinned_to(heads_missing=(1,)))}
    assert rows["lake revision"] == "r" * 64
    assert rows["heads missing"] == "1"
    assert rows["starts from"] == "scratch"
