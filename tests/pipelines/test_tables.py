"""What people read fits 100 columns and holds no raw JSON; what machines read is one value."""

import json
from pathlib import Path

import pytest
from command_outcome import Cli
from rich.console import Console

from features.schema import TargetVersion
from pipelines.cli import output
from pipelines.cli.rows import engine_row
from pipelines.cli.tables import MAX_COLUMNS, cell, tables

INTERVAL = {"value": 1.4213, "low": 1.3812, "high": 1.4639}


def drawn(value: object, title: str = "") -> str:
    console = Console(width=100, force_terminal=False)
    with console.capture() as captured:
        for part in tables(output.plain(value), title):
            console.print(part)
    return captured.get()


@pytest.mark.parametrize(
    ("value", "name", "text"),
    [
        (INTERVAL, "tau", "1.42 [1.38, 1.46]"),
        ({"value": 0.0412, "low": -0.01, "high": 0.09}, "gain", "0.041 [-0.010, 0.090]"),
        (3 * 2**20, "nbytes", "3.0 MiB"),
        (None, "x", "-"),
        ([], "x", "-"),
        (True, "ok", "yes"),
        (1234567, "tokens", "1,234,567"),
        ([1, 2, 3], "ids", "1, 2, 3"),
        (list(range(20)), "ids", "0, 1, 2, 3, 4, 5, 6, 7 and 12 more"),
        ({"bad_json": 2, "too_long": 1}, "quarantined", "bad_json 2, too_long 1"),
        ("a" * 64, "digest", "a" * 12),
    ],
)
def test_a_value_is_short_and_readable(value: object, name: str, text: str) -> None:
    assert cell(value, name, short=True) == text


def test_digests_are_whole_where_there_is_room() -> None:
    assert "a" * 64 in drawn({"artifact": "a" * 64})
    assert "a" * 64 not in drawn([{"artifact": "a" * 64}])


def test_text_in_brackets_is_text() -> None:
    assert "pip install 'draftlake[s3]'" in drawn([{"remedy": "pip install 'draftlake[s3]'"}])


def test_a_record_too_wide_for_a_row_becomes_a_block() -> None:
    wide = {f"field_{n}": n for n in range(MAX_COLUMNS + 1)}
    lines = drawn([wide]).splitlines()
    assert len([line for line in lines if line.startswith("field ")]) == MAX_COLUMNS + 1


def test_nested_values_are_flattened_and_lists_of_records_follow() -> None:
    text = drawn({"outer": {"inner": 1}, "rows": [{"a": 1}, {"a": 2}]})
    assert "outer.inner  1" in text
    assert "{" not in text


def test_rows_of_unequal_shape_are_drawn() -> None:
    assert "nothing" in drawn([{"a": 1, "b": "nothing"}, {"a": 2}])


def test_json_has_no_number_that_json_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    output.emit({"gap": float("nan"), "version": TargetVersion(3)}, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"gap": None, "version": 3}


def test_a_dead_engine_has_a_row_like_the_others() -> None:
    live = {
        "engine": "a", "vllm_version": "0.32.0", "method": "eagle3", "num_speculative_tokens": 3,
        "draft_artifact": None, "target_fingerprint": "f" * 64, "serves_production": True, "error": None,
    }  # fmt: skip
    dead = {"engine": "b", "serves_production": False, "error": "cannot be reached"}
    text = drawn([engine_row(live), engine_row(dead)])
    assert "as started" in text
    assert "no answer" in text


def test_what_commands_print_fits_a_terminal(cli: Cli, lake: Path) -> None:
    (digest,) = (p.name for p in (lake / "registry" / "artifacts").iterdir())
    assert cli("eval", digest, "--lake", lake).code == 0
    for argv in (
        ["ls"], ["ls", "--samples"], ["show", "lake"], ["show", "v0"], ["show", "r01"], ["explain"],
        ["registry", "ls"], ["registry", "show", digest], ["registry", "diff", digest, digest], ["status"],
        ["doctor"], ["eval", digest],
    ):  # fmt: skip
        outcome = cli(*argv, "--lake", lake)
        assert outcome.code == 0, outcome.err
        assert max(map(len, outcome.out.splitlines())) <= 100, argv
        assert "{" not in outcome.out, argv
    assert " [1." in cli("registry", "ls", "--lake", lake).out, "tau is shown with its interval"
    assert " MiB" in cli("ls", "--lake", lake).out
