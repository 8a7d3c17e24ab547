"""Talks to one vLLM server that runs the Draftlake plugin: state, swap, counters, generation.

A swap is ``prepare`` (the engine keeps serving) and ``commit``: pause with running requests
kept, load through vLLM's own draft-update session, verify, resume. The target's KV stays valid
in a draft-only swap, so caches are not cleared; the session is finished without a weight
version, because that label belongs to the target.
"""

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields
from typing import Any
from urllib.parse import urlsplit

import httpx

from features.errors import DraftLayoutError, EngineError, EnginePausedError
from publish.engines import AcceptanceCounters, EngineState, GeneratedSequence

logger = logging.getLogger(__name__)

_METRIC = re.compile(r"^vllm:spec_decode_num_(\w+?)_total\{([^}]*)\}\s+(\S+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')
_NO_LOGPROB = -9999.0
"""What vLLM writes on the wire for minus infinity and NaN."""
_MAX_IN_FLIGHT = 64
_RESUME_TRIES = 3
_CLOSED_ROUTE = (
    "Start it with VLLM_SERVER_DEV_MODE=1 (swapping) and, where the release knows it, --enable-scale-out "
    "(tokens in, tokens out), as `publish.launch.serve_command` does."
)


class VllmEngine:
    """One engine behind a base URL. Thread-safe for generation; one swap at a time.

    Args:
        base_url: ``http://host:port`` of the server.
        name: how reports call it; host and port when None.
        timeout_s: for one request, generation included.
        transport: an httpx transport, for tests.
    """

    def __init__(
        self,
        base_url: str,
        *,
        name: str | None = None,
        timeout_s: float = 300.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._name = name or urlsplit(self.base_url).netloc
        # As wide as the widest batch: a short pool makes requests wait for a connection in the
        # client, where a timeout would look like a slow engine. No connection is kept: the server
        # resets the one on which a request failed, and the next call would fall over it.
        limits = httpx.Limits(max_connections=_MAX_IN_FLIGHT + 8, max_keepalive_connections=0)
        self._http = httpx.Client(
            base_url=self.base_url, timeout=timeout_s, transport=transport, limits=limits
        )

    @property
    def name(self) -> str:
        """How reports call this engine."""
        return self._name

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def wait_ready(self, timeout_s: float, *, alive: Callable[[], bool] = lambda: True) -> None:
        """Wait until the server answers its health route.

        Raises:
            EngineError: it did not within ``timeout_s``, or ``alive`` says that it has ended.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if self._http.get("/health", timeout=5.0).status_code == 200:
                    return
            except httpx.HTTPError:
                pass  # not listening yet
            if not alive():
                raise EngineError(f"engine {self.name} ended before it was ready. Its log says why.")
            if time.monotonic() > deadline:
                raise EngineError(
                    f"engine {self.name} was not ready within {timeout_s:.0f} s. Its log says what it waits for; "
                    f"the first use of an architecture can take a minute longer."
                )
            time.sleep(0.1)

    def state(self) -> EngineState:
        """Read fingerprints, ownership and names inside the engine, while it keeps serving.

        Raises:
            EngineError: unreachable, no plugin, or no draft model.
        """
        answer = self._task("state")
        absent = sorted({f.name for f in fields(EngineState)} - {"engine"} - answer.keys())
        if absent:
            raise EngineError(
                f"engine {self.name} reports its state without {', '.join(absent)}: its plugin is of another "
                f"release. Install the same draftlake beside the engine and restart it."
            )
        return EngineState(
            engine=self.name,
            vllm_version=answer["vllm_version"],
            method=answer["method"],
            num_speculative_tokens=answer["num_speculative_tokens"],
            draft_artifact=answer["draft_artifact"],
            draft_fingerprint=answer["draft_fingerprint"],
            draft_tensors=tuple(answer["draft_tensors"]),
            target_fingerprint=answer["target_fingerprint"],
            aliased=tuple(answer["aliased"]),
            owns_lm_head=answer["owns_lm_head"],
            owns_embed_tokens=answer["owns_embed_tokens"],
            prepared=answer["prepared"],
        )

    def prepare(self, artifact_uri: str, digest: str) -> None:
        """Fetch, check and stage an artifact inside the engine, while it keeps serving.

        Raises:
            DraftLayoutError: the artifact does not fit the live draft.
            EngineError: it cannot be read there, is another artifact, or the engine cannot swap.
        """
        self._task("prepare", uri=artifact_uri, digest=digest)

    def commit(self, digest: str) -> dict[str, float]:
        """Load the staged artifact and resume; a failure puts the old draft back before resuming.

        Returns:
            Seconds by part: ``pause``, ``load``, ``verify``, ``resume`` and ``total``.

        Raises:
            EngineError: nothing of that digest is staged, or the engine failed on the way.
        """
        brief = self._one(self.call_worker("draftlake_brief"))
        if brief["prepared"] != digest:
            raise EngineError(
                f"engine {self.name} has staged {brief['prepared'] or 'nothing'}, expected {digest}. "
                f"Prepare that artifact first; nothing was changed."
            )

        def verify() -> None:
            try:
                self._one(self.call_worker("draftlake_verify", {"digest": digest}))
            except EngineError:
                self._update({"revert": True})
                raise

        return self._paused(lambda: self._update({"digest": digest}), verify)

    def revert(self) -> None:
        """Put back the draft that the last commit replaced.

        Raises:
            EngineError: the engine holds none, or failed on the way.
        """
        brief = self._one(self.call_worker("draftlake_brief"))
        if not brief["revertible"]:
            raise EngineError(
                f"engine {self.name} holds no replaced draft. Prepare and commit the wanted artifact."
            )
        self._paused(lambda: self._update({"revert": True}), lambda: None)

    def counters(self) -> AcceptanceCounters:
        """Cumulative speculation counters, summed over the server's engine cores.

        Raises:
            EngineError: unreachable, or it publishes none (no speculation, or statistics off).
        """
        return parse_counters(self._send("GET", "/metrics").text, where=self.name)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int | None = None,
        logprobs: bool = False,
        ignore_eos: bool = False,
        kv_transfer_params: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[GeneratedSequence]:
        """Continue prompts given as token ids, all in flight at once, in the order given.

        Args:
            seed: request i samples with ``seed + i``, so that equal prompts differ.
            logprobs: also return the raw (temperature 1) logprob of each sampled token.
            kv_transfer_params: what each request tells the engine's KV connector.

        Raises:
            EngineError: unreachable, refused, or the token route is closed.
        """

        def one(index: int) -> GeneratedSequence:
            sampling: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
            sampling["ignore_eos"] = ignore_eos
            if seed is not None:
                sampling["seed"] = seed + index
            if logprobs:
                sampling["logprobs"] = 0
            body = {"token_ids": list(prompts[index]), "sampling_params": sampling}
            if kv_transfer_params:
                body["kv_transfer_params"] = dict(kv_transfer_params[index])
            return _sequence(prompts[index], self._send("POST", "/inference/v1/generate", json=body).json())

        if not prompts:
            return []
        with ThreadPoolExecutor(max_workers=min(len(prompts), _MAX_IN_FLIGHT)) as pool:
            return list(pool.map(one, range(len(prompts))))

    def set_target_version(self, label: str) -> None:
        """Label the target's weights from now on; outputs report it as ``weight_versions``.

        Raises:
            EngineError: unreachable, or a release without labels: outputs then carry none.
        """
        remedy = (
            "Releases before labels (0.26) cannot say which target version sampled a token: serve a newer one, "
            "or label the rollouts where they are requested, between two target syncs."
        )
        self._send("POST", "/update_weight_version", absent=remedy, json={"new_version": label})

    def target_version(self) -> str:
        """The label of the target's weights; EngineError where a release has none."""
        return str(self._send("GET", "/weight_info").json()["weight_version"])

    def call_worker(self, method: str, kwargs: Mapping[str, Any] | None = None) -> list[Any]:
        """Run a method of vLLM's worker in every worker; one result each.

        Raises:
            EngineError: unreachable, or the method raised.
        """
        answer = self._send("POST", "/collective_rpc", json={"method": method, "kwargs": dict(kwargs or {})})
        if not answer.content:
            return []
        try:
            return list(answer.json()["results"])
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError(
                f"engine {self.name} answered {method} with {answer.text[:80]!r}, expected JSON with 'results'. "
                f"Is {self.base_url} that vLLM server itself, not a proxy's error page?"
            ) from error

    def _task(self, task: str, **kwargs: str) -> dict[str, Any]:
        ticket = self._one(self.call_worker("draftlake_start", {"task": task, **kwargs}))["ticket"]
        wait_s = 0.005
        while True:
            answer = self._one(self.call_worker("draftlake_poll", {"ticket": ticket}))
            if answer["done"]:
                return answer
            time.sleep(wait_s)
            # Each question costs the engine a turn of its loop.
            wait_s = min(wait_s * 1.5, 0.25)

    def _one(self, results: list[Any]) -> dict[str, Any]:
        if len(results) != 1 or not isinstance(results[0], dict):
            raise EngineError(
                f"engine {self.name} answered with {len(results)} results, expected 1 worker's dict. Drafts are "
                f"swapped into single-worker engines; serve several engines instead of several workers."
            )
        answer: dict[str, Any] = results[0]
        if answer.get("ok") is True:
            return answer
        error = DraftLayoutError if answer.get("kind") == "layout" else EngineError
        raise error(f"engine {self.name}: {answer.get('message') or f'unexpected answer {answer!r:.200}'}")

    def _update(self, update_info: Mapping[str, Any]) -> None:
        self._send("POST", "/start_draft_weight_update")
        try:
            self._send("POST", "/update_weights", json={"update_info": dict(update_info)})
        except EngineError:
            # vLLM closes the session when an update fails; if the request never arrived it is still
            # open, and an open session would refuse every later swap.
            with suppress(EngineError):
                self._send("POST", "/finish_weight_update", json={})
            raise
        self._send("POST", "/finish_weight_update", json={})

    def _paused(self, load: Callable[[], None], verify: Callable[[], None]) -> dict[str, float]:
        marks = [time.monotonic()]
        try:
            self._send("POST", "/pause", params={"mode": "keep", "clear_cache": "false"})
            marks.append(time.monotonic())
            load()
            marks.append(time.monotonic())
            verify()
            marks.append(time.monotonic())
        finally:
            # Also after a failed pause: it may have been carried out though its answer was lost.
            self._resume()
        marks.append(time.monotonic())
        parts = zip(("pause", "load", "verify", "resume"), marks, marks[1:], strict=False)
        return {name: end - start for name, start, end in parts} | {"total": marks[-1] - marks[0]}

    def _resume(self) -> None:
        # An engine left paused serves nobody, and resuming twice is harmless.
        for _ in range(_RESUME_TRIES - 1):
            with suppress(EngineError):
                self._send("POST", "/resume")
                return
        try:
            self._send("POST", "/resume")
        except EngineError as error:
            raise EnginePausedError(
                f"engine {self.name} was paused for a swap and could not be resumed ({error}): it may serve "
                f"nobody. Resume it (POST {self.base_url}/resume) or restart it."
            ) from error

    def _send(self, method: str, path: str, *, absent: str = _CLOSED_ROUTE, **kwargs: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **kwargs)
        except httpx.HTTPError as error:
            raise EngineError(
                f"engine {self.name} cannot be reached at {self.base_url}{path}: {error or type(error).__name__}. "
                f"Is the server running, and is that its address?"
            ) from error
        if response.status_code == 404:
            raise EngineError(f"engine {self.name} has no route {path}. {absent}")
        if response.is_error:
            raise EngineError(
                f"engine {self.name} answered {response.status_code} to {path}: {_detail(response)}"
            )
        return response


def parse_counters(text: str, *, where: str) -> AcceptanceCounters:
    """Read vLLM's speculation counters from Prometheus text; sums over labels other than ``position``.

    Raises:
        EngineError: the counters are absent.
    """
    totals: dict[str, int] = {}
    positions: dict[int, int] = {}
    for kind, labels, value in _METRIC.findall(text):
        position = _POSITION.search(labels)
        if kind == "accepted_tokens_per_pos" and position:
            index = int(position.group(1))
            positions[index] = positions.get(index, 0) + int(float(value))
        else:
            totals[kind] = totals.get(kind, 0) + int(float(value))
    if sorted(positions) != list(range(len(positions))):
        raise EngineError(
            f"engine {where} counts accepted tokens at positions {sorted(positions)}, expected all from 0: they "
            f"cannot be told apart. Report the vLLM release."
        )
    if not {"drafts", "draft_tokens", "accepted_tokens"} <= set(totals):
        raise EngineError(
            f"engine {where} publishes no speculation counters (vllm:spec_decode_num_drafts and others). "
            f"Is it started with a draft, and without --disable-log-stats?"
        )
    return AcceptanceCounters(
        drafts=totals["drafts"],
        draft_tokens=totals["draft_tokens"],
        accepted=totals["accepted_tokens"],
        accepted_per_position=tuple(positions[index] for index in sorted(positions)),
    )


def _sequence(prompt: Sequence[int], answer: Mapping[str, Any]) -> GeneratedSequence:
    choice = answer["choices"][0]
    tokens = tuple(int(token) for token in choice["token_ids"])
    content = (choice.get("logprobs") or {}).get("content")
    values = [None] * len(tokens) if content is None else [_logprob(entry["logprob"]) for entry in content]
    if len(values) != len(tokens):
        raise EngineError(
            f"the engine returned {len(values)} logprobs for {len(tokens)} tokens; they cannot be paired. "
            f"Check that --logprobs-mode is raw_logprobs and report the vLLM release."
        )
    spans = choice.get("weight_versions") or ()
    return GeneratedSequence(
        prompt_token_ids=tuple(int(token) for token in prompt),
        token_ids=tokens,
        logprobs=tuple(values),
        finish=str(choice.get("finish_reason")),
        weight_versions=tuple((str(span["version"]), int(span["start"]), int(span["end"])) for span in spans),
    )


def _logprob(value: float | None) -> float | None:
    return None if value is None or value <= _NO_LOGPROB else float(value)


def _detail(response: httpx.Response) -> str:
    try:
        body = response.json()
    except ValueError:
        return response.text[:500]
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:800]
