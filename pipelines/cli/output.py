"""How commands speak: options they share, tables for people, JSON for machines."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from pipelines.context import RunContext
from pipelines.progress import OnConsole

NOTHING_TO_DO = 4

LakeOption = Annotated[str, typer.Option("--lake", envvar="DRAFTLAKE_LAKE", help="Lake folder or URL.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON value on stdout.")]
EngineOption = Annotated[
    list[str], typer.Option("--engine", help="vLLM server, http://HOST:PORT; repeat for a fleet.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would happen; change nothing.")]
FirstVersionOption = Annotated[int, typer.Option(min=0, help="First target version.")]
StopVersionOption = Annotated[int, typer.Option(min=1, help="Stop before this target version.")]


def console_context() -> RunContext:
    """The context of a command at a terminal."""
    return RunContext(progress=OnConsole())


def plain(value: Any) -> Any:
    """A report as JSON-ready Python."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value


def emit(value: Any, *, as_json: bool, title: str = "") -> None:
    """Print a report: a JSON value, or a table of rows, or a table of key and value."""
    value = plain(value)
    if as_json:
        sys.stdout.write(json.dumps(value, default=str) + "\n")
        return
    console = Console()
    if isinstance(value, Sequence) and not isinstance(value, str):
        console.print(_rows(value, title) if value else f"{title or 'result'}: none")
    elif isinstance(value, Mapping):
        console.print(_pairs(value, title))
    else:
        console.print(value)


def _rows(rows: Sequence[Any], title: str) -> Table:
    dicts = [plain(row) for row in rows]
    table = Table(title=title or None)
    for name in dicts[0]:
        table.add_column(name)
    for row in dicts:
        table.add_row(*(_cell(v) for v in row.values()))
    return table


def _pairs(pairs: Mapping[str, Any], title: str) -> Table:
    table = Table(title=title or None, show_header=False)
    table.add_column("what")
    table.add_column("value", overflow="fold")
    for name, value in pairs.items():
        table.add_row(name, _cell(value))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping | list | tuple):
        return (
            json.dumps(value, default=str, indent=1)
            if isinstance(value, Mapping)
            else ", ".join(map(_cell, value))
        )
    return "-" if value is None else str(value)
