"""Ranges through obstore: the same bytes as through s3fs, and s3fs wherever obstore is in doubt."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")
pytest.importorskip("obstore")

from features.errors import CorruptDataError, InputError
from features.s3_ranges import unknown_options
from features.s3_store import S3Store
from features.storage import Store
from features.storage_settings import Reader
from features.testing_s3 import Fault, FaultKind, ServedS3

pytestmark = pytest.mark.s3

CONTENT = np.random.default_rng(0).bytes(3 * 2**20 + 7)
RANGES = [
    (0, 1),
    (0, len(CONTENT)),
    (5, 2**20),
    (2**21, len(CONTENT)),
    (len(CONTENT) - 1, len(CONTENT)),
    (9, 9),
]


@pytest.fixture(scope="module")
def s3() -> Iterator[ServedS3]:
    with ServedS3() as server:
        Store.open(server.make_bucket("ranges") + "/some/lake", **server.options()).create("a/b", CONTENT)
        yield server


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, s3: ServedS3) -> None:
    monkeypatch.setattr("features.s3_store._MAX_ATTEMPTS", 2)
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 2)
    s3.reset()


def opened(s3: ServedS3, reader: str = "auto", **options: Any) -> S3Store:
    store = Store.open("s3://ranges/some/lake", reader=reader, **{**s3.options(), **options})
    assert isinstance(store, S3Store)
    return store


def asked_by_obstore(s3: ServedS3) -> list[bool]:
    """For each read that the server saw, whether obstore sent it."""
    return ["object_store" in r.headers.get("user-agent", "") for r in s3.requests if r.kind == "GET"]


@pytest.mark.parametrize(("start", "stop"), RANGES)
def test_both_clients_give_the_same_bytes_in_one_request(s3: ServedS3, start: int, stop: int) -> None:
    for reader, by_obstore in (("obstore", True), ("s3fs", False)):
        store, into = opened(s3, reader), bytearray(stop - start)
        s3.reset()
        assert store.read_range("a/b", start, stop) == CONTENT[start:stop]
        store.read_into("a/b", start, memoryview(into))
        assert into == CONTENT[start:stop]
        assert asked_by_obstore(s3) == [by_obstore] * (2 if stop > start else 0)


@pytest.mark.parametrize("reader", ["obstore", "s3fs"])
def test_both_clients_refuse_what_is_short_or_absent(s3: ServedS3, reader: str) -> None:
    store = opened(s3, reader)
    for start, stop in ((2**20, 2**23), (2**23, 2**24)):
        with pytest.raises(CorruptDataError, match="too short"):
            store.read_range("a/b", start, stop)
    with pytest.raises(FileNotFoundError):
        store.read_range("a/absent", 0, 1)


@pytest.mark.parametrize(
    "kind", [FaultKind.UNAVAILABLE, FaultKind.BROKEN, FaultKind.LOST, FaultKind.TRUNCATED, FaultKind.SHORT]
)
def test_a_read_that_fails_is_asked_again_through_s3fs(s3: ServedS3, kind: FaultKind) -> None:
    store = opened(s3)
    store.read_range("a/b", 0, 1)
    s3.reset()
    s3.inject(Fault(kind))
    assert store.read_range("a/b", 3, 2**20) == CONTENT[3 : 2**20]
    assert asked_by_obstore(s3)[-1] is False
    assert store.read_range("a/b", 3, 9) == CONTENT[3:9]
    assert asked_by_obstore(s3)[-1] is True


def test_after_three_failures_in_a_row_s3fs_reads_alone(
    s3: ServedS3, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(s3)
    store.read_range("a/b", 0, 1)
    for _ in range(3):
        s3.inject(Fault(FaultKind.UNAVAILABLE))
        store.read_range("a/b", 0, 9)
    assert "s3fs reads from here on" in caplog.text
    s3.reset()
    store.read_range("a/b", 0, 9)
    assert asked_by_obstore(s3) == [False]


def test_threads_share_a_reader(s3: ServedS3) -> None:
    store = opened(s3)
    starts = list(range(0, 2**21, 2**17)) * 2
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda start: store.read_range("a/b", start, start + 2**17), starts))
    assert found == [CONTENT[start : start + 2**17] for start in starts]


def test_an_option_that_obstore_may_not_honour_leaves_the_read_to_s3fs(s3: ServedS3) -> None:
    store = opened(s3, client_kwargs={"region_name": "us-east-1", "verify": False})
    s3.reset()
    assert store.read_range("a/b", 0, 9) == CONTENT[:9]
    assert asked_by_obstore(s3) == [False]
    assert unknown_options({
        "key": "x", "requester_pays": True, "config_kwargs": {"proxies": {}, "s3": {"use_arn_region": True}},
        "s3_additional_kwargs": {"SSECustomerKey": "x", "ServerSideEncryption": "AES256"},
    }) == [
        "config_kwargs.proxies", "config_kwargs.s3.use_arn_region", "requester_pays",
        "s3_additional_kwargs.SSECustomerKey",
    ]  # fmt: skip


def test_credentials_of_the_environment_sign_both_clients_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ServedS3(access_key="AKIAENV") as guarded:
        for name, value in (("AWS_ACCESS_KEY_ID", "AKIAENV"), ("AWS_SECRET_ACCESS_KEY", "secret")):
            monkeypatch.setenv(name, value)
        options = {k: v for k, v in guarded.options().items() if k not in ("key", "secret")}
        store = Store.open(guarded.make_bucket("guarded"), reader="obstore", **options)
        store.create("x", b"0123456789")
        assert store.read_range("x", 2, 5) == b"234"
        assert asked_by_obstore(guarded) == [True]


def test_a_forked_child_is_refused_and_does_not_hang(s3: ServedS3) -> None:
    store = opened(s3)
    store.read_range("a/b", 0, 9)
    child = os.fork()
    if child == 0:
        try:
            store.read_range("a/b", 0, 9)
        except RuntimeError as error:
            os._exit(7 if "spawn" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_obstore_that_is_asked_for_and_absent_is_named(s3: ServedS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("features.s3_ranges.find_spec", lambda _name: None)
    with pytest.raises(InputError, match=r"pip install 'draftlake\[obstore\]'"):
        opened(s3, Reader.OBSTORE)
    s3.reset()
    assert opened(s3).read_range("a/b", 0, 9) == CONTENT[:9]
    assert asked_by_obstore(s3) == [False]
