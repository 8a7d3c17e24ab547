"""Commands that touch engines: publish, rollback, status."""

from typing import Annotated

import typer

from pipelines import promote
from pipelines.cli.output import (
    NOTHING_TO_DO,
    DryRunOption,
    EngineOption,
    JsonOption,
    LakeOption,
    ReasonOption,
    console_context,
    current_user,
    emit,
)
from pipelines.cli.rows import engine_row
from training.spec import TrainSpec


def add_commands(app: typer.Typer) -> None:
    """Mount this module's commands."""
    app.command(epilog="Example: draftlake publish 3f2a91 --lake ./lake --engine http://127.0.0.1:8000")(
        publish
    )
    app.command(
        epilog="Example: draftlake rollback --lake ./lake --engine http://127.0.0.1:8000 --reason 'acceptance fell'"
    )(rollback)
    app.command(epilog="Example: draftlake status --lake ./lake --engine http://127.0.0.1:8000")(status)


def publish(
    artifact: Annotated[str, typer.Argument(help="Artifact digest, or its unique beginning.")],
    lake: LakeOption,
    engine: EngineOption,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Swap an approved draft into running engines, verify it, and move the production channel."""
    ctx = console_context()
    if dry_run:
        plan = promote.plan_publish(lake, artifact, tuple(engine), ctx)
        emit(plan, as_json=json, title="would publish")
        if not plan["to_swap"]:
            raise typer.Exit(NOTHING_TO_DO)
        return
    emit(
        promote.publish(lake, artifact, tuple(engine), ctx, by=current_user()),
        as_json=json,
        title="published",
    )


def rollback(
    lake: LakeOption,
    engine: EngineOption,
    reason: ReasonOption,
    method: Annotated[str, typer.Option(help="Draft method.")] = TrainSpec().method.method,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Put the previous production draft back on the engines and on the channel."""
    ctx = console_context()
    if dry_run:
        emit(promote.plan_rollback(lake, method, tuple(engine), ctx), as_json=json, title="would roll back")
        return
    done = promote.rollback(lake, method, tuple(engine), ctx, by=current_user(), reason=reason)
    emit(done, as_json=json, title="rolled back")


def status(
    lake: LakeOption,
    engine: Annotated[list[str] | None, typer.Option("--engine", help="vLLM server; repeatable.")] = None,
    json: JsonOption = False,
) -> None:
    """Show the production draft and what each engine really serves (exit 1 when they differ)."""
    report = promote.status(lake, tuple(engine or ()), console_context())
    shown = report | {"engines": [engine_row(row) for row in report["engines"]]}
    emit(report, as_json=json, title="status", shown=shown)
    for row in report["engines"]:
        if row["error"]:
            typer.echo(f"draftlake: {row['error']}", err=True)
    if any(not row["serves_production"] for row in report["engines"]):
        raise typer.Exit(1)
