"""Refused input is kept, counted, and never overwritten."""

from pathlib import Path

import pytest

from features.errors import CorruptDataError
from features.quarantine import Refusal, list_quarantine, quarantine
from features.testing import tiny_lake

REFUSALS = [
    Refusal(
        "rollouts.jsonl",
        3,
        "version_missing",
        "expected a version",
        {"sample_id": "a", "x": [1, None, "\u2028"]},
    ),
    Refusal("rollouts.jsonl", 9, "bad_json", "cut line"),
    Refusal("stream", None, "version_missing", "expected a version"),
]


def test_refusals_are_kept_with_place_reason_and_record(tmp_path: Path) -> None:
    lake = tiny_lake(str(tmp_path), versions=0)
    assert list_quarantine(lake) == ()
    quarantine(lake, REFUSALS, "run-1")
    (run,) = list_quarantine(lake)
    assert run.run_id == "run-1"
    assert run.refusals == tuple(REFUSALS)
    assert run.counts == {"bad_json": 1, "version_missing": 2}


def test_a_rerun_with_the_same_refusals_adds_nothing_and_with_others_loses_nothing(tmp_path: Path) -> None:
    lake = tiny_lake(str(tmp_path), versions=0)
    quarantine(lake, REFUSALS, "run.1")
    quarantine(lake, REFUSALS, "run.1")
    assert len(list_quarantine(lake)) == 1
    quarantine(lake, REFUSALS[:1], "run.1")
    quarantine(lake, REFUSALS[:1], "run.1")
    assert [(run.run_id, len(run.refusals)) for run in list_quarantine(lake)] == [("run.1", 3), ("run.1", 1)]


def test_nothing_refused_writes_nothing(tmp_path: Path) -> None:
    lake = tiny_lake(str(tmp_path), versions=0)
    quarantine(lake, [], "run")
    assert lake.store.list("quarantine") == []


def test_a_record_that_json_cannot_hold_is_still_kept(tmp_path: Path) -> None:
    lake = tiny_lake(str(tmp_path), versions=0)
    odd = Refusal("x", 1, "odd", "d", {"value": float("nan"), "path": Path("/a")})
    for _ in range(2):
        quarantine(lake, [odd], "run")
    (run,) = list_quarantine(lake)
    assert run.refusals[0].sample["path"] == "/a"


def test_a_run_id_that_could_leave_its_folder_and_a_broken_file_are_refused(tmp_path: Path) -> None:
    lake = tiny_lake(str(tmp_path), versions=0)
    with pytest.raises(ValueError, match="segment"):
        quarantine(lake, REFUSALS, "../x")
    lake.store.create("quarantine/x.0.parquet", b"PAR1")
    with pytest.raises(CorruptDataError, match="quarantine"):
        list_quarantine(lake)
