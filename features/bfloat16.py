"""Stored numbers: bfloat16 as raw ``uint16`` bits, which numpy has no type for, and float32 as itself."""

import numpy as np
from numpy.typing import NDArray

from features.schema import FeatureDtype

Float32 = NDArray[np.float32]
Stored = NDArray[np.uint16] | Float32
"""Elements as a lake holds them; a :class:`~features.schema.FeatureDtype` says which of the two."""


def to_float32(array: Stored, dtype: FeatureDtype) -> Float32:
    """Stored elements as float32, exactly; any shape."""
    bits = dtype is FeatureDtype.BFLOAT16
    return bf16_to_float32(array.view(np.uint16)) if bits else array.view(np.float32)


def from_float32(values: Float32, dtype: FeatureDtype) -> Stored:
    """float32 elements as they are stored, contiguous: rounded for bfloat16, unchanged otherwise."""
    return float32_to_bf16(values) if dtype is FeatureDtype.BFLOAT16 else np.ascontiguousarray(values)


def bf16_to_float32(bits: NDArray[np.uint16]) -> Float32:
    """bfloat16 bits as float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bf16(values: Float32) -> NDArray[np.uint16]:
    """float32 to bfloat16 bits, round to nearest even; NaN stays NaN, with its sign and top payload."""
    wide = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16
    quiet = (wide >> 16) | 0x40
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)
