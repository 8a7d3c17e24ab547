"""Sampling is a pure function of (seed, version, sample id) and never cuts away what is to be learned."""

import pytest
from collect_toy_target import ToyTarget
from hypothesis import given
from hypothesis import strategies as st

from features.collect.rollouts import Rollout
from features.collect.sampling import SamplingPolicy, WindowSpan
from features.schema import TargetVersion

V0, V1 = TargetVersion(0), TargetVersion(1)


def sequence(length: int, sampled: range, sample_id: str = "a") -> Rollout:
    return Rollout(
        sample_id=sample_id, group_id="g", token_ids=(1,) * length, prompt_length=sampled.start,
        sampled_mask=tuple(i in sampled for i in range(length)),
    )  # fmt: skip


def test_a_short_sequence_is_kept_whole() -> None:
    assert SamplingPolicy(max_tokens=15).plan(ToyTarget().rollout(0), V0) == (WindowSpan(0, 15),)


def test_the_share_of_kept_rollouts_is_the_sample_rate() -> None:
    policy = SamplingPolicy(sample_rate=0.25)
    kept = sum(bool(policy.plan(sequence(4, range(1, 4), str(i)), V0)) for i in range(4000))
    # Binomial standard deviation 27: five of them.
    assert abs(kept - 1000) < 140


def test_other_versions_and_seeds_keep_other_rollouts() -> None:
    ids = [str(i) for i in range(200)]

    def kept(policy: SamplingPolicy, version: TargetVersion) -> list[bool]:
        return [bool(policy.plan(sequence(4, range(1, 4), i), version)) for i in ids]

    base = kept(SamplingPolicy(sample_rate=0.5), V0)
    assert base == kept(SamplingPolicy(sample_rate=0.5), V0)
    assert base != kept(SamplingPolicy(sample_rate=0.5), V1)
    assert base != kept(SamplingPolicy(sample_rate=0.5, seed=1), V0)


@given(
    length=st.integers(2, 300),
    first=st.integers(1, 299),
    count=st.integers(1, 300),
    max_tokens=st.integers(1, 64),
    seed=st.integers(0, 50),
)
def test_a_window_lies_inside_and_predicts_a_sampled_token(
    length: int, first: int, count: int, max_tokens: int, seed: int
) -> None:
    first = min(first, length - 1)
    sampled = range(first, min(length, first + count))
    (span,) = SamplingPolicy(max_tokens=max_tokens, seed=seed).plan(sequence(length, sampled), V0)
    assert 0 <= span.start < span.stop <= length
    assert span.num_rows == min(length, max_tokens)
    predicted = set(range(span.start + 1, min(span.stop, length - 1) + 1))
    assert predicted & set(sampled)


def test_windows_of_long_sequences_start_in_many_places() -> None:
    policy = SamplingPolicy(max_tokens=16)
    starts = {policy.plan(sequence(200, range(20, 200), str(i)), V0)[0].start for i in range(300)}
    assert min(starts) >= 20 - 8
    assert len(starts) > 80


@pytest.mark.parametrize("bad", [{"sample_rate": 0.0}, {"sample_rate": 1.5}, {"max_tokens": 0}])
def test_a_policy_that_collects_nothing_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        SamplingPolicy(**bad)  # type: ignore[arg-type]


def test_the_mapping_names_every_setting() -> None:
    assert SamplingPolicy(0.5, 64, 3).as_mapping() == {"sample_rate": 0.5, "max_tokens": 64, "seed": 3}
