"""Which token meets which feature row: the only place where EAGLE-3 shifts anything.

For row p and step i (both from 0), with x the tokens, g the aux rows, f the final rows:

=================  =======================  =====================================================
input embedding    ``x[p + 1 + i]``         teacher-forced while training, own argmax while drafting
input hidden       ``g[p]`` (i = 0)         later the row's own output of step i - 1
position           ``start + p + i``        what the engine's RoPE sees
teacher            ``head(f[p + 1 + i])``
predicted token    ``x[p + 2 + i]``         supervised iff *its* mask is set
=================  =======================  =====================================================

Step i thus asks of row ``p`` what step 0 asks of row ``p + i``: teachers are computed once per
batch for each supervised token and looked up again at every step.
Shape legend: B = windows, R = rows, A = active rows, N = supervised tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from training.batches import DraftBatch

INPUT_SHIFT = 1
TEACHER_SHIFT = 1
PREDICTED_SHIFT = 2


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows that draft: those from which some step within reach is supervised (or all of them)."""

    index: Tensor
    """``[B, A]`` int64 row numbers, ascending; 0 where ``valid`` is False."""
    valid: Tensor
    """``[B, A]`` bool."""


def pack_rows(wanted: Tensor) -> Rows:
    """Gather the True entries of ``[B, R]`` to the left."""
    most = max(1, int(wanted.sum(1).max()))
    order = torch.sort((~wanted).to(torch.int8), dim=1, stable=True).indices[:, :most]
    valid = torch.gather(wanted, 1, order)
    return Rows(torch.where(valid, order, torch.zeros_like(order)), valid)


def predictable(mask: Tensor) -> Tensor:
    """``mask`` ``[..., T + 1]`` without the first two tokens, which no row predicts."""
    kept = mask.clone()
    kept[..., :PREDICTED_SHIFT] = False
    return kept


def drafting_rows(batch: DraftBatch, steps: int) -> Rows:
    """Rows with a supervised prediction within ``steps`` steps."""
    mask = _pad_right(predictable(batch.supervised), steps + 1)
    rows = batch.row_mask.shape[1]
    wanted = torch.zeros_like(batch.row_mask)
    for step in range(steps):
        first = PREDICTED_SHIFT + step
        wanted |= mask[:, first : first + rows]
    return pack_rows(wanted)


def all_rows(batch: DraftBatch) -> Rows:
    """Every row whose next token is there: the rows an engine could draft from."""
    return pack_rows(batch.row_mask & batch.token_mask[:, INPUT_SHIFT:])


def input_embeds(batch: DraftBatch, rows: Rows, step: int) -> Tensor:
    """Embedding of ``x[p + 1 + step]``, ``[B, A, H]``; zeros beyond the window's last row."""
    index = rows.index + INPUT_SHIFT + step
    inside = index < batch.embeds.shape[1]
    safe = torch.where(inside, index, torch.zeros_like(index))
    found = torch.gather(batch.embeds, 1, safe[..., None].expand(-1, -1, batch.embeds.shape[2]))
    return found * inside[..., None]


def context_embeds(batch: DraftBatch) -> Tensor:
    """Embedding of ``x[p + 1]`` for every row p, ``[B, R, H]``.

    The window's last row has no embedding in the batch when its next token lies past the rows;
    nothing that is trained attends to it.
    """
    shifted = torch.zeros_like(batch.embeds)
    shifted[:, :-INPUT_SHIFT] = batch.embeds[:, INPUT_SHIFT:]
    return shifted


def positions(batch: DraftBatch, index: Tensor, step: int) -> Tensor:
    """Absolute RoPE positions ``start + p + step`` of row numbers ``[B, ...]``."""
    return batch.starts[:, None] + index + step


@dataclass(frozen=True, slots=True, eq=False)
class Supervision:
    """The N supervised tokens of a batch, and where to find each one's teacher."""

    window: Tensor
    """``[N]`` window of each."""
    teacher_row: Tensor
    """``[N]`` row whose final hidden state predicts it."""
    number: Tensor
    """``[B, R + 1]`` int64: number of the supervised token at this place, -1 elsewhere."""
    tokens: Tensor
    """``[N]`` the stored token itself."""

    def at(self, rows: Rows, step: int) -> Tensor:
        """``[B, A]``: number of the token predicted by each row at ``step``, -1 if unsupervised."""
        index = rows.index + PREDICTED_SHIFT + step
        inside = rows.valid & (index < self.number.shape[1])
        found = torch.gather(self.number, 1, torch.where(inside, index, torch.zeros_like(index)))
        return torch.where(inside, found, torch.full_like(found, -1))


def supervision(batch: DraftBatch) -> Supervision:
    """Number the supervised tokens of a batch."""
    mask = predictable(batch.supervised)
    window, place = mask.nonzero(as_tuple=True)
    number = torch.full_like(batch.token_ids, -1)
    number[window, place] = torch.arange(len(window), device=number.device)
    teacher_row = place - PREDICTED_SHIFT + TEACHER_SHIFT
    return Supervision(window, teacher_row, number, batch.token_ids[window, place])


def _pad_right(mask: Tensor, count: int) -> Tensor:
    return torch.cat([mask, mask.new_zeros(mask.shape[0], count)], dim=1)
