"""The head snapshot of a model that is sharded over tensor and pipeline ranks in Megatron's style.

Imports torch: reach this module by its dotted name only.
"""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from features.collect.taps.copies import stored
from features.collect.taps.packed import gather_vocabulary_rows
from features.errors import InputError
from features.heads import HeadSnapshot
from features.schema import FeatureDtype


def gather_head(
    lm_head: Tensor | None,
    embedding: Tensor | None,
    *,
    tensor_group: Any,
    stage_group: Any,
    vocab_size: int,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> HeadSnapshot | None:
    """The whole head, on the first rank of ``tensor_group`` of the last stage; None on every other rank.

    Every rank calls it. bfloat16 weights are kept as they are, others as float32.

    Args:
        lm_head: the last stage's vocabulary-parallel shard ``[V / tp, H]``; None on other stages.
        embedding: the first stage's shard of the input embedding; None on other stages, and where
            it is the LM head itself (tied).
        tensor_group: this rank's tensor-parallel group; None for a group of one.
        stage_group: the same place of every pipeline stage, first stage first; None for one stage.
        vocab_size: rows of the target's head; the trainer's padding behind them is cut off.

    Raises:
        InputError: the last stage has no LM head, or the shards have fewer rows than the vocabulary.
    """
    stages = 1 if stage_group is None else dist.get_world_size(stage_group)
    stage = 0 if stage_group is None else dist.get_rank(stage_group)
    if (stage == stages - 1) != (lm_head is not None) or (stage > 0 and embedding is not None):
        raise InputError(
            f"stage {stage} of {stages} gives {'an' if lm_head is not None else 'no'} LM head and "
            f"{'an' if embedding is not None else 'no'} embedding: the last stage gives the LM head, the first the "
            f"embedding unless it is tied"
        )
    whole = [
        None if shard is None else gather_vocabulary_rows(shard, tensor_group, vocab_size=vocab_size)
        for shard in (lm_head, embedding)
    ]
    if tensor_group is not None and dist.get_rank(tensor_group) != 0:
        return None
    head, embed = whole
    if stages > 1:
        embed = _to_last_stage(embed, head, stage_group)
    if head is None:
        return None
    both = {head.dtype} | (set() if embed is None else {embed.dtype})
    dtype = FeatureDtype.BFLOAT16 if both == {torch.bfloat16} else FeatureDtype.FLOAT32
    kind = torch.bfloat16 if dtype is FeatureDtype.BFLOAT16 else torch.float32
    lm_rows = stored(head.to("cpu", kind, copy=True).contiguous())
    embed_rows = None if embed is None else stored(embed.to("cpu", kind, copy=True).contiguous())
    tied = embed_rows is None or np.array_equal(lm_rows.view(np.uint8), embed_rows.view(np.uint8))
    return HeadSnapshot(
        lm_head=lm_rows, dtype=dtype, embed_tokens=None if tied else embed_rows, logit_scale=logit_scale,
        softcap=softcap,
    )  # fmt: skip


def _to_last_stage(embedding: Tensor | None, like: Tensor | None, group: Any) -> Tensor | None:
    """The first stage's rows, on the last one; all stages learn first whether there are any."""
    headers: list[Any] = [None] * dist.get_world_size(group)
    mine = None if embedding is None else (tuple(embedding.shape), embedding.dtype)
    dist.all_gather_object(headers, mine, group=group)
    if headers[0] is None:
        return None
    ranks = dist.get_process_group_ranks(group)
    if embedding is not None:
        dist.send(embedding.contiguous().view(torch.uint8), dst=ranks[-1])
    if like is None:
        return None
    (rows, width), dtype = headers[0]
    raw = torch.empty((rows, width * dtype.itemsize), dtype=torch.uint8, device=like.device)
    dist.recv(raw, src=ranks[0])
    return raw.view(dtype)
