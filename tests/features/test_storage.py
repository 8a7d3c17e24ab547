"""The one storage primitive, on a local folder and in memory (S3 in test_storage_s3)."""

import multiprocessing
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from features.errors import CorruptDataError, InputError, ObjectExistsError
from features.paths import without_credentials
from features.storage import LocalStore, Store


@pytest.fixture(params=["local", "file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    urls = {
        "local": str(tmp_path / "lake"),
        "file": f"file://{tmp_path}/lake",
        "memory": f"memory://{tmp_path}",
    }
    return Store.open(urls[request.param])


def test_an_object_is_created_once_and_never_overwritten(store: Store) -> None:
    store.create("a/b.bin", b"first")
    with pytest.raises(ObjectExistsError, match=r"a/b\.bin"):
        store.create("a/b.bin", b"second")
    assert store.read("a/b.bin") == b"first"


def test_listing_is_sorted_recursive_relative_and_bounded_by_folders(store: Store) -> None:
    for path in ("data/b/2", "data/a/1", "database/x", "other"):
        store.create(path, b"")
    assert store.list("data") == ["data/a/1", "data/b/2"]
    assert store.list("") == ["data/a/1", "data/b/2", "database/x", "other"]
    assert store.list("nothing/here") == []


def test_a_range_is_exactly_what_was_asked(store: Store) -> None:
    store.create("x", bytes(range(10)))
    assert store.read_range("x", 2, 5) == bytes([2, 3, 4])
    assert store.read_range("x", 9, 10) == bytes([9])
    assert store.read_range("x", 4, 4) == b""


@pytest.mark.parametrize(("start", "stop"), [(8, 11), (10, 11), (50, 60)])
def test_a_range_past_the_end_is_corrupt_data_and_never_shorter(store: Store, start: int, stop: int) -> None:
    store.create("x", bytes(10))
    with pytest.raises(CorruptDataError, match="too short"):
        store.read_range("x", start, stop)


def test_an_absent_object_is_told_from_an_empty_one(store: Store) -> None:
    store.create("empty", b"")
    assert store.exists("empty")
    assert store.size("empty") == 0
    assert not store.exists("absent")
    for ask in (store.read, store.size, lambda path: store.read_range(path, 0, 1)):
        with pytest.raises(FileNotFoundError):
            ask("absent")


def test_a_folder_is_no_object(store: Store) -> None:
    store.create("folder/x", b"1")
    assert not store.exists("folder")


@pytest.mark.parametrize("path", ["", "/a", "a/", "a//b", "../a", "a/./b", "a\\b"])
def test_paths_that_could_leave_the_root_are_refused(store: Store, path: str) -> None:
    with pytest.raises(ValueError, match="relative"):
        store.create(path, b"")


def test_delete_prefix_takes_the_folder_and_nothing_beside_it(store: Store) -> None:
    for path in ("data/a/1", "data/a/2", "data/ab/3"):
        store.create(path, b"x")
    store.delete_prefix("data/a")
    assert store.list("") == ["data/ab/3"]
    store.create("data/a/1", b"again")


@pytest.mark.parametrize("url", ["http://host/lake", "gs://bucket/lake"])
def test_a_protocol_without_a_tested_create_is_refused(url: str) -> None:
    with pytest.raises(InputError, match="s3://"):
        Store.open(url)


def test_credentials_in_a_url_are_never_printed() -> None:
    with pytest.raises(InputError) as caught:
        Store.open("https://user:hunter2@host/lake?token=hunter3")
    assert "hunter" not in str(caught.value)
    store = Store.open("memory://user:hunter2@host/lake")
    assert "hunter2" not in repr(store) + store.url


def test_opening_a_store_creates_nothing(tmp_path: Path) -> None:
    Store.open(str(tmp_path / "lake")).list("")
    assert list(tmp_path.iterdir()) == []


def _race(folder: str, barrier: "multiprocessing.synchronize.Barrier", number: int) -> None:
    store = Store.open(folder)
    barrier.wait()
    for index in range(20):
        try:
            store.create(f"commits/{index}", bytes([number]) * 10_000)
        except ObjectExistsError:
            continue
        store.create(f"won/{index}.{number}", b"")


@pytest.mark.slow
def test_of_racing_local_writers_exactly_one_wins_each_object(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    writers = [context.Process(target=_race, args=(str(tmp_path), barrier, n)) for n in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    store = Store.open(str(tmp_path))
    won = [path.removeprefix("won/").split(".") for path in store.list("won")]
    assert sorted(int(index) for index, _ in won) == list(range(20))
    for index, number in won:
        assert store.read(f"commits/{index}") == bytes([int(number)]) * 10_000


@pytest.mark.parametrize(("moment", "visible"), [("before", False), ("after", True)])
def test_a_local_create_killed_around_its_link_is_visible_whole_or_not_at_all(
    tmp_path: Path, moment: str, visible: bool
) -> None:
    script = f"""
import os, signal
from features.storage import Store
link = os.link
def killed(*args):
    if {moment!r} == "after":
        link(*args)
    os.kill(os.getpid(), signal.SIGKILL)
os.link = killed
Store.open({str(tmp_path)!r}).create("commits/x", b"whole" * 1000)
"""
    assert subprocess.run([sys.executable, "-c", script], env=_env()).returncode == -9
    store = LocalStore(tmp_path)
    assert store.list("") == (["commits/x"] if visible else [])
    assert len(store.list_temporary()) == 1
    if visible:
        assert store.read("commits/x") == b"whole" * 1000
    else:
        store.create("commits/x", b"rerun")
        assert store.read("commits/x") == b"rerun"


def test_a_filesystem_without_hard_links_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(InputError, match="hard links"):
        Store.open(str(tmp_path)).create("x", b"1")
    assert list(tmp_path.iterdir()) == []


def test_an_object_that_grew_is_read_at_its_new_length(tmp_path: Path) -> None:
    reader = Store.open(str(tmp_path))
    (tmp_path / "x").write_bytes(b"short")
    assert reader.size("x") == 5
    (tmp_path / "x").write_bytes(b"much longer")
    assert reader.size("x") == 11
    assert reader.read("x") == b"much longer"


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def test_a_scan_is_the_listing_with_lengths_and_times(store: Store) -> None:
    before = datetime.now(UTC) - timedelta(seconds=2)  # a filesystem may round down
    for path, data in (("data/b", b"12"), ("data/a/1", b""), ("other", b"x")):
        store.create(path, data)
    found = store.scan("data")
    assert [(path, facts.size) for path, facts in found.items()] == [("data/a/1", 0), ("data/b", 2)]
    assert all(
        before <= facts.written_at <= datetime.now(UTC) + timedelta(seconds=2) for facts in found.values()
    )
    assert store.scan("nothing") == {}


def test_one_object_is_deleted_and_its_neighbours_stay(store: Store) -> None:
    for path in ("a/x", "a/xy"):
        store.create(path, b"x")
    store.delete("a/x")
    store.delete("a/x")
    assert store.list("") == ["a/xy"]
    store.create("a/x", b"again")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://me:hidden@bucket/key", "s3://bucket/key"),
        ("foo::s3://me:hidden@bucket/key", "foo::s3://bucket/key"),
        ("zip://a@b/c::https://me:hidden@host/x?sig=hidden", "zip://b/c::https://host/x"),
        ("http://[::hidden#hidden", "http://[::hidden"),
        ("s3://bucket/a@b#hidden", "s3://bucket/a@b"),
        ("/plain/folder", "/plain/folder"),
    ],
)
def test_a_url_is_shown_without_what_may_be_secret(url: str, shown: str) -> None:
    assert without_credentials(url) == shown
