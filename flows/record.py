"""What a run shows of itself: its tags, and the page with what was read and what was measured.

Rendering is pure; only ``show`` and ``tag_run`` talk to Prefect.
"""

import logging
from collections.abc import Sequence
from typing import Literal

from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run

from flows.hooks import artifact_tag
from training.artifact import Document, EvalReport, TauEstimate

Outcome = Literal["candidate", "approved", "published", "in production already"]
"""How far a run took the draft."""


class Pinned(Document):
    """What the first task resolved, once: every later task and every retry uses these."""

    lake: str
    lake_revision: str
    parent: str | None
    """Full digest of the draft to start from; None trains from scratch."""
    newest_version: int
    """Newest target version then: the one to evaluate on."""
    windows: int
    tokens: int
    nbytes: int
    versions: tuple[int, ...]
    heads_missing: tuple[int, ...]
    summary: str


class RetrainReport(Document):
    """How a retraining ended."""

    outcome: Outcome
    artifact: str
    lake: str
    lake_revision: str
    parent: str | None
    gate_passed: bool | None
    """None when the draft was in production already and no gate was asked."""
    gate_reasons: tuple[str, ...]
    next_step: str
    """What a person does now."""


def plan_rows(pinned: Pinned) -> list[dict[str, str]]:
    """The read plan as rows of a table."""
    values = {
        "lake": pinned.lake,
        "lake revision": pinned.lake_revision,
        "starts from": pinned.parent or "scratch",
        "windows": f"{pinned.windows:,}",
        "tokens": f"{pinned.tokens:,}",
        "MiB to read": f"{pinned.nbytes / 2**20:.1f}",
        "target versions": ", ".join(map(str, pinned.versions)) or "none",
        "heads missing": ", ".join(map(str, pinned.heads_missing)) or "none",
    }
    return [{"what": name, "value": value} for name, value in values.items()]


def render(report: RetrainReport, evaluation: EvalReport | None) -> str:
    """The run's report as Markdown."""
    lines = [
        f"# {report.outcome}: `{report.artifact[:12]}`",
        "",
        f"- artifact: `{report.artifact}`",
        f"- lake revision: `{report.lake_revision}`",
        f"- started from: {f'`{report.parent}`' if report.parent else 'scratch'}",
        f"- next: `{report.next_step}`",
    ]
    if evaluation is not None:
        lines += ["", "## Offline tau on held-out groups", "", *_tau_table(evaluation)]
    if report.gate_reasons:
        lines += ["", f"## Gate: {'passed' if report.gate_passed else 'refused'}", ""]
        lines += [f"- {reason}" for reason in report.gate_reasons]
    return "\n".join(lines) + "\n"


def show(pinned: Pinned, report: RetrainReport, evaluation: EvalReport | None) -> None:
    """Put the read plan and the report on the run's page."""
    create_table_artifact(key="read-plan", table=plan_rows(pinned), description=pinned.summary)
    create_markdown_artifact(key="retrain-report", markdown=render(report, evaluation))


def log_at_info() -> None:
    """Let our INFO lines through to the run's page.

    ``PREFECT_LOGGING_EXTRA_LOGGERS`` (set in ``prefect.yaml``) sends our loggers there, but leaves
    them at the root's level, which is WARNING. A level that somebody chose is kept.
    """
    for name in ("features", "training", "publish", "pipelines", "flows"):
        package = logging.getLogger(name)
        if package.level == logging.NOTSET:
            package.setLevel(logging.INFO)


def tag_run(digest: str) -> None:
    """Tag the current run with the artifact it made, so that the artifact finds its runs."""
    tags = sorted({*flow_run.tags, artifact_tag(digest)})
    with get_client(sync_client=True) as client:
        client.update_flow_run(flow_run.id, tags=tags)


def _tau_table(evaluation: EvalReport) -> Sequence[str]:
    rows = [("candidate", evaluation.overall)]
    if evaluation.baseline_overall is not None:
        rows.append((f"baseline {(evaluation.baseline or '')[:12]}", evaluation.baseline_overall))
    rows += [(f"candidate on v{version}", tau) for version, tau in sorted(evaluation.by_version.items())]
    table = ["| draft | tau | 95 % interval | rounds | groups |", "|---|---|---|---|---|"]
    table += [_tau_row(name, estimate) for name, estimate in rows]
    if evaluation.gain is not None:
        gain = evaluation.gain
        interval = f"[{gain.low:+.3f}, {gain.high:+.3f}]"
        table += ["", f"Gain {gain.value:+.3f} {interval} (paired bootstrap over groups)."]
    if evaluation.skipped:
        counts = ", ".join(f"{n} {reason}" for reason, n in sorted(evaluation.skipped.items()))
        table += ["", f"Left out: {counts}"]
    return table


def _tau_row(name: str, estimate: TauEstimate) -> str:
    tau = estimate.tau
    cells = (name, f"{tau.value:.3f}", f"[{tau.low:.3f}, {tau.high:.3f}]", estimate.rounds, estimate.groups)
    return f"| {' | '.join(map(str, cells))} |"
