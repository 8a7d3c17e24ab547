"""The ``draftlake`` command: thin, typed, honest about its exit code.

Exit codes: 0 done, 1 failed, 2 usage, 3 refused by a gate, 4 nothing to do. Results go to
stdout (``--json`` for machines), progress and errors to stderr.
"""

import importlib.metadata
import logging
import os
import sys

import typer

from features.errors import DraftlakeError
from pipelines.cli import demo, drafts, engines, lake

COMMAND_GROUP = "draftlake.commands"
"""Entry points here are Typer apps, mounted under their name."""


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
    for module in (demo, lake, drafts, engines):
        module.add_commands(app)
    for entry in sorted(importlib.metadata.entry_points(group=COMMAND_GROUP), key=lambda e: e.name):
        app.add_typer(entry.load(), name=entry.name)
    return app


def main() -> None:
    """Console-script entry: one clear line for what goes wrong on purpose, a traceback for a bug."""
    logging.basicConfig(level=os.environ.get("DRAFTLAKE_LOG", "WARNING"), stream=sys.stderr)
    try:
        build_app()()
    except DraftlakeError as error:
        print(f"draftlake: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
