"""Each planted fault is caught by the right proof, and only by it, on a real torch model."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from features.collect.proofs import LogprobTolerance  # noqa: E402
from features.collect.report import CollectReport  # noqa: E402
from features.collect.rollouts import Rollout  # noqa: E402
from features.collect.run import collect_rollouts  # noqa: E402
from features.collect.sampling import SamplingPolicy  # noqa: E402
from features.collect.taps import hf  # noqa: E402
from features.errors import ProofFailedError  # noqa: E402
from features.lake import Lake  # noqa: E402
from features.schema import FeatureDtype, TargetIdentity, TargetVersion, VersionRecord  # noqa: E402

LAYERS, HIDDEN, VOCAB, LENGTH = 4, 32, 64, 24
IDS = (1, 2, LAYERS)
IDENTITY = TargetIdentity(
    target_id="tiny", architecture="LlamaForCausalLM", hidden_size=HIDDEN, num_layers=LAYERS, vocab_size=VOCAB,
    tokenizer_digest="t" * 64, config_digest="c" * 64,
)  # fmt: skip


def make_model(version: int) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=64,
        initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    torch.nn.init.uniform_(model.model.norm.weight, 0.5, 1.5)
    for step in range(version):
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for weight in model.parameters():  # each update moves every weight by about 5 %
                weight += 0.01 * torch.randn(weight.shape, generator=generator)
    return model


@pytest.fixture(scope="module")
def models() -> dict[int, Any]:
    return {version: make_model(version) for version in (0, 1)}


@pytest.fixture(scope="module")
def rollouts(models: dict[int, Any]) -> list[Rollout]:
    """Sampled from version 0, with the logprobs its engine recorded."""
    torch.manual_seed(1)
    ids = torch.randint(3, VOCAB, (6, 4))
    with torch.no_grad():
        while ids.shape[1] < LENGTH:
            p = models[0](ids).logits[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(p, 1)], dim=1)
        logprobs = models[0](ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    return [
        Rollout(
            sample_id=f"s{n}",
            group_id=f"g{n}",
            token_ids=tuple(row.tolist()),
            prompt_length=4,
            version=0,
            sampled_mask=(False,) * 4 + (True,) * (LENGTH - 4),
            logprob_kind="engine_raw",
            logprobs=(None, *logprobs[n].tolist()),
        )
        for n, row in enumerate(ids)
    ]


def record_of(model: Any, version: int) -> VersionRecord:
    return VersionRecord(
        version=TargetVersion(version), target_id="tiny", config_digest="c" * 64, tokenizer_digest="t" * 64,
        hidden_size=HIDDEN, vocab_size=VOCAB, head_id=hf.head_from_model(model).head_id, weights_digest=None,
    )  # fmt: skip


def collect(lake: Lake, rollouts: Sequence[Rollout], model: Any, **changes: Any) -> CollectReport:
    settings: dict[str, Any] = {
        "model": model, "head": hf.head_from_model(model), "record": record_of(model, 0), "layer_ids": IDS,
        "dtype": FeatureDtype.BFLOAT16, "policy": SamplingPolicy(), "writer_id": "test", "batch_tokens": 64,
        "tolerance": LogprobTolerance.for_compute_dtype(FeatureDtype.FLOAT32),
    }  # fmt: skip
    return collect_rollouts(lake, rollouts, **settings | changes)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.init(str(tmp_path / "lake"), IDENTITY)


def plant_tap(monkeypatch: pytest.MonkeyPatch, forward: Any, probe: Any = None) -> str:
    """Register a tap module whose features come from ``forward`` and are probed as they are."""
    tap = ModuleType("planted_tap")
    tap.forward_features = forward  # type: ignore[attr-defined]
    default = lambda model, ids, tokens: hf.aux_probe(model, ids, tokens, tap=forward)
    tap.aux_probe = probe or default  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "planted_tap", tap)
    return "planted_tap"


def off_by_one(model: Any, batch: Any, ids: Sequence[int]) -> list[hf.Features]:
    return hf.forward_features(model, batch, [k - 1 for k in ids])


def pre_norm_final(model: Any, batch: Any, ids: Sequence[int]) -> list[hf.Features]:
    right, last = (hf.forward_features(model, batch, which) for which in (ids, [LAYERS]))
    return [(aux, stream) for (aux, _), (stream, _) in zip(right, last, strict=True)]


def test_authentic_features_pass_both_proofs(
    lake: Lake, rollouts: list[Rollout], models: dict[int, Any]
) -> None:
    report = collect(lake, rollouts, models[0])
    assert (report.collected, report.verified, dict(report.quarantined)) == (6, 6, {})


def test_aux_ids_off_by_one_fail_the_aux_probe_before_any_data(
    lake: Lake, rollouts: list[Rollout], models: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ProofFailedError, match="aux probe"):
        collect(lake, rollouts, models[0], tap=plant_tap(monkeypatch, off_by_one))
    assert lake.store.list("data") == []


def test_aux_ids_off_by_one_would_pass_the_logprob_proof(
    lake: Lake, rollouts: list[Rollout], models: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tap = plant_tap(monkeypatch, off_by_one, probe=lambda *args: None)
    assert collect(lake, rollouts, models[0], tap=tap).verified == 6


def test_final_rows_before_the_norm_pass_the_aux_probe_and_fail_the_logprob_proof(
    lake: Lake, rollouts: list[Rollout], models: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = collect(lake, rollouts, models[0], tap=plant_tap(monkeypatch, pre_norm_final))
    assert report.quarantined == {"logprob_disagreement": 6}


@pytest.mark.parametrize("shift", [-1, 1])
def test_shifted_logprobs_pass_the_aux_probe_and_fail_the_logprob_proof(
    lake: Lake, rollouts: list[Rollout], models: dict[int, Any], shift: int
) -> None:
    shifted = [replace(r, logprobs=tuple(np.roll(np.array(r.logprobs, float), shift))) for r in rollouts]
    assert collect(lake, shifted, models[0]).quarantined == {"logprob_disagreement": 6}


def test_weights_of_another_version_pass_the_aux_probe_and_fail_the_logprob_proof(
    lake: Lake, rollouts: list[Rollout], models: dict[int, Any]
) -> None:
    """Model and head fit each other, but the rollouts were sampled by version 0."""
    mislabelled = [replace(r, version=1) for r in rollouts]
    report = collect(lake, mislabelled, models[1], record=record_of(models[1], 1))
    assert report.quarantined == {"logprob_disagreement": 6}


@pytest.mark.parametrize("wrong", ["head", "states"])
def test_head_and_states_of_different_versions_pass_the_aux_probe_and_fail_the_logprob_proof(
    lake: Lake, rollouts: list[Rollout], models: dict[int, Any], wrong: str
) -> None:
    head_of, states_of = (models[1], models[0]) if wrong == "head" else (models[0], models[1])
    report = collect(
        lake, rollouts, states_of, head=hf.head_from_model(head_of), record=record_of(head_of, 0)
    )  # fmt: skip
    assert report.quarantined == {"logprob_disagreement": 6}


def test_the_report_says_that_the_neighbouring_version_would_have_been_refused(
    lake: Lake, rollouts: list[Rollout], models: dict[int, Any]
) -> None:
    lake.put_head(hf.head_from_model(models[1]))
    lake.register_version(record_of(models[1], 1))
    agreement = collect(lake, rollouts, models[0]).agreement
    assert agreement.mean_error < agreement.limit < agreement.smallest_gap < 0.1
    (neighbour,) = agreement.neighbours
    assert neighbour.resolved
