"""The pipeline: plans an epoch, keeps requests under way, yields steps of checked windows."""

import os
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from features.errors import InputError
from features.storage import LocalStore
from features.windows import Window
from training.reading.landing import CallingThread, Landing, Part
from training.reading.plan import EpochPlan, Step, plan_epoch, streams
from training.reading.slabs import Bytes, SlabPool
from training.reading.spec import MIB, Position, ReadSpec, decode_state, encode_state
from training.reading.table import WindowTable, cut_parts

if TYPE_CHECKING:
    from features.lake import Lake
    from features.selection import Selection

LOCAL_THREADS, REMOTE_THREADS = 4, 32
SPARE_SLAB_BYTES = 64 * MIB
"""Free memory kept beyond what may be under way: the caller's last steps come back too."""

_NOT_ABOUT_ORDER = ("read_ahead_bytes", "concurrency", "order")


@dataclass(frozen=True, slots=True, eq=False)
class ReadStep:
    """Windows of one step on one rank."""

    windows: tuple[Window, ...]
    indices: Step
    """Their places in the selection."""
    state: dict[str, Any]
    """Where to resume after this step: a small JSON value, the same on every rank."""


class Planner:
    """Plans and states of one rank; needs no lake."""

    def __init__(
        self, selection: "Selection", spec: ReadSpec | None = None, *, rank: int = 0, world_size: int = 1
    ) -> None:
        """Every rank is given an equal selection and spec.

        Raises:
            EmptySelectionError: nothing is selected.
        """
        self.rows = selection.require_nonempty().rows
        self.spec = spec or ReadSpec()
        self.rank, self.world_size = rank, world_size
        self.table = WindowTable.of(self.rows)
        self._selection = selection
        self._last_plan: tuple[int, EpochPlan] | None = None

    @property
    def streaming(self) -> bool:
        """Whether parts of fragments are streamed, rather than windows fetched one by one."""
        return streams(self.table, self.spec)

    def plan(self, epoch: int = 0) -> EpochPlan:
        """What this rank reads in an epoch; the plan made last is kept.

        Raises:
            InputError: there are fewer windows than lanes on all ranks.
        """
        if self._last_plan is None or self._last_plan[0] != epoch:
            plan = plan_epoch(self.table, self.spec, epoch=epoch, rank=self.rank, world_size=self.world_size)
            self._last_plan = (epoch, plan)
        return self._last_plan[1]

    def state(self, position: Position) -> dict[str, Any]:
        """A position as a small JSON value."""
        return encode_state(position, self._identity)

    def position(self, state: dict[str, Any]) -> Position:
        """Where to go on from a state.

        Raises:
            InputError: it is of another selection, spec or number of ranks.
        """
        return decode_state(state, self._identity)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """What has to be equal for a position to mean the same windows."""
        ordering = {name: value for name, value in asdict(self.spec).items() if name not in _NOT_ABOUT_ORDER}
        return {
            "selection": self._selection.digest,
            "world_size": self.world_size,
            "streaming": self.streaming,
            **ordering,
        }


class SelectionReader:
    """Reads a selection, epoch by epoch; made anew in each process, and used from one thread at a time.

    Its caller holds a lease on what it reads (``training.reading.lease``).
    """

    def __init__(
        self,
        lake: "Lake",
        selection: "Selection",
        spec: ReadSpec | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        allocate: Callable[[int], Bytes] | None = None,
    ) -> None:
        """``allocate`` makes the memory that features land in (see ``SlabPool``), e.g. pinned memory.

        Raises:
            EmptySelectionError: nothing is selected.
        """
        self.planner = Planner(selection, spec, rank=rank, world_size=world_size)
        self.spec = self.planner.spec
        self._lake, self._process = lake, os.getpid()
        # Without threads, reading ahead would only keep the caller waiting.
        read_ahead = 1 if self.spec.concurrency == 0 else self.spec.read_ahead_bytes
        budget = read_ahead + (self.spec.buffer_bytes if self.planner.streaming else 0)
        self._budget = budget
        self.slabs = SlabPool(keep_bytes=budget + SPARE_SLAB_BYTES, allocate=allocate)
        self._landing = Landing(lake, self.planner.rows, self.slabs)

    def read(
        self, start: Position | None = None, *, turn: int = 0, turns: int = 1
    ) -> Generator[ReadStep, None, None]:
        """Steps from ``start`` to the end of its epoch; every ``turns``-th one, from ``turn`` on.

        A window's features share memory with others read along; that memory is used again once
        none of them is referred to.

        Raises:
            InputError: there are fewer windows than lanes, or this process was forked off the
                one that made the reader.
            LakeContractError: stored data are absent, short or altered.
        """
        if os.getpid() != self._process:
            raise InputError(
                "this reader was made in another process, and clients of a store do not survive a fork: they "
                "hang. Start processes by spawn and make a reader in each (training.reading.dataset does)."
            )
        start = start or Position()
        steps = self.planner.plan(start.epoch).steps
        chosen = range(start.step + turn, len(steps), turns)
        wanted = _Wanted(self.planner, [steps[step] for step in chosen], chosen)
        with self._executor() as threads:
            pipeline = _Pipeline(self._landing, threads, wanted, self._budget)
            try:
                for place, step in enumerate(chosen):
                    windows = pipeline.windows(place)
                    state = self.planner.state(Position(start.epoch, step + 1))
                    yield ReadStep(windows, steps[step], state)
                    del windows  # held by the caller alone, so that their memory is free for what comes next
            finally:
                pipeline.cancel()
                self._landing.tables.forget_failures()

    def _executor(self) -> Executor:
        default = LOCAL_THREADS if isinstance(self._lake.store, LocalStore) else REMOTE_THREADS
        concurrency = default if self.spec.concurrency is None else self.spec.concurrency
        return ThreadPoolExecutor(concurrency, "draftlake-read") if concurrency else CallingThread()


class _Wanted:
    """Which parts have to be asked for at each step that is to come."""

    def __init__(self, planner: Planner, steps: Sequence[Step], numbers: Sequence[int]) -> None:
        self.steps = steps
        self._planner = planner
        self._parts: list[list[list[int]]] | None = None
        if planner.streaming:
            self._parts = self._first_uses(numbers)

    def parts(self, place: int) -> list[list[int]]:
        """Windows to be read together, for parts first needed at a step."""
        if self._parts is None:
            return self._cut(self.steps[place])
        return self._parts[place]

    def _first_uses(self, numbers: Sequence[int]) -> list[list[list[int]]]:
        """Parts of each lane, what was used before ``numbers`` begin left out."""
        lanes: defaultdict[int, list[int]] = defaultdict(list)
        used_at: dict[int, int] = {}
        for place, number in enumerate(numbers):
            lanes[number % self._planner.spec.lanes].extend(self.steps[place])
            used_at.update(dict.fromkeys(self.steps[place], place))
        parts: list[list[list[int]]] = [[] for _ in numbers]
        for members in lanes.values():
            for part in self._cut(members):
                parts[min(used_at[index] for index in part)].append(part)
        return parts

    def _cut(self, members: Sequence[int]) -> list[list[int]]:
        spec = self._planner.spec
        cut = cut_parts(
            self._planner.table, np.array(members, np.int64), part_bytes=spec.part_bytes, gap_bytes=spec.gap_bytes
        )  # fmt: skip
        return [part.tolist() for part in cut]


class _Pipeline:
    """Parts under way or waiting to be used, within a budget of bytes."""

    def __init__(self, landing: Landing, threads: Executor, wanted: _Wanted, budget: int) -> None:
        self._landing, self._threads = landing, threads
        self._wanted, self._budget = wanted, budget
        self._part_of: dict[int, Part] = {}
        self._unused: dict[int, int] = {}
        self._bytes, self._asked = 0, 0

    def windows(self, place: int) -> tuple[Window, ...]:
        """Windows of a step; places are asked for in order."""
        self._ask_ahead(place)
        return tuple(self._take(index) for index in self._wanted.steps[place])

    def cancel(self) -> None:
        """Give up what is under way."""
        for part in self._part_of.values():
            part.cancel()
        self._part_of.clear()

    def _ask_ahead(self, place: int) -> None:
        while self._asked < len(self._wanted.steps) and (self._asked <= place or self._bytes < self._budget):
            for members in self._wanted.parts(self._asked):
                part = self._landing.fetch(members, self._threads)
                self._part_of.update(dict.fromkeys(members, part))
                self._unused[id(part)] = len(members)
                self._bytes += part.nbytes
            self._asked += 1

    def _take(self, index: int) -> Window:
        part = self._part_of.pop(index)
        window = self._landing.window(part, index)
        self._unused[id(part)] -= 1
        if not self._unused[id(part)]:
            del self._unused[id(part)]
            self._bytes -= part.nbytes
        return window
