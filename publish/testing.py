"""Small real artifacts and evaluations for tests, here so that every room's tests share them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from training.artifact import (
    CONFIG_FILE,
    MANIFEST_FILE,
    WEIGHTS_FILE,
    EvalReport,
    Interval,
    TauEstimate,
    TrainingManifest,
)

TARGET_ID = "org/tiny"
"""The target that these artifacts are drafts of; its name holds a '/', as hub names do."""


def write_artifact(folder: Path, *, seed: int = 0, target_id: str = TARGET_ID, **config: Any) -> Path:
    """Write a three-tensor draft directory, the same one for the same arguments."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        "fc.weight": rng.standard_normal((4, 12), dtype=np.float32),
        "norm.weight": np.ones(4, dtype=np.float32),
        "d2t": np.zeros(8, dtype=np.int64),
    }
    manifest = TrainingManifest(
        method="eagle3",
        target_id=target_id,
        tokenizer_digest="t" * 64,
        hidden_size=4,
        vocab_size=8,
        layer_ids=(1, 2, 3),
        lake_revision="r" * 64,
        selection_digest="s" * 64,
        versions=(0, 1 + seed),
        parent=None,
        spec={"method": "eagle3", "seed": seed},
        packages={"numpy": np.__version__},
        steps=10,
        tokens=1000,
    )
    settings = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {"ids": [1, 2, 3]}} | config
    (folder / WEIGHTS_FILE).write_bytes(save(tensors))
    (folder / CONFIG_FILE).write_text(json.dumps(settings))
    (folder / MANIFEST_FILE).write_text(manifest.model_dump_json())
    return folder


def make_estimate(tau: float = 2.5, *, rounds: int = 1000, groups: int = 20) -> TauEstimate:
    """An estimate with an interval of +-0.1."""
    accepted = round((tau - 1) * rounds)
    return TauEstimate(
        tau=Interval(value=tau, low=tau - 0.1, high=tau + 0.1),
        rounds=rounds,
        accepted=accepted,
        accepted_per_position=(accepted, 0, 0),
        groups=groups,
    )


def make_report(artifact: str, baseline: str | None = None, **changes: Any) -> EvalReport:
    """An evaluation that passes a default gate at version 5 when it has a baseline."""
    fields: dict[str, Any] = {
        "artifact": artifact,
        "lake_revision": "r" * 64,
        "selection_digest": "e" * 64,
        "split": "held_out",
        "head_version": 5,
        "mode": "sampled-onehot",
        "num_speculative_tokens": 3,
        "temperature": 0.8,
        "overall": make_estimate(2.5),
        "by_version": {5: make_estimate(2.5)},
        "by_domain": {"code": make_estimate(2.5)},
        "skipped": {},
    }
    if baseline is not None:
        fields |= {
            "baseline": baseline,
            "baseline_overall": make_estimate(2.0),
            "gain": Interval(value=0.5, low=0.3, high=0.7),
        }
    return EvalReport(**fields | changes)
