"""Replaying on a served engine: its command line, what goes over HTTP, and (as a soak) a real server."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from features.collect.rollouts import Rollout
from features.collect.sampling import SamplingPolicy
from features.errors import InputError, VersionConflictError
from features.lake import Lake
from features.schema import FeatureDtype, TargetIdentity
from features.testing import tiny_record
from publish.launch import LocalServer
from publish.vllm_client import VllmEngine
from publish.vllm_replay import ServedReplay, replay_command

LAYERS, IDS, VOCAB, HIDDEN = 6, (1, 3, 4), 128, 64
SOAK = os.environ.get("DRAFTLAKE_SOAK") == "1"


def option(argv: tuple[str, ...], name: str) -> str:
    assert argv.count(name) == 1
    return argv[argv.index(name) + 1]


def test_the_command_serves_for_replays_and_not_for_swaps() -> None:
    argv = replay_command(Path("/t"), IDS, num_layers=LAYERS, port=1, dtype="float32", max_model_len=96).argv
    assert "--no-enable-prefix-caching" in argv
    assert "--weight-transfer-config" not in argv
    assert option(argv, "--worker-extension-cls") == "features.collect.taps.vllm_worker.ReplayExtension"
    connector = json.loads(option(argv, "--kv-transfer-config"))
    assert connector["kv_connector_module_path"] == "features.collect.taps.vllm_connector"
    speculative = json.loads(option(argv, "--speculative-config"))
    # The last block's output is extracted too: the final hidden state comes from it.
    extractor = speculative["draft_model_config"]["hf_config"]
    assert extractor == {"eagle_aux_hidden_state_layer_ids": [*IDS, LAYERS]}
    assert option(argv, "--max-model-len") == "96"


def test_layer_ids_beyond_the_target_are_refused() -> None:
    with pytest.raises(InputError, match=r"expected ids in \[0, 6\]"):
        replay_command(Path("/t"), (1, 7), num_layers=LAYERS, port=1)


def served(answers: dict[str, Any], asked: list[tuple[str, Any]]) -> ServedReplay:
    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.path
        asked.append((path, json.loads(request.content) if request.content else None))
        return httpx.Response(200, json=answers[path]) if path in answers else httpx.Response(404)

    return ServedReplay(VllmEngine("http://engine", transport=httpx.MockTransport(answer)))


def test_plans_travel_with_their_sequences_and_labels_come_back() -> None:
    asked: list[tuple[str, Any]] = []
    choice = {"token_ids": [1], "weight_versions": [{"version": "v000000003", "start": 0, "end": 1}]}
    access = served({"/inference/v1/generate": {"choices": [choice]}}, asked)
    labels = access.prefill(
        [([5, 6, 7], {"draftlake": {"ticket": "a"}}), ([8], {"draftlake": {"ticket": "b"}})]
    )
    assert labels == {"v000000003"}
    bodies = {body["kv_transfer_params"]["draftlake"]["ticket"]: body for _, body in asked}
    assert {name: body["token_ids"] for name, body in bodies.items()} == {"a": [5, 6, 7], "b": [8]}
    assert all(body["sampling_params"]["max_tokens"] == 1 for body in bodies.values())


def test_the_label_is_asked_and_may_be_unknown() -> None:
    assert served({"/weight_info": {"weight_version": "v000000002"}}, []).label() == "v000000002"
    assert served({}, []).label() is None


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(not SOAK, reason="starts a server: DRAFTLAKE_SOAK=1")
def test_a_real_server_writes_verified_windows_into_the_lake(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from features.collect.replay import replay_rollouts
    from features.collect.taps import hf
    from features.collect.taps.vllm_engine import ReplayEngine

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=96,
        initializer_range=0.2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).float().eval()
    model.save_pretrained(tmp_path / "target")
    head = hf.head_from_model(model)
    rng = np.random.default_rng(0)
    rollouts = [a_rollout(model, f"s{i}", [int(t) for t in rng.integers(3, VOCAB, 40)]) for i in range(5)]
    identity = TargetIdentity(
        target_id="tiny", architecture="LlamaForCausalLM", hidden_size=HIDDEN, num_layers=LAYERS,
        vocab_size=VOCAB, tokenizer_digest="t" * 64, config_digest="c" * 64,
    )  # fmt: skip
    lake = Lake.init(str(tmp_path / "lake"), identity)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = replay_command(
        tmp_path / "target", IDS, num_layers=LAYERS, port=port, dtype="float32", max_model_len=96
    )
    with LocalServer(command, log_path=tmp_path / "server.log") as server:
        engine = ReplayEngine(ServedReplay(server), tmp_path / "target")
        given: dict[str, Any] = {
            "engine": engine, "head": head, "record": tiny_record(head.head_id, target=identity),
            "layer_ids": IDS, "dtype": FeatureDtype.FLOAT32, "policy": SamplingPolicy(), "writer_id": "served",
        }  # fmt: skip
        report = replay_rollouts(lake, rollouts, **given)
        assert (report.collected, report.verified, report.quarantined) == (5, 5, {})
        assert report.agreement.mean_error < 1e-4
        server.set_target_version("v000000003")
        with pytest.raises(VersionConflictError, match="labelled \\['v000000003'\\]"):
            replay_rollouts(lake, rollouts, **given)


def a_rollout(model: Any, name: str, ids: list[int]) -> Rollout:
    import torch

    with torch.no_grad():
        table = torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1)
    logprobs = [None, *(float(table[i - 1, ids[i]]) for i in range(1, len(ids)))]
    return Rollout(
        sample_id=name, group_id=name, token_ids=tuple(ids), prompt_length=1, version=0,
        sampled_mask=(False,) + (True,) * (len(ids) - 1), logprobs=tuple(logprobs), logprob_kind="engine_raw",
    )  # fmt: skip
