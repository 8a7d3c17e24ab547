"""Compaction and pruning on S3: each request goes wrong in turn, in each way, and two compactors race."""

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

from features.catalog import Catalog
from features.compaction import compact, prune_commits
from features.errors import LakeContractError
from features.lake import Lake
from features.schema import SelectionFilter
from features.testing import TINY_TARGET, commit_tiny, register_tiny_version, tiny_head, tiny_window
from features.testing_s3 import Fault, FaultKind, ServedS3

pytestmark = pytest.mark.s3

HEAD = tiny_head()
NOW = datetime(2026, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)
MAX_REQUESTS = 40
"""More than maintenance of a small lake makes; the sweep ends where no request is hit any more."""
_names = itertools.count()


@pytest.fixture(scope="module")
def s3() -> Iterator[ServedS3]:
    with ServedS3() as server:
        yield server


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch, s3: ServedS3) -> Iterator[None]:
    monkeypatch.setattr("features.storage.time.sleep", lambda seconds: None)
    monkeypatch.setattr("features.storage._MAX_ATTEMPTS", 2)
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 2)
    s3.reset()
    yield
    s3.reset()


def lake_on(s3: ServedS3, **patience: Any) -> Lake:
    lake = Lake.init(s3.make_bucket(f"snap-{next(_names)}"), TINY_TARGET, **s3.options(**patience))
    head_id = register_tiny_version(lake, 0, HEAD)
    commit_tiny(lake, 0, head_id, [tiny_window(HEAD, sample=sample) for sample in range(2)])
    compact(lake, now=lambda: NOW)
    commit_tiny(lake, 0, head_id, [tiny_window(HEAD, sample=2)])
    return lake


def maintain(lake: Lake) -> None:
    compact(lake, now=lambda: NOW + DAY)
    prune_commits(lake, grace=DAY, now=NOW + 3 * DAY)


def view(lake: Lake, s3: ServedS3) -> tuple[str, str]:
    catalog = Catalog.load(Lake.open(lake.url, **s3.options()))
    return catalog.revision.digest, catalog.select(SelectionFilter()).digest


def moments(requests: int, offset: int, *, once: bool) -> range:
    """Where faults begin: each kind elsewhere, so that together they meet every request; all in ``make soak``."""
    if "DRAFTLAKE_SOAK" in os.environ:
        return range(requests)
    return range(offset, requests, len(FaultKind)) if once else range(4 * offset, 4 * offset + 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(FaultKind))
@pytest.mark.parametrize("count", [1, 10_000])
def test_maintenance_survives_a_fault_at_any_request(s3: ServedS3, kind: FaultKind, count: int) -> None:
    lake = lake_on(s3, read_timeout_s=0.3, max_attempts=2)
    before = view(lake, s3)
    s3.reset()
    maintain(lake)
    requests = len(s3.requests)
    assert requests < MAX_REQUESTS
    for at in moments(requests, list(FaultKind).index(kind), once=count == 1):
        lake = lake_on(s3, read_timeout_s=0.3, max_attempts=2)
        s3.inject(Fault(kind, at, count=count, hold_s=0.4))
        with suppress(OSError, LakeContractError):  # nothing is promised but what is checked below
            maintain(Lake(lake.store, lake.target))
        s3.reset()
        assert view(lake, s3) == before, (kind, at)
        maintain(lake)
        assert view(lake, s3) == before, (kind, at)
        assert lake.store.list("commits") == [], (kind, at)
        assert len(lake.store.list("snapshots")) == 3, (kind, at)


def test_racing_compactors_on_s3_make_one_snapshot_and_agree(s3: ServedS3) -> None:
    lake = lake_on(s3)
    before = view(lake, s3)
    others = [Lake.open(lake.url, **s3.options()) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda own: compact(own, now=lambda: NOW), others))
    assert [result.outcome for result in results].count("written") == 1
    assert [snapshot.number for snapshot in lake.snapshots.all()] == [1, 2]
    assert view(lake, s3) == before
