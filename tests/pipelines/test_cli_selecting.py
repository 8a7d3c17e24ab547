"""Options that narrow a selection: each leaves the windows it names, on every command that takes them."""

from dataclasses import fields
from pathlib import Path

import pytest
from command_outcome import Cli

from features.lake import Lake
from features.schema import SelectionFilter, TargetVersion
from features.testing import TINY_TARGET, register_tiny_version, tiny_head, tiny_window
from features.windows import Window
from features.writer import write_fragment
from pipelines.cli.selecting import OPTIONS
from pipelines.narrowing import Narrowing

PER_VERSION = 4
FACTS = ("reward", "acceptance_length", "acceptance_rate")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three versions of four windows; the fourth of each knows no reward and no acceptance."""
    lake = Lake.init(str(tmp_path_factory.mktemp("selecting") / "lake"), TINY_TARGET)
    for number in range(3):
        head = tiny_head(number)
        register_tiny_version(lake, number, head)
        windows: list[Window] = []
        for sample in range(PER_VERSION):
            meta = dict.fromkeys(FACTS, sample / 2 if sample < 3 else None) | {
                "domain": "code" if sample % 2 else "prose",
                "group_id": f"g{sample // 2}",
            }
            windows.append(
                tiny_window(head, version=number, sample=sample, num_rows=8 + sample, **meta)  # type: ignore[arg-type]
            )
        write_fragment(
            lake, version=TargetVersion(number), head_id=head.head_id, plan_id=f"plan-{number}",
            windows=windows, writer_id=f"writer-{number}",
        )  # fmt: skip
    return lake.url


@pytest.mark.parametrize(
    ("options", "windows"),
    [
        ((), 12),
        (("--group", "g0"), 6),
        (("--group", "g0", "--group", "g1"), 12),
        (("--domain", "code"), 6),
        (("--domain", "none"), 0),
        (("--writer", "writer-1"), 4),
        (("--newest-versions", 2), 8),
        (("--newest-versions", 2, "--stop-version", 2), 4),
        (("--min-reward", 0.5), 6),
        (("--max-reward", 0.5), 6),
        (("--min-reward", 0.5, "--max-reward", 0.5), 3),
        (("--min-acceptance-length", 1), 3),
        (("--max-acceptance-length", 0), 3),
        (("--min-acceptance-rate", 1), 3),
        (("--max-acceptance-rate", 0), 3),
        (("--min-tokens", 10), 6),
        (("--max-tokens", 8), 3),
        (("--whole-sequences-only",), 12),
        (("--max-windows", 5), 5),
        (("--domain", "code", "--min-tokens", 10, "--newest-versions", 1), 1),
    ],
    ids=str,
)
def test_each_option_leaves_the_windows_it_names(
    cli: Cli, url: str, options: tuple[object, ...], windows: int
) -> None:
    done = cli("explain", "--lake", url, *options, "--json")
    assert (done.code, done.json["windows"]) == (0 if windows else 4, windows)


def test_samples_are_taken_by_their_ids(cli: Cli, url: str) -> None:
    ids = [row["sample_id"] for row in cli("ls", "--samples", "--lake", url, "--json").json]
    done = cli("explain", "--sample", ids[0], "--sample", ids[-1], "--lake", url, "--json")
    assert done.json["windows"] == ids.count(ids[0]) + ids.count(ids[-1])


def test_explain_states_the_whole_cost(cli: Cli, url: str) -> None:
    plan = cli("explain", "--newest-versions", 2, "--lake", url, "--json").json
    tokens = 2 * sum(8 + sample for sample in range(PER_VERSION))
    per_row = tiny_window(tiny_head()).aux[0].nbytes + tiny_window(tiny_head()).final[0].nbytes
    assert plan == {
        "windows": 8, "tokens": tokens, "nbytes": tokens * per_row, "versions": [1, 2], "heads_missing": [],
        "heads_present": [1, 2], "fragments": 2, "requests": 2 * 8 + 3 * 2,
    }  # fmt: skip
    shown = cli("explain", "--newest-versions", 2, "--lake", url).out
    assert all(word in shown for word in ("heads present", "requests", "fragments"))


def test_bounds_that_leave_nothing_are_refused_in_one_line(cli: Cli, url: str) -> None:
    refused = cli("explain", "--min-reward", 2, "--max-reward", 1, "--lake", url)
    assert refused.code == 2
    assert "min_reward 2 is above max_reward 1" in refused.line


def test_every_field_of_a_filter_is_an_option() -> None:
    elsewhere = {"versions", "split", "held_out_percent", "verified_only"}
    assert (
        set(OPTIONS) == set(Narrowing.model_fields) == {f.name for f in fields(SelectionFilter)} - elsewhere
    )


def test_train_takes_the_same_options_as_explain(cli: Cli, lake: Path) -> None:
    narrowing = ("--domain", "code", "--max-windows", 3, "--max-tokens", 64)
    common = ("--lake", lake, "--first-version", 0, "--stop-version", 1, "--json")
    explained = cli("explain", *common, "--split", "train", "--verified-only", *narrowing).json
    assert explained["windows"] == 3
    assert cli("train", *common, *narrowing, "--dry-run").json == explained
