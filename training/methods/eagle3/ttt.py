"""Training-time test: the loss over several drafting steps from every supervised row at once."""

import torch
from torch import Tensor

from training.batches import DraftBatch
from training.losses import LossTerms, Teacher, masked_sum, teacher_distribution, teacher_loss
from training.methods.eagle3.attention import RoundCache
from training.methods.eagle3.collate import (
    Rows,
    Supervision,
    context_embeds,
    drafting_rows,
    input_embeds,
    positions,
    supervision,
)
from training.methods.eagle3.model import Eagle3Draft
from training.spec import Eagle3Spec


def ttt_loss(model: Eagle3Draft, batch: DraftBatch, spec: Eagle3Spec) -> LossTerms:
    """Sums and counts per step; see ``collate`` for the alignment of every input and label."""
    labels = supervision(batch)
    teacher = batch_teacher(batch, labels, model.target_ids)
    rows = drafting_rows(batch, spec.ttt_steps)
    hidden, cache = start_rounds(model, batch, rows)
    sums, counts, nonfinite, matches = [], [], [], []
    for step in range(spec.ttt_steps):
        at = positions(batch, rows.index, step)
        hidden = next_hidden(model, cache, hidden, input_embeds(batch, rows, step), at, step)
        numbers = labels.at(rows, step)
        chosen = numbers >= 0
        logits = model.logits(hidden[chosen])
        numbers = numbers[chosen]
        total, count, dropped = masked_sum(teacher_loss(spec.loss, logits, teacher, numbers))
        sums.append(total)
        counts.append(count)
        nonfinite.append(dropped)
        with torch.no_grad():
            matches.append((model.to_target_ids(logits.argmax(-1)) == labels.tokens[numbers]).sum().float())
    supervised = torch.tensor(float(len(labels.tokens)), device=batch.aux.device)
    return LossTerms(
        weights=torch.tensor([spec.step_decay**i for i in range(spec.ttt_steps)], device=batch.aux.device),
        sums=torch.stack(sums),
        counts=torch.stack(counts),
        metrics={
            **{f"match_{i}": (match, counts[i]) for i, match in enumerate(matches)},
            "lost_mass": (teacher.lost_N.sum(), supervised),
        },
        supervised=supervised,
        nonfinite=torch.stack([torch.as_tensor(n, dtype=torch.float32) for n in nonfinite]).sum(),
    )


@torch.no_grad()
def batch_teacher(batch: DraftBatch, labels: Supervision, target_ids: Tensor | None) -> Teacher:
    """Teacher of each supervised token, ``[N, D]``, by its window's own head."""
    head_of = torch.tensor(batch.head_of, device=labels.window.device)[labels.window]
    draft_size = batch.heads[0].vocab_size if target_ids is None else len(target_ids)
    probs = batch.final.new_empty(len(labels.tokens), draft_size)
    entropy, lost = batch.final.new_empty(2, len(labels.tokens))
    for number, head in enumerate(batch.heads):
        mine = (head_of == number).nonzero(as_tuple=True)[0]
        if len(mine):
            part = teacher_distribution(
                head, batch.final[labels.window[mine], labels.teacher_row[mine]], target_ids
            )
            probs[mine], entropy[mine], lost[mine] = part.probs_ND, part.negative_entropy_N, part.lost_N
    return Teacher(probs, entropy, lost)


def start_rounds(
    model: Eagle3Draft, batch: DraftBatch, rows: Rows, embeds: Tensor | None = None
) -> tuple[Tensor, RoundCache]:
    """Hidden state of the drafting rows before step 0, ``[B, A, H]``, and the cache of all rows.

    ``embeds`` ``[B, R, H]`` replaces the context's own input embeddings.
    """
    everything = model.combine(batch.aux)
    embeds = context_embeds(batch) if embeds is None else embeds
    index = torch.arange(everything.shape[1], device=everything.device)[None]
    keys, values = model.key_value(model.attention_input(embeds, everything), positions(batch, index, 0))
    chosen = torch.gather(everything, 1, rows.index[..., None].expand(-1, -1, everything.shape[2]))
    return chosen, RoundCache(keys, values, rows.index)


def next_hidden(
    model: Eagle3Draft, cache: RoundCache, hidden: Tensor, embeds: Tensor, at: Tensor, step: int
) -> Tensor:
    """One drafting step of every round: ``[B, A, H]`` to ``[B, A, H]``, pre-norm.

    Step 0's key is row p's own first-chunk key, so only later steps add one.
    """
    x = model.attention_input(embeds, hidden)
    if step > 0:
        cache.append(*model.key_value(x, at))
    return model.finish(hidden, cache.attend(model.query(x, at)))
