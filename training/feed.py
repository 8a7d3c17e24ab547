"""Batches on the training device, from windows as a reader yields them."""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from features.schema import TargetVersion
from features.windows import Window
from training.batches import DraftBatch, has_finite_features, make_batch
from training.heads import FrozenHead
from training.reading.transfer import DeviceCopies, pinned
from training.spec import MaskName

if TYPE_CHECKING:
    from features.lake import Lake

log = logging.getLogger(__name__)

MAX_HEADS = 8
"""Heads held on the device at once; the least recently used goes first."""


class Feed:
    """Heads, and batches of windows; used from one thread at a time.

    To an accelerator features go asynchronously, in their stored type: read them into the memory
    that ``allocate`` makes.
    """

    def __init__(self, lake: "Lake", device: torch.device | str = "cpu") -> None:
        self._lake, self._device = lake, torch.device(device)
        self._heads: OrderedDict[TargetVersion, FrozenHead] = OrderedDict()
        self._reported: set[int] = set()
        on_host = self._device.type == "cpu"
        self._copies = None if on_host else DeviceCopies(self._device)
        self.allocate = None if on_host else pinned
        """Memory for features to land in; None is any."""

    def head(self, version: TargetVersion) -> FrozenHead:
        """The frozen head of a version, on the device."""
        if version not in self._heads:
            self._heads[version] = FrozenHead.from_snapshot(self._lake.head_of(version), self._device)
            while len(self._heads) > MAX_HEADS:
                self._heads.popitem(last=False)
        self._heads.move_to_end(version)
        return self._heads[version]

    def batch(
        self, windows: Sequence[Window], *, layer_ids: Sequence[int], mask: MaskName = "sampled"
    ) -> DraftBatch:
        """A padded batch on the device."""
        heads = {version: self.head(version) for version in sorted({w.meta.version for w in windows})}
        return make_batch(
            windows, heads, layer_ids=layer_ids, mask=mask, device=self._device, copies=self._copies
        )

    def finite(self, indices: Sequence[int], windows: Sequence[Window]) -> tuple[list[Window], list[int]]:
        """Windows without NaN or infinity, and the indices of the others; each of those is logged once."""
        kept, refused = [], []
        for index, window in zip(indices, windows, strict=True):
            if has_finite_features(window):
                kept.append(window)
                continue
            refused.append(index)
            if index not in self._reported:
                self._reported.add(index)
                log.warning(
                    "sample %r of %s: features are not finite", window.meta.sample_id, window.meta.version
                )
        return kept, refused
