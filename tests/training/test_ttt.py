"""EAGLE-3's alignment, loss and drafting, held against tables, probes and a slow reference."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from features.schema import TargetVersion
from training.batches import DraftBatch, make_batch
from training.heads import FrozenHead
from training.losses import masked_sum
from training.methods.eagle3.collate import all_rows, drafting_rows, input_embeds, positions, supervision
from training.methods.eagle3.method import EAGLE3
from training.methods.eagle3.model import Eagle3Draft
from training.methods.eagle3.propose import propose
from training.methods.eagle3.reference import reference_loss, reference_propose
from training.methods.eagle3.ttt import start_rounds, ttt_loss
from training.spec import Eagle3Spec
from training.testing import HIDDEN, LAYERS, TARGET, TARGET_CONFIG, VOCAB, make_head, make_window
from training.vocab import VocabMap

HEADS = {TargetVersion(v): FrozenHead.from_snapshot(make_head(v, tied=False)) for v in range(2)}
REDUCED = VocabMap.from_target_ids(np.arange(3, VOCAB, 2), VOCAB)


def _model(vocab: VocabMap = REDUCED, seed: int = 0) -> Eagle3Draft:
    model = EAGLE3.build(TARGET, TARGET_CONFIG, Eagle3Spec(), vocab, LAYERS, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():  # large enough that every part of the layer matters
            if parameter.ndim > 1:
                parameter.mul_(8.0)
            else:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def _batch(*windows) -> DraftBatch:
    return make_batch(windows, HEADS, layer_ids=LAYERS)


def _mixed_batch() -> DraftBatch:
    return _batch(
        make_window("a", length=8, prompt=3, seed=1),
        make_window("b", length=10, prompt=5, seed=2, version=1),
        make_window("c", length=14, prompt=2, seed=3, start=4, stop=10),
    )


def test_table_of_inputs_and_labels_is_the_documented_one() -> None:
    """One-hot probe: token t has embedding and features that name t, so every shift can be read off."""
    length, prompt, start = 8, 4, 0
    window = make_window(length=length, prompt=prompt, tokens=range(10, 10 + length))
    batch = _batch(window)
    batch = replace(batch, embeds=batch.token_ids[:, :-1, None].float().expand(-1, -1, HIDDEN))
    rows, labels = drafting_rows(batch, 3), supervision(batch)
    seen = set()
    for step in range(3):
        embeds, numbers = input_embeds(batch, rows, step), labels.at(rows, step)
        at = positions(batch, rows.index, step)
        for a in range(rows.index.shape[1]):
            number = int(numbers[0, a])
            if number < 0:
                continue
            p = int(rows.index[0, a])
            seen.add((p, step))
            assert int(embeds[0, a, 0]) == 10 + p + 1 + step, "input token is x[p+1+i]"
            assert int(at[0, a]) == start + p + step, "position is p+i"
            assert int(labels.teacher_row[number]) == p + 1 + step, "teacher row is p+1+i"
            assert int(labels.tokens[number]) == 10 + p + 2 + step, "predicted token is x[p+2+i]"
            assert p + 2 + step >= prompt, "only sampled tokens are predicted"
    expected = {(p, i) for p in range(length) for i in range(3) if prompt <= p + 2 + i < length}
    assert seen == expected


def test_first_step_reads_the_features_of_its_own_row() -> None:
    window = make_window(length=8, prompt=2)
    batch = _batch(window)
    model, rows = _model(), all_rows(batch)
    hidden, _ = start_rounds(model, batch, rows)
    for a, p in enumerate(rows.index[0].tolist()):
        torch.testing.assert_close(hidden[0, a], model.fc.weight @ torch.from_numpy(window.aux[p]))


def test_no_prediction_sees_features_of_the_rows_after_its_own() -> None:
    batch, model = _batch(make_window(length=10, prompt=2, seed=4)), _model()
    before = propose(model, batch, 3)
    changed = batch.aux.clone()
    changed[:, 6:] = torch.randn_like(changed[:, 6:])
    after = propose(model, replace(batch, aux=changed), 3)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.equal(before[:, 6:], after[:, 6:])


@pytest.mark.parametrize("loss", ["kl", "ce", "reverse_kl", "tv", "overlap", "hybrid"])
@pytest.mark.parametrize("vocab", [REDUCED, VocabMap.identity(VOCAB)], ids=["reduced", "full"])
def test_parallel_loss_and_gradient_equal_the_sequential_reference(loss: str, vocab: VocabMap) -> None:
    model, batch = _model(vocab), _mixed_batch()
    spec = Eagle3Spec(ttt_steps=4, loss=loss)
    fast = ttt_loss(model, batch, spec).total()
    fast_gradient = torch.autograd.grad(fast, list(model.parameters()))
    slow = reference_loss(model, batch, spec)
    slow_gradient = torch.autograd.grad(slow, list(model.parameters()))
    # float32 sums in another order: relative error of a few units in 1e-6 per reduction.
    torch.testing.assert_close(fast, slow, rtol=2e-5, atol=1e-6)
    for (name, _), a, b in zip(model.named_parameters(), fast_gradient, slow_gradient, strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-3, atol=2e-5 * float(b.abs().max()) + 1e-7, msg=lambda m, name=name: f"{name}: {m}"
        )
        assert float(b.abs().max()) > 0, f"{name} gets a gradient"


def test_parallel_proposals_equal_the_sequential_reference() -> None:
    model, batch, k = _model(), _mixed_batch(), 4
    proposals = propose(model, batch, k)
    for b in range(batch.num_windows):
        for p in range(batch.row_mask.shape[1]):
            if batch.row_mask[b, p] and batch.token_mask[b, p + 1]:
                assert proposals[b, p].tolist() == reference_propose(model, batch, b, p, k)
            else:
                assert proposals[b, p].tolist() == [-1] * k


def test_a_window_cut_short_still_proposes_after_its_last_row() -> None:
    batch = _batch(make_window(length=14, prompt=2, start=0, stop=9))
    assert (propose(_model(), batch, 2)[0, 8] >= 0).all(), "the token past the rows is known there"


def test_proposals_lie_in_the_draft_vocabulary() -> None:
    proposals = propose(_model(), _mixed_batch(), 4)
    assert set(proposals[proposals >= 0].tolist()) <= set(REDUCED.target_ids.tolist())


def test_training_feeds_the_stored_token_while_drafting_feeds_the_draft_s_own() -> None:
    """A draft that only ever says ids below 20, in a text above: training must not see what it says."""
    model = _model(VocabMap.from_target_ids(np.arange(20), VOCAB))
    batch, spec = _batch(make_window(prompt=3, tokens=range(20, 40))), Eagle3Spec(ttt_steps=3)
    embedding = batch.heads[0].embedding.clone()
    embedding[:20] = -embedding[:20]
    poisoned = replace(batch, heads=(replace(batch.heads[0], embedding=embedding),))
    assert torch.equal(ttt_loss(model, batch, spec).sums, ttt_loss(model, poisoned, spec).sums)
    assert torch.equal(propose(model, batch, 3)[..., 0], propose(model, poisoned, 3)[..., 0])
    assert not torch.equal(propose(model, batch, 3), propose(model, poisoned, 3))


def test_padding_and_neighbours_do_not_change_the_loss() -> None:
    windows = [make_window(str(i), length=6 + 3 * i, prompt=2, seed=i, version=i % 2) for i in range(4)]
    model, spec = _model(), Eagle3Spec(ttt_steps=3)
    together = ttt_loss(model, _batch(*windows), spec)
    alone = [ttt_loss(model, _batch(w), spec) for w in windows]
    torch.testing.assert_close(together.sums, sum(t.sums for t in alone), rtol=1e-5, atol=1e-5)
    assert torch.equal(together.counts, sum(t.counts for t in alone))


def test_each_window_is_taught_by_its_own_version() -> None:
    old, new = make_window("a", prompt=3, seed=5), make_window("b", prompt=3, seed=6, version=1)
    model, spec = _model(), Eagle3Spec(ttt_steps=2)
    batch = _batch(old, new)
    assert batch.head_of == (0, 1)
    both = ttt_loss(model, batch, spec).sums
    torch.testing.assert_close(
        both,
        ttt_loss(model, _batch(old), spec).sums + ttt_loss(model, _batch(new), spec).sums,
        rtol=1e-5,
        atol=1e-5,
    )
    swapped = replace(batch, head_of=(1, 0))
    assert not torch.allclose(ttt_loss(model, swapped, spec).sums, both, rtol=1e-2)


def test_a_token_outside_the_mask_is_never_a_label() -> None:
    window = make_window(length=10, prompt=3)
    mask = window.sampled_mask.copy()
    mask[6] = False
    labels = supervision(_batch(replace(window, sampled_mask=mask)))
    assert 6 not in (labels.teacher_row + 1).tolist()
    assert 5 in (labels.teacher_row + 1).tolist()
    assert 7 in (labels.teacher_row + 1).tolist()


def test_lost_mass_is_what_the_target_puts_outside_the_draft_vocabulary() -> None:
    batch, model = _batch(make_window(length=8, prompt=2)), _model()
    total, count = ttt_loss(model, batch, Eagle3Spec()).metrics["lost_mass"]
    probs = torch.softmax(batch.heads[0].logits(batch.final[0, 1:-1]), -1)
    outside = torch.ones(VOCAB, dtype=torch.bool)
    outside[torch.from_numpy(REDUCED.target_ids)] = False
    torch.testing.assert_close(total / count, probs[:, outside].sum(-1).mean(), rtol=1e-4, atol=1e-5)


def test_rows_that_are_not_finite_are_left_out_and_counted() -> None:
    total, count, dropped = masked_sum(torch.tensor([1.0, float("nan"), 3.0, float("inf")]))
    assert (float(total), float(count), float(dropped)) == (4.0, 2.0, 2.0)
