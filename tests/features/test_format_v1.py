"""A lake that was written in the first format is read for ever, to the last bit."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from features.bfloat16 import bf16_to_float32
from features.catalog import Catalog
from features.check import check_lake
from features.lake import Lake
from features.quarantine import list_quarantine
from features.schema import SelectionFilter, TargetVersion

DATA = Path(__file__).resolve().parents[1] / "data"
EXPECTED = json.loads((DATA / "format_v1/expected.json").read_bytes())


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_format_v1", DATA / "make_format_v1.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def lake() -> Lake:
    return Lake.open(str(DATA / "format_v1/lake"))


def test_windows_heads_and_catalog_are_what_they_were(lake: Lake, maker: ModuleType) -> None:
    assert maker.describe(lake) == EXPECTED
    assert lake.target_config()["vocab_size"] == lake.target.vocab_size == 512


def test_a_window_of_a_snapshot_and_one_of_the_tail_are_among_them(lake: Lake) -> None:
    assert [window["version"] for window in EXPECTED["windows"]] == [0, 0, 1]
    commits = lake.store.list("commits")
    assert all("v=000000001" in path for path in commits)  # version 0 is known from the snapshot alone
    assert lake.snapshots.all()[0].windows == 2
    assert {type(window["loss_mask"]) for window in EXPECTED["windows"]} == {list, type(None)}


def test_the_second_head_is_a_delta_to_the_first(lake: Lake) -> None:
    first, second = (lake.version(TargetVersion(number)).head_id for number in (0, 1))
    assert (lake.head_base(first), lake.head_base(second)) == (None, first)


def test_the_pinned_revision_reads_as_the_present_one(lake: Lake) -> None:
    pinned = Catalog.load(lake, revision=EXPECTED["revision"])
    assert pinned.select(SelectionFilter()).digest == EXPECTED["selection"]
    assert lake.has_revision(EXPECTED["revision"])


def test_what_is_in_quarantine_is_still_left_out_and_told(lake: Lake) -> None:
    assert [finding.code for finding in check_lake(lake, 1)] == ["quarantined"]
    assert [finding.code for finding in check_lake(lake, 2)] == ["restored"]  # nothing was wrong with it
    (run,) = list_quarantine(lake)
    assert (run.run_id, run.counts) == ("run-1", {"version_missing": 1})


def test_zarr_reads_the_same_features(lake: Lake) -> None:
    zarr = pytest.importorskip("zarr")
    import features.zarr_bfloat16  # noqa: F401  # gives zarr-python its bfloat16

    for row in Catalog.load(lake).frame.to_dicts():
        array = zarr.open_array(f"{lake.url}/{row['data_prefix']}/final", mode="r")
        found = np.asarray(array[row["row_offset"] : row["row_offset"] + row["num_rows"]])
        stored = lake.read_window(row).final
        expected = stored if stored.dtype == np.float32 else bf16_to_float32(stored)
        np.testing.assert_array_equal(found.astype(np.float32), expected)
