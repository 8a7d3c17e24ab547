"""Children end with their parent, and a whole group is ended at once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from publish.processes import start_bound, stop_group

PARENT = """
import signal, sys, time
from publish.processes import start_bound
child = start_bound([sys.executable, "-c", "import time; time.sleep(60)"], stdout=sys.stdout.buffer,
                    stderr=sys.stderr.buffer, death_signal=signal.SIGTERM)
print(child.pid, flush=True)
time.sleep(60)
"""


def alive(pid: int) -> bool:
    """Whether the process runs (one that only waits to be reaped does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_dead(pid: int, *, limit_s: float = 20.0) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and alive(pid):
        time.sleep(0.05)
    return not alive(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="the binding is Linux's")
def test_a_bound_child_ends_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert wait_until_dead(child)


def test_stopping_a_group_ends_a_leader_that_ignores_the_request_and_its_children(tmp_path: Path) -> None:
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        "print(child.pid, flush=True); time.sleep(60)"
    )
    out = tmp_path / "out"
    with out.open("wb") as log:
        process = start_bound([sys.executable, "-c", code], stdout=log, stderr=log)
    while not out.read_text().strip():
        time.sleep(0.05)
    stop_group(process, grace_s=0.5)
    assert process.returncode == -signal.SIGKILL
    assert wait_until_dead(int(out.read_text()))
