"""SIGKILL before and after every step on disk: afterwards the old state or the new one, nothing between."""

import os
from pathlib import Path

import numpy as np
import pytest

from features.catalog import Catalog
from features.check import check_lake
from features.lake import Lake
from features.schema import SelectionFilter
from features.testing import TINY_TARGET, commit_tiny, tiny_head, tiny_window
from features.testing_crash import kill_everywhere
from features.windows import Window

HEAD = tiny_head()
FIRST = [tiny_window(HEAD, sample=sample, num_rows=6 + sample) for sample in range(3)]
SECOND = [tiny_window(HEAD, sample=sample, num_rows=6 + sample) for sample in range(10, 12)]
LEFTOVERS = {"orphan_data", "temporary_file"}

PREPARE = """
from features.testing import *
from features.lake import Lake
lake, head = Lake.init(url, TINY_TARGET), tiny_head()
head_id = register_tiny_version(lake, 0, head)
commit_tiny(lake, 0, head_id, [tiny_window(head, sample=s, num_rows=6 + s) for s in range(3)])
"""
COMMIT = """
from features.testing import *
from features.lake import Lake
lake, head = Lake.open(url), tiny_head()
commit_tiny(lake, 0, head.head_id, [tiny_window(head, sample=s, num_rows=6 + s) for s in range(10, 12)])
"""
REGISTER = """
from features.testing import *
from features.lake import Lake
register_tiny_version(Lake.open(url), 1, tiny_head(1))
"""
INIT = """
from features.testing import *
from features.lake import Lake
Lake.init(url, TINY_TARGET)
"""


def deaths(prepare: str, act: str, folder: Path) -> list[tuple[str, Path]]:
    """Moments and what was left: one per state of the disk; all of them, doubles too, in ``make soak``."""
    return kill_everywhere(prepare, act, folder, every="DRAFTLAKE_SOAK" in os.environ)


def windows_of(lake: Lake) -> list[Window]:
    return [lake.read_window(row) for row in Catalog.load(lake).select(SelectionFilter()).rows]


def assert_equal(found: list[Window], expected: list[Window]) -> None:
    assert [w.meta.sample_id for w in found] == [w.meta.sample_id for w in expected]
    for left, right in zip(found, expected, strict=True):
        np.testing.assert_array_equal(left.aux, right.aux)
        np.testing.assert_array_equal(left.final, right.final)
        np.testing.assert_array_equal(left.token_ids, right.token_ids)


def assert_only_leftovers(lake: Lake) -> set[str]:
    findings = check_lake(lake, 2)
    assert [finding for finding in findings if finding.harmful] == []
    codes = {finding.code for finding in findings}
    assert codes <= LEFTOVERS
    return codes


def test_a_commit_killed_at_any_step_shows_all_or_nothing_and_a_rerun_completes_it(tmp_path: Path) -> None:
    seen = {}
    for moment, folder in deaths(PREPARE, COMMIT, tmp_path):
        lake = Lake.open(str(folder))
        visible = len(lake.commit_paths()) == 2
        seen[folder.name] = (visible, moment)
        assert_equal(windows_of(lake), FIRST + SECOND if visible else FIRST)
        assert_only_leftovers(lake)
        outcome = commit_tiny(lake, 0, HEAD.head_id, SECOND).outcome
        assert outcome == ("duplicate_plan" if visible else "committed")
        assert_equal(windows_of(lake), FIRST + SECOND)
    # From one moment on the fragment is there: the link of its commit.
    states = [visible for visible, _ in seen.values()]
    assert len(states) > 3 * 7
    assert states == sorted(states)
    assert next(moment for visible, moment in seen.values() if visible) == "after os.link"


def test_a_version_killed_while_it_is_registered_can_be_registered_again(tmp_path: Path) -> None:
    for _moment, folder in deaths(PREPARE, REGISTER, tmp_path):
        lake = Lake.open(str(folder))
        assert [record.version.number for record in lake.versions()] in ([0], [0, 1])
        assert_equal(windows_of(lake), FIRST)
        assert_only_leftovers(lake)
        exec(REGISTER, {"url": lake.url})
        assert [record.version.number for record in Lake.open(lake.url).versions()] == [0, 1]


def test_a_lake_killed_while_it_is_made_can_be_made_again(tmp_path: Path) -> None:
    moments = [moment for moment, _ in deaths("import os; os.makedirs(url)", INIT, tmp_path)]
    assert "after os.link" in moments
    for folder in tmp_path.glob("0*"):
        assert Lake.init(str(folder), TINY_TARGET).commit_paths() == []


def test_a_child_that_fails_by_itself_is_told(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with 1"):
        kill_everywhere(PREPARE, "raise ValueError('by itself')", tmp_path)
