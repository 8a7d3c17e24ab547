"""Evaluation: what is walked, what is left out and why, and the gain over a baseline."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from features.errors import InputError, TargetMismatchError
from training.evaluate import evaluate_draft
from training.feed import Feed
from training.loop import train_draft
from training.methods.eagle3.method import EAGLE3
from training.methods.eagle3.reference import reference_propose
from training.spec import Eagle3Spec, TrainSpec
from training.testing import LAYERS, TARGET, TARGET_CONFIG, ToyLake, make_head, make_window


def _lake(count: int = 10, *, first_seed: int = 0, **changes) -> ToyLake:
    windows = [
        make_window(
            f"s{i}", length=16, prompt=3, seed=first_seed + i, version=i % 2, group=f"g{i // 2}", predictable=True,
            domain="code" if i % 3 else "prose", **changes,
        )
        for i in range(count)
    ]  # fmt: skip
    return ToyLake(windows)


def _draft(out: Path, epochs: int) -> Path:
    lake = _lake()
    spec = TrainSpec(
        method=Eagle3Spec(ttt_steps=2),
        epochs=epochs,
        batch_tokens=96,
        learning_rate=5e-3,
        save_dtype="float32",
    )
    return train_draft(lake, lake.select(), spec, out=out, target_config=TARGET_CONFIG).folder


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(trained, hardly trained)."""
    root = tmp_path_factory.mktemp("drafts")
    return _draft(root / "good", 60), _draft(root / "poor", 1)


def _evaluate(lake: ToyLake, folder: Path, **kwargs):
    return evaluate_draft(lake, lake.select(), folder, **{"k": 3, "mode": "sampled-onehot"} | kwargs)


def test_a_trained_draft_beats_a_poor_one_and_the_interval_says_so(drafts: tuple[Path, Path]) -> None:
    report = _evaluate(_lake(), drafts[0], baseline_folder=drafts[1])
    assert report.gain is not None
    assert report.baseline_overall is not None
    assert report.gain.low > 0
    assert report.gain.value == pytest.approx(report.overall.tau.value - report.baseline_overall.tau.value)
    assert (report.head_version, report.overall.groups, report.temperature) == (1, 5, 1.0)


def test_parts_add_up_to_the_whole(drafts: tuple[Path, Path]) -> None:
    report = _evaluate(_lake(), drafts[0])
    for parts in (report.by_version, report.by_domain):
        assert sum(p.rounds for p in parts.values()) == report.overall.rounds
        assert sum(p.accepted for p in parts.values()) == report.overall.accepted
    assert set(report.by_domain) == {"code", "prose"}
    assert set(report.by_version) == {0, 1}
    assert sum(report.overall.accepted_per_position) == report.overall.accepted


def test_rounds_equal_a_draft_that_runs_one_round_at_a_time(drafts: tuple[Path, Path]) -> None:
    lake, model, k = _lake(4), EAGLE3.load(drafts[0]), 3
    feed = Feed(lake)
    rounds = accepted = 0
    for index in range(4):
        batch = feed.batch([lake.windows[index]], layer_ids=LAYERS)
        tokens = lake.windows[index].token_ids[:-1].tolist()
        newest = 3
        while newest < len(tokens) - 1:
            drafted = reference_propose(model, batch, 0, newest - 1, k)
            agree = 0
            while (
                agree < k
                and newest + 1 + agree < len(tokens)
                and drafted[agree] == tokens[newest + 1 + agree]
            ):
                agree += 1
            newest += agree + 1
            if newest >= len(tokens) - 1:
                break
            rounds, accepted = rounds + 1, accepted + agree
    report = _evaluate(lake, drafts[0])
    assert (report.overall.rounds, report.overall.accepted) == (rounds, accepted)


def test_windows_that_cannot_be_walked_are_counted_by_reason(drafts: tuple[Path, Path]) -> None:
    lake = _lake(4)
    lake.windows += [
        make_window("cut", length=16, prompt=3, start=2),
        make_window("short", length=16, prompt=3, stop=9),
        make_window("greedy", length=16, prompt=3, temperature=0.0),
        make_window("untold", length=16, prompt=3, temperature=None),
        make_window("prompt", length=16, prompt=16),
        make_window("no prompt", length=16, prompt=0),
    ]
    broken = make_window("nan", length=16, prompt=3)
    broken.final[0, 0] = np.nan
    lake.windows.append(broken)
    report = _evaluate(lake, drafts[0])
    assert report.skipped == {
        "not_a_whole_sequence": 2, "not_sampled": 1, "temperature_unknown": 1, "no_sampled_token": 1,
        "no_prompt": 1, "nonfinite_features": 1,
    }  # fmt: skip
    assert report.overall.rounds == _evaluate(_lake(4), drafts[0]).overall.rounds


def test_greedy_mode_walks_only_greedy_rollouts(drafts: tuple[Path, Path]) -> None:
    lake = _lake(4, temperature=0.0)
    assert _evaluate(lake, drafts[0], mode="greedy").mode == "greedy"
    with pytest.raises(InputError, match="not_sampled"):
        _evaluate(lake, drafts[0])


def test_a_draft_of_another_target_is_refused(drafts: tuple[Path, Path]) -> None:
    other = ToyLake(
        _lake(2).windows, {v: make_head(v, vocab=64) for v in range(2)}, replace(TARGET, vocab_size=64)
    )
    with pytest.raises(TargetMismatchError, match="vocab_size"):
        _evaluate(other, drafts[0])


def test_evaluation_repeats_itself(drafts: tuple[Path, Path]) -> None:
    first = _evaluate(_lake(), drafts[0], baseline_folder=drafts[1])
    assert first == _evaluate(_lake(), drafts[0], baseline_folder=drafts[1], batch_tokens=20)
