"""The demo command."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pipelines.cli.output import DryRunOption, JsonOption, console_context, default_of, emit
from pipelines.demo.spec import DemoSpec


def add_commands(app: typer.Typer) -> None:
    """Mount this module's command."""
    app.command(epilog="Example: draftlake demo --out ./draftlake-demo")(demo)


def demo(
    out: Annotated[str, typer.Option(help="Folder for the lake, the targets and the picture.")] = default_of(
        DemoSpec, "out"
    ),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier demo in that folder.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of prompts, updates and sampling.")] = default_of(
        DemoSpec, "seed"
    ),
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
    from pipelines.demo.serve import demo_command, serve_demo

    spec = DemoSpec(out=out, seed=seed)
    if serve:
        command = demo_command(Path(out), port=port, num_speculative_tokens=spec.num_speculative_tokens)
        if dry_run:
            emit(command, as_json=json, title="would serve")
        else:
            serve_demo(command, Path(out), console_context())
        return
    if dry_run:
        emit(spec, as_json=json, title="would run")
        return
    result = run_demo(spec, console_context(), overwrite=overwrite)
    if json:
        emit(result, as_json=True)
    else:
        print_summary(result, Console())
    if not result.succeeded:
        raise typer.Exit(1)
