"""``bench collect``."""

import dataclasses
import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from features.errors import InputError
from pipelines.bench.collect import CollectBenchSpec, bench_collect
from pipelines.bench.collect_report import plot_collect, shown_collect
from pipelines.cli.output import DryRunOption, JsonOption, emit
from pipelines.progress import OnConsole

DEFAULT = CollectBenchSpec()
EXAMPLE = "Example: draftlake bench collect --rate 0.01 --rate 0.05 --output collect.json --plot collect.png"


def collect(
    folder: Annotated[
        Path | None,
        typer.Option(help="Where scratch lakes go (about 200 MB); default: the temporary folder."),
    ] = None,
    rate: Annotated[
        list[float] | None, typer.Option(help="Share of tokens to collect; may be given several times.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Interleaved rounds; the median counts.")
    ] = DEFAULT.rounds,
    hidden_size: Annotated[int, typer.Option(min=64, help="Of the random model.")] = DEFAULT.hidden_size,
    layers: Annotated[int, typer.Option(min=3, help="Of the random model.")] = DEFAULT.num_layers,
    sequences: Annotated[int, typer.Option(min=1, help="Of each batch.")] = DEFAULT.sequences,
    length: Annotated[int, typer.Option(min=8, help="Tokens of each sequence.")] = DEFAULT.length,
    output: Annotated[Path | None, typer.Option(help="Also write the whole report here, as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the overheads into this PNG.")] = None,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Measure one model's forward without and with collecting, and memory when the store is slow or dead."""
    spec = dataclasses.replace(
        DEFAULT, rates=tuple(rate or DEFAULT.rates), rounds=rounds, hidden_size=hidden_size, num_layers=layers,
        sequences=sequences, length=length,
    )  # fmt: skip
    if dry_run:
        emit(spec, as_json=json, title="would measure")
        return
    for path in (output, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise InputError(
                f"cannot write {path}: its folder does not exist. Make it, or name another file."
            )
    report = bench_collect(spec, folder=folder, progress=OnConsole())
    if output is not None:
        output.write_text(json_module.dumps(report, indent=1) + "\n")
    if plot is not None:
        plot_collect(report, plot)
    emit(report, as_json=json, title="overhead of collecting", shown=shown_collect(report))
