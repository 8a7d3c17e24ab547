"""A fault planted in what a user hands to ``draftlake collect`` is caught by the right proof, loudly."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from command_outcome import Cli, collect_arguments, objects

from features.collect.rollouts import Rollout
from pipelines import collect as collecting

ROLLOUTS = 24
NUM_LAYERS = 8


def require_refused(cli: Cli, lake: Path, argv: list[str], reason: str) -> None:
    """All of the rollouts are in quarantine for ``reason``, none in the lake, and the exit code says so."""
    outcome = cli(*argv, "--json")
    assert outcome.code == 1
    assert outcome.json["quarantined"] == {reason: ROLLOUTS}
    assert (outcome.json["windows"], outcome.json["fragments"]) == (0, 0)
    (said,) = [line for line in outcome.err.splitlines() if line.startswith("draftlake: ")]
    assert f"{reason} {ROLLOUTS}" in said
    assert "draftlake show quarantine" in said
    assert not (lake / "data").exists()
    kept = cli("show", "quarantine", "--lake", lake, "--json").json
    assert [row["reason"] for row in kept] == [reason] * ROLLOUTS
    assert all(row["detail"] for row in kept)


def test_nothing_is_refused_without_a_fault(
    cli: Cli, empty_lake: Path, rollout_file: Path, target: Path
) -> None:
    outcome = cli(*collect_arguments(empty_lake, rollout_file, target), "--json")
    assert (outcome.code, outcome.json["verified"], outcome.json["quarantined"]) == (0, ROLLOUTS, {})


def test_logprobs_of_other_weights(
    cli: Cli, empty_lake: Path, rewritten: Callable[..., Path], moved_target: Path
) -> None:
    """Sampled by version 0, labelled and collected as version 1."""
    argv = collect_arguments(empty_lake, rewritten(version=1), moved_target, version=1)
    require_refused(cli, empty_lake, argv, "logprob_disagreement")


def test_a_number_that_was_given_to_the_wrong_weights_stays_free(
    cli: Cli, empty_lake: Path, rollout_file: Path, target: Path, moved_target: Path
) -> None:
    before = objects(empty_lake)
    assert cli(*collect_arguments(empty_lake, rollout_file, moved_target)).code == 1
    assert [
        name for name in objects(empty_lake) if name not in before and "quarantine/" not in str(name)
    ] == []
    outcome = cli(*collect_arguments(empty_lake, rollout_file, target), "--json")
    assert (outcome.code, outcome.json["verified"]) == (0, ROLLOUTS)


def test_rollouts_of_which_only_later_ones_agree_take_no_number(
    cli: Cli, empty_lake: Path, rewritten: Callable[..., Path], target: Path
) -> None:
    count = iter(range(ROLLOUTS))

    def first_are_wrong(rollout: Rollout) -> Rollout:
        values = list(rollout.logprobs or ())
        return replace(rollout, logprobs=tuple(values[-1:] + values[:-1])) if next(count) < 20 else rollout

    before = objects(empty_lake)
    outcome = cli(*collect_arguments(empty_lake, rewritten(first_are_wrong), target))
    assert outcome.code == 1
    assert "several versions under one number" in outcome.err
    assert objects(empty_lake) == before


@pytest.mark.parametrize("shift", [-1, 1])
def test_logprobs_shifted_by_one(
    cli: Cli, empty_lake: Path, rewritten: Callable[..., Path], target: Path, shift: int
) -> None:
    def moved(rollout: Rollout) -> Rollout:
        values = list(rollout.logprobs or ())
        return replace(rollout, logprobs=tuple(values[-shift:] + values[:-shift]))

    argv = collect_arguments(empty_lake, rewritten(moved), target)
    require_refused(cli, empty_lake, argv, "logprob_disagreement")


def test_rollouts_of_another_version(
    cli: Cli, empty_lake: Path, rewritten: Callable[..., Path], target: Path
) -> None:
    argv = collect_arguments(empty_lake, rewritten(version=3), target)
    require_refused(cli, empty_lake, argv, "version_mismatch")


def test_rollouts_of_no_version_are_never_taken_as_current(
    cli: Cli, empty_lake: Path, rewritten: Callable[..., Path], target: Path
) -> None:
    argv = collect_arguments(empty_lake, rewritten(version=None), target)
    require_refused(cli, empty_lake, argv, "version_missing")


def plant_tap(monkeypatch: pytest.MonkeyPatch, forward: Any) -> None:
    """Make ``draftlake collect`` read features through ``forward``, which is probed as it is."""
    from features.collect.taps import hf

    tap = ModuleType("planted_pipeline_tap")
    tap.forward_features = forward  # type: ignore[attr-defined]
    tap.aux_probe = lambda model, ids, tokens: hf.aux_probe(model, ids, tokens, tap=forward)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, tap.__name__, tap)
    monkeypatch.setattr(
        collecting, "collect_rollouts", partial(collecting.collect_rollouts, tap=tap.__name__)
    )


@pytest.mark.parametrize("off", [-1, 1])
def test_a_tap_whose_layer_ids_are_off_by_one(
    cli: Cli,
    empty_lake: Path,
    rollout_file: Path,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    off: int,
) -> None:
    from features.collect.taps import hf

    def forward(model: Any, batch: Any, ids: Sequence[int]) -> Any:
        return hf.forward_features(model, batch, [k + off for k in ids])

    plant_tap(monkeypatch, forward)
    before = objects(empty_lake)
    outcome = cli(*collect_arguments(empty_lake, rollout_file, target))
    assert outcome.code == 1
    (said,) = [line for line in outcome.err.splitlines() if line.startswith("draftlake: ")]
    assert "aux probe" in said
    assert "layer id" in said
    assert objects(empty_lake) == before, "not even the version is registered"


def test_final_rows_taken_before_the_final_norm(
    cli: Cli, empty_lake: Path, rollout_file: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from features.collect.taps import hf

    def forward(model: Any, batch: Any, ids: Sequence[int]) -> Any:
        right, last = (hf.forward_features(model, batch, which) for which in (ids, [NUM_LAYERS]))
        return [(aux, stream) for (aux, _), (stream, _) in zip(right, last, strict=True)]

    plant_tap(monkeypatch, forward)
    argv = collect_arguments(empty_lake, rollout_file, target)
    require_refused(cli, empty_lake, argv, "logprob_disagreement")


def test_refused_rollouts_do_not_keep_right_ones_out(
    cli: Cli, empty_lake: Path, rewritten: Callable[..., Path], target: Path
) -> None:
    def some_of_another_version(rollout: Rollout) -> Rollout:
        return replace(rollout, version=1) if rollout.sample_id < "r05" else rollout

    path = rewritten(some_of_another_version)
    argv = collect_arguments(empty_lake, path, target)
    outcome = cli(*argv, "--json")
    assert (outcome.code, outcome.json["collected"]) == (0, ROLLOUTS - 5)
    assert outcome.json["quarantined"] == {"version_mismatch": 5}
    before = objects(empty_lake)
    again = cli(*argv, "--json")
    assert (again.code, again.json["duplicates"]) == (4, ROLLOUTS - 5)
    assert objects(empty_lake) == before
