"""Aux features in one byte each: whitened per channel, int8 in groups, with the error that this made.

A channel is divided by its root mean square over the fragment, so that no loud channel costs the others of its
group their precision. Then each row's groups of 128 channels get a scale of their own. A stored row is the int8
values, followed by one bfloat16 scale per group; the channels' divisors belong to the fragment.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.bfloat16 import Float32, Stored, bf16_to_float32, from_float32, to_float32
from features.schema import AuxCodec, FeatureDtype
from features.zarr_layout import row_bytes_of

GROUP = 128
"""Channels that share a scale."""

_TOP = 127
_ROWS_AT_ONCE = 512
"""Rows that are widened to float32 together."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedAux:
    """The aux features of a fragment as stored."""

    rows: list[bytes]
    """Of each window."""
    errors: list[float | None]
    """Relative L2 error of each window; None where nothing is lost, or nothing is finite."""
    scales: Float32 | None
    """Divisors of the channels, ``[width]``; None when nothing is encoded."""


def row_bytes(width: int, dtype: FeatureDtype, codec: AuxCodec) -> int:
    """Bytes of a stored row of ``width`` aux elements."""
    match codec:
        case AuxCodec.NONE:
            return width * dtype.itemsize
        case AuxCodec.INT8:
            return width + 2 * _num_groups(width)


def encode_all(arrays: Sequence[Stored], dtype: FeatureDtype, codec: AuxCodec) -> EncodedAux:
    """The aux arrays of a fragment's windows, each ``[num_rows, width]``, as they are stored."""
    if codec is AuxCodec.NONE:
        return EncodedAux([row_bytes_of(array) for array in arrays], [None] * len(arrays), None)
    scales = channel_scales(arrays, dtype)
    found = [encode(array, dtype, scales) for array in arrays]
    return EncodedAux([rows.tobytes() for rows, _ in found], [error for _, error in found], scales)


def channel_scales(arrays: Sequence[Stored], dtype: FeatureDtype) -> Float32:
    """Root mean square of each channel over ``[num_rows, width]`` arrays, ``[width]``; 1 where it is none.

    Values that are not finite do not count.
    """
    width = arrays[0].shape[1]
    total, count = np.zeros(width), np.zeros(width, np.int64)
    for block in _blocks(arrays, dtype):
        finite = np.isfinite(block)
        total += np.square(np.where(finite, block, 0), dtype=np.float64).sum(axis=0)
        count += finite.sum(axis=0)
    root = np.sqrt(total / np.maximum(count, 1)).astype(np.float32)
    return np.where(np.isfinite(root) & (root > 0), root, np.float32(1)).astype(np.float32)


def encode(aux: Stored, dtype: FeatureDtype, scales: Float32) -> tuple[NDArray[np.uint8], float | None]:
    """Stored rows ``[num_rows, row_bytes]`` of ``aux`` ``[num_rows, width]``, and the relative L2 error.

    The error is that of what :func:`decode` gives, over all rows that are finite; None when there is none. A
    value that is not finite makes its whole group NaN, so that the row is noticed as it would have been.
    """
    width = aux.shape[1]
    stored = np.empty((len(aux), row_bytes(width, dtype, AuxCodec.INT8)), np.uint8)
    wrong, whole = 0.0, 0.0
    for first in range(0, len(aux), _ROWS_AT_ONCE):
        part = slice(first, first + _ROWS_AT_ONCE)
        wanted = _wide(aux[part], dtype)
        stored[part] = _encode(wanted, scales)
        found = to_float32(decode(stored[part], dtype, scales), dtype)
        finite = np.isfinite(wanted).all(axis=1)
        wrong += float(np.square(found[finite] - wanted[finite], dtype=np.float64).sum())
        whole += float(np.square(wanted[finite], dtype=np.float64).sum())
    return stored, math.sqrt(wrong / whole) if whole > 0 else None


def decode(stored: NDArray[np.uint8], dtype: FeatureDtype, scales: Float32) -> Stored:
    """``[num_rows, width]`` of ``dtype`` from stored rows ``[num_rows, row_bytes]``; newly allocated."""
    width = len(scales)
    found: Stored = np.empty((len(stored), width), dtype.numpy_name)
    for first in range(0, len(stored), _ROWS_AT_ONCE):
        part = slice(first, first + _ROWS_AT_ONCE)
        values = stored[part, :width].view(np.int8).astype(np.float32)
        bits = np.ascontiguousarray(stored[part, width:]).view("<u2").astype(np.uint16)
        values *= np.repeat(bf16_to_float32(bits), GROUP, axis=1)[:, :width]
        values *= scales
        found[part] = from_float32(values, dtype)
    return found


def _encode(wanted: Float32, scales: Float32) -> NDArray[np.uint8]:
    rows, width = wanted.shape
    white = np.zeros((rows, _num_groups(width) * GROUP), np.float32)
    white[:, :width] = wanted / scales
    grouped = white.reshape(rows, -1, GROUP)
    bits = _rounded_up(np.abs(grouped).max(axis=2) / np.float32(_TOP))
    scale = bf16_to_float32(bits)[:, :, None]
    usable = np.isfinite(scale) & (scale > 0)
    steps = np.rint(np.divide(grouped, scale, out=np.zeros_like(grouped), where=usable))
    values = np.clip(steps, -_TOP, _TOP).astype(np.int8).reshape(rows, -1)[:, :width]
    return np.concatenate([values.view(np.uint8), bits.astype("<u2").view(np.uint8)], axis=1)


def _rounded_up(values: Float32) -> NDArray[np.uint16]:
    """bfloat16 bits not below ``values`` >= 0, so that no step is beyond the largest; NaN for what is not finite."""
    wide = np.ascontiguousarray(values).view(np.uint32)
    up = ((wide + 0xFFFF) >> 16).astype(np.uint16)
    return np.where(np.isfinite(values), up, np.uint16(0x7FC0)).astype(np.uint16)


def _blocks(arrays: Sequence[Stored], dtype: FeatureDtype) -> Iterator[Float32]:
    for array in arrays:
        for first in range(0, len(array), _ROWS_AT_ONCE):
            yield _wide(array[first : first + _ROWS_AT_ONCE], dtype)


def _wide(array: NDArray[Any], dtype: FeatureDtype) -> Float32:
    return to_float32(np.ascontiguousarray(array), dtype)


def _num_groups(width: int) -> int:
    return -(-width // GROUP)
