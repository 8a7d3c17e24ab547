"""What the client sends, in which order, and what it makes of every kind of answer."""

import json
import math

import httpx
import pytest

from features.errors import DraftLayoutError, EngineError
from publish.vllm_client import VllmEngine, parse_counters

METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="target"} 100.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="target"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="target"} 300.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="target"} 90.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="0"} 60.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="1"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="2"} 10.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="target",position="2"} 1.7e+09
"""


class FakeServer:
    """Answers like vLLM; ``answers`` overrides one path or one worker method."""

    def __init__(self, **answers: object) -> None:
        self.answers = answers
        self.requests: list[tuple[str, dict]] = []
        self.staged: str | None = "d1"

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]

    def engine(self) -> VllmEngine:
        return VllmEngine("http://engine:8000", transport=httpx.MockTransport(self.handle))

    def handle(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else {}
        path = request.url.path.strip("/")
        name = body["method"] if path == "collective_rpc" else path.rsplit("/", 1)[-1]
        self.requests.append((name, body | dict(request.url.params)))
        answer = self.answers.get(name)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, httpx.Response):
            return answer
        if path == "collective_rpc":
            return httpx.Response(200, json={"results": [answer or self.worker(name)]})
        return httpx.Response(200, json=answer or {})

    def worker(self, name: str) -> dict:
        match name:
            case "draftlake_brief":
                return {"ok": True, "prepared": self.staged, "draft_artifact": None, "revertible": True}
            case "draftlake_start":
                return {"ok": True, "ticket": 7}
            case _:
                return {"ok": True, "done": True}


SWAP = ["draftlake_brief", "pause", "start_draft_weight_update", "update_weights", "finish_weight_update"]


def test_a_commit_keeps_requests_and_caches_and_never_relabels_the_target() -> None:
    server = FakeServer()
    seconds = server.engine().commit("d1")
    assert server.paths == [*SWAP, "draftlake_verify", "resume"]
    sent = dict(server.requests)
    assert sent["pause"] == {"mode": "keep", "clear_cache": "false"}
    assert sent["update_weights"] == {"update_info": {"digest": "d1"}}
    assert sent["finish_weight_update"] == {}
    assert set(seconds) == {"pause", "load", "verify", "resume", "total"}
    assert seconds["total"] == pytest.approx(sum(seconds[p] for p in ("pause", "load", "verify", "resume")))


@pytest.mark.parametrize(
    "path", ["pause", "start_draft_weight_update", "update_weights", "finish_weight_update"]
)
@pytest.mark.parametrize(
    "fault", [httpx.Response(500, json={"error": {"message": "boom"}}), httpx.ReadError("cut")]
)
def test_a_failed_commit_resumes_whatever_failed(path: str, fault: object) -> None:
    server = FakeServer(**{path: fault})
    with pytest.raises(EngineError, match="boom|cut"):
        server.engine().commit("d1")
    assert server.paths[-1] == "resume"
    assert "draftlake_verify" not in server.paths


def test_a_failed_update_closes_its_session_so_that_the_next_swap_can_open_one() -> None:
    server = FakeServer(update_weights=httpx.ReadError("cut"))
    with pytest.raises(EngineError, match="cut"):
        server.engine().commit("d1")
    assert server.paths[-2:] == ["finish_weight_update", "resume"]


def test_resuming_is_tried_again_when_it_fails_once() -> None:
    server = FakeServer()
    tries = iter([httpx.Response(502), httpx.Response(200, json={})])
    handle = server.handle

    def flaky(request: httpx.Request) -> httpx.Response:
        return next(tries) if request.url.path == "/resume" else handle(request)

    VllmEngine("http://engine:8000", transport=httpx.MockTransport(flaky)).commit("d1")
    assert next(tries, None) is None


def test_a_commit_that_does_not_verify_is_taken_back_before_resuming() -> None:
    server = FakeServer(draftlake_verify={"ok": False, "kind": "engine", "message": "2 tensors differ"})
    with pytest.raises(EngineError, match="2 tensors differ"):
        server.engine().commit("d1")
    assert server.paths[-4:] == [
        "start_draft_weight_update",
        "update_weights",
        "finish_weight_update",
        "resume",
    ]
    assert [body for name, body in server.requests if name == "update_weights"][-1] == {
        "update_info": {"revert": True}
    }


def test_a_commit_of_what_is_not_staged_does_not_pause() -> None:
    server = FakeServer()
    with pytest.raises(EngineError, match="has staged d1, expected d2"):
        server.engine().commit("d2")
    assert server.paths == ["draftlake_brief"]


def test_preparing_asks_until_the_task_has_ended() -> None:
    server = FakeServer()
    polls = iter([{"ok": True, "done": False}, {"ok": True, "done": False}, {"ok": True, "done": True}])
    handle = server.handle
    server.answers["draftlake_poll"] = None
    server.worker = lambda name: next(polls) if name == "draftlake_poll" else {"ok": True, "ticket": 7}  # type: ignore[method-assign]
    VllmEngine("http://engine:8000", transport=httpx.MockTransport(handle)).prepare("uri", "d1")
    assert server.paths == ["draftlake_start", *["draftlake_poll"] * 3]
    assert server.requests[0][1]["kwargs"] == {"task": "prepare", "uri": "uri", "digest": "d1"}
    assert server.requests[1][1]["kwargs"] == {"ticket": 7}


@pytest.mark.parametrize(("kind", "error"), [("layout", DraftLayoutError), ("engine", EngineError)])
def test_a_refusal_becomes_the_error_of_its_kind(kind: str, error: type[Exception]) -> None:
    server = FakeServer(draftlake_poll={"ok": False, "done": True, "kind": kind, "message": "why"})
    with pytest.raises(error, match="engine engine:8000: why"):
        server.engine().prepare("uri", "d1")


def test_several_workers_are_refused() -> None:
    answer = httpx.Response(200, json={"results": [{"ok": True}, {"ok": True}]})
    with pytest.raises(EngineError, match="2 results, expected 1"):
        FakeServer(draftlake_start=answer).engine().state()


def test_a_missing_route_names_the_flags_that_open_it() -> None:
    server = FakeServer(generate=httpx.Response(404, json={"detail": "Not Found"}))
    with pytest.raises(EngineError, match=r"VLLM_SERVER_DEV_MODE=1.*--enable-scale-out"):
        server.engine().generate([[1]], max_tokens=1)


def test_an_engine_that_is_not_there_is_one_clear_line() -> None:
    server = FakeServer(draftlake_start=httpx.ConnectError("refused"))
    with pytest.raises(EngineError, match="cannot be reached at http://engine:8000/collective_rpc: refused"):
        server.engine().state()


def generated(**choice: object) -> dict:
    return {"choices": [{"token_ids": [5, 6], "finish_reason": "length", **choice}]}


def test_generation_sends_ids_and_keeps_order_seeds_and_labels() -> None:
    spans = [{"version": "v1", "start": 0, "end": 1}, {"version": "v2", "start": 1, "end": 2}]
    entries = [{"token_id": 5, "logprob": -0.5}, {"token_id": 6, "logprob": -9999.0}]
    server = FakeServer(generate=generated(logprobs={"content": entries}, weight_versions=spans))
    said = server.engine().generate([[1, 2], [3]], max_tokens=2, temperature=0.8, seed=10, logprobs=True)
    assert [sequence.prompt_token_ids for sequence in said] == [(1, 2), (3,)]
    assert said[0].token_ids == (5, 6)
    assert said[0].logprobs == (-0.5, None), "-9999 is the wire's word for no value"
    assert said[0].weight_versions == (("v1", 0, 1), ("v2", 1, 2))
    sent = sorted((body["token_ids"], body["sampling_params"]) for _, body in server.requests)
    assert sent[0] == (
        [1, 2],
        {"max_tokens": 2, "temperature": 0.8, "ignore_eos": False, "seed": 10, "logprobs": 0},
    )
    assert sent[1][1]["seed"] == 11


def test_without_logprobs_every_value_is_unknown_not_zero() -> None:
    (said,) = FakeServer(generate=generated(logprobs=None)).engine().generate([[1]], max_tokens=2)
    assert said.logprobs == (None, None)
    assert said.weight_versions == ()


def test_logprobs_that_do_not_pair_with_tokens_are_refused() -> None:
    server = FakeServer(generate=generated(logprobs={"content": [{"token_id": 5, "logprob": -0.5}]}))
    with pytest.raises(EngineError, match="1 logprobs for 2 tokens"):
        server.engine().generate([[1]], max_tokens=2, logprobs=True)


def test_counters_are_read_without_their_creation_times() -> None:
    counters = parse_counters(METRICS, where="e")
    assert (counters.drafts, counters.draft_tokens, counters.accepted) == (100, 300, 90)
    assert counters.accepted_per_position == (60, 20, 10)
    assert counters.tau == pytest.approx(1.9)
    assert math.isnan((counters - counters).tau)


def test_counters_of_several_engine_cores_add_up() -> None:
    both = parse_counters(METRICS + METRICS.replace('engine="0"', 'engine="1"'), where="e")
    assert (both.drafts, both.accepted_per_position) == (200, (120, 40, 20))


def test_an_engine_without_speculation_has_no_counters_rather_than_zeros() -> None:
    with pytest.raises(EngineError, match="publishes no speculation counters"):
        parse_counters("vllm:num_requests_running 0.0\n", where="e")


def test_waiting_ends_at_once_when_the_server_has_died() -> None:
    server = FakeServer(health=httpx.ConnectError("refused"))
    with pytest.raises(EngineError, match="ended before it was ready"):
        server.engine().wait_ready(30, alive=lambda: False)


def test_waiting_gives_up_after_its_timeout() -> None:
    server = FakeServer(health=httpx.Response(503))
    with pytest.raises(EngineError, match="was not ready within 0 s"):
        server.engine().wait_ready(0)


def test_the_version_label_goes_to_the_targets_route() -> None:
    server = FakeServer()
    server.engine().set_target_version("v000000004")
    assert server.requests == [("update_weight_version", {"new_version": "v000000004"})]


def test_a_release_without_labels_says_so_rather_than_asking_for_flags() -> None:
    server = FakeServer(update_weight_version=httpx.Response(404))
    with pytest.raises(EngineError, match=r"no route /update_weight_version\. Releases before labels"):
        server.engine().set_target_version("v000000004")


def test_a_revert_without_a_replaced_draft_does_not_pause() -> None:
    server = FakeServer(draftlake_brief={"ok": True, "prepared": None, "revertible": False})
    with pytest.raises(EngineError, match="holds no replaced draft"):
        server.engine().revert()
    assert server.paths == ["draftlake_brief"]
