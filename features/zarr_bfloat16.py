"""Teach zarr-python the registered extension data type ``bfloat16``. Importing this module does it.

zarr-python has no bfloat16 of its own; with this type it reads and writes the same bytes as
tensorstore and zarrs. Only export, check and tests import it: the lake itself needs no zarr.

Source: https://github.com/zarr-developers/zarr-extensions, data-types/bfloat16.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import ml_dtypes
import numpy as np
from zarr.core.dtype.common import DataTypeValidationError, HasEndianness, HasItemSize
from zarr.dtype import ZDType, data_type_registry

_NATIVE = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, kw_only=True)
class BFloat16(ZDType[Any, Any], HasEndianness, HasItemSize):
    """``"data_type": "bfloat16"``: 16 bits, the upper half of a float32."""

    _zarr_v3_name: ClassVar[Literal["bfloat16"]] = "bfloat16"
    _zarr_v2_name: ClassVar[Literal["bfloat16"]] = "bfloat16"
    dtype_cls = type(_NATIVE)

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        if cls._check_native_dtype(dtype):
            return cls()
        raise DataTypeValidationError(f"expected {_NATIVE}, got {dtype}")

    def to_native_dtype(self) -> Any:
        return _NATIVE

    @property
    def item_size(self) -> int:
        return 2

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        raise DataTypeValidationError("bfloat16 is a Zarr v3 data type")

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        if data == cls._zarr_v3_name:
            return cls()
        raise DataTypeValidationError(f"expected {cls._zarr_v3_name!r}, got {data!r}")

    def to_json(self, zarr_format: int) -> Any:
        if zarr_format != 3:
            raise ValueError("bfloat16 is a Zarr v3 data type")
        return self._zarr_v3_name

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, int | float | np.floating | np.integer | ml_dtypes.bfloat16)

    def cast_scalar(self, data: object) -> Any:
        if not self._check_scalar(data):
            raise TypeError(f"cannot hold {data!r} as bfloat16")
        return ml_dtypes.bfloat16(data)

    def default_scalar(self) -> Any:
        return ml_dtypes.bfloat16(0)

    def to_json_scalar(self, data: object, *, zarr_format: int) -> float | str:
        value = float(self.cast_scalar(data))
        if math.isnan(value):
            return "NaN"
        if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        return value

    def from_json_scalar(self, data: Any, *, zarr_format: int) -> Any:
        return ml_dtypes.bfloat16(float(data))


if "bfloat16" not in data_type_registry.contents:
    data_type_registry.register("bfloat16", BFloat16)
