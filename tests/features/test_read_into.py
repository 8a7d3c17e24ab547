"""Reads into memory that is there already: the same bytes and the same refusals in every store."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from features.errors import CorruptDataError
from features.storage import Store

CONTENT = bytes(range(100))


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    url = str(tmp_path) if request.param == "local" else f"memory://read-into{tmp_path}"
    store = Store.open(url)
    store.create("a/b", CONTENT)
    return store


@pytest.mark.parametrize(("start", "stop"), [(0, 100), (0, 0), (7, 8), (40, 100)])
def test_memory_is_filled_as_a_range_is_read(store: Store, start: int, stop: int) -> None:
    into = np.full(stop - start + 2, 255, np.uint8)
    store.read_into("a/b", start, into[1:-1].data)
    assert into[1:-1].tobytes() == store.read_range("a/b", start, stop) == CONTENT[start:stop]
    assert into[0] == into[-1] == 255


@pytest.mark.parametrize("start", [60, 100, 500])
def test_an_object_that_ends_early_is_refused(store: Store, start: int) -> None:
    with pytest.raises(CorruptDataError, match=r"a/b is too short: expected bytes \[" + str(start)):
        store.read_into("a/b", start, memoryview(bytearray(50)))


def test_an_absent_object_is_not_found(store: Store) -> None:
    with pytest.raises(FileNotFoundError):
        store.read_into("a/c", 0, memoryview(bytearray(1)))


def test_an_opened_object_is_read_many_times(store: Store) -> None:
    fill = store.opened("a/b")
    for start in (90, 0, 50):
        into = bytearray(10)
        fill(start, memoryview(into))
        assert into == CONTENT[start : start + 10]


def test_an_opened_file_is_closed_when_it_is_let_go(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    store.create("x", b"abc")
    before = len(os.listdir("/proc/self/fd"))
    opened = [store.opened("x") for _ in range(5)]
    assert len(os.listdir("/proc/self/fd")) == before + 5
    opened.clear()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    for _ in range(5):
        store.read_into("x", 0, memoryview(bytearray(3)))
    assert len(os.listdir("/proc/self/fd")) == before
