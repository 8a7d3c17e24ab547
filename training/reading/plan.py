"""Which rank reads which windows at which step. A pure function of selection, spec, epoch and ranks.

The windows of an epoch form one order, which is filled into groups of at most ``batch_rows`` rows,
padding included where a batch is padded.
Each lane of each rank gets as many consecutive groups, some of them split where that is needed to
come out even, so that all ranks take the same number of steps with about as many rows. Nothing is
read twice. What cannot be dealt evenly (a few windows, others each epoch) is left out and named.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from features.errors import InputError
from training.reading.spec import STREAM_BELOW_BYTES, ReadSpec
from training.reading.table import Index, WindowTable, cut_parts

Step = tuple[int, ...]

POOL_STEPS = 8
"""Steps' worth of windows that are sorted by length together where steps are padded: little padding, yet
other neighbours in each epoch."""


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """What one rank reads in one epoch."""

    steps: tuple[Step, ...]
    """Windows of each step, by their place in the selection; every rank has as many steps."""
    dropped: tuple[int, ...]
    """Windows that no rank reads in this epoch, ascending."""


def streams(table: WindowTable, spec: ReadSpec) -> bool:
    """Whether parts of fragments are streamed, rather than windows fetched one by one."""
    if spec.order == "auto":
        return bool(len(table)) and float(table.nbytes.mean()) < STREAM_BELOW_BYTES
    return spec.order == "stream"


def plan_epoch(
    table: WindowTable, spec: ReadSpec, *, epoch: int, rank: int = 0, world_size: int = 1
) -> EpochPlan:
    """The plan of a rank.

    Raises:
        InputError: there are fewer windows than lanes on all ranks.
    """
    if not 0 <= rank < world_size or epoch < 0:
        raise ValueError(f"no rank {rank} of {world_size}, or epoch {epoch}")
    num_shards = world_size * spec.lanes
    if len(table) < num_shards:
        raise InputError(
            f"{len(table)} windows cannot be read by {world_size} ranks with {spec.lanes} lanes each: every "
            f"lane needs one. Select more windows, or use fewer ranks or lanes."
        )
    rng = np.random.default_rng([spec.seed, epoch])
    streaming = streams(table, spec)
    order = _shuffled_parts(table, spec, rng) if streaming else rng.permutation(len(table))
    # What is streamed is filled again behind the buffers; here it is only shared out, by its rows.
    padded = spec.padded and not streaming
    groups = fill_padded(order, table, spec, rng) if padded else fill(order, table.num_rows, spec.batch_rows)
    shards, dropped = deal(groups, num_shards)
    if streaming:
        shards, left_over = _through_buffers(table, shards, spec, rng)
        dropped += left_over
    mine = shards[rank * spec.lanes : (rank + 1) * spec.lanes]
    return EpochPlan(
        steps=tuple(itertools.chain.from_iterable(zip(*mine, strict=True))),
        dropped=tuple(sorted(dropped)),
    )


def deal(groups: list[Step], count: int) -> tuple[list[list[Step]], list[int]]:
    """Consecutive groups for each of ``count`` shards, as many for all; and the windows left out.

    Groups are split to fill the last round. Windows are left out only when all groups hold a
    single one or nearly so: fewer than two for each shard.
    """
    num_windows = sum(map(len, groups))
    rounds = -(-len(groups) // count)
    if num_windows < rounds * count:
        rounds = num_windows // count
    kept, left = groups[: rounds * count], groups[rounds * count :]
    kept = _split_to(kept, rounds * count)
    shards = [kept[first : first + rounds] for first in range(0, len(kept), rounds)]
    return shards, [index for group in left for index in group]


def buffer_shuffled(order: Index, nbytes: Index, buffer_bytes: int, rng: np.random.Generator) -> Index:
    """``order`` as it leaves a shuffle buffer of ``buffer_bytes``.

    Each window is put off by a random share of the buffer, so what was read and is not yet out
    never exceeds it.
    """
    begins = np.cumsum(nbytes[order]) - nbytes[order]
    return order[np.argsort(begins + rng.random(len(order)) * buffer_bytes, kind="stable")]


def fill(order: Index, num_rows: Index, batch_rows: int) -> list[Step]:
    """Consecutive windows with at most ``batch_rows`` rows together; a longer one alone."""
    groups: list[Step] = []
    current: list[int] = []
    free = batch_rows
    for index, rows in zip(order.tolist(), num_rows[order].tolist(), strict=True):
        if current and rows > free:
            groups.append(tuple(current))
            current, free = [], batch_rows
        current.append(index)
        free -= rows
    if current:
        groups.append(tuple(current))
    return groups


def fill_padded(order: Index, table: WindowTable, spec: ReadSpec, rng: np.random.Generator) -> list[Step]:
    """Windows of similar length, with at most ``batch_rows`` rows when padded to their longest; a longer one alone.

    Sorted by length within pools of consecutive windows, and the steps of a pool shuffled again.
    """
    mean = float(table.num_rows[order].mean())
    pool = max(1, int(POOL_STEPS * spec.batch_rows / mean))
    groups: list[Step] = []
    for first in range(0, len(order), pool):
        members = order[first : first + pool]
        members = members[np.lexsort((members, table.num_rows[members]))]
        steps = _fill_sorted(members, table.num_rows, spec.batch_rows)
        groups += [steps[place] for place in rng.permutation(len(steps))]
    return groups


def _fill_sorted(members: Index, num_rows: Index, batch_rows: int) -> list[Step]:
    """Consecutive windows, ascending in length: the next one is the longest of its step."""
    steps: list[Step] = []
    current: list[int] = []
    for index, rows in zip(members.tolist(), num_rows[members].tolist(), strict=True):
        if current and (len(current) + 1) * rows > batch_rows:
            steps.append(tuple(current))
            current = []
        current.append(index)
    return [*steps, tuple(current)]


def _shuffled_parts(table: WindowTable, spec: ReadSpec, rng: np.random.Generator) -> Index:
    everything = np.arange(len(table), dtype=np.int64)
    parts = cut_parts(table, everything, part_bytes=spec.part_bytes, gap_bytes=spec.gap_bytes)
    return np.concatenate([parts[place] for place in rng.permutation(len(parts))])


def _through_buffers(
    table: WindowTable, shards: list[list[Step]], spec: ReadSpec, rng: np.random.Generator
) -> tuple[list[list[Step]], list[int]]:
    """Each shard through its own buffer and filled again, all with as many groups; and what is left out."""
    filled = []
    for groups in shards:
        order = np.array(list(itertools.chain.from_iterable(groups)), np.int64)
        shuffled = buffer_shuffled(order, table.nbytes, spec.buffer_bytes // spec.lanes, rng)
        filled.append(
            fill_padded(shuffled, table, spec, rng)
            if spec.padded
            else fill(shuffled, table.num_rows, spec.batch_rows)
        )
    fewest_windows = min(sum(map(len, groups)) for groups in filled)
    count = min(max(map(len, filled)), fewest_windows)
    left = [index for groups in filled for group in groups[count:] for index in group]
    return [_split_to(groups[:count], count) for groups in filled], left


def _split_to(groups: list[Step], count: int) -> list[Step]:
    """Halve the largest groups until there are ``count``; the order of windows stays."""
    while len(groups) < count:
        by_size = sorted(range(len(groups)), key=lambda place: -len(groups[place]))
        halved = {place for place in by_size[: count - len(groups)] if len(groups[place]) > 1}
        parts = [_halves(group) if place in halved else (group,) for place, group in enumerate(groups)]
        groups = list(itertools.chain.from_iterable(parts))
    return groups


def _halves(group: Step) -> tuple[Step, Step]:
    middle = len(group) // 2
    return group[:middle], group[middle:]
