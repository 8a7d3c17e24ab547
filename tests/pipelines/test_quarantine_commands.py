"""``draftlake quarantine``: what was refused, by run and reason, and tried again."""

from pathlib import Path
from typing import Any

import backfill_toy
import pytest
from backfill_toy import ToyTarget, make_lake, run, write_source
from command_outcome import Cli, objects

from features.catalog import Catalog
from features.collect.rollouts import write_rollouts
from features.lake import Lake


@pytest.fixture(autouse=True)
def _toy_target(monkeypatch: pytest.MonkeyPatch) -> None:
    backfill_toy.use_toy_target(monkeypatch.setattr)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """Four rollouts collected; one of each of four reasons refused."""
    lake = make_lake(str(tmp_path / "lake"))
    run(lake.url, write_source(tmp_path / "a.jsonl", range(4)))
    return lake


def retry_arguments(run_id: str, lake: Lake, **changes: Any) -> list[Any]:
    given = {
        "lake": lake.url, "target": "v0", "version": 0, "layer-ids": "1,2", "dtype": "float32",
        "engine-dtype": "float32",
    } | changes  # fmt: skip
    flags = [[f"--{n}"] if value is True else [f"--{n}", value] for n, value in given.items()]
    return ["quarantine", "retry", run_id, *(part for flag in flags for part in flag), "--json"]


def test_an_empty_quarantine_is_nothing_to_list(cli: Cli, tmp_path: Path) -> None:
    empty = make_lake(str(tmp_path / "empty"))
    assert cli("quarantine", "ls", "--lake", empty.url, "--json").code == 4


def test_runs_are_listed_with_reasons_and_their_records_shown_with_place(cli: Cli, lake: Lake) -> None:
    (row,) = cli("quarantine", "ls", "--lake", lake.url, "--json").json
    reasons = {"bad_json": 1, "logprob_disagreement": 1, "version_mismatch": 1, "version_missing": 1}
    assert (row["refused"], row["open"], row["resolved"], row["reasons"]) == (4, 4, 0, reasons)
    shown = cli("quarantine", "show", row["run"], "--lake", lake.url, "--json").json
    assert {(r["reason"], r["line"]) for r in shown} == {
        ("bad_json", 8), ("logprob_disagreement", 5), ("version_mismatch", 3), ("version_missing", 4)
    }  # fmt: skip
    assert all(r["detail"] and not r["resolved"] for r in shown)
    (only,) = cli(
        "quarantine", "show", row["run"], "--lake", lake.url, "--reason", "version_missing", "--json"
    ).json
    assert only["sample"]["sample_id"] == "none-a"
    assert len(only["sample"]["token_ids"]) == 15
    table = cli("quarantine", "show", row["run"], "--lake", lake.url)
    assert table.code == 0
    assert "version_missing" in table.out


def test_a_run_that_does_not_exist_and_a_reason_that_did_not_occur(cli: Cli, lake: Lake) -> None:
    unknown = cli("quarantine", "show", "no-such-run", "--lake", lake.url)
    assert unknown.code == 2
    assert "quarantine ls" in unknown.line
    (row,) = cli("quarantine", "ls", "--lake", lake.url, "--json").json
    assert (
        cli("quarantine", "show", row["run"], "--lake", lake.url, "--reason", "too_long", "--json").code == 4
    )


def test_a_retry_takes_what_passes_now_and_marks_it_and_leaves_the_rest_open(cli: Cli, lake: Lake) -> None:
    (row,) = cli("quarantine", "ls", "--lake", lake.url, "--json").json
    unchanged = cli(*retry_arguments(row["run"], lake))
    assert unchanged.code == 1, "only the one that disagrees can be tried, and it disagrees again"
    assert unchanged.json["refused"] == {"logprob_disagreement": 1}
    argv = retry_arguments(row["run"], lake, **{"take-unversioned": True, "reason": "version_missing"})
    before = objects(Path(lake.url))
    planned = cli(*argv, "--dry-run").json
    assert (planned["open"], planned["retried"], planned["not_retriable"]) == (1, 1, 0)
    assert objects(Path(lake.url)) == before
    told = cli(*argv)
    assert told.code == 0, told.err
    report = told.json
    assert (report["open"], report["retried"], report["collected"], report["resolved"]) == (1, 1, 1, 1)
    assert (report["verified"], report["unverified"]) == (0, 1)
    assert "none-a" in set(Catalog.load(lake).frame["sample_id"])
    (after,) = cli("quarantine", "ls", "--lake", lake.url, "--json").json
    assert (after["refused"], after["open"], after["resolved"]) == (4, 3, 1)
    assert "version_missing" not in after["reasons"]
    again = cli(*retry_arguments(row["run"], lake, **{"take-unversioned": True, "reason": "version_missing"}))
    assert again.code == 4, "it is resolved, so there is nothing left to try"


def test_a_retry_with_weights_with_which_nothing_agrees_takes_no_version_number(
    cli: Cli, tmp_path: Path
) -> None:
    lake = make_lake(str(tmp_path / "lake"))
    path = tmp_path / "a.jsonl"
    write_rollouts(path, [ToyTarget().rollout(n, version=None) for n in range(6)])
    run(lake.url, path)
    (row,) = cli("quarantine", "ls", "--lake", lake.url, "--json").json
    before = objects(tmp_path / "lake")
    wrong = cli(*retry_arguments(row["run"], lake, **{"take-unversioned": True, "target": "v1"}))
    assert wrong.code == 1
    assert "is still free" in wrong.err
    assert objects(tmp_path / "lake") == before
    rightly = cli(*retry_arguments(row["run"], lake, **{"take-unversioned": True}))
    assert (rightly.code, rightly.json["resolved"]) == (0, 6), rightly.err


def test_a_retry_that_was_killed_before_it_marked_anything_marks_it_next_time(
    cli: Cli, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    (row,) = cli("quarantine", "ls", "--lake", lake.url, "--json").json
    arguments = retry_arguments(row["run"], lake, **{"take-unversioned": True})
    with monkeypatch.context() as patched:
        patched.setattr("pipelines.quarantine.resolve", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert cli(*arguments).code == 130
    found = cli(*arguments).json
    assert (found["collected"], found["duplicates"], found["resolved"]) == (0, 1, 1)


def test_a_conflict_stays_open_and_writes_nothing(cli: Cli, lake: Lake, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "b.jsonl", [ToyTarget().rollout(9, sample_id="s1")])
    report = run(lake.url, tmp_path / "b.jsonl")
    assert report.quarantined == {"sample_conflict": 1}
    rows = cli("quarantine", "ls", "--lake", lake.url, "--json").json
    (conflicted,) = [r["run"] for r in rows if "sample_conflict" in r["reasons"]]
    before = objects(tmp_path / "lake")
    found = cli(*retry_arguments(conflicted, lake))
    assert found.code == 4
    assert found.json["not_retriable"] == 1
    assert objects(tmp_path / "lake") == before
