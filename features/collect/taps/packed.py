"""Features from a trainer in Megatron's style: packed sequences over context, tensor and pipeline ranks.

Each rank registers the decoder blocks it runs by their number in the whole model. Before a
step it says which flat rows of each micro-batch are wanted; hooks then take those rows alone
from what the rank holds. After the step two gathers of just these rows join the ranks of a
stage, then the stages. No communication happens inside a forward, so no schedule can hang.

Imports torch: reach this module by its dotted name only.

Shape legend: L = rows that a rank holds, W = wanted rows, H = hidden size, m = aux layers.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from features.collect.shards import PackedRows, RankShape, Rows, StageLayout
from features.digests import canonical_json
from features.errors import InputError, LakeContractError

FINAL = -1
"""Key of the final hidden state among captured streams; layer ids are never negative."""


@dataclass(frozen=True)
class MicroBatch:
    """What is wanted of one micro-batch, decided before its forward and equal on every rank."""

    key: str
    """Names target version and samples; two stages whose keys differ are never joined."""
    packed: PackedRows
    wanted: Rows
    """Flat rows, in the order in which they are to be delivered."""


@dataclass(frozen=True)
class Groups:
    """Process groups of this rank; None stands for a group of one."""

    rows: Any = None
    """All ranks of one pipeline stage that share a batch: context times tensor parallel."""
    stages: Any = None
    """The same place of every pipeline stage, first stage first."""


@dataclass(frozen=True)
class GatheredRows:
    """Rows of one micro-batch from all ranks, on the device of the rank that gathers."""

    batch: MicroBatch
    aux: Tensor
    """``[W, m * H]``, ids ascending, pre-norm."""
    final: Tensor
    """``[W, H]``, the LM head's input."""


class PackedTap:
    """One rank's hooks and its part in the gathers."""

    def __init__(
        self,
        blocks: Mapping[int, nn.Module],
        *,
        layer_ids: Sequence[int],
        stages: StageLayout,
        stage: int,
        rank_of: Sequence[RankShape],
        groups: Groups,
        final_norm: nn.Module | None = None,
    ) -> None:
        """Hook the blocks that this rank runs.

        Args:
            blocks: every block of this rank by its number in the whole model.
            rank_of: place of each rank of ``groups.rows``, in the group's order.
            final_norm: on the last stage, the module whose output the LM head reads.

        Raises:
            InputError: the blocks, ids or ranks contradict ``stages`` or the groups.
        """
        self._ids, self._stages, self._stage = tuple(layer_ids), stages, stage
        self._rank_of, self._groups = tuple(rank_of), groups
        self._last = stage == len(stages.blocks) - 1
        self._check(blocks, final_norm)
        self._plan: Sequence[MicroBatch] = ()
        self._picks: list[Tensor] = []
        self._taken: dict[int, list[Tensor]] = {}
        self._handles = [*self._hook_blocks(blocks)]
        if self._last:
            assert final_norm is not None  # checked above
            self._handles.append(final_norm.register_forward_hook(self._taking(FINAL)))

    @property
    def gathers(self) -> bool:
        """Whether a step's rows arrive on this rank: the first of ``groups.rows`` on the last stage."""
        return self._last and (self._groups.rows is None or dist.get_rank(self._groups.rows) == 0)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def step(self, plan: Sequence[MicroBatch]) -> Iterator[list[GatheredRows]]:
        """Around the forwards of a step; the list is filled on leaving, on the gathering rank only.

        Which rank gathers: :attr:`gathers`. ``plan`` holds the step's micro-batches in the order
        in which each block sees them. When the block of code raises, nothing is gathered.

        Raises:
            LakeContractError: a block saw fewer or more forwards than planned, or a forward of
                another number of rows; or stages planned different micro-batches.
        """
        shape = self._rank_of[dist.get_rank(self._groups.rows) if self._groups.rows is not None else 0]
        self._plan = plan
        self._held = [len(shape.rows_held(batch.packed)) for batch in plan]
        self._picks = [torch.from_numpy(shape.picks(batch.packed, batch.wanted)[0]) for batch in plan]
        self._taken = {key: [] for key in self._keys()}
        gathered: list[GatheredRows] = []
        try:
            yield gathered
            gathered.extend(self._gather())
        finally:
            self._plan, self._picks, self._taken = (), [], {}

    def _keys(self) -> tuple[int, ...]:
        ids = self._stages.ids_of(self._stage, self._ids)
        return (*ids, FINAL) if self._last else ids

    def _check(self, blocks: Mapping[int, nn.Module], final_norm: nn.Module | None) -> None:
        own = sorted(b for chunk in self._stages.blocks[self._stage] for b in chunk)
        if sorted(blocks) != own:
            raise InputError(
                f"stage {self._stage} runs blocks {own}, found {sorted(blocks)}: number them over the whole model"
            )
        top = self._stages.num_layers
        if (
            not self._ids
            or list(self._ids) != sorted(set(self._ids))
            or not 0 <= self._ids[0] <= self._ids[-1] <= top
        ):
            raise InputError(
                f"layer ids {list(self._ids)} do not fit a target of {top} blocks: a layer id is the number of blocks "
                f"applied, so give ascending, distinct ids in [0, {top}]"
            )
        if self._last and final_norm is None:
            raise InputError(
                f"stage {self._stage} is the last: give final_norm, whose output the LM head reads"
            )
        size = 1 if self._groups.rows is None else dist.get_world_size(self._groups.rows)
        if len(self._rank_of) != size:
            raise InputError(f"rank_of names {len(self._rank_of)} ranks, the row group has {size}")

    def _hook_blocks(self, blocks: Mapping[int, nn.Module]) -> Iterator[Any]:
        for k in self._stages.ids_of(self._stage, self._ids):
            if k == 0:
                yield blocks[0].register_forward_pre_hook(self._taking_input(0), with_kwargs=True)
            else:
                yield blocks[k - 1].register_forward_hook(self._taking(k))

    def _taking(self, key: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            self._take(key, output[0] if isinstance(output, tuple) else output)

        return hook

    def _taking_input(self, key: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._take(key, args[0] if args else kwargs["hidden_states"])

        return hook

    @torch.no_grad()
    def _take(self, key: int, stream: Tensor) -> None:
        """Keep the wanted rows of a stream ``[L, 1, H]`` or ``[L, H]``."""
        # Recomputed activations run the block once more, inside the backward pass.
        if not self._plan or torch._C._current_graph_task_id() != -1:
            return
        number = len(self._taken[key])
        if number >= len(self._plan):
            raise LakeContractError(
                f"layer id {key} saw more forwards than the {len(self._plan)} micro-batches planned for this step. "
                f"Plan every micro-batch of the step, in order."
            )
        rows = stream.detach().reshape(-1, stream.shape[-1])
        if rows.shape[0] != self._held[number]:
            raise LakeContractError(
                f"layer id {key}, micro-batch {number}: this rank holds {rows.shape[0]} rows, expected "
                f"{self._held[number]} by its place in the parallel groups. Check padded cu_seqlens, context-parallel "
                f"size and sequence_parallel."
            )
        self._taken[key].append(rows.index_select(0, self._picks[number].to(rows.device)))

    def _gather(self) -> list[GatheredRows]:
        self._require_all_ready()
        columns = [torch.cat(taken) for taken in self._taken.values()]
        mine = torch.cat(columns, dim=-1) if columns else None
        stage_rows = None if mine is None else self._join_ranks(mine)
        return self._join_stages(stage_rows)

    def _require_all_ready(self) -> None:
        """Tell every rank what any of them lacks, before a gather in which the others would wait for ever."""
        short = {key: len(taken) for key, taken in self._taken.items() if len(taken) != len(self._plan)}
        mine = (self._stage, _plan_digest(self._plan), short)
        beside = _exchange(mine, self._groups.rows)
        everyone = [state for states in _exchange(beside, self._groups.stages) for state in states]
        lacking = [(stage, short) for stage, _, short in everyone if short]
        if lacking:
            raise LakeContractError(
                f"forwards seen per layer id, by stage: {lacking}; expected {len(self._plan)} each ({FINAL} is the "
                f"final norm). Plan exactly the micro-batches that the step runs."
            )
        if len({digest for _, digest, _ in everyone}) > 1:
            raise LakeContractError(
                f"ranks planned different micro-batches: {sorted({(s, d[:8]) for s, d, _ in everyone})}. Make the "
                f"plan once, from sample ids and target version, and give every rank the same."
            )

    def _slots(self) -> list[Rows]:
        """Per rank of the row group: places, in the wanted rows of all micro-batches, of what it sends."""
        per_rank: list[Rows] = []
        for shape in self._rank_of:
            offset, parts = 0, []
            for batch in self._plan:
                parts.append(shape.picks(batch.packed, batch.wanted)[1] + offset)
                offset += len(batch.wanted)
            per_rank.append(torch.cat([torch.from_numpy(part) for part in parts]).numpy())
        return per_rank

    def _join_ranks(self, mine: Tensor) -> Tensor | None:
        """All wanted rows ``[W, width]`` on the group's first rank; None on the others."""
        slots, wanted = self._slots(), sum(len(batch.wanted) for batch in self._plan)
        most = max(len(part) for part in slots)
        sent = _as_bytes(mine)
        padded = sent.new_zeros((most, sent.shape[1]))
        padded[: len(sent)] = sent
        received = _gather(padded, self._groups.rows)
        if received is None:
            return None
        joined = sent.new_empty((wanted, sent.shape[1]))
        filled = torch.zeros(wanted, dtype=torch.long)
        for part, places in zip(received, slots, strict=True):
            joined[torch.from_numpy(places).to(joined.device)] = part[: len(places)]
            filled[torch.from_numpy(places)] += 1
        if not bool((filled == 1).all()):
            raise LakeContractError(
                f"{int((filled != 1).sum())} of {wanted} wanted rows are held by no rank or by several. Check rank_of: "
                f"it names each rank's context- and tensor-parallel place, in the order of the row group."
            )
        return joined.view(mine.dtype)

    def _join_stages(self, rows: Tensor | None) -> list[GatheredRows]:
        """The stages' columns side by side on the last stage."""
        if self._groups.rows is not None and dist.get_rank(self._groups.rows) != 0:
            return []
        header = (self._stage, None if rows is None else (tuple(rows.shape), rows.dtype))
        headers = _exchange(header, self._groups.stages)
        if not self._last:
            if rows is not None:
                dist.send(_as_bytes(rows), dst=_global_rank(self._groups.stages, -1))
            return []
        assert rows is not None  # the last stage always has the final hidden state
        parts = [self._receive(stage, sent, rows) for stage, sent in headers[:-1] if sent is not None]
        return self._split(torch.cat([*parts, rows], dim=-1))

    def _receive(self, stage: int, sent: tuple[tuple[int, int], torch.dtype], like: Tensor) -> Tensor:
        (count, width), dtype = sent
        if (count, dtype) != (like.shape[0], like.dtype):
            raise LakeContractError(
                f"stage {stage} sent {count} rows of {dtype}, the last stage has {like.shape[0]} of {like.dtype}"
            )
        raw = torch.empty((count, width * like.element_size()), dtype=torch.uint8, device=like.device)
        dist.recv(raw, src=_global_rank(self._groups.stages, stage))
        return raw.view(dtype)

    def _split(self, rows: Tensor) -> list[GatheredRows]:
        # Stage by stage is not ascending under virtual pipelining, where a stage holds distant blocks.
        arrived = [
            k for stage in range(len(self._stages.blocks)) for k in self._stages.ids_of(stage, self._ids)
        ]
        columns = rows.unflatten(-1, (len(self._ids) + 1, -1))
        aux = columns[:, [arrived.index(k) for k in self._ids]].flatten(1)
        counts = [len(batch.wanted) for batch in self._plan]
        parts = zip(self._plan, aux.split(counts), columns[:, -1].split(counts), strict=True)
        return [GatheredRows(batch, aux_rows, final) for batch, aux_rows, final in parts]


def gather_vocabulary_rows(shard: Tensor, group: Any, *, vocab_size: int) -> Tensor | None:
    """An LM head or embedding ``[V, H]`` from its vocabulary-parallel shards, on the group's first rank.

    Ranks hold equal, consecutive parts; rows past ``vocab_size`` are the trainer's padding and
    are cut off. None on the other ranks.

    Raises:
        InputError: the shards together have fewer rows than the vocabulary.
    """
    received = _gather(_as_bytes(shard.detach()), group)
    if received is None:
        return None
    whole = torch.cat(received).view(shard.dtype)
    if whole.shape[0] < vocab_size:
        raise InputError(
            f"vocabulary-parallel shards hold {whole.shape[0]} rows together, expected at least {vocab_size}"
        )
    return whole[:vocab_size]


def _as_bytes(rows: Tensor) -> Tensor:
    """``[N, bytes]``: exact for every dtype, also those that a backend cannot send."""
    return rows.contiguous().view(torch.uint8)


def _gather(part: Tensor, group: Any) -> list[Tensor] | None:
    """Equal parts of all ranks on the group's first rank."""
    if group is None:
        return [part]
    first = dist.get_rank(group) == 0
    received = [torch.empty_like(part) for _ in range(dist.get_world_size(group))] if first else None
    dist.gather(part, received, dst=_global_rank(group, 0), group=group)
    return received


def _exchange(header: Any, group: Any) -> list[Any]:
    if group is None:
        return [header]
    headers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(headers, header, group=group)
    return headers


def _global_rank(group: Any, place: int) -> int:
    return dist.get_process_group_ranks(group)[place]


def _plan_digest(plan: Sequence[MicroBatch]) -> str:
    described = [
        [
            b.key,
            list(b.packed.lengths),
            list(b.packed.padded_lengths),
            hashlib.sha256(b.wanted.tobytes()).hexdigest(),
        ]
        for b in plan
    ]
    return hashlib.sha256(canonical_json(described)).hexdigest()
