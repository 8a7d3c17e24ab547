"""Drift is zero between equal versions and is what was planted otherwise."""

from dataclasses import replace

import numpy as np
import pytest

from training.drift import version_drift
from training.testing import ToyLake, make_head, make_window


def _replayed(scale: float = 1.0, changed_tokens: bool = False) -> ToyLake:
    """One sample under v0, and again under v1 with states ``scale`` times as large."""
    old = make_window("s", length=10, prompt=3)
    meta = replace(old.meta, version=make_window(version=1).meta.version)
    tokens = old.token_ids.copy()
    if changed_tokens:
        tokens[5] += 1
    new = replace(
        old, meta=meta, token_ids=tokens, aux=old.aux * np.float32(scale), final=old.final * np.float32(scale)
    )
    return ToyLake([old, new], heads={0: make_head(0), 1: make_head(0)})


def test_equal_versions_do_not_drift() -> None:
    lake = _replayed()
    (drift,) = version_drift(lake, lake.select())
    assert (drift.older, drift.newer, drift.shared_tokens) == (0, 1, 10)
    assert drift.lm_head.relative_l2 == 0
    assert drift.lm_head.cosine == pytest.approx(1)
    assert drift.final is not None
    assert drift.final.relative_l2 == 0
    assert drift.kl == pytest.approx(0, abs=1e-12)
    assert drift.top1_changed == 0


def test_scaled_states_show_in_length_but_not_in_direction() -> None:
    lake = _replayed(scale=1.5)
    (drift,) = version_drift(lake, lake.select())
    assert drift.final is not None
    assert drift.aux is not None
    assert drift.final.relative_l2 == pytest.approx(0.5)
    assert drift.aux.cosine == pytest.approx(1)
    assert drift.kl is not None
    assert drift.kl > 0
    assert drift.top1_changed == 0
    assert drift.as_row()["final_relative_l2"] == drift.final.relative_l2


def test_another_answer_of_the_same_sample_is_not_compared() -> None:
    lake = _replayed(changed_tokens=True)
    (drift,) = version_drift(lake, lake.select())
    assert (drift.shared_tokens, drift.final, drift.kl) == (0, None, None)


def test_neighbours_and_the_whole_span_are_measured() -> None:
    windows = [make_window("s", version=v) for v in range(3)]
    lake = ToyLake(windows)
    assert [(d.older, d.newer) for d in version_drift(lake, lake.select())] == [(0, 1), (0, 2), (1, 2)]
