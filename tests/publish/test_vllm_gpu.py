"""The demo's target and draft on a GPU in bfloat16, as a rollout engine would serve them."""

import math
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from features.errors import DraftLayoutError
from pipelines.demo.prompts import fresh_prompts
from publish.engines import AcceptanceCounters, GeneratedSequence
from publish.launch import LocalServer, serve_command
from publish.swap import expected_fingerprint, swap_draft
from publish.vllm_client import VllmEngine
from training.artifact import DraftArtifact, fingerprint, load_artifact, read_tensor_digests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that vLLM serves on"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]

ASSETS = Path(__file__).parents[2] / "pipelines" / "demo" / "assets"
TOKENS, TEMPERATURE = 96, 0.8
TIE = 0.1
"""Two logits nearer than this are one in bfloat16, whose step is 0.06 at logits of 8 to 16."""
Tensors = dict[str, torch.Tensor]
Prompts = list[tuple[int, ...]]
Record = Callable[[str, object], None]


def _spoiled(tensors: Tensors) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(tensors["fc.weight"].shape, generator=generator)
    return tensors | {"fc.weight": (noise * tensors["fc.weight"].float().std()).to(torch.bfloat16)}


def _nan(tensors: Tensors) -> Tensors:
    bad = tensors["fc.weight"].clone()
    bad[3, 5] = math.nan
    return tensors | {"fc.weight": bad}


def _missing(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != "norm.weight"}


VARIANTS: Mapping[str, Callable[[Tensors], Tensors]] = {
    "shipped": lambda tensors: tensors,
    "spoiled": _spoiled,
    "nan": _nan,
    "missing": _missing,
}


@dataclass(frozen=True)
class Drafts:
    """The shipped draft in bfloat16, and variants of it, where the engine may fetch them."""

    root: Path
    artifacts: Mapping[str, DraftArtifact]

    def uri(self, name: str) -> str:
        return str(self.root / name)

    def swap(self, engine: VllmEngine, name: str) -> dict[str, float]:
        report = swap_draft([engine], self.artifacts[name], self.uri(name))
        report.require_success()
        return dict(report.outcomes[0].seconds)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Drafts:
    root = tmp_path_factory.mktemp("registry")
    stored = load_file(ASSETS / "draft" / "model.safetensors")
    tensors = {n: t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in stored.items()}
    for name, change in VARIANTS.items():
        (root / name).mkdir()
        save_file(change(tensors), root / name / "model.safetensors")
        for document in ("config.json", "manifest.json"):
            shutil.copy(ASSETS / "draft" / document, root / name)
    return Drafts(root, {name: load_artifact(root / name) for name in VARIANTS})


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "target")
    return [p.token_ids for p in fresh_prompts(tokenizer, "code", count=32, length=24, seed=0)]


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(ASSETS / "target", dtype=torch.float32).eval()


def server(root: Path, draft: Path | None) -> LocalServer:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = serve_command(
        ASSETS / "target",
        draft,
        port=port,
        registry_roots=[str(root)],
        device="gpu",
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=32,
    )
    command = replace(command, env={**command.env, "VLLM_LOGGING_LEVEL": "WARNING"})
    return LocalServer(command, log_path=root / f"server-{port}.log")


def greedy(engine: VllmEngine, prompts: Prompts) -> list[tuple[int, ...]]:
    said = engine.generate(prompts, max_tokens=TOKENS, ignore_eos=True)
    return [sequence.token_ids for sequence in said]


@pytest.fixture(scope="module")
def plain_text(drafts: Drafts, prompts: Prompts) -> list[tuple[int, ...]]:
    """What a server without a draft says; it has ended before the other one takes the GPU."""
    with server(drafts.root, None) as engine:
        return greedy(engine, prompts)


@pytest.fixture(scope="module")
def engine(drafts: Drafts, plain_text: object) -> Iterator[VllmEngine]:
    with server(drafts.root, drafts.root / "shipped") as running:
        yield running


def logits_of(model: torch.nn.Module, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Reference logits ``[len(tokens), V]``, row i for token i."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([[*prompt, *tokens]])).logits[0]
    return logits[len(prompt) - 1 : -1].double()


def ties_until_equal(
    model: torch.nn.Module,
    prompts: Prompts,
    ours: Sequence[tuple[int, ...]],
    plain: Sequence[tuple[int, ...]],
) -> list[float]:
    """Reference logit gap where each differing pair of texts parts; empty when all are equal."""
    gaps = []
    for prompt, a, b in zip(prompts, ours, plain, strict=True):
        parts = next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), None)
        if parts is not None:
            row = logits_of(model, prompt, a)[parts]
            gaps.append(abs(float(row[a[parts]] - row[b[parts]])))
    return gaps


def measured(engine: VllmEngine, prompts: Prompts) -> tuple[AcceptanceCounters, list[tuple[int, ...]]]:
    before = engine.counters()
    said = greedy(engine, prompts)
    return engine.counters() - before, said


def test_boot_fingerprints_are_those_of_the_files(engine: VllmEngine, drafts: Drafts) -> None:
    state = engine.state()
    assert state.draft_artifact is None
    assert state.draft_fingerprint == expected_fingerprint(drafts.artifacts["shipped"], state.draft_tensors)
    raw = (ASSETS / "target" / "model.safetensors").read_bytes()
    assert state.target_fingerprint == fingerprint(read_tensor_digests(raw, where="target"))
    assert state.aliased == ("embed_tokens.weight",)


def test_swaps_move_acceptance_and_neither_text_nor_target(
    engine: VllmEngine,
    drafts: Drafts,
    prompts: Prompts,
    plain_text: list[tuple[int, ...]],
    reference: torch.nn.Module,
    record_property: Record,
) -> None:
    drafts.swap(engine, "shipped")
    target, taus = engine.state().target_fingerprint, []
    for name in ("shipped", "spoiled", "shipped"):
        seconds = drafts.swap(engine, name)
        state = engine.state()
        assert state.draft_fingerprint == expected_fingerprint(drafts.artifacts[name], state.draft_tensors)
        assert state.target_fingerprint == target
        counters, said = measured(engine, prompts)
        taus.append(counters.tau)
        gaps = ties_until_equal(reference, prompts, said, plain_text)
        record_property(f"{name} {len(taus)}", {"tau": counters.tau, "pause": seconds, "gaps": gaps})
        # A text that parts at a tie takes other words from there on, so few may, and only at ties.
        assert all(gap < TIE for gap in gaps)
        assert len(gaps) <= len(prompts) // 4
    assert taus[1] < taus[0] - 0.3
    assert taus[2] == pytest.approx(taus[0], abs=0.05)


@pytest.mark.parametrize(("fault", "message"), [("nan", "fc.weight has 1 NaN"), ("missing", "norm.weight")])
def test_a_bad_draft_is_refused_and_good_ones_still_swap(
    engine: VllmEngine, drafts: Drafts, fault: str, message: str
) -> None:
    before = engine.state()
    with pytest.raises(DraftLayoutError, match=message):
        engine.prepare(drafts.uri(fault), drafts.artifacts[fault].digest)
    assert engine.state() == before
    assert drafts.swap(engine, "spoiled")["total"] < 5
    drafts.swap(engine, "shipped")


def deviations(model: torch.nn.Module, said: Sequence[GeneratedSequence]) -> tuple[float, float]:
    """z-score of the sampled tokens' summed logprob under the target, and its largest error in the engine.

    The terms are a martingale difference sequence, so their sum is normal in the limit.
    """
    deviation = variance = worst = 0.0
    for sequence in said:
        logits = logits_of(model, sequence.prompt_token_ids, sequence.token_ids)
        raw, sampled = logits.log_softmax(-1), (logits / TEMPERATURE).softmax(-1)
        mean = (sampled * raw).sum(-1)
        chosen = raw.gather(1, torch.tensor(sequence.token_ids)[:, None])[:, 0]
        deviation += float((chosen - mean).sum())
        variance += float(((sampled * raw**2).sum(-1) - mean**2).sum())
        reported = torch.tensor([math.nan if v is None else v for v in sequence.logprobs]).double()
        worst = max(worst, float((reported - chosen).abs().max()))
    return deviation / variance**0.5, worst


def test_sampled_speculation_follows_the_target_and_reports_raw_logprobs(
    engine: VllmEngine,
    drafts: Drafts,
    prompts: Prompts,
    reference: torch.nn.Module,
    record_property: Record,
) -> None:
    drafts.swap(engine, "shipped")
    before = engine.counters()
    said = engine.generate(
        prompts * 4, max_tokens=TOKENS, temperature=TEMPERATURE, seed=1, logprobs=True, ignore_eos=True
    )
    score, worst = deviations(reference, said)
    tau = (engine.counters() - before).tau
    record_property("sampled", {"z": score, "largest logprob error": worst, "tau": tau})
    assert abs(score) < 5
    # bfloat16 against float32: a logprob taken at the wrong temperature would be off by whole units.
    assert worst < 0.5
