"""Loader processes: the same items in the same order, and a watchdog against hangs (fork after use)."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from features.catalog import Catalog
from features.errors import InputError
from features.lake import Lake
from features.schema import SelectionFilter
from features.testing import (
    TINY_TARGET,
    commit_tiny,
    register_tiny_version,
    tiny_head,
    tiny_lake,
    tiny_window,
)
from training.reading.dataset import WindowDataset, window_loader
from training.reading.reader import SelectionReader
from training.reading.spec import Position, ReadSpec

WATCHDOG_S = 60
SPEC = ReadSpec(batch_rows=48, order="stream", lanes=2, part_bytes=4096, gap_bytes=0, buffer_bytes=16384)

# What a training process does: it uses the store itself, then starts loaders.
SCRIPT = """
import json, sys, zlib
from features.lake import Lake
from features.schema import SelectionFilter
from torch.utils.data import DataLoader
from training.reading.dataset import WindowDataset, window_loader
from training.reading.spec import ReadSpec

def main(url, options, spec, num_workers, start, state):
    from features.catalog import Catalog

    lake = Lake.open(url, **options)
    selection = Catalog.load(lake).select(SelectionFilter())
    lake.read_window(selection.rows[0])
    dataset = WindowDataset(url, selection, ReadSpec(**spec), epochs=2, state=state, storage_options=options)
    if start == "fork":
        loader = DataLoader(dataset, batch_size=None, num_workers=num_workers, multiprocessing_context="fork")
    else:
        loader = window_loader(dataset, num_workers=num_workers)
    items = []
    for step in loader:
        crc = [zlib.crc32(w.aux.tobytes() + w.final.tobytes() + w.token_ids.tobytes()) for w in step.windows]
        items.append([list(step.indices), crc, step.state["epoch"], step.state["step"]])
    print(json.dumps(items))

if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
"""


def run_loader(folder: Path, *arguments: Any) -> "subprocess.CompletedProcess[str]":
    """Run the script with a watchdog that ends the whole family of processes."""
    script = folder / "loader_script.py"
    script.write_text(SCRIPT)
    child = subprocess.Popen(
        [sys.executable, str(script), json.dumps(arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = child.communicate(timeout=WATCHDOG_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"loader processes were still at work after {WATCHDOG_S} s")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
    return subprocess.CompletedProcess(child.args, child.returncode, out, err)


def spec_fields(spec: ReadSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in ReadSpec.__dataclass_fields__}


def items_here(dataset: WindowDataset) -> list[list[Any]]:
    import zlib

    return [
        [
            list(step.indices),
            [zlib.crc32(w.aux.tobytes() + w.final.tobytes() + w.token_ids.tobytes()) for w in step.windows],
            step.state["epoch"],
            step.state["step"],
        ]
        for step in window_loader(dataset)
    ]


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return tiny_lake(str(tmp_path / "lake"), versions=1, samples_per_version=20)


def dataset_of(lake: Lake, **options: Any) -> WindowDataset:
    return WindowDataset(lake.url, Catalog.load(lake).select(SelectionFilter()), SPEC, **options)


@pytest.mark.slow
def test_spawned_loaders_give_the_same_items_in_the_same_order(lake: Lake, tmp_path: Path) -> None:
    here = items_here(dataset_of(lake, epochs=2))
    state = list(window_loader(dataset_of(lake, epochs=2)))[2].state
    # Resumed after three steps, with three loaders for two lanes: turns cross the end of an epoch unevenly.
    done = run_loader(tmp_path, lake.url, {}, spec_fields(SPEC), 3, "spawn", state)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == here[3:]


@pytest.mark.slow
def test_forked_loaders_are_refused_with_the_remedy(lake: Lake, tmp_path: Path) -> None:
    done = run_loader(tmp_path, lake.url, {}, spec_fields(SPEC), 2, "fork", None)
    assert done.returncode != 0
    assert "multiprocessing_context='spawn'" in done.stderr


def test_epochs_follow_each_other_and_a_finished_one_resumes_at_the_next(lake: Lake) -> None:
    items = items_here(dataset_of(lake, epochs=3))
    steps = [dataset_of(lake).num_steps(epoch) for epoch in range(3)]
    assert [(epoch, step) for _, _, epoch, step in items] == [
        (epoch, step + 1) for epoch in range(3) for step in range(steps[epoch])
    ]
    end_of_first = list(window_loader(dataset_of(lake)))[-1].state
    assert items_here(dataset_of(lake, epochs=3, state=end_of_first)) == items[steps[0] :]


def test_ranks_take_as_many_steps(lake: Lake) -> None:
    ranks = [dataset_of(lake, rank=rank, world_size=3) for rank in range(3)]
    assert len({rank.num_steps() for rank in ranks}) == 1
    read = sorted(index for rank in ranks for item in window_loader(rank) for index in item.indices)
    assert read == sorted(set(range(20)) - set(ranks[0].dropped()))


def test_a_state_of_another_number_of_ranks_is_refused_before_anything_is_read(lake: Lake) -> None:
    state = next(iter(dataset_of(lake, world_size=2))).state
    with pytest.raises(InputError, match="world_size"):
        dataset_of(lake, world_size=3, state=state)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_page_locked_memory_without_an_accelerator_is_refused(lake: Lake) -> None:
    with pytest.raises(InputError, match="accelerator"):
        dataset_of(lake, pin_memory=True)


@pytest.fixture
def s3() -> Iterator[Any]:
    pytest.importorskip("s3fs")
    testing_s3 = pytest.importorskip("features.testing_s3")
    with testing_s3.ServedS3() as server:
        yield server


@pytest.fixture
def s3_lake(s3: Any) -> tuple[str, dict[str, Any]]:
    options = s3.options() | {"secret": "hunter2"}
    lake = Lake.init(s3.make_bucket("loaders") + "/lake", TINY_TARGET, **options)
    head = tiny_head()
    head_id = register_tiny_version(lake, 0, head)
    for first in (0, 4):
        commit_tiny(lake, 0, head_id, [tiny_window(head, sample=first + i) for i in range(4)])
    return lake.url, options


@pytest.mark.s3
@pytest.mark.parametrize(("order", "data_requests"), [("random", 2 * 8), ("stream", 2 * 2)])
def test_s3_is_asked_once_per_window_and_array_or_once_per_part_and_array(
    s3: Any, s3_lake: tuple[str, dict[str, Any]], order: Any, data_requests: int
) -> None:
    url, options = s3_lake
    lake = Lake.open(url, **options)
    selection = Catalog.load(lake).select(SelectionFilter())
    lake.versions()
    spec = ReadSpec(batch_rows=12, order=order)
    for epoch in range(2):
        s3.reset()
        for step in SelectionReader(lake, selection, spec).read(Position(epoch)):
            for index, window in zip(step.indices, step.windows, strict=True):
                assert window.meta.sample_id == selection.rows[index]["sample_id"]
        asked = Counter((request.kind, "range" in request.headers) for request in s3.requests)
        # Beside the data, once per fragment: the token table, and the lengths of both shard objects.
        assert asked == {("GET", True): data_requests, ("GET", False): 2, ("HEAD", False): 2 * 2}


@pytest.mark.s3
@pytest.mark.slow
def test_loaders_of_a_process_that_used_s3_finish(
    s3_lake: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    url, options = s3_lake
    done = run_loader(tmp_path, url, options, spec_fields(SPEC), 2, "spawn", None)
    assert done.returncode == 0, done.stderr
    read = [index for indices, *_ in json.loads(done.stdout) for index in indices]
    assert sorted(read) == sorted(2 * list(range(8)))
    assert "hunter2" not in done.stderr


@pytest.mark.s3
@pytest.mark.slow
def test_forked_loaders_of_a_process_that_used_s3_are_refused_and_do_not_hang(
    s3_lake: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    url, options = s3_lake
    done = run_loader(tmp_path, url, options, spec_fields(SPEC), 2, "fork", None)
    assert done.returncode != 0
    assert "multiprocessing_context='spawn'" in done.stderr
