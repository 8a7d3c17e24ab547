"""Intervals: ratio of sums, whole groups, pairing."""

import numpy as np
import pytest

from training.bootstrap import bootstrap_tau, paired_gain


def test_tau_is_a_ratio_of_sums_not_a_mean_of_ratios() -> None:
    interval = bootstrap_tau(np.array([1, 99]), np.array([3, 99]), k=3)
    assert interval.value == pytest.approx(1 + 102 / 100)


def test_the_same_seed_gives_the_same_interval_and_another_seed_does_not() -> None:
    rng = np.random.default_rng(0)
    rounds, accepted = rng.integers(5, 30, 40), rng.integers(0, 60, 40)
    assert bootstrap_tau(rounds, accepted, k=3, seed=1) == bootstrap_tau(rounds, accepted, k=3, seed=1)
    assert bootstrap_tau(rounds, accepted, k=3, seed=1) != bootstrap_tau(rounds, accepted, k=3, seed=2)


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(7)
    covered = 0
    for _ in range(200):
        rounds = rng.integers(20, 60, 50)
        accepted = rng.binomial(rounds, rng.beta(8, 8, 50))  # groups differ; overall mean 0.5
        interval = bootstrap_tau(rounds, accepted, k=1, resamples=400)
        covered += interval.low <= 1.5 <= interval.high
    assert covered >= 178  # binomial(200, 0.95) lies below 178 with probability 3e-4


def test_pairing_sees_a_gain_that_two_separate_intervals_would_hide() -> None:
    rng = np.random.default_rng(3)
    rounds = np.full(60, 50)
    baseline = rng.integers(10, 120, 60)  # groups differ far more than drafts do
    better = baseline + rng.integers(2, 5, 60)
    gain = paired_gain(rounds, better, rounds, baseline, k=3)
    apart = [bootstrap_tau(rounds, x, k=3) for x in (better, baseline)]
    assert gain.low > 0
    assert apart[0].low < apart[1].high


def test_a_draft_gains_nothing_over_itself() -> None:
    rounds, accepted = np.array([4, 7, 9]), np.array([3, 8, 2])
    gain = paired_gain(rounds, accepted, rounds, accepted, k=3)
    assert (gain.value, gain.low, gain.high) == (0, 0, 0)


def test_one_group_says_nothing_about_the_spread() -> None:
    interval = bootstrap_tau(np.array([10, 0]), np.array([20, 0]), k=3)
    assert (interval.value, interval.low, interval.high) == (3, 1, 4)
    gain = paired_gain(np.array([10]), np.array([20]), np.array([10]), np.array([5]), k=3)
    assert (gain.low, gain.high) == (-3, 3)
