"""Reads a selection's windows and heads, keeping what fits in memory between epochs."""

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from features.schema import TargetVersion
from features.windows import Window
from training.batches import DraftBatch, has_finite_features, make_batch
from training.heads import FrozenHead
from training.spec import MaskName

if TYPE_CHECKING:
    from features.commits import TokenRow
    from features.lake import Lake

log = logging.getLogger(__name__)

DEFAULT_CACHE_BYTES = 1 << 30
MAX_HEADS = 8
"""Heads held on the device at once; the least recently used goes first."""


class WindowReader:
    """Windows of a selection by index; used from one thread at a time."""

    def __init__(
        self,
        lake: "Lake",
        rows: Sequence[Mapping[str, Any]],
        *,
        device: torch.device | str = "cpu",
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        """``rows`` are commit rows; windows are kept from the first on until ``cache_bytes`` are used."""
        self._lake, self._rows, self._device = lake, rows, device
        self._cache: dict[int, Window] = {}
        self._free = cache_bytes
        self._reported: set[int] = set()
        self._heads: OrderedDict[TargetVersion, FrozenHead] = OrderedDict()

    def window(self, index: int) -> Window:
        """One window, from memory or from the lake."""
        found = self._cache.get(index)
        if found is None:
            found = self._lake.read_window(self._rows[index])
            size = found.aux.nbytes + found.final.nbytes
            # Epochs visit everything once each, so evicting would only ever throw away what comes next.
            if size <= self._free:
                self._free -= size
                self._cache[index] = found
        return found

    def tokens(self, index: int) -> "TokenRow":
        """Token ids and masks of one window, without its features."""
        return self._lake.read_tokens(self._rows[index])

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
        return make_batch(windows, heads, layer_ids=layer_ids, mask=mask, device=self._device)

    def finite(self, indices: Iterable[int], dropped: Counter[str]) -> list[Window]:
        """Windows without NaN or infinity; the others are counted as ``nonfinite_features``."""
        kept = []
        for index in indices:
            window = self.window(index)
            if has_finite_features(window):
                kept.append(window)
            else:
                dropped["nonfinite_features"] += 1
                if index not in self._reported:
                    self._reported.add(index)
                    log.warning(
                        "sample %r of %s: features are not finite", window.meta.sample_id, window.meta.version
                    )
        return kept
