"""Deterministic kernels, for as long as a run lasts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic_algorithms(enabled: bool, device: torch.device) -> Iterator[None]:
    """Ask torch for deterministic kernels inside the block and restore its setting afterwards."""
    if not enabled:
        yield
        return
    if device.type == "cuda":
        # cuBLAS refuses deterministic mode without a fixed workspace; it reads this at its first use.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
