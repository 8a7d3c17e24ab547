"""A vLLM engine as a source of features: run sequences through it, prove it.

``model`` of this tap is a :class:`ReplayEngine`. Imports vLLM and torch on use; reach this
module by its dotted name only.
"""

import base64
import itertools
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from features import errors
from features.collect.sampling import WindowSpan
from features.collect.taps import hf
from features.collect.taps.vllm_rows import ReplayRequest
from features.errors import DraftlakeError, EngineError, ProofFailedError, VersionConflictError


class EngineAccess(Protocol):
    """How an engine is reached."""

    def call_worker(self, method: str, kwargs: Mapping[str, Any]) -> list[Any]:
        """Run a method of the worker extension; one JSON-like answer per worker."""
        ...

    def prefill(self, sequences: Sequence[tuple[Sequence[int], Mapping[str, Any]]]) -> set[str]:
        """Run ``(token ids, kv_transfer_params)``; labels of the weights, as far as the engine says."""
        ...

    def label(self) -> str | None:
        """Version label of the target weights; None from a release without labels."""
        ...


class LocalLlm:
    """A ``vllm.LLM`` of this process; its core may be another one."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def call_worker(self, method: str, kwargs: Mapping[str, Any]) -> list[Any]:
        try:
            return list(self._llm.collective_rpc(method, kwargs=dict(kwargs)))
        except (AttributeError, NotImplementedError) as error:
            raise EngineError(
                f"the engine has no {method} ({error}). Start it with the arguments of "
                "features.collect.taps.vllm_arguments.engine_arguments"
            ) from error

    def prefill(self, sequences: Sequence[tuple[Sequence[int], Mapping[str, Any]]]) -> set[str]:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": list(token_ids)} for token_ids, _ in sequences]
        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=1,
                detokenize=False,
                extra_args={"kv_transfer_params": dict(parameters)},
            )
            for _, parameters in sequences
        ]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        spans = [getattr(output.outputs[0], "weight_versions", None) or () for output in outputs]
        return {span.version for found in spans for span in found}

    def label(self) -> str | None:
        ask = getattr(self._llm.llm_engine, "get_weight_version", None)
        return None if ask is None else str(ask())


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine says of itself."""

    layer_ids: tuple[int, ...]
    """Layer ids that it extracts."""
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    dtype: str
    """Precision in which it computes, such as ``bfloat16``."""
    weights_checksum: str
    """Of the target weights at the moment of asking; compared with itself only."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What callers of a tap read of a model's config."""

    max_position_embeddings: int
    """Tokens of the longest sequence that can be run."""


class ReplayEngine:
    """A running vLLM, in this process or behind its server.

    Args:
        access: a :class:`LocalLlm`, or ``publish.vllm_replay.ServedReplay``; the engine was started with
            :func:`features.collect.taps.vllm_arguments.engine_arguments`.
        checkpoint: directory of the weights that it is meant to serve; the aux probe compares with it.

    Raises:
        EngineError: it was not started so, or cannot be replayed on (prefix cache, several workers).
    """

    def __init__(self, access: EngineAccess, checkpoint: str | Path) -> None:
        self._access, self.checkpoint = access, Path(checkpoint)
        # Of their own: a served engine may be asked by several drivers at once.
        self._names = (f"tap-{uuid.uuid4().hex}-{n}" for n in itertools.count())
        facts = self.facts()
        # One position stays free: the engine always samples a token.
        self.config = EngineConfig(max_position_embeddings=facts.max_model_len - 1)
        self.weights = (facts.weights_checksum, self._access.label())
        """Checksum and version label of the target weights that all of a replay must come from."""

    def call(self, method: str, **kwargs: Any) -> dict[str, Any]:
        """Run a ``draftlake_replay_*`` method in the engine's one worker.

        Raises:
            EngineError: the engine has no such method, or several workers.
            DraftlakeError: whatever the method refused with.
        """
        answers = self._access.call_worker(f"draftlake_replay_{method}", kwargs)
        if len(answers) != 1:
            raise EngineError(
                f"the engine has {len(answers)} workers, expected 1: replay on tensor_parallel_size=1"
            )
        answer: dict[str, Any] = answers[0]
        if not answer["ok"]:
            raise _error_class(answer["kind"])(answer["message"])
        return answer

    def facts(self) -> EngineFacts:
        """Ask the engine what it is; reads every weight once."""
        answer = self.call("facts")
        ids = tuple(answer.pop("layer_ids"))
        return EngineFacts(layer_ids=ids, **{name: v for name, v in answer.items() if name != "ok"})

    def require_same_weights(self) -> None:
        """Refuse weights other than those at the beginning.

        Raises:
            VersionConflictError: checksum or label changed since this object was made.
        """
        found = (self.facts().weights_checksum, self._access.label())
        if found != self.weights:
            raise VersionConflictError(
                f"the engine's target weights changed since the replay began: checksum and label were "
                f"{self.weights}, now {found}. Hold target syncs during a replay and run it again"
            )

    def prefill(self, sequences: Sequence[tuple[Sequence[int], ReplayRequest]]) -> None:
        """Compute token sequences from their first token; the planned rows wait in the worker.

        Raises:
            VersionConflictError: the engine reports another weights label than at the beginning.
        """
        labels = self._access.prefill([(ids, request.as_parameter()) for ids, request in sequences])
        if labels - {self.weights[1]}:
            raise VersionConflictError(
                f"the engine ran a sequence with weights labelled {sorted(labels)}, the replay began with "
                f"{self.weights[1]!r}. Hold target syncs during a replay and run it again"
            )

    def request(self, ticket: str, num_tokens: int, spans: tuple[WindowSpan, ...]) -> ReplayRequest:
        """What to take of a sequence, under the name by which it is fetched."""
        return ReplayRequest(ticket, num_tokens, spans)

    def whole(self, num_tokens: int) -> ReplayRequest:
        """Every row of a sequence, under a name of its own."""
        return ReplayRequest(next(self._names), num_tokens, (WindowSpan(0, num_tokens),))


def forward_features(
    model: ReplayEngine, token_ids: Sequence[Sequence[int]], layer_ids: Sequence[int]
) -> list[hf.Features]:
    """Every row of whole sequences; see :func:`features.collect.taps.hf.forward_features`.

    Rows cross the RPC as text: for volume use :func:`features.collect.replay.replay_rollouts`,
    which writes where they are.

    Raises:
        EngineError: states are incomplete, or a layer id is not extracted.
        VersionConflictError: the weights changed since the engine was wrapped.
    """
    requests = [model.whole(len(ids)) for ids in token_ids]
    model.prefill(list(zip(token_ids, requests, strict=True)))
    answers = [
        model.call("rows", ticket=r.ticket, layer_ids=list(layer_ids), num_tokens=r.num_tokens)
        for r in requests
    ]
    model.require_same_weights()
    return [
        (_unpacked(answer["aux"], len(ids)), _unpacked(answer["final"], len(ids)))
        for ids, answer in zip(token_ids, answers, strict=True)
    ]


def aux_probe(model: ReplayEngine, layer_ids: Sequence[int], token_ids: Sequence[int]) -> hf.ProbeReport:
    """Prove the engine's rows against a transformers forward of the checkpoint it is meant to serve.

    Layer ids as in :func:`features.collect.taps.hf.aux_probe`; the final rows, which are derived
    from the last block's output, must equal what that model's LM head reads. An engine with
    other weights than the checkpoint's fails here. Loads the checkpoint once, on the host.

    Raises:
        ProofFailedError: naming what differs.
    """
    from transformers import AutoModelForCausalLM

    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(model.facts().dtype, torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(
        model.checkpoint, dtype=dtype, local_files_only=True
    ).eval()
    found: list[hf.Features] = []

    def tap(_: Any, sequences: Sequence[Sequence[int]], ids: Sequence[int]) -> list[hf.Features]:
        found[:] = forward_features(model, sequences, ids)
        return found

    report = hf.aux_probe(reference, layer_ids, token_ids, tap=tap)
    _, final = found[0]
    _, expected = hf.forward_features(reference, [token_ids], layer_ids)[0]
    error = float((np.linalg.norm(final - expected, axis=1) / np.linalg.norm(expected, axis=1)).max())
    if not error <= report.tolerance:
        raise ProofFailedError(
            f"final probe: rows derived with the final norm differ from what the LM head of {model.checkpoint} reads "
            f"(largest relative row error {error:.2e}, at most {report.tolerance:.0e} passes). Does the engine "
            "serve these weights?"
        )
    return report


def _unpacked(text: str, rows: int) -> NDArray[np.float32]:
    return np.frombuffer(base64.b64decode(text), np.float32).reshape(rows, -1).copy()


def _error_class(kind: str) -> type[DraftlakeError]:
    """Our error class of that name, where its only argument is the message."""
    found = getattr(errors, kind, EngineError)
    plain = isinstance(found, type) and issubclass(found, DraftlakeError) and "__init__" not in vars(found)
    return found if plain else EngineError
