"""Sampled speculation on a CPU follows the target's distribution at the request's temperature."""

import subprocess
import sys

import pytest
import torch

from publish.vllm_plugin.cpu_sampling import repeat_for_draft_tokens


def test_each_draft_token_gets_its_requests_setting() -> None:
    settings, ends = torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 2, 5], dtype=torch.int32)
    assert repeat_for_draft_tokens(settings, ends, 5).tolist() == [0.5, 0.5, 2.0, 2.0, 2.0]


def test_the_greedy_temperature_is_replaced_before_a_division() -> None:
    settings, ends = torch.tensor([0.0, 0.8125]), torch.tensor([1, 2])
    assert repeat_for_draft_tokens(settings, ends, 2, replace_from=0, replace_to=1).tolist() == [1.0, 0.8125]


def test_integer_settings_stay_integers() -> None:
    repeated = repeat_for_draft_tokens(torch.tensor([7, 3], dtype=torch.int32), torch.tensor([1, 3]), 3)
    assert repeated.dtype is torch.int32
    assert repeated.tolist() == [7, 3, 3]


_PROBE = """
import torch
from publish.vllm_plugin import cpu_sampling
first = cpu_sampling.repair_cpu_sampling()
import vllm.v1.sample.rejection_sampler as sampler
found = sampler.expand_batch_to_tokens(torch.tensor([0.8, 0.3]), torch.tensor([3, 4], dtype=torch.int32), 4)
right = found.tolist() == torch.tensor([0.8, 0.8, 0.8, 0.3]).tolist()
print("RESULT", first, right, cpu_sampling.repair_cpu_sampling())
"""


@pytest.mark.vllm
@pytest.mark.slow
def test_after_the_repair_vllm_repeats_settings_and_nothing_is_left_to_repair() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=180, check=False
    )
    assert "RESULT True True False" in done.stdout, done.stderr[-2000:]
