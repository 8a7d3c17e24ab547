"""The transformers tap: every row is what a plain forward says it is, whatever the architecture."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from features.collect.taps import hf  # noqa: E402
from features.errors import InputError, ProofFailedError  # noqa: E402
from features.heads import head_from_checkpoint  # noqa: E402

LAYERS, HIDDEN, VOCAB = 4, 32, 64
COMMON = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
    "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TARGETS = {
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-untied": ("LlamaConfig", {"tie_word_embeddings": False}),
    "qwen2-tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3-untied": ("Qwen3Config", {"tie_word_embeddings": False}),
    # Small caps, so that a forgotten softcap shows in the logits.
    "gemma2-softcap": ("Gemma2Config", {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0}),
    "gemma3-sliding": ("Gemma3TextConfig", {"sliding_window": 4, "final_logit_softcapping": 3.0}),
}
# Two float32 forwards with other batch shapes reorder sums: about 1e-6 relative, observed.
ATOL = 2e-4
ALL_IDS = tuple(range(LAYERS + 1))


def make_model(name: str, dtype: "torch.dtype" = torch.float32) -> "torch.nn.Module":
    config_name, extra = TARGETS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**COMMON, **extra)
    attention = "eager" if "gemma2" in name else "sdpa"  # only eager applies the attention softcap
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for module in model.modules():  # norms of ones would hide a norm applied twice or not at all
        if "RMSNorm" in type(module).__name__:
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
    return model.to(dtype).eval()


def tokens(length: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, VOCAB, length)]


@pytest.fixture(scope="module", params=sorted(TARGETS))
def model(request: pytest.FixtureRequest) -> "torch.nn.Module":
    return make_model(request.param)


@pytest.fixture(scope="module")
def llama() -> "torch.nn.Module":
    return make_model("llama-untied")


def plain_states(model: "torch.nn.Module", ids: Sequence[int]) -> list[np.ndarray]:
    with torch.no_grad():
        out = model(input_ids=torch.tensor([list(ids)]), output_hidden_states=True)
    return [state[0].float().numpy() for state in out.hidden_states]


def test_rows_equal_output_hidden_states_id_by_id(model: "torch.nn.Module") -> None:
    ids = tokens(11)
    aux, final = hf.forward_features(model, [ids], ALL_IDS)[0]
    plain = plain_states(model, ids)
    by_id = np.split(aux, len(ALL_IDS), axis=1)
    for k in range(LAYERS):
        np.testing.assert_allclose(by_id[k], plain[k], atol=ATOL, err_msg=f"layer id {k}")
    np.testing.assert_allclose(final, plain[-1], atol=ATOL)


def test_the_last_id_is_pre_norm(model: "torch.nn.Module") -> None:
    ids = tokens(7)
    aux, final = hf.forward_features(model, [ids], [LAYERS])[0]
    with torch.no_grad():
        normed = model.get_decoder().norm(torch.from_numpy(aux)[None])[0].numpy()
    np.testing.assert_allclose(normed, final, atol=ATOL)
    assert np.abs(aux - final).max() > 0.1


def test_final_and_head_snapshot_give_the_models_own_logits(model: "torch.nn.Module") -> None:
    ids = tokens(9)
    _, final = hf.forward_features(model, [ids], [1])[0]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(hf.head_from_model(model).logits(final), logits, atol=ATOL)


def test_a_batch_of_unequal_lengths_equals_single_sequences(model: "torch.nn.Module") -> None:
    batch = [tokens(n, seed=n) for n in (3, 12, 1, 7)]
    together = hf.forward_features(model, batch, (1, 2, LAYERS))
    for sequence, (aux, final) in zip(batch, together, strict=True):
        alone_aux, alone_final = hf.forward_features(model, [sequence], (1, 2, LAYERS))[0]
        assert aux.shape == (len(sequence), 3 * HIDDEN)
        assert final.shape == (len(sequence), HIDDEN)
        np.testing.assert_allclose(aux, alone_aux, atol=ATOL)
        np.testing.assert_allclose(final, alone_final, atol=ATOL)


def test_the_aux_probe_passes_on_the_tap_itself(model: "torch.nn.Module") -> None:
    report = hf.aux_probe(model, (0, 2, LAYERS), tokens(16))
    assert set(report.row_error) == {0, 2, LAYERS}
    assert set(report.block_error) == {0, 2}
    assert max(report.row_error.values()) < report.tolerance


@pytest.mark.parametrize("name", ["llama-untied", "gemma2-softcap"])
def test_the_aux_probe_passes_in_bfloat16(name: str) -> None:
    report = hf.aux_probe(make_model(name, torch.bfloat16), (1, 2, LAYERS), tokens(16))
    assert report.compute_dtype == "bfloat16"


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_aux_probe_refuses_ids_off_by_one(shift: int, dtype: "torch.dtype") -> None:
    def off_by_one(model: "torch.nn.Module", batch: object, ids: Sequence[int]) -> list[hf.Features]:
        return hf.forward_features(model, batch, [k + shift for k in ids])

    with pytest.raises(ProofFailedError, match="layer id 1"):
        hf.aux_probe(make_model("llama-untied", dtype), (1, 3), tokens(16), tap=off_by_one)


def test_the_aux_probe_refuses_a_post_norm_last_id(llama: "torch.nn.Module") -> None:
    def post_norm(model: "torch.nn.Module", batch: object, ids: Sequence[int]) -> list[hf.Features]:
        return [(final, final) for _, final in hf.forward_features(model, batch, ids)]

    with pytest.raises(ProofFailedError, match=f"layer id {LAYERS}"):
        hf.aux_probe(llama, (LAYERS,), tokens(16), tap=post_norm)


def test_the_aux_probe_does_not_judge_the_final_rows(llama: "torch.nn.Module") -> None:
    def pre_norm_final(model: "torch.nn.Module", batch: object, ids: Sequence[int]) -> list[hf.Features]:
        wrong = hf.forward_features(model, batch, [LAYERS])
        return [
            (aux, w) for (aux, _), (w, _) in zip(hf.forward_features(model, batch, ids), wrong, strict=True)
        ]

    assert hf.aux_probe(llama, (1, 2), tokens(16), tap=pre_norm_final).layer_ids == (1, 2)


def test_the_aux_probe_refuses_an_lm_head_that_reads_something_else(llama: "torch.nn.Module") -> None:
    handle = llama.lm_head.register_forward_pre_hook(lambda _m, args: (args[0] / 2,))
    try:
        # The rescaling runs before the probe's own hook sees the input.
        with pytest.raises(ProofFailedError, match="LM head does not read"):
            hf.aux_probe(llama, (1, 2), tokens(8))
    finally:
        handle.remove()


def test_the_tap_leaves_no_hook_and_no_mode_behind(llama: "torch.nn.Module") -> None:
    llama.train()
    try:
        hf.forward_features(llama, [tokens(4)], ALL_IDS)
        hf.aux_probe(llama, (1,), tokens(4))
        assert llama.training
    finally:
        llama.eval()
    before = hf.forward_features(llama, [tokens(4)], (1,))[0][0]
    capturing = sum(len(block._forward_pre_hooks) for block in llama.get_decoder().layers)
    assert capturing == 0
    np.testing.assert_array_equal(before, hf.forward_features(llama, [tokens(4)], (1,))[0][0])


def test_dropout_is_off_while_features_are_read() -> None:
    config = transformers.LlamaConfig(**COMMON, attention_dropout=0.5)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).train()
    first, second = (hf.forward_features(model, [tokens(12)], (2,))[0][0] for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("ids", [[], [2, 1], [1, 1], [-1, 2], [1, LAYERS + 1]])
def test_unusable_layer_ids_are_refused_with_the_convention(llama: "torch.nn.Module", ids: list[int]) -> None:
    with pytest.raises(InputError, match="blocks applied"):
        hf.forward_features(llama, [tokens(4)], ids)


def test_an_empty_sequence_is_refused(llama: "torch.nn.Module") -> None:
    with pytest.raises(InputError, match="at least one token"):
        hf.forward_features(llama, [tokens(3), []], [1])


def test_a_model_without_decoder_blocks_is_refused() -> None:
    with pytest.raises(InputError, match="'layers' and 'norm'"):
        hf.forward_features(torch.nn.Linear(2, 2), [[1]], [1])


@pytest.mark.parametrize("tied", [True, False])
def test_a_live_models_head_keeps_bfloat16_bits_and_tying(tied: bool) -> None:
    model = make_model("llama-tied" if tied else "llama-untied", torch.bfloat16)
    head = hf.head_from_model(model)
    assert head.lm_head.dtype == np.uint16
    bits = model.lm_head.weight.detach().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(head.lm_head, bits)
    assert (head.embed_tokens is None) == tied


@pytest.mark.parametrize("name", ["llama-tied", "llama-untied", "gemma2-softcap"])
def test_a_live_models_head_has_the_id_of_its_checkpoints_head(tmp_path: Path, name: str) -> None:
    model = make_model(name)
    model.save_pretrained(tmp_path)
    assert hf.head_from_model(model).head_id == head_from_checkpoint(tmp_path).head_id
