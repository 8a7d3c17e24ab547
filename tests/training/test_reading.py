"""The fast reader against ``Lake.read_window``, request by request and fault by fault."""

import gc
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from features.catalog import Catalog
from features.errors import (
    CorruptDataError,
    EmptySelectionError,
    InputError,
    LakeContractError,
    VersionConflictError,
)
from features.lake import Lake
from features.schema import FeatureDtype, FragmentLayout, SelectionFilter, VersionRange
from features.selection import Selection
from features.testing import commit_tiny, tiny_head, tiny_lake, tiny_window
from features.windows import Window
from training.reading.reader import ReadStep, SelectionReader
from training.reading.slabs import SlabPool, slab_size
from training.reading.spec import Position, ReadSpec

RANDOM = ReadSpec(batch_rows=48, order="random", part_bytes=4096, gap_bytes=0)
STREAM = replace(RANDOM, order="stream", buffer_bytes=16384)
ALONE = replace(STREAM, concurrency=0)
SPECS = pytest.mark.parametrize("spec", [RANDOM, STREAM, ALONE], ids=["random", "stream", "no-threads"])


class CountingStore:
    """A store that counts what is asked of it."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.asked: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        def counted(path: str, *args: Any) -> Any:
            self.asked[f"{name} {path.split('/')[-1]}"] += 1
            return found(path, *args)

        found = getattr(self._store, name)
        return counted if callable(found) else found

    def opened(self, path: str) -> Any:
        def counted(start: int, into: memoryview) -> None:
            self.asked[f"read_into {path.split('/')[-4]}"] += 1
            self._store.read_into(path, start, into)

        return counted


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = tiny_lake(str(tmp_path), versions=2, samples_per_version=16, windows_per_fragment=8)
    layout = FragmentLayout((3,), FeatureDtype.FLOAT32, 16)
    head = tiny_head(1)
    others = [tiny_window(head, version=1, sample=100 + i, layout=layout) for i in range(3)]
    commit_tiny(lake, 1, head.head_id, others)
    return lake


@pytest.fixture
def selection(lake: Lake) -> Selection:
    return Catalog.load(lake).select(SelectionFilter())


def same(left: Window, right: Window) -> bool:
    """Every field equal, arrays bit for bit and of one type."""
    for field in fields(Window):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, np.ndarray):
            if a.dtype != b.dtype or a.shape != b.shape or a.tobytes() != b.tobytes():
                return False
        elif a != b:
            return False
    return True


def used(steps: Iterator[ReadStep]) -> list[tuple[int, ...]]:
    return [step.indices for step in steps]


@SPECS
def test_windows_equal_the_lake_s_own_bit_for_bit(lake: Lake, selection: Selection, spec: ReadSpec) -> None:
    seen = []
    for step in SelectionReader(lake, selection, spec).read():
        for index, window in zip(step.indices, step.windows, strict=True):
            assert same(window, lake.read_window(selection.rows[index]))
            assert window.aux.flags.writeable
            seen.append(index)
    assert sorted(seen) == list(range(len(selection)))


@SPECS
@pytest.mark.parametrize("read_ahead", [1, 2**20])
def test_resuming_after_any_step_gives_exactly_the_rest(
    lake: Lake, selection: Selection, spec: ReadSpec, read_ahead: int
) -> None:
    spec = replace(spec, lanes=2, read_ahead_bytes=read_ahead)
    whole = list(SelectionReader(lake, selection, spec, rank=1, world_size=2).read(Position(3)))
    for done in (1, len(whole) // 2, len(whole)):
        again = SelectionReader(lake, selection, spec, rank=1, world_size=2)
        start = again.planner.position(whole[done - 1].state)
        assert start == Position(3, done)
        assert used(again.read(start)) == [step.indices for step in whole[done:]]


def test_a_state_holds_for_every_rank_but_not_for_another_selection(lake: Lake, selection: Selection) -> None:
    state = next(iter(SelectionReader(lake, selection, RANDOM, world_size=2).read())).state
    other_rank = SelectionReader(lake, selection, RANDOM, rank=1, world_size=2)
    assert other_rank.planner.position(state) == Position(0, 1)
    faster = replace(RANDOM, concurrency=1, read_ahead_bytes=1)
    assert SelectionReader(lake, selection, faster, world_size=2).planner.position(state) == Position(0, 1)
    fewer = Catalog.load(lake).select(SelectionFilter(versions=VersionRange(0, 1)))
    with pytest.raises(InputError, match="selection"):
        SelectionReader(lake, fewer, RANDOM, world_size=2).planner.position(state)


@SPECS
def test_turns_together_read_what_one_reader_reads(lake: Lake, selection: Selection, spec: ReadSpec) -> None:
    spec = replace(spec, lanes=3)
    whole = used(SelectionReader(lake, selection, spec).read(Position(0, 1)))
    turns = [
        used(SelectionReader(lake, selection, spec).read(Position(0, 1), turn=turn, turns=3))
        for turn in range(3)
    ]
    assert [turns[place % 3][place // 3] for place in range(len(whole))] == whole


def counted_reader(lake: Lake, selection: Selection, spec: ReadSpec) -> tuple[SelectionReader, CountingStore]:
    fresh = Lake.open(lake.url)
    fresh.versions()
    store = CountingStore(fresh.store)
    fresh.store = store  # type: ignore[assignment]
    return SelectionReader(fresh, selection, spec), store


def test_a_random_read_asks_once_per_window_and_array_and_once_per_token_table(
    lake: Lake, selection: Selection
) -> None:
    reader, store = counted_reader(lake, selection, replace(RANDOM, batch_rows=1))
    assert sum(len(step.windows) for step in reader.read()) == len(selection)
    assert store.asked["read tokens.arrow"] == 5
    assert store.asked["read_into aux"] == store.asked["read_into final"] == len(selection)


def test_a_stream_asks_once_per_part_and_array(lake: Lake, selection: Selection) -> None:
    reader, store = counted_reader(lake, selection, replace(STREAM, part_bytes=2**20, lanes=1))
    assert sum(len(step.windows) for step in reader.read()) == len(selection)
    assert store.asked["read_into aux"] == store.asked["read_into final"] == 5
    assert store.asked["read tokens.arrow"] == 5


def test_neighbours_of_a_step_share_a_request(lake: Lake, selection: Selection) -> None:
    reader, store = counted_reader(lake, selection, replace(RANDOM, batch_rows=10**6, part_bytes=2**20))
    (step,) = reader.read()
    assert len(step.windows) == len(selection)
    assert store.asked["read_into aux"] == 5


def test_no_more_is_read_ahead_than_was_allowed(lake: Lake, selection: Selection) -> None:
    reader, store = counted_reader(lake, selection, replace(RANDOM, batch_rows=1, read_ahead_bytes=1))
    steps = reader.read()
    next(steps)
    time.sleep(0.05)
    assert store.asked["read_into aux"] == 1
    steps.close()


@SPECS
def test_a_steady_reader_makes_no_new_memory(lake: Lake, selection: Selection, spec: ReadSpec) -> None:
    reader = SelectionReader(lake, selection, replace(spec, read_ahead_bytes=1, buffer_bytes=1))
    made = []
    for epoch in range(4):
        for step in reader.read(Position(epoch)):
            del step
        made.append(reader.slabs.allocated)
    assert made[3] - made[1] <= 2
    assert made[3] < len(selection)


def test_windows_that_are_kept_are_never_overwritten(lake: Lake, selection: Selection) -> None:
    reader = SelectionReader(lake, selection, replace(RANDOM, read_ahead_bytes=1))
    kept: dict[int, Window] = {}
    for epoch in range(2):
        for step in reader.read(Position(epoch)):
            kept.update(zip(step.indices, step.windows, strict=True))
    assert all(same(window, lake.read_window(selection.rows[index])) for index, window in kept.items())


def test_a_slab_is_used_again_only_when_its_last_view_is_gone() -> None:
    pool = SlabPool(keep_bytes=2**20)
    slab = pool.take(70_000)
    address, view = slab.ctypes.data, slab[10:20].view(np.uint16)
    del slab
    gc.collect()
    other = pool.take(70_000)
    assert other.ctypes.data != address
    del view
    assert pool.take(70_000).ctypes.data == address
    assert pool.allocated == 2


def test_a_pool_keeps_no_more_than_it_may() -> None:
    pool = SlabPool(keep_bytes=2**17)
    slabs = [pool.take(2**17) for _ in range(3)]
    slabs.clear()
    pool.take(2**17)
    assert pool.allocated == 3
    again = [pool.take(2**17) for _ in range(2)]
    assert pool.allocated == 4
    assert len(again) == 2


@pytest.mark.parametrize("nbytes", [1, 2**16, 2**16 + 1, 100_001, 2**20, 3 * 2**24 + 1])
def test_a_slab_wastes_at_most_a_quarter(nbytes: int) -> None:
    assert nbytes <= slab_size(nbytes) <= max(2**16, 1.25 * nbytes + 1)


def shard_of(lake: Lake, selection: Selection, array: str) -> Path:
    return Path(lake.url) / selection.rows[0]["data_prefix"] / array / "c/0/0"


@SPECS
@pytest.mark.parametrize("array", ["aux", "final"])
@pytest.mark.parametrize("fault", ["absent", "short", "flipped"])
def test_damaged_features_stop_the_reader_and_are_never_zeros(
    lake: Lake, selection: Selection, spec: ReadSpec, array: str, fault: str
) -> None:
    path = shard_of(lake, selection, array)
    raw = bytearray(path.read_bytes())
    match fault:
        case "absent":
            path.unlink()
        case "short":
            path.write_bytes(raw[:-1])
        case "flipped":
            raw[selection.rows[0]["row_offset"]] ^= 1
            path.write_bytes(raw)
    with pytest.raises(CorruptDataError, match=selection.rows[0]["data_prefix"]):
        list(SelectionReader(Lake.open(lake.url), selection, spec).read())


def test_damaged_tokens_stop_the_reader(lake: Lake, selection: Selection) -> None:
    (Path(lake.url) / selection.rows[0]["data_prefix"] / "tokens.arrow").write_bytes(b"ARROW1")
    with pytest.raises(CorruptDataError, match=r"tokens\.arrow"):
        list(SelectionReader(Lake.open(lake.url), selection, RANDOM).read())


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"head_id": "0" * 64}, VersionConflictError),
        ({"codec": "zstd"}, LakeContractError),
        ({"target_id": "other"}, CorruptDataError),
        ({"crc32c_tokens": 1}, CorruptDataError),
    ],
)
def test_rows_that_do_not_belong_are_refused_as_the_lake_refuses_them(
    lake: Lake, selection: Selection, changed: dict[str, Any], error: type[Exception]
) -> None:
    rows = [{**row, **changed} for row in selection.rows]
    with pytest.raises(error):
        lake.read_window(rows[0])
    with pytest.raises(error):
        list(SelectionReader(lake, replace(selection, rows=rows), RANDOM).read())


def test_an_abandoned_reader_leaves_no_thread_behind(lake: Lake, selection: Selection) -> None:
    import threading

    steps = SelectionReader(lake, selection, RANDOM).read()
    next(steps)
    steps.close()
    assert [thread for thread in threading.enumerate() if thread.name.startswith("draftlake-read")] == []


def test_an_empty_selection_is_refused_at_once(lake: Lake) -> None:
    nothing = Catalog.load(lake).select(SelectionFilter(versions=VersionRange(7)))
    with pytest.raises(EmptySelectionError):
        SelectionReader(lake, nothing)


def test_a_reader_of_another_process_is_refused(
    lake: Lake, selection: Selection, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = SelectionReader(lake, selection, RANDOM)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(InputError, match="spawn"):
        next(reader.read())
