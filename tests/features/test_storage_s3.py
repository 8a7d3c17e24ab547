"""The same primitive and a whole lake on S3: moto's server through s3fs. No races here, because
moto does not serialise conditional writes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from features.catalog import Catalog
from features.check import check_lake
from features.errors import CorruptDataError, ObjectExistsError
from features.gc import GcPolicy, apply_gc, plan_gc
from features.lake import Lake
from features.retention import RetentionPolicy, apply_retention, fragment_facts, plan_retention
from features.s3_store import S3Store
from features.schema import SelectionFilter
from features.storage import Store
from features.survey import survey
from features.testing import TINY_TARGET, commit_tiny, register_tiny_version, tiny_head, tiny_window

pytestmark = pytest.mark.s3
pytest.importorskip("s3fs")
moto_server = pytest.importorskip("moto.server")

OPTIONS: dict[str, Any] = {"key": "x", "secret": "hunter2", "client_kwargs": {"region_name": "us-east-1"}}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def options(endpoint: str) -> dict[str, Any]:
    return {**OPTIONS, "endpoint_url": endpoint}


@pytest.fixture
def url(options: dict[str, Any], request: pytest.FixtureRequest) -> str:
    import s3fs

    bucket = request.node.name.replace("_", "-")[:60].rstrip("-")
    s3fs.S3FileSystem(**options).call_s3("create_bucket", Bucket=bucket)
    return f"s3://{bucket}/some/lake"


@pytest.fixture
def store(url: str, options: dict[str, Any]) -> Store:
    return Store.open(url, **options)


def test_a_create_is_conditional_on_s3(store: Store) -> None:
    store.create("a/b", b"first")
    with pytest.raises(ObjectExistsError):
        store.create("a/b", b"second")
    assert store.read("a/b") == b"first"
    assert store.list("") == ["a/b"]


def test_ranges_sizes_and_absence_on_s3(store: Store) -> None:
    store.create("x", bytes(range(10)))
    assert store.read_range("x", 2, 5) == bytes([2, 3, 4])
    assert store.size("x") == 10
    for start, stop in ((8, 11), (50, 60)):
        with pytest.raises(CorruptDataError, match="too short"):
            store.read_range("x", start, stop)
    assert not store.exists("absent")
    for ask in (store.read, store.size, lambda path: store.read_range(path, 0, 1)):
        with pytest.raises(FileNotFoundError):
            ask("absent")
    assert store.list("absent") == []
    store.delete_prefix("x")


def test_secrets_stay_out_of_the_url(store: Store) -> None:
    assert "hunter2" not in repr(store) + store.url


def test_a_busy_answer_is_tried_again_and_a_refusal_is_not(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(store, S3Store)
    answers = [409, 503]
    asked = []

    class AnswerError(Exception):
        def __init__(self, status: int) -> None:
            self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}

    def pipe_file(path: str, data: bytes, mode: str) -> None:
        asked.append(mode)
        if answers:
            raise OSError("busy") from AnswerError(answers.pop(0))

    monkeypatch.setattr("features.s3_store.time.sleep", lambda seconds: None)
    monkeypatch.setattr(store._fs, "pipe_file", pipe_file)
    store.create("x", b"1")
    assert asked == ["create"] * 3
    answers[:] = [412]
    with pytest.raises(ObjectExistsError):
        store.create("x", b"1")
    answers[:] = [403]
    with pytest.raises(OSError, match="busy"):
        store.create("x", b"1")
    assert asked == ["create"] * 5


def test_a_lake_on_s3_reads_back_bit_for_bit(url: str, options: dict[str, Any]) -> None:
    lake = Lake.init(url, TINY_TARGET, **options)
    head = tiny_head()
    head_id = register_tiny_version(lake, 0, head)
    windows = [tiny_window(head, sample=sample, num_rows=9 + sample) for sample in range(3)]
    assert commit_tiny(lake, 0, head_id, windows).outcome == "committed"
    assert commit_tiny(lake, 0, head_id, windows).outcome == "duplicate_plan"
    reader = Lake.open(url, **options)
    rows = Catalog.load(reader).select(SelectionFilter()).rows
    for window, row in zip(windows, rows, strict=True):
        found = reader.read_window(row)
        np.testing.assert_array_equal(found.aux, window.aux)
        np.testing.assert_array_equal(found.final, window.final)
        np.testing.assert_array_equal(found.token_ids, window.token_ids)
    assert reader.head_of(found.meta.version).head_id == head_id


def test_a_reader_on_s3_sees_a_commit_of_another_process(url: str, options: dict[str, Any]) -> None:
    reader = Lake.init(url, TINY_TARGET, **options)
    assert reader.commit_paths() == []
    assert not reader.store.exists("commits/v=000000000")
    script = f"""
from features.lake import Lake
from features.testing import *
lake = Lake.open({url!r}, **{options!r})
head = tiny_head()
commit_tiny(lake, 0, register_tiny_version(lake, 0, head), [tiny_window(head)])
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    assert len(reader.commit_paths()) == 1
    row = Catalog.load(reader).select(SelectionFilter()).rows[0]
    assert reader.read_window(row).num_rows == 12


def test_retention_gc_and_fsck_work_on_s3(url: str, options: dict[str, Any]) -> None:
    lake = Lake.init(url, TINY_TARGET, **options)
    for number in range(2):
        head = tiny_head(number)
        head_id = register_tiny_version(lake, number, head)
        commit_tiny(lake, number, head_id, [tiny_window(head, version=number)])
    lake.store.create(f"data/v=000000001/{'a' * 32}.{'b' * 32}/zarr.json", b"{}")
    now = datetime.now(UTC)
    facts = fragment_facts(lake, lake.store.scan("data"))
    assert all(abs(now - fact.written_at) < timedelta(minutes=5) for fact in facts)
    plan = plan_retention(facts, RetentionPolicy(keep_versions=1), (), now=now)
    apply_retention(lake, plan, now=now, reason="test")
    assert set(Catalog.load(lake).frame["target_version"]) == {1}
    assert [f.code for f in check_lake(lake, 2)] == ["orphan_data"]
    report = apply_gc(lake, plan_gc(survey(lake), GcPolicy(), now=now + timedelta(days=3)))
    assert report.deleted == {"orphan": 1, "retired_data": 1}
    assert lake.store.exists(f"commits/v=000000001/{'a' * 32}.0.parquet")  # the orphan's fence
    assert [f for f in check_lake(lake, 2) if f.harmful] == []
    assert not [path for path in lake.store.list("data") if "v=000000000" in path]
