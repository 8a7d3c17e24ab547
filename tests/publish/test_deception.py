"""Engines that answer success, evidence that belongs elsewhere, roots that open more than was meant."""

import os
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from features.errors import CorruptDataError, EngineError, EnginePausedError, GateRefusedError, InputError
from features.storage import Store
from publish.engines import AcceptanceCounters, EngineState
from publish.gates import GateSpec, decide
from publish.registry import Registry
from publish.swap import expected_fingerprint, plan_swap, serves, swap_draft
from publish.testing import TARGET_ID, make_report, write_artifact
from publish.vllm_client import VllmEngine, parse_counters
from publish.vllm_plugin.roots import joined_roots
from training.artifact import DraftArtifact, load_artifact

OWNED = ("d2t", "fc.weight", "norm.weight")
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.fixture
def old(tmp_path: Path) -> DraftArtifact:
    return load_artifact(write_artifact(tmp_path / "old", seed=1))


@pytest.fixture
def new(tmp_path: Path) -> DraftArtifact:
    return load_artifact(write_artifact(tmp_path / "new", seed=2))


@dataclass
class Engine:
    """One engine in memory; ``on_commit`` is raised by its first commit, after it took the draft."""

    name: str
    holds: DraftArtifact
    known: tuple[DraftArtifact, ...]
    on_commit: BaseException | None = None
    on_prepare: BaseException | None = None
    labelled: bool = True
    swaps: bool = True
    paused: bool = False
    replaced: DraftArtifact | None = None
    prepares: int = 0

    def state(self) -> EngineState:
        return EngineState(
            engine=self.name, vllm_version="0", method="eagle3", num_speculative_tokens=3,
            draft_artifact=self.holds.digest if self.labelled else None,
            draft_fingerprint=str(expected_fingerprint(self.holds, OWNED)), draft_tensors=OWNED,
            target_fingerprint="t", aliased=(), owns_lm_head=True, owns_embed_tokens=False, prepared=None,
        )  # fmt: skip

    def prepare(self, artifact_uri: str, digest: str) -> None:
        self.prepares += 1
        if self.on_prepare is not None:
            raise self.on_prepare

    def commit(self, digest: str) -> dict[str, float]:
        error, self.on_commit = self.on_commit, None
        self.paused = isinstance(error, EnginePausedError)
        if self.swaps:
            self.replaced, self.holds = self.holds, next(a for a in self.known if a.digest == digest)
        if error is not None:
            raise error
        return {"total": 0.0}

    def revert(self) -> None:
        if self.replaced is None:
            raise EngineError("holds no replaced draft")
        self.holds, self.replaced, self.paused = self.replaced, None, False

    def counters(self) -> AcceptanceCounters:
        raise NotImplementedError


def test_an_engine_that_owns_nothing_serves_nothing(old: DraftArtifact, new: DraftArtifact) -> None:
    """The fingerprint of no tensor is the same for every artifact."""
    from training.artifact import fingerprint

    state = replace(
        Engine("a", old, (old, new)).state(), draft_tensors=(), draft_fingerprint=fingerprint({}),
        draft_artifact=None,
    )  # fmt: skip
    assert not serves(state, new)
    assert plan_swap({"a": state}, new).to_swap == ("a",)


def test_an_engine_that_takes_a_tensor_from_the_target_does_not_serve_a_draft_that_brings_its_own(
    new: DraftArtifact,
) -> None:
    owned = tuple(name for name in OWNED if name != "norm.weight")
    assert expected_fingerprint(new, owned) is None
    without_map = tuple(name for name in OWNED if name != "d2t")
    assert expected_fingerprint(new, without_map) is not None


def test_the_same_tensors_under_another_config_are_not_taken_for_current(tmp_path: Path) -> None:
    """A config whose layer ids were corrected by hand: the boot draft's weights, and not its arithmetic."""
    one = load_artifact(write_artifact(tmp_path / "one"))
    other = load_artifact(write_artifact(tmp_path / "other", eagle_config={"ids": [1, 2, 4]}))
    engine = Engine(
        "a", one, (one, other), labelled=False, on_prepare=EngineError("config.json does not fit")
    )
    report = swap_draft([engine], other, "uri")
    assert report.error is not None
    assert "does not fit" in report.error


def test_an_engine_that_says_done_and_did_nothing_fails_the_swap(
    old: DraftArtifact, new: DraftArtifact
) -> None:
    report = swap_draft([Engine("a", old, (old, new), swaps=False)], new, "uri")
    assert [o.outcome for o in report.outcomes] == ["put_back"]
    assert not report.succeeded


@pytest.mark.parametrize("error", [KeyError("ok"), ValueError("not JSON"), OSError("pipe")], ids=repr)
def test_whatever_an_engine_raises_the_others_go_back(
    old: DraftArtifact, new: DraftArtifact, error: Exception
) -> None:
    engines = [Engine("a", old, (old, new)), Engine("b", old, (old, new), on_commit=error)]
    report = swap_draft(engines, new, "uri")
    assert report.error is not None
    assert type(error).__name__ in report.error
    assert [engine.holds for engine in engines] == [old, old]
    assert [o.outcome for o in report.outcomes] == ["put_back", "put_back"]


def test_an_interrupt_leaves_no_mixture(old: DraftArtifact, new: DraftArtifact) -> None:
    engines = [Engine("a", old, (old, new)), Engine("b", old, (old, new), on_commit=KeyboardInterrupt())]
    with pytest.raises(KeyboardInterrupt):
        swap_draft(engines, new, "uri")
    assert [engine.holds for engine in engines] == [old, old]


@pytest.mark.parametrize("swaps", [True, False])
def test_an_engine_left_paused_is_resumed_or_named(
    old: DraftArtifact, new: DraftArtifact, swaps: bool
) -> None:
    """Its draft may be the old one all the time, and still it serves nobody."""
    engine = Engine("a", old, (old, new), on_commit=EnginePausedError("stuck"), swaps=swaps)
    report = swap_draft([engine], new, "uri")
    (outcome,) = report.outcomes
    assert (outcome.outcome, outcome.paused) == (("put_back", False) if swaps else ("unknown", True))
    assert engine.paused is not swaps


def client(answer: Any) -> VllmEngine:
    return VllmEngine("http://engine:1", transport=httpx.MockTransport(answer))


def test_an_error_page_with_status_200_is_an_engine_error() -> None:
    engine = client(lambda request: httpx.Response(200, text="<html>sorry</html>"))
    with pytest.raises(EngineError, match="sorry"):
        engine.state()


@pytest.mark.parametrize("results", [[{}], [{"ok": "yes"}], [{"ok": False}], "text"])
def test_an_answer_of_another_shape_is_an_engine_error(results: Any) -> None:
    engine = client(lambda request: httpx.Response(200, json={"results": results}))
    with pytest.raises(EngineError):
        engine.call_worker("x") and engine.state()


def test_a_state_without_a_field_names_it() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        started = b"draftlake_start" in request.content
        done = {"ok": True, "ticket": 1} if started else {"ok": True, "done": True, "vllm_version": "0"}
        return httpx.Response(200, json={"results": [done]})

    with pytest.raises(EngineError, match=r"draft_fingerprint.*another release"):
        client(answer).state()


def test_an_engine_that_cannot_be_resumed_says_so() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/resume":
            return httpx.Response(500, text="stuck")
        body = {"ok": True, "prepared": "d", "revertible": True}
        return httpx.Response(200, json={"results": [body]})

    with pytest.raises(EnginePausedError, match="/resume"):
        client(answer).commit("d")


def test_a_gap_in_the_positions_is_not_closed_up() -> None:
    lines = [
        f"vllm:spec_decode_num_{name}_total{{}} 4" for name in ("drafts", "draft_tokens", "accepted_tokens")
    ]
    lines += [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}} 2' for i in (0, 2)]
    with pytest.raises(EngineError, match=r"\[0, 2\]"):
        parse_counters("\n".join(lines), where="e")


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(Store.open(str(tmp_path / "store")), TARGET_ID)


def approvable(registry: Registry, folder: Path, seed: int) -> str:
    digest = registry.import_artifact(write_artifact(folder, seed=seed))
    report = make_report(digest, "b" * 64)
    registry.add_evidence(digest, report)
    registry.add_evidence(digest, decide(report, GateSpec(), newest_version=5))
    return digest


def copy_evidence(registry: Registry, source: str, target: str, kind: str) -> None:
    root = Path(registry._store.url) / "registry" / "evidence"
    for item in registry.evidence(source, kind):
        (root / target).mkdir(exist_ok=True)
        (root / target / f"{item.id}.json").write_bytes((root / source / f"{item.id}.json").read_bytes())


@pytest.mark.parametrize("kind", ["evaluation", "gate", "decision"])
def test_evidence_copied_to_another_artifact_is_refused(
    registry: Registry, tmp_path: Path, kind: str
) -> None:
    good = approvable(registry, tmp_path / "good", 1)
    registry.approve(good, reviewer="ada", reason="better", at=NOON)
    other = registry.import_artifact(write_artifact(tmp_path / "other", seed=2))
    copy_evidence(registry, good, other, kind)
    with pytest.raises(CorruptDataError, match="moved or copied"):
        registry.state(other)
    with pytest.raises(CorruptDataError, match=other):
        registry.approve(other, reviewer="ada", reason="r", at=NOON)
    with pytest.raises(CorruptDataError):
        registry.channel("eagle3").advance(
            expected_seq=0, artifact=other, action="publish", reason="r", by="ada", at=NOON
        )


def test_a_decision_that_names_no_artifact_is_not_filed(registry: Registry, tmp_path: Path) -> None:
    digest = registry.import_artifact(write_artifact(tmp_path / "a"))
    form = {
        "kind": "decision",
        "decision": "approve",
        "reviewer": "ada",
        "reason": "r",
        "at": NOON.isoformat(),
    }
    with pytest.raises(InputError, match="names its artifact"):
        registry.add_evidence(digest, form)
    with pytest.raises(GateRefusedError):
        registry.channel("eagle3").check(digest, "publish")


def test_a_clock_that_went_back_cannot_bury_a_rejection(registry: Registry, tmp_path: Path) -> None:
    digest = approvable(registry, tmp_path / "a", 1)
    registry.reject(digest, reviewer="ada", reason="no", at=NOON)
    with pytest.raises(InputError, match="clock"):
        registry.approve(digest, reviewer="bob", reason="yes", at=NOON - timedelta(seconds=1))
    assert registry.state(digest) == "rejected"


@pytest.mark.parametrize("root", [f"/srv/a{os.pathsep}b", f"/srv{os.pathsep}/", "", " "])
def test_a_root_that_reads_as_two_is_refused(root: str) -> None:
    with pytest.raises(ValueError, match="registry root"):
        joined_roots([root])
    assert joined_roots(["/srv/a", "s3://bucket/x"]) == f"/srv/a{os.pathsep}s3://bucket/x"


def test_an_altered_weights_file_is_never_handed_out(registry: Registry, tmp_path: Path) -> None:
    digest = registry.import_artifact(write_artifact(tmp_path / "a"))
    path = Path(registry._store.url) / "registry" / "artifacts" / digest / "model.safetensors"
    save_file({"fc.weight": np.zeros((4, 12), np.float32)}, path)
    with pytest.raises(CorruptDataError, match="altered"):
        registry.fetch(digest, tmp_path / "b")
