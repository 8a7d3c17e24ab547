"""Where the rows of a packed batch are when a trainer shards it: the layout algebra, without a framework.

A *packed* batch (``thd``) lays its sequences end to end on one token axis, each padded to a
multiple that the sharding needs. A *flat row* is a place on that axis, padding included.

Shape legend: R = flat rows of the packed batch, L = rows that one rank holds.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from features.errors import InputError

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class PackedRows:
    """Sequences end to end; each takes ``padded_lengths[i]`` flat rows, real tokens first."""

    lengths: tuple[int, ...]
    padded_lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        pairs = list(itertools.zip_longest(self.lengths, self.padded_lengths, fillvalue=-1))
        if not pairs or any(not 0 < length <= padded for length, padded in pairs):
            raise InputError(
                f"a packed batch needs 0 < length <= padded length for each sequence, found {pairs[:8]}. "
                f"Give cu_seqlens of the real tokens and, where they differ, of the padded ones."
            )

    @property
    def total(self) -> int:
        """Flat rows, padding included."""
        return sum(self.padded_lengths)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First flat row of each sequence."""
        return tuple(itertools.accumulate(self.padded_lengths[:-1], initial=0))

    def flat(self, sequence: int, start: int, stop: int) -> Rows:
        """Flat rows of positions ``[start, stop)`` of a sequence.

        Raises:
            InputError: the sequence has no such positions.
        """
        if not 0 <= start < stop <= self.lengths[sequence]:
            raise InputError(
                f"positions [{start}, {stop}) are not within sequence {sequence} of {self.lengths[sequence]} tokens"
            )
        return np.arange(start, stop, dtype=np.int64) + self.starts[sequence]


@dataclass(frozen=True, slots=True)
class RankShape:
    """One rank's place in context and tensor parallelism."""

    cp_size: int = 1
    cp_rank: int = 0
    tp_size: int = 1
    tp_rank: int = 0
    sequence_parallel: bool = False
    """Between blocks each tensor-parallel rank holds its own part of the rows; otherwise all hold them all."""

    def __post_init__(self) -> None:
        if not (0 <= self.cp_rank < self.cp_size and 0 <= self.tp_rank < self.tp_size):
            raise InputError(f"expected 0 <= rank < size for context and tensor parallelism, found {self}")

    def rows_held(self, packed: PackedRows) -> Rows:
        """Flat rows of this rank's hidden states ``[L, H]`` between two blocks, in their order there.

        Context parallelism balances causal attention by a zigzag: each sequence is cut into
        ``2 * cp_size`` chunks, and rank r holds chunks r and ``2 * cp_size - 1 - r``. Sequence
        parallelism then gives each tensor-parallel rank an equal, contiguous part of those.

        Raises:
            InputError: the rows cannot be divided equally.
        """
        held = np.concatenate(
            [
                self._zigzag(start, padded)
                for start, padded in zip(packed.starts, packed.padded_lengths, strict=True)
            ]
        )
        if not self.sequence_parallel or self.tp_size == 1:
            return held
        if len(held) % self.tp_size:
            raise InputError(
                f"{len(held)} rows per context-parallel rank cannot be divided among {self.tp_size} tensor-parallel "
                f"ranks. Pad the batch as the trainer does and give its padded cu_seqlens."
            )
        return np.split(held, self.tp_size)[self.tp_rank]

    def contributes(self) -> bool:
        """Whether rows are taken from this rank: where all tensor-parallel ranks hold the same, from the first."""
        return self.sequence_parallel or self.tp_rank == 0

    def picks(self, packed: PackedRows, wanted: Rows) -> tuple[Rows, Rows]:
        """``(local, slots)``: rows of this rank's hidden states to take, and their places in ``wanted``."""
        if not self.contributes():
            return np.empty(0, np.int64), np.empty(0, np.int64)
        place = np.full(packed.total, -1, np.int64)
        held = self.rows_held(packed)
        place[held] = np.arange(len(held))
        local = place[wanted]
        slots = np.flatnonzero(local >= 0)
        return local[slots], slots

    def _zigzag(self, start: int, padded: int) -> Rows:
        rows = np.arange(start, start + padded, dtype=np.int64)
        if self.cp_size == 1:
            return rows
        if padded % (2 * self.cp_size):
            raise InputError(
                f"a sequence of {padded} padded rows cannot be cut into {2 * self.cp_size} equal chunks for "
                f"{self.cp_size} context-parallel ranks. Give the padded cu_seqlens."
            )
        chunks = np.split(rows, 2 * self.cp_size)
        return np.concatenate([chunks[self.cp_rank], chunks[-1 - self.cp_rank]])


@dataclass(frozen=True, slots=True)
class StageLayout:
    """Which decoder blocks each pipeline stage runs, by global block number counted from 0."""

    blocks: tuple[tuple[tuple[int, ...], ...], ...]
    """``blocks[stage][chunk]``; a stage has several chunks under virtual pipelining."""

    def __post_init__(self) -> None:
        found = sorted(itertools.chain.from_iterable(itertools.chain.from_iterable(self.blocks)))
        if not found or found != list(range(len(found))):
            raise InputError(
                f"pipeline stages must hold every block exactly once, found block numbers {found}. Number blocks over "
                f"the whole model, not within a stage."
            )

    @classmethod
    def even(cls, num_layers: int, *, stages: int = 1, chunks: int = 1) -> "StageLayout":
        """Equal parts; with several chunks, part ``c * stages + s`` is chunk c of stage s.

        Raises:
            InputError: the blocks cannot be divided equally; give the stages' own block numbers then.
        """
        parts = stages * chunks
        if num_layers % parts:
            raise InputError(f"{num_layers} blocks cannot be divided into {stages} stages of {chunks} chunks")
        cut = [tuple(map(int, part)) for part in np.split(np.arange(num_layers), parts)]
        return cls(tuple(tuple(cut[c * stages + s] for c in range(chunks)) for s in range(stages)))

    @property
    def num_layers(self) -> int:
        """Decoder blocks of the whole model."""
        return sum(len(chunk) for stage in self.blocks for chunk in stage)

    def stage_of(self, layer_id: int) -> int:
        """The stage on which the residual stream of a layer id appears first.

        Id 0, the embedding's output, is the input of block 0; id k is the output of block k - 1.
        """
        block = max(layer_id - 1, 0)
        return next(s for s, stage in enumerate(self.blocks) if any(block in chunk for chunk in stage))

    def ids_of(self, stage: int, layer_ids: Sequence[int]) -> tuple[int, ...]:
        """The asked layer ids that appear on a stage, ascending."""
        return tuple(k for k in layer_ids if self.stage_of(k) == stage)
