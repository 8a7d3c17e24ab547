"""Hand-written shards against zarr-python, the independent oracle."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from features.bfloat16 import float32_to_bf16
from features.errors import CorruptDataError
from features.schema import FeatureDtype
from features.zarr_layout import SHARD_KEY, ShardLayout, group_metadata, row_bytes_of

# -0.0, smallest subnormal, largest subnormal, inf, -inf, quiet and signalling NaN with payloads, max
AWKWARD = np.array([0x8000, 0x0001, 0x007F, 0x7F80, 0xFF80, 0x7FC1, 0xFFA5, 0x7F7F], np.uint16)

SHAPES = [(1, 1), (5, 3), (700, 1024), (1025, 512), (1024, 512)]


def rows(shape: tuple[int, int], dtype: FeatureDtype) -> np.ndarray:
    rng = np.random.default_rng(shape)
    if dtype is FeatureDtype.FLOAT32:
        return rng.standard_normal(shape, np.float32)
    bits = float32_to_bf16(rng.standard_normal(shape, np.float32))
    flat = bits.reshape(-1)
    flat[: len(AWKWARD)] = AWKWARD[: flat.size]
    return bits


def write(folder: Path, array: np.ndarray, dtype: FeatureDtype) -> ShardLayout:
    layout = ShardLayout.plan(*array.shape, dtype)
    (folder / "aux/c/0").mkdir(parents=True)
    (folder / "zarr.json").write_bytes(group_metadata({"draftlake": {"dtype": dtype.value}}))
    (folder / "aux/zarr.json").write_bytes(layout.metadata())
    (folder / "aux" / SHARD_KEY).write_bytes(layout.shard(row_bytes_of(array)))
    return layout


@pytest.mark.parametrize("dtype", FeatureDtype)
@pytest.mark.parametrize("shape", SHAPES)
def test_zarr_python_reads_the_array_bit_for_bit(
    tmp_path: Path, shape: tuple[int, int], dtype: FeatureDtype
) -> None:
    zarr = pytest.importorskip("zarr")
    import features.zarr_bfloat16  # noqa: F401

    array = rows(shape, dtype)
    layout = write(tmp_path, array, dtype)
    group = zarr.open_group(tmp_path, mode="r")
    assert group.attrs["draftlake"] == {"dtype": dtype.value}
    found = group["aux"]
    assert (found.shape, found.metadata.dimension_names) == (shape, ("token", "feature"))
    assert found.shards == (layout.num_chunks * layout.inner_rows, shape[1])
    bits = np.uint16 if dtype is FeatureDtype.BFLOAT16 else np.uint32
    np.testing.assert_array_equal(found[:].view(bits), array.view(bits))


@pytest.mark.parametrize("dtype", FeatureDtype)
@pytest.mark.parametrize("shape", SHAPES)
def test_row_r_starts_at_byte_r_times_row_bytes(
    tmp_path: Path, shape: tuple[int, int], dtype: FeatureDtype
) -> None:
    array = rows(shape, dtype)
    layout = write(tmp_path, array, dtype)
    shard = (tmp_path / "aux" / SHARD_KEY).read_bytes()
    assert len(shard) == layout.object_bytes
    for row in (0, shape[0] // 2, shape[0] - 1):
        start = row * layout.row_bytes
        assert shard[start : start + layout.row_bytes] == array[row].tobytes()


@pytest.mark.parametrize("shape", [(700, 1024), (5, 3)])
def test_the_shard_is_the_bytes_that_zarr_python_would_write(tmp_path: Path, shape: tuple[int, int]) -> None:
    zarr = pytest.importorskip("zarr")
    array = rows(shape, FeatureDtype.FLOAT32)
    layout = write(tmp_path / "ours", array, FeatureDtype.FLOAT32)
    padded = layout.num_chunks * layout.inner_rows
    theirs = zarr.create_array(
        tmp_path / "theirs", shape=shape, chunks=(layout.inner_rows, shape[1]), shards=(padded, shape[1]),
        dtype="float32", compressors=None, fill_value=0.0, config={"write_empty_chunks": True},
    )  # fmt: skip
    theirs[:] = array
    ours = (tmp_path / "ours/aux" / SHARD_KEY).read_bytes()
    assert ours == (tmp_path / "theirs" / SHARD_KEY).read_bytes()


def test_bf16_survives_a_fresh_process_with_and_without_ml_dtypes(tmp_path: Path) -> None:
    array = np.resize(AWKWARD, (16, 8))
    layout = write(tmp_path, array, FeatureDtype.BFLOAT16)
    (tmp_path / "expected").write_bytes(array.tobytes())
    by_bytes = f"""
import sys
from pathlib import Path
from features.zarr_layout import ShardLayout
root = Path({str(tmp_path)!r})
layout = ShardLayout.from_metadata((root / "aux/zarr.json").read_bytes(), where="aux")
assert layout.dtype == "bfloat16" and "ml_dtypes" not in sys.modules
shard = (root / "aux/c/0/0").read_bytes()
assert shard[: 16 * layout.row_bytes] == (root / "expected").read_bytes()
"""
    by_zarr = f"""
import features.zarr_bfloat16, zarr
from pathlib import Path
root = Path({str(tmp_path)!r})
found = zarr.open_array(root / "aux", mode="r")
assert str(found.dtype) == "bfloat16", found.dtype
assert found[:].tobytes() == (root / "expected").read_bytes()
"""
    pytest.importorskip("zarr")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    for script in (by_bytes, by_zarr):
        subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    assert layout.inner_rows == 16


def test_an_absent_shard_shows_as_nan_to_zarr_tools_and_never_as_zeros(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    import features.zarr_bfloat16  # noqa: F401

    for dtype in FeatureDtype:
        write(tmp_path / dtype, rows((5, 3), dtype), dtype)
        (tmp_path / dtype / "aux" / SHARD_KEY).unlink()
        found = zarr.open_array(tmp_path / dtype / "aux", mode="r")[:]
        assert np.isnan(found.astype(np.float32)).all()


def test_a_zero_row_is_stored_and_not_left_out(tmp_path: Path) -> None:
    layout = write(tmp_path, np.zeros((4, 8), np.float32), FeatureDtype.FLOAT32)
    assert (tmp_path / "aux" / SHARD_KEY).stat().st_size == 4 * 8 * 4 + 16 + 4 == layout.object_bytes


@pytest.mark.parametrize("raw", [b"", b"{}", b"[]", b'{"shape": [1]}', b"\xff"])
def test_metadata_of_something_else_is_refused(raw: bytes) -> None:
    with pytest.raises(CorruptDataError):
        ShardLayout.from_metadata(raw, where="x")


def test_metadata_with_a_compressor_is_refused() -> None:
    layout = ShardLayout.plan(4, 8, FeatureDtype.FLOAT32)
    changed = layout.metadata().replace(b'"token"', b'"time"')
    assert ShardLayout.from_metadata(layout.metadata(), where="x") == layout
    with pytest.raises(CorruptDataError, match="another layout"):
        ShardLayout.from_metadata(changed, where="x")


def test_a_shard_of_the_wrong_length_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="4 rows"):
        ShardLayout.plan(4, 8, FeatureDtype.FLOAT32).shard(bytes(127))
