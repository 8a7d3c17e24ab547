"""Commands about refused rollouts: ``quarantine ls``, ``show`` and ``retry``."""

from typing import Annotated

import typer

from pipelines import quarantine as quarantined
from pipelines.cli.backfill import (
    DtypeOption,
    EngineDtypeOption,
    LayersOption,
    MaxTokensOption,
    TargetOption,
    UnversionedOption,
    VersionOption,
)
from pipelines.cli.output import (
    NOTHING_TO_DO,
    DryRunOption,
    JsonOption,
    LakeOption,
    console_context,
    default_of,
    emit,
    parse_spec,
)
from pipelines.quarantine import QuarantineSpec

_DEFAULT = {name: default_of(QuarantineSpec, name) for name in QuarantineSpec.model_fields}

group = typer.Typer(help="What collecting refused, and why.", no_args_is_help=True)

RunArgument = Annotated[str, typer.Argument(help="Id of the run, as quarantine ls shows it.")]
OnlyReason = Annotated[str | None, typer.Option("--reason", help="Only refusals of this reason.")]


def add_commands(app: typer.Typer) -> None:
    """Mount this module's commands."""
    app.add_typer(group, name="quarantine")


@group.command("ls", epilog="Example: draftlake quarantine ls --lake ./lake")
def list_(lake: LakeOption, json: JsonOption = False) -> None:
    """List runs that refused something: open and resolved refusals, open ones by reason."""
    rows = quarantined.list_runs(lake)
    emit(rows, as_json=json, title=f"quarantine of {lake}")
    if not rows:
        raise typer.Exit(NOTHING_TO_DO)


@group.command(epilog="Example: draftlake quarantine show backfill-v000000003-1a2b3c4d5e6f7a8b --lake ./lake")
def show(run: RunArgument, lake: LakeOption, reason: OnlyReason = None, json: JsonOption = False) -> None:
    """Show what a run refused: source, line, reason, detail, and the record as far as it was kept."""
    rows = list(quarantined.show_run(lake, run, reason))
    shown = [{name: value for name, value in row.items() if name != "sample"} for row in rows]
    emit(rows, as_json=json, title=run, shown=shown)
    if not rows:
        raise typer.Exit(NOTHING_TO_DO)


@group.command(
    epilog="Example: draftlake quarantine retry backfill-v000000003-1a2b3c4d5e6f7a8b --lake ./lake "
    "--target ./target/v3 --version 3"
)
def retry(
    run: RunArgument,
    lake: LakeOption,
    target: TargetOption,
    version: VersionOption,
    reason: OnlyReason = None,
    take_unversioned: UnversionedOption = _DEFAULT["take_unversioned"],
    layer_ids: LayersOption = None,
    dtype: DtypeOption = _DEFAULT["dtype"],
    engine_dtype: EngineDtypeOption = _DEFAULT["engine_dtype"],
    max_tokens: MaxTokensOption = _DEFAULT["max_tokens"],
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Try a run's refused rollouts again, and mark those that are taken now as resolved."""
    given = {
        "run": run, "lake": lake, "target": target, "version": version, "reason": reason,
        "take_unversioned": take_unversioned, "layer_ids": layer_ids.split(",") if layer_ids else None,
        "dtype": dtype, "engine_dtype": engine_dtype, "max_tokens": max_tokens,
    }  # fmt: skip
    spec = parse_spec(QuarantineSpec, given, where="quarantine retry")
    if dry_run:
        plan = quarantined.plan_retry(spec)
        emit(plan, as_json=json, title=f"would retry of {run}")
        if not plan.retried:
            raise typer.Exit(NOTHING_TO_DO)
        return
    report = quarantined.retry(spec, console_context())
    emit(report, as_json=json, title=f"retried {run}")
    if not report.retried:
        raise typer.Exit(NOTHING_TO_DO)
    if not report.resolved:
        raise typer.Exit(1)
