"""A trained draft proposes in our code exactly what it proposes inside vLLM (greedy, float32)."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from features.catalog import Catalog
from features.collect.rollouts import Rollout, write_rollouts
from features.lake import Lake
from features.schema import SelectionFilter
from pipelines.collect import CollectSpec, collect
from pipelines.context import RunContext
from pipelines.demo.prompts import fresh_prompts
from pipelines.demo.spec import DRAFT_ASSET, TARGET_ASSET, TARGET_ID
from pipelines.start import init_lake
from training.artifact import load_artifact
from training.feed import Feed
from training.methods import DRAFT_METHODS
from training.walk import walk

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

K = 4
NUM_PROMPTS = 8


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(TARGET_ASSET)
    found = [
        p
        for d in ("code", "prose")
        for p in fresh_prompts(tokenizer, d, count=NUM_PROMPTS // 2, length=24, seed=3)
    ]
    return [list(p.token_ids) for p in found]


@pytest.fixture(scope="module")
def engine_answers(
    prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("engine")
    (folder / "prompts.json").write_text(json.dumps(prompts))
    script = Path(__file__).with_name("record_drafts.py")
    argv = [
        str(TARGET_ASSET),
        str(DRAFT_ASSET),
        str(K),
        str(folder / "prompts.json"),
        str(folder / "out.json"),
    ]
    done = subprocess.run(
        [sys.executable, "-P", str(script), *argv], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "out.json").read_text())


@pytest.fixture(scope="module")
def our_proposals(
    prompts: list[list[int]], engine_answers: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> list[np.ndarray]:
    """Proposals from every row of every sequence, ``[T, K]``, from features collected through the tap."""
    folder = tmp_path_factory.mktemp("ours")
    rollouts = [
        _rollout(i, p, a["token_ids"]) for i, (p, a) in enumerate(zip(prompts, engine_answers, strict=True))
    ]
    write_rollouts(folder / "r.jsonl", rollouts)
    lake_url = str(folder / "lake")
    init_lake(lake_url, target=TARGET_ASSET, target_id=TARGET_ID)
    spec = CollectSpec(
        lake=lake_url,
        rollouts=(str(folder / "r.jsonl"),),
        target=str(TARGET_ASSET),
        version=0,
        dtype="float32",
    )
    collect(spec, RunContext())
    lake = Lake.open(lake_url)
    selection = Catalog.load(lake).select(SelectionFilter())
    feed = Feed(lake)
    artifact = load_artifact(DRAFT_ASSET)
    method = DRAFT_METHODS[artifact.manifest.method]
    model = method.load(DRAFT_ASSET).eval()
    proposals: dict[str, np.ndarray] = {}
    for row in selection.rows:
        window = lake.read_window(row)
        batch = feed.batch([window], layer_ids=artifact.manifest.layer_ids)
        with torch.no_grad():
            proposals[window.meta.sample_id] = method.propose(model, batch, K)[0].numpy()
    return [proposals[f"s{i}"] for i in range(len(prompts))]


def _rollout(index: int, prompt: list[int], sampled: list[int]) -> Rollout:
    return Rollout(
        sample_id=f"s{index}",
        group_id=f"g{index}",
        token_ids=(*prompt, *sampled),
        prompt_length=len(prompt),
        sampled_mask=(False,) * len(prompt) + (True,) * len(sampled),
        version=0,
        temperature=0.0,
    )


def test_every_proposal_of_every_round_is_the_same(
    prompts: list[list[int]], engine_answers: list[dict[str, Any]], our_proposals: list[np.ndarray]
) -> None:
    compared = 0
    for prompt, answer, ours in zip(prompts, engine_answers, our_proposals, strict=True):
        tokens = [*prompt, *answer["token_ids"]]
        newest = len(prompt)
        for engine_round in answer["rounds"]:
            if newest >= len(tokens):
                break
            assert engine_round["newest_token"] == tokens[newest]
            assert engine_round["drafts"] == ours[newest - 1].tolist()
            following = tokens[newest + 1 : newest + 1 + K]
            pairs = zip(engine_round["drafts"], following, strict=False)
            newest += 1 + next((i for i, (d, t) in enumerate(pairs) if d != t), min(K, len(following)))
            compared += 1
    assert compared > 100


def test_our_walk_counts_the_engines_rounds(
    prompts: list[list[int]], engine_answers: list[dict[str, Any]], our_proposals: list[np.ndarray]
) -> None:
    accepted = 0
    for prompt, answer, ours in zip(prompts, engine_answers, our_proposals, strict=True):
        tokens = np.array([*prompt, *answer["token_ids"]])
        rounds = walk(tokens, ours, first=len(prompt), last=len(tokens) - 1, k=K)
        # The engine drafts once more after the last round it finished, and the walk drops the last one.
        assert 0 <= len(answer["rounds"]) - len(rounds) <= 2
        accepted += sum(r.accepted for r in rounds)
    assert accepted > 50
