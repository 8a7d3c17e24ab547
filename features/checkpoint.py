"""Read a Hugging Face checkpoint folder tensor by tensor, without torch, and refuse a broken one.

A shard that the index names and nobody copied, a shard cut short, a git-lfs pointer saved under
the shard's name: each would leave weights uninitialised or zero in a lenient loader. Here sizes
are checked against headers before a single value is used.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from features.digests import canonical_json, tensor_digest
from features.errors import CorruptDataError, InputError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_MAX_HEADER = 100_000_000


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as stored: safetensors' dtype name (``BF16``), shape, little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def digest(self) -> str:
        """SHA-256 over dtype, shape and bytes."""
        return tensor_digest(self.dtype, self.shape, self.data)


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a checkpoint folder, one file or sharded by an index."""

    folder: Path
    entries: Mapping[str, _Entry]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self.entries))

    def read(self, name: str) -> RawTensor:
        """One tensor's stored bytes."""
        entry = self.entries[name]
        with entry.path.open("rb") as file:
            file.seek(entry.start)
            data = file.read(entry.stop - entry.start)
        if len(data) != entry.stop - entry.start:
            raise _short(entry.path, expected=entry.stop, found=entry.path.stat().st_size)
        return RawTensor(entry.dtype, entry.shape, data)

    def tensors(self) -> Iterator[tuple[str, RawTensor]]:
        """Every tensor by name, one in memory at a time."""
        for name in self.names:
            yield name, self.read(name)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Check every shard of a checkpoint against its header and the index.

    Raises:
        InputError: there are no safetensors weights in ``folder``.
        CorruptDataError: a shard is absent, cut, padded or not a safetensors file, or the
            index and the shards disagree.
    """
    index_path = folder / INDEX_FILE
    if index_path.is_file():
        return Checkpoint(folder, _indexed_entries(folder, index_path))
    if (folder / SINGLE_FILE).is_file():
        return Checkpoint(folder, _shard_entries(folder / SINGLE_FILE))
    raise InputError(
        f"no weights in {folder}: expected {SINGLE_FILE} or {INDEX_FILE} and found neither. "
        f"Point at a Hugging Face checkpoint folder saved as safetensors."
    )


def write_safetensors(tensors: dict[str, RawTensor], metadata: dict[str, str]) -> bytes:
    """A safetensors file of raw tensors, as bytes; the library's own writer knows no bfloat16 in numpy.

    Header: little-endian u64 length, then JSON padded with spaces to 8 bytes; then the data,
    back to back in name order (https://huggingface.co/docs/safetensors, "Format").
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, tensor in sorted(tensors.items()):
        stop = offset + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    text = canonical_json(header)
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *(t.data for _, t in sorted(tensors.items()))])


def _indexed_entries(folder: Path, index_path: Path) -> dict[str, _Entry]:
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptDataError(
            f"{index_path} is no weight index ({error}); copy it again from its source"
        ) from error
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    if absent:
        raise CorruptDataError(
            f"{index_path} names {len(shards)} shards and {', '.join(absent)} is not in {folder}. "
            f"Copy the missing shard; no weight is ever left at its initial value instead."
        )
    if SINGLE_FILE not in shards and (folder / SINGLE_FILE).is_file():
        raise CorruptDataError(
            f"{folder} holds two sets of weights: {SINGLE_FILE} and the shards of {INDEX_FILE}. "
            f"Remove the stale one; loaders disagree about which they take."
        )
    entries: dict[str, _Entry] = {}
    for shard in shards:
        entries.update(_shard_entries(folder / shard))
    unmatched = sorted(set(weight_map) ^ set(entries))
    moved = sorted(n for n in set(weight_map) & set(entries) if entries[n].path.name != weight_map[n])
    if unmatched or moved:
        raise CorruptDataError(
            f"{index_path} and its shards disagree about {len(unmatched) + len(moved)} tensors, "
            f"first {(unmatched + moved)[0]!r}. Copy index and shards again from one source."
        )
    return entries


def _shard_entries(path: Path) -> dict[str, _Entry]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        header_size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER + 1
        if header_size > _MAX_HEADER or 8 + header_size > size:
            raise CorruptDataError(
                f"{path} ({size:,} bytes) is no complete safetensors file: it does not begin with a header "
                f"that fits. It may be a git-lfs pointer, an HTML page or cut short; copy the file itself."
            )
        raw_header = file.read(header_size)
    base = 8 + header_size
    try:
        header = json.loads(raw_header)
        header.pop("__metadata__", None)
        entries = {name: _entry(path, base, fields) for name, fields in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptDataError(
            f"{path} has an unreadable safetensors header ({error}); copy it again"
        ) from error
    expected = max((entry.stop for entry in entries.values()), default=base)
    if expected != size:
        raise _short(path, expected=expected, found=size)
    return entries


def _entry(path: Path, base: int, fields: Mapping[str, Any]) -> _Entry:
    start, stop = fields["data_offsets"]
    return _Entry(path, str(fields["dtype"]), tuple(fields["shape"]), base + start, base + stop)


def _short(path: Path, *, expected: int, found: int) -> CorruptDataError:
    return CorruptDataError(
        f"{path} has {found:,} bytes and its header says {expected:,}. "
        f"The file is cut or has bytes appended; copy it again from its source."
    )
