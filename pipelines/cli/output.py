"""How commands speak: options they share, tables for people, JSON for machines."""

import getpass
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel, ValidationError
from rich.console import Console

from features.errors import InputError
from features.schema import TargetVersion
from pipelines.cli.tables import tables
from pipelines.context import LAKE_VARIABLE, RunContext
from pipelines.progress import OnConsole

NOTHING_TO_DO = 4

SpecType = TypeVar("SpecType", bound=BaseModel)


def current_user() -> str:
    """Who runs this; a user id where the machine has no name for it, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return f"uid-{os.getuid()}"


def _stated(value: str) -> str:
    if not value.strip():
        raise typer.BadParameter("must say something: it is kept as evidence")
    return value


LakeOption = Annotated[str, typer.Option("--lake", envvar=LAKE_VARIABLE, help="Lake folder or URL.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON value on stdout.")]
EngineOption = Annotated[
    list[str], typer.Option("--engine", help="vLLM server, http://HOST:PORT; repeat for a fleet.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would happen; change nothing.")]
FirstVersionOption = Annotated[int, typer.Option(min=0, help="First target version.")]
StopVersionOption = Annotated[int, typer.Option(min=1, help="Stop before this target version.")]
ReasonOption = Annotated[str, typer.Option(help="Why.", callback=_stated)]
ReviewerOption = Annotated[str, typer.Option(help="Who decides.", default_factory=current_user)]


def console_context() -> RunContext:
    """The context of a command at a terminal."""
    return RunContext(progress=OnConsole())


def parse_spec(spec: type[SpecType], values: Mapping[str, Any], *, where: str) -> SpecType:
    """Build a spec from what a user wrote.

    Raises:
        InputError: naming every field that does not fit, in one line.
    """
    try:
        return spec.model_validate(dict(values))
    except ValidationError as error:
        problems = "; ".join(_problem(detail) for detail in error.errors(include_url=False))
        raise InputError(f"{where}: {problems}. Correct it and run again.") from error


def json_object(text: str, *, option: str) -> dict[str, Any]:
    """An option's JSON object.

    Raises:
        InputError: it is no JSON object.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InputError(
            f"{option} is no JSON ({error}): found {text!r}, expected an object in braces"
        ) from error
    if not isinstance(value, dict):
        raise InputError(f"{option} must be a JSON object in braces, found {text!r}")
    return value


def _problem(detail: Any) -> str:
    place = ".".join(str(part) for part in detail["loc"])
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        return f"there is no field {place!r}"
    return f"{place or 'value'}: {message} (found {detail['input']!r})" if place else message


def default_of(spec: type[BaseModel], field: str) -> Any:
    """A spec's own default, so that an option states it and does not repeat it."""
    return spec.model_fields[field].default


def plain(value: Any) -> Any:
    """A report as JSON-ready Python; a number that JSON cannot say becomes null."""
    if isinstance(value, BaseModel):
        return plain(value.model_dump(mode="json"))
    if isinstance(value, TargetVersion):
        return value.number
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def emit(value: Any, *, as_json: bool, title: str = "", shown: Any = None) -> None:
    """Print a report to stdout: one JSON value, or tables.

    Args:
        value: the whole report.
        title: a line above the tables.
        shown: what people see instead of the whole report.
    """
    if as_json:
        sys.stdout.write(json.dumps(plain(value), default=str, allow_nan=False) + "\n")
        return
    console = Console()
    for part in tables(plain(value if shown is None else shown), title):
        console.print(part)
