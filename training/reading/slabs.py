"""Memory for features that is used again, without anybody having to give it back.

Fresh memory costs a page fault for every 4 KiB, about as much as reading into it. A slab goes
back to its pool when the last array that shares its memory is gone, so a caller may keep a
window as long as it likes and can never see it overwritten.
"""

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_SMALLEST = 2**16
_STEPS_PER_DOUBLING = 4


class SlabPool:
    """Slabs by size; safe to share between threads."""

    def __init__(self, *, keep_bytes: int, allocate: Callable[[int], Bytes] | None = None) -> None:
        """``keep_bytes`` of free memory are kept at most; ``allocate`` makes writable memory, e.g. pinned."""
        self._allocate = allocate or (lambda nbytes: np.empty(nbytes, np.uint8))
        self._free: defaultdict[int, list[Bytes]] = defaultdict(list)
        self._kept, self._keep_bytes = 0, keep_bytes
        # Entered again when a collection inside ``take`` drops a lease of the same thread.
        self._lock = threading.RLock()
        self.allocated = 0
        """Slabs made so far: stands still once a reader runs steadily."""

    def take(self, nbytes: int) -> Bytes:
        """``nbytes`` of uninitialised memory, the caller's until its last view is gone."""
        size = slab_size(nbytes)
        with self._lock:
            free = self._free[size]
            memory = free.pop() if free else None
            if memory is not None:
                self._kept -= size
            else:
                self.allocated += 1
        lease = _Lease(self, self._allocate(size) if memory is None else memory)
        return np.asarray(lease)[:nbytes]

    def _give_back(self, memory: Bytes) -> None:
        with self._lock:
            if self._kept + memory.nbytes <= self._keep_bytes:
                self._kept += memory.nbytes
                self._free[memory.nbytes].append(memory)


class _Lease:
    """Owner of a slab's memory for as long as arrays refer to it."""

    def __init__(self, pool: SlabPool, memory: Bytes) -> None:
        self.__array_interface__: dict[str, Any] = memory.__array_interface__
        self._pool, self._memory = pool, memory

    def __del__(self) -> None:
        self._pool._give_back(self._memory)


def slab_size(nbytes: int) -> int:
    """The size that is allocated: a few for each doubling, so that slabs fit other windows too."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    step = 2 ** ((nbytes - 1).bit_length() - 1) // _STEPS_PER_DOUBLING
    return -(-nbytes // step) * step
