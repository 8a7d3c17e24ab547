"""Attention of many rounds at once: shared first-chunk keys, and each row's own later keys.

An engine that starts a round at row p has the keys of rows 0..p in its cache and appends one
key per drafted token. Started from every row in parallel, step i of row p therefore attends to
the first-chunk keys at rows <= p, which all rows share, and to its own keys of steps 1..i, which
no other row sees. The first are computed once; the second are a dot product per row and step.
Shape legend: B = windows, R = rows, A = drafting rows, n/k/d = query heads, key heads, head size,
g = n / k queries per key head.
"""

import torch
from torch import Tensor


class RoundCache:
    """Keys and values of one batch while its rounds are unrolled."""

    def __init__(self, keys: Tensor, values: Tensor, row_index: Tensor) -> None:
        """``keys`` and ``values`` are ``[B, R, k, d]``; ``row_index`` ``[B, A]`` names the drafting rows."""
        self._keys = keys.permute(0, 2, 3, 1)
        self._values = values.permute(0, 2, 1, 3)
        later = torch.arange(keys.shape[1], device=keys.device) > row_index[..., None]
        self._bias = torch.zeros_like(later, dtype=keys.dtype).masked_fill_(later, float("-inf"))
        self._own_keys: list[Tensor] = []
        self._own_values: list[Tensor] = []

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add each drafting row's own key and value, ``[B, A, k, d]``."""
        self._own_keys.append(keys.permute(0, 2, 1, 3)[:, :, None])
        self._own_values.append(values.permute(0, 2, 1, 3)[:, :, None])

    def attend(self, queries: Tensor) -> Tensor:
        """Attention output ``[B, A, n*d]`` of ``queries`` ``[B, A, n, d]``."""
        size, active, heads, width = queries.shape
        kv_heads, rows = self._keys.shape[1], self._keys.shape[3]
        scaled = (queries * width**-0.5).permute(0, 2, 1, 3)
        flat = scaled.reshape(size, kv_heads, -1, width)
        scores = (flat @ self._keys).view(size, kv_heads, -1, active, rows) + self._bias[:, None, None]
        grouped = flat.view(size, kv_heads, -1, active, width)
        own = [(grouped * key).sum(-1, keepdim=True) for key in self._own_keys]
        weights = torch.softmax(torch.cat([scores, *own], dim=-1).float(), dim=-1).to(queries.dtype)
        shared = weights[..., :rows].reshape(size, kv_heads, -1, rows)
        mixed = (shared @ self._values).view(size, kv_heads, -1, active, width)
        for step, value in enumerate(self._own_values):
            mixed = mixed + weights[..., rows + step, None] * value
        return mixed.reshape(size, heads, active, width).transpose(1, 2).reshape(size, active, heads * width)
