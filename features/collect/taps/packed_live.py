"""From a sharded trainer's packed batches to the live collector: one rank plans, all take rows, one hands them over.

::

    with collecting(tap, micro_batches, collector, group):  # every rank of ``group``
        forward_backward(...)  # the trainer's own, over just these micro-batches, in this order

The rank on which the tap's rows arrive has the :class:`LiveCollector` and the batches, the others
give None. After a weight update that rank calls ``collector.advance`` with the gathered head.

The aux probe of this tap needs a checkpoint of the same version: run one unsharded sequence through
the trainer inside ``tap.step([whole_sequence(length)])`` on every rank, then on the gathering rank
``aux_probe(checkpoint_model, layer_ids, token_ids, tap=lambda *_: [probe_features(gathered[0])])``.

Imports torch: reach this module by its dotted name only.
"""

# Shape legend: W = wanted rows, H = hidden size, m = aux layers.

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from features.bfloat16 import Stored
from features.collect.live import LiveBatch, LiveCollector, LivePlan
from features.collect.live_batch import BatchLayout
from features.collect.shards import PackedRows
from features.collect.taps.copies import Copied, HostCopies, stored
from features.collect.taps.hf_probe import Features
from features.collect.taps.packed import GatheredRows, MicroBatch, PackedTap
from features.digests import canonical_json
from features.errors import InputError
from features.schema import FeatureDtype


@contextmanager
def collecting(
    tap: PackedTap, batches: Sequence[LiveBatch] | None, collector: LiveCollector | None, group: Any
) -> Iterator[None]:
    """Around the forwards of one step, on every rank that shares its micro-batches.

    Nothing is gathered, and no rank communicates after the forward, when no row of the step is
    wanted. When the block raises, its plans are abandoned, and counted as that; where it raises on
    some ranks only, the others wait for them, as in any collective of the trainer.

    Args:
        tap: this rank's hooks.
        batches: on the gathering rank the step's micro-batches, in the order of their forwards.
        collector: on the gathering rank (``tap.gathers``); None on the others.
        group: all ranks that share the micro-batches, of every stage; None for a group of one.

    Raises:
        InputError: on every rank, when the collector is not on the gathering rank alone, or the
            batches cannot be planned or are not packed.
        LakeContractError: on every rank, when the forwards were not those planned.
    """
    plans: list[LivePlan] = []
    try:
        shared = share_plan(_planned(tap, batches, collector, plans), group)
        if any(len(batch.wanted) for batch in shared):
            with tap.step(shared) as gathered:
                yield
        else:
            gathered = []
            yield
    except BaseException:
        if collector is not None:
            for plan in plans:
                collector.abandon(plan)
        raise
    if collector is not None:
        dtype = torch.bfloat16 if collector.layout.dtype is FeatureDtype.BFLOAT16 else torch.float32
        for plan, rows in zip(plans, gathered, strict=False):  # none arrive where none are wanted
            collector.offer(plan, _sent(rows, dtype))


def share_plan(plans: Sequence[LivePlan] | InputError | None, group: Any) -> list[MicroBatch]:
    """What every rank is to take of each micro-batch, as decided on the one rank that gives plans.

    Raises:
        InputError: on every rank: one gave this error, or not exactly one rank gave plans.
    """
    mine = plans if plans is None or isinstance(plans, InputError) else [micro_batch(plan) for plan in plans]
    everyone: list[Any] = [mine]
    if group is not None:
        everyone = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, mine, group=group)
    if errors := [given for given in everyone if isinstance(given, InputError)]:
        raise InputError(f"{len(errors)} of {len(everyone)} ranks cannot collect this step: {errors[0]}")
    given = [batches for batches in everyone if batches is not None]
    if len(given) != 1:
        raise InputError(
            f"{len(given)} of {len(everyone)} ranks planned this step, expected one: the rank on which rows arrive"
        )
    shared: list[MicroBatch] = given[0]
    return shared


def micro_batch(plan: LivePlan) -> MicroBatch:
    """A plan as the tap takes it; its key names the version and the samples.

    Raises:
        InputError: the plan's batch is not packed.
    """
    samples = [[rollout.sample_id, rollout.content_digest] for rollout, _ in plan.pieces]
    key = f"{plan.version}/{hashlib.sha256(canonical_json(samples)).hexdigest()}"
    return MicroBatch(key, packed_rows(plan.layout), plan.index)


def packed_rows(layout: BatchLayout) -> PackedRows:
    """The sequences of a packed batch as the layout algebra has them.

    Rows behind the last sequence are divided among ranks like a sequence of their own.

    Raises:
        InputError: the batch is not packed, or has an empty sequence.
    """
    if layout.padded_lengths is None:
        raise InputError(
            "this tap takes packed batches: give LiveBatch cu_seqlens, and lengths where sequences are padded"
        )
    lengths, padded = layout.lengths.tolist(), layout.padded_lengths.tolist()
    if tail := layout.num_rows - sum(padded):
        lengths, padded = [*lengths, tail], [*padded, tail]
    return PackedRows(tuple(lengths), tuple(padded))


def whole_sequence(length: int, *, padded_length: int | None = None) -> MicroBatch:
    """All rows of one sequence: what the aux probe takes."""
    packed = PackedRows((length,), (padded_length or length,))
    return MicroBatch(f"probe/{length}", packed, packed.flat(0, 0, length))


def probe_features(rows: GatheredRows) -> Features:
    """Gathered rows of one whole sequence, as the aux probe compares them."""
    return rows.aux.float().cpu().numpy(), rows.final.float().cpu().numpy()


def _planned(
    tap: PackedTap,
    batches: Sequence[LiveBatch] | None,
    collector: LiveCollector | None,
    plans: list[LivePlan],
) -> list[LivePlan] | InputError | None:
    """This rank's plans, also kept in ``plans`` one by one; an error is to be told to all ranks."""
    if tap.gathers != (collector is not None) or (batches is None) != (collector is None):
        return InputError(
            "the first rank of groups.rows on the last stage (tap.gathers) gives a collector and the batches, every "
            "other rank None"
        )
    if collector is None or batches is None:
        return None
    try:
        for batch in batches:
            packed_rows(batch.layout)  # before anything is reserved for it
            plans.append(collector.plan(batch))
    except InputError as error:
        return error
    return plans


@dataclass(frozen=True, slots=True)
class _SentRows:
    """``aux [W, m * H]`` and ``final [W, H]`` on their way to the host."""

    copied: Copied

    def wait(self) -> tuple[Stored, Stored]:
        aux, final = self.copied.wait()
        return stored(aux), stored(final)


def _sent(rows: GatheredRows, dtype: torch.dtype) -> _SentRows:
    return _SentRows(_copies(rows.aux.device).send((rows.aux.to(dtype), rows.final.to(dtype))))


@lru_cache
def _copies(device: torch.device) -> HostCopies:
    """One stream per device, however many steps."""
    return HostCopies(device)
