"""EAGLE-3 checkpoints: complete, as engines read them, and refused when they are not."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from features.errors import DraftLayoutError, InputError
from training.methods.eagle3.checkpoint import export_config, export_tensors, load_model
from training.methods.eagle3.method import EAGLE3
from training.methods.eagle3.model import Eagle3Draft
from training.spec import Eagle3Spec
from training.testing import HIDDEN, LAYERS, TARGET, TARGET_CONFIG, VOCAB
from training.vocab import VocabMap

REDUCED = VocabMap.from_target_ids(np.arange(0, VOCAB, 2), VOCAB)


def _model(vocab: VocabMap = REDUCED, layers: tuple[int, ...] = LAYERS, **config) -> Eagle3Draft:
    return EAGLE3.build(TARGET, TARGET_CONFIG | config, Eagle3Spec(), vocab, layers, seed=0)


def _save(folder: Path, model: Eagle3Draft) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(export_tensors(model), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(export_config(model)))
    return folder


@pytest.mark.parametrize("vocab", [REDUCED, VocabMap.identity(VOCAB)], ids=["reduced", "full"])
def test_a_written_draft_reads_back_to_the_same_model(tmp_path: Path, vocab: VocabMap) -> None:
    model = _model(vocab)
    back = load_model(_save(tmp_path, model))
    assert back.config == model.config
    assert back.vocab.target_ids.tolist() == vocab.target_ids.tolist()
    for (name, a), (other, b) in zip(model.named_parameters(), back.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(a, b)


def test_the_map_lies_in_the_weights_file_and_agrees_with_itself(tmp_path: Path) -> None:
    tensors = load_file(_save(tmp_path, _model()) / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert int(tensors["t2d"].sum()) == len(tensors["d2t"]) == len(tensors["lm_head.weight"])


def test_a_full_vocabulary_draft_holds_no_map(tmp_path: Path) -> None:
    assert not {"d2t", "t2d"} & set(
        load_file(_save(tmp_path, _model(VocabMap.identity(VOCAB))) / "model.safetensors")
    )


def test_layer_ids_stand_at_both_places_engines_read() -> None:
    config = export_config(_model(layers=(2, 4)))
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 4]
    assert config["num_aux_hidden_states"] == 2


def test_the_head_is_untied_whatever_the_target_does() -> None:
    assert export_config(_model(tie_word_embeddings=True))["tie_word_embeddings"] is False


def test_no_embedding_is_written_so_none_can_be_random() -> None:
    model = _model()
    assert set(export_tensors(model)) - {"d2t", "t2d"} == {name for name, _ in model.named_parameters()}


def test_fc_is_as_wide_as_the_ids_say_for_any_number_of_layers() -> None:
    for layers in ((6,), (1, 6), (1, 2, 3, 4)):
        assert _model(layers=layers).fc.in_features == len(layers) * HIDDEN


def test_a_layer_beyond_the_target_is_refused_with_counts() -> None:
    with pytest.raises(InputError, match=r"\[7\] do not exist in a target of 6 blocks"):
        _model(layers=(1, 6, 7))


def test_default_layers_are_those_of_the_engine_and_a_shallow_target_has_none() -> None:
    assert EAGLE3.default_layer_ids(36) == (2, 18, 33)
    with pytest.raises(InputError, match="Name the layer ids"):
        EAGLE3.default_layer_ids(4)


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_another_set_of_tensors_is_refused_by_name(tmp_path: Path, change: str) -> None:
    folder = _save(tmp_path, _model())
    tensors = load_file(folder / "model.safetensors")
    match change:
        case "missing":
            del tensors["lm_head.weight"]
        case "unknown":
            tensors["model.fc.weight"] = tensors["fc.weight"].clone()
        case "shape":
            tensors["norm.weight"] = torch.ones(3)
    save_file(tensors, folder / "model.safetensors")
    name = {"missing": "lm_head.weight", "unknown": "model.fc.weight", "shape": "norm.weight"}[change]
    with pytest.raises(DraftLayoutError, match=name):
        load_model(folder)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("eagle_aux_hidden_state_layer_ids", [1, 2], "the same ids"),
        ("norm_before_residual", True, "plain forward"),
        ("architectures", ["Eagle3DeepseekV2ForCausalLM"], "architectures"),
        ("head_dim", None, "head_dim"),
    ],
)
def test_a_config_of_another_draft_is_refused(tmp_path: Path, key: str, value: object, message: str) -> None:
    folder = _save(tmp_path, _model())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(DraftLayoutError, match=message):
        load_model(folder)


def test_a_config_without_layer_ids_is_refused(tmp_path: Path) -> None:
    folder = _save(tmp_path, _model())
    config = json.loads((folder / "config.json").read_text())
    del config["eagle_aux_hidden_state_layer_ids"], config["eagle_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(DraftLayoutError, match="guesses"):
        load_model(folder)


def test_a_cut_weights_file_is_refused(tmp_path: Path) -> None:
    folder = _save(tmp_path, _model())
    raw = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(DraftLayoutError, match="no complete safetensors"):
        load_model(folder)
