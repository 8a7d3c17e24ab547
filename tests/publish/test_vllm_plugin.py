"""The plugin inside a real vLLM server: swaps, refusals, and what they leave behind."""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from features.errors import DraftLayoutError, EngineError
from publish.engines import AcceptanceCounters, EngineState, GeneratedSequence
from publish.launch import LocalServer, serve_command
from publish.swap import expected_fingerprint, swap_draft
from publish.vllm_client import VllmEngine
from publish.vllm_plugin.compat import installed_release, internals_for
from training.artifact import DraftArtifact, TrainingManifest, fingerprint, load_artifact, read_tensor_digests

pytestmark = pytest.mark.vllm

HIDDEN, VOCAB, DRAFT_VOCAB, LAYERS = 128, 1024, 300, 8
AUX = (2, 4, 5)
PROMPTS = [[4 + (i * 37 + j * 13) % 1000 for j in range(9 + 3 * i)] for i in range(8)]
TOKENS = 48
Tensors = dict[str, torch.Tensor]
ON_GPU = torch.cuda.is_available()


def write_target(folder: Path, *, seed: int) -> LlamaForCausalLM:
    """A random tied Llama with a byte-level tokenizer, the smallest that vLLM serves with real aux layers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        vocab_size=VOCAB,
        intermediate_size=192,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.15,  # wide enough that greedy text is no mere repetition
    )
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model.save_pretrained(folder)
    vocab = {f"t{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="t0", bos_token="t1", eos_token="t2"
    ).save_pretrained(folder)
    return model


def greedy(model: LlamaForCausalLM, prompt: Sequence[int], tokens: int = TOKENS) -> tuple[int, ...]:
    with torch.no_grad():
        ids = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            eos_token_id=-1,
        )
    return tuple(int(token) for token in ids[0, len(prompt) :])


def draft_config(aux: Sequence[int] = AUX) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 192,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": list(aux),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(aux), "use_aux_hidden_state": True},
    }


def random_draft(seed: int, target_ids: torch.Tensor) -> Tensors:
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.05

    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[target_ids] = True
    return {
        "midlayer.self_attn.q_proj.weight": rand(128, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": rand(64, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": rand(64, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": rand(HIDDEN, 128),
        "midlayer.mlp.gate_proj.weight": rand(192, HIDDEN),
        "midlayer.mlp.up_proj.weight": rand(192, HIDDEN),
        "midlayer.mlp.down_proj.weight": rand(HIDDEN, 192),
        "midlayer.input_layernorm.weight": torch.ones(HIDDEN),
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        "midlayer.post_attention_layernorm.weight": torch.ones(HIDDEN),
        "fc.weight": rand(HIDDEN, HIDDEN * len(AUX)),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": rand(DRAFT_VOCAB, HIDDEN),
        "d2t": target_ids - torch.arange(DRAFT_VOCAB),
        "t2d": mask,
    }


def fitted_draft(
    model: LlamaForCausalLM, texts: Sequence[Sequence[int]], target_ids: torch.Tensor
) -> Tensors:
    """A draft whose first proposal is right more often than chance: its layer is the identity on the
    last aux row, and its head the ridge regression of the token after next on that row."""
    rows, labels = [], []
    with torch.no_grad():
        for text in texts:
            hidden = model(torch.tensor([text]), output_hidden_states=True).hidden_states[AUX[-1]][0]
            rows.append(hidden[:-2])
            labels += list(text[2:])
    x = torch.cat(rows)
    x = x / x.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()
    position = {int(token): i for i, token in enumerate(target_ids)}
    keep = [i for i, label in enumerate(labels) if label in position]
    y = torch.zeros(len(keep), DRAFT_VOCAB)
    y[torch.arange(len(keep)), torch.tensor([position[labels[i]] for i in keep])] = 1
    x = x[keep]
    head = torch.linalg.solve(x.T @ x + 0.1 * torch.eye(HIDDEN), x.T @ y).T
    tensors = random_draft(2, target_ids)
    for name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight", "fc.weight"):
        tensors[name] = torch.zeros_like(tensors[name])
    tensors["fc.weight"][:, -HIDDEN:] = torch.eye(HIDDEN)
    tensors["lm_head.weight"] = head.contiguous()
    return tensors


def write_artifact(folder: Path, tensors: Tensors, config: Mapping[str, Any] | None = None) -> DraftArtifact:
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config or draft_config()))
    manifest = TrainingManifest(
        method="eagle3",
        target_id="tiny",
        tokenizer_digest="t",
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        layer_ids=AUX,
        lake_revision="r",
        selection_digest="s",
        versions=(0,),
        parent=None,
        spec={"lr": 1e-4},
        packages={},
        steps=1,
        tokens=1,
    )
    (folder / "manifest.json").write_text(manifest.model_dump_json())
    return load_artifact(folder)


@dataclass(frozen=True)
class World:
    """Models on disk, and what the target says without any engine."""

    root: Path
    registry: Path
    target: Path
    model: LlamaForCausalLM
    reference: tuple[tuple[int, ...], ...]
    target_ids: torch.Tensor
    random: DraftArtifact
    fitted: DraftArtifact

    @property
    def boot(self) -> Path:
        return self.registry / "random"

    def uri(self, name: str) -> str:
        return str(self.registry / name)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    root = tmp_path_factory.mktemp("engine")
    model = write_target(root / "target", seed=0)
    reference = tuple(greedy(model, prompt) for prompt in PROMPTS)
    said = sorted({token for text in reference for token in text})
    unsaid = [token for token in range(3, VOCAB) if token not in set(said)]
    ids = torch.tensor(sorted([*said[:DRAFT_VOCAB], *unsaid[: max(0, DRAFT_VOCAB - len(said))]]))
    texts = [[*prompt, *text] for prompt, text in zip(PROMPTS, reference, strict=True)]
    registry = root / "registry"
    return World(
        root=root,
        registry=registry,
        target=root / "target",
        model=model,
        reference=reference,
        target_ids=ids,
        random=write_artifact(registry / "random", random_draft(1, ids)),
        fitted=write_artifact(registry / "fitted", fitted_draft(model, texts, ids)),
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def local_server(world: World, draft: Path | None, *, target: Path | None = None) -> LocalServer:
    command = serve_command(
        target or world.target,
        draft,
        port=free_port(),
        registry_roots=[world.uri("")],
        device="gpu" if ON_GPU else "cpu",
        max_model_len=320,
    )
    # Triton multiplies float32 in TF32 by default, too coarse to compare text with a float32 reference.
    env = {**command.env, "VLLM_LOGGING_LEVEL": "WARNING", "TRITON_F32_DEFAULT": "ieee"}
    command = replace(command, env=env)
    return LocalServer(command, log_path=world.root / f"server-{command.base_url.split(':')[-1]}.log")


@dataclass(frozen=True)
class PlainRun:
    """What an engine without speculation answered."""

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float | None, ...], ...]
    state_error: str
    prepare_error: str
    counters_error: str


@pytest.fixture(scope="module")
def second_target(world: World) -> Path:
    write_target(world.root / "target-v1", seed=7)
    return world.root / "target-v1"


@pytest.fixture(scope="module")
def plain(world: World, second_target: Path) -> PlainRun:
    """A server of the *second* target without a draft; ended before the shared one starts."""

    def error_of(call: Callable[[], object]) -> str:
        with pytest.raises(EngineError) as caught:
            call()
        return str(caught.value)

    with local_server(world, None, target=second_target) as engine:
        said = engine.generate(PROMPTS, max_tokens=TOKENS, logprobs=True, ignore_eos=True)
        return PlainRun(
            tokens=tuple(sequence.token_ids for sequence in said),
            logprobs=tuple(sequence.logprobs for sequence in said),
            state_error=error_of(engine.state),
            prepare_error=error_of(lambda: engine.prepare(world.uri("fitted"), world.fitted.digest)),
            counters_error=error_of(engine.counters),
        )


@pytest.fixture(scope="module")
def engine(world: World, plain: PlainRun) -> Iterator[VllmEngine]:
    server = local_server(world, world.boot)
    with server as running:
        yield running
        assert "Traceback" not in server.log_tail(5)


def says_reference(engine: VllmEngine, world: World) -> bool:
    said = engine.generate(PROMPTS, max_tokens=TOKENS, ignore_eos=True)
    return tuple(sequence.token_ids for sequence in said) == world.reference


def swap_to(engine: VllmEngine, world: World, name: str) -> None:
    artifact = getattr(world, name)
    swap_draft([engine], artifact, world.uri(name)).require_success()


def tau_of(engine: VllmEngine) -> float:
    before = engine.counters()
    engine.generate(PROMPTS, max_tokens=TOKENS, ignore_eos=True)
    return (engine.counters() - before).tau


def test_the_boot_draft_reports_its_own_artifacts_fingerprint(engine: VllmEngine, world: World) -> None:
    state = engine.state()
    assert state.draft_artifact is None
    assert state.draft_fingerprint == expected_fingerprint(world.random, state.draft_tensors)
    assert set(world.random.tensors) - set(state.draft_tensors) == {"t2d"}
    assert state.owns_lm_head
    assert not state.owns_embed_tokens
    assert state.aliased == ("embed_tokens.weight",)
    assert (state.method, state.num_speculative_tokens) == ("eagle3", 3)


def test_the_target_fingerprint_is_that_of_its_checkpoint(engine: VllmEngine, world: World) -> None:
    raw = (world.target / "model.safetensors").read_bytes()
    assert engine.state().target_fingerprint == fingerprint(read_tensor_digests(raw, where="target"))


def test_greedy_text_with_speculation_equals_greedy_text_without(engine: VllmEngine, world: World) -> None:
    before = engine.counters()
    assert says_reference(engine, world)
    rounds = engine.counters() - before
    assert rounds.drafts > 0
    assert rounds.draft_tokens == 3 * rounds.drafts
    assert len(rounds.accepted_per_position) == 3


def test_a_swap_raises_acceptance_and_leaves_text_and_target_alone(engine: VllmEngine, world: World) -> None:
    swap_to(engine, world, "random")
    stale = tau_of(engine)
    report = swap_draft([engine], world.fitted, world.uri("fitted"))
    report.require_success()
    (outcome,) = report.outcomes
    assert outcome.outcome == "swapped"
    assert outcome.before is not None
    assert outcome.after is not None
    assert outcome.after.draft_artifact == world.fitted.digest
    assert outcome.after.draft_fingerprint == expected_fingerprint(world.fitted, outcome.after.draft_tensors)
    assert outcome.after.draft_fingerprint != outcome.before.draft_fingerprint
    assert outcome.after.target_fingerprint == outcome.before.target_fingerprint
    assert outcome.after.aliased == outcome.before.aliased
    assert set(outcome.seconds) == {"pause", "load", "verify", "resume", "total"}
    assert outcome.seconds["total"] < 5
    assert says_reference(engine, world)
    # The fitted head was regressed on these very texts: far above the random draft's near-zero acceptance.
    assert tau_of(engine) > stale + 0.2


def test_a_swap_while_requests_run_keeps_their_greedy_text(engine: VllmEngine, world: World) -> None:
    swap_to(engine, world, "random")
    prompts = PROMPTS[:4]
    long = [greedy(world.model, prompt, 200) for prompt in prompts]
    engine.prepare(world.uri("fitted"), world.fitted.digest)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, prompts, max_tokens=200, ignore_eos=True)
        start = engine.counters().drafts
        while engine.counters().drafts < start + 30:
            time.sleep(0.01)
        engine.commit(world.fitted.digest)
        assert not running.done(), "the requests ended before the swap: nothing was shown"
        said = running.result()
    assert [sequence.token_ids for sequence in said] == long


def test_a_swap_to_the_draft_that_serves_pauses_nothing(engine: VllmEngine, world: World) -> None:
    swap_to(engine, world, "fitted")
    (outcome,) = swap_draft([engine], world.fitted, world.uri("fitted")).outcomes
    assert outcome.outcome == "already_current"
    assert not outcome.seconds


def _missing(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != "norm.weight"}


def _no_head(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}


def _foreign_prefix(tensors: Tensors) -> Tensors:
    return {f"draft_model.{name}": tensor for name, tensor in tensors.items()}


def _twice(tensors: Tensors) -> Tensors:
    return tensors | {"layers.0.hidden_norm.weight": torch.ones(HIDDEN)}


def _nan(tensors: Tensors) -> Tensors:
    spoiled = tensors["fc.weight"].clone()
    spoiled[3, 5] = float("nan")
    return tensors | {"fc.weight": spoiled}


def _ids_for_offsets(tensors: Tensors) -> Tensors:
    return tensors | {"d2t": torch.arange(DRAFT_VOCAB) + 800}


def _falling_ids(tensors: Tensors) -> Tensors:
    return tensors | {"d2t": tensors["d2t"] - 2 * torch.arange(DRAFT_VOCAB) + 2 * DRAFT_VOCAB}


def _other_mask(tensors: Tensors) -> Tensors:
    return tensors | {"t2d": ~tensors["t2d"]}


def _bfloat16(tensors: Tensors) -> Tensors:
    return {n: t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in tensors.items()}


BAD_DRAFTS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "missing": (_missing, r"missing \['norm.weight'\]"),
    "no_head": (_no_head, r"missing \['lm_head.weight'\]"),
    "extra": (lambda t: t | {"extra.weight": torch.ones(2)}, r"unknown \['extra.weight'\]"),
    "embedding": (lambda t: t | {"embed_tokens.weight": torch.ones(VOCAB, HIDDEN)}, "shares with the target"),
    "foreign_prefix": (_foreign_prefix, "unknown"),
    "twice": (_twice, "same tensor"),
    "shape": (lambda t: t | {"fc.weight": torch.ones(HIDDEN, HIDDEN)}, r"fc.weight has shape \[128, 128\]"),
    "nan": (_nan, "fc.weight has 1 NaN"),
    "dtype": (_bfloat16, "is BF16, expected F32"),
    "d2t_range": (_ids_for_offsets, "d2t reaches target ids"),
    "d2t_order": (_falling_ids, "d2t"),
    "t2d": (_other_mask, "t2d does not mark"),
}


@pytest.mark.parametrize("fault", sorted(BAD_DRAFTS))
def test_a_draft_that_does_not_fit_is_refused_before_the_engine_is_touched(
    engine: VllmEngine, world: World, fault: str
) -> None:
    spoil, message = BAD_DRAFTS[fault]
    bad = write_artifact(
        world.registry / f"bad-{fault}", spoil(load_file(world.registry / "random" / "model.safetensors"))
    )
    before = engine.state()
    with pytest.raises(DraftLayoutError, match=message):
        engine.prepare(world.uri(f"bad-{fault}"), bad.digest)
    assert engine.state() == before


def test_a_draft_for_other_layers_is_refused_naming_both(engine: VllmEngine, world: World) -> None:
    other = write_artifact(
        world.registry / "bad-layers", random_draft(1, world.target_ids), draft_config((3, 5, 6))
    )
    with pytest.raises(DraftLayoutError, match=r"aux_layer_ids \[3, 5, 6\], expected \[2, 4, 5\]"):
        engine.prepare(world.uri("bad-layers"), other.digest)


def test_an_artifact_outside_the_allowed_roots_is_refused(engine: VllmEngine, world: World) -> None:
    outside = write_artifact(world.root / "outside", random_draft(1, world.target_ids))
    os.symlink(world.root / "outside", world.registry / "link")
    for uri in (str(world.root / "outside"), world.uri("../outside"), world.uri("link"), "s3://bucket/draft"):
        with pytest.raises(EngineError, match="under none of the registry roots"):
            engine.prepare(uri, outside.digest)


def test_an_artifact_with_another_digest_is_refused(engine: VllmEngine, world: World) -> None:
    with pytest.raises(
        EngineError, match=f"holds artifact {world.fitted.digest}, expected {world.random.digest}"
    ):
        engine.prepare(world.uri("fitted"), world.random.digest)


def test_a_file_cut_short_is_refused(engine: VllmEngine, world: World) -> None:
    cut = write_artifact(world.registry / "cut", random_draft(3, world.target_ids))
    path = world.registry / "cut" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DraftLayoutError, match="no complete safetensors file"):
        engine.prepare(world.uri("cut"), cut.digest)


def test_after_all_refusals_a_good_draft_still_swaps(engine: VllmEngine, world: World) -> None:
    swap_to(engine, world, "random")
    swap_to(engine, world, "fitted")
    assert says_reference(engine, world)


def test_names_with_a_model_prefix_are_the_same_draft(engine: VllmEngine, world: World) -> None:
    tensors = load_file(world.registry / "fitted" / "model.safetensors")
    renamed = {
        name if name in ("d2t", "t2d", "lm_head.weight") else f"model.{name}": t
        for name, t in tensors.items()
    }
    prefixed = write_artifact(world.registry / "prefixed", renamed)
    swap_to(engine, world, "random")
    swap_draft([engine], prefixed, world.uri("prefixed")).require_success()
    assert engine.state().draft_fingerprint == expected_fingerprint(prefixed, engine.state().draft_tensors)
    assert says_reference(engine, world)
    assert tau_of(engine) > 1.2


def test_committing_what_was_not_staged_is_refused_without_a_pause(engine: VllmEngine, world: World) -> None:
    swap_to(engine, world, "random")
    before = engine.state()
    with pytest.raises(EngineError, match="has staged nothing"):
        engine.commit(world.fitted.digest)
    assert engine.state() == before


def test_a_session_that_would_write_the_target_is_refused(engine: VllmEngine, world: World) -> None:
    before = engine.state()
    with pytest.raises(EngineError):
        engine._send("POST", "/start_weight_update")
    assert engine.state() == before
    assert says_reference(engine, world)


class BrokenEngine:
    """An engine that prepares like the real one and fails to commit."""

    name = "broken"

    def __init__(self, like: EngineState) -> None:
        self._state = replace(like, engine=self.name)

    def state(self) -> EngineState:
        return self._state

    def prepare(self, artifact_uri: str, digest: str) -> None: ...

    def commit(self, digest: str) -> dict[str, float]:
        raise EngineError("engine broken answered 500 to /update_weights")

    def revert(self) -> None:
        raise EngineError("nothing to revert")

    def counters(self) -> AcceptanceCounters:
        raise NotImplementedError


def test_when_the_second_engine_fails_the_first_gets_its_draft_back(engine: VllmEngine, world: World) -> None:
    swap_to(engine, world, "random")
    before = engine.state()
    report = swap_draft([engine, BrokenEngine(before)], world.fitted, world.uri("fitted"))
    assert not report.succeeded
    assert [outcome.outcome for outcome in report.outcomes] == ["put_back", "put_back"]
    assert engine.state() == before
    assert says_reference(engine, world)
    swap_to(engine, world, "fitted")


def test_sampled_output_carries_raw_logprobs(engine: VllmEngine, world: World) -> None:
    said = engine.generate(
        PROMPTS[:2], max_tokens=24, temperature=0.8, seed=5, logprobs=True, ignore_eos=True
    )
    for sequence in said:
        assert sequence.logprobs == pytest.approx(reference_logprobs(world.model, sequence), abs=2e-4)


def reference_logprobs(model: LlamaForCausalLM, sequence: GeneratedSequence) -> list[float]:
    ids = torch.tensor([[*sequence.prompt_token_ids, *sequence.token_ids]])
    with torch.no_grad():
        table = torch.log_softmax(model(ids).logits[0].float(), dim=-1)
    start = len(sequence.prompt_token_ids)
    return [float(table[start + i - 1, token]) for i, token in enumerate(sequence.token_ids)]


def test_outputs_carry_the_targets_version_label_also_after_swaps(engine: VllmEngine, world: World) -> None:
    if not internals_for(installed_release()).labels_target:
        pytest.skip("this release of vLLM has no labels")
    engine.set_target_version("v000000003")
    swap_to(engine, world, "random")
    swap_to(engine, world, "fitted")
    (said,) = engine.generate(PROMPTS[:1], max_tokens=8, ignore_eos=True)
    assert said.weight_versions == (("v000000003", 0, 8),)


def test_a_release_without_labels_refuses_one_and_reports_none(engine: VllmEngine) -> None:
    if internals_for(installed_release()).labels_target:
        pytest.skip("this release of vLLM has labels")
    with pytest.raises(EngineError, match="Releases before labels"):
        engine.set_target_version("v000000003")
    (said,) = engine.generate(PROMPTS[:1], max_tokens=8, ignore_eos=True)
    assert said.weight_versions == ()


def test_a_target_sync_leaves_the_draft_alone_and_equals_a_fresh_engine(
    engine: VllmEngine, world: World, plain: PlainRun, second_target: Path
) -> None:
    swap_to(engine, world, "fitted")
    before = engine.state()
    try:
        engine.call_worker("reload_weights", {"weights_path": str(second_target)})
        after = engine.state()
        raw = (second_target / "model.safetensors").read_bytes()
        assert after.draft_fingerprint == before.draft_fingerprint
        assert after.aliased == before.aliased
        assert after.target_fingerprint == fingerprint(read_tensor_digests(raw, where="second target"))
        said = engine.generate(PROMPTS, max_tokens=TOKENS, logprobs=True, ignore_eos=True)
        assert tuple(sequence.token_ids for sequence in said) == plain.tokens
        for sequence, logprobs in zip(said, plain.logprobs, strict=True):
            # fp32 sums in another order: verification batches several positions into one GEMM.
            assert sequence.logprobs == pytest.approx(logprobs, abs=1e-4)
    finally:
        engine.call_worker("reload_weights", {"weights_path": str(world.target)})
    assert engine.state().target_fingerprint == before.target_fingerprint
    assert says_reference(engine, world)


def test_an_engine_without_speculation_says_so(plain: PlainRun) -> None:
    assert "no draft model" in plain.state_error
    assert "--speculative-config" in plain.state_error
    assert "no draft model" in plain.prepare_error
    assert "publishes no speculation counters" in plain.counters_error
