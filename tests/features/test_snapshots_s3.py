"""Compactors that race on S3 make one snapshot. What happens when requests fail: ``test_maintenance_s3.py``."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

from features.catalog import Catalog
from features.compaction import compact
from features.lake import Lake
from features.schema import SelectionFilter
from features.testing import TINY_TARGET, commit_tiny, register_tiny_version, tiny_head, tiny_window
from features.testing_s3 import ServedS3

pytestmark = pytest.mark.s3

HEAD = tiny_head()
NOW = datetime(2026, 1, 1, tzinfo=UTC)
_names = itertools.count()


@pytest.fixture(scope="module")
def s3() -> Iterator[ServedS3]:
    with ServedS3() as server:
        yield server


def lake_on(s3: ServedS3) -> Lake:
    lake = Lake.init(s3.make_bucket(f"snap-{next(_names)}"), TINY_TARGET, **s3.options())
    head_id = register_tiny_version(lake, 0, HEAD)
    commit_tiny(lake, 0, head_id, [tiny_window(HEAD, sample=sample) for sample in range(2)])
    compact(lake, now=lambda: NOW)
    commit_tiny(lake, 0, head_id, [tiny_window(HEAD, sample=2)])
    return lake


def view(lake: Lake, s3: ServedS3) -> tuple[str, str]:
    catalog = Catalog.load(Lake.open(lake.url, **s3.options()))
    return catalog.revision.digest, catalog.select(SelectionFilter()).digest


def test_racing_compactors_on_s3_make_one_snapshot_and_agree(s3: ServedS3) -> None:
    lake = lake_on(s3)
    before = view(lake, s3)
    others = [Lake.open(lake.url, **s3.options()) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda own: compact(own, now=lambda: NOW), others))
    assert [result.outcome for result in results].count("written") == 1
    assert [snapshot.number for snapshot in lake.snapshots.all()] == [1, 2]
    assert view(lake, s3) == before
