"""What a command did, and what a test asks of it."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """What a command did: its exit code and both streams."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Stdout as the one JSON value it must be."""
        return json.loads(self.out)

    @property
    def line(self) -> str:
        """Stderr as the one line it must be; stdout empty, and no traceback."""
        assert self.out == "", self.out
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("draftlake: "), self.err
        return lines[0]


Cli = Callable[..., Outcome]
"""Runs ``draftlake`` with the given arguments."""


def objects(lake: Path) -> dict[str, int]:
    """Every file under a lake with its size: what a command that failed may not change."""
    return {str(p.relative_to(lake)): p.stat().st_size for p in sorted(lake.rglob("*")) if p.is_file()}


def collect_arguments(lake: Path, rollout_file: Path, target: Path, version: int = 0) -> list[str]:
    """``draftlake collect`` of float32 features, held against float32 logprobs."""
    named = {"--lake": lake, "--target": target, "--version": version}
    argv = ["collect", str(rollout_file), "--dtype", "float32", "--engine-dtype", "float32"]
    return argv + [str(part) for pair in named.items() for part in pair]
