"""Copy gathered rows from a device to pinned host memory, beside the computation.

Imports torch: reach this module by its dotted name only.
"""

# Shape legend: W = wanted rows, H = hidden size, m = aux layers.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from features.bfloat16 import Stored
from features.errors import LakeContractError


class HostCopies:
    """Sends tensors of one device to the host on a stream of its own; on the CPU there is nothing to send."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None if device.type == "cpu" else torch.Stream(device)

    def send(self, tensors: Sequence[Tensor]) -> "Copied":
        """Start copying; the tensors may be freed at once, and the computation goes on meanwhile."""
        if self._stream is None:
            return Copied(tuple(tensors), None)
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            hosts = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
            for host, tensor in zip(hosts, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
                # Its memory must not be given to another tensor before this stream has read it.
                tensor.record_stream(self._stream)
        return Copied(tuple(hosts), self._stream.record_event())


@dataclass(frozen=True, slots=True)
class Copied:
    """Tensors in, or on their way to, host memory."""

    hosts: tuple[Tensor, ...]
    event: Any

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for the copies; other threads and the device go on."""
        if self.event is not None:
            self.event.synchronize()
        return self.hosts


@dataclass(frozen=True, slots=True)
class SentRows:
    """Rows of a plan on their way, with what the model's forward really ran over: a row source of ``offer``."""

    copied: Copied
    """``aux [W, m * H]`` and ``final [W, H]``; then token ids and positions ``[W]`` where they are known."""
    token_ids: NDArray[np.int64]
    """As planned."""
    positions: NDArray[np.int64]
    """Within each sequence, as planned."""
    sequence: NDArray[np.int64]
    """Which planned sequence a row belongs to."""
    has_tokens: bool
    has_positions: bool
    positions_restart: bool
    """Whether positions must start at 0 in each sequence, because these share a batch row."""

    def wait(self) -> tuple[Stored, Stored]:
        """Wait for the copies; ``(aux, final)``.

        Raises:
            LakeContractError: the forward ran over other tokens or positions than were planned.
        """
        aux, final, *rest = self.copied.wait()
        known = iter(rest)
        if self.has_tokens:
            self._require_tokens(next(known).numpy())
        if self.has_positions:
            self._require_positions(next(known).numpy())
        return stored(aux), stored(final)

    def _require_tokens(self, found: NDArray[np.int64]) -> None:
        if (wrong := np.flatnonzero(found != self.token_ids)).size:
            raise LakeContractError(
                f"the forward ran over token {found[wrong[0]]} where token {self.token_ids[wrong[0]]} was planned "
                f"({wrong.size} of {found.size} rows differ): the batch given to the collector is not the one given "
                f"to the model, or its layout is another. Give both the same batch."
            )

    def _require_positions(self, found: NDArray[np.int64]) -> None:
        # Left padding may shift all positions of a sequence; rotary embeddings see differences only.
        offset = found - self.positions
        first = np.flatnonzero(np.diff(self.sequence, prepend=-1))
        expected = np.zeros_like(offset) if self.positions_restart else offset[first][self.sequence]
        if (wrong := np.flatnonzero(offset != expected)).size:
            raise LakeContractError(
                f"the forward gave position {found[wrong[0]]} to token {self.positions[wrong[0]]} of a sequence "
                f"({wrong.size} of {found.size} rows differ): positions count up within a sequence, and restart at 0 "
                f"where sequences share a row. Give position_ids of that kind."
            )


def stored(tensor: Tensor) -> Stored:
    """A host tensor of float32 or bfloat16 as the lake holds it; shares memory."""
    if tensor.dtype == torch.bfloat16:
        bits: NDArray[np.uint16] = tensor.view(torch.int16).numpy().view(np.uint16)
        return bits
    array: NDArray[np.float32] = tensor.numpy()
    return array
