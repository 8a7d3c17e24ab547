"""Eight writers at once, locally and on S3, fences and late ones among them: none lost, none doubled.

The whole (100 commits each) runs in ``make soak``; here each writer commits a few times.
"""

import os
from collections import Counter
from pathlib import Path

import pytest

from pipelines.bench.commits import ManyWriters, race_writers

WRITERS = 8
COMMITS = 100 if "DRAFTLAKE_SOAK" in os.environ else 6
DATA_OBJECTS = 6


def assert_nothing_lost(result: ManyWriters) -> None:
    assert result.commits == WRITERS * COMMITS
    shared = len(range(0, COMMITS, 5)) * WRITERS // 2
    assert result.plans == WRITERS * COMMITS - shared
    assert result.outcomes == {"committed": result.plans, "duplicate_plan": shared}
    assert (result.lost, result.duplicated, result.differing, result.harmful) == (0, 0, 0, 0)
    assert result.fenced > 0


def test_eight_writers_on_a_local_folder_lose_and_double_nothing(tmp_path: Path) -> None:
    assert_nothing_lost(race_writers(str(tmp_path / "lake"), writers=WRITERS, commits_per_writer=COMMITS))


@pytest.mark.s3
def test_eight_writers_on_s3_lose_and_double_nothing() -> None:
    pytest.importorskip("moto.server")
    from features.testing_s3 import ServedS3

    with ServedS3() as s3:
        url = s3.make_bucket("many-writers") + "/lake"
        result = race_writers(url, writers=WRITERS, commits_per_writer=COMMITS, storage_options=s3.options())
        assert_nothing_lost(result)
        creates = Counter(r.path.split("/")[3] for r in s3.requests if r.kind == "CREATE" and r.status == 200)
        # Whoever lost a race or met a fence wrote data that nobody names.
        assert creates["data"] >= DATA_OBJECTS * result.plans
    # A crowd makes everyone wait, and nobody starve.
    assert result.p95_over_p50 < 10
