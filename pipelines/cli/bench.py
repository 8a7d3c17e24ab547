"""Commands that measure: ``bench lake`` and ``bench collect``."""

import dataclasses
import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from features.errors import InputError
from pipelines.bench.lake import BenchSpec, bench_lake
from pipelines.bench.plot import plot_bench
from pipelines.bench.report import shown
from pipelines.cli import bench_collect
from pipelines.cli.output import DryRunOption, JsonOption, emit
from pipelines.progress import OnConsole

DEFAULT = BenchSpec()
bench = typer.Typer(
    name="bench",
    help="Measure this machine's lake beside its rivals.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def add_commands(app: typer.Typer) -> None:
    """Mount this module's commands."""
    bench.command(
        "lake", epilog="Example: draftlake bench lake --rounds 3 --output lake.json --plot lake.png"
    )(lake)
    bench.command("collect", epilog=bench_collect.EXAMPLE)(bench_collect.collect)
    app.add_typer(bench)


def lake(
    folder: Annotated[
        Path | None, typer.Option(help="Where scratch lakes go (about 1 GB); default: the temporary folder.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Interleaved rounds; the median counts.")
    ] = DEFAULT.rounds,
    writers: Annotated[int, typer.Option(min=1, help="Processes that commit at once.")] = DEFAULT.writers,
    commits: Annotated[int, typer.Option(min=1, help="Commits of each writer.")] = DEFAULT.commits_per_writer,
    s3: Annotated[
        bool, typer.Option("--s3/--no-s3", help="Measure on S3 too (moto, in this process).")
    ] = DEFAULT.s3,
    device: Annotated[
        bool, typer.Option("--device", help="Measure copies to this machine's accelerator too.")
    ] = DEFAULT.device,
    output: Annotated[Path | None, typer.Option(help="Also write the whole report here, as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the read speeds into this PNG.")] = None,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Measure reads, commits and head deltas against preadv, zarr-python and files per window."""
    spec = dataclasses.replace(
        DEFAULT, rounds=rounds, writers=writers, commits_per_writer=commits, s3=s3, device=device
    )
    if dry_run:
        emit(spec, as_json=json, title="would measure")
        return
    for path in (output, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise InputError(
                f"cannot write {path}: its folder does not exist. Make it, or name another file."
            )
    report = bench_lake(spec, folder=folder, progress=OnConsole())
    if output is not None:
        output.write_text(json_module.dumps(report, indent=1) + "\n")
    if plot is not None:
        plot_bench(report, plot)
    emit(report, as_json=json, title="ratios; --json has the figures behind them", shown=shown(report))
