"""A version's frozen head and input embedding as tensors.

The lake's ``HeadSnapshot`` is numpy; here the same numbers lie on the training device. They
belong to no module, so no optimizer and no checkpoint can ever take hold of them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from features.heads import HeadSnapshot


def to_tensor(array: NDArray[Any]) -> Tensor:
    """A stored float array as float32: raw ``uint16`` bits are bfloat16, ``float32`` is itself."""
    # Copied where torch would otherwise warn: arrays read from a lake are not writable.
    owned = np.array(array, copy=True, order="C")
    if owned.dtype == np.uint16:
        return torch.from_numpy(owned.view(np.int16)).view(torch.bfloat16).float()
    return torch.from_numpy(owned).float()


@dataclass(frozen=True, slots=True, eq=False)
class FrozenHead:
    """What turns a final hidden state into logits, and a token into an embedding, at one version."""

    lm_head: Tensor
    """``[V, H]`` float32."""
    embedding: Tensor
    """``[V, H]`` float32; the very same tensor as ``lm_head`` when the target ties them."""
    bias: Tensor | None
    logit_scale: float
    softcap: float | None

    @classmethod
    def from_snapshot(cls, snapshot: "HeadSnapshot", device: torch.device | str = "cpu") -> "FrozenHead":
        """Copy a snapshot to ``device``."""
        lm_head = to_tensor(snapshot.lm_head).to(device)
        embed, bias = snapshot.embed_tokens, snapshot.bias
        return cls(
            lm_head=lm_head,
            embedding=lm_head if embed is None else to_tensor(embed).to(device),
            bias=None if bias is None else to_tensor(bias).to(device),
            logit_scale=float(snapshot.logit_scale),
            softcap=None if snapshot.softcap is None else float(snapshot.softcap),
        )

    @property
    def vocab_size(self) -> int:
        return int(self.lm_head.shape[0])

    @torch.no_grad()
    def logits(self, final_NH: Tensor) -> Tensor:
        """``[N, V]`` float32: bias, then scale, then softcap."""
        # Left out of autocast: the teacher is the target's own arithmetic, not the draft's.
        with torch.autocast(final_NH.device.type, enabled=False):
            logits = torch.nn.functional.linear(final_NH.float(), self.lm_head, self.bias)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits
