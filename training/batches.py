"""From windows of the lake to tensors, unshifted; every shift belongs to a method's collator.

Windows lie side by side in a padded batch, one document per row: nothing in a batch can see
another document. Shape legend: B = windows, R = rows of the longest, m = aux layers, H = hidden.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from features.errors import DraftLayoutError, LakeContractError
from features.schema import TargetVersion
from features.windows import Window
from training.heads import FrozenHead, to_tensor
from training.spec import MaskName

if TYPE_CHECKING:
    from training.reading.transfer import DeviceCopies

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class DraftBatch:
    """Padded windows. Padding rows are zeros with ``row_mask`` and ``supervised`` False."""

    token_ids: Tensor
    """``[B, R + 1]`` int64; entry i belongs to position ``start + i``; absent tokens are 0."""
    token_mask: Tensor
    """``[B, R + 1]`` bool: a token is there."""
    supervised: Tensor
    """``[B, R + 1]`` bool: this token is to be predicted (its own mask, not its predecessor's)."""
    row_mask: Tensor
    """``[B, R]`` bool: features are there."""
    starts: Tensor
    """``[B]`` int64: absolute position of row 0."""
    aux: Tensor
    """``[B, R, m * H]`` float32, ascending layer ids."""
    final: Tensor
    """``[B, R, H]`` float32: the LM head's input."""
    embeds: Tensor
    """``[B, R, H]`` float32: input embedding of token i, from the window's own version."""
    heads: tuple[FrozenHead, ...]
    head_of: tuple[int, ...]
    """Index into ``heads`` for each window."""

    @property
    def num_windows(self) -> int:
        return len(self.head_of)


class Masks(Protocol):
    """What a window and a row of a token table have in common."""

    @property
    def sampled_mask(self) -> NDArray[np.bool_]: ...

    @property
    def loss_mask(self) -> NDArray[np.bool_] | None: ...


def supervision_mask(masks: Masks, mask: MaskName, *, where: str) -> Tensor:
    """The chosen mask, bool ``[num_rows + 1]``; entry i is about token i itself.

    Raises:
        LakeContractError: the loss mask is asked for and there is none.
    """
    chosen = masks.sampled_mask if mask == "sampled" else masks.loss_mask
    if chosen is None:
        raise LakeContractError(
            f"{where} has no loss mask. Train with mask='sampled', or collect rollouts that carry one."
        )
    return torch.from_numpy(np.array(chosen, copy=True))


def layer_columns(recorded: Sequence[int], wanted: Sequence[int], *, where: str) -> tuple[int, ...]:
    """Place of each wanted aux layer among the recorded ones.

    Raises:
        DraftLayoutError: an id was not recorded.
    """
    missing = sorted(set(wanted) - set(recorded))
    if missing:
        raise DraftLayoutError(
            f"{where}: aux layers {list(wanted)} are needed and {list(recorded)} were recorded; {missing} "
            f"are missing (an id counts decoder blocks applied). Collect with these ids, or train on the recorded ones."
        )
    return tuple(list(recorded).index(k) for k in wanted)


def make_batch(
    windows: Sequence[Window],
    heads: Mapping[TargetVersion, FrozenHead],
    *,
    layer_ids: Sequence[int],
    mask: MaskName = "sampled",
    device: torch.device | str = "cpu",
    copies: "DeviceCopies | None" = None,
) -> DraftBatch:
    """Pad windows into one batch on ``device``, where ``heads`` are.

    Args:
        copies: sends features to ``device`` in their stored type and without waiting; None converts
            them here first.

    Raises:
        DraftLayoutError: a window lacks one of ``layer_ids``.
    """
    size, longest = len(windows), max(w.num_rows for w in windows)
    hidden = windows[0].layout.hidden_size
    versions = sorted({w.meta.version for w in windows})
    batch = DraftBatch(
        token_ids=torch.zeros(size, longest + 1, dtype=torch.int64),
        token_mask=torch.zeros(size, longest + 1, dtype=torch.bool),
        supervised=torch.zeros(size, longest + 1, dtype=torch.bool),
        row_mask=torch.zeros(size, longest, dtype=torch.bool),
        starts=torch.tensor([w.meta.start for w in windows], dtype=torch.int64),
        aux=torch.zeros(size, longest, len(layer_ids) * hidden, device=device),
        final=torch.zeros(size, longest, hidden, device=device),
        embeds=torch.zeros(size, longest, hidden, device=device),
        heads=tuple(heads[v] for v in versions),
        head_of=tuple(versions.index(w.meta.version) for w in windows),
    )
    for b, window in enumerate(windows):
        _fill_tokens(batch, b, window, mask)
        _fill_features(batch, b, window, layer_ids, copies)
    names = ("token_ids", "token_mask", "supervised", "row_mask", "starts")
    return replace(batch, **{name: getattr(batch, name).to(device) for name in names})


def _fill_tokens(batch: DraftBatch, b: int, window: Window, mask: MaskName) -> None:
    rows = window.num_rows
    ids = torch.from_numpy(window.token_ids.astype(np.int64))
    present = ids >= 0
    batch.token_ids[b, : rows + 1] = ids.clamp_min(0)
    batch.token_mask[b, : rows + 1] = present
    batch.supervised[b, : rows + 1] = supervision_mask(window, mask, where=_place(window)) & present
    batch.row_mask[b, :rows] = True


def _fill_features(
    batch: DraftBatch, b: int, window: Window, layer_ids: Sequence[int], copies: "DeviceCopies | None"
) -> None:
    rows, recorded = window.num_rows, window.layout.layer_ids
    columns = layer_columns(recorded, layer_ids, where=_place(window))
    stored = (window.aux, window.final)
    aux, final = copies.copy(stored) if copies else map(to_tensor, stored)
    if columns != tuple(range(len(recorded))):
        aux = aux.unflatten(-1, (len(recorded), -1))[:, list(columns)].flatten(-2)
    batch.aux[b, :rows] = aux
    batch.final[b, :rows] = final
    embedding = batch.heads[batch.head_of[b]].embedding
    batch.embeds[b, :rows] = embedding[batch.token_ids[b, :rows].to(embedding.device)]


def _place(window: Window) -> str:
    return f"sample {window.meta.sample_id!r} of {window.meta.version}"


def has_finite_features(window: Window) -> bool:
    """False when any stored feature is NaN or infinite: one such row would spoil its whole window."""
    for array in (window.aux, window.final):
        if array.dtype == np.uint16:  # bfloat16 bits: an exponent of ones only
            if bool(((array.view(np.uint16) & 0x7F80) == 0x7F80).any()):
                return False
        elif not bool(np.isfinite(array).all()):
            return False
    return True
