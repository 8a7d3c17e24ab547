"""The same windows as this lake and its rivals hold them, and one way to read each.

Every subject reads all features of a window into memory. The lake's and the ceiling's land in
buffers that are used again, as a trainer's do; the others allocate, as their APIs do.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from features.fragments import land, row_bytes, shard_path
from features.lake import Lake
from features.schema import FeatureDtype, FragmentLayout, TargetVersion
from features.selection import Selection
from features.testing import TINY_TARGET, register_tiny_version, tiny_head
from features.windows import Window, WindowMeta
from features.writer import ARRAYS, write_fragment
from features.zarr_layout import crc32c

Row = Mapping[str, Any]
ReadOne = Callable[[Row], object]
ReadAll = Callable[[], object]
"""Reads every window once."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a benchmark's windows look like."""

    hidden_size: int
    windows: int
    windows_per_fragment: int
    rows: int = 512

    @property
    def window_bytes(self) -> int:
        """Three aux layers and the final one, two bytes an element."""
        return self.rows * self.hidden_size * 4 * 2


def make_lake(url: str, shape: Shape, **storage_options: Any) -> Lake:
    """A lake of random windows; bits are random, since nothing here looks at values."""
    target = replace(TINY_TARGET, target_id=f"bench-{shape.hidden_size}", hidden_size=shape.hidden_size)
    lake = Lake.init(url, target, **storage_options)
    head_id = register_tiny_version(lake, 0, tiny_head(target=target))
    windows = [_window(shape, sample) for sample in range(shape.windows)]
    for first in range(0, shape.windows, shape.windows_per_fragment):
        write_fragment(
            lake, version=TargetVersion(0), head_id=head_id, plan_id=f"bench-{first:06d}", writer_id="bench",
            windows=windows[first : first + shape.windows_per_fragment],
        )  # fmt: skip
    return lake


def _window(shape: Shape, sample: int) -> Window:
    rng, rows = np.random.default_rng(sample), shape.rows
    layout = FragmentLayout((2, 4, 5), FeatureDtype.BFLOAT16, shape.hidden_size)
    tokens = rng.integers(0, TINY_TARGET.vocab_size, rows + 1).astype(np.int32)
    tokens[-1] = -1
    meta = WindowMeta(f"s{sample:06d}", f"g{sample:06d}", TargetVersion(0), 0, rows, rows // 4)
    widths = (layout.aux_width, layout.hidden_size)
    aux, final = (
        np.frombuffer(rng.bytes(rows * width * 2), np.uint16).reshape(rows, width) for width in widths
    )
    return Window(
        meta,
        layout,
        tokens,
        np.arange(rows + 1) >= rows // 4,
        None,
        np.full(rows + 1, np.nan, np.float32),
        aux,
        final,
    )


@contextmanager
def local_subjects(
    lake: Lake, selection: Selection, rows: Sequence[Row], scratch: Path
) -> Iterator[dict[str, ReadAll]]:
    """Readers by name, over files in ``scratch`` that hold the windows of ``rows`` each in its own way.

    All but ``lake_reader``, which is the whole training reader with its own order and threads,
    read the windows one after the other, in the order of ``rows``.
    """
    with ExitStack() as stack:
        one_by_one = {
            "preadv": _preadv(lake, rows, stack),
            "lake": checked_ranges(lake, rows, checked=False),
            "lake_crc": checked_ranges(lake, rows, checked=True),
            "lake_window": lake.read_window,
            "zarr": _zarr(lake, rows),
            "safetensors_per_window": _safetensors(lake, rows, scratch),
            "pt_per_window": _pt(lake, rows, scratch),
        }
        yield {name: each_window(read, rows) for name, read in one_by_one.items()} | {
            "lake_reader": training_reader(lake, selection)
        }


def each_window(read: ReadOne, rows: Sequence[Row]) -> ReadAll:
    """Reads the windows of ``rows`` one after the other."""

    def read_all() -> None:
        for row in rows:
            read(row)

    return read_all


def training_reader(lake: Lake, selection: Selection) -> ReadAll:
    """Reads one epoch of a selection as training does, with its own order and threads."""
    from training.reading.reader import SelectionReader
    from training.reading.spec import ReadSpec

    reader = SelectionReader(lake, selection, ReadSpec(order="random", batch_rows=1))

    def read_all() -> None:
        for _step in reader.read():
            pass

    return read_all


def _byte_range(row: Row, array: str) -> tuple[int, int]:
    size = row_bytes(row, array)
    return row["row_offset"] * size, (row["row_offset"] + row["num_rows"]) * size


def _slabs(rows: Sequence[Row]) -> dict[str, np.ndarray[Any, np.dtype[np.uint8]]]:
    sizes = {
        array: max(stop - start for start, stop in (_byte_range(row, array) for row in rows))
        for array in ARRAYS
    }
    return {array: np.zeros(size, np.uint8) for array, size in sizes.items()}


def _preadv(lake: Lake, rows: Sequence[Row], stack: ExitStack) -> ReadOne:
    """The ceiling: files open already, one system call for each array, no check."""
    slabs, files = _slabs(rows), {}
    for prefix in {row["data_prefix"] for row in rows}:
        for array in ARRAYS:
            descriptor = os.open(Path(lake.url) / shard_path(prefix, array), os.O_RDONLY)
            stack.callback(os.close, descriptor)
            files[prefix, array] = descriptor

    def read(row: Row) -> None:
        for array in ARRAYS:
            start, stop = _byte_range(row, array)
            view, at = slabs[array][: stop - start].data, 0
            while at < len(view):
                at += os.preadv(files[row["data_prefix"], array], [view[at:]], start + at)

    return read


def checked_ranges(lake: Lake, rows: Sequence[Row], *, checked: bool) -> ReadOne:
    """The landing of the training reader, on one thread."""
    from training.reading.caches import OpenObjects

    slabs, objects = _slabs(rows), OpenObjects(lake.store)

    def read(row: Row) -> None:
        for array in ARRAYS:
            start, stop = _byte_range(row, array)
            into = slabs[array][: stop - start]
            land(objects.opened, shard_path(row["data_prefix"], array), start, into, url=lake.url)
            if checked and crc32c(into) != row[f"crc32c_{array}"]:
                raise AssertionError(f"{array} of {row['sample_id']} did not read back")

    return read


def _zarr(lake: Lake, rows: Sequence[Row]) -> ReadOne:
    import zarr

    import features.zarr_bfloat16  # noqa: F401  registers the data type

    opened = {
        (prefix, array): zarr.open_array(str(Path(lake.url) / prefix / array), mode="r")
        for prefix in {row["data_prefix"] for row in rows}
        for array in ARRAYS
    }

    def read(row: Row) -> list[Any]:
        span = slice(row["row_offset"], row["row_offset"] + row["num_rows"])
        return [opened[row["data_prefix"], array][span] for array in ARRAYS]

    return read


def _safetensors(lake: Lake, rows: Sequence[Row], scratch: Path) -> ReadOne:
    from safetensors.numpy import load_file, save_file

    for row in rows:
        window = lake.read_window(row)
        save_file({"aux": window.aux, "final": window.final}, scratch / f"{row['sample_id']}.safetensors")
    return lambda row: load_file(scratch / f"{row['sample_id']}.safetensors")


def _pt(lake: Lake, rows: Sequence[Row], scratch: Path) -> ReadOne:
    import torch

    for row in rows:
        window = lake.read_window(row)
        tensors = {name: torch.from_numpy(getattr(window, name).view(np.int16)) for name in ARRAYS}
        torch.save(tensors, scratch / f"{row['sample_id']}.pt")
    return lambda row: torch.load(scratch / f"{row['sample_id']}.pt", weights_only=True)
