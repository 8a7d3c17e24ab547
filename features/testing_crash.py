"""Kill a process at every step it takes on disk, and leave what it left for a test to judge.

A *step* is a call of the store or, inside it, of the operating system's calls that change a folder:
so the sweep also dies between a temporary file and its link, or half-way through deleting a prefix.
One fresh process imports everything and forks a child per step; it uses no client and no thread
itself, so that a child starts from a clean state.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from features import storage

STORE_CALLS = (
    "create", "read", "read_range", "read_into", "exists", "size", "list", "scan", "delete", "delete_prefix",
)  # fmt: skip
"""Operations of a store; a kind of store that lacks one is not asked for it."""
DISK_CALLS = ("mkdir", "link", "fsync", "unlink", "rmdir")
"""Calls of ``os`` that change what a local store holds."""

_TIMEOUT_S = 60

Hook = Callable[[str], None]
"""Told ``before NAME`` and ``after NAME`` of every step."""


def watch_steps(hook: Hook) -> None:
    """Tell ``hook`` every step of every local store from now on. For processes that are about to die."""
    for name in STORE_CALLS:
        if hasattr(storage.LocalStore, name):
            setattr(storage.LocalStore, name, _told(getattr(storage.LocalStore, name), name, hook))
    for name in DISK_CALLS:
        setattr(os, name, _told(getattr(os, name), f"os.{name}", hook))


def kill_everywhere(prepare: str, act: str, folder: Path, *, every: bool = False) -> list[tuple[str, Path]]:
    """Run ``act`` on copies of what ``prepare`` made, killed at another moment in each.

    Args:
        prepare: source text that makes a lake at ``url``.
        act: source text that is killed; it starts in a process that has done nothing to ``url``.
        folder: gets the copies.
        every: die before and after every single step. Otherwise once for each state that the folder
            passes through: between two changes of the disk, all moments leave the same behind.

    Returns:
        Moments (``before create`` and so on) with the folder that dying there left.

    Raises:
        RuntimeError: ``prepare`` or an unharmed ``act`` failed, or a child did not die as it should.
    """
    request = json.dumps({"prepare": prepare, "act": act, "folder": str(folder), "every": every})
    root = str(Path(__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, "-c", "from features.testing_crash import sweep; sweep()"],
        input=request, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": root, "PYTHONSAFEPATH": "1"},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the sweep failed: {done.stderr[-3000:]}")
    return [(moment, Path(left)) for moment, left in json.loads(done.stdout)]


def sweep() -> None:
    """Body of the process that :func:`kill_everywhere` starts: request on stdin, moments on stdout."""
    request = json.loads(sys.stdin.read())
    folder = Path(request["folder"])
    template = folder / "template"
    prepare, act = (compile(request[name], name, "exec") for name in ("prepare", "act"))
    _require(_forked(lambda: _run(prepare, template)), 0)
    counted = folder / "moments.json"
    _require(_forked(lambda: _count(act, _copy(template, folder / "unharmed"), counted)), 0)
    killed = []
    moments = json.loads(counted.read_text())
    for index, moment in enumerate(moments):
        if request["every"] or index in (0, len(moments) - 1) or _shows_a_change(moment):
            copy = _copy(template, folder / f"{index:04d}")
            _require(_forked(lambda index=index, copy=copy: _die_at(act, copy, index)), -signal.SIGKILL)  # type: ignore[misc]
            killed.append((moment, str(copy)))
    sys.stdout.write(json.dumps(killed))


def _shows_a_change(moment: str) -> bool:
    # A file's bytes are written just before its fsync; the other calls change names.
    return moment == "before os.fsync" or (moment.startswith("after os.") and moment != "after os.fsync")


def _told(call: Callable[..., Any], name: str, hook: Hook) -> Callable[..., Any]:
    def told(*arguments: Any, **named: Any) -> Any:
        hook(f"before {name}")
        result = call(*arguments, **named)
        hook(f"after {name}")
        return result

    return told


def _run(code: Any, lake: Path) -> None:
    exec(code, {"url": str(lake)})


def _count(code: Any, lake: Path, report: Path) -> None:
    moments: list[str] = []
    watch_steps(moments.append)
    _run(code, lake)
    report.write_text(json.dumps(list(moments)))


def _die_at(code: Any, lake: Path, index: int) -> None:
    passed = 0

    def hook(_moment: str) -> None:
        nonlocal passed
        if passed == index:
            os.kill(os.getpid(), signal.SIGKILL)
        passed += 1

    watch_steps(hook)
    _run(code, lake)


def _forked(body: Callable[[], None]) -> int:
    """Run ``body`` in a child; its exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        signal.alarm(_TIMEOUT_S)
        status = 1
        try:
            body()
            status = 0
        finally:
            sys.stderr.flush()
            if status:
                import traceback

                traceback.print_exc()
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _require(status: int, expected: int) -> None:
    if status != expected:
        raise RuntimeError(f"a child of the sweep ended with {status}, expected {expected}")


def _copy(template: Path, copy: Path) -> Path:
    shutil.copytree(template, copy)
    return copy
