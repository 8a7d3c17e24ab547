"""import, train, eval, approve, reject and registry on the collected lake."""

from pathlib import Path
from typing import Any

import pytest
from command_outcome import Cli, collect_arguments, objects

import pipelines.hooks


@pytest.fixture
def shipped(cli: Cli, lake: Path) -> str:
    """The draft that the lake came with."""
    (only,) = cli("registry", "ls", "--lake", lake, "--json").json
    return str(only["digest"])


@pytest.fixture
def trained(cli: Cli, lake: Path, small_config: Path) -> dict[str, Any]:
    done = cli("train", *selection(lake), "--config", small_config, "--json")
    assert done.code == 0, done.err
    return dict(done.json)


def selection(lake: Path) -> list[Any]:
    return ["--lake", lake, "--first-version", 0, "--stop-version", 1]


def test_importing_twice_gives_one_candidate(cli: Cli, lake: Path, draft: Path, shipped: str) -> None:
    before = objects(lake)
    again = cli("import", draft, "--lake", lake, "--json")
    assert (again.code, again.json) == (0, {"artifact": shipped})
    assert objects(lake) == before


def test_a_dry_run_of_train_says_what_it_would_read_and_writes_nothing(
    cli: Cli, lake: Path, small_config: Path
) -> None:
    before = objects(lake)
    plan = cli("train", *selection(lake), "--config", small_config, "--dry-run", "--json")
    explained = cli("explain", *selection(lake), "--split", "train", "--json")
    assert (plan.code, plan.json) == (0, explained.json)
    assert objects(lake) == before


def test_a_trained_draft_is_a_candidate_that_names_what_it_learned_from(
    cli: Cli, lake: Path, trained: dict[str, Any]
) -> None:
    assert (trained["steps"], trained["counts"]["skipped_steps"]) == (2, 0)
    shown = cli("registry", "show", trained["artifact"][:8], "--lake", lake, "--json").json
    assert shown["state"] == "candidate"
    assert shown["manifest"]["lake_revision"] == trained["lake_revision"]
    assert shown["manifest"]["spec"]["max_steps"] == 2
    assert (lake / "revisions" / f"{trained['lake_revision']}.txt").is_file()


def test_equal_training_gives_the_equal_artifact(
    cli: Cli, lake: Path, trained: dict[str, Any], small_config: Path
) -> None:
    again = cli("train", *selection(lake), "--config", small_config, "--json")
    assert again.json["artifact"] == trained["artifact"]


def test_a_warm_start_names_its_parent(cli: Cli, lake: Path, shipped: str, small_config: Path) -> None:
    warm = cli("train", *selection(lake), "--config", small_config, "--parent", shipped[:8], "--json")
    assert warm.code == 0, warm.err
    rows = cli("registry", "ls", "--lake", lake, "--json").json
    assert {row["digest"]: row["parent"] for row in rows} == {shipped: None, warm.json["artifact"]: shipped}


def test_a_warm_start_keeps_its_parents_training_spec_where_the_config_is_silent(
    cli: Cli, lake: Path, shipped: str, tmp_path: Path
) -> None:
    config = tmp_path / "two_steps.yaml"
    config.write_text("max_steps: 2\nmethod: {ttt_steps: 2}\n")
    done = cli("train", *selection(lake), "--parent", shipped[:8], "--config", config, "--json")
    assert done.code == 0, done.err
    specs = [
        cli("registry", "show", digest, "--lake", lake, "--json").json["manifest"]["spec"]
        for digest in (shipped, done.json["artifact"])
    ]
    expected = specs[0] | {"max_steps": 2, "method": specs[0]["method"] | {"ttt_steps": 2}}
    assert specs[1] == expected
    assert specs[1]["save_dtype"] == "float32"


def test_the_epochs_option_overrules_the_config(cli: Cli, lake: Path, small_config: Path) -> None:
    done = cli("train", *selection(lake), "--config", small_config, "--epochs", 3, "--json")
    shown = cli("registry", "show", done.json["artifact"], "--lake", lake, "--json").json
    assert shown["manifest"]["spec"]["epochs"] == 3


def test_an_evaluation_is_filed_and_shown(
    cli: Cli, lake: Path, shipped: str, trained: dict[str, Any]
) -> None:
    done = cli("eval", shipped[:8], "--baseline", trained["artifact"][:8], "--lake", lake, "--json")
    assert done.code == 0, done.err
    report = done.json
    assert report["gain"]["low"] > 0, "a draft of thousands of steps beats one of two"
    assert report["overall"]["tau"]["value"] > 1.2
    assert (report["split"], report["head_version"]) == ("held_out", 0)
    rows = {row["digest"]: row for row in cli("registry", "ls", "--lake", lake, "--json").json}
    assert rows[shipped]["tau"] == report["overall"]
    assert rows[trained["artifact"]]["tau"] is None


def test_parts_of_rollouts_are_counted_as_skipped_and_alone_are_refused(
    cli: Cli, empty_lake: Path, draft: Path, rollout_file: Path, target: Path
) -> None:
    digest = cli("import", draft, "--lake", empty_lake, "--json").json["artifact"]
    arguments = collect_arguments(empty_lake, rollout_file, target)
    assert cli(*arguments, "--max-tokens", 16).code == 0
    before = objects(empty_lake)
    refused = cli("eval", digest, "--lake", empty_lake)
    assert refused.code == 2
    assert "--max-tokens 32" in refused.line
    assert objects(empty_lake) == before
    assert cli(*arguments, "--max-tokens", 32).code == 0
    assert cli("eval", digest, "--lake", empty_lake, "--json").json["skipped"] == {"not_a_whole_sequence": 8}


def test_a_gate_refuses_what_was_not_measured(cli: Cli, lake: Path, shipped: str) -> None:
    before = objects(lake)
    refused = cli("approve", shipped, "--reason", "looks good", "--lake", lake)
    assert refused.code == 3
    assert refused.out == ""
    assert "draftlake eval" in refused.err
    assert cli("approve", shipped, "--reason", "looks good", "--dry-run", "--lake", lake).code == 3
    assert objects(lake) == before


def test_a_gate_refuses_what_is_not_better_and_gives_its_reasons(
    cli: Cli, lake: Path, shipped: str, trained: dict[str, Any]
) -> None:
    cli("eval", trained["artifact"], "--baseline", shipped, "--lake", lake)
    before = objects(lake)
    asked = cli("approve", trained["artifact"], "--reason", "hope", "--dry-run", "--lake", lake, "--json")
    assert (asked.code, asked.json["passed"]) == (3, False)
    assert "gain" in {check["name"] for check in asked.json["checks"] if not check["passed"]}
    assert objects(lake) == before, "asking files nothing"
    refused = cli("approve", trained["artifact"], "--reason", "hope", "--lake", lake, "--json")
    assert (refused.code, refused.out) == (3, "")
    assert "REFUSED: gain" in refused.err


def test_force_overrules_the_gate_and_is_recorded(cli: Cli, lake: Path, shipped: str) -> None:
    arguments = ("approve", shipped, "--reviewer", "ada", "--reason", "first draft", "--lake", lake, "--json")
    done = cli(*arguments, "--force")
    assert (done.code, done.json["state"]) == (0, "approved")
    shown = cli("registry", "show", shipped, "--lake", lake, "--json").json
    (decision,) = [e["document"] for e in shown["evidence"] if e["kind"] == "decision"]
    assert (decision["forced"], decision["reviewer"]) == (True, "ada")


def test_a_rejected_draft_stays_rejected(cli: Cli, lake: Path, shipped: str) -> None:
    done = cli("reject", shipped, "--reason", "worse on prose", "--lake", lake, "--json")
    assert (done.code, done.json["state"]) == (0, "rejected")
    (row,) = cli("registry", "ls", "--lake", lake, "--json").json
    assert row["state"] == "rejected"


def test_hooks_hear_of_decisions_by_full_digest(
    cli: Cli, lake: Path, shipped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[str, str]] = []
    hook = pipelines.hooks.Hooks(on_decision=lambda *told: heard.append(told))
    monkeypatch.setattr(pipelines.hooks, "load_hooks", lambda: (hook,))
    cli("approve", shipped[:8], "--force", "--reason", "first", "--lake", lake)
    cli("reject", shipped[:8], "--reason", "second thoughts", "--lake", lake)
    assert heard == [(shipped, "approve"), (shipped, "reject")]


def test_diff_names_what_differs(cli: Cli, lake: Path, shipped: str, trained: dict[str, Any]) -> None:
    found = cli("registry", "diff", shipped[:8], trained["artifact"][:8], "--lake", lake, "--json").json
    changed = {change["key"] for change in found["manifest"]}
    assert {"steps", "spec.max_steps"} <= changed
    assert found["tensors"]
    same = cli("registry", "diff", shipped, shipped, "--lake", lake, "--json").json
    assert (same["config"], same["manifest"], same["tensors"]) == ([], [], [])


def test_status_without_engines_names_what_is_in_production(cli: Cli, lake: Path) -> None:
    shown = cli("status", "--lake", lake, "--json")
    assert shown.code == 0
    assert shown.json == {"lake": str(lake), "newest_version": 0, "production": {}, "engines": []}
