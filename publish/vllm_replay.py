"""Replaying rollouts on a served vLLM: the command that starts it, and the way to reach it.

The engine writes into the lake itself; over HTTP go tokens and counts. The routes are those of
swapping, so the same rule holds: never expose them beyond the cluster.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from features.collect.taps.vllm_arguments import engine_arguments
from features.errors import EngineError
from publish.launch import ServeCommand, serve_command
from publish.vllm_client import VllmEngine


def replay_command(
    target: Path,
    layer_ids: Sequence[int],
    *,
    num_layers: int,
    port: int,
    device: Literal["cpu", "gpu"] = "cpu",
    dtype: str = "bfloat16",
    max_model_len: int | None = None,
    kv_cache_gib: int = 1,
) -> ServeCommand:
    """The command that serves ``target`` for replays; arguments as :func:`publish.launch.serve_command`."""
    plain = serve_command(
        target,
        None,
        port=port,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        kv_cache_gib=kv_cache_gib,
    )
    wanted = engine_arguments(target, layer_ids, num_layers=num_layers)
    argv = [*_without(plain.argv, ("--weight-transfer-config", "--worker-extension-cls"))]
    argv += ["--skip-tokenizer-init", "--worker-extension-cls", wanted["worker_extension_cls"]]
    for name in ("speculative_config", "kv_transfer_config"):
        argv += [f"--{name.replace('_', '-')}", json.dumps(wanted[name])]
    return ServeCommand(tuple(argv), plain.env, plain.base_url)


def _without(argv: Sequence[str], options: Sequence[str]) -> list[str]:
    """The command line without these options and their values."""
    dropped = {i + step for i, word in enumerate(argv) if word in options for step in (0, 1)}
    return [word for i, word in enumerate(argv) if i not in dropped]


class ServedReplay:
    """Access to a served engine for :class:`features.collect.taps.vllm_engine.ReplayEngine`."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    def call_worker(self, method: str, kwargs: Mapping[str, Any]) -> list[Any]:
        return self._engine.call_worker(method, kwargs)

    def prefill(self, sequences: Sequence[tuple[Sequence[int], Mapping[str, Any]]]) -> set[str]:
        prompts, parameters = [ids for ids, _ in sequences], [given for _, given in sequences]
        answers = self._engine.generate(prompts, max_tokens=1, kv_transfer_params=parameters)
        return {label for answer in answers for label, _, _ in answer.weight_versions}

    def label(self) -> str | None:
        try:
            return self._engine.target_version()
        except EngineError:  # a release without labels; one that cannot be reached fails on its next call
            return None
