"""``draftlake flows``: the Prefect side of the command. Prefect is imported when a command runs."""

import importlib.util
import json as jsonlib
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from features.errors import InputError
from pipelines.context import LAKE_VARIABLE

if TYPE_CHECKING:
    from flows.local_stack import LocalStack

app = typer.Typer(help="Run the flows with Prefect.", no_args_is_help=True)


@app.callback()
def flows() -> None:
    """Run the flows with Prefect."""


@app.command(epilog="Example: draftlake flows up --lake ./lake")
def up(
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of the server, on this machine only.")
    ] = 4200,
    lake: Annotated[
        str | None, typer.Option("--lake", envvar=LAKE_VARIABLE, help="Lake of runs that name none.")
    ] = None,
    logs: Annotated[
        Path | None, typer.Option(help="Folder for the logs; default: in Prefect's home.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON value on stdout once it is up.")] = False,
) -> None:
    """Start a Prefect server with the deployments and a worker; Ctrl-C stops them."""
    require_prefect()
    from flows.local_stack import local_stack

    signal.signal(signal.SIGTERM, _interrupt)  # a supervisor's stop is as orderly as Ctrl-C
    folder = logs or Path(os.environ.get("PREFECT_HOME", Path.home() / ".prefect")) / "draftlake"
    try:
        with local_stack(port, lake=lake, logs=folder, say=_say) as stack:
            _announce(stack, as_json=json, logs=folder, lake=lake)
            while True:
                stack.require_alive()
                time.sleep(1)
    except KeyboardInterrupt:
        _say("stopped")


def require_prefect() -> None:
    """Refuse in one line where the extra is not installed.

    Raises:
        InputError: Prefect is missing.
    """
    if importlib.util.find_spec("prefect") is None:
        raise InputError("Prefect is not installed in this environment. Run: pip install 'draftlake[flows]'")


def _announce(stack: "LocalStack", *, as_json: bool, logs: Path, lake: str | None) -> None:
    from flows.local_stack import DEPLOYMENT, POOL

    ui_url = stack.api_url.removesuffix("/api")
    if as_json:
        ready = {"api_url": stack.api_url, "ui_url": ui_url, "deployment": DEPLOYMENT, "work_pool": POOL}
        sys.stdout.write(jsonlib.dumps(ready | {"logs": str(logs)}) + "\n")
        sys.stdout.flush()
        return
    where = "" if lake else " -p lake=/PATH/TO/LAKE"
    _say(f"up: {ui_url} (logs in {logs}). Ctrl-C stops it. In another terminal:")
    _say(f"  export PREFECT_API_URL={stack.api_url}")
    _say(f"  prefect deployment run '{DEPLOYMENT}'{where} -p first_version=0 -p stop_version=2 --watch")


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _say(message: str) -> None:
    typer.echo(message, err=True)
