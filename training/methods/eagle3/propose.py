"""Draft greedily from every row at once, as an engine would from each alone."""

import torch
from torch import Tensor

from training.batches import DraftBatch
from training.methods.eagle3.collate import INPUT_SHIFT, all_rows, positions
from training.methods.eagle3.model import Eagle3Draft
from training.methods.eagle3.ttt import next_hidden, start_rounds

ABSENT = -1


@torch.no_grad()
def propose(model: Eagle3Draft, batch: DraftBatch, k: int) -> Tensor:
    """Proposals int64 ``[B, R, k]`` in target ids; ``ABSENT`` where a row has no next token."""
    rows = all_rows(batch)
    tokens = torch.gather(batch.token_ids, 1, rows.index + INPUT_SHIFT)
    # The last row may be followed by a token past the rows, which the batch's embeddings lack.
    hidden, cache = start_rounds(model, batch, rows, embed(batch, batch.token_ids[:, INPUT_SHIFT:]))
    drafted = []
    for step in range(k):
        hidden = next_hidden(
            model, cache, hidden, embed(batch, tokens), positions(batch, rows.index, step), step
        )
        tokens = model.to_target_ids(model.logits(hidden).argmax(-1))
        drafted.append(tokens)
    result = torch.full((*batch.row_mask.shape, k), ABSENT, dtype=torch.int64, device=tokens.device)
    window, place = rows.valid.nonzero(as_tuple=True)
    result[window, rows.index[window, place]] = torch.stack(drafted, dim=-1)[window, place]
    return result


def embed(batch: DraftBatch, token_ids: Tensor) -> Tensor:
    """Input embeddings ``[B, ..., H]`` of target ids ``[B, ...]``, each by its window's own version."""
    return torch.stack([batch.heads[batch.head_of[b]].embedding[ids] for b, ids in enumerate(token_ids)])
