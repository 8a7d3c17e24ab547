"""Each request of a commit and of a read goes wrong in turn, in each way: 503, 500, a timeout, a lost
answer, a cut body, a lying length, a stale listing. What is there afterwards is the old state or the new."""

import itertools
import os
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

from features.catalog import Catalog
from features.check import check_lake
from features.errors import CorruptDataError, LakeContractError, LakeNotFoundError
from features.lake import Lake
from features.schema import SelectionFilter
from features.testing import TINY_TARGET, commit_tiny, register_tiny_version, tiny_head, tiny_window
from features.testing_s3 import PATIENCE, Fault, FaultKind, Request, ServedS3, impatient_clients
from features.windows import Window
from features.writer import CommitResult

pytestmark = pytest.mark.s3

HEAD = tiny_head()
FIRST = [tiny_window(HEAD, sample=sample) for sample in range(2)]
SECOND = [tiny_window(HEAD, sample=sample) for sample in range(2, 4)]
COMMIT_REQUESTS = 8
FOR_EVER = 10_000
SOAK = "DRAFTLAKE_SOAK" in os.environ

_names = itertools.count()
every_fault = pytest.mark.parametrize("kind", list(FaultKind))


@pytest.fixture(scope="module")
def s3() -> Iterator[ServedS3]:
    with ServedS3() as server:
        yield server


@pytest.fixture(autouse=True)
def no_waiting(s3: ServedS3) -> Iterator[None]:
    s3.reset()
    with impatient_clients():
        yield
    s3.reset()


def lake_on(s3: ServedS3) -> Lake:
    lake = Lake.init(s3.make_bucket(f"fault-{next(_names)}"), TINY_TARGET, **s3.options(**PATIENCE))
    commit_tiny(lake, 0, register_tiny_version(lake, 0, HEAD), FIRST)
    return lake


def opened(lake: Lake, s3: ServedS3) -> Lake:
    """The lake as another process sees it, through a client that has its usual patience."""
    return Lake.open(lake.url, **s3.options())


def places(kind: FaultKind, requests: Sequence[Request]) -> list[int]:
    """Requests that go wrong: each one in turn in ``make soak``, else every third, other ones by kind."""
    touched = [index for index, request in enumerate(requests) if kind.touches(request.kind)]
    return touched if SOAK else touched[min(list(FaultKind).index(kind) % 3, len(touched) - 1) :: 3]


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


# A commit asks for names and never for a listing.
@pytest.mark.parametrize("kind", [kind for kind in FaultKind if kind is not FaultKind.STALE])
def test_a_commit_survives_one_fault_at_any_request(s3: ServedS3, kind: FaultKind) -> None:
    lake = lake_on(s3)
    s3.reset()
    commit_tiny(lake, 0, HEAD.head_id, SECOND)
    for at in places(kind, s3.requests):
        lake = lake_on(s3)
        s3.inject(Fault(kind, at))
        result = commit_tiny(lake, 0, HEAD.head_id, SECOND)
        s3.reset()
        assert result.outcome == "committed", (kind, at)
        assert_holds(opened(lake, s3), FIRST + SECOND)
    assert_clean_but_for_orphans(opened(lake, s3))


@pytest.mark.parametrize(
    "kind",
    [kind for kind in FaultKind if kind not in (FaultKind.STALE, FaultKind.SHORT, FaultKind.MISSING)],
)
def test_a_commit_that_fails_for_good_leaves_the_old_state_or_the_new_and_a_rerun_completes_it(
    s3: ServedS3, kind: FaultKind
) -> None:
    # A first look, a data object and the commit: the three roles that a request of a commit can have.
    for at in (0, 3, COMMIT_REQUESTS - 1) if SOAK else (3, COMMIT_REQUESTS - 1):
        lake = lake_on(s3)
        s3.inject(Fault(kind, at, count=FOR_EVER))
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
    for at in places(kind, s3.requests):
        s3.reset()
        s3.inject(Fault(kind, at))
        try:
            found = windows_of(Lake.open(lake.url, **s3.options(**PATIENCE)))
        except (LakeContractError, LakeNotFoundError):
            # Only answers that lie get through to us: about their own length, or about what there is.
            assert kind in (FaultKind.SHORT, FaultKind.MISSING)
            continue
        assert len(found) in ((0, 2) if kind is FaultKind.STALE else (2,))
        for left, right in zip(found, FIRST, strict=False):
            np.testing.assert_array_equal(left.aux, right.aux)
            np.testing.assert_array_equal(left.final, right.final)


@pytest.mark.parametrize("array", ["aux", "final"])
def test_a_shard_that_is_once_answered_as_absent_fails_the_read_and_is_read_the_next_time(
    s3: ServedS3, array: str
) -> None:
    # obstore is not installed everywhere, and where it fails s3fs asks once more: here the answer counts.
    lake = Lake.open(lake_on(s3).url, **s3.options(), reader="s3fs")
    row = next(iter(Catalog.load(lake).select(SelectionFilter()).rows))
    lake.read_tokens(row)
    s3.inject(Fault(FaultKind.MISSING, 0 if array == "aux" else 1))
    with pytest.raises(CorruptDataError, match=f"{array}/c/0/0"):
        lake.read_window(row)
    assert [r.fault for r in s3.requests if f"/{array}/" in r.path][-1] is FaultKind.MISSING
    found = lake.read_window(row)
    np.testing.assert_array_equal(found.aux, FIRST[0].aux)
    np.testing.assert_array_equal(found.final, FIRST[0].final)


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
