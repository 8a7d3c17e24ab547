"""Child processes that end when their parent does, and whose whole family can be ended at once."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO

from publish import die_with_parent

STOP_GRACE_S = 10.0
"""How long a group may take to end after it was asked to, before it is killed."""


def start_bound(
    argv: Sequence[str],
    *,
    stdout: IO[bytes],
    stderr: IO[bytes],
    death_signal: signal.Signals = signal.SIGKILL,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a program in its own session; the kernel signals it when this thread's process dies."""
    launcher = [sys.executable, "-I", die_with_parent.__file__, str(os.getpid()), str(int(death_signal))]
    return subprocess.Popen(
        [*launcher, *argv],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        env={**os.environ, **(env or {})},
    )


def stop_group(process: subprocess.Popen[bytes], *, grace_s: float = STOP_GRACE_S) -> None:
    """End a session started by ``start_bound``: asked first, then killed with all its children.

    The group outlives its leader when a child hangs, so it is signalled and awaited as a group.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not _signal_group(process.pid, number):
            break
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and _signal_group(process.pid, 0):
            process.poll()
            time.sleep(0.05)
    process.wait()


def _signal_group(group: int, number: int) -> bool:
    """Signal a process group; False when it has no member left."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True
