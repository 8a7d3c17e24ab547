"""Page-locked memory, and features on their way from it to an accelerator."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.reading.slabs import Bytes


def pinned(nbytes: int) -> Bytes:
    """Page-locked memory for ``SlabPool``; lives as long as the array does.

    PyTorch rounds the size up to a power of two.
    """
    memory: Bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
    return memory


class DeviceCopies:
    """Copies of features to an accelerator that nobody waits for; used from one thread at a time.

    Copies run on a stream of their own, beside the kernels of a training step. The stream that is
    current when they are asked for waits for them, so what is given back may be used there at once.
    Arrays are held until their copy is done: a slab cannot be filled again while it is being read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.Stream(device)
        """What copies run on."""
        self._under_way: deque[tuple[torch.Event, tuple[NDArray[Any], ...]]] = deque()

    @property
    def under_way(self) -> int:
        """Copies whose arrays are still held."""
        return len(self._under_way)

    def copy(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Stored arrays as they are: raw ``uint16`` bits come as bfloat16, ``float32`` as itself.

        Asynchronous from page-locked memory only; other memory is copied before this returns.
        """
        self.release()
        current = torch.accelerator.current_stream(self._device)
        with self.stream:
            copied = [_as_stored(array).to(self._device, non_blocking=True) for array in arrays]
            done = self.stream.record_event()
        current.wait_event(done)
        for tensor in copied:
            # Its memory belongs to the copying stream, and must outlast its use on this one.
            tensor.record_stream(current)
        self._under_way.append((done, tuple(arrays)))
        return copied

    def release(self) -> None:
        """Let go of the arrays whose copy is done; asks, and does not wait."""
        while self._under_way and self._under_way[0][0].query():
            self._under_way.popleft()


def _as_stored(array: NDArray[Any]) -> Tensor:
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
