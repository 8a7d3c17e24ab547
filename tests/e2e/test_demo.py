"""What the demo claims, and the same steps as commands on its lake."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from features.collect.rollouts import Rollout, read_rollouts

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

Cli = Callable[..., subprocess.CompletedProcess[str]]


def test_published_draft_is_measured_better_on_the_live_engine(demo: Any) -> None:
    low, high = demo.result["tau_gain_ci"]
    assert 0 < low < high
    assert demo.result["tau_published"] - demo.result["tau_stale"] == pytest.approx(demo.result["tau_gain"])


def test_acceptance_falls_as_the_target_moves_away(demo: Any) -> None:
    by_version = {int(v): tau for v, tau in demo.result["tau_by_version"].items()}
    assert by_version[5] < by_version[0] - 0.05


def test_swap_changes_neither_text_nor_target_and_serves_the_artifact(demo: Any) -> None:
    assert demo.result["greedy_equal"]
    assert demo.result["target_unchanged"]
    assert demo.result["draft_matches_artifact"]


def test_offline_tau_agrees_with_the_engine_within_five_percent(demo: Any) -> None:
    assert demo.result["offline_tau"] == pytest.approx(demo.result["engine_tau"], rel=0.05)


def test_every_window_was_verified_and_nothing_was_refused(demo: Any) -> None:
    assert demo.result["quarantined"] == {}
    assert demo.result["verified_windows"] > 500


def test_rollouts_follow_the_targets_distribution_at_their_temperature(demo: Any) -> None:
    """Summed logprob of sampled tokens against its mean and spread under the target (a z-score).

    The terms are a martingale difference sequence, so the sum is normal in the limit; 5 standard
    deviations leave room for one chance in a million.
    """
    deviation, variance = 0.0, 0.0
    model = AutoModelForCausalLM.from_pretrained(demo.out / "target" / "v0", dtype=torch.float32)
    for rollout in read_rollouts(demo.out / "rollouts" / "rollouts-v0.jsonl"):
        assert isinstance(rollout, Rollout)
        ids = torch.tensor([rollout.token_ids])
        with torch.no_grad():
            logits = model(ids).logits[0, rollout.prompt_length - 1 : -1].double()
        raw, sampled = logits.log_softmax(-1), (logits / rollout.temperature).softmax(-1)
        mean = (sampled * raw).sum(-1)
        deviation += float((raw.gather(1, ids[0, rollout.prompt_length :, None])[:, 0] - mean).sum())
        variance += float(((sampled * raw**2).sum(-1) - mean**2).sum())
    assert abs(deviation) < 5 * variance**0.5


def test_stdout_of_json_is_one_object_and_the_picture_exists(demo: Any) -> None:
    assert len(demo.stdout.splitlines()) == 1
    assert Path(demo.result["plot"]).read_bytes().startswith(b"\x89PNG")


def test_ls_show_and_explain_agree_on_the_lake(demo: Any, cli: Cli) -> None:
    versions = json.loads(cli("ls", "--lake", demo.lake, "--json").stdout)
    assert [row["version"] for row in versions] == demo.result["versions"]
    shown = json.loads(cli("show", "lake", "--lake", demo.lake, "--json").stdout)
    assert shown["revision"] == demo.result["lake_revision"]
    assert shown["windows"] == sum(row["windows"] for row in versions)
    plan = json.loads(cli("explain", "--lake", demo.lake, "--json").stdout)
    assert plan["windows"] == shown["windows"]
    assert plan["heads_missing"] == []


def test_train_eval_gate_and_reject_work_on_the_demo_lake(demo: Any, cli: Cli, tmp_path: Path) -> None:
    lake = str(tmp_path / "lake")
    shutil.copytree(demo.lake, lake)
    config = tmp_path / "train.yaml"
    config.write_text("method: {method: eagle3, draft_vocab_size: 256}\nmax_steps: 3\n")
    argv = ("--lake", lake, "--json")
    trained = cli("train", "--first-version", "4", "--stop-version", "6", "--config", str(config), *argv)
    assert trained.returncode == 0, trained.stderr
    digest = json.loads(trained.stdout)["artifact"]
    assert cli("eval", digest, *argv).returncode == 0
    refused = cli("approve", digest, "--reason", "hope", *argv)
    assert refused.returncode == 3
    assert "gain" in refused.stderr
    assert cli("publish", digest, "--engine", "http://127.0.0.1:9", *argv).returncode == 3
    assert cli("reject", digest, "--reason", "three steps are no training", *argv).returncode == 0
    states = {row["digest"]: row["state"] for row in json.loads(cli("registry", "ls", *argv).stdout)}
    assert states[digest] == "rejected"
    assert states[demo.result["artifact"]] == "production"
    assert states[demo.result["stale_artifact"]] == "retired"


def test_publish_to_a_dead_engine_fails_and_moves_no_channel(demo: Any, cli: Cli) -> None:
    argv = ("--lake", demo.lake, "--json")
    before = json.loads(cli("status", *argv).stdout)["production"]
    failed = cli("publish", demo.result["artifact"], "--engine", "http://127.0.0.1:9", *argv)
    assert failed.returncode == 1
    assert "127.0.0.1:9" in failed.stderr
    assert json.loads(cli("status", *argv).stdout)["production"] == before


def test_a_second_demo_into_the_same_folder_is_refused(demo: Any, cli: Cli) -> None:
    refused = cli("demo", "--out", str(demo.out), "--json")
    assert refused.returncode == 2
    assert "--overwrite" in refused.stderr
