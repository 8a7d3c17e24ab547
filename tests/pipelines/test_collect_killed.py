"""``kill -9`` during ``draftlake collect``: nothing half-visible, and running again completes it."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command_outcome import Cli, collect_arguments

from features.catalog import Catalog
from features.check import check_lake
from features.lake import Lake

DRAFTLAKE = Path(sys.executable).with_name("draftlake")
FRAGMENT_ROWS = 64
"""Two rollouts to a fragment: twelve commits to be killed between, or within."""
FRAGMENTS = 12


def arguments(lake: Path, rollout_file: Path, target: Path) -> list[str]:
    return [*collect_arguments(lake, rollout_file, target), "--fragment-tokens", str(FRAGMENT_ROWS), "--json"]


def commits(lake: Path) -> list[str]:
    """Visible commits, as a listing from outside sees them."""
    return sorted(str(p.relative_to(lake)) for p in (lake / "commits").rglob("*.parquet"))


def windows(lake: Path) -> list[tuple[Any, ...]]:
    """Identity and content of every window; reading checks every checksum."""
    opened = Lake.open(str(lake))
    rows = Catalog.load(opened).frame.sort("sample_id").to_dicts()
    read = [opened.read_window(row) for row in rows]
    return [(w.meta.sample_id, w.token_ids.tobytes(), w.aux.tobytes(), w.final.tobytes()) for w in read]


def killed_while_writing(lake: Path, rollout_file: Path, target: Path, after: int, delay_s: float) -> int:
    """Start the command, kill it ``delay_s`` after it made its commit number ``after``; its exit code."""
    process = subprocess.Popen(
        [str(DRAFTLAKE), *arguments(lake, rollout_file, target)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    deadline = time.monotonic() + 300
    try:
        while process.poll() is None and len(commits(lake)) < after:
            assert time.monotonic() < deadline, "the command never began to write"
            time.sleep(0.0005 if (lake / "data").exists() else 0.02)  # leave the core to its start
        time.sleep(delay_s)
    finally:
        process.kill()
    return process.wait(timeout=30)


@pytest.mark.parametrize("attempt", range(2))
def test_a_killed_collection_shows_whole_fragments_only_and_is_completed_by_running_again(
    cli: Cli, empty_lake: Path, rollout_file: Path, target: Path, tmp_path: Path, attempt: int
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    chance = random.Random(seed)
    after, delay_s = chance.randrange(1, FRAGMENTS // 2), chance.uniform(0, 0.01)
    whole = Path(shutil.copytree(empty_lake, tmp_path / "whole"))
    assert cli(*arguments(whole, rollout_file, target)).code == 0
    assert len(commits(whole)) == FRAGMENTS

    code = killed_while_writing(empty_lake, rollout_file, target, after, delay_s)
    where = f"attempt {attempt}: killed {delay_s:.4f} s after commit {after} (seed {seed})"
    assert code == -signal.SIGKILL, f"{where}: it had ended before, with exit code {code}"

    seen = commits(empty_lake)
    assert 0 < len(seen) < FRAGMENTS, where
    (row,) = cli("ls", "--lake", empty_lake, "--json").json
    assert (row["windows"], row["verified"]) == (2 * len(seen), 2 * len(seen)), where
    assert set(windows(empty_lake)) < set(windows(whole)), where

    again = cli(*arguments(empty_lake, rollout_file, target))
    assert again.code == 0, again.err
    assert again.json["duplicates"] == 2 * len(seen), where
    assert again.json["fragments"] == FRAGMENTS - len(seen), where
    assert commits(empty_lake) == commits(whole), where
    assert windows(empty_lake) == windows(whole), where
    assert not [f for f in check_lake(Lake.open(str(empty_lake)), 2) if f.harmful], where
