"""Head snapshots: reference logits, identity, encoding, and checkpoints that contradict themselves."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from features.bfloat16 import bf16_to_float32, float32_to_bf16
from features.checkpoint import RawTensor, write_safetensors
from features.errors import CorruptDataError, InputError, LakeContractError
from features.heads import HeadSnapshot, head_from_checkpoint
from features.schema import FeatureDtype

RNG = np.random.default_rng(7)
LM_HEAD = RNG.standard_normal((50, 6)).astype(np.float32)
EMBED = RNG.standard_normal((50, 6)).astype(np.float32)
BIAS = RNG.standard_normal(50).astype(np.float32)
FINAL = RNG.standard_normal((9, 6)).astype(np.float32)

HEADS = {
    "plain": HeadSnapshot(LM_HEAD, FeatureDtype.FLOAT32),
    "untied": HeadSnapshot(LM_HEAD, FeatureDtype.FLOAT32, EMBED),
    "bf16": HeadSnapshot(float32_to_bf16(LM_HEAD), FeatureDtype.BFLOAT16),
    "all": HeadSnapshot(
        float32_to_bf16(LM_HEAD),
        FeatureDtype.BFLOAT16,
        float32_to_bf16(EMBED),
        BIAS,
        logit_scale=0.3,
        softcap=1.5,
    ),
}


def reference_logits(head: HeadSnapshot) -> np.ndarray:
    """In float64, straight from the definition."""
    weights = bf16_to_float32(head.lm_head) if head.dtype is FeatureDtype.BFLOAT16 else head.lm_head
    logits = FINAL.astype(np.float64) @ weights.astype(np.float64).T
    logits = logits + (0 if head.bias is None else head.bias)
    logits = logits * head.logit_scale
    return head.softcap * np.tanh(logits / head.softcap) if head.softcap else logits


@pytest.mark.parametrize("name", sorted(HEADS))
def test_logits_follow_the_definition_bias_then_scale_then_softcap(name: str) -> None:
    found = HEADS[name].logits(FINAL)
    assert found.dtype == np.float32
    # Six float32 products of order one: a few ulp.
    np.testing.assert_allclose(found, reference_logits(HEADS[name]), atol=5e-6)


@pytest.mark.parametrize("chunk", [1, 7, 50, 8192])
@pytest.mark.parametrize("name", sorted(HEADS))
def test_token_logprobs_do_not_depend_on_the_chunk(name: str, chunk: int) -> None:
    ids = np.arange(9) * 5
    logits = reference_logits(HEADS[name]) / 0.8
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    found = HEADS[name].token_logprobs(FINAL, ids, temperature=0.8, chunk=chunk)
    np.testing.assert_allclose(found, expected[np.arange(9), ids], atol=1e-5)


def test_token_logprobs_survive_logits_that_overflow_exp() -> None:
    head = HeadSnapshot(LM_HEAD * 1e4, FeatureDtype.FLOAT32)
    found = head.token_logprobs(FINAL, np.argmax(FINAL @ LM_HEAD.T, axis=1), chunk=8)
    assert np.isfinite(found).all()
    assert (found <= 0).all()


def test_token_logprobs_are_chunked_over_rows_too() -> None:
    many = np.tile(FINAL, (300, 1))
    ids = np.tile(np.arange(9), 300)
    found = HEADS["all"].token_logprobs(many, ids)
    np.testing.assert_allclose(
        found, np.tile(HEADS["all"].token_logprobs(FINAL, np.arange(9)), 300), atol=1e-6
    )


@pytest.mark.parametrize("ids", [[50], [-1]])
def test_a_token_outside_the_vocabulary_is_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="token ids"):
        HEADS["plain"].token_logprobs(FINAL[:1], np.array(ids))


@pytest.mark.parametrize("name", sorted(HEADS))
def test_a_snapshot_survives_its_encoding(name: str) -> None:
    head = HEADS[name]
    found = HeadSnapshot.from_bytes(head.to_bytes())
    assert found.head_id == head.head_id
    assert found.to_bytes() == head.to_bytes()
    np.testing.assert_array_equal(found.lm_head, head.lm_head)
    np.testing.assert_array_equal(found.embedding, head.embedding)


def test_ids_tell_apart_everything_that_changes_logits_or_embedding() -> None:
    bits = float32_to_bf16(LM_HEAD)
    variants = [
        *HEADS.values(),
        HeadSnapshot(LM_HEAD, FeatureDtype.FLOAT32, bias=BIAS),
        HeadSnapshot(LM_HEAD, FeatureDtype.FLOAT32, logit_scale=2.0),
        HeadSnapshot(LM_HEAD, FeatureDtype.FLOAT32, softcap=30.0),
        HeadSnapshot(bits ^ np.uint16(1), FeatureDtype.BFLOAT16),
    ]
    assert len({head.head_id for head in variants}) == len(variants)


def test_an_id_does_not_depend_on_how_a_tied_embedding_was_stored() -> None:
    assert HeadSnapshot(LM_HEAD, FeatureDtype.FLOAT32, LM_HEAD.copy()).head_id == HEADS["plain"].head_id


def test_damaged_bytes_are_refused() -> None:
    raw = HEADS["all"].to_bytes()
    for bad in (raw[:-1], raw[:50], b"", raw + b"x", write_safetensors({}, {})):
        with pytest.raises(CorruptDataError, match="no head snapshot"):
            HeadSnapshot.from_bytes(bad)


def test_arrays_of_another_shape_or_type_are_refused() -> None:
    with pytest.raises(LakeContractError, match="lm_head"):
        HeadSnapshot(LM_HEAD.astype(np.float64), FeatureDtype.FLOAT32)  # type: ignore[arg-type]
    with pytest.raises(LakeContractError, match="bias"):
        HeadSnapshot(LM_HEAD, FeatureDtype.FLOAT32, bias=BIAS[:-1])
    with pytest.raises(LakeContractError, match="softcap"):
        HeadSnapshot(LM_HEAD, FeatureDtype.FLOAT32, softcap=0.0)


def test_bf16_rounds_to_nearest_even_like_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    ties = (np.arange(2**16, dtype=np.uint32) << 16) | 0x8000
    values = np.concatenate([bits, ties, np.arange(2**16, dtype=np.uint32) << 16]).view(np.float32)
    found, nan = float32_to_bf16(values), np.isnan(values)
    expected = values[~nan].astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(found[~nan], expected)
    assert np.isnan(bf16_to_float32(found[nan])).all()


def test_every_bf16_pattern_that_is_a_number_survives_a_round_trip() -> None:
    bits = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
    numbers = bits[~np.isnan(bf16_to_float32(bits))]
    np.testing.assert_array_equal(float32_to_bf16(bf16_to_float32(numbers)), numbers)


def raw(values: np.ndarray, dtype: str = "F32") -> RawTensor:
    return RawTensor(dtype, values.shape, values.tobytes())


def save(folder: Path, tensors: dict[str, RawTensor], **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"hidden_size": 6, **config}))
    (folder / "model.safetensors").write_bytes(write_safetensors(tensors, {"format": "pt"}))
    return folder


EMBED_NAME, HEAD_NAME = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("tied", [True, None])
def test_a_tied_checkpoint_without_lm_head_uses_its_embedding(tmp_path: Path, tied: bool | None) -> None:
    head = head_from_checkpoint(save(tmp_path, {EMBED_NAME: raw(EMBED)}, tie_word_embeddings=tied))
    np.testing.assert_array_equal(head.lm_head, EMBED)
    assert head.embed_tokens is None


def test_an_untied_checkpoint_keeps_both(tmp_path: Path) -> None:
    tensors = {EMBED_NAME: raw(EMBED), HEAD_NAME: raw(LM_HEAD), "lm_head.bias": raw(BIAS)}
    head = head_from_checkpoint(save(tmp_path, tensors, tie_word_embeddings=False))
    np.testing.assert_array_equal(head.lm_head, LM_HEAD)
    np.testing.assert_array_equal(head.embedding, EMBED)
    np.testing.assert_array_equal(head.bias, BIAS)


def test_a_tied_flag_with_a_different_lm_head_is_refused(tmp_path: Path) -> None:
    save(tmp_path, {EMBED_NAME: raw(EMBED), HEAD_NAME: raw(LM_HEAD)}, tie_word_embeddings=True)
    with pytest.raises(CorruptDataError, match="tie_word_embeddings is true"):
        head_from_checkpoint(tmp_path)


def test_a_tied_flag_with_an_equal_lm_head_is_tied(tmp_path: Path) -> None:
    save(tmp_path, {EMBED_NAME: raw(EMBED), HEAD_NAME: raw(EMBED)}, tie_word_embeddings=True)
    assert head_from_checkpoint(tmp_path).embed_tokens is None


def test_an_untied_flag_without_lm_head_is_refused(tmp_path: Path) -> None:
    save(tmp_path, {EMBED_NAME: raw(EMBED)}, tie_word_embeddings=False)
    with pytest.raises(CorruptDataError, match="random head"):
        head_from_checkpoint(tmp_path)


def test_bf16_is_kept_as_bits_and_half_is_widened(tmp_path: Path) -> None:
    bits = float32_to_bf16(EMBED)
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    head = head_from_checkpoint(save(tmp_path / "a", {EMBED_NAME: raw(bits, "BF16")}))
    assert head.dtype is FeatureDtype.BFLOAT16
    np.testing.assert_array_equal(head.lm_head, bits)
    half = head_from_checkpoint(save(tmp_path / "b", {EMBED_NAME: raw(EMBED.astype("<f2"), "F16")}))
    assert half.dtype is FeatureDtype.FLOAT32
    np.testing.assert_array_equal(half.lm_head, EMBED.astype(np.float16).astype(np.float32))


def test_scale_and_softcap_come_from_the_config(tmp_path: Path) -> None:
    head = head_from_checkpoint(
        save(tmp_path, {EMBED_NAME: raw(EMBED)}, logit_scale=0.25, final_logit_softcapping=30.0)
    )
    assert (head.logit_scale, head.softcap) == (0.25, 30.0)
    head = head_from_checkpoint(save(tmp_path, {EMBED_NAME: raw(EMBED)}, logits_scaling=8.0))
    assert head.logit_scale == 0.125


def test_a_quantised_or_unknown_head_is_refused(tmp_path: Path) -> None:
    save(tmp_path, {EMBED_NAME: raw(np.zeros((50, 6), np.int8), "I8")})
    with pytest.raises(InputError, match="I8"):
        head_from_checkpoint(tmp_path)
    save(tmp_path, {"something.weight": raw(EMBED)})
    with pytest.raises(InputError, match="embed_tokens"):
        head_from_checkpoint(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_of_transformers_gives_the_logits_of_its_model(tmp_path: Path, tied: bool) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    hidden = torch.randn(3, 16)
    head = head_from_checkpoint(tmp_path)
    # One float32 product of width 16 in two libraries.
    np.testing.assert_allclose(head.logits(hidden.numpy()), model.lm_head(hidden).detach().numpy(), atol=1e-6)
    assert (head.embed_tokens is None) is tied
