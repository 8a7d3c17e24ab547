"""The reader as a PyTorch ``IterableDataset``, in the training process or in loader processes.

A dataset holds a lake's url and a selection, never an open lake: each process opens its own, so
it can be sent to a spawned process and no client of a store is ever forked.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from features.errors import InputError
from features.lake import Lake
from features.selection import Selection
from features.windows import Window
from training.reading.lease import read_lease
from training.reading.reader import Planner, ReadStep, SelectionReader
from training.reading.spec import Position, ReadSpec
from training.reading.transfer import pinned

if TYPE_CHECKING:
    from torch import Tensor

_ALIGNMENT = 64


class WindowDataset(IterableDataset["LoadedStep"]):
    """Steps of one rank, of one epoch or several, from a state on.

    The items come in the same order whatever the number of loader processes. To resume exactly,
    keep the ``state`` of the last item that was *used*; what loaders had read ahead is read again.
    While it is iterated over it holds a lease, so that retention keeps what it reads.
    """

    def __init__(
        self,
        url: str,
        selection: Selection,
        spec: ReadSpec | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        epochs: int = 1,
        state: dict[str, Any] | None = None,
        storage_options: dict[str, Any] | None = None,
        pin_memory: bool = False,
    ) -> None:
        """Epochs ``0`` to ``epochs - 1``, from ``state`` on.

        Args:
            storage_options: as for ``Lake.open``; they are passed to loader processes and never logged.
            pin_memory: land features in page-locked memory, for asynchronous copies to a GPU. Only
                without loader processes: theirs is shared memory.

        Raises:
            EmptySelectionError: nothing is selected.
            InputError: ``state`` is of another selection, spec or number of ranks; or memory is to be
                page-locked where no accelerator is.
        """
        if pin_memory and not torch.accelerator.is_available():
            raise InputError("pin_memory=True needs an accelerator and PyTorch sees none here; leave it out")
        self._planner = Planner(selection, spec, rank=rank, world_size=world_size)
        self._start = Position() if state is None else self._planner.position(state)
        self._url, self._selection, self._epochs = url, selection, epochs
        self._options, self._pin_memory = dict(storage_options or {}), pin_memory
        self._process = os.getpid()

    def num_steps(self, epoch: int = 0) -> int:
        """Steps of an epoch, the same on every rank."""
        return len(self._planner.plan(epoch).steps)

    def dropped(self, epoch: int = 0) -> tuple[int, ...]:
        """Windows that no rank reads in an epoch, because they could not be dealt evenly."""
        return self._planner.plan(epoch).dropped

    def __iter__(self) -> Iterator["LoadedStep"]:
        worker = get_worker_info()
        if os.getpid() != self._process:
            raise InputError(
                "this loader process was forked, and clients of a store that were used before a fork hang. "
                "Use training.reading.dataset.window_loader, or DataLoader(..., "
                "multiprocessing_context='spawn')."
            )
        lake = Lake.open(self._url, **self._options)
        with read_lease(lake, self._selection, reader=f"loader of rank {self._planner.rank}"):
            yield from self._steps(lake, worker)

    def _steps(self, lake: Lake, worker: Any) -> Iterator["LoadedStep"]:
        turn, turns = (worker.id, worker.num_workers) if worker else (0, 1)
        reader = SelectionReader(
            lake,
            self._selection,
            self._planner.spec,
            rank=self._planner.rank,
            world_size=self._planner.world_size,
            allocate=pinned if self._pin_memory and not worker else None,
        )
        start = self._start
        while start.epoch < self._epochs:
            for step in reader.read(start, turn=turn, turns=turns):
                yield LoadedStep(step, shared=worker is not None)
            # Loaders are asked in turns over the end of an epoch too.
            turn = (turn - (self.num_steps(start.epoch) - start.step)) % turns
            start = Position(start.epoch + 1)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in ("_planner", "_process")}
        planner = self._planner
        told = {"spec": planner.spec, "rank": planner.rank, "world_size": planner.world_size}
        return {**state, "_selection": self._selection.to_arrow_bytes(), "_told": told}

    def __setstate__(self, state: dict[str, Any]) -> None:
        told = state.pop("_told")
        self.__dict__.update(state)
        self._selection = Selection.from_arrow_bytes(state["_selection"])
        self._planner = Planner(
            self._selection, told["spec"], rank=told["rank"], world_size=told["world_size"]
        )
        self._process = os.getpid()


class LoadedStep:
    """Windows of one step; crosses processes with its features in one block of shared memory."""

    def __init__(self, step: ReadStep, *, shared: bool = False) -> None:
        """``shared`` moves the features to shared memory at once, so that their slabs are free again."""
        self.indices, self.state = step.indices, step.state
        self._features: Tensor | None = None
        self.windows = step.windows
        if shared:
            self._features, self.windows = _in_shared_memory(step.windows)

    def __getstate__(self) -> dict[str, Any]:
        features, windows = self._features, self.windows
        if features is None:
            features, windows = _in_shared_memory(windows)
        nothing: Any = np.empty(0, np.uint8)
        shapes = [(w.aux.shape, w.aux.dtype.name, w.final.shape, w.final.dtype.name) for w in windows]
        bare = [replace(window, aux=nothing, final=nothing) for window in windows]
        return {
            "indices": self.indices, "state": self.state, "bare": bare, "shapes": shapes, "features": features,
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.indices, self.state, self._features = state["indices"], state["state"], state["features"]
        memory, offset, windows = state["features"].numpy(), 0, []
        for window, (aux_shape, aux_type, final_shape, final_type) in zip(
            state["bare"], state["shapes"], strict=True
        ):
            aux, offset = _view(memory, offset, aux_shape, aux_type)
            final, offset = _view(memory, offset, final_shape, final_type)
            windows.append(replace(window, aux=aux, final=final))
        self.windows = tuple(windows)


def window_loader(
    dataset: WindowDataset, *, num_workers: int = 0, prefetch_steps: int = 2, timeout_s: float = 0
) -> "DataLoader[LoadedStep]":
    """A loader of a dataset's steps, in order; its processes are spawned.

    Without workers the reader's own threads read ahead, which is enough unless the training
    process has no core to spare. ``ReadSpec.lanes`` should be a multiple of ``num_workers``.
    ``timeout_s`` is how long a step may take before PyTorch raises; 0 waits for ever.
    """
    if not num_workers:
        return DataLoader(dataset, batch_size=None)
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=prefetch_steps,
        timeout=timeout_s,
        multiprocessing_context="spawn",
    )


def _in_shared_memory(windows: tuple[Window, ...]) -> "tuple[Tensor, tuple[Window, ...]]":
    """One shared block with all features, and the windows with views of it."""
    arrays = [array for window in windows for array in (window.aux, window.final)]
    block = torch.empty(sum(map(_padded, arrays)), dtype=torch.uint8).share_memory_()
    memory, offset, views = block.numpy(), 0, []
    for array in arrays:
        view, offset = _view(memory, offset, array.shape, array.dtype.name)
        view[...] = array
        views.append(view)
    moved = [
        replace(window, aux=aux, final=final)
        for window, aux, final in zip(windows, views[::2], views[1::2], strict=True)
    ]
    return block, tuple(moved)


def _view(
    memory: NDArray[np.uint8], offset: int, shape: tuple[int, ...], kind: str
) -> tuple[NDArray[Any], int]:
    """An array at ``offset`` of a block, and where the next one begins."""
    nbytes = int(np.prod(shape)) * np.dtype(kind).itemsize
    view = memory[offset : offset + nbytes].view(kind).reshape(shape)
    return view, offset + _padded(view)


def _padded(array: NDArray[Any]) -> int:
    return -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
