"""Read the objects of a fragment: ranged, checked against the commit's row, never filled in."""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.commits import TokenRow, TokenTable, decode_tokens
from features.errors import CorruptDataError
from features.schema import NO_TOKEN, FeatureDtype
from features.storage import Store
from features.zarr_layout import SHARD_KEY, crc32c

TOKENS_FILE = "tokens.arrow"

_CACHED_TABLES = 256


class Fragments:
    """A store's fragments; keeps the token tables read last. Safe to share between threads."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._tables: OrderedDict[str, TokenTable] = OrderedDict()
        self._lock = threading.Lock()

    def table(self, data_prefix: str) -> TokenTable:
        """A fragment's token table, with both shard objects' lengths checked against it.

        Raises:
            CorruptDataError: an object of the fragment is absent or has another length.
        """
        with self._lock:
            if data_prefix in self._tables:
                self._tables.move_to_end(data_prefix)
                return self._tables[data_prefix]
        path = f"{data_prefix}/{TOKENS_FILE}"
        try:
            table = decode_tokens(self.store.read(path), where=f"{self.store.url}/{path}")
            for array, expected in table.shard_bytes.items():
                path = f"{data_prefix}/{array}/{SHARD_KEY}"
                found = self.store.size(path)
                if found != expected:
                    raise CorruptDataError(
                        f"{self.store.url}/{path} has {found:,} bytes, expected {expected:,}. "
                        f"Restore it from a copy, or collect the fragment again."
                    )
        except FileNotFoundError as error:
            raise _absent(self.store.url, path) from error
        with self._lock:
            self._tables[data_prefix] = table
            while len(self._tables) > _CACHED_TABLES:
                self._tables.popitem(last=False)
        return table

    def tokens(self, row: Mapping[str, Any]) -> TokenRow:
        """Tokens and masks of the window of a commit row.

        Raises:
            CorruptDataError: an object is absent or cut, or the tokens are not those of ``row``.
        """
        table, index = self.table(row["data_prefix"]), int(row["window_index"])
        tokens = table.rows[index] if 0 <= index < len(table.rows) else None
        if (
            tokens is None
            or tokens.crc32c != row["crc32c_tokens"]
            or tokens.start != row["start"]
            or len(tokens.token_ids) != row["num_rows"] + 1
            or (tokens.token_ids[-1] == NO_TOKEN)
            != (row["start"] + row["num_rows"] == row["sequence_length"])
        ):
            raise _checksum_error(f"{self.store.url}/{row['data_prefix']}/{TOKENS_FILE}", row)
        return tokens

    def rows(self, row: Mapping[str, Any], array: str, width: int, dtype: FeatureDtype) -> NDArray[Any]:
        """``aux`` or ``final`` rows of the window of a commit row, ``[num_rows, width]``, writable.

        Raises:
            CorruptDataError: the object is absent or too short, or the checksum differs.
        """
        path = f"{row['data_prefix']}/{array}/{SHARD_KEY}"
        row_bytes = width * dtype.itemsize
        start = row["row_offset"] * row_bytes
        try:
            data = self.store.read_range(path, start, start + row["num_rows"] * row_bytes)
        except FileNotFoundError as error:
            raise _absent(self.store.url, path) from error
        if crc32c(data) != row[f"crc32c_{array}"]:
            raise _checksum_error(f"{self.store.url}/{path}", row)
        little = np.dtype(dtype.numpy_name).newbyteorder("<")
        # A copy: callers hand these arrays to libraries that refuse read-only memory.
        return np.frombuffer(data, little).reshape(row["num_rows"], width).astype(dtype.numpy_name)


def _absent(url: str, path: str) -> CorruptDataError:
    return CorruptDataError(
        f"{url}/{path} is absent though a commit names it. Nothing is read as zeros: "
        f"restore the object from a copy, or collect the fragment again."
    )


def _checksum_error(where: str, row: Mapping[str, Any]) -> CorruptDataError:
    return CorruptDataError(
        f"{where}: stored bytes of sample {row['sample_id']!r} at position {row['start']} do not match the "
        f"checksum in their commit. Restore the object from a copy, or collect the fragment again."
    )
