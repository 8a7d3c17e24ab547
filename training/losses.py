"""Teacher distributions and the losses that pull a draft towards them.

Shape legend: N = rows, H = hidden size, V = target vocabulary, D = draft vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from training.heads import FrozenHead

TEACHER_CHUNK_ELEMENTS = 1 << 25
"""Logits held at once while a teacher is computed (128 MiB in float32)."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """Target distributions restricted to a draft vocabulary and renormalised."""

    probs_ND: Tensor
    """float32, each row sums to 1."""
    negative_entropy_N: Tensor
    """``sum p log p``: what KL adds to the cross-entropy, without a gradient."""
    lost_N: Tensor
    """Probability mass the target puts outside the draft vocabulary: it caps acceptance."""


@torch.no_grad()
def teacher_distribution(head: FrozenHead, final_NH: Tensor, target_ids_D: Tensor | None) -> Teacher:
    """Softmax of the window's own head, in chunks; ``target_ids_D`` None is the full vocabulary."""
    chunk = max(1, TEACHER_CHUNK_ELEMENTS // head.vocab_size)
    probs, lost = [], []
    for rows in torch.split(final_NH, chunk):
        logits_NV = head.logits(rows)
        if target_ids_D is None:
            probs.append(torch.softmax(logits_NV, dim=-1))
            lost.append(logits_NV.new_zeros(len(rows)))
            continue
        kept_ND = logits_NV[:, target_ids_D]
        mass = torch.logsumexp(kept_ND, -1) - torch.logsumexp(logits_NV, -1)
        probs.append(torch.softmax(kept_ND, dim=-1))
        lost.append((-torch.expm1(mass)).clamp_min(0.0))
    probs_ND = torch.cat(probs)
    return Teacher(probs_ND, torch.xlogy(probs_ND, probs_ND).sum(-1), torch.cat(lost))


def _cross_entropy(logits: Tensor, probs: Tensor) -> Tensor:
    # probs sum to 1, so -sum p log q = logsumexp(z) - sum p z: no [N, D] log-softmax is kept.
    return torch.logsumexp(logits, -1) - (probs * logits).sum(-1)


def _kl(logits: Tensor, probs: Tensor) -> Tensor:
    return _cross_entropy(logits, probs) + torch.xlogy(probs, probs).sum(-1)


def _reverse_kl(logits: Tensor, probs: Tensor) -> Tensor:
    log_q = torch.log_softmax(logits, -1)
    log_p = probs.clamp_min(torch.finfo(probs.dtype).tiny).log()
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def _tv(logits: Tensor, probs: Tensor) -> Tensor:
    return 0.5 * (torch.softmax(logits, -1) - probs).abs().sum(-1)


def overlap(logits: Tensor, probs: Tensor) -> Tensor:
    """``sum_v min(p, q)``: the acceptance of lossless rejection sampling, ``[N]`` in [0, 1]."""
    return torch.minimum(torch.softmax(logits, -1), probs).sum(-1)


def _negative_log_overlap(logits: Tensor, probs: Tensor) -> Tensor:
    return -overlap(logits, probs).clamp_min(torch.finfo(logits.dtype).tiny).log()


def _hybrid(logits: Tensor, probs: Tensor) -> Tensor:
    # KL where the draft is far from the teacher, TV (what acceptance counts) where it is near.
    share = torch.exp(-3.0 * overlap(logits.detach(), probs))
    return share * _kl(logits, probs) + (1 - share) * _tv(logits, probs)


_ROW_LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {
        "kl": _kl,
        "ce": _cross_entropy,
        "reverse_kl": _reverse_kl,
        "tv": _tv,
        "overlap": _negative_log_overlap,
        "hybrid": _hybrid,
    }
)


def row_loss(name: str, logits_ND: Tensor, probs_ND: Tensor) -> Tensor:
    """Loss per row, ``[N]`` in nats (``tv``: in [0, 1]), in float32 whatever the input.

    With p the teacher and q the draft: ``kl`` = KL(p||q); ``ce`` = -sum p log q (same gradient);
    ``reverse_kl`` = KL(q||p); ``tv`` = half the L1 distance; ``overlap`` = -log sum min(p, q);
    ``hybrid`` = s*KL + (1-s)*TV with s = exp(-3 * sum min(p, q)), s held constant.
    """
    if name not in _ROW_LOSSES:
        raise ValueError(f"unknown loss {name!r}; known: {', '.join(_ROW_LOSSES)}")
    return _ROW_LOSSES[name](logits_ND.float(), probs_ND.float())


def teacher_loss(name: str, logits_ND: Tensor, teacher: Teacher, numbers: Tensor) -> Tensor:
    """:func:`row_loss` against the teacher's rows ``numbers`` ``[N]``, with what it precomputed."""
    probs_ND = teacher.probs_ND[numbers]
    if name == "kl":
        return row_loss("ce", logits_ND, probs_ND) + teacher.negative_entropy_N[numbers]
    return row_loss(name, logits_ND, probs_ND)


@dataclass(frozen=True, slots=True)
class LossTerms:
    """One batch's loss as sums and counts, so that processes and batches add up to a true mean.

    The loss is ``sum_i weights[i] * sums[i] / counts[i]`` with sums and counts totalled over
    all processes first. A term without any row counts as zero.
    """

    weights: Tensor
    """``[S]`` float32, one per term; a method decides what its terms are (EAGLE-3: drafting steps)."""
    sums: Tensor
    """``[S]`` float32, carries the gradient."""
    counts: Tensor
    """``[S]`` float32: rows behind each sum."""
    metrics: Mapping[str, tuple[Tensor, Tensor]]
    """Name -> (sum, count), without gradient; the same names in the same order for every batch."""
    supervised: Tensor
    """Supervised tokens, scalar."""
    nonfinite: Tensor
    """Rows left out because their loss was not finite, scalar."""

    def total(self, counts: Tensor | None = None) -> Tensor:
        """The loss, scalar; ``counts`` replaces this batch's own (totals over processes)."""
        counts = self.counts if counts is None else counts
        return (self.weights * self.sums / counts.clamp_min(1.0)).sum()


def masked_sum(loss_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum and count of the finite rows, and how many were left out.

    A row that is not finite may still send NaN backwards; the loop then skips the whole step.
    """
    finite = torch.isfinite(loss_N)
    kept = torch.where(finite, loss_N, torch.zeros_like(loss_N))
    count = finite.sum().to(torch.float32)
    return kept.sum(), count, loss_N.numel() - count
