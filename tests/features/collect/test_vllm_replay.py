"""The replay lane on a real vLLM: its rows equal a plain forward, and whatever is doubtful is refused."""

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

from features.collect.rollouts import Rollout, read_rollouts  # noqa: E402
from features.collect.taps import hf  # noqa: E402
from features.commits import decode_commit  # noqa: E402
from features.lake import Lake  # noqa: E402
from features.quarantine import list_quarantine  # noqa: E402
from features.schema import Verification  # noqa: E402
from features.windows import Window  # noqa: E402

pytestmark = pytest.mark.vllm
HERE = Path(__file__).parent
REPO = HERE.parents[2]
LAYERS, HIDDEN, IDS, WINDOW, CHUNK = 6, 64, (1, 3, 4), 16, 32
# Both compute in float32 with other kernels and chunks; about 1e-6 was seen, ids one apart differ by 0.1.
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
class Replayed:
    """What the scenarios of ``vllm_replay.py`` left behind."""

    folder: Path
    model: Any
    said: dict[str, Any]

    @property
    def rollouts(self) -> dict[str, Rollout]:
        entries = read_rollouts(self.folder / "rollouts.jsonl")
        return {entry.sample_id: entry for entry in entries if isinstance(entry, Rollout)}

    def lake(self, name: str) -> Lake:
        return Lake.open(str(self.folder / name))

    def windows(self, name: str) -> dict[str, Window]:
        """Every visible window by sample id; reading checks each checksum."""
        lake = self.lake(name)
        rows = [
            r for p in lake.commit_paths() for r in decode_commit(lake.store.read(p), where=p).to_pylist()
        ]
        found = {row["sample_id"]: lake.read_window(row) for row in rows}
        assert len(found) == len(rows)
        return found


def run_engine(folder: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "vllm_replay.py"), str(folder), *arguments],
        env=os.environ | ENGINE_ENV, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Replayed:
    folder = tmp_path_factory.mktemp("replay")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=96,
        initializer_range=0.2, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).float().eval()
    torch.nn.init.uniform_(model.model.norm.weight, 0.5, 1.5)
    model.save_pretrained(folder / "target")
    moved = model.model.layers[2].mlp.down_proj.weight
    kept = moved.detach().clone()
    with torch.no_grad():
        moved.add_(0.05 * torch.randn_like(moved))
        model.save_pretrained(folder / "other")
        moved.copy_(kept)
    run_engine(folder)
    return Replayed(folder, model, json.loads((folder / "said.json").read_text()))


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    return float((np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)).max())


def test_every_row_of_chunked_sequences_equals_a_plain_forward(replayed: Replayed) -> None:
    arrays = np.load(replayed.folder / "taps.npz")
    lengths = [len(arrays[f"ids{i}"]) for i in range(4)]
    assert min(lengths) < CHUNK < sorted(lengths)[1]
    for i in range(len(lengths)):
        aux, final = hf.forward_features(replayed.model, [arrays[f"ids{i}"].tolist()], IDS)[0]
        for k, _ in enumerate(IDS):
            part = slice(k * HIDDEN, (k + 1) * HIDDEN)
            assert relative_error(arrays[f"aux{i}"][:, part], aux[:, part]) < RELATIVE_ERROR
        assert relative_error(arrays[f"final{i}"], final) < RELATIVE_ERROR


def test_the_windows_in_the_lake_equal_a_plain_forward_position_by_position(replayed: Replayed) -> None:
    windows, rollouts = replayed.windows("lake"), replayed.rollouts
    assert sorted(windows) == sorted(rollouts)
    assert any(window.meta.start > CHUNK for window in windows.values()), "no window lies in a later chunk"
    for name, window in windows.items():
        ids, start = rollouts[name].token_ids, window.meta.start
        rows = slice(start, start + WINDOW)
        aux, final = hf.forward_features(replayed.model, [ids], IDS)[0]
        assert window.token_ids.tolist()[:WINDOW] == list(ids[rows])
        assert relative_error(window.aux, aux[rows]) < RELATIVE_ERROR
        assert relative_error(window.final, final[rows]) < RELATIVE_ERROR
        assert window.meta.verification is Verification.VERIFIED
        # The rows next to them are others: the positions are told apart.
        assert relative_error(window.final[1:], final[rows][:-1]) > 100 * RELATIVE_ERROR


def test_whatever_was_not_taken_is_counted_and_in_quarantine(replayed: Replayed) -> None:
    report, total = replayed.said["collected"], len(replayed.rollouts)
    refused = {
        "bad_json": 1, "length_mismatch": 1, "logprob_disagreement": 1, "too_long": 1, "version_missing": 1,
    }  # fmt: skip
    assert report["quarantined"] == refused
    assert (report["received"], report["collected"], report["duplicates"]) == (total + 6, total, 1)
    assert report["agreement"]["mean_error"] < 1e-4
    (run,) = list_quarantine(replayed.lake("lake"))
    assert run.counts == refused


def test_replaying_again_adds_nothing(replayed: Replayed) -> None:
    report = replayed.said["again"]
    assert (report["collected"], report["windows"], report["commits"]) == (0, 0, [])
    assert report["duplicates"] == len(replayed.rollouts) + 1


def test_the_engine_as_a_tap_collects_the_same_windows(replayed: Replayed) -> None:
    inside, outside = replayed.windows("lake"), replayed.windows("tap")
    assert sorted(inside) == sorted(outside)
    for name, window in inside.items():
        assert window.meta.start == outside[name].meta.start
        assert relative_error(window.aux, outside[name].aux) < RELATIVE_ERROR
        assert relative_error(window.final, outside[name].final) < RELATIVE_ERROR


def test_states_that_the_engine_never_stored_are_refused_not_taken_from_the_cache(replayed: Replayed) -> None:
    _probe, skipped, *others = replayed.said["never_stored_batches"]
    report = replayed.said["never_stored"]
    assert report["quarantined"] == {"feature_shape": skipped}
    assert report["collected"] == sum(others)
    (run,) = list_quarantine(replayed.lake("never"))
    assert "never stored by the engine" in run.refusals[0].detail


def test_weights_that_change_on_the_way_stop_the_replay_before_a_wrong_row_is_written(
    replayed: Replayed,
) -> None:
    assert replayed.said["changed"]["error"] == "VersionConflictError"
    assert "weights changed" in replayed.said["changed"]["message"]
    assert replayed.said["still_changed"]["error"] == "VersionConflictError"
    # With the right weights back, the rest is completed and every window is right.
    first, rest = replayed.said["changed_batches"][1], replayed.said["put_back"]
    assert (rest["duplicates"], rest["collected"]) == (first, len(replayed.rollouts) - first)
    right = replayed.windows("lake")
    for name, window in replayed.windows("changed").items():
        assert relative_error(window.final, right[name].final) < RELATIVE_ERROR


def test_an_engine_with_other_weights_than_the_checkpoint_fails_the_probe(replayed: Replayed) -> None:
    assert replayed.said["wrong"]["error"] == "ProofFailedError"
    assert replayed.lake("wrong").versions() == ()


def test_an_engine_labelled_as_another_version_is_refused(replayed: Replayed) -> None:
    said = replayed.said["label"]
    assert said["error"] == "VersionConflictError"
    assert "labelled v000000007, this run collects v000000000" in said["message"]
    assert replayed.said["old_label"]["error"] == "VersionConflictError"
    assert replayed.lake("label").versions() == ()


def test_of_two_drivers_on_one_engine_the_first_is_stopped_and_nothing_is_mixed(replayed: Replayed) -> None:
    assert replayed.said["second_driver"]["collected"] == 2
    assert sorted(replayed.windows("second")) == ["s0", "s1"]
    assert replayed.said["first_driver"]["error"] == "EngineError"
    assert "another replay" in replayed.said["first_driver"]["message"]


def test_a_prefix_cache_or_an_absent_layer_is_refused(replayed: Replayed) -> None:
    (fault,) = replayed.said["prefix"]
    assert "prefix caching is on" in fault
    assert replayed.said["fine"] == []
    assert replayed.said["absent_layer"]["error"] == "InputError"
    assert "[2] are absent" in replayed.said["absent_layer"]["message"]


@pytest.mark.skipif(os.environ.get("DRAFTLAKE_SOAK") != "1", reason="a second engine: DRAFTLAKE_SOAK=1")
def test_a_real_prefix_hit_is_seen_in_the_computed_range(replayed: Replayed) -> None:
    run_engine(replayed.folder, "prefix")
    first, second = json.loads((replayed.folder / "prefix.json").read_text())
    assert first == f"(80, {HIDDEN})"
    assert "expected states of positions [0, 80), the engine computed [64, 80)" in second
