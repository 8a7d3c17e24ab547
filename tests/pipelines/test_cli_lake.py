"""init, doctor, collect, ls, show and explain on the shipped target."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_outcome import Cli, collect_arguments, objects

from features.storage import LocalStore
from pipelines import collect as collecting

DRAFTLAKE = Path(sys.executable).with_name("draftlake")
WINDOWS, TOKENS = 24, 24 * 32


def test_init_creates_a_lake_once_and_is_harmless_again(cli: Cli, target: Path, tmp_path: Path) -> None:
    arguments = ("init", tmp_path / "new", "--target", target, "--target-id", "tiny", "--json")
    first = cli(*arguments)
    before = objects(tmp_path / "new")
    again = cli(*arguments)
    assert (first.code, again.code) == (0, 0)
    assert first.json == again.json
    assert first.json["num_layers"] == 8
    assert objects(tmp_path / "new") == before
    assert "lake.json" in before


def test_a_dry_run_of_collect_counts_what_collect_then_does_and_writes_nothing(
    cli: Cli, empty_lake: Path, rollout_file: Path, target: Path, moved_target: Path
) -> None:
    arguments = collect_arguments(empty_lake, rollout_file, target)
    before = objects(empty_lake)
    plan = cli(*arguments, "--dry-run", "--json")
    assert plan.code == 0
    assert objects(empty_lake) == before
    done = cli(*arguments, "--json")
    assert done.code == 0, done.err
    for name in ("windows", "tokens", "nbytes"):
        assert plan.json[name] == done.json[name]
    assert done.json["version"] == 0
    assert (done.json["windows"], done.json["tokens"], done.json["verified"]) == (WINDOWS, TOKENS, WINDOWS)


def test_the_console_script_gives_one_json_value_and_keeps_its_talk_on_stderr(
    empty_lake: Path, rollout_file: Path, target: Path
) -> None:
    done = subprocess.run(
        [str(DRAFTLAKE), *collect_arguments(empty_lake, rollout_file, target), "--json"],
        capture_output=True, text=True, timeout=300, check=False, cwd="/",
        env=os.environ | {"OMP_NUM_THREADS": "1", "DRAFTLAKE_LOG": "INFO"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    assert '"windows": 24' in done.stdout
    assert "aux probe of v000000000 passed" in done.stderr


def test_collecting_again_has_nothing_to_do(cli: Cli, lake: Path, rollout_file: Path, target: Path) -> None:
    before = objects(lake)
    again = cli(*collect_arguments(lake, rollout_file, target), "--json")
    assert again.code == 4
    assert again.json["duplicates"] == WINDOWS
    assert objects(lake) == before


def test_a_sampling_policy_keeps_its_share(
    cli: Cli, empty_lake: Path, rollout_file: Path, target: Path
) -> None:
    arguments = collect_arguments(empty_lake, rollout_file, target)
    plan = cli(*arguments, "--sample-rate", 0.5, "--max-tokens", 16, "--dry-run", "--json").json
    assert 0 < plan["windows"] < WINDOWS
    assert plan["tokens"] <= 16 * plan["windows"]


def test_ls_counts_versions_and_lists_samples(cli: Cli, lake: Path) -> None:
    (row,) = cli("ls", "--lake", lake, "--json").json
    assert row == row | {
        "version": 0,
        "windows": WINDOWS,
        "tokens": TOKENS,
        "groups": 12,
        "verified": WINDOWS,
    }
    samples = cli("ls", "--samples", "--lake", lake, "--json").json
    assert len(samples) == WINDOWS
    assert {s["verification"] for s in samples} == {"verified"}
    assert cli("ls", "--samples", "--version", 1, "--lake", lake, "--json").json == []


def test_ls_of_an_empty_lake_says_none(cli: Cli, empty_lake: Path) -> None:
    assert "none" in cli("ls", "--lake", empty_lake).out
    assert cli("ls", "--lake", empty_lake, "--json").json == []


def test_the_lake_may_come_from_the_environment(
    cli: Cli, lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTLAKE_LAKE", str(lake))
    assert len(cli("ls", "--json").json) == 1


def test_show_tells_of_the_lake_a_version_and_a_sample(cli: Cli, lake: Path) -> None:
    whole = cli("show", "lake", "--lake", lake, "--json").json
    assert (whole["windows"], whole["versions"], whole["target"]["target_id"]) == (WINDOWS, [0], "tiny")
    version = cli("show", "v0", "--lake", lake, "--json").json
    assert version["record"]["version"] == 0
    assert [f["layer_ids"] for f in version["fragments"]] == [[2, 4, 5]]
    (window,) = cli("show", "r03", "--lake", lake, "--json").json
    assert (window["sample_id"], window["num_rows"], window["num_sampled"]) == ("r03", 32, 24)


def test_explain_adds_the_splits_up_to_the_whole(cli: Cli, lake: Path) -> None:
    whole = cli("explain", "--lake", lake, "--json").json
    parts = [cli("explain", "--split", s, "--lake", lake, "--json").json for s in ("train", "held_out")]
    assert whole["windows"] == WINDOWS == sum(part["windows"] for part in parts)
    assert whole["nbytes"] == TOKENS * 4 * 128 * 4
    assert all(part["windows"] > 0 for part in parts)


def test_explaining_an_empty_selection_is_nothing_to_do(cli: Cli, lake: Path) -> None:
    nothing = cli("explain", "--first-version", 5, "--lake", lake, "--json")
    assert (nothing.code, nothing.json["windows"]) == (4, 0)


def test_explain_names_versions_whose_head_is_missing(cli: Cli, lake: Path) -> None:
    for blob in (lake / "blobs").iterdir():
        blob.unlink()
    assert cli("explain", "--lake", lake, "--json").json["heads_missing"] == [0]


def test_doctor_finds_the_lake_well_and_leaves_nothing_behind(cli: Cli, lake: Path) -> None:
    before = objects(lake)
    healthy = cli("doctor", "--lake", lake, "--json")
    assert (healthy.code, healthy.json["ok"]) == (0, True)
    found = {finding["what"]: finding["found"] for finding in healthy.json["findings"]}
    assert found["create-if-absent"] == "1 of 4 racing creates succeeded"
    assert objects(lake) == before


def test_a_dry_doctor_writes_no_probe(cli: Cli, lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a dry run writes nothing")

    monkeypatch.setattr(LocalStore, "create", refuse)
    dry = cli("doctor", "--lake", lake, "--dry-run", "--json")
    assert (dry.code, dry.json["ok"]) == (0, True)
    found = {finding["what"]: finding["found"] for finding in dry.json["findings"]}
    assert found["create-if-absent"].startswith("not checked")


def test_doctor_names_what_is_ill(cli: Cli, tmp_path: Path) -> None:
    ill = cli("doctor", "--lake", tmp_path / "none", "--engine", "nowhere", "--json")
    assert (ill.code, ill.json["ok"]) == (1, False)
    failed = {f["what"]: f["found"] for f in ill.json["findings"] if not f["ok"]}
    assert set(failed) == {"lake", "engine nowhere"}
    assert "no address" in failed["engine nowhere"]


def test_doctor_says_when_it_may_not_write(cli: Cli, lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr("features.storage.LocalStore.create", refuse)
    ill = cli("doctor", "--lake", lake, "--json")
    (finding,) = [f for f in ill.json["findings"] if not f["ok"]]
    assert (ill.code, finding["what"]) == (1, "create-if-absent")
    assert "read-only" in finding["found"]


def test_doctor_refuses_a_store_that_overwrites(
    cli: Cli, lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overwrite(store: Any, path: str, data: bytes) -> None:
        target = Path(store.url) / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)

    monkeypatch.setattr("features.storage.LocalStore.create", overwrite)
    ill = cli("doctor", "--lake", lake, "--json")
    (finding,) = [f for f in ill.json["findings"] if not f["ok"]]
    assert (ill.code, finding["what"]) == (1, "create-if-absent")
    assert "conditional writes" in finding["remedy"]


def test_a_bad_line_is_kept_with_its_reason_and_the_others_are_collected(
    cli: Cli, empty_lake: Path, rewritten: Callable[..., Path], target: Path
) -> None:
    path = rewritten()
    path.write_text(path.read_text() + '{"sample_id": "cut", "token_ids": [1, 2\n')
    done = cli(*collect_arguments(empty_lake, path, target), "--json")
    assert (done.code, done.json["collected"], done.json["quarantined"]) == (0, WINDOWS, {"bad_json": 1})
    assert "draftlake show quarantine" in done.err
    (kept,) = cli("show", "quarantine", "--lake", empty_lake, "--json").json
    assert (kept["line"], kept["reason"]) == (WINDOWS + 1, "bad_json")


def test_features_are_read_back_as_they_were_computed(lake: Path, target: Path) -> None:
    import numpy as np

    from features.catalog import Catalog
    from features.collect.taps.hf import forward_features
    from features.lake import Lake

    opened = Lake.open(str(lake))
    row = Catalog.load(opened).frame.to_dicts()[0]
    window = opened.read_window(row)
    ids = [window.token_ids[:-1].tolist()]
    ((aux, final),) = forward_features(collecting.load_target(target), ids, window.layout.layer_ids)
    np.testing.assert_allclose(window.aux, aux, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(window.final, final, rtol=1e-4, atol=1e-5)
