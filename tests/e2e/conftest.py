"""One real demo for all end-to-end tests: a real vLLM server, real training, a real swap."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

DRAFTLAKE = Path(sys.executable).with_name("draftlake")


@dataclass(frozen=True)
class Demo:
    """A finished demo: its folder and the JSON object it ended with."""

    out: Path
    result: dict[str, Any]
    stdout: str

    @property
    def lake(self) -> str:
        return str(self.out / "lake")


def run_cli(*argv: str, timeout_s: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the console script as a user would, from a folder that is not the repository."""
    return subprocess.run(
        [str(DRAFTLAKE), *argv],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd="/",
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        check=False,
    )


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    out = tmp_path_factory.mktemp("demo") / "out"
    done = run_cli("demo", "--out", str(out), "--json", timeout_s=1200)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr[-4000:]}"
    return Demo(out=out, result=json.loads(done.stdout.splitlines()[-1]), stdout=done.stdout)


@pytest.fixture(scope="session")
def cli() -> Callable[..., subprocess.CompletedProcess[str]]:
    return run_cli
