"""The ``backfill`` flow: scan the sources once, then collect their partitions, a task for some of them.

A partition is idempotent, so a task is retried and a run is run again without harm: what is
finished is skipped, what was interrupted is completed, and the lake ends up the same. Each task is
a process of its own, because it loads the target.

One run spreads over the slots of one worker. For several workers start several runs with the same
parameters and another ``shard``; which partition owns a sample that occurs twice does not depend on it.
"""

import logging
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import State, flow, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.client.schemas import TaskRun
from prefect.futures import wait
from prefect.states import Completed
from prefect.task_runners import ThreadPoolTaskRunner

from features.errors import DraftlakeError, InputError
from flows.record import log_at_info
from flows.retrain import lake_of
from flows.subprocess_step import run_json
from pipelines.backfill import partition_names, plan_backfill
from pipelines.backfill_process import command, request
from pipelines.backfill_spec import BackfillPlan, BackfillReport, BackfillSpec, merged_reports
from pipelines.context import RunContext

logger = logging.getLogger(__name__)

TAG = "draftlake-backfill"
"""Of every collecting task: a Prefect concurrency limit of this name bounds them over all runs and workers."""
MAX_TASKS = 50
"""Tasks of a run; more partitions share tasks, because a server does not like thousands of runs."""


async def may_pass(_task: Any, _run: TaskRun, state: State[Any]) -> bool:
    """True when trying again can help: storage, network, or a process that was killed."""
    error = await state.aresult(raise_on_failure=False)
    return isinstance(error, OSError) or type(error) is DraftlakeError


_RETRIED: dict[str, Any] = {
    "retries": 2,
    "retry_delay_seconds": 10,
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": may_pass,
}


@task(name="scan the sources", **_RETRIED)
def plan(spec: BackfillSpec) -> BackfillPlan:
    """Read every partition that no run has read before, and keep what was found in the lake."""
    return plan_backfill(spec, RunContext(), keep_scans=True, measure=False)


@task(name="collect partitions", tags=[TAG], **_RETRIED)
def collect(spec: BackfillSpec, partitions: tuple[str, ...]) -> BackfillReport:
    """Collect some partitions in a process of their own."""
    with tempfile.TemporaryDirectory(prefix="draftlake-backfill-") as scratch:
        file = Path(scratch) / "request.json"
        file.write_text(request(spec, partitions))
        return BackfillReport.model_validate(run_json(command(file)))


_RUNNER: Any = ThreadPoolTaskRunner(max_workers=MAX_TASKS)


@flow(name="backfill", task_runner=_RUNNER)
def backfill(
    sources: list[str],
    target: str,
    version: int,
    lake: str | None = None,
    options: dict[str, Any] | None = None,
    concurrency: int = 1,
    shard: int = 0,
    num_shards: int = 1,
) -> State[BackfillReport]:
    """Recompute features of old rollouts and store their windows.

    Args:
        sources: files, folders or globs, absolute or ``s3://``.
        target: model directory of the weights that sampled them, on the worker.
        version: target version of these weights.
        lake: lake folder or URL; default: DRAFTLAKE_LAKE of the worker.
        options: further fields of the backfill, as the command's options name them (format, columns,
            assume_synchronous, dtype, sample_rate, ...).
        concurrency: tasks at a time, each with the target loaded.
        shard: this run's share of the partitions, counted from 0.
        num_shards: runs that share them.
    """
    log_at_info()
    spec = _spec(lake_of(lake), sources, target, version, options or {})
    if not 0 <= shard < num_shards:
        raise InputError(f"shard {shard} of {num_shards}: shards count from 0 to num_shards - 1")
    planned = plan(spec)
    create_table_artifact(key="backfill-plan", table=plan_rows(planned), description=", ".join(sources))
    reports = _collected(spec, partition_names(spec)[shard::num_shards], concurrency)
    if not reports:
        return Completed(message="this shard has no partition", data=None)
    report = merged_reports(reports)
    create_markdown_artifact(key="backfill-report", markdown=render(report))
    return Completed(message=f"{report.collected:,} of {report.rows_read:,} sequences collected", data=report)


def _spec(
    lake: str, sources: Sequence[str], target: str, version: int, options: dict[str, Any]
) -> BackfillSpec:
    given = {"lake": lake, "sources": tuple(sources), "target": target, "version": version}
    refused = {"quota_tokens", "quota_bytes", *given} & options.keys()
    if refused:
        raise InputError(
            f"options {', '.join(sorted(refused))} do not belong there: quotas are of one process (use the "
            f"command), the others are parameters of the run"
        )
    relative = [path for path in (*sources, target) if "://" not in path and not Path(path).is_absolute()]
    if relative:
        raise InputError(f"a run does not start in your folder: give {', '.join(relative)} as absolute paths")
    return BackfillSpec.model_validate(given | options)


def _collected(spec: BackfillSpec, names: Sequence[str], concurrency: int) -> list[BackfillReport]:
    """Submit at most ``concurrency`` tasks at a time; the first failure is raised once these have ended."""
    size = max(1, math.ceil(len(names) / MAX_TASKS))
    groups = [tuple(names[i : i + size]) for i in range(0, len(names), size)]
    reports: list[BackfillReport] = []
    for first in range(0, len(groups), concurrency):
        futures = [collect.submit(spec, group) for group in groups[first : first + concurrency]]
        wait(futures)
        reports += [future.result() for future in futures]
    return reports


def plan_rows(planned: BackfillPlan) -> list[dict[str, str]]:
    """The plan as rows of a table."""
    return [
        {"what": name.replace("_", " "), "value": f"{value:,}" if isinstance(value, int) else str(value)}
        for name, value in planned.model_dump().items()
        if value is not None
    ]


def render(report: BackfillReport) -> str:
    """The run's report as Markdown."""
    lines = [f"# backfilled v{report.version}", "", "| what became of the sequences | |", "|---|---|"]
    fates = ("rows_read", "collected", "duplicates", "pad_rows", "skipped_by_sampling", "over_quota")
    lines += [f"| {name.replace('_', ' ')} | {getattr(report, name):,} |" for name in fates]
    lines += [f"| refused: {reason} | {count:,} |" for reason, count in report.quarantined.items()]
    lines += [
        "",
        f"- windows written: {report.windows_written:,} ({report.verified:,} verified)",
        f"- tokens written: {report.tokens_written:,}",
        f"- partitions finished: {report.partitions_finished:,} of {report.partitions:,}",
        f"- lake revision: `{report.lake_revision}`",
        f"- content digest of the version: `{report.content_digest}`",
    ]
    return "\n".join(lines) + "\n"
