"""Windows to tensors: types, padding, versions."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from features.bfloat16 import bf16_to_float32, float32_to_bf16
from features.errors import DraftLayoutError, LakeContractError
from features.schema import FeatureDtype, FragmentLayout, TargetVersion
from training.batches import has_finite_features, make_batch, supervision_mask
from training.heads import FrozenHead
from training.testing import HIDDEN, LAYERS, make_head, make_window

HEADS = {TargetVersion(v): FrozenHead.from_snapshot(make_head(v)) for v in range(2)}


def _bf16(window):
    layout = FragmentLayout(window.layout.layer_ids, FeatureDtype.BFLOAT16, HIDDEN)
    return replace(
        window, layout=layout, aux=float32_to_bf16(window.aux), final=float32_to_bf16(window.final)
    )


def test_bfloat16_features_are_read_bit_by_bit() -> None:
    window = _bf16(make_window())
    batch = make_batch([window], HEADS, layer_ids=LAYERS)
    assert np.array_equal(batch.final[0].numpy(), bf16_to_float32(window.final))


def test_padding_is_never_marked_as_data() -> None:
    batch = make_batch(
        [make_window(length=5, prompt=2), make_window(length=9, prompt=2)], HEADS, layer_ids=LAYERS
    )
    assert batch.row_mask.sum(1).tolist() == [5, 9]
    assert batch.supervised.sum(1).tolist() == [3, 7]
    assert not batch.token_mask[0, 5:].any()
    assert not batch.aux[0, 5:].any()


def test_embeddings_are_those_of_each_window_s_own_version() -> None:
    batch = make_batch([make_window("a"), make_window("b", version=1)], HEADS, layer_ids=LAYERS)
    for b, version in enumerate((0, 1)):
        expected = make_head(version).embedding[batch.token_ids[b, :-1].numpy()]
        assert np.array_equal(batch.embeds[b].numpy(), expected)


def test_a_subset_of_the_recorded_layers_takes_its_own_columns() -> None:
    window = make_window()
    batch = make_batch([window], HEADS, layer_ids=(1, 3))
    expected = np.concatenate([window.aux[:, :HIDDEN], window.aux[:, 2 * HIDDEN :]], axis=1)
    assert np.array_equal(batch.aux[0].numpy(), expected)


def test_layers_that_were_not_recorded_are_refused_with_both_lists() -> None:
    with pytest.raises(
        DraftLayoutError, match=r"\[3, 19, 34\] are needed and \[1, 2, 3\] were recorded; \[19, 34\]"
    ):
        make_batch([make_window()], HEADS, layer_ids=(3, 19, 34))


def test_an_absent_loss_mask_is_refused_rather_than_replaced() -> None:
    with pytest.raises(LakeContractError, match="no loss mask"):
        supervision_mask(make_window(), "loss", where="sample 's0'")


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("bf16", [False, True])
def test_non_finite_features_are_seen_in_either_type(value: float, bf16: bool) -> None:
    window = make_window()
    window.aux[3, 1] = value
    assert not has_finite_features(_bf16(window) if bf16 else window)
    assert has_finite_features(_bf16(make_window()) if bf16 else make_window())


@pytest.mark.parametrize("tied", [True, False])
def test_teacher_logits_equal_the_snapshot_s_own_reference(tied: bool) -> None:
    snapshot = replace(
        make_head(tied=tied), bias=np.linspace(-1, 1, 40, dtype=np.float32), logit_scale=0.5, softcap=3.0
    )
    final = np.random.default_rng(0).standard_normal((6, HIDDEN)).astype(np.float32)
    found = FrozenHead.from_snapshot(snapshot).logits(torch.from_numpy(final)).numpy()
    np.testing.assert_allclose(found, snapshot.logits(final), rtol=1e-5, atol=1e-5)
