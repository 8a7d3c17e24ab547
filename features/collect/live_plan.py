"""What passes between a trainer's step, its tap and the collector's background thread."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from features.bfloat16 import Stored
from features.collect.live_batch import BatchLayout
from features.collect.rollout import Rollout
from features.collect.sampling import WindowSpan
from features.schema import TargetVersion


class RowsOnTheWay(Protocol):
    """Rows ``plan.index`` of a forward, perhaps still being copied."""

    def wait(self) -> tuple[Stored, Stored]:
        """Wait for the copy; ``(aux [W, m * H], final [W, H])``, float32 or bfloat16 bits (uint16).

        Called once, on the background thread.

        Raises:
            LakeContractError: the forward ran over another batch than was planned.
        """
        ...


@dataclass(frozen=True, slots=True)
class RowsAtHand:
    """Rows that are in host memory already."""

    aux: Stored
    final: Stored

    def wait(self) -> tuple[Stored, Stored]:
        """The arrays as they are."""
        return self.aux, self.final


@dataclass(frozen=True, slots=True, eq=False)
class LivePlan:
    """What is wanted of one forward, decided before it. An empty plan is false."""

    version: TargetVersion
    pieces: tuple[tuple[Rollout, tuple[WindowSpan, ...]], ...]
    index: NDArray[np.int64]
    """``[W]`` flat rows of the batch's own layout, in the order of ``pieces`` and their spans."""
    layout: BatchLayout
    nbytes: int
    """Feature bytes of the rows, held against the budget until they are committed, refused or abandoned."""

    def __bool__(self) -> bool:
        return bool(self.pieces)

    @property
    def num_windows(self) -> int:
        """Windows of all pieces."""
        return sum(len(spans) for _, spans in self.pieces)
