"""The verbs are a contract: frozen, explained by an example, documented, and quick to start."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from pipelines.cli import build_app

REPO = Path(__file__).resolve().parents[2]
DRAFTLAKE = Path(sys.executable).with_name("draftlake")
VERBS = {
    "approve", "backfill", "bench collect", "bench lake", "collect", "compact", "demo", "doctor", "eval", "explain",
    "export", "flows up", "fsck", "gc", "import", "init", "ls", "publish", "quarantine ls", "quarantine retry",
    "quarantine show", "registry diff", "registry ls", "registry show", "reject",
    "retain", "rollback", "show", "status", "train",
}  # fmt: skip
ROOT: Any = typer.main.get_command(build_app())


def commands(group: Any = ROOT, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


COMMANDS = dict(commands())
every_command = pytest.mark.parametrize("verb", sorted(COMMANDS))


def example_of(verb: str) -> list[str]:
    """Arguments of the command's example, the program's own name left out."""
    epilog = COMMANDS[verb].epilog or ""
    assert epilog.startswith("Example: draftlake "), epilog
    return shlex.split(epilog.removeprefix("Example: "))[1:]


def documents() -> str:
    return "\n".join(
        path.read_text() for path in [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]
    )


def test_the_verbs_are_frozen() -> None:
    assert set(COMMANDS) == VERBS


@every_command
def test_a_command_says_what_it_does(verb: str) -> None:
    first_line = (COMMANDS[verb].help or "").strip().splitlines()[0]
    assert len(first_line) > 20, first_line


@every_command
def test_every_option_is_explained(verb: str) -> None:
    unexplained = [p.name for p in COMMANDS[verb].params if not getattr(p, "help", None)]
    assert unexplained == []


@every_command
def test_the_example_is_of_this_command_and_parses(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRAFTLAKE_LAKE", raising=False)
    words, command, context = example_of(verb), ROOT, None
    for name in verb.split():
        assert words.pop(0) == name
        command = command.commands[name]
    context = command.make_context(verb, words)  # raises on an unknown option or a missing argument
    assert context.params


@every_command
def test_a_command_gives_json(verb: str) -> None:
    options = {name for param in COMMANDS[verb].params for name in getattr(param, "opts", [])}
    assert "--json" in options


@pytest.mark.parametrize(
    "verb",
    [
        "approve",
        "backfill",
        "collect",
        "compact",
        "demo",
        "doctor",
        "export",
        "fsck",
        "gc",
        "publish",
        "quarantine retry",
        "retain",
        "rollback",
        "train",
    ],
)
def test_a_command_that_changes_much_can_be_asked_first(verb: str) -> None:
    options = {name for param in COMMANDS[verb].params for name in param.opts}
    assert "--dry-run" in options


@every_command
def test_a_command_is_documented(verb: str) -> None:
    assert re.search(rf"\bdraftlake {verb}\b", documents()), (
        f"README.md and docs/ never show: draftlake {verb}"
    )


def test_documents_show_no_command_that_does_not_exist() -> None:
    shown = re.findall(r"^\s*(?:\$ )?draftlake ([a-z][a-z ]*)", documents(), flags=re.MULTILINE)
    groups = {verb.split()[0] for verb in VERBS}
    assert {words.split()[0] for words in shown} <= groups


def test_help_starts_without_a_framework() -> None:
    script = (
        "import json, sys\n"
        "from pipelines.cli import main\n"
        "sys.argv = ['draftlake', '--help']\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    heavy = {"torch", "vllm", "prefect", "transformers", "accelerate", "zarr", "matplotlib", "httpx"}
    assert heavy & set(json.loads(done.stdout.splitlines()[-1])) == set()


def test_the_console_script_lists_every_verb() -> None:
    done = subprocess.run([str(DRAFTLAKE), "--help"], capture_output=True, text=True, timeout=60, check=True)
    listed = set(re.findall(r"^  ([a-z]+) ", done.stdout, flags=re.MULTILINE))
    assert {verb.split()[0] for verb in VERBS} <= listed
    assert done.stderr == ""
