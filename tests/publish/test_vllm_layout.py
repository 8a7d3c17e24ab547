"""What the plugin refuses, and how it names and digests tensors: everything that needs no engine."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn

from publish.vllm_plugin.checkpoint import artifact_digest, fit
from publish.vllm_plugin.errors import EngineRefusedError, LayoutRefusedError
from publish.vllm_plugin.fingerprints import (
    checkpoint_views,
    digests_of,
    draft_name,
    fingerprint,
    owned_and_aliased,
)
from publish.vllm_plugin.layout import LiveLayout, check_config, check_vocab_map, frozen_facts, match_names
from training import artifact

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 4,
    "vocab_size": 8,
    "draft_vocab_size": 3,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def live_layout(**tensors: Tensor) -> LiveLayout:
    named = {"fc.weight": torch.zeros(4, 12), "lm_head.weight": torch.zeros(3, 4), **tensors}
    return LiveLayout(
        method="eagle3",
        shapes={name: tuple(tensor.shape) for name, tensor in named.items()},
        dtypes={name: tensor.dtype for name, tensor in named.items()},
        aliased=("embed_tokens.weight",),
        target_vocab=8,
        config=CONFIG,
    )


REDUCED = live_layout(d2t=torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_fingerprints_follow_the_artifacts_own_scheme(dtype: torch.dtype) -> None:
    tensors = {
        "a": torch.arange(6).reshape(2, 3).to(dtype),
        "b": torch.zeros(0, 3).to(dtype),
        "c": torch.ones(()).to(dtype),
    }
    ours = digests_of(tensors)
    assert ours == artifact.read_tensor_digests(save(tensors), where="test")
    assert fingerprint(ours) == artifact.fingerprint(ours)


def test_artifact_digests_follow_the_artifacts_own_scheme() -> None:
    manifest = artifact.TrainingManifest(
        method="eagle3", target_id="t", tokenizer_digest="t", hidden_size=4, vocab_size=8, layer_ids=(1, 2, 3),
        lake_revision="r", selection_digest="s", versions=(0, 1), parent=None, spec={"lr": 1e-4, "names": ["\u00e9"]},
        packages={}, steps=1, tokens=2,
    )  # fmt: skip
    tensors = {"fc.weight": "0" * 64}
    raw = manifest.model_dump(mode="json", exclude_unset=True)
    assert artifact_digest(CONFIG, raw, tensors) == artifact.artifact_digest(CONFIG, manifest, tensors)


class Fused(nn.Module):
    def __init__(self, rows: int, **attributes: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(rows * 2, dtype=torch.float32).reshape(rows, 2))
        for name, value in attributes.items():
            setattr(self, name, value)


def test_fused_and_padded_parameters_are_seen_as_a_checkpoint_holds_them() -> None:
    model = nn.Module()
    model.qkv_proj = Fused(8, output_sizes=[4, 2, 2])
    model.gate_up_proj = Fused(6, output_sizes=[3, 3])
    model.embed_tokens = Fused(64, org_vocab_size=10)
    model.lm_head = nn.Module()
    model.lm_head.weight = model.embed_tokens.weight
    views = checkpoint_views(model)
    assert {name: tuple(view.shape) for name, view in views.items()} == {
        "q_proj.weight": (4, 2),
        "k_proj.weight": (2, 2),
        "v_proj.weight": (2, 2),
        "gate_proj.weight": (3, 2),
        "up_proj.weight": (3, 2),
        "embed_tokens.weight": (10, 2),
    }
    assert torch.equal(views["v_proj.weight"], model.qkv_proj.weight[6:])


@pytest.mark.parametrize("sizes", [[4, 2], [4, 2, 4], []])
def test_a_fused_parameter_of_unknown_parts_is_refused(sizes: list[int]) -> None:
    model = nn.Module()
    model.qkv_proj = Fused(8, output_sizes=sizes)
    with pytest.raises(EngineRefusedError, match="tensor parallelism or a quantised layout"):
        checkpoint_views(model)


def test_a_weight_that_was_packed_away_is_refused_not_fingerprinted() -> None:
    model = nn.Module()
    model.proj = Fused(0)
    with pytest.raises(EngineRefusedError, match="proj.weight is empty"):
        checkpoint_views(model)


def test_what_shares_memory_with_the_target_is_aliased_never_owned() -> None:
    target, draft = nn.Module(), nn.Module()
    target.embed_tokens = Fused(4)
    draft.embed_tokens = target.embed_tokens
    draft.part = nn.Module()
    draft.part.weight = nn.Parameter(target.embed_tokens.weight.data[1:3])
    draft.fc = Fused(3)
    owned, aliased = owned_and_aliased(draft, target)
    assert list(owned) == ["fc.weight"]
    assert aliased == ("embed_tokens.weight", "part.weight")


@pytest.mark.parametrize(
    ("live", "name"),
    [
        ("model.layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("midlayer.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("model.midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"),
        ("draft_id_to_target_id", "d2t"),
        ("lm_head.weight", "lm_head.weight"),
        ("draft_model.fc.weight", "draft_model.fc.weight"),
    ],
)
def test_spellings_that_vllm_takes_as_equal_have_one_name(live: str, name: str) -> None:
    assert draft_name(live) == name


def test_t2d_may_be_absent_or_present() -> None:
    names = ["fc.weight", "lm_head.weight", "d2t"]
    assert set(match_names(names, REDUCED)) == set(names)
    assert set(match_names([*names, "t2d"], REDUCED)) == {*names, "t2d"}


def vocab(*offsets: int, **tensors: Tensor) -> dict[str, Tensor]:
    return {"d2t": torch.tensor(offsets), **tensors}


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        (vocab(0, 1, 6), r"ids 0..8, the target has \[0, 8\)"),
        (vocab(-1, 0, 0), r"ids -1..2"),
        (vocab(2, 1, 0), "strictly increasing"),
        (vocab(0, 1, 2, t2d=torch.ones(8, dtype=torch.bool)), "t2d does not mark"),
        (vocab(0, 1, 2, t2d=torch.ones(3, dtype=torch.bool)), "t2d does not mark"),
    ],
)
def test_a_wrong_vocabulary_map_is_refused(tensors: dict[str, Tensor], problem: str) -> None:
    with pytest.raises(LayoutRefusedError, match=problem):
        check_vocab_map(tensors, REDUCED)


def test_a_full_vocabulary_draft_may_carry_only_the_identity_map() -> None:
    full = live_layout()
    check_vocab_map(vocab(*[0] * 8), full)
    check_vocab_map({}, full)
    with pytest.raises(LayoutRefusedError, match="not the identity"):
        check_vocab_map(vocab(0, 0, 1), full)
    with pytest.raises(LayoutRefusedError, match="target ids 0..14"):
        check_vocab_map({"d2t": torch.arange(8)}, full)


@pytest.mark.parametrize(
    "change",
    [
        {
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
            "eagle_aux_hidden_state_layer_ids": None,
        },
        {"norm_before_residual": True},
        {"norm_before_fc": True},
        {"rms_norm_eps": 1e-5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"draft_vocab_size": 4},
        {"block_size": 8},
        {"dflash_config": {"mask_token_id": 3}},
        {"architectures": ["Qwen3ForCausalLMEagle3"]},
        {"logit_scale": 0.5},
    ],
)
def test_another_arithmetic_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(LayoutRefusedError, match="does not fit the live eagle3 draft"):
        check_config(CONFIG | change, REDUCED)


def test_other_spellings_of_the_same_config_are_accepted() -> None:
    spelled = {
        name: value for name, value in CONFIG.items() if name not in ("rope_parameters", "eagle_config")
    }
    spelled |= {
        "rope_theta": 10000,
        "norm_before_residual": False,
        "target_hidden_size": 4,
        "transformers_version": "9",
    }
    check_config(spelled, REDUCED)


def test_layer_ids_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(LayoutRefusedError, match=r"\[1, 2, 4\] at the top and \[1, 2, 3\] in eagle_config"):
        frozen_facts(CONFIG | {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]})


def test_only_what_the_draft_owns_is_staged() -> None:
    tensors = {
        "fc.weight": torch.ones(4, 12),
        "lm_head.weight": torch.ones(3, 4),
        "d2t": torch.tensor([0, 1, 2]),
        "t2d": torch.tensor([1, 0, 1, 0, 1, 0, 0, 0], dtype=torch.bool),
    }
    staged = fit(tensors, digests_of(tensors), CONFIG, digest="d", uri="u", live=REDUCED)
    assert set(staged.tensors) == {"fc.weight", "lm_head.weight", "d2t"}
    assert staged.digests == {name: digests_of(tensors)[name] for name in staged.tensors}


class HalfLoading:
    """A stand-in for vLLM's reload: writes some tensors, then fails as often as it is told to."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def __call__(
        self, model: nn.Module, config: object, weights: list[tuple[str, Tensor]], internals: object
    ) -> None:
        views = {draft_name(name): view for name, view in checkpoint_views(model).items()}
        for index, (name, tensor) in enumerate(weights):
            if index == 1 and self.failures:
                self.failures -= 1
                raise RuntimeError("out of memory")
            views[name].copy_(tensor)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Any]:
    module = pytest.importorskip("publish.vllm_plugin.backend", exc_type=ImportError)

    def build(failures: int) -> Any:
        monkeypatch.setattr(module, "reload_whole", HalfLoading(failures))
        target, draft = nn.Module(), nn.Module()
        target.embed = Fused(4)
        draft.fc, draft.norm, draft.embed = Fused(3), Fused(2), target.embed
        config = SimpleNamespace(speculative_config=None, model_config=None, parallel_config=None)
        made = module.DraftlakeBackend(None, config, torch.device("cpu"), target)
        made.set_weight_update_target(draft, None)
        tensors = {"fc.weight": torch.full((3, 2), 7.0), "norm.weight": torch.full((2, 2), 8.0)}
        names = {name: name for name in tensors}
        made.staged = module.Staged("new", "uri", tensors, names, digests_of(tensors))
        return made

    return build


def receive(backend: Any, **info: Any) -> None:
    backend.receive_weights(backend.update_info_cls(**info))


@pytest.mark.vllm
def test_a_load_that_fails_half_way_leaves_the_old_draft(backend: Callable[[int], Any]) -> None:
    engine = backend(1)
    before = digests_of(checkpoint_views(engine.model))
    with pytest.raises(
        EngineRefusedError, match=r"failed \(out of memory\); the draft before it serves again"
    ):
        receive(engine, digest="new")
    assert digests_of(checkpoint_views(engine.model)) == before
    assert engine.artifact is None
    receive(engine, digest="new")
    assert engine.artifact == "new"


@pytest.mark.vllm
def test_a_draft_that_cannot_be_put_back_asks_for_a_restart(backend: Callable[[int], Any]) -> None:
    engine = backend(0)
    receive(engine, digest="new")
    engine._load = lambda tensors: None
    with pytest.raises(EngineRefusedError, match="unknown state. Restart the engine"):
        receive(engine, revert=True)


@pytest.mark.vllm
def test_a_commit_can_be_reverted_once(backend: Callable[[int], Any]) -> None:
    engine = backend(0)
    before = digests_of(checkpoint_views(engine.model))
    receive(engine, digest="new")
    assert digests_of(checkpoint_views(engine.model)) != before
    receive(engine, revert=True)
    assert digests_of(checkpoint_views(engine.model)) == before
    assert (engine.artifact, engine.staged) == (None, None)
    with pytest.raises(EngineRefusedError, match="no replaced draft"):
        receive(engine, revert=True)


@pytest.mark.vllm
def test_only_the_staged_artifact_is_loaded(backend: Callable[[int], Any]) -> None:
    engine = backend(0)
    before = digests_of(checkpoint_views(engine.model))
    for digest in ("", "other"):
        with pytest.raises(EngineRefusedError, match="is not staged here; staged is new"):
            receive(engine, digest=digest)
    engine.staged = replace(engine.staged, digest="gone")
    engine.shutdown()
    with pytest.raises(EngineRefusedError, match="staged is nothing"):
        receive(engine, digest="gone")
    assert digests_of(checkpoint_views(engine.model)) == before


@pytest.mark.vllm
def test_a_session_on_the_target_is_refused_by_the_backend(backend: Callable[[int], Any]) -> None:
    engine = backend(0)
    engine.start_weight_update()
    engine.reset_weight_update_target()
    with pytest.raises(EngineRefusedError, match="would write the target"):
        engine.start_weight_update()
