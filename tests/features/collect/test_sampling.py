"""Sampling is a pure function of (seed, version, sample id) and never cuts away what is to be learned."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from collect_toy_target import ToyTarget
from hypothesis import given
from hypothesis import strategies as st

from features.collect.cut import window_mask
from features.collect.rollouts import Rollout
from features.collect.sampling import LowAcceptance, SamplingPolicy, Strata, TokenBudget, WindowSpan
from features.collect.sampling_places import PLACEMENTS
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


@given(
    prompt=st.integers(0, 60),
    response=st.integers(1, 200),
    max_tokens=st.integers(1, 64),
    context=st.integers(0, 20),
    placement=st.sampled_from(PLACEMENTS),
    seed=st.integers(0, 50),
)
def test_every_placement_lies_inside_and_keeps_its_bounds(
    prompt: int, response: int, max_tokens: int, context: int, placement: str, seed: int
) -> None:
    rollout = sequence(prompt + response, range(prompt, prompt + response))
    policy = SamplingPolicy(max_tokens=max_tokens, context_rows=context, placement=placement, seed=seed)  # type: ignore[arg-type]
    spans = policy.plan(rollout, V0)
    assert spans == policy.plan(rollout, V0) == tuple(sorted(spans))
    for span in spans:
        assert 0 <= span.start < span.stop <= prompt + response
        assert span.num_rows - span.context <= max_tokens
        assert span.context <= min(context, span.start + span.context)
    if placement == "response_only":
        assert all(span.start + span.context >= prompt - 1 for span in spans)
    if placement == "front" and prompt:
        assert spans[0].start + spans[0].context == prompt - 1


def test_strided_windows_supervise_each_response_token_once_when_they_follow_each_other() -> None:
    rollout = sequence(110, range(10, 110))
    for seed in range(20):
        policy = SamplingPolicy(max_tokens=16, placement="strided", context_rows=8, seed=seed)
        supervised = np.zeros(111, int)
        for span in policy.plan(rollout, V0):
            supervised[span.start : span.stop + 1][1:] += window_mask(rollout.sampled_mask, span)[1:]
        assert supervised[10:110].tolist() == [1] * 100


def test_a_short_response_is_kept_whole_wherever_windows_are_placed() -> None:
    for placement in PLACEMENTS:
        policy = SamplingPolicy(max_tokens=50, placement=placement, context_rows=2)  # type: ignore[arg-type]
        (span,) = policy.plan(sequence(40, range(36, 40)), V0)
        predicted = window_mask(sequence(40, range(36, 40)).sampled_mask, span)[1:]
        assert predicted.sum() == 4, placement


def test_only_every_nth_version_is_collected() -> None:
    policy = SamplingPolicy(every_versions=3)
    assert [bool(policy.plan(sequence(4, range(1, 4)), TargetVersion(v))) for v in range(5)] == [
        True, False, False, True, False,
    ]  # fmt: skip


def test_a_token_budget_thins_by_hash_whatever_the_order() -> None:
    policy = SamplingPolicy(token_budget=TokenBudget(tokens=1000, expected_tokens=4000))
    kept = [i for i in range(4000) if policy.plan(sequence(4, range(1, 4), str(i)), V0)]
    assert (
        kept == [i for i in reversed(range(4000)) if policy.plan(sequence(4, range(1, 4), str(i)), V0)][::-1]
    )
    assert abs(len(kept) - 1000) < 140  # five binomial standard deviations


def test_low_acceptance_is_drawn_at_its_own_rate() -> None:
    policy = SamplingPolicy(sample_rate=0.0, low_acceptance=LowAcceptance(below=2.0, sample_rate=0.5))

    def kept(acceptance: float | None) -> int:
        rollouts = (
            replace(sequence(4, range(1, 4), str(i)), acceptance_length=acceptance) for i in range(1000)
        )
        return sum(bool(policy.plan(r, V0)) for r in rollouts)

    assert kept(2.0) == kept(None) == 0
    assert abs(kept(1.9) - 500) < 80


def test_strata_even_out_domains_and_keep_what_has_no_label() -> None:
    strata = Strata(by="domain", expected={"code": 0.8, "math": 0.2})
    policy = SamplingPolicy(strata=strata)

    def kept(domain: str | None, count: int) -> int:
        rollouts = (replace(sequence(4, range(1, 4), str(i)), domain=domain) for i in range(count))
        return sum(bool(policy.plan(r, V0)) for r in rollouts)

    assert kept("math", 200) == 200
    assert abs(kept("code", 800) - 200) < 62  # five standard deviations of 12.2
    assert kept(None, 50) == kept("prose", 50) == 50


def test_strata_by_reward_keep_the_given_shares() -> None:
    strata = Strata(
        by="reward", expected={"0": 0.5, "1": 0.5}, wanted={"0": 0.75, "1": 0.25}, reward_edges=(0.5,)
    )
    policy = SamplingPolicy(strata=strata)
    counts = [
        sum(
            bool(policy.plan(replace(sequence(4, range(1, 4), str(i)), reward=reward), V0))
            for i in range(900)
        )
        for reward in (0.0, 0.5)
    ]
    assert counts[0] == 900
    assert abs(counts[1] - 300) < 71  # five standard deviations of 14.1


def test_the_mapping_makes_the_policy_again() -> None:
    policy = SamplingPolicy(
        sample_rate=0.5, placement="strided", stride=600, context_rows=3, every_versions=2,
        token_budget=TokenBudget(10, 20), low_acceptance=LowAcceptance(2.0),
        strata=Strata(by="reward", expected={"0": 1.0, "1": 2.0}, reward_edges=(0.5,)),
    )  # fmt: skip
    assert SamplingPolicy.from_mapping(json.loads(policy.recorded)) == policy


@pytest.mark.parametrize(
    "bad",
    [
        {"stride": 5}, {"placement": "strided", "stride": 5}, {"placement": "back"}, {"context_rows": -1},
        {"every_versions": 0},
    ],
)  # fmt: skip
def test_a_placement_that_cannot_be_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must|stride"):
        SamplingPolicy(**bad)


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Strata(by="domain", expected={}),
        lambda: Strata(by="domain", expected={"a": 1.0}, wanted={"b": 1.0}),
        lambda: Strata(by="domain", expected={"a": 0.0}),
        lambda: Strata(by="reward", expected={"0": 1.0}),
        lambda: Strata(by="reward", expected={"5": 1.0}, reward_edges=(0.5,)),
        lambda: TokenBudget(0, 5),
        lambda: LowAcceptance(2.0, 0.0),
    ],
)
def test_settings_that_keep_nothing_or_contradict_are_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="strata|reward|budget|rate"):
        bad()
