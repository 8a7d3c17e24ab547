"""A step that runs as its own process."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from features.errors import DraftlakeError, GateRefusedError, InputError
from flows import subprocess_step
from flows.subprocess_step import run_draftlake, run_json

REPO = Path(subprocess_step.__file__).parents[1]


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def wait_until(true, *, timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.05)
    return False


def is_running(pid: int) -> bool:
    """True for a live process; a zombie that nobody reaped yet has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_step_returns_the_json_on_its_stdout_and_logs_its_stderr(caplog: pytest.LogCaptureFixture) -> None:
    code = "import sys; print('epoch 1', file=sys.stderr); sys.stderr.write('last'); print('{\"steps\": 3}')"
    with caplog.at_level(logging.INFO, logger="flows"):
        assert run_json(python(code), poll_s=0.05) == {"steps": 3}
    assert {"epoch 1", "last"} <= {record.getMessage() for record in caplog.records}


@pytest.mark.parametrize(
    ("code", "error"), [(1, DraftlakeError), (2, InputError), (3, GateRefusedError), (9, DraftlakeError)]
)
def test_a_failed_step_raises_what_its_exit_code_means_with_its_last_lines(
    code: int, error: type[DraftlakeError]
) -> None:
    with pytest.raises(error, match="no lake at /nowhere") as caught:
        run_json(
            python(f"import sys; print('no lake at /nowhere', file=sys.stderr); sys.exit({code})"),
            poll_s=0.05,
        )
    assert type(caught.value) is error
    assert f"exited with {code}" in str(caught.value)


def test_a_killed_step_says_by_which_signal() -> None:
    with pytest.raises(DraftlakeError, match="killed by SIGKILL"):
        run_json(python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), poll_s=0.05)


def test_a_step_that_exits_with_0_and_no_result_has_failed() -> None:
    with pytest.raises(DraftlakeError, match="no JSON result"):
        run_json(python("print('done!')"), poll_s=0.05)


def test_a_step_runs_in_its_own_session_with_a_safe_path() -> None:
    code = (
        "import json, os, sys\n"
        "leader = os.getsid(0) == os.getpid()\n"
        "print(json.dumps({'leader': leader, 'safe': sys.flags.safe_path, 'stdin': sys.stdin.read()}))"
    )
    assert run_json(python(code), poll_s=0.05) == {"leader": True, "safe": True, "stdin": ""}


def test_what_a_step_leaves_running_ends_with_it() -> None:
    code = (
        "import json, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], stdout=subprocess.DEVNULL)\n"
        "print(json.dumps(child.pid))"
    )
    child = run_json(python(code), poll_s=0.05)
    assert wait_until(lambda: not is_running(child))


@pytest.fixture
def parent_and_step(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """A process that waits for a step, and the step's pid; neither would end by itself for a minute."""
    pid_file = tmp_path / "pid"
    step = f"import os, pathlib, time; pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid())); time.sleep(60)"
    parent = subprocess.Popen(
        python(f"from flows.subprocess_step import run_json; run_json([{sys.executable!r}, '-c', {step!r}])"),
        env=os.environ | {"PYTHONPATH": str(REPO)},
        stderr=subprocess.DEVNULL,
    )
    try:
        assert wait_until(lambda: pid_file.exists() and pid_file.read_text() != "", timeout_s=30)
        yield parent, int(pid_file.read_text())
    finally:
        parent.kill()
        parent.wait(10)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux")
@pytest.mark.parametrize(
    ("sent", "later_s"), [(signal.SIGKILL, 10.0), (signal.SIGINT, 0.0)], ids=["killed", "interrupted"]
)
def test_a_step_ends_with_its_parent_and_before_one_that_could_wait_for_it(
    parent_and_step: tuple["subprocess.Popen[bytes]", int], sent: signal.Signals, later_s: float
) -> None:
    parent, step = parent_and_step
    assert is_running(step)
    parent.send_signal(sent)
    parent.wait(20)
    assert not is_running(step) or wait_until(lambda: not is_running(step), timeout_s=later_s)


def test_a_missing_command_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(subprocess_step.sysconfig, "get_path", lambda _name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DraftlakeError, match="pip install"):
        run_draftlake(["train"])
