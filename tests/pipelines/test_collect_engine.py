"""Which engine `draftlake collect` may ask; as a soak, it starts one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from features.collect.rollouts import Rollout, write_rollouts
from features.errors import InputError
from pipelines.cli.output import json_object
from pipelines.collect import CollectSpec
from pipelines.demo.spec import TARGET_ASSET, TARGET_ID
from pipelines.replay import started_engine
from pipelines.start import init_lake

DRAFTLAKE = Path(sys.executable).with_name("draftlake")
ENGINE_ENV = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
}


def spec(**changes: Any) -> CollectSpec:
    return CollectSpec(**{"lake": "l", "rollouts": ("r",), "target": "t", "version": 0} | changes)


@pytest.mark.parametrize("engine", ["transformers", "vllm", "http://host:8000", "https://host"])
def test_engines_that_can_be_named(engine: str) -> None:
    assert spec(engine=engine).engine == engine


@pytest.mark.parametrize("engine", ["vLLM", "host:8000", "", "ftp://host"])
def test_anything_else_is_refused(engine: str) -> None:
    with pytest.raises(ValidationError, match="engine"):
        spec(engine=engine)


def test_an_option_that_the_replay_sets_is_refused(tmp_path: Any) -> None:
    options = {"enable_prefix_caching": True}
    started = started_engine(tmp_path, layer_ids=(1,), num_layers=4, dtype="float32", options=options)
    with pytest.raises(InputError, match="'enable_prefix_caching' is set by the replay itself"), started:
        pass


@pytest.mark.parametrize("text", ["[1]", "3", "{", ""])
def test_engine_options_are_a_json_object(text: str) -> None:
    with pytest.raises(InputError, match="--engine-options"):
        json_object(text, option="--engine-options")


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("DRAFTLAKE_SOAK") != "1", reason="starts an engine: DRAFTLAKE_SOAK=1")
def test_the_command_collects_with_a_vllm_that_it_starts_and_ends(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    model = transformers.AutoModelForCausalLM.from_pretrained(TARGET_ASSET, dtype=torch.float32)
    rollouts = []
    for i, ids in enumerate(np.random.default_rng(0).integers(3, model.config.vocab_size, (6, 40)).tolist()):
        with torch.no_grad():
            table = torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1)
        logprobs = (None, *(float(table[j - 1, ids[j]]) for j in range(1, 40)))
        rollouts.append(
            Rollout(
                sample_id=f"s{i}", group_id=f"g{i}", token_ids=tuple(ids), prompt_length=1, version=0,
                sampled_mask=(False,) + (True,) * 39, logprobs=logprobs, logprob_kind="engine_raw",
            )
        )  # fmt: skip
    write_rollouts(tmp_path / "r.jsonl", rollouts)
    init_lake(str(tmp_path / "lake"), target=TARGET_ASSET, target_id=TARGET_ID)
    argv = ["collect", "r.jsonl", "--lake", "./lake", "--target", str(TARGET_ASSET), "--version", "0"]
    argv += ["--engine", "vllm", "--engine-dtype", "float32", "--engine-options", '{"max_model_len": 128}']
    done = subprocess.run(
        [str(DRAFTLAKE), *argv, "--json"], env=os.environ | ENGINE_ENV, cwd=tmp_path,
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)  # the engine's own log lines are not in it
    assert (report["collected"], report["verified"], report["quarantined"]) == (6, 6, {})
