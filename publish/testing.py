"""Small real artifacts, evaluations and a fake engine for tests, here so that every room's tests share them."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from features.errors import EngineError
from publish.engines import AcceptanceCounters, EngineState
from publish.swap import expected_fingerprint
from training.artifact import (
    CONFIG_FILE,
    MANIFEST_FILE,
    WEIGHTS_FILE,
    DraftArtifact,
    EvalReport,
    Interval,
    TauEstimate,
    TrainingManifest,
)

TARGET_ID = "org/tiny"
"""The target that these artifacts are drafts of; its name holds a '/', as hub names do."""
OWNED_TENSORS = ("d2t", "fc.weight", "norm.weight")
"""Tensors of these artifacts, all of which the fake engine's draft owns."""


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


@dataclass
class FakeEngine:
    """A rollout engine without a GPU: holds drafts in memory, and fails where it is told to.

    ``fail`` names steps that raise (``state``, ``prepare``, ``commit``, ``revert``) and deeper faults of a
    commit: ``lies`` (it says that it loaded and did not), ``writes_target``, ``commits_then_fails``, and
    ``dies`` (it loads and never answers again).
    """

    name: str
    fetch: Callable[[str], DraftArtifact]
    """The draft of a digest, as an engine would get it from the registry."""
    serving: DraftArtifact | None = None
    """None: the draft it was started with, which no registry knows."""
    fail: set[str] = field(default_factory=set)
    on_step: Callable[[str, str], None] = lambda engine, step: None
    """Told the engine's name and each step before it is taken."""
    on_commit: Callable[[], None] = lambda: None
    """Called after a draft was loaded."""
    target: str = "target-0"
    staged: str | None = None
    staged_from: str | None = None
    """Where it was last told to fetch a draft."""
    replaced: list[DraftArtifact | None] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def state(self) -> EngineState:
        self._step("state")
        draft = self.serving
        return EngineState(
            engine=self.name,
            vllm_version="0.32.0",
            method="eagle3",
            num_speculative_tokens=3,
            draft_artifact=draft.digest if draft else None,
            draft_fingerprint=str(expected_fingerprint(draft, OWNED_TENSORS)) if draft else "boot draft",
            draft_tensors=OWNED_TENSORS,
            target_fingerprint=self.target,
            aliased=("embed_tokens.weight",),
            owns_lm_head=True,
            owns_embed_tokens=False,
            prepared=self.staged,
        )

    def prepare(self, artifact_uri: str, digest: str) -> None:
        self._step("prepare")
        self.staged, self.staged_from = digest, artifact_uri

    def commit(self, digest: str) -> dict[str, float]:
        self._step("commit")
        if "lies" in self.fail:
            return {"total": 0.0}
        self.replaced.append(self.serving)
        self.serving, self.staged = self.fetch(digest), None
        self.on_commit()
        if "writes_target" in self.fail:
            self.target = "target-1"
        if "dies" in self.fail:
            self.fail |= {"state", "revert", "prepare"}
            raise EngineError(f"engine {self.name} cannot be reached")
        if "commits_then_fails" in self.fail:
            raise EngineError(f"engine {self.name}: verification failed")
        return {"pause": 0.01, "load": 0.02, "total": 0.03}

    def revert(self) -> None:
        self._step("revert")
        self.serving = self.replaced.pop()

    def counters(self) -> AcceptanceCounters:
        raise NotImplementedError("this engine samples nothing")

    def _step(self, step: str) -> None:
        self.on_step(self.name, step)
        self.calls.append(step)
        if step in self.fail:
            raise EngineError(f"engine {self.name}: {step} failed")
