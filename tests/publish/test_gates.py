"""Gates: pure decisions that name every reason."""

from typing import Any

import pytest

from features.errors import InputError
from publish.evidence import evidence_id
from publish.gates import GateSpec, decide
from publish.testing import make_estimate, make_report
from training.artifact import Interval

CANDIDATE, BASELINE, NEWEST = "c" * 64, "b" * 64, 5


def failed(changes: dict[str, Any], spec: GateSpec | None = None, newest: int = NEWEST) -> set[str]:
    report = make_report(CANDIDATE, BASELINE, **changes)
    decision = decide(report, spec or GateSpec(), newest)
    names = {check.name for check in decision.checks if not check.passed}
    assert decision.passed == (not names)
    return names


def test_a_better_draft_passes_and_every_reason_is_listed() -> None:
    decision = decide(make_report(CANDIDATE, BASELINE), GateSpec(), NEWEST)
    assert decision.passed
    assert [check.name for check in decision.checks] == [
        "held_out", "all_domains", "newest_version", "baseline", "same_selection", "rounds", "groups", "gain",
    ]  # fmt: skip
    assert all(reason.startswith("pass: ") for reason in decision.reasons)


def test_a_refusal_lists_passed_reasons_too() -> None:
    report = make_report(CANDIDATE, BASELINE, split="train", overall=make_estimate(2.5, rounds=3))
    decision = decide(report, GateSpec(), NEWEST)
    assert [reason.split(":")[0] for reason in decision.reasons].count("REFUSED") == 2
    assert len(decision.reasons) == 8
    assert any("held-out groups; it was made on train" in reason for reason in decision.reasons)
    assert any("found 3" in reason for reason in decision.reasons)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"gain": Interval(value=0.3, low=0.0, high=0.6)}, "gain"),
        ({"gain": Interval(value=0.3, low=-0.1, high=0.7)}, "gain"),
        ({"split": "train"}, "held_out"),
        ({"split": "all"}, "held_out"),
        ({"split": None}, "held_out"),
        ({"domains": ("prose",)}, "all_domains"),
        ({"head_version": 4}, "newest_version"),
        ({"by_version": {4: make_estimate(), 5: make_estimate()}}, "newest_version"),
        ({"by_version": {4: make_estimate()}}, "newest_version"),
        ({"overall": make_estimate(rounds=199)}, "rounds"),
        ({"baseline_overall": make_estimate(rounds=199)}, "rounds"),
        ({"baseline_overall": make_estimate(groups=19)}, "same_selection"),
        ({"overall": make_estimate(groups=7), "baseline_overall": make_estimate(groups=7)}, "groups"),
    ],
)
def test_each_fault_is_refused_by_its_own_check(changes: dict[str, Any], name: str) -> None:
    assert failed(changes) == {name}


def test_a_draft_is_not_its_own_baseline() -> None:
    decision = decide(make_report(CANDIDATE, CANDIDATE), GateSpec(), NEWEST)
    assert {check.name for check in decision.checks if not check.passed} == {"baseline"}


def test_an_evaluation_of_an_older_version_is_refused_after_the_target_moved() -> None:
    assert failed({}, newest=6) == {"newest_version"}


def test_a_gain_of_exactly_the_threshold_is_not_above_it() -> None:
    assert failed({}, GateSpec(min_gain_low=0.3)) == {"gain"}
    assert failed({}, GateSpec(min_gain_low=0.29)) == set()


def test_without_a_baseline_a_default_gate_refuses() -> None:
    decision = decide(make_report(CANDIDATE), GateSpec(), NEWEST)
    assert {check.name for check in decision.checks if not check.passed} == {"baseline", "gain"}


def test_a_first_draft_can_be_judged_by_its_own_tau_when_the_spec_says_so() -> None:
    report = make_report(CANDIDATE)
    assert decide(report, GateSpec(require_baseline=False, min_tau_low=2.3), NEWEST).passed
    assert not decide(report, GateSpec(require_baseline=False, min_tau_low=2.4), NEWEST).passed


def test_a_spec_that_asks_for_nothing_decides_nothing() -> None:
    decision = decide(make_report(CANDIDATE), GateSpec(require_baseline=False), NEWEST)
    assert {check.name for check in decision.checks if not check.passed} == {"baseline"}


def test_a_gain_that_was_measured_counts_even_when_no_baseline_is_required() -> None:
    worse = {"gain": Interval(value=-0.3, low=-0.4, high=-0.2)}
    assert failed(worse, GateSpec(require_baseline=False, min_tau_low=1.5)) == {"gain"}


def test_skipped_windows_are_limited_only_when_asked() -> None:
    skipped = {"skipped": {"not_whole": 3, "no_response": 2}}
    assert failed(skipped) == set()
    assert failed(skipped, GateSpec(max_skipped=5)) == set()
    assert failed(skipped, GateSpec(max_skipped=4)) == {"skipped"}


def test_an_undefined_gain_cannot_be_judged() -> None:
    with pytest.raises(InputError, match="null for an unknown number"):
        failed({"gain": Interval(value=float("nan"), low=float("nan"), high=float("nan"))})


def test_a_decision_names_the_evaluation_it_rests_on() -> None:
    report = make_report(CANDIDATE, BASELINE)
    assert decide(report, GateSpec(), NEWEST).evaluation == evidence_id(report)
    assert decide(report, GateSpec(), NEWEST) == decide(report, GateSpec(), NEWEST)
