"""The ``draftlake`` command: thin, typed, honest about its exit code.

Exit codes: 0 done, 1 failed, 2 usage, 3 refused by a gate or ended by a quota, 4 nothing to do, 130 interrupted.
Results go to stdout (``--json`` for machines), progress and errors to stderr.
"""

import importlib.metadata
import logging
import os
import signal
import sys

import typer

from features.errors import DraftlakeError, GateRefusedError
from features.s3_access import StoreAccessError
from pipelines.cli import (
    backfill,
    bench,
    demo,
    drafts,
    engines,
    export,
    housekeeping,
    lake,
    maintain,
    quarantine,
)

COMMAND_GROUP = "draftlake.commands"
"""Entry points here are Typer apps, mounted under their name."""
LOG_VARIABLE = "DRAFTLAKE_LOG"
"""Level of the log on stderr; ``DEBUG`` also shows where an expected error came from."""

_STORAGE_CLIENTS = ("aiobotocore", "aiohttp", "asyncio", "botocore", "fsspec", "s3fs", "urllib3")
"""Their debug logs hold requests' headers and bodies, so session tokens and data, and nothing of ours."""

logger = logging.getLogger(__name__)


def build_app() -> typer.Typer:
    """The whole command, other packages' groups included."""
    app = typer.Typer(
        name="draftlake",
        help="Keep speculative-decoding drafts fresh: collect, train, evaluate, approve, swap.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
        rich_markup_mode=None,
    )
    for module in (demo, lake, backfill, quarantine, maintain, housekeeping, bench, export, drafts, engines):
        module.add_commands(app)
    for entry in sorted(importlib.metadata.entry_points(group=COMMAND_GROUP), key=lambda e: e.name):
        app.add_typer(entry.load(), name=entry.name)
    return app


def main() -> None:
    """Console-script entry: one clear line for what goes wrong on purpose, a traceback for a bug."""
    _start_log()
    # An ended command closes what it opened: servers it started, temporary folders.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        build_app()()
    except DraftlakeError as error:
        _fail(_message(error), error.exit_code)
    except StoreAccessError as error:
        _fail(str(error), DraftlakeError.exit_code)
    except OSError as error:
        _fail(
            f"a file could not be read or written: {error}. Check the path, its permissions and free space.",
            DraftlakeError.exit_code,
        )


def _message(error: DraftlakeError) -> str:
    """One line, also where it quotes another library's several; a gate's reasons keep a line each."""
    return str(error) if isinstance(error, GateRefusedError) else " ".join(str(error).split())


def _fail(message: str, exit_code: int) -> None:
    logger.debug("where the error came from", exc_info=True)
    print(f"draftlake: {message}", file=sys.stderr)
    sys.exit(exit_code)


def _start_log() -> None:
    name = os.environ.get(LOG_VARIABLE, "WARNING").upper()
    known = name in logging.getLevelNamesMapping()
    logging.basicConfig(level=name if known else "WARNING", stream=sys.stderr)
    for client in _STORAGE_CLIENTS:
        logging.getLogger(client).setLevel(logging.WARNING)
    if not known:
        logger.warning("%s=%s is no log level; WARNING is used", LOG_VARIABLE, name)
