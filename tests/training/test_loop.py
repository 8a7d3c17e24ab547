"""The training loop: what it learns, refuses, counts, and that it repeats itself."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from features.errors import (
    DraftLayoutError,
    InputError,
    LakeContractError,
    TargetMismatchError,
    TrainingFailedError,
)
from training.artifact import load_artifact
from training.loop import learning_rate_at, train_draft
from training.methods.eagle3.method import EAGLE3
from training.spec import Eagle3Spec, TrainSpec
from training.testing import TARGET, TARGET_CONFIG, ToyLake, make_window

SPEC = TrainSpec(
    method=Eagle3Spec(ttt_steps=3, draft_vocab_size=24), epochs=2, batch_tokens=64, learning_rate=2e-3,
    save_dtype="float32",
)  # fmt: skip


def _lake(count: int = 8, **changes) -> ToyLake:
    return ToyLake(
        [
            make_window(f"s{i}", length=14, prompt=3, seed=i, version=i % 2, predictable=True, **changes)
            for i in range(count)
        ]
    )


def _train(lake: ToyLake, out: Path, spec: TrainSpec = SPEC, **kwargs):
    return train_draft(lake, lake.select(), spec, out=out, target_config=TARGET_CONFIG, **kwargs)


def test_equal_inputs_give_equal_digests_and_another_seed_does_not(tmp_path: Path) -> None:
    first, again = _train(_lake(), tmp_path / "a"), _train(_lake(), tmp_path / "b")
    other = _train(_lake(), tmp_path / "c", SPEC.model_copy(update={"seed": 1}))
    assert first.artifact.digest == again.artifact.digest
    assert first.artifact.weights_digest != other.artifact.weights_digest


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_the_digest_survives_other_reading_threads_and_other_global_randomness(
    tmp_path: Path, threads: int
) -> None:
    first = _train(_lake(), tmp_path / "a")
    torch.manual_seed(1234)
    np.random.seed(99)
    assert _train(_lake(), tmp_path / "b", read_threads=threads).artifact.digest == first.artifact.digest


def test_a_predictable_target_is_learned(tmp_path: Path) -> None:
    spec = SPEC.model_copy(update={"epochs": 60, "learning_rate": 5e-3, "method": Eagle3Spec(ttt_steps=2)})
    result = _train(_lake(), tmp_path / "a", spec)
    assert result.metrics[-1]["match_0"] > 0.8
    assert result.metrics[-1]["loss"] < 0.5 * result.metrics[0]["loss"]


def test_the_manifest_names_what_was_read(tmp_path: Path) -> None:
    lake = _lake()
    selection = lake.select()
    result = train_draft(lake, selection, SPEC, out=tmp_path / "a", target_config=TARGET_CONFIG)
    manifest = load_artifact(result.folder).manifest
    assert (manifest.lake_revision, manifest.selection_digest, manifest.versions) == (
        "revision",
        selection.digest,
        (0, 1),
    )
    assert manifest.tokens == 2 * 8 * 11
    assert manifest.steps == result.counts["steps"]
    assert TrainSpec.model_validate(manifest.spec) == SPEC
    assert str(tmp_path) not in manifest.model_dump_json()


def test_metrics_lie_beside_the_artifact_and_outside_its_digest(tmp_path: Path) -> None:
    result = _train(_lake(), tmp_path / "a")
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == result.counts["steps"]
    assert lines[-1]["loss"] == result.metrics[-1]["loss"]
    (result.folder / "metrics.jsonl").write_text("")
    assert load_artifact(result.folder).digest == result.artifact.digest


def test_windows_without_supervised_tokens_are_dropped_and_change_nothing(tmp_path: Path) -> None:
    lake = _lake()
    clean = _train(lake, tmp_path / "a")
    blind = make_window("blind", prompt=3, seed=99)
    blind = replace(blind, sampled_mask=np.zeros_like(blind.sampled_mask))
    result = _train(ToyLake([*lake.windows, blind]), tmp_path / "b")
    assert result.counts["windows_without_supervised_tokens"] == 1
    assert result.artifact.weights_digest == clean.artifact.weights_digest


@pytest.mark.parametrize("prompt", [14, 13], ids=["prompt only", "one token, but none to predict twice"])
def test_data_without_any_supervised_token_is_loud_and_leaves_nothing(tmp_path: Path, prompt: int) -> None:
    windows = [make_window(length=14, prompt=prompt)]
    if prompt == 13:  # a lone sampled token at index 1: no row predicts it
        mask = np.zeros(15, np.bool_)
        mask[1] = True
        windows = [replace(windows[0], sampled_mask=mask)]
    with pytest.raises(TrainingFailedError, match="none of 1 windows"):
        _train(ToyLake(windows), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_window_with_nan_features_is_left_out_and_counted(tmp_path: Path) -> None:
    lake = _lake()
    lake.windows[2].aux[4, 0] = np.nan
    result = _train(lake, tmp_path / "a")
    assert result.counts["nonfinite_features"] == 1
    assert all(bool(torch.isfinite(t).all()) for t in load_file(result.folder / "model.safetensors").values())


def test_steps_that_are_not_finite_are_skipped_and_too_many_stop_the_run(tmp_path: Path) -> None:
    lake = _lake()
    for window in lake.windows:
        window.final[:] *= np.float32(5e37)  # finite, but their logits are not
    with pytest.raises(TrainingFailedError, match="steps were skipped"):
        _train(lake, tmp_path / "a", SPEC.model_copy(update={"epochs": 12}))
    assert not (tmp_path / "a").exists()


def test_norm_weights_move_because_masters_are_float32(tmp_path: Path) -> None:
    spec = SPEC.model_copy(update={"learning_rate": 1e-4, "epochs": 10, "compute_dtype": "bfloat16"})
    result = _train(_lake(), tmp_path / "a", spec)
    tensors = load_file(result.folder / "model.safetensors")
    norms = [tensor for name, tensor in tensors.items() if "norm" in name]
    assert len(norms) == 4
    assert all(float((norm != 1).float().mean()) > 0.5 for norm in norms)


def test_only_the_draft_s_own_tensors_are_trained_and_written(tmp_path: Path) -> None:
    lake = _lake()
    before = {v: head.lm_head.copy() for v, head in lake.heads.items()}
    result = _train(lake, tmp_path / "a")
    names = set(load_file(result.folder / "model.safetensors"))
    model = EAGLE3.load(result.folder)
    assert names == {name for name, _ in model.named_parameters()} | {"d2t", "t2d"}
    assert not [name for name in names if "embed" in name]
    assert all(np.array_equal(before[v], head.lm_head) for v, head in lake.heads.items())


def test_the_draft_vocabulary_comes_from_predicted_tokens_only(tmp_path: Path) -> None:
    lake = ToyLake([make_window(tokens=[30, 31, 32, 33, 5, 5, 6, 6, 7, 9], prompt=4)])
    spec = SPEC.model_copy(update={"method": Eagle3Spec(ttt_steps=2, draft_vocab_size=4)})
    result = _train(lake, tmp_path / "a", spec)
    tensors = load_file(result.folder / "model.safetensors")
    assert (torch.arange(4) + tensors["d2t"]).tolist() == [5, 6, 7, 9]
    assert tensors["t2d"].nonzero().flatten().tolist() == [5, 6, 7, 9]


def test_a_warm_start_keeps_its_parent_s_map_and_names_it(tmp_path: Path) -> None:
    parent = _train(_lake(), tmp_path / "a")
    child = _train(
        _lake(4),
        tmp_path / "b",
        SPEC.model_copy(update={"method": Eagle3Spec(ttt_steps=3)}),
        parent=parent.folder,
    )
    assert child.artifact.manifest.parent == parent.artifact.digest
    assert child.artifact.tensors["d2t"] == parent.artifact.tensors["d2t"]
    assert child.artifact.tensors["fc.weight"] != parent.artifact.tensors["fc.weight"]


def test_a_warm_start_refuses_another_vocabulary_layers_or_target(tmp_path: Path) -> None:
    parent = _train(_lake(), tmp_path / "a").folder
    with pytest.raises(DraftLayoutError, match="vocabulary of 24"):
        _train(
            _lake(),
            tmp_path / "b",
            SPEC.model_copy(update={"method": Eagle3Spec(draft_vocab_size=8)}),
            parent=parent,
        )
    with pytest.raises(DraftLayoutError, match="aux layers"):
        _train(_lake(), tmp_path / "b", parent=parent, layer_ids=(1, 2))
    other = ToyLake(_lake().windows, target=replace(TARGET, tokenizer_digest="other"))
    with pytest.raises(TargetMismatchError, match="tokenizer_digest"):
        _train(other, tmp_path / "b", parent=parent)


def test_layers_that_were_not_recorded_stop_the_run_before_any_step(tmp_path: Path) -> None:
    with pytest.raises(DraftLayoutError, match="were recorded"):
        _train(_lake(), tmp_path / "a", layer_ids=(2, 4, 5))


def test_a_taken_folder_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="never overwritten"):
        _train(_lake(), tmp_path / "a")


def test_the_loss_mask_is_used_only_when_asked_for(tmp_path: Path) -> None:
    with pytest.raises(LakeContractError, match="no loss mask"):
        _train(_lake(), tmp_path / "a", SPEC.model_copy(update={"mask": "loss"}))


def test_the_learning_rate_warms_up_and_ends_near_zero() -> None:
    spec = TrainSpec(learning_rate=1.0, warmup_ratio=0.1)
    rates = [learning_rate_at(step, 100, spec) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == pytest.approx(1.0)
    assert rates[10] == pytest.approx(1.0)
    assert rates[-1] < 1e-3
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))


def test_max_steps_ends_the_run_and_its_schedule(tmp_path: Path) -> None:
    result = _train(_lake(), tmp_path / "a", SPEC.model_copy(update={"max_steps": 3, "epochs": 9}))
    assert result.counts["steps"] == 3
    assert len(result.metrics) == 3


def test_progress_is_reported_step_by_step(tmp_path: Path) -> None:
    seen = []
    result = _train(_lake(), tmp_path / "a", on_progress=seen.append)
    assert seen == result.metrics
    assert seen[0]["step"] == 1.0
