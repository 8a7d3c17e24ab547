"""Identity of a target, and checkpoints that must not be trusted."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from features.checkpoint import INDEX_FILE, SINGLE_FILE, RawTensor, open_checkpoint, write_safetensors
from features.errors import CorruptDataError, InputError
from features.target import default_layer_ids, describe_target, weights_digest

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "num_hidden_layers": 4, "vocab_size": 10,
    "tie_word_embeddings": True, "torch_dtype": "float32",
}  # fmt: skip
TOKENIZER: dict[str, Any] = {
    "truncation": None,
    "padding": None,
    "model": {"vocab": {"a": 0}, "merges": ["a b"]},
}


def tensor(seed: int, *shape: int) -> RawTensor:
    values = np.random.default_rng(seed).standard_normal(shape).astype("<f4")
    return RawTensor("F32", shape, values.tobytes())


TENSORS = {
    "model.embed_tokens.weight": tensor(0, 10, 8),
    "model.norm.weight": tensor(1, 8),
    "z": tensor(2, 3),
}


def save_single(folder: Path) -> Path:
    (folder / SINGLE_FILE).write_bytes(write_safetensors(TENSORS, {"format": "pt"}))
    return folder


def save_sharded(folder: Path) -> Path:
    weight_map = {}
    for number, name in enumerate(TENSORS, start=1):
        shard = f"model-{number:05d}-of-00003.safetensors"
        (folder / shard).write_bytes(write_safetensors({name: TENSORS[name]}, {"format": "pt"}))
        weight_map[name] = shard
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return folder


def save_target(folder: Path, config: dict[str, Any] = CONFIG, tokenizer: dict[str, Any] = TOKENIZER) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, indent=3))
    return folder


def test_identity_says_what_all_versions_share(tmp_path: Path) -> None:
    found = describe_target(save_target(tmp_path), "mine")
    assert (found.target_id, found.architecture) == ("mine", "LlamaForCausalLM")
    assert (found.hidden_size, found.num_layers, found.vocab_size) == (8, 4, 10)


def test_identity_ignores_who_saved_it_and_how_json_is_laid_out(tmp_path: Path) -> None:
    saved_later = {**CONFIG, "transformers_version": "9", "dtype": "bfloat16", "_name_or_path": "/x"}
    other = {**TOKENIZER, "padding": {"length": 8}, "model": {"vocab": {"a": 0}, "merges": [["a", "b"]]}}
    first = describe_target(save_target(tmp_path / "a"), "t")
    assert describe_target(save_target(tmp_path / "b", saved_later, other), "t") == first


def test_another_tokenizer_of_the_same_size_is_another_identity(tmp_path: Path) -> None:
    other = {**TOKENIZER, "model": {"vocab": {"b": 0}, "merges": ["a b"]}}
    first = describe_target(save_target(tmp_path / "a"), "t")
    assert describe_target(save_target(tmp_path / "b", tokenizer=other), "t") != first


def test_a_nested_text_config_is_read(tmp_path: Path) -> None:
    nested = {"architectures": ["X"], "text_config": CONFIG}
    assert describe_target(save_target(tmp_path, nested), "t").hidden_size == 8


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named_with_the_remedy(tmp_path: Path, name: str) -> None:
    (save_target(tmp_path) / name).unlink()
    with pytest.raises(InputError, match=name):
        describe_target(tmp_path, "t")


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "vocab_size", "architectures"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    save_target(tmp_path, {key: value for key, value in CONFIG.items() if key != field})
    with pytest.raises(InputError, match=field):
        describe_target(tmp_path, "t")


def test_weights_digest_is_of_values_and_not_of_sharding(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    assert weights_digest(save_single(tmp_path / "a")) == weights_digest(save_sharded(tmp_path / "b"))


def test_a_shard_that_the_index_names_and_nobody_copied_is_named(tmp_path: Path) -> None:
    (save_sharded(tmp_path) / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CorruptDataError, match="model-00002-of-00003"):
        weights_digest(tmp_path)


def test_a_stale_index_beside_a_full_single_file_is_refused(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    save_single(tmp_path)
    with pytest.raises(CorruptDataError, match="two sets of weights"):
        open_checkpoint(tmp_path)
    for shard in tmp_path.glob("model-0*"):
        shard.unlink()
    with pytest.raises(CorruptDataError, match="model-00001-of-00003"):
        open_checkpoint(tmp_path)


def test_an_index_that_names_a_tensor_no_shard_has_is_refused(tmp_path: Path) -> None:
    index = json.loads((save_sharded(tmp_path) / INDEX_FILE).read_text())
    index["weight_map"]["lm_head.weight"] = "model-00001-of-00003.safetensors"
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CorruptDataError, match=r"lm_head\.weight"):
        open_checkpoint(tmp_path)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:-1],
        lambda raw: raw[: len(raw) // 2],
        lambda raw: raw + b"\0",
        lambda raw: raw[:5],
        lambda raw: b"",
        lambda raw: POINTER,
        lambda raw: b"<!DOCTYPE html><html>" + b" " * 300,
    ],
    ids=["short by one", "half", "one appended", "no header", "empty", "lfs pointer", "html"],
)
def test_a_file_that_is_not_what_its_header_says_is_refused(tmp_path: Path, damage: Any) -> None:
    path = save_single(tmp_path) / SINGLE_FILE
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CorruptDataError, match=r"model\.safetensors"):
        weights_digest(tmp_path)


def test_a_folder_without_weights_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no weights"):
        weights_digest(tmp_path)


def test_default_layer_ids_ascend_or_are_refused() -> None:
    assert default_layer_ids(7) == (2, 3, 4)
    assert default_layer_ids(8) == (2, 4, 5)
    assert default_layer_ids(36) == (2, 18, 33)
    for shallow in (1, 2, 4, 5, 6):
        with pytest.raises(InputError, match="explicitly"):
            default_layer_ids(shallow)
