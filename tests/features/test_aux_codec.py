"""Aux features as int8: what is lost is measured, stated and bounded; what is not known is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from features import aux_codec
from features.bfloat16 import from_float32, to_float32
from features.catalog import Catalog
from features.check import check_lake
from features.errors import CorruptDataError, LakeContractError
from features.lake import Lake
from features.schema import AuxCodec, FeatureDtype, FragmentLayout, SelectionFilter, TargetVersion
from features.stream_options import StreamOptions
from features.stream_writer import StreamWriter
from features.testing import TINY_TARGET, register_tiny_version, tiny_head, tiny_window
from features.windows import Window
from features.writer import write_fragment
from training.reading.reader import SelectionReader
from training.reading.spec import ReadSpec

HEAD = tiny_head()
EACH_DTYPE = pytest.mark.parametrize("dtype", FeatureDtype)


def activations(rows: int, width: int, *, seed: int = 0) -> Any:
    """Rows as a transformer gives them: channels of very different loudness, a few of them huge."""
    rng = np.random.default_rng(seed)
    loudness = np.exp(rng.normal(0, 1.5, width))
    loudness[rng.integers(0, width, 3)] *= 300
    length = np.exp(rng.normal(0, 0.5, (rows, 1)))
    return (rng.standard_normal((rows, width)) * loudness * length).astype(np.float32)


def relative(found: Any, wanted: Any) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@EACH_DTYPE
@pytest.mark.parametrize("width", [48, 128, 200, 3 * 576])
def test_the_stated_error_is_the_error_and_is_below_one_percent(dtype: FeatureDtype, width: int) -> None:
    aux = from_float32(activations(700, width), dtype)
    scales = aux_codec.channel_scales([aux], dtype)
    stored, error = aux_codec.encode(aux, dtype, scales)
    assert stored.shape == (700, aux_codec.row_bytes(width, dtype, AuxCodec.INT8))
    assert error is not None
    found = aux_codec.decode(stored, dtype, scales)
    assert (found.dtype, found.shape) == (aux.dtype, aux.shape)
    wanted = to_float32(aux, dtype)
    assert error == pytest.approx(relative(to_float32(found, dtype), wanted), rel=1e-5)
    assert 1e-4 < error < 0.01
    # Whitened: a quiet channel is kept as well as a loud one, relative to itself.
    by_channel = np.linalg.norm(to_float32(found, dtype) - wanted, axis=0) / np.linalg.norm(wanted, axis=0)
    assert by_channel.max() < 0.03


def test_no_step_is_beyond_the_largest_and_zero_stays_zero() -> None:
    dtype = FeatureDtype.FLOAT32
    aux = activations(64, 256)
    aux[5], aux[6, :128] = 0, 0
    scales = aux_codec.channel_scales([aux], dtype)
    stored, _ = aux_codec.encode(aux, dtype, scales)
    found = to_float32(aux_codec.decode(stored, dtype, scales), dtype)
    assert not found[5].any()
    assert not found[6, :128].any()
    groups = (aux / scales).reshape(64, 2, 128)
    # Half a step of the group's own scale, which bfloat16 rounds up by at most 2 ** -7.
    half = np.abs(groups).max(axis=2, keepdims=True) / 127 * (1 + 2**-7) / 2
    assert (np.abs((found / scales).reshape(groups.shape) - groups) <= half * 1.001).all()


def test_a_value_that_is_not_finite_is_never_made_finite() -> None:
    dtype = FeatureDtype.BFLOAT16
    aux = from_float32(activations(16, 256), dtype)
    aux[3, 5], aux[4, 200] = 0x7F80, 0x7FC0
    scales = aux_codec.channel_scales([aux], dtype)
    stored, error = aux_codec.encode(aux, dtype, scales)
    found = to_float32(aux_codec.decode(stored, dtype, scales), dtype)
    assert np.isnan(found[3, :128]).all()
    assert np.isnan(found[4, 128:]).all()
    assert np.isfinite(np.delete(found, [3, 4], axis=0)).all()
    assert error is not None
    assert error < 0.01
    aux[:] = 0x7FC0
    assert aux_codec.encode(aux, dtype, aux_codec.channel_scales([aux], dtype))[1] is None


def lake_of(url: Path, windows: list[Window], codec: AuxCodec) -> Lake:
    lake = Lake.init(str(url), TINY_TARGET)
    head_id = register_tiny_version(lake, 0, HEAD)
    write_fragment(
        lake,
        version=TargetVersion(0),
        head_id=head_id,
        plan_id="p",
        windows=windows,
        writer_id="w",
        codec=codec,
    )
    return lake


@pytest.fixture(params=list(FeatureDtype))
def windows(request: pytest.FixtureRequest) -> list[Window]:
    layout = FragmentLayout((2, 4, 5), request.param, 16)
    return [tiny_window(HEAD, sample=sample, layout=layout, num_rows=9 + sample) for sample in range(4)]


def test_a_lake_of_int8_reads_alike_by_every_reader_and_states_its_error(
    tmp_path: Path, windows: list[Window]
) -> None:
    lake = lake_of(tmp_path / "lake", windows, AuxCodec.INT8)
    selection = Catalog.load(lake).select(SelectionFilter())
    reader = SelectionReader(lake, selection, ReadSpec(batch_rows=64))
    fast = {
        index: window.aux.copy()
        for step in reader.read()
        for index, window in zip(step.indices, step.windows, strict=True)
    }
    for index, (row, wanted) in enumerate(zip(selection.rows, windows, strict=True)):
        found, dtype = lake.read_window(row), wanted.layout.dtype
        assert found.layout == wanted.layout
        np.testing.assert_array_equal(found.final, wanted.final)
        np.testing.assert_array_equal(found.aux, fast[index])
        error = relative(to_float32(found.aux, dtype), to_float32(wanted.aux, dtype))
        assert row["aux_error"] == pytest.approx(error, rel=1e-4)
        assert 0 < error < 0.01
        assert row["codec"] == "int8-whitened-128"
        assert row["nbytes"] == found.num_rows * (48 + 2 + 16 * dtype.itemsize)
    assert [finding for finding in check_lake(lake, 2) if finding.harmful] == []
    streamed = Lake.init(str(tmp_path / "streamed"), TINY_TARGET)
    head_id = register_tiny_version(streamed, 0, HEAD)
    with StreamWriter(
        streamed, writer_id="w", sampling={}, options=StreamOptions(aux_codec=AuxCodec.INT8)
    ) as writer:
        for window in windows:
            writer.append(window, head_id=head_id)
    rows = Catalog.load(streamed).select(SelectionFilter()).rows
    assert [row["aux_error"] for row in rows] == [row["aux_error"] for row in selection.rows]
    plain = Catalog.load(lake_of(tmp_path / "plain", windows, AuxCodec.NONE)).select(SelectionFilter())
    assert [row["aux_error"] for row in plain.rows] == [None] * 4
    assert selection.plan.nbytes < plain.plan.nbytes


def test_other_tools_see_the_bytes_and_this_one_refuses_what_it_does_not_know(
    tmp_path: Path, windows: list[Window]
) -> None:
    lake = lake_of(tmp_path / "lake", windows, AuxCodec.INT8)
    (row, *_) = Catalog.load(lake).select(SelectionFilter()).rows
    stored: Any = zarr.open_group(str(tmp_path / "lake" / row["data_prefix"]), mode="r")["aux"]
    assert (stored.dtype, stored.shape) == (np.uint8, (sum(w.num_rows for w in windows), 48 + 2))
    scales = lake.fragment_tokens(row["data_prefix"]).aux_scales
    assert scales is not None
    begin, rows = row["row_offset"], row["num_rows"]
    np.testing.assert_array_equal(
        aux_codec.decode(np.asarray(stored[begin : begin + rows]), windows[0].layout.dtype, scales),
        lake.read_window(row).aux,
    )
    with pytest.raises(LakeContractError, match="int4-later.*Upgrade"):
        lake.read_window({**row, "codec": "int4-later"})


def test_scales_that_are_absent_or_changed_are_noticed(tmp_path: Path, windows: list[Window]) -> None:
    lake = lake_of(tmp_path / "lake", windows, AuxCodec.INT8)
    (row, *_) = Catalog.load(lake).select(SelectionFilter()).rows
    path = tmp_path / "lake" / row["data_prefix"] / "tokens.arrow"
    scales = lake.fragment_tokens(row["data_prefix"]).aux_scales
    assert scales is not None
    raw, needle = path.read_bytes(), scales.astype("<f4").tobytes()
    assert raw.count(needle) >= 1
    changed = replace_bytes(needle)
    path.write_bytes(raw.replace(needle, changed))
    with pytest.raises(CorruptDataError, match="scales do not match their checksum"):
        Lake.open(lake.url).read_window(row)
    path.write_bytes(raw.replace(b"draftlake.aux_scales", b"draftlake.bux_scales"))
    with pytest.raises(CorruptDataError, match="no scales for 48 aux channels"):
        Lake.open(lake.url).read_window(row)
    path.write_bytes(raw)
    assert Lake.open(lake.url).read_window(row).num_rows == row["num_rows"]


def replace_bytes(raw: bytes) -> bytes:
    return raw[:8] + bytes([raw[8] ^ 0x10]) + raw[9:]
