"""Read the objects of a fragment: ranged, checked against the commit's row, never filled in.

``Fragments`` reads one window after the other. The functions beneath it are what every other
reader is built from, so that all of them check the same and give the same windows.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features import aux_codec
from features.commits import TokenRow, TokenTable, decode_tokens, window_meta
from features.errors import CorruptDataError, LakeContractError
from features.schema import FORMAT_VERSION, NO_TOKEN, AuxCodec, FeatureDtype, FragmentLayout
from features.storage import Store
from features.windows import Window, check_window
from features.zarr_layout import SHARD_KEY, crc32c

TOKENS_FILE = "tokens.arrow"

Opener = Callable[[str], Callable[[int, memoryview], None]]
"""Like ``Store.opened``."""

_CACHED_TABLES = 256
_CODECS = tuple(codec.value for codec in AuxCodec)


class Fragments:
    """A store's fragments; keeps the token tables read last. Safe to share between threads."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._tables: OrderedDict[str, TokenTable] = OrderedDict()
        self._lock = threading.Lock()

    def table(self, data_prefix: str) -> TokenTable:
        """A fragment's token table, as :func:`read_table`, read once and kept."""
        with self._lock:
            if data_prefix in self._tables:
                self._tables.move_to_end(data_prefix)
                return self._tables[data_prefix]
        table = read_table(self.store, data_prefix)
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
        prefix, url = row["data_prefix"], self.store.url
        try:
            return tokens_of(self.table(prefix), row, url=url)
        except CorruptDataError:
            if not self.store.distrust(f"{prefix}/{TOKENS_FILE}"):
                raise
        with self._lock:
            self._tables.pop(prefix, None)
        return tokens_of(self.table(prefix), row, url=url)

    def rows(self, row: Mapping[str, Any], array: str) -> NDArray[Any]:
        """``aux`` or ``final`` rows of the window of a commit row, ``[num_rows, width]``, writable.

        Raises:
            CorruptDataError: the object is absent or too short, or the checksum differs.
        """
        start, stop = byte_range(row, array)
        data = np.empty(stop - start, np.uint8)
        land_checked(self.store, self.store.opened, row["row_offset"], data, [row], array)
        scales = self.table(row["data_prefix"]).aux_scales
        return rows_of(data, row, array, scales, url=self.store.url)


def read_table(store: Store, data_prefix: str) -> TokenTable:
    """A fragment's token table, with both shard objects' lengths checked against it.

    Raises:
        CorruptDataError: an object of the fragment is absent or has another length.
    """
    read_from = [
        f"{data_prefix}/{TOKENS_FILE}",
        *(shard_path(data_prefix, array) for array in ("aux", "final")),
    ]
    try:
        return _read_table(store, data_prefix)
    except CorruptDataError:
        # The table says how long the shards are: which of the three is wrong, a cache cannot tell.
        distrusted = [store.distrust(path) for path in read_from]
        if not any(distrusted):
            raise
    return _read_table(store, data_prefix)


def _read_table(store: Store, data_prefix: str) -> TokenTable:
    path = f"{data_prefix}/{TOKENS_FILE}"
    try:
        table = decode_tokens(store.read(path), where=f"{store.url}/{path}")
        for array, expected in table.shard_bytes.items():
            path = shard_path(data_prefix, array)
            found = store.size(path)
            if found != expected:
                raise CorruptDataError(
                    f"{store.url}/{path} has {found:,} bytes, expected {expected:,}. "
                    f"Restore it from a copy, or collect the fragment again."
                )
    except FileNotFoundError as error:
        raise _absent(store.url, path) from error
    return table


def tokens_of(table: TokenTable, row: Mapping[str, Any], *, url: str) -> TokenRow:
    """Tokens and masks of the window of a commit row.

    Raises:
        CorruptDataError: the table's tokens are not those of ``row``.
    """
    index = int(row["window_index"])
    tokens = table.rows[index] if 0 <= index < len(table.rows) else None
    if (
        tokens is None
        or tokens.crc32c != row["crc32c_tokens"]
        or tokens.start != row["start"]
        or len(tokens.token_ids) != row["num_rows"] + 1
        or (tokens.token_ids[-1] == NO_TOKEN) != (row["start"] + row["num_rows"] == row["sequence_length"])
    ):
        raise _checksum_error(f"{url}/{row['data_prefix']}/{TOKENS_FILE}", row)
    return tokens


def layout_of(row: Mapping[str, Any]) -> FragmentLayout:
    """Layer ids, dtype and hidden size of a commit row's fragment.

    Raises:
        LakeContractError: it is in a form this program does not know.
    """
    if row["schema_version"] > FORMAT_VERSION or row["codec"] not in _CODECS:
        raise LakeContractError(
            f"{row['data_prefix']}: written in format {row['schema_version']} with codec "
            f"{row['codec']!r}; this program reads up to {FORMAT_VERSION} with "
            f"{', '.join(_CODECS)}. Upgrade draftlake."
        )
    return FragmentLayout(tuple(row["layer_ids"]), FeatureDtype(row["dtype"]), row["hidden_size"])


def shard_path(data_prefix: str, array: str) -> str:
    """Where the shard object of an array is."""
    return f"{data_prefix}/{array}/{SHARD_KEY}"


def row_bytes(row: Mapping[str, Any], array: str) -> int:
    """Bytes of one row of ``aux`` or ``final`` in a commit row's fragment.

    Raises:
        LakeContractError: it is in a form this program does not know.
    """
    dtype = FeatureDtype(row["dtype"])
    if array == "final":
        return int(row["hidden_size"]) * dtype.itemsize
    if row["codec"] not in _CODECS:
        layout_of(row)
    return aux_codec.row_bytes(len(row["layer_ids"]) * row["hidden_size"], dtype, AuxCodec(row["codec"]))


def byte_range(row: Mapping[str, Any], array: str) -> tuple[int, int]:
    """Bytes ``[start, stop)`` of a commit row's window in the shard object of an array."""
    size = row_bytes(row, array)
    return row["row_offset"] * size, (row["row_offset"] + row["num_rows"]) * size


def land(opened: Opener, path: str, start: int, into: NDArray[np.uint8], *, url: str) -> None:
    """Fill ``into`` with bytes of a shard object that a commit names; ``opened`` as ``Store.opened``.

    Raises:
        CorruptDataError: the object is absent or too short.
    """
    try:
        opened(path)(start, into.data)
    except FileNotFoundError as error:
        raise _absent(url, path) from error


def land_checked(
    store: Store,
    opened: Opener,
    first_row: int,
    into: NDArray[np.uint8],
    rows: Collection[Mapping[str, Any]],
    array: str,
) -> None:
    """:func:`land` windows of one fragment, and check each; bytes of a cache that are wrong are read again.

    Args:
        store: where the fragment is.
        opened: as ``Store.opened``.
        first_row: row of the array that ``into`` begins with.
        into: filled.
        rows: commit rows of the windows to check.
        array: ``aux`` or ``final``.

    Raises:
        CorruptDataError: the object is absent or too short, or a checksum differs.
    """
    first = next(iter(rows))
    path, width = shard_path(first["data_prefix"], array), row_bytes(first, array)

    def attempt() -> None:
        land(opened, path, first_row * width, into, url=store.url)
        for row in rows:
            begin = row["row_offset"] - first_row
            check_rows(into[begin * width : (begin + row["num_rows"]) * width], row, array, url=store.url)

    try:
        attempt()
    except CorruptDataError:
        if not store.distrust(path):
            raise
        attempt()


def check_rows(data: NDArray[np.uint8], row: Mapping[str, Any], array: str, *, url: str) -> None:
    """Refuse bytes that are not the ones a commit row was written with.

    Raises:
        CorruptDataError: the checksum differs.
    """
    if crc32c(data) != row[f"crc32c_{array}"]:
        raise _checksum_error(f"{url}/{shard_path(row['data_prefix'], array)}", row)


def rows_of(
    data: NDArray[np.uint8],
    row: Mapping[str, Any],
    array: str,
    aux_scales: NDArray[np.float32] | None,
    *,
    url: str,
) -> NDArray[Any]:
    """Stored bytes as ``[num_rows, width]``; shares memory with ``data``, unless they have to be decoded.

    Raises:
        CorruptDataError: they have to be decoded, and ``aux_scales`` of the fragment's token table are not theirs.
    """
    if array == "aux" and row["codec"] != AuxCodec.NONE:
        width = len(row["layer_ids"]) * row["hidden_size"]
        if aux_scales is None or len(aux_scales) != width:
            raise CorruptDataError(
                f"{url}/{row['data_prefix']}/{TOKENS_FILE} holds no scales for {width} aux channels, which codec "
                f"{row['codec']!r} needs. Restore the object from a copy, or collect the fragment again."
            )
        encoded = data.reshape(row["num_rows"], row_bytes(row, array))
        return aux_codec.decode(encoded, FeatureDtype(row["dtype"]), aux_scales)
    kind = np.dtype(FeatureDtype(row["dtype"]).numpy_name)
    width = row_bytes(row, array) // kind.itemsize
    stored = data.view(kind.newbyteorder("<")).reshape(row["num_rows"], width)
    return stored.astype(kind, copy=False)


def assemble(
    row: Mapping[str, Any],
    tokens: TokenRow,
    aux: NDArray[Any],
    final: NDArray[Any],
    *,
    vocab_size: int | None,
) -> Window:
    """The window of a commit row from its parts; token arrays are copied, features are not.

    ``vocab_size`` is None when this very row and tokens were put together and checked before.

    Raises:
        LakeContractError: the row was written in an unknown form, or does not describe this window.
    """
    window = Window(
        meta=window_meta(row),
        layout=layout_of(row),
        token_ids=tokens.token_ids.copy(),
        sampled_mask=tokens.sampled_mask.copy(),
        loss_mask=None if tokens.loss_mask is None else tokens.loss_mask.copy(),
        logprobs=tokens.logprobs.copy(),
        aux=aux,
        final=final,
    )
    if vocab_size is not None:
        check_window(window, vocab_size=vocab_size)
    return window


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
