"""The demo command."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pipelines.cli.output import DryRunOption, JsonOption, console_context, emit


def add_commands(app: typer.Typer) -> None:
    """Mount this module's command."""
    app.command(epilog="Example: draftlake demo --out ./draftlake-demo")(demo)


def demo(
    out: Annotated[
        str, typer.Option(help="Folder for the lake, the targets and the picture.")
    ] = "draftlake-demo",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier demo in that folder.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of prompts, updates and sampling.")] = 0,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve an earlier demo's newest target and draft again.")
    ] = False,
    port: Annotated[int, typer.Option(help="Port for --serve.")] = 8000,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Run the whole loop on one machine: a real vLLM, a moving target, a live swap."""
    from pipelines.demo.report import print_summary
    from pipelines.demo.run import run_demo
    from pipelines.demo.serve import serve_demo
    from pipelines.demo.spec import DemoSpec

    spec = DemoSpec(out=out, seed=seed)
    if serve:
        serve_demo(
            Path(out), console_context(), port=port, num_speculative_tokens=spec.num_speculative_tokens
        )
        return
    if dry_run:
        emit(spec, as_json=json, title="would run")
        return
    result = run_demo(spec, console_context(), overwrite=overwrite)
    if json:
        sys.stdout.write(result.model_dump_json() + "\n")
    else:
        print_summary(result, Console())
    healthy = result.greedy_equal and result.target_unchanged and result.draft_matches_artifact
    if not (healthy and result.tau_gain_ci[0] > 0):
        raise typer.Exit(1)
