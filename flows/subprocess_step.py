"""A pipeline step as its own process: watched, logged line by line, and gone when its parent is.

A trainer that shares its parent's stdout hides crashes: the parent is killed, the trainer dies
of a broken pipe or runs on alone, and the run's state is wrong either way. So a step writes to
files, has its own session (one signal ends it and its children), dies with its parent, and
counts as done only when it exited with 0 and wrote its result.
"""

import json
import logging
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from features.errors import DraftlakeError, GateRefusedError, InputError
from publish.processes import start_bound, stop_group

logger = logging.getLogger(__name__)

_TAIL_LINES = 20
_ERRORS = {error.exit_code: error for error in (DraftlakeError, InputError, GateRefusedError)}


def draftlake_program() -> str:
    """Path of this environment's ``draftlake`` command.

    Raises:
        DraftlakeError: the distribution is not installed here.
    """
    beside = Path(sysconfig.get_path("scripts")) / "draftlake"
    found = str(beside) if beside.is_file() else shutil.which("draftlake")
    if found is None:
        raise DraftlakeError(
            f"the `draftlake` command is neither at {beside} nor on PATH. "
            f"Install the distribution into the worker's environment: pip install 'draftlake[flows,train]'"
        )
    return found


def run_draftlake(arguments: Sequence[str], *, poll_s: float = 0.5) -> Any:
    """Run ``draftlake ARGUMENTS --json`` and return its result.

    Raises:
        DraftlakeError: it failed, was killed, or ended without a result. Usage errors and gate
            refusals come back as ``InputError`` and ``GateRefusedError``, as the command tells
            them apart by its exit code.
    """
    return run_json([draftlake_program(), *arguments, "--json"], poll_s=poll_s)


def run_json(argv: Sequence[str], *, poll_s: float = 0.5) -> Any:
    """Run a program that writes one JSON value to stdout; its stderr goes to our log as it comes.

    Raises:
        DraftlakeError: as for ``run_draftlake``.
    """
    with tempfile.TemporaryDirectory(prefix="draftlake-step-") as scratch:
        out, err = Path(scratch) / "stdout", Path(scratch) / "stderr"
        with out.open("wb") as out_file, err.open("wb") as err_file:
            # Without PYTHONSAFEPATH a folder beside the program could shadow one of our packages.
            process = start_bound(argv, stdout=out_file, stderr=err_file, env={"PYTHONSAFEPATH": "1"})
            logger.info("started %s as process %d", " ".join(argv), process.pid)
            try:
                _follow(process, err, poll_s)
            finally:
                stop_group(process)
        return _result(argv, process.returncode, out.read_text(errors="replace"), err)


def tail(path: Path, lines: int = _TAIL_LINES) -> str:
    """The last lines of a log, indented, for an error message."""
    text = path.read_text(errors="replace") if path.is_file() else ""
    return "\n".join(f"  {line}" for line in text.splitlines()[-lines:]) or "  (it wrote nothing)"


def _follow(process: subprocess.Popen[bytes], log: Path, poll_s: float) -> None:
    """Pass whole lines of a growing file to our log until the process ends."""
    with log.open("r", errors="replace") as stream:
        pending = ""
        while True:
            ended = process.poll() is not None  # asked before reading, so that no last line is missed
            *lines, pending = (pending + stream.read()).split("\n")
            for line in filter(str.strip, [*lines, pending] if ended else lines):
                logger.info("%s", line.rstrip())
            if ended:
                return
            time.sleep(poll_s)


def _result(argv: Sequence[str], code: int, stdout: str, log: Path) -> Any:
    name = " ".join([Path(argv[0]).name, *argv[1:]])
    if code < 0:
        how = signal.Signals(-code).name
        raise DraftlakeError(
            f"`{name}` was killed by {how} (out of memory, or stopped from outside); its last lines:\n"
            f"{tail(log)}\nRetry the run: it uses the same lake revision."
        )
    if code != 0:
        raise _ERRORS.get(code, DraftlakeError)(f"`{name}` exited with {code}; its last lines:\n{tail(log)}")
    try:
        return json.loads(stdout)
    except ValueError as error:
        raise DraftlakeError(
            f"`{name}` exited with 0 and wrote no JSON result (found {stdout[:200]!r}). "
            f"The command on the worker and this flow are of different versions; install the same one."
        ) from error
