"""The z-test of sampled tokens: silent for what was sampled as recorded, loud for what was not."""

from dataclasses import replace

import numpy as np
import pytest
from collect_toy_target import ToyTarget

from features.collect.rollouts import Rollout
from features.collect.sampling_proof import SamplingEvidence, sampling_evidence

ROLLOUTS = [ToyTarget().rollout(n, response=40) for n in range(16)]


def evidence(rollouts: list[Rollout], target: ToyTarget) -> SamplingEvidence:
    parts = [sampling_evidence(r, target.final(r.token_ids), target.head) for r in rollouts]
    return sum(parts, SamplingEvidence())


def test_tokens_that_were_sampled_as_recorded_are_not_suspicious() -> None:
    found = evidence(ROLLOUTS, ToyTarget())
    assert found.tokens == 16 * 40
    assert abs(found.z or 99) < 4
    assert not found.suspicious


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_a_wrong_temperature_is_suspicious_though_every_raw_logprob_agrees(temperature: float) -> None:
    found = evidence([replace(r, temperature=temperature) for r in ROLLOUTS], ToyTarget())
    assert found.suspicious
    assert (found.z or 0) * (temperature - 1) > 0, (
        "sampled colder than recorded: likelier tokens than expected"
    )


def test_other_weights_and_edited_tokens_are_suspicious_without_any_logprob() -> None:
    silent = [replace(r, logprobs=None) for r in ROLLOUTS]
    assert evidence(silent, ToyTarget(version=1)).suspicious
    rng = np.random.default_rng(0)
    noise = [
        replace(r, token_ids=r.token_ids[:3] + tuple(int(t) for t in rng.integers(0, 48, 40))) for r in silent
    ]
    assert evidence(noise, ToyTarget()).suspicious


@pytest.mark.parametrize(
    "unknown",
    [{"temperature": None}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_p": None}, {"top_k": 20}],
)
def test_nothing_is_said_where_the_distribution_is_not_the_heads(unknown: dict[str, float | None]) -> None:
    found = evidence([replace(r, **unknown) for r in ROLLOUTS], ToyTarget())
    assert (found.tokens, found.z, found.suspicious) == (0, None, False)


def test_few_tokens_are_never_suspicious() -> None:
    found = evidence([replace(r, temperature=3.0) for r in ROLLOUTS[:2]], ToyTarget())
    assert found.tokens == 80
    assert not found.suspicious
