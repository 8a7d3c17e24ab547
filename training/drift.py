"""How far the target moved between two versions: its head, its states, its distributions.

Two kinds of evidence. The heads are compared row by row and need no rollout. States and
distributions are compared on the *same tokens*: windows of both versions with the same sample,
span and token ids (a replay of one rollout under both); without such windows they are None.
Each version's states are scored with its own head. numpy only.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from features.bfloat16 import Float32, to_float32
from features.heads import HeadSnapshot
from features.schema import TargetVersion
from features.windows import Window

if TYPE_CHECKING:
    from features.catalog import Selection
    from features.lake import Lake

log = logging.getLogger(__name__)

_BLOCK = 8192
"""Rows of a matrix compared at a time."""


@dataclass(frozen=True, slots=True)
class VectorDrift:
    """How paired vectors moved."""

    relative_l2: float
    """``|b - a| / |a|`` over all vectors together (Frobenius)."""
    cosine: float
    """Mean cosine similarity of each pair; pairs with a zero vector are left out."""
    vectors: int


@dataclass(frozen=True, slots=True)
class VersionDrift:
    """From an older version to a newer one."""

    older: int
    newer: int
    lm_head: VectorDrift
    embedding: VectorDrift
    shared_tokens: int
    """Tokens whose states were compared; 0 when no window is shared."""
    aux: VectorDrift | None
    final: VectorDrift | None
    kl: float | None
    """Mean KL(older || newer) of the next-token distributions, nats, at sampled tokens."""
    top1_changed: float | None
    """Share of those places where the most likely token differs."""

    def as_row(self) -> dict[str, Any]:
        """One flat row, for a table."""
        row: dict[str, Any] = {"older": self.older, "newer": self.newer, "shared_tokens": self.shared_tokens}
        for name in ("lm_head", "embedding", "aux", "final"):
            part: VectorDrift | None = getattr(self, name)
            row[f"{name}_relative_l2"] = None if part is None else part.relative_l2
            row[f"{name}_cosine"] = None if part is None else part.cosine
        return row | {"kl": self.kl, "top1_changed": self.top1_changed}


def version_drift(
    lake: "Lake",
    selection: "Selection",
    *,
    pairs: Sequence[tuple[int, int]] | None = None,
    max_windows: int = 64,
) -> list[VersionDrift]:
    """Measure drift between versions of a selection.

    Args:
        pairs: (older, newer) versions; None takes neighbours, and the first against the last.
        max_windows: shared windows compared per pair, the first in selection order.

    Raises:
        EmptySelectionError: nothing is selected.
    """
    selection.require_nonempty()
    rows_by_version: dict[int, dict[tuple[str, int, int], Mapping[str, Any]]] = {}
    for row in selection.rows:
        spans = rows_by_version.setdefault(row["target_version"], {})
        spans.setdefault((row["sample_id"], row["start"], row["num_rows"]), row)
    versions = sorted(rows_by_version)
    if pairs is None:
        pairs = sorted({*pairwise(versions), *([(versions[0], versions[-1])] if len(versions) > 1 else [])})
    drifts = []
    for older, newer in pairs:
        first, second = rows_by_version.get(older, {}), rows_by_version.get(newer, {})
        shared = [(first[key], second[key]) for key in first if key in second]
        drifts.append(_pair_drift(lake, older, newer, shared, max_windows))
    return drifts


def _pair_drift(
    lake: "Lake",
    older: int,
    newer: int,
    shared: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
    max_windows: int,
) -> VersionDrift:
    heads = lake.head_of(TargetVersion(older)), lake.head_of(TargetVersion(newer))
    aux, final, teacher = _VectorSums(), _VectorSums(), _TeacherSums()
    compared = 0
    for row_a, row_b in shared:
        if compared == max_windows:
            log.info(
                "drift v%d -> v%d: %d of %d shared windows compared", older, newer, compared, len(shared)
            )
            break
        a, b = lake.read_window(row_a), lake.read_window(row_b)
        if not np.array_equal(a.token_ids, b.token_ids):
            continue  # the same prompt answered anew: other tokens, nothing to compare
        compared += 1
        _add_window(a, b, heads, aux, final, teacher)
    return VersionDrift(
        older=older,
        newer=newer,
        lm_head=_matrix_drift(heads[0].lm_head, heads[1].lm_head, heads[0], heads[1]),
        embedding=_matrix_drift(heads[0].embedding, heads[1].embedding, heads[0], heads[1]),
        shared_tokens=final.vectors,
        aux=aux.result(),
        final=final.result(),
        kl=teacher.kl / teacher.tokens if teacher.tokens else None,
        top1_changed=teacher.changed / teacher.tokens if teacher.tokens else None,
    )


def _add_window(
    a: Window,
    b: Window,
    heads: tuple[HeadSnapshot, HeadSnapshot],
    aux: "_VectorSums",
    final: "_VectorSums",
    teacher: "_TeacherSums",
) -> None:
    final_a, final_b = to_float32(a.final, a.layout.dtype), to_float32(b.final, b.layout.dtype)
    final.add(final_a, final_b)
    if a.layout.layer_ids == b.layout.layer_ids:
        width = a.layout.hidden_size
        aux_a, aux_b = to_float32(a.aux, a.layout.dtype), to_float32(b.aux, b.layout.dtype)
        aux.add(aux_a.reshape(-1, width), aux_b.reshape(-1, width))
    predicting = np.flatnonzero(a.sampled_mask[1:])
    if len(predicting):
        teacher.add(heads[0].logits(final_a[predicting]), heads[1].logits(final_b[predicting]))


class _VectorSums:
    """Sums from which a :class:`VectorDrift` follows, over any number of parts."""

    def __init__(self) -> None:
        self.vectors = 0
        self._moved = self._before = self._cosines = 0.0
        self._nonzero = 0

    def add(self, a: Float32, b: Float32) -> None:
        """Add paired rows ``[N, H]``."""
        wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
        self._moved += float(((wide_b - wide_a) ** 2).sum())
        self._before += float((wide_a**2).sum())
        norms = np.linalg.norm(wide_a, axis=1) * np.linalg.norm(wide_b, axis=1)
        nonzero = norms > 0
        self._cosines += float(((wide_a * wide_b).sum(1)[nonzero] / norms[nonzero]).sum())
        self._nonzero += int(nonzero.sum())
        self.vectors += len(a)

    def result(self) -> VectorDrift | None:
        """None when nothing comparable was added."""
        if not self._nonzero or not self._before:
            return None
        return VectorDrift((self._moved / self._before) ** 0.5, self._cosines / self._nonzero, self.vectors)


class _TeacherSums:
    def __init__(self) -> None:
        self.kl = 0.0
        self.changed = 0
        self.tokens = 0

    def add(self, logits_a: Float32, logits_b: Float32) -> None:
        """Add paired logits ``[N, V]``."""
        log_a, log_b = _log_softmax(logits_a), _log_softmax(logits_b)
        self.kl += float((np.exp(log_a) * (log_a - log_b)).sum())
        self.changed += int((log_a.argmax(1) != log_b.argmax(1)).sum())
        self.tokens += len(log_a)


def _log_softmax(logits: Float32) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def _matrix_drift(a: Any, b: Any, head_a: HeadSnapshot, head_b: HeadSnapshot) -> VectorDrift:
    sums = _VectorSums()
    for start in range(0, len(a), _BLOCK):
        rows = slice(start, start + _BLOCK)
        sums.add(to_float32(a[rows], head_a.dtype), to_float32(b[rows], head_b.dtype))
    found = sums.result()
    if found is None:
        raise ValueError("a head of zeros only has no direction to compare")
    return found
