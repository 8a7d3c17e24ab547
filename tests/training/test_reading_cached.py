"""The fast reader through a read cache: the same windows, and a second epoch without a request."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

from features.catalog import Catalog
from features.lake import Lake
from features.schema import SelectionFilter
from features.testing import TINY_TARGET, commit_tiny, register_tiny_version, tiny_head, tiny_window
from features.testing_s3 import ServedS3
from training.reading.reader import SelectionReader
from training.reading.spec import Position, ReadSpec


@pytest.fixture
def s3() -> Iterator[ServedS3]:
    with ServedS3() as server:
        yield server


@pytest.mark.s3
@pytest.mark.parametrize("order", ["random", "stream"])
def test_every_later_epoch_comes_from_the_folder_and_a_spoilt_part_from_the_store(
    s3: ServedS3, tmp_path: Path, order: Any
) -> None:
    options = {**s3.options(), "cache_dir": str(tmp_path / "cache"), "cache_bytes": 10**8}
    lake, head = Lake.init(f"{s3.make_bucket('epochs')}/lake", TINY_TARGET, **options), tiny_head()
    windows = [tiny_window(head, sample=sample) for sample in range(12)]
    head_id = register_tiny_version(lake, 0, head)
    for first in range(0, 12, 4):
        commit_tiny(lake, 0, head_id, windows[first : first + 4])
    selection = Catalog.load(lake).select(SelectionFilter())
    spec = replace(ReadSpec(batch_rows=48), order=order)

    def epoch(number: int) -> int:
        """Read an epoch with a reader of its own; the requests for data that it made."""
        opened = Lake.open(lake.url, **options)
        s3.reset()
        seen = set()
        for step in SelectionReader(opened, selection, spec).read(Position(number)):
            for index, window in zip(step.indices, step.windows, strict=True):
                seen.add(index)
                np.testing.assert_array_equal(window.aux, windows[index].aux)
                np.testing.assert_array_equal(window.final, windows[index].final)
        assert len(seen) == 12
        return sum("/data/" in request.path for request in s3.requests)

    assert epoch(0) > 0
    assert [epoch(1), epoch(2)] == [0, 0]
    for path in (tmp_path / "cache").rglob("*-*"):
        if path.is_file() and path.stat().st_size:
            raw = bytearray(path.read_bytes())
            raw[len(raw) // 2] ^= 0x10  # a token table stays readable, with another token in it
            path.write_bytes(raw)
    assert epoch(3) > 0
