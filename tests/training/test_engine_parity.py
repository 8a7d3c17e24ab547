"""A draft trained here runs inside vLLM, and the offline walk counts what the engine counts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from features.heads import head_from_checkpoint
from features.schema import NO_TOKEN, FeatureDtype, FragmentLayout, TargetIdentity, TargetVersion
from features.windows import Window, WindowMeta
from training.batches import make_batch
from training.evaluate import walk
from training.heads import FrozenHead
from training.loop import train_draft
from training.methods.eagle3.method import EAGLE3
from training.spec import Eagle3Spec, TrainSpec
from training.testing import ToyLake

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LAYERS, HIDDEN, VOCAB, K = (1, 2, 3), 64, 128, 3
DECODED, SPARE = 40, K + 1
"""Tokens per request, and the target's continuation past its stop: the last round drafts into it."""


def _make_target(folder: Path) -> tuple[Any, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=256, initializer_range=0.25,
        bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    return model, json.loads((folder / "config.json").read_text())


def _window(model: Any, tokens: list[int], prompt: int, name: str) -> Window:
    with torch.no_grad():
        out = model.model(torch.tensor([tokens]), output_hidden_states=True)
    aux = torch.cat([out.hidden_states[k][0] for k in LAYERS], -1).numpy()
    sampled = np.zeros(len(tokens) + 1, np.bool_)
    sampled[prompt:-1] = True
    meta = WindowMeta(name, name, TargetVersion(0), 0, len(tokens), prompt, temperature=0.0)
    return Window(
        meta, FragmentLayout(LAYERS, FeatureDtype.FLOAT32, HIDDEN), np.array([*tokens, NO_TOKEN], np.int32),
        sampled, None, np.full(len(tokens) + 1, np.nan, np.float32), aux, out.last_hidden_state[0].numpy(),
    )  # fmt: skip


@pytest.mark.parametrize("draft_vocab", [None, 96], ids=["full vocabulary", "reduced vocabulary"])
def test_offline_rounds_equal_the_engine_s_counters(tmp_path: Path, draft_vocab: int | None) -> None:
    pytest.importorskip("vllm")
    model, target_config = _make_target(tmp_path / "target")
    prompts = [[1] + [3 + (7 * i + 13 * j) % 120 for j in range(6 + 3 * i)] for i in range(6)]
    draft, windows = _train_on_greedy_rollouts(model, target_config, prompts, tmp_path, draft_vocab)
    engine = _run_engine(tmp_path, draft, prompts)
    proposals = _proposals(draft, tmp_path / "target", windows)
    expected = [0, 0]
    for prompt, window, proposed, answer in zip(prompts, windows, proposals, engine["answers"], strict=True):
        stored = window.token_ids[:-1]
        assert answer == stored[len(prompt) : len(prompt) + DECODED].tolist()
        # The stored text goes on past the request's stop, so its last round can be counted as well.
        rounds = walk(stored, proposed, first=len(prompt), last=len(stored) - 1, k=K)
        mine = [r for r in rounds if r.newest < len(prompt) + DECODED - 1]
        expected = [expected[0] + len(mine), expected[1] + sum(r.accepted for r in mine)]
    assert engine["counted"] == expected
    assert 0.8 < expected[1] / expected[0] < K, "a draft that accepts nothing, or all, would prove little"


def _run_engine(root: Path, draft: Path, prompts: list[list[int]]) -> dict[str, Any]:
    request = {
        "target": str(root / "target"),
        "draft": str(draft),
        "k": K,
        "decoded": DECODED,
        "prompts": prompts,
    }
    (root / "request.json").write_text(json.dumps(request))
    argv = [sys.executable, "-P", str(Path(__file__).with_name("engine_run.py"))]
    files = [str(root / "request.json"), str(root / "out.json")]
    done = subprocess.run([*argv, *files], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((root / "out.json").read_text())


def _train_on_greedy_rollouts(
    model: Any, target_config: dict[str, Any], prompts: list[list[int]], root: Path, draft_vocab: int | None
) -> tuple[Path, list[Window]]:
    windows = []
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
            min_new_tokens=DECODED + SPARE, max_new_tokens=DECODED + SPARE,
        )  # fmt: skip
        windows.append(_window(model, out[0].tolist(), len(prompt), f"s{i}"))
    head = head_from_checkpoint(root / "target")
    target = TargetIdentity("tiny", "LlamaForCausalLM", HIDDEN, 4, VOCAB, "none", "none")
    lake = ToyLake(windows, {0: head}, target)
    spec = TrainSpec(
        method=Eagle3Spec(ttt_steps=3, draft_vocab_size=draft_vocab), epochs=40, batch_tokens=128, learning_rate=3e-3,
        save_dtype="float32",
    )  # fmt: skip
    result = train_draft(
        lake, lake.select(), spec, out=root / "draft", target_config=target_config, layer_ids=LAYERS
    )
    return result.folder, windows


def _proposals(draft: Path, target: Path, windows: list[Window]) -> np.ndarray:
    heads = {TargetVersion(0): FrozenHead.from_snapshot(head_from_checkpoint(target))}
    batch = make_batch(windows, heads, layer_ids=LAYERS)
    return EAGLE3.propose(EAGLE3.load(draft), batch, K).numpy()
