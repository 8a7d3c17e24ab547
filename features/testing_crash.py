"""Kill a process at every step it takes in a store, and leave what it left for a test to judge.

A *step* on disk is a call of the store or, inside it, of the operating system's calls that change a
folder: so the sweep also dies between a temporary file and its link, or half-way through deleting a
prefix. A step on S3 is a request. One fresh process forks a child per step; it uses no client and
no thread itself, so that a child starts from a clean state.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
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
    """Tell ``hook`` every step of every local store, and every request of s3fs, from now on.

    For processes that are about to die.
    """
    for name in STORE_CALLS:
        if hasattr(storage.LocalStore, name):
            setattr(storage.LocalStore, name, _told(getattr(storage.LocalStore, name), name, hook))
    for name in DISK_CALLS:
        setattr(os, name, _told(getattr(os, name), f"os.{name}", hook))
    if "s3fs" in sys.modules:
        client = sys.modules["s3fs"].S3FileSystem
        client._call_s3 = _told_request(client._call_s3, hook)


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
    deaths = _swept({"prepare": prepare, "act": act, "place": str(folder), "every": every}, folder)
    return [(moment, Path(left)) for moment, left in deaths]


def kill_on_s3(
    prepare: str,
    act: str,
    url: str,
    options: Mapping[str, Any],
    scratch: Path,
    *,
    every: bool = False,
    most: int | None = None,
) -> list[tuple[str, str]]:
    """:func:`kill_everywhere` on S3, with a client that dies before or after one of its requests.

    Args:
        prepare: source text that makes a lake at ``url``, with the storage options ``options``.
        act: source text that is killed.
        url: place in a bucket that gets the copies.
        options: storage options that lead there; JSON.
        scratch: a local folder.
        every: before and after every request. Otherwise after each one that changes the bucket.
        most: at so many of these moments, spread over them all.

    Returns:
        Moments (``before put_object`` and so on) with the url of the lake that dying there left.

    Raises:
        RuntimeError: as :func:`kill_everywhere`.
    """
    wanted = {"prepare": prepare, "act": act, "place": url, "options": dict(options), "every": every}
    return _swept({**wanted, "most": most}, scratch)


def sweep() -> None:
    """Body of the process that does the killing: request on stdin, moments on stdout."""
    request = json.loads(sys.stdin.read())
    place, options = request["place"], request.get("options", {})
    # Once, for all children: importing starts no thread.
    for module in ("features.catalog", "features.compaction", "features.gc", "features.testing"):
        import_module(module)
    if options:
        import_module("s3fs")
    template = f"{place}/template"
    prepare, act = (compile(request[name], name, "exec") for name in ("prepare", "act"))
    _require(_forked(lambda: _run(prepare, template, options)), 0)
    counted = Path(request["counted"])
    unharmed = f"{place}/unharmed"
    _require(_forked(lambda: _count(act, _copy(template, unharmed, options), options, counted)), 0)
    moments = json.loads(counted.read_text())
    chosen = [
        index
        for index, moment in enumerate(moments)
        if request["every"] or index in (0, len(moments) - 1) or _shows_a_change(moment)
    ]
    killed = []
    for index in _spread(chosen, request.get("most")):
        url = f"{place}/{index:04d}"
        died = _forked(lambda i=index, u=url: _die_at(act, _copy(template, u, options), options, i))  # type: ignore[misc]
        _require(died, -signal.SIGKILL)
        killed.append((moments[index], url))
    sys.stdout.write(json.dumps(killed))


def _swept(request: dict[str, Any], scratch: Path) -> list[tuple[str, str]]:
    root = str(Path(__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, "-c", "from features.testing_crash import sweep; sweep()"],
        input=json.dumps({**request, "counted": str(scratch / "moments.json")}),
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": root, "PYTHONSAFEPATH": "1"},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the sweep failed: {done.stderr[-3000:]}")
    return [(moment, left) for moment, left in json.loads(done.stdout)]


def _shows_a_change(moment: str) -> bool:
    when, _, name = moment.partition(" ")
    if name.startswith("os."):
        # A file's bytes are written just before its fsync; the other calls change names.
        return when == ("before" if name == "os.fsync" else "after")
    return when == "after" and name.startswith(("put_", "delete_"))


def _spread(indices: list[int], most: int | None) -> list[int]:
    if most is None or len(indices) <= most:
        return indices
    return [indices[round(n * (len(indices) - 1) / (most - 1))] for n in range(most)]


def _told(call: Callable[..., Any], name: str, hook: Hook) -> Callable[..., Any]:
    def told(*arguments: Any, **named: Any) -> Any:
        hook(f"before {name}")
        result = call(*arguments, **named)
        hook(f"after {name}")
        return result

    return told


def _told_request(call: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    async def told(filesystem: Any, method: str, *arguments: Any, **named: Any) -> Any:
        hook(f"before {method}")
        try:
            return await call(filesystem, method, *arguments, **named)
        finally:
            hook(f"after {method}")

    return told


def _run(code: Any, url: str, options: Mapping[str, Any]) -> None:
    exec(code, {"url": url, "options": options})


def _count(code: Any, url: str, options: Mapping[str, Any], report: Path) -> None:
    moments: list[str] = []
    watch_steps(moments.append)
    _run(code, url, options)
    report.write_text(json.dumps(list(moments)))


def _die_at(code: Any, url: str, options: Mapping[str, Any], index: int) -> None:
    passed = 0

    def hook(_moment: str) -> None:
        nonlocal passed
        if passed == index:
            os.kill(os.getpid(), signal.SIGKILL)
        passed += 1

    watch_steps(hook)
    _run(code, url, options)


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


def _copy(template: str, copy: str, options: Mapping[str, Any]) -> str:
    """A store with the objects of another, made by the child that is to die in it."""
    if options:
        source, target = (storage.Store.open(url, **options) for url in (template, copy))
        for path in source.list(""):
            target.create(path, source.read(path))
    else:
        shutil.copytree(template, copy)
    return copy
