"""A fragment's arrays as Zarr v3, written by hand: flat rows, uncompressed, one shard, index last.

Row ``r`` of an array starts at byte ``r * row_bytes`` of its shard object, so a window is one
byte range and no index is read. The same object is a standard ``sharding_indexed`` chunk that
any Zarr v3 tool opens. Every inner chunk is written, zeros too: an absent chunk is always a
fault, and its fill value is NaN so that other tools do not show a fault as zeros. Encoded aux rows
are bytes, which have no NaN: there a reader's checksums alone tell.

Sources: Zarr v3 core specification; sharding-indexed codec v1.0; zarr-extensions ``bfloat16``.
"""

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from features.errors import CorruptDataError
from features.schema import FeatureDtype


class ByteDtype(StrEnum):
    """Element type of rows that are encoded."""

    UINT8 = "uint8"

    @property
    def itemsize(self) -> int:
        return 1


ElementDtype = FeatureDtype | ByteDtype

GROUP_FILE = "zarr.json"
ARRAY_FILE = "zarr.json"
SHARD_KEY = "c/0/0"

_INNER_CHUNK_BYTES = 2**20
_INDEX_ENTRY_BYTES = 16
_CHECKSUM_BYTES = 4


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Where things are in the shard object of one ``[num_rows, width]`` array."""

    num_rows: int
    width: int
    dtype: ElementDtype
    inner_rows: int
    """Rows of an inner chunk; the last one is padded with zero rows, outside the array's shape."""

    @staticmethod
    def plan(num_rows: int, width: int, dtype: ElementDtype) -> "ShardLayout":
        """Inner chunks of about 1 MiB, no larger than the array."""
        inner_rows = max(1, min(num_rows, _INNER_CHUNK_BYTES // (width * dtype.itemsize)))
        return ShardLayout(num_rows, width, dtype, inner_rows)

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def num_chunks(self) -> int:
        return -(-self.num_rows // self.inner_rows)

    @property
    def payload_bytes(self) -> int:
        """Bytes before the index, padding included."""
        return self.num_chunks * self.inner_rows * self.row_bytes

    @property
    def object_bytes(self) -> int:
        """Exact length of the shard object."""
        return self.payload_bytes + self.num_chunks * _INDEX_ENTRY_BYTES + _CHECKSUM_BYTES

    def index(self) -> bytes:
        """Offset and length of every inner chunk (little-endian u64 pairs), then their crc32c."""
        chunk_bytes = self.inner_rows * self.row_bytes
        entries = np.empty((self.num_chunks, 2), "<u8")
        entries[:, 0] = np.arange(self.num_chunks, dtype=np.uint64) * np.uint64(chunk_bytes)
        entries[:, 1] = chunk_bytes
        raw = entries.tobytes()
        return raw + crc32c(raw).to_bytes(_CHECKSUM_BYTES, "little")

    def shard(self, rows: bytes) -> bytes:
        """The shard object of ``num_rows * row_bytes`` bytes of rows in order."""
        if len(rows) != self.num_rows * self.row_bytes:
            raise ValueError(
                f"expected {self.num_rows} rows of {self.row_bytes} bytes, got {len(rows)} bytes"
            )
        return b"".join([rows, bytes(self.payload_bytes - len(rows)), self.index()])

    def metadata(self) -> bytes:
        """The array's ``zarr.json``."""
        little = {"name": "bytes", "configuration": {"endian": "little"}}
        sharding = {
            "chunk_shape": [self.inner_rows, self.width],
            "codecs": [little],
            "index_codecs": [little, {"name": "crc32c"}],
            "index_location": "end",
        }
        shard_shape = [self.num_chunks * self.inner_rows, self.width]
        return _json({
            "zarr_format": 3,
            "node_type": "array",
            "shape": [self.num_rows, self.width],
            "data_type": self.dtype.value,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shard_shape}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0 if isinstance(self.dtype, ByteDtype) else "NaN",
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            "attributes": {},
            "dimension_names": ["token", "feature"],
            "storage_transformers": [],
        })  # fmt: skip

    @staticmethod
    def from_metadata(raw: bytes, *, where: str) -> "ShardLayout":
        """Read :meth:`metadata`.

        Raises:
            CorruptDataError: the bytes are no metadata of an array that this module wrote.
        """
        try:
            fields = json.loads(raw)
            inner = fields["codecs"][0]["configuration"]["chunk_shape"][0]
            num_rows, width = fields["shape"]
            name = fields["data_type"]
            dtype = ByteDtype(name) if name == ByteDtype.UINT8 else FeatureDtype(name)
            layout = ShardLayout(num_rows, width, dtype, inner)
            same = json.loads(layout.metadata()) == fields
        except (ValueError, KeyError, TypeError, IndexError, ZeroDivisionError) as error:
            raise CorruptDataError(f"{where} is no array metadata ({error!r})") from error
        if not same:
            raise CorruptDataError(
                f"{where} describes another layout than one uncompressed shard of whole rows"
            )
        return layout


def group_metadata(attributes: dict[str, Any]) -> bytes:
    """A group's ``zarr.json``."""
    return _json({"zarr_format": 3, "node_type": "group", "attributes": attributes})


def row_bytes_of(array: NDArray[Any]) -> bytes:
    """An array's rows in C order, little-endian."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()


def crc32c(data: bytes | NDArray[np.uint8]) -> int:
    """CRC-32C (Castagnoli) of bytes; of an array without copying it."""
    return int(google_crc32c.value(data))


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=1, ensure_ascii=True).encode()
