"""Commands that keep a lake in order."""

from datetime import timedelta
from typing import Annotated

import typer

from pipelines import maintain
from pipelines.cli.output import NOTHING_TO_DO, DryRunOption, JsonOption, LakeOption, console_context, emit

ForceOption = Annotated[bool, typer.Option("--force", help="Overrule what protects readers and writers.")]


def add_commands(app: typer.Typer) -> None:
    """Mount this module's commands."""
    app.command(epilog="Example: draftlake compact --lake ./lake --dry-run")(compact)


def compact(
    lake: LakeOption,
    min_commits: Annotated[
        int, typer.Option(min=1, help="Make a snapshot only when so many commits are new.")
    ] = 1,
    grace_hours: Annotated[
        float, typer.Option(min=0, max=1e6, help="Delete what a snapshot has covered for so long.")
    ] = 24.0,
    force: ForceOption = False,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Cover commits by a snapshot, so that opening the lake takes a handful of requests; delete old markers."""
    report = maintain.compact(
        lake,
        console_context(),
        grace=timedelta(hours=grace_hours),
        min_commits=min_commits,
        force=force,
        dry_run=dry_run,
    )
    emit(report, as_json=json, title=f"compact {lake}")
    if report.empty:
        raise typer.Exit(NOTHING_TO_DO)
