"""Is a candidate good enough? A pure decision that lists every reason, passed or not.

A gate reads one evaluation, in which candidate and baseline were walked over the same
held-out groups of the newest target version, and compares the paired gain with its spec.
It does not measure anything itself: an evaluation that cannot carry the claim is refused.
"""

from typing import Annotated, Literal

from pydantic import Field

from publish.evidence import evidence_id
from training.artifact import Document, EvalReport, Interval


class GateSpec(Document):
    """What a candidate must show. Every default is the safe one."""

    min_gain_low: float = 0.0
    """The low end of the paired gain's 95 % interval must be above this (tau, in tokens per round)."""
    min_tau_low: Annotated[float, Field(ge=1)] | None = None
    """When set, the low end of the candidate's own tau must be above this."""
    min_rounds: Annotated[int, Field(ge=1)] = 200
    """Draft rounds walked, for the candidate and for the baseline."""
    min_groups: Annotated[int, Field(ge=2)] = 8
    """Rollout groups behind the interval: it is a bootstrap over groups."""
    max_skipped: Annotated[int, Field(ge=0)] | None = None
    """When set, the most windows that the evaluation may have left out."""
    require_held_out: bool = True
    """Only groups that no draft of this lake is trained on."""
    require_newest_version: bool = True
    """Only windows of the newest target version, scored with that version's head."""
    require_baseline: bool = True
    """Compare with the draft in production. Without one, ``min_tau_low`` has to decide."""


class GateCheck(Document):
    """One thing a gate looked at."""

    name: str
    passed: bool
    detail: str
    """What was required and what was found."""


class GateDecision(Document):
    """A verdict with all its reasons, and what it rests on."""

    kind: Literal["gate"] = "gate"
    artifact: str
    baseline: str | None
    evaluation: str
    """Evidence id of the report that was judged."""
    newest_version: int
    spec: GateSpec
    passed: bool
    checks: tuple[GateCheck, ...]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Every check as one line for people, passed ones too, in the order they were made."""
        return tuple(f"{'pass' if c.passed else 'REFUSED'}: {c.name}: {c.detail}" for c in self.checks)


def decide(report: EvalReport, spec: GateSpec, newest_version: int) -> GateDecision:
    """Judge one evaluation. Pure: the same report, spec and version give the same decision.

    Args:
        report: evaluation of the candidate, with its baseline in the same report.
        spec: what has to hold.
        newest_version: newest target version registered in the lake.

    Raises:
        InputError: the report holds an undefined number (NaN), so it could not be filed as evidence.
    """
    checks = (
        *_scope_checks(report, spec, newest_version),
        *_size_checks(report, spec),
        *_gain_checks(report, spec),
    )
    return GateDecision(
        artifact=report.artifact,
        baseline=report.baseline,
        evaluation=evidence_id(report),
        newest_version=newest_version,
        spec=spec,
        passed=all(check.passed for check in checks),
        checks=checks,
    )


def _check(name: str, passed: bool, detail: str) -> GateCheck:
    return GateCheck(name=name, passed=passed, detail=detail)


def _scope_checks(report: EvalReport, spec: GateSpec, newest: int) -> list[GateCheck]:
    """Was the right thing measured: held-out groups, newest version, one comparison?"""
    checks = []
    if spec.require_held_out:
        split = report.split or "an unrecorded split"
        detail = f"needs an evaluation on held-out groups; it was made on {split}"
        checks.append(_check("held_out", report.split == "held_out", detail))
    narrowed = ", ".join(report.domains)
    detail = f"needs windows of every domain; it was narrowed to {narrowed or 'none'}"
    checks.append(_check("all_domains", not report.domains, detail))
    if spec.require_newest_version:
        versions = sorted(report.by_version)
        detail = (
            f"needs windows of v{newest} only, scored with its head; found windows of {versions} "
            f"scored with the head of v{report.head_version}"
        )
        checks.append(
            _check("newest_version", report.head_version == newest and versions == [newest], detail)
        )
    if spec.require_baseline:
        found = report.baseline[:12] if report.baseline else "none"
        complete = report.baseline_overall is not None and report.gain is not None
        distinct = report.baseline is not None and report.baseline != report.artifact
        detail = f"needs a paired comparison with another draft; the baseline is {found}"
        checks.append(_check("baseline", complete and distinct, detail))
    elif report.baseline is None and spec.min_tau_low is None:
        detail = "needs a baseline or a min_tau_low in the gate's spec; found neither"
        checks.append(_check("baseline", False, detail))
    if report.baseline_overall is not None:
        mine, theirs = report.overall.groups, report.baseline_overall.groups
        detail = f"needs candidate and baseline on the same groups; found {mine} and {theirs}"
        checks.append(_check("same_selection", mine == theirs, detail))
    return checks


def _size_checks(report: EvalReport, spec: GateSpec) -> list[GateCheck]:
    """Was enough measured? The smaller side counts."""
    sides = [report.overall] + ([report.baseline_overall] if report.baseline_overall else [])
    rounds, groups = min(side.rounds for side in sides), min(side.groups for side in sides)
    checks = [
        _check("rounds", rounds >= spec.min_rounds, f"needs {spec.min_rounds} rounds; found {rounds}"),
        _check("groups", groups >= spec.min_groups, f"needs {spec.min_groups} groups; found {groups}"),
    ]
    if spec.max_skipped is not None:
        skipped = sum(report.skipped.values())
        detail = f"allows {spec.max_skipped} windows left out; found {skipped} {dict(report.skipped)}"
        checks.append(_check("skipped", skipped <= spec.max_skipped, detail))
    return checks


def _gain_checks(report: EvalReport, spec: GateSpec) -> list[GateCheck]:
    """Is it better? The interval's low end decides; touching the threshold is not above it."""
    checks = []
    if report.gain is not None or spec.require_baseline:
        passed = report.gain is not None and report.gain.low > spec.min_gain_low
        detail = f"needs the gain's interval above {spec.min_gain_low:g}; found {_show(report.gain)}"
        checks.append(_check("gain", passed, detail))
    if spec.min_tau_low is not None:
        tau = report.overall.tau
        detail = f"needs tau's interval above {spec.min_tau_low:g}; found {_show(tau)}"
        checks.append(_check("tau", tau.low > spec.min_tau_low, detail))
    return checks


def _show(interval: Interval | None) -> str:
    if interval is None:
        return "none"
    return f"{interval.value:+.4f} [{interval.low:+.4f}, {interval.high:+.4f}]"
