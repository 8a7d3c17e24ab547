"""Draft vocabulary maps: offsets, padding by unused ids, and maps that are refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from features.errors import DraftLayoutError, InputError
from training.vocab import VocabMap


def test_the_full_vocabulary_is_the_zero_offset_and_writes_no_map() -> None:
    full = VocabMap.identity(512)
    assert not full.d2t.any()
    assert int(full.target_ids.max()) == 511
    assert full.is_full
    assert full.tensors() == {}


def test_ids_in_place_of_offsets_are_refused() -> None:
    ids = np.arange(512, dtype=np.int64)
    with pytest.raises(DraftLayoutError, match="offsets"):
        VocabMap(ids, np.ones(512, np.bool_)).validate()


def test_a_reduced_vocabulary_without_map_is_refused_by_name() -> None:
    with pytest.raises(DraftLayoutError, match="d2t and t2d are missing"):
        VocabMap.from_tensors({}, draft_vocab_size=128, vocab_size=512, where="model.safetensors")


def test_a_reduced_vocabulary_without_counts_is_refused() -> None:
    with pytest.raises(InputError, match="needs token counts"):
        VocabMap.from_counts(np.zeros(512, np.int64), 128)


def test_more_entries_than_seen_tokens_are_filled_with_the_smallest_unused_ids() -> None:
    counts = np.zeros(512, np.int64)
    counts[100:140] = 5
    vocab = VocabMap.from_counts(counts, 128)
    assert vocab.size == 128
    assert vocab.target_ids.tolist() == [*range(88), *range(100, 140)]


def test_the_most_frequent_ids_are_kept() -> None:
    vocab = VocabMap.from_counts(np.array([1, 9, 0, 9, 4]), 3)
    assert vocab.target_ids.tolist() == [1, 3, 4]


def test_a_vocabulary_larger_than_the_target_s_is_refused() -> None:
    with pytest.raises(InputError, match="at most 40"):
        VocabMap.from_counts(np.ones(40, np.int64), 41)


def test_d2t_and_t2d_that_disagree_are_refused() -> None:
    vocab = VocabMap.from_target_ids(np.array([1, 5, 7]), 10)
    t2d = vocab.t2d.copy()
    t2d[5], t2d[6] = False, True
    with pytest.raises(DraftLayoutError, match="same set"):
        VocabMap.from_tensors({"d2t": vocab.d2t, "t2d": t2d}, draft_vocab_size=3, vocab_size=10, where="w")


@pytest.mark.parametrize("missing", ["d2t", "t2d"])
def test_half_a_map_is_refused(missing: str) -> None:
    tensors = VocabMap.from_target_ids(np.array([1, 5, 7]), 10).tensors()
    del tensors[missing]
    with pytest.raises(DraftLayoutError, match=f"{missing} is missing"):
        VocabMap.from_tensors(tensors, draft_vocab_size=3, vocab_size=10, where="w")


def test_identity_is_judged_against_the_target_s_vocabulary() -> None:
    vocab = VocabMap.from_target_ids(np.arange(128), 512)
    assert not vocab.d2t.any()
    assert not vocab.is_full
    assert set(vocab.tensors()) == {"d2t", "t2d"}


@given(st.sets(st.integers(0, 63), min_size=1))
def test_tensors_read_back_to_the_same_map(ids: set[int]) -> None:
    vocab = VocabMap.from_target_ids(np.array(sorted(ids)), 64)
    back = VocabMap.from_tensors(vocab.tensors(), draft_vocab_size=len(ids), vocab_size=64, where="w")
    assert back.target_ids.tolist() == sorted(ids)
    assert back.d2t.dtype == np.int64
    assert back.t2d.dtype == np.bool_
    assert int(back.t2d.sum()) == len(ids)
