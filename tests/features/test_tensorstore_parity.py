"""Reads of a committed fragment equal zarr-python's and tensorstore's bit for bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from features.catalog import Catalog
from features.lake import Lake
from features.schema import FeatureDtype, FragmentLayout, SelectionFilter
from features.testing import TINY_TARGET, commit_tiny, register_tiny_version, tiny_head, tiny_window

tensorstore = pytest.importorskip("tensorstore")
zarr = pytest.importorskip("zarr")

# -0.0, smallest and largest subnormal, inf, -inf, quiet and signalling NaN with payloads, max
AWKWARD = {
    FeatureDtype.BFLOAT16: np.array(
        [0x8000, 0x0001, 0x007F, 0x7F80, 0xFF80, 0x7FC1, 0xFFA5, 0x7F7F], np.uint16
    ),
    FeatureDtype.FLOAT32: np.array(
        [0x80000000, 1, 0x007FFFFF, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFA00005, 0x7F7FFFFF], np.uint32
    ),
}


def bits(array: Any) -> np.ndarray:
    """Raw bits; views, so that no value is touched."""
    found = np.asarray(array)
    return found.view(np.uint16 if found.dtype.itemsize == 2 else np.uint32)


def by_tensorstore(folder: Path) -> Any:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/"}}
    return tensorstore.open(spec, read=True).result()


@pytest.mark.parametrize("dtype", FeatureDtype)
@pytest.mark.parametrize("hidden_size", [576, 577, 33])
def test_windows_equal_zarr_python_and_tensorstore_bit_for_bit(
    tmp_path: Path, hidden_size: int, dtype: FeatureDtype
) -> None:
    import features.zarr_bfloat16  # noqa: F401

    layout = FragmentLayout((2, 4, 5), dtype, hidden_size)
    target = TINY_TARGET.__class__(
        **{name: getattr(TINY_TARGET, name) for name in TINY_TARGET.__slots__} | {"hidden_size": hidden_size}
    )
    lake, head = Lake.init(str(tmp_path), target), tiny_head(target=target)
    windows = [tiny_window(head, sample=n, num_rows=700 + 13 * n, layout=layout) for n in range(3)]
    for window in windows:
        for array in (window.aux, window.final):
            flat = bits(array).reshape(-1)
            flat[: len(AWKWARD[dtype])] = AWKWARD[dtype]
            flat[-len(AWKWARD[dtype]) :] = AWKWARD[dtype]
    commit_tiny(lake, 0, register_tiny_version(lake, 0, head), windows)
    rows = list(Catalog.load(lake).select(SelectionFilter()).rows)
    assert len(rows) == 3
    for array in ("aux", "final"):
        folder = tmp_path / rows[0]["data_prefix"] / array
        theirs, third = by_tensorstore(folder), zarr.open_array(folder, mode="r")
        assert str(theirs.dtype.name) == str(third.dtype) == dtype.value
        whole = bits(theirs.read().result())
        np.testing.assert_array_equal(bits(third[:]), whole)
        for row, window in zip(rows, windows, strict=True):
            span = slice(row["row_offset"], row["row_offset"] + row["num_rows"])
            found = bits(getattr(lake.read_window(row), array))
            np.testing.assert_array_equal(found, bits(getattr(window, array)))
            np.testing.assert_array_equal(found, whole[span])
            np.testing.assert_array_equal(found, bits(theirs[span].read().result()))
            np.testing.assert_array_equal(found, bits(third[span]))
