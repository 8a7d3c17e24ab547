"""Collecting through a tap: version first, proof before data, killed and rerun without harm."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import collect_toy_target
import pytest
from collect_toy_target import IDENTITY, ToyTarget

from features.collect.report import CollectReport
from features.collect.rollouts import read_rollouts, write_rollouts
from features.collect.run import collect_rollouts
from features.collect.sampling import SamplingPolicy
from features.commits import decode_commit
from features.errors import ProofFailedError, VersionConflictError
from features.lake import Lake
from features.quarantine import list_quarantine
from features.schema import FeatureDtype
from features.writer import WRITE_STEPS

HERE = Path(__file__).parent
REPO = HERE.parents[2]
FRAGMENT_TOKENS = 40


def collect(lake: Lake, rollouts: Any, target: ToyTarget | None = None, **changes: Any) -> CollectReport:
    target = target or ToyTarget()
    settings: dict[str, Any] = {
        "model": target, "head": target.head, "record": target.record, "layer_ids": (1, 2),
        "dtype": FeatureDtype.BFLOAT16, "policy": SamplingPolicy(), "writer_id": "test",
        "tap": "collect_toy_target", "fragment_tokens": FRAGMENT_TOKENS, "batch_tokens": 32,
    }  # fmt: skip
    return collect_rollouts(lake, rollouts, **settings | changes)


def new_lake(tmp_path: Path) -> Lake:
    return Lake.init(str(tmp_path / "lake"), IDENTITY)


def windows(lake: Lake) -> list[tuple[Any, ...]]:
    """Identity and content of every visible window; reading checks each checksum."""
    rows = [r for p in lake.commit_paths() for r in decode_commit(lake.store.read(p), where=p).to_pylist()]
    return sorted(
        (r["sample_id"], r["start"], tuple(w.token_ids.tolist()), w.aux.tobytes(), w.final.tobytes())
        for r, w in ((r, lake.read_window(r)) for r in rows)
    )


def test_a_run_registers_the_version_and_collects(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    seen: list[int] = []
    report = collect(
        lake, [ToyTarget().rollout(n) for n in range(7)], progress=lambda r: seen.append(r.received)
    )
    assert (report.collected, report.verified) == (7, 7)
    assert lake.version(ToyTarget().record.version) == ToyTarget().record
    assert seen == sorted(seen)
    assert seen[-1] == 7


def test_batches_do_not_change_what_is_collected(tmp_path: Path) -> None:
    rollouts = [ToyTarget().rollout(n, response=4 + 3 * (n % 4)) for n in range(9)]
    lakes = []
    for batch_tokens in (1, 32, 10_000):
        (tmp_path / str(batch_tokens)).mkdir()
        lakes.append(new_lake(tmp_path / str(batch_tokens)))
        collect(lakes[-1], rollouts, batch_tokens=batch_tokens)
    assert windows(lakes[0]) == windows(lakes[1]) == windows(lakes[2])
    assert lakes[0].commit_paths() == lakes[2].commit_paths()


def test_refused_lines_of_a_file_end_in_quarantine_once(tmp_path: Path) -> None:
    lake, path = new_lake(tmp_path), tmp_path / "r.jsonl"
    write_rollouts(path, [ToyTarget().rollout(0), ToyTarget().rollout(1, version=None)])
    path.write_bytes(path.read_bytes() + b'{"cut": [NaN\n')
    for _ in range(2):
        report = collect(lake, read_rollouts(path))
        assert report.quarantined == {"version_missing": 1, "bad_json": 1}
        assert report.received == report.accounted == 3
    (run,) = list_quarantine(lake)
    assert run.counts == {"bad_json": 1, "version_missing": 1}


def test_a_head_of_other_weights_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    with pytest.raises(VersionConflictError, match="same weights as the features"):
        collect(lake, [ToyTarget().rollout(0)], head=ToyTarget(1).head)
    assert lake.store.list("") == ["lake.json"]


def test_weights_of_another_version_behind_a_right_head_are_refused_sample_by_sample(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    report = collect(lake, [ToyTarget().rollout(n) for n in range(4)], model=ToyTarget(1))
    assert report.quarantined == {"logprob_disagreement": 4}
    assert lake.commit_paths() == []


def test_a_version_number_never_names_two_heads(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    collect(lake, [ToyTarget().rollout(0)])
    other = ToyTarget(1)
    taken = replace(other.record, version=ToyTarget().record.version)
    with pytest.raises(VersionConflictError):
        collect(lake, [other.rollout(0, version=0)], target=other, record=taken)


def test_a_failed_aux_probe_leaves_the_lake_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(model: object, layer_ids: Sequence[int], token_ids: Sequence[int]) -> str:
        raise ProofFailedError("layer id 1 is off by one")

    lake = new_lake(tmp_path)
    monkeypatch.setattr(collect_toy_target, "aux_probe", failing)
    with pytest.raises(ProofFailedError):
        collect(lake, [ToyTarget().rollout(0)])
    assert lake.store.list("") == ["lake.json"]


def test_a_sequence_beyond_the_models_positions_is_refused(tmp_path: Path) -> None:
    class Short(ToyTarget):
        class config:  # noqa: N801 - as transformers names it
            max_position_embeddings = 15

    lake = new_lake(tmp_path)
    report = collect(lake, [ToyTarget().rollout(0), ToyTarget().rollout(1, response=13)], model=Short())
    assert report.quarantined == {"too_long": 1}
    assert report.collected == 1


KILLED = """
import os, signal, sys
from collect_toy_target import ToyTarget
from test_run import collect
from features.lake import Lake
steps = 0
def on_step(name):
    global steps
    steps += 1
    if steps == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
collect(Lake.open(sys.argv[1]), [ToyTarget().rollout(n) for n in range(7)], on_step=on_step)
"""
# 7 rollouts of 15 rows close fragments at 40 rows: 3 + 3 + 1 rollouts.
STEPS_PER_FRAGMENT = len(WRITE_STEPS)


@pytest.mark.parametrize("step", [1, STEPS_PER_FRAGMENT - 1, STEPS_PER_FRAGMENT, STEPS_PER_FRAGMENT + 3])
def test_killed_at_any_step_a_rerun_completes_with_the_same_windows(tmp_path: Path, step: int) -> None:
    rollouts = [ToyTarget().rollout(n) for n in range(7)]
    (tmp_path / "whole").mkdir()
    whole = new_lake(tmp_path / "whole")
    collect(whole, rollouts)
    lake = new_lake(tmp_path)
    process = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "lake"), str(step)],
        env=os.environ | {"PYTHONPATH": f"{REPO}:{HERE}"},
        capture_output=True,
        timeout=60,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    committed = 3 * (step // STEPS_PER_FRAGMENT)
    assert len(windows(lake)) == committed
    report = collect(Lake.open(lake.url), rollouts)
    assert (report.duplicates, report.collected) == (committed, 7 - committed)
    assert windows(lake) == windows(whole)
    assert lake.commit_paths() == whole.commit_paths()
