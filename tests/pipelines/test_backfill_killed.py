"""A backfill killed at any moment and run again ends with what an undisturbed one ends with."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import backfill_toy
import pytest
from backfill_toy import make_lake, run, write_source
from command_outcome import Cli

from features.check import check_lake
from features.collect.rollouts import Rollout, write_rollouts
from features.content import content_digest
from features.lake import Lake
from features.quarantine import list_quarantine
from pipelines.start import init_lake

HERE = Path(__file__).parent
SOAK = "DRAFTLAKE_SOAK" in os.environ
MOMENTS = None if SOAK else 30
"""Of some hundred states that the disk passes through, spread over them all."""
PRELOAD = f"import sys; sys.path.insert(0, {str(HERE)!r}); import backfill_toy; backfill_toy.use_toy_target()"
PREPARE = "import backfill_toy; backfill_toy.make_lake(url)"


def refusals(lake: Lake) -> list[tuple[str, int | None, str]]:
    return sorted((r.source, r.line, r.reason) for part in list_quarantine(lake) for r in part.refusals)


def sources(folder: Path) -> list[Path]:
    folder.mkdir()
    per_file, files = (8, 3) if SOAK else (3, 2)
    return [
        write_source(folder / f"{n}.jsonl", range(n * per_file, (n + 1) * per_file)) for n in range(files)
    ]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    backfill_toy.use_toy_target(monkeypatch.setattr)


def kill_at_many_steps(act: str, folder: Path) -> list[tuple[str, str]]:
    """As ``kill_everywhere``; the process that forks has imported the pipeline, so a death costs little."""
    request = {
        "prepare": PREPARE, "act": act, "place": str(folder), "every": False, "most": MOMENTS,
        "counted": str(folder / "moments.json"),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", f"{PRELOAD}\nfrom features.testing_crash import sweep; sweep()"],
        input=json.dumps(request), capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1]), "PYTHONSAFEPATH": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [(moment, left) for moment, left in json.loads(done.stdout)]


def test_killed_at_every_step_on_disk_and_run_again_it_is_the_same_lake(toy: None, tmp_path: Path) -> None:
    files = sources(tmp_path / "sources")
    whole = make_lake(str(tmp_path / "whole"))
    expected = run(whole.url, *files)
    assert expected.fragments >= len(files), "there are commits to be killed between"
    act = f"import backfill_toy; backfill_toy.run(url, *{[str(f) for f in files]!r})"
    (tmp_path / "killed").mkdir()
    deaths = kill_at_many_steps(act, tmp_path / "killed")
    assert len(deaths) > 20
    seen = set()
    for moment, folder in deaths:
        lake = Lake.open(folder)
        seen.add(len(lake.commit_paths()))
        report = run(lake.url, *files)
        assert report.content_digest == expected.content_digest == content_digest(lake), moment
        assert lake.commit_paths() == whole.commit_paths(), moment
        assert refusals(lake) == refusals(whole), moment
        assert report.rows_read == report.accounted == expected.rows_read, moment
        assert report.quarantined == expected.quarantined, moment
        assert not [finding for finding in check_lake(lake, 2) if finding.harmful], moment
    assert seen == set(range(len(whole.commit_paths()) + 1)), "it died between any two commits"


@pytest.mark.slow
@pytest.mark.skipif(not SOAK, reason="loads the target in five processes; part of `make soak`")
def test_two_workers_end_with_their_parent_and_are_completed_by_one(
    cli: Cli, target: Path, rollouts: list[Rollout], tmp_path: Path
) -> None:
    files = []
    for n in range(4):
        files.append(tmp_path / f"{n}.jsonl")
        write_rollouts(files[-1], rollouts[6 * n : 6 * n + 6])
    lakes = {name: tmp_path / name for name in ("whole", "killed")}
    arguments = {}
    for name, lake in lakes.items():
        init_lake(str(lake), target=target, target_id="tiny")
        arguments[name] = [
            "backfill", *map(str, files), "--lake", str(lake), "--target", str(target), "--version", "0",
            "--dtype", "float32", "--engine-dtype", "float32", "--fragment-tokens", "64", "--json",
        ]  # fmt: skip
    expected = cli(*arguments["whole"]).json

    program = [str(Path(sys.executable).with_name("draftlake")), *arguments["killed"], "--workers", "2"]
    process = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while process.poll() is None and not list((lakes["killed"] / "commits").rglob("*.parquet")):
        assert time.monotonic() < deadline, "it never began to write"
        time.sleep(0.01)
    workers = children_of(process.pid)
    process.kill()
    assert process.wait(30) == -signal.SIGKILL, "it had ended before"
    assert len(workers) >= 2
    while any(is_running(worker) for worker in workers):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.1)

    completed = cli(*arguments["killed"])
    assert completed.code in (0, 4), completed.err
    assert completed.json["content_digest"] == expected["content_digest"]
    assert Lake.open(str(lakes["killed"])).commit_paths() == Lake.open(str(lakes["whole"])).commit_paths()


def children_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            if (entry / "stat").read_text().rsplit(")", 1)[1].split()[1] == str(pid):
                found.append(int(entry.name))
    return found


def is_running(pid: int) -> bool:
    """True for a live process; a zombie that nobody reaped yet has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
