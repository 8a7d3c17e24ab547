"""Sources and lake on S3: the same windows as on disk, also after the store failed half-way."""

import os
from collections.abc import Iterator
from pathlib import Path

import backfill_toy
import pytest
from backfill_toy import make_lake, run, write_source

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

from features.storage import Store
from features.testing_s3 import Fault, FaultKind, ServedS3

pytestmark = pytest.mark.s3


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedS3]:
    """A served S3 that the environment leads to, and nothing else."""
    import s3fs

    for name in [n for n in os.environ if n.startswith(("AWS_", "FSSPEC_", "DRAFTLAKE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    with ServedS3() as server:
        settings = {
            "AWS_ENDPOINT_URL": server.endpoint, "AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x", "AWS_EC2_METADATA_DISABLED": "true", "AWS_MAX_ATTEMPTS": "1",
        }  # fmt: skip
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        yield server


def test_a_backfill_from_s3_to_s3_is_the_one_on_disk_and_a_failing_store_only_interrupts_it(
    s3: ServedS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backfill_toy.use_toy_target(monkeypatch.setattr)
    (tmp_path / "here").mkdir()
    files = [write_source(tmp_path / "here" / f"{n}.jsonl", range(4 * n, 4 * n + 4)) for n in range(2)]
    expected = run(make_lake(str(tmp_path / "lake")).url, tmp_path / "here")
    bucket = s3.make_bucket("backfill")
    there = Store.open(f"{bucket}/rollouts")
    for file in files:
        there.create(file.name, file.read_bytes())
    lake = make_lake(f"{bucket}/lake")
    s3.reset()
    s3.inject(Fault(FaultKind.BROKEN, at=40, count=1000))
    with pytest.raises(OSError, match="."):
        run(lake.url, f"{bucket}/rollouts/*.jsonl")
    s3.reset()
    report = run(lake.url, f"{bucket}/rollouts/*.jsonl")
    assert report.rows_read == report.accounted == expected.rows_read
    assert report.quarantined == expected.quarantined
    assert report.content_digest == expected.content_digest
