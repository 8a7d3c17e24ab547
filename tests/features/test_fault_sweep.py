"""Each request of a commit and of a read goes wrong in turn, in each way: 503, 500, a timeout, a lost
answer, a cut body, a lying length, a stale listing. What is there afterwards is the old state or the new."""

import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

from features.catalog import Catalog
from features.check import check_lake
from features.errors import LakeContractError
from features.lake import Lake
from features.schema import SelectionFilter
from features.testing import TINY_TARGET, commit_tiny, register_tiny_version, tiny_head, tiny_window
from features.testing_s3 import Fault, FaultKind, ServedS3
from features.windows import Window
from features.writer import CommitResult

pytestmark = pytest.mark.s3

HEAD = tiny_head()
FIRST = [tiny_window(HEAD, sample=sample) for sample in range(2)]
SECOND = [tiny_window(HEAD, sample=sample) for sample in range(2, 4)]
COMMIT_REQUESTS = 8
FOR_EVER = 10_000
SOAK = "DRAFTLAKE_SOAK" in os.environ
PATIENCE: dict[str, Any] = {"read_timeout_s": 0.3, "max_attempts": 2}
"""The client gives a request up after this; a held request is held for longer."""

_names = itertools.count()
every_fault = pytest.mark.parametrize("kind", list(FaultKind))


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


def lake_on(s3: ServedS3) -> Lake:
    lake = Lake.init(s3.make_bucket(f"fault-{next(_names)}"), TINY_TARGET, **s3.options(**PATIENCE))
    commit_tiny(lake, 0, register_tiny_version(lake, 0, HEAD), FIRST)
    return lake


def opened(lake: Lake, s3: ServedS3) -> Lake:
    """The lake as another process sees it, through a client that has its usual patience."""
    return Lake.open(lake.url, **s3.options())


def places(kind: FaultKind, count: int) -> range:
    """Requests that go wrong: each one in turn in ``make soak``, else every other, odd or even by kind."""
    return range(count) if SOAK else range(list(FaultKind).index(kind) % 2, count, 2)


def windows_of(lake: Lake) -> list[Window]:
    return [lake.read_window(row) for row in Catalog.load(lake).select(SelectionFilter()).rows]


def assert_holds(lake: Lake, expected: list[Window]) -> None:
    found = windows_of(lake)
    assert [w.meta.sample_id for w in found] == [w.meta.sample_id for w in expected]
    for left, right in zip(found, expected, strict=True):
        np.testing.assert_array_equal(left.aux, right.aux)
        np.testing.assert_array_equal(left.final, right.final)
        np.testing.assert_array_equal(left.token_ids, right.token_ids)


def assert_clean_but_for_orphans(lake: Lake) -> None:
    assert {finding.code for finding in check_lake(lake, 2)} <= {"orphan_data"}


@every_fault
def test_a_commit_survives_one_fault_at_any_request(s3: ServedS3, kind: FaultKind) -> None:
    for at in places(kind, COMMIT_REQUESTS):
        lake = lake_on(s3)
        s3.inject(Fault(kind, at, hold_s=0.5))
        result = commit_tiny(lake, 0, HEAD.head_id, SECOND)
        s3.reset()
        assert result.outcome == "committed", (kind, at)
        assert_holds(opened(lake, s3), FIRST + SECOND)
    assert_clean_but_for_orphans(opened(lake, s3))


@pytest.mark.parametrize(
    "kind", [kind for kind in FaultKind if kind not in (FaultKind.STALE, FaultKind.SHORT)]
)
def test_a_commit_that_fails_for_good_leaves_the_old_state_or_the_new_and_a_rerun_completes_it(
    s3: ServedS3, kind: FaultKind
) -> None:
    # A first look, a data object and the commit: the three roles that a request of a commit can have.
    for at in (0, 3, COMMIT_REQUESTS - 1) if SOAK else (3, COMMIT_REQUESTS - 1):
        lake = lake_on(s3)
        s3.inject(Fault(kind, at, count=FOR_EVER, hold_s=0.4))
        result = attempted(lake)
        s3.reset()
        seen = opened(lake, s3)
        visible = len(seen.commit_paths()) == 2
        assert visible == (at == COMMIT_REQUESTS - 1 and kind in (FaultKind.LOST, FaultKind.TIMEOUT))
        assert result is None or visible
        assert_holds(seen, FIRST + SECOND if visible else FIRST)
        rerun = commit_tiny(seen, 0, HEAD.head_id, SECOND)
        assert rerun.outcome == ("duplicate_plan" if visible else "committed")
        assert_holds(seen, FIRST + SECOND)
        assert_clean_but_for_orphans(seen)


def attempted(lake: Lake) -> CommitResult | None:
    try:
        return commit_tiny(lake, 0, HEAD.head_id, SECOND)
    except OSError:
        return None


@every_fault
def test_a_read_survives_one_fault_at_any_request_or_is_refused_and_never_differs(
    s3: ServedS3, kind: FaultKind
) -> None:
    lake = lake_on(s3)
    s3.reset()
    windows_of(opened(lake, s3))
    for at in places(kind, len(s3.requests)):
        s3.reset()
        s3.inject(Fault(kind, at, hold_s=0.5))
        try:
            found = windows_of(Lake.open(lake.url, **s3.options(**PATIENCE)))
        except LakeContractError:
            # Only an answer that lies about its own length gets through to us, and we look at lengths.
            assert kind is FaultKind.SHORT
            continue
        assert len(found) in ((0, 2) if kind is FaultKind.STALE else (2,))
        for left, right in zip(found, FIRST, strict=False):
            np.testing.assert_array_equal(left.aux, right.aux)
            np.testing.assert_array_equal(left.final, right.final)


def test_a_listing_from_before_another_writers_commit_shows_the_old_revision_whole(s3: ServedS3) -> None:
    lake = lake_on(s3)
    reader = opened(lake, s3)
    before = Catalog.load(reader).revision
    commit_tiny(lake, 0, HEAD.head_id, SECOND)
    s3.inject(Fault(FaultKind.STALE, 0, count=FOR_EVER))
    assert Catalog.load(reader).revision == before
    s3.reset()
    assert Catalog.load(reader).revision.num_fragments == 2


def test_a_stale_listing_costs_a_writer_nothing_because_it_asks_for_names(s3: ServedS3) -> None:
    lake = lake_on(s3)
    s3.inject(Fault(FaultKind.STALE, 0, count=FOR_EVER))
    assert commit_tiny(opened(lake, s3), 0, HEAD.head_id, FIRST).outcome == "duplicate_plan"


def test_a_commit_costs_two_requests_beside_its_data(s3: ServedS3) -> None:
    lake = lake_on(s3)
    s3.reset()
    commit_tiny(lake, 0, HEAD.head_id, SECOND)
    beside_data = [request for request in s3.requests if "/data/" not in request.path]
    assert [request.kind for request in beside_data] == ["GET", "CREATE"]
    assert len(s3.requests) == COMMIT_REQUESTS


def test_creates_that_race_are_serialised_by_the_server(s3: ServedS3) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from features.errors import ObjectExistsError
    from features.storage import Store

    url = s3.make_bucket(f"fault-{next(_names)}")

    def create(writer: int) -> int:
        try:
            Store.open(url, **s3.options()).create("x", b"%d" % writer)
        except ObjectExistsError:
            return 0
        return 1

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(create, range(8))) == 1
