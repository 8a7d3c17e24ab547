"""The command that hands a selection to another trainer."""

from typing import Annotated

import typer

from features.schema import Split
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
from pipelines.cli.selecting import narrowed
from pipelines.export import export, plan_export
from pipelines.export_plan import ExportReport, ExportSpec
from pipelines.narrowing import Narrowing

_SPLIT: Split = default_of(ExportSpec, "split")
_REMEDIES = {
    "starts_after_0": "these formats hold whole sequences from position 0; --partial exports the rest too",
    "layer_ids_not_recorded": "recorded with other aux layers than --layer-ids",
    "same_window_twice": "another fragment holds the same rows",
    "nothing_supervised": "no token of it is in the mask",
    "no_two_supervised_in_a_row": "that trainer refuses such a sequence",
    "no_loss_mask": "collected without one; --mask sampled needs none",
    "not_finite": "a stored value is infinite or no number",
}


def add_commands(app: typer.Typer) -> None:
    """Mount this module's command."""
    app.command("export", epilog="Example: draftlake export ./out --to specforge --version 3 --lake ./lake")(
        export_
    )


@narrowed
def export_(
    out: Annotated[str, typer.Argument(help="New or empty folder, or one with the same export, begun.")],
    to: Annotated[str, typer.Option(help="Whose format: speculators or specforge.")],
    lake: LakeOption,
    version: Annotated[
        int | None, typer.Option(min=0, help="Target version; needed where the selection holds several.")
    ] = default_of(ExportSpec, "version"),
    target: Annotated[
        str | None,
        typer.Option(help="Model directory of that version: checked, and asked for its final norm."),
    ] = default_of(ExportSpec, "target"),
    split: Annotated[Split, typer.Option(help="all, train or held_out.")] = _SPLIT,
    held_out_percent: Annotated[
        int, typer.Option(min=0, max=90, help="Share of rollout groups that are held out.")
    ] = default_of(ExportSpec, "held_out_percent"),
    verified_only: Annotated[
        bool, typer.Option("--verified-only", help="Only windows whose logprobs agreed.")
    ] = default_of(ExportSpec, "verified_only"),
    layer_ids: Annotated[str | None, typer.Option(help="Aux layer ids, e.g. 2,4,5 (blocks applied).")] = None,
    mask: Annotated[str, typer.Option(help="What is supervised: sampled or loss.")] = default_of(
        ExportSpec, "mask"
    ),
    partial: Annotated[
        bool, typer.Option("--partial", help="Export windows that start after position 0 too.")
    ] = default_of(ExportSpec, "partial"),
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    *,
    narrowing: Narrowing,
) -> None:
    """Write a selection in the offline format of another trainer."""
    spec = parse_spec(
        ExportSpec,
        {
            "lake": lake,
            "out": out,
            "to": to,
            "version": version,
            "target": target,
            "split": split,
            "held_out_percent": held_out_percent,
            "verified_only": verified_only,
            "narrowing": narrowing,
            "layer_ids": layer_ids.split(",") if layer_ids else None,
            "mask": mask,
            "partial": partial,
        },
        where="export",
    )
    report = plan_export(spec) if dry_run else export(spec, console_context())
    emit(report, as_json=json, title=f"export to {to}")
    _say(report)
    if report.outcome in ("nothing", "complete"):
        raise typer.Exit(NOTHING_TO_DO)


def _say(report: ExportReport) -> None:
    for reason, count in sorted(report.left_out.items()):
        typer.echo(f"draftlake: {count} windows are left out, {reason}: {_REMEDIES[reason]}", err=True)
    for note in report.notes:
        typer.echo(f"draftlake: {note}", err=True)
    if report.outcome == "nothing":
        typer.echo(
            f"draftlake: no window to export: {report.selected} are selected. See what there is with: draftlake ls",
            err=True,
        )
