"""A read cache before an S3 store: what is asked of the server, what the folder holds, and that it is never trusted."""

import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

from features.cached_store import CachedStore, cache_from
from features.catalog import Catalog
from features.check import check_lake
from features.errors import CorruptDataError, InputError
from features.lake import Lake
from features.read_cache import ReadCache
from features.schema import SelectionFilter
from features.storage import LocalStore
from features.storage_settings import parse_settings
from features.testing import TINY_TARGET, commit_tiny, register_tiny_version, tiny_head, tiny_window
from features.testing_s3 import ServedS3
from features.windows import Window

pytestmark = pytest.mark.s3

HEAD = tiny_head()
WINDOWS = [tiny_window(HEAD, sample=sample, num_rows=10 + sample) for sample in range(8)]
PLENTY = 10**9
DATA = "data/v=000000000/part"

Open = Callable[..., Lake]


@pytest.fixture(scope="module")
def s3() -> Iterator[ServedS3]:
    with ServedS3() as server:
        lake = Lake.init(f"{server.make_bucket('cached')}/lake", TINY_TARGET, **server.options())
        head_id = register_tiny_version(lake, 0, HEAD)
        for first in (0, 4):
            commit_tiny(lake, 0, head_id, WINDOWS[first : first + 4])
        yield server


@pytest.fixture
def opened(s3: ServedS3, tmp_path: Path) -> Open:
    def open_(max_bytes: int = PLENTY, **options: Any) -> Lake:
        place = {"cache_dir": str(tmp_path / "cache"), "cache_bytes": max_bytes}
        return Lake.open("s3://cached/lake", **{**s3.options(), **place, **options})

    return open_


def counts_of(lake: Lake) -> Any:
    assert isinstance(lake.store, CachedStore)
    return lake.store.counts()


def windows_of(lake: Lake) -> list[Window]:
    return [lake.read_window(row) for row in Catalog.load(lake).select(SelectionFilter()).rows]


def assert_whole(found: list[Window]) -> None:
    assert [window.meta.sample_id for window in found] == [window.meta.sample_id for window in WINDOWS]
    for left, right in zip(found, WINDOWS, strict=True):
        np.testing.assert_array_equal(left.aux, right.aux)
        np.testing.assert_array_equal(left.final, right.final)
        np.testing.assert_array_equal(left.token_ids, right.token_ids)


def data_requests(s3: ServedS3) -> int:
    """Requests for an object of a fragment since the last time this was asked."""
    found = sum("/data/" in request.path for request in s3.requests)
    s3.reset()
    return found


def parts(folder: Path) -> list[Path]:
    """Files of the cache that hold bytes of objects, the largest first."""
    found = [path for path in folder.rglob("*-*") if path.is_file() and path.stat().st_size]
    return sorted(found, key=lambda path: -path.stat().st_size)


def test_a_second_epoch_and_a_second_process_ask_the_store_for_nothing(s3: ServedS3, opened: Open) -> None:
    data_requests(s3)
    first = opened()
    assert_whole(windows_of(first))
    assert data_requests(s3) == 2 * 3 + 2 * len(WINDOWS)  # table and two lengths per fragment; two arrays
    fetched = counts_of(first).bytes_fetched
    assert_whole(windows_of(first))
    assert data_requests(s3) == 0
    later = opened()  # as another process would: nothing but the folder is shared
    assert_whole(windows_of(later))
    assert data_requests(s3) == 0
    counts = counts_of(later)
    assert (counts.misses, counts.bytes_fetched, counts.bytes_cached) == (0, 0, fetched)


def test_there_is_no_cache_unless_it_is_asked_for(s3: ServedS3, tmp_path: Path) -> None:
    lake = Lake.open("s3://cached/lake", **s3.options())
    assert not isinstance(lake.store, CachedStore)
    assert lake.store.origin is lake.store
    assert not lake.store.distrust("data/anything")
    settings = parse_settings({"lake": {"storage": {"cache_dir": "/fast", "cache_bytes": 5}}}, where="here")
    assert settings.options() == {"cache_dir": "/fast", "cache_bytes": 5}
    for wrong in ({"cache_dir": "/fast"}, {"cache_bytes": 5}, {"cache_dir": "/fast", "cache_bytes": 0}):
        with pytest.raises(InputError, match="cache_dir = "):
            cache_from(dict(wrong))
    for value in ("5", True, 0):
        with pytest.raises(InputError, match="number of bytes"):
            parse_settings({"lake": {"storage": {"cache_bytes": value}}}, where="here")


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0x10
    path.write_bytes(raw)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("spoil", [flip, cut])
def test_a_spoilt_part_is_noticed_dropped_and_read_again(
    s3: ServedS3, opened: Open, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    assert_whole(windows_of(opened()))
    for path in parts(tmp_path / "cache"):
        spoil(path)
    data_requests(s3)
    lake = opened()
    assert_whole(windows_of(lake))
    assert data_requests(s3) > 0
    assert counts_of(lake).distrusted >= 2 * 3  # both fragments' table, aux and final
    again = opened()
    assert_whole(windows_of(again))
    assert counts_of(again).distrusted == 0
    assert data_requests(s3) <= 2 * 3  # what was dropped with a spoilt neighbour, read once before


@pytest.mark.parametrize("length", ["0", "1", "9" * 17, "9" * 30])
def test_a_length_that_is_wrong_costs_requests_and_nothing_else(
    s3: ServedS3, opened: Open, tmp_path: Path, length: str
) -> None:
    assert_whole(windows_of(opened()))
    lengths = list((tmp_path / "cache").rglob("length-*"))
    assert lengths
    for path in lengths:
        path.rename(path.parent / f"length-{length}")
    assert_whole(windows_of(opened()))


def test_what_is_wrong_in_the_store_itself_is_refused_and_not_kept_for_ever(tmp_path: Path) -> None:
    lake = Lake.init(str(tmp_path / "lake"), TINY_TARGET)
    commit_tiny(lake, 0, register_tiny_version(lake, 0, HEAD), WINDOWS)
    cached = Lake(CachedStore(lake.store, ReadCache(tmp_path / "cache", PLENTY)), lake.target)
    (shard,) = (tmp_path / "lake").rglob("aux/c/0/0")
    flip(shard)
    for _ in range(2):
        with pytest.raises(CorruptDataError, match="do not match"):
            windows_of(cached)
    flip(shard)  # restored from a copy
    assert_whole(windows_of(cached))
    flip(shard)
    assert_whole(windows_of(cached))  # good bytes, cached; who checks the store must see the store
    assert [finding.code for finding in check_lake(cached, 2) if finding.harmful] == ["wrong_bytes"]


def test_the_folder_is_bounded_and_what_was_read_longest_ago_goes_first(tmp_path: Path) -> None:
    cache = ReadCache(tmp_path / "cache", 1600)
    for number in range(4):
        assert cache.keep(f"object {number}", 0, memoryview(bytes(400 - 4 * number))) == 0
    ages = {path: 1000 - n for n, path in enumerate(parts(tmp_path / "cache"))}  # object 0 is the newest
    for path, age in ages.items():
        os.utime(path, (age, age))
    (span,) = cache.spans("object 3")
    assert cache.read_into("object 3", span, 0, memoryview(bytearray(10)))  # and now object 3 is
    assert cache.keep("object 4", 0, memoryview(bytes(400))) == 400 - 4 * 2
    assert [len(cache.spans(f"object {number}")) for number in range(5)] == [1, 1, 0, 1, 1]
    for number in range(5, 40):
        cache.keep(f"object {number}", 7, memoryview(bytes(random.Random(number).randrange(1, 700))))
        assert sum(path.stat().st_size for path in parts(tmp_path / "cache")) <= 1600
    assert cache.keep("too large", 0, memoryview(bytes(1601))) == 0
    assert cache.spans("too large") == []


def test_any_range_is_that_of_the_object_in_one_request_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(3)
    raw = chance.randbytes(4096)
    origin = LocalStore(tmp_path / "lake")
    origin.create(DATA, raw)
    store = CachedStore(origin, ReadCache(tmp_path / "cache", PLENTY))
    asked: list[int] = []
    plain = origin.opened

    def counted(path: str) -> Callable[[int, memoryview], None]:
        def fill(start: int, into: memoryview) -> None:
            asked.append(start)
            plain(path)(start, into)

        return fill

    monkeypatch.setattr(origin, "opened", counted)
    for _ in range(200):
        start = chance.randrange(len(raw))
        stop = chance.randrange(start + 1, min(len(raw), start + 900) + 1)
        asked.clear()
        assert store.read_range(DATA, start, stop) == raw[start:stop]
        assert len(asked) <= 1
    assert store.read_range(DATA, 0, len(raw)) == raw
    asked.clear()
    assert store.read_range(DATA, 0, len(raw)) == raw
    assert store.read(DATA) == raw
    assert store.read(DATA) == raw
    assert (store.size(DATA), len(asked)) == (len(raw), 0)
    with pytest.raises(CorruptDataError, match="too short"):
        store.read_range(DATA, 4000, 4097)
    before = len(parts(tmp_path / "cache"))
    store.create("other/object", b"never cached")
    assert store.read_range("other/object", 0, 5) == b"never"
    assert len(parts(tmp_path / "cache")) == before


def test_a_folder_that_cannot_be_written_costs_requests_and_nothing_else(
    opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    lake = opened(cache_dir=str(tmp_path / "file"))
    assert_whole(windows_of(lake))
    assert counts_of(lake).failed > 0
    assert "cannot keep a part" in caplog.text


def _read_often(options: dict[str, Any]) -> int:
    """Body of a process: every window four times, through a cache that holds a third of them."""
    evicted = 0
    for _ in range(4):
        lake = Lake.open("s3://cached/lake", **options)
        assert_whole(windows_of(lake))
        evicted += counts_of(lake).bytes_evicted
    return evicted


def test_several_processes_share_one_small_folder(s3: ServedS3, tmp_path: Path) -> None:
    size = sum(window.aux.nbytes + window.final.nbytes for window in WINDOWS)
    options = {**s3.options(), "cache_dir": str(tmp_path / "cache"), "cache_bytes": size // 3}
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        evicted = pool.map_async(_read_often, [options, options]).get(timeout=300)
    assert all(count > 0 for count in evicted)
    assert sum(path.stat().st_size for path in parts(tmp_path / "cache")) <= size // 3
