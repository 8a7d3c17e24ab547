"""Features of the transformers tap equal what a real vLLM extracts, id by id."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.numpy import load_file  # noqa: E402

from features.collect.cut import cut_window  # noqa: E402
from features.collect.proofs import LogprobTolerance, logprob_agreement  # noqa: E402
from features.collect.rollouts import Rollout  # noqa: E402
from features.collect.sampling import WindowSpan  # noqa: E402
from features.collect.taps import hf  # noqa: E402
from features.schema import FeatureDtype, FragmentLayout, TargetVersion  # noqa: E402

pytestmark = pytest.mark.vllm
HERE = Path(__file__).parent
REPO = HERE.parents[2]
LAYERS, HIDDEN, VOCAB = 8, 64, 128
IDS = (0, 2, 4, 5, LAYERS)
LENGTHS = (5, 23, 40)
# Both compute in float32 with other kernels; about 1e-6 was seen.
RELATIVE_ERROR = 1e-4
ENGINE_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONPATH": f"{REPO}:{HERE}",
}


@dataclass(frozen=True)
class Extraction:
    """What the engine and the tap say of the same sequences."""

    model: Any
    prompts: list[list[int]]
    engine: list[dict[str, np.ndarray]]
    logprobs: list[list[float | None]]
    tap: list[hf.Features]


@pytest.fixture(scope="module")
def extraction(tmp_path_factory: pytest.TempPathFactory) -> Extraction:
    folder = tmp_path_factory.mktemp("vllm")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=64,
        initializer_range=0.2, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).float().eval()
    torch.nn.init.uniform_(model.model.norm.weight, 0.5, 1.5)
    model.save_pretrained(folder / "target")
    rng = np.random.default_rng(0)
    prompts = [[int(t) for t in rng.integers(3, VOCAB, n)] for n in LENGTHS]
    out = folder / "out"
    out.mkdir()
    script = [sys.executable, str(HERE / "vllm_extract.py"), str(folder / "target"), str(out)]
    done = subprocess.run(
        [*script, json.dumps(IDS), json.dumps(prompts)],
        env=os.environ | ENGINE_ENV, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    engine = [load_file(out / f"{i}.safetensors") for i in range(len(prompts))]
    logprobs = json.loads((out / "logprobs.json").read_text())
    return Extraction(model, prompts, engine, logprobs, hf.forward_features(model, prompts, IDS))


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float((np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)).max())


def test_every_layer_id_of_every_row_equals_the_engines(extraction: Extraction) -> None:
    for prompt, engine, (aux, _) in zip(extraction.prompts, extraction.engine, extraction.tap, strict=True):
        assert engine["token_ids"].tolist() == prompt
        by_id = aux.reshape(len(prompt), len(IDS), HIDDEN)
        assert engine["hidden_states"].shape == by_id.shape
        for i, k in enumerate(IDS):
            assert relative_error(engine["hidden_states"][:, i], by_id[:, i]) < RELATIVE_ERROR, (
                f"layer id {k}"
            )


def test_the_engines_last_id_is_pre_norm_and_normed_gives_the_head_input(extraction: Extraction) -> None:
    for engine, (_, final) in zip(extraction.engine, extraction.tap, strict=True):
        last = torch.from_numpy(engine["hidden_states"][:, -1])
        with torch.no_grad():
            normed = extraction.model.model.norm(last).numpy()
        assert relative_error(normed, final) < RELATIVE_ERROR
        assert relative_error(last.numpy(), final) > 0.05


def test_neighbouring_layer_ids_are_told_apart(extraction: Extraction) -> None:
    """The tolerance means something: ids one apart lie far outside it."""
    shifted = hf.forward_features(extraction.model, extraction.prompts, [k + 1 for k in IDS[:-1]])
    for engine, (aux, _) in zip(extraction.engine, shifted, strict=True):
        by_id = aux.reshape(len(aux), len(IDS) - 1, HIDDEN)
        for i in range(len(IDS) - 1):
            assert relative_error(engine["hidden_states"][:, i], by_id[:, i]) > 100 * RELATIVE_ERROR


@pytest.mark.parametrize("dtype", list(FeatureDtype))
def test_the_engines_logprobs_verify_the_taps_features(extraction: Extraction, dtype: FeatureDtype) -> None:
    head = hf.head_from_model(extraction.model)
    tolerance = LogprobTolerance.for_compute_dtype(FeatureDtype.FLOAT32)
    layout = FragmentLayout(IDS, dtype, HIDDEN)
    rows = zip(extraction.prompts, extraction.logprobs, extraction.tap, strict=True)
    for ids, logprobs, (aux, final) in rows:
        rollout = Rollout(
            sample_id="a", group_id="g", token_ids=tuple(ids), prompt_length=1, version=0,
            sampled_mask=(False, *(True,) * (len(ids) - 1)), logprobs=tuple(logprobs), logprob_kind="engine_raw",
        )  # fmt: skip
        span = WindowSpan(0, len(ids))
        window = cut_window(rollout, span, aux, final, version=TargetVersion(0), layout=layout)
        agreement = logprob_agreement(window, head, tolerance)
        assert agreement.verdict == "agrees", agreement
        assert agreement.tokens == len(ids) - 1
