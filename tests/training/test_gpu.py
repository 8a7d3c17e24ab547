"""The same training on an accelerator: close to the CPU's numbers, and repeatable."""

from pathlib import Path

import pytest
import torch

from training.batches import make_batch
from training.heads import FrozenHead
from training.loop import train_draft
from training.methods.eagle3.method import EAGLE3
from training.spec import Eagle3Spec, TrainSpec
from training.testing import LAYERS, TARGET, TARGET_CONFIG, VOCAB, ToyLake, make_head, make_window
from training.vocab import VocabMap

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator"),
]


def _windows():
    return [make_window(f"s{i}", length=40, prompt=8, seed=i, predictable=True) for i in range(12)]


def test_loss_on_the_accelerator_is_the_cpu_s() -> None:
    device = torch.accelerator.current_accelerator()
    spec, losses = Eagle3Spec(ttt_steps=4), []
    for where in (torch.device("cpu"), device):
        windows = _windows()
        heads = {windows[0].meta.version: FrozenHead.from_snapshot(make_head(), where)}
        model = EAGLE3.build(TARGET, TARGET_CONFIG, spec, VocabMap.identity(VOCAB), LAYERS, seed=0).to(where)
        batch = make_batch(windows, heads, layer_ids=LAYERS, device=where)
        losses.append(EAGLE3.loss(model, batch, spec).total().item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_a_deterministic_run_repeats_its_digest(tmp_path: Path, compute_dtype: str) -> None:
    spec = TrainSpec(
        method=Eagle3Spec(ttt_steps=3, draft_vocab_size=24),
        epochs=5,
        batch_tokens=160,
        compute_dtype=compute_dtype,
    )
    digests = set()
    for name in ("a", "b"):
        lake = ToyLake(_windows())
        result = train_draft(lake, lake.select(), spec, out=tmp_path / name, target_config=TARGET_CONFIG)
        digests.add(result.artifact.digest)
    assert len(digests) == 1
