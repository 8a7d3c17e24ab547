"""The ``retrain`` flow: pin the lake, train, evaluate, gate, and when asked approve and publish.

A gate that refuses ends a run differently by what was asked of it. A run that only prepares a
candidate has done its job and completes; its report says what the gate found. A run that was
told to approve could not, and fails with the gate's reasons.

Running it again is harmless: artifacts, evaluations and approvals are content-addressed or
append-only, and the channel's sequence is the fence between publishers. The deployment's
concurrency limit only saves work.
"""

import logging
import os
from pathlib import Path
from typing import Any, assert_never

from prefect import State, flow, task
from prefect.cache_policies import DEFAULT as PER_RUN
from prefect.client.schemas import TaskRun
from prefect.states import Completed

from features.errors import DraftLayoutError, InputError
from flows.record import Outcome, Pinned, RetrainReport, log_at_info, show, tag_run
from flows.subprocess_step import run_draftlake
from pipelines import evaluate as evaluating
from pipelines import inspect, promote
from pipelines import train as training_pipeline
from pipelines.context import LAKE_VARIABLE, RunContext
from publish.gates import GateDecision
from training.artifact import EvalReport
from training.spec import TrainSpec

logger = logging.getLogger(__name__)

REVIEWER = "flow retrain"
"""Named in the registry where no person decided."""


async def may_pass(_task: Any, _run: TaskRun, state: State[Any]) -> bool:
    """True when trying again can help: storage or network, never what we refuse on purpose."""
    return isinstance(await state.aresult(raise_on_failure=False), OSError)


def lake_of(lake: str | None) -> str:
    """The lake named by the run, else by the worker's environment.

    Raises:
        InputError: neither names one, or it is a path that means something only in your folder.
    """
    found = lake or os.environ.get(LAKE_VARIABLE)
    if not found:
        raise InputError(
            f"no lake: the run has no parameter 'lake' and the worker's environment no {LAKE_VARIABLE}. "
            f"Pass -p lake=PATH_OR_URL, or start the worker with: draftlake flows up --lake PATH_OR_URL"
        )
    if "://" not in found and not Path(found).is_absolute():
        raise InputError(
            f"lake {found!r} is a relative path, and a run does not start in your folder. "
            f"Give an absolute path or a URL: -p lake=$PWD/{found}"
        )
    return found


# Results are persisted per run, as JSON (digests and counts): a retry of a run takes the pin, and
# whatever else had finished, from its record instead of asking the lake anew.
_STEP: dict[str, Any] = {"persist_result": True, "result_serializer": "json", "cache_policy": PER_RUN}
_IDEMPOTENT: dict[str, Any] = _STEP | {
    "retries": 2,
    "retry_delay_seconds": 10,
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": may_pass,
}


@task(name="pin the lake", **_IDEMPOTENT)
def pin(lake: str, first_version: int, stop_version: int, parent: str | None, verified_only: bool) -> Pinned:
    """Resolve the lake's revision and the draft to start from, and say what training would read."""
    opened, registry = promote.open_registry(lake)
    if parent is None:
        parent = promote.status(lake, (), RunContext())["production"].get(TrainSpec().method.method)
    elif parent:
        parent = registry.resolve(parent)
    revision = inspect.show_lake(lake)["revision"]
    job = training_pipeline.TrainJob(
        lake=lake,
        first_version=first_version,
        stop_version=stop_version,
        revision=revision,
        verified_only=verified_only,
    )
    plan = training_pipeline.plan_training(job)
    logger.info("lake revision %s: %s", revision, plan.summary())
    return Pinned(
        lake=lake,
        lake_revision=revision,
        parent=parent or None,
        newest_version=inspect.newest_version(opened),
        windows=plan.windows,
        tokens=plan.tokens,
        nbytes=plan.nbytes,
        versions=plan.versions,
        heads_missing=plan.heads_missing,
        summary=plan.summary(),
    )


@task(name="train", **_STEP)
def train(
    pinned: Pinned, first_version: int, stop_version: int, epochs: int | None, verified_only: bool
) -> training_pipeline.TrainReport:
    """Train in a process of its own; check that what was registered is what was asked for."""
    arguments = ["train", "--lake", pinned.lake, "--revision", pinned.lake_revision]
    arguments += ["--first-version", str(first_version), "--stop-version", str(stop_version)]
    arguments += ["--parent", pinned.parent] if pinned.parent else []
    arguments += ["--epochs", str(epochs)] if epochs is not None else []
    arguments += [] if verified_only else ["--include-unverified"]
    report = training_pipeline.TrainReport.model_validate(run_draftlake(arguments))
    _, registry = promote.open_registry(pinned.lake)
    trained_on = registry.artifact(report.artifact).manifest.lake_revision
    if trained_on != pinned.lake_revision:
        raise DraftLayoutError(
            f"{report.artifact[:12]} says it was trained on lake revision {trained_on}, "
            f"expected the pinned {pinned.lake_revision}; do not use it"
        )
    return report


@task(name="evaluate", **_IDEMPOTENT)
def evaluate(pinned: Pinned, artifact: str, include_unverified: bool) -> EvalReport:
    """Offline tau against the production draft, on the pinned revision; filed as evidence."""
    job = evaluating.EvalJob(
        lake=pinned.lake,
        artifact=artifact,
        first_version=pinned.newest_version,
        stop_version=pinned.newest_version + 1,
        revision=pinned.lake_revision,
        verified_only=not include_unverified,
    )
    return evaluating.evaluate(job, RunContext())


@task(name="gate", **_IDEMPOTENT)
def gate(lake: str, artifact: str) -> GateDecision:
    """Apply the gate to the evaluation on file."""
    return promote.gate(lake, artifact)


@task(name="approve")
def approve(lake: str, artifact: str) -> None:
    """Approve without a person; a gate that refused fails the run."""
    reason = "approve_automatically was set and the gate passed"
    promote.approve(lake, artifact, RunContext(), reviewer=REVIEWER, reason=reason)


@task(name="publish")
def publish(lake: str, artifact: str, engines: tuple[str, ...]) -> None:
    """Swap it into the engines and move the production channel."""
    promote.publish(lake, artifact, engines, RunContext(), by=REVIEWER)


@flow(name="retrain", persist_result=True, result_serializer="json")
def retrain(
    first_version: int,
    stop_version: int,
    lake: str | None = None,
    parent: str | None = None,
    epochs: int | None = None,
    include_unverified: bool = False,
    engines: list[str] | None = None,
    approve_automatically: bool = False,
) -> State[RetrainReport]:
    """Train a draft on target versions [first_version, stop_version) and measure it.

    Args:
        first_version: first target version to train on.
        stop_version: stop before this one.
        lake: lake folder or URL; default: DRAFTLAKE_LAKE of the worker.
        parent: digest of the draft to start from; default: the production draft, or scratch when
            there is none. An empty string trains from scratch.
        epochs: overrides the training spec's.
        include_unverified: also train on, and walk, windows without a logprob proof.
        engines: vLLM servers to publish to, when approved automatically.
        approve_automatically: approve when the gate passes, and fail the run when it refuses.
    """
    log_at_info()
    lake, verified_only = lake_of(lake), not include_unverified
    pinned = pin(lake, first_version, stop_version, parent, verified_only)
    artifact = train(pinned, first_version, stop_version, epochs, verified_only).artifact
    tag_run(artifact)
    if artifact in promote.status(lake, (), RunContext())["production"].values():
        return _finished(pinned, _report(pinned, artifact, "in production already", None), None)
    evaluation = evaluate(pinned, artifact, include_unverified)
    decision = gate(lake, artifact)
    report = _report(pinned, artifact, "candidate", decision)
    if approve_automatically:
        show(pinned, report, evaluation)  # a refusal ends the run below, and its reasons belong on the page
        approve(lake, artifact)
        report = _report(pinned, artifact, "approved", decision)
        if engines:
            publish(lake, artifact, tuple(engines))
            report = _report(pinned, artifact, "published", decision)
    return _finished(pinned, report, evaluation)


def _finished(pinned: Pinned, report: RetrainReport, evaluation: EvalReport | None) -> State[RetrainReport]:
    show(pinned, report, evaluation)
    gate_says = {None: "", True: "; the gate passed", False: "; the gate refused it"}[report.gate_passed]
    return Completed(message=f"{report.artifact[:12]}: {report.outcome}{gate_says}", data=report)


def _report(pinned: Pinned, artifact: str, outcome: Outcome, decision: GateDecision | None) -> RetrainReport:
    passed = decision.passed if decision else None
    return RetrainReport(
        outcome=outcome,
        artifact=artifact,
        lake=pinned.lake,
        lake_revision=pinned.lake_revision,
        parent=pinned.parent,
        gate_passed=passed,
        gate_reasons=tuple(decision.reasons) if decision else (),
        next_step=_next_step(pinned.lake, artifact[:12], outcome, passed),
    )


def _next_step(lake: str, artifact: str, outcome: Outcome, passed: bool | None) -> str:
    match outcome:
        case "published" | "in production already":
            return f"draftlake status --lake {lake}"
        case "approved":
            return f"draftlake publish {artifact} --lake {lake} --engine http://HOST:PORT"
        case "candidate" if passed:
            return f"draftlake approve {artifact} --lake {lake} --reason WHY"
        case "candidate":
            return f"draftlake registry show {artifact} --lake {lake}"
        case _ as never:
            assert_never(never)
