"""The walk counts rounds and accepted tokens as the engine does."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.walk import Round, WalkCounts, decoded_spans, walk


def _simulate_engine(
    tokens: list[int], proposals: np.ndarray, first: int, max_tokens: int, k: int
) -> list[int]:
    """A greedy engine, step by step: its target always continues with ``tokens``.

    Returns the accepted count of every round but the one in which the request stopped.
    """
    output, accepted = [tokens[first]], []  # prefill decodes the first token
    while len(output) < max_tokens:
        computed = first + len(output)  # tokens so far; the newest is at computed - 1
        draft = proposals[computed - 2, :k].tolist()
        target = [tokens[computed + i] if computed + i < len(tokens) else -7 for i in range(k + 1)]
        agree = 0
        while agree < k and draft[agree] == target[agree]:
            agree += 1
        accepted.append(agree)
        output += target[: agree + 1]
    return accepted[:-1]


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 20), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_walk_equals_a_step_by_step_engine(first: int, decoded: int, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 2, first + decoded)
    proposals = rng.integers(0, 2, (len(tokens), k))
    rounds = walk(tokens, proposals, first=first, last=len(tokens) - 1, k=k)
    assert [r.accepted for r in rounds] == _simulate_engine(tokens.tolist(), proposals, first, decoded, k)


def test_the_first_round_starts_from_the_prompt_s_last_row() -> None:
    tokens = np.array([9, 9, 1, 2, 3, 4, 5, 6])
    proposals = np.full((8, 2), -1)
    proposals[1] = [2, 3]  # row 1 is the prompt's last; token 2 came from prefill
    rounds = walk(tokens, proposals, first=2, last=7, k=2)
    assert rounds[0] == Round(newest=2, accepted=2)
    assert rounds[1].newest == 5


def test_the_round_that_reaches_the_last_token_is_left_out() -> None:
    tokens = np.arange(6)
    perfect = np.stack([np.arange(6) + 2, np.arange(6) + 3], axis=1)
    assert walk(tokens, perfect, first=1, last=5, k=2) == [Round(1, 2)]  # 1 -> 4, then 4 -> 5 ends it
    assert walk(tokens, perfect, first=2, last=5, k=2) == []  # 2 -> 5 ends it at once
    assert walk(tokens, perfect, first=5, last=5, k=2) == []  # one token: prefill alone


def test_a_token_after_a_wrong_one_does_not_count() -> None:
    tokens = np.array([0, 1, 2, 3, 4, 5, 6, 7])
    proposals = np.full((8, 3), -1)
    proposals[0] = [2, 9, 4]
    assert walk(tokens, proposals, first=1, last=7, k=3)[0].accepted == 1


def test_counts_per_position_are_rounds_that_accepted_that_far() -> None:
    counts = WalkCounts.of([Round(0, 2), Round(3, 0), Round(4, 1)], 3)
    assert counts == WalkCounts(rounds=3, accepted=3, per_position=(2, 1, 0))


def test_each_run_of_sampled_tokens_is_one_request() -> None:
    assert decoded_spans(np.array([0, 0, 1, 1, 0, 1], np.bool_)) == [(2, 3), (5, 5)]
    assert decoded_spans(np.zeros(3, np.bool_)) == []


def test_a_request_without_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="1 <= first"):
        walk(np.arange(4), np.zeros((4, 1)), first=0, last=3, k=1)
