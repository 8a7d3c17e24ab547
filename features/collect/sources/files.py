"""Names and bytes of source files: found, opened, told apart by their first bytes, cut into parts.

Everything goes through :class:`~features.storage.Store`, which asks S3 again when it is busy.
"""

import fnmatch
import glob
import hashlib
import io
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import pyarrow as pa

from features.errors import InputError
from features.paths import without_credentials
from features.storage import Store

Kind = Literal["plain", "gzip", "zstd", "parquet", "pickle"]

SUFFIXES = (".jsonl", ".ndjson", ".parquet")
"""Names, before ``.gz`` or ``.zst``, that a folder is searched for; a glob finds what it says."""
PICKLE_SUFFIXES = (".pt", ".pth", ".pkl", ".pickle", ".dp", ".straw", ".straw.json")
READ_BYTES = 8 * 2**20
"""Bytes of one request, and of one step of a digest."""
PART_BYTES = 256 * 2**20
"""Size from which a file is read in several partitions."""

_MAGIC: tuple[tuple[bytes, Kind], ...] = (
    (b"PAR1", "parquet"),
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"PK\x03\x04", "pickle"),  # torch.save writes a zip archive around its pickle
    *((bytes([0x80, protocol]), "pickle") for protocol in range(2, 6)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that was found."""

    name: str
    url: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a file: bytes between two line ends, or row groups."""

    start: int
    stop: int | None
    first_row: int
    digest: str
    nbytes: int
    damage: str | None = None


class StoredFile(io.RawIOBase):
    """A stored object as a seekable file of the length it had when it was opened."""

    def __init__(
        self, url: str, storage_options: Mapping[str, Any], start: int = 0, stop: int | None = None
    ) -> None:
        store, path = _split(url, storage_options)
        self._read_into = store.opened(path)
        self._start = self._position = start
        self._stop = store.size(path) if stop is None else stop
        self.failed = False
        """The store failed: what a decoder says of these bytes is no fault of the file."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position - self._start

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: self._start, os.SEEK_CUR: self._position, os.SEEK_END: self._stop}[whence]
        self._position = min(max(base + offset, self._start), self._stop)
        return self.tell()

    def readinto(self, into: Any) -> int:
        view = memoryview(into).cast("B")
        count = min(len(view), self._stop - self._position)
        if count:
            try:
                self._read_into(self._position, view[:count])
            except BaseException:
                self.failed = True
                raise
            self._position += count
        return count


class Decompressed(io.RawIOBase):
    """A gzip or zstd stream. It ends where the stream is cut or damaged, and says so in :attr:`damage`."""

    def __init__(self, url: str, storage_options: Mapping[str, Any], codec: str) -> None:
        self._open, self._codec = lambda: StoredFile(url, storage_options), codec
        self._source, self._stream = self._started()
        self._produced = 0
        self._bytewise = False
        self.damage: str | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        view = memoryview(into).cast("B")
        try:
            data = b"" if self.damage else self._stream.read(1 if self._bytewise else len(view))
        except (OSError, pa.ArrowException) as error:
            if self._source.failed:
                raise
            if self._bytewise:
                self.damage = str(error)
                return 0
            # A failed read loses what it had decoded. Go back, and take single bytes up to the damage.
            self._reopen()
            return self.readinto(into)
        view[: len(data)] = data
        self._produced += len(data)
        return len(data)

    def _started(self) -> tuple[StoredFile, pa.CompressedInputStream]:
        source = self._open()
        return source, pa.CompressedInputStream(io.BufferedReader(source, READ_BYTES), self._codec)

    def _reopen(self) -> None:
        self._bytewise = True
        self._source, self._stream = self._started()
        left = self._produced
        while left:
            left -= len(self._stream.read(min(left, READ_BYTES)))


def open_bytes(
    url: str, storage_options: Mapping[str, Any], start: int = 0, stop: int | None = None
) -> io.BufferedReader:
    """The bytes ``[start, stop)`` of a file, seekable."""
    return io.BufferedReader(StoredFile(url, storage_options, start, stop), READ_BYTES)


def kind_of(head: bytes) -> Kind:
    """What a file is by its first bytes, whatever it is called."""
    return next((kind for magic, kind in _MAGIC if head.startswith(magic)), "plain")


def refuse_pickles(files: Iterable[SourceFile]) -> None:
    """Stop before a pickle is read: opening one runs whatever code it holds."""
    named = [file.url for file in files if file.name.lower().endswith(PICKLE_SUFFIXES)]
    if named:
        raise pickle_error(named)


def pickle_error(urls: Sequence[str]) -> InputError:
    """The error for files that hold pickles."""
    more = f" and {len(urls) - 1} more" if len(urls) > 1 else ""
    return InputError(
        f"{without_credentials(urls[0])!r}{more}: a pickle is never opened, because opening one runs the code it "
        f"holds. Convert it to JSON lines where it was written, with the script under 'Conversion' in "
        f"docs/rollouts.md, and name the converted files (a glob such as 'DIR/*.jsonl' leaves the others out)"
    )


def find_files(urls: Sequence[str], storage_options: Mapping[str, Any]) -> list[SourceFile]:
    """Files behind paths, folders, globs and ``s3://`` urls, each once, sorted per url; names are distinct.

    Raises:
        InputError: a url finds nothing.
    """
    found: dict[str, SourceFile] = {}
    for url in urls:
        matches = _match(url, storage_options)
        if not matches:
            raise InputError(
                f"no rollout file at {without_credentials(url)!r}: expected a file, a glob that matches, or a folder "
                f"with names ending in {', '.join(SUFFIXES)} (also .gz and .zst). Check the path"
            )
        found.update({file.url: file for file in matches if file.url not in found})
    taken = Counter(file.name for file in found.values())
    return [replace(file, name=file.url) if taken[file.name] > 1 else file for file in found.values()]


class _Hashed(io.RawIOBase):
    """A file whose bytes are digested as they are read."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file, self.hasher = file, hashlib.blake2b(digest_size=16)

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        view = memoryview(into).cast("B")
        count = self._file.readinto(view)
        self.hasher.update(view[:count])
        return count


def digest_compressed(file: io.BufferedReader, codec: str) -> tuple[str, str | None]:
    """Digest of the stored bytes, and what is wrong with them.

    A stream that is cut is right up to the cut. One whose bytes were changed may have decoded to
    anything before its checksum said so, hence is looked at before a row of it is believed.
    """
    hashed, damage = _Hashed(file), None
    try:
        stream = pa.CompressedInputStream(hashed, codec)
        while stream.read(READ_BYTES):
            pass
    except (OSError, pa.ArrowException) as error:
        if cast(StoredFile, file.raw).failed:
            raise
        damage = None if "truncated" in str(error).lower() else str(error)
    while hashed.read(READ_BYTES):
        pass
    return hashed.hasher.hexdigest(), damage


def digest_file(file: io.BufferedReader) -> str:
    """Digest of all bytes, streaming."""
    hasher = hashlib.blake2b(digest_size=16)
    while chunk := file.read(READ_BYTES):
        hasher.update(chunk)
    return hasher.hexdigest()


def jsonl_parts(chunks: Iterable[bytes], part_bytes: int = PART_BYTES) -> Iterator[Part]:
    """Cut a stream after the first line end at or behind ``part_bytes``, and digest each part.

    The cuts depend on the bytes alone, so a file that has grown keeps its earlier parts.
    """
    start = offset = 0
    row = first_row = 1
    hasher = hashlib.blake2b(digest_size=16)
    for chunk in chunks:
        rest = memoryview(chunk)
        while len(rest):
            room = part_bytes - (offset - start)
            cut = chunk.find(b"\n", len(chunk) - len(rest) + max(room - 1, 0)) + 1
            taken = rest[: cut - (len(chunk) - len(rest))] if cut else rest
            hasher.update(taken)
            row += bytes(taken).count(b"\n")
            offset += len(taken)
            rest = rest[len(taken) :]
            if cut:
                yield Part(start, offset, first_row, hasher.hexdigest(), offset - start)
                start, first_row, hasher = offset, row, hashlib.blake2b(digest_size=16)
    if offset > start or not offset:
        yield Part(start, offset, first_row, hasher.hexdigest(), offset - start)


def _match(url: str, storage_options: Mapping[str, Any]) -> list[SourceFile]:
    protocol, separator, rest = url.partition("://")
    if not separator or protocol in ("file", "local"):
        return _match_local(rest if separator else url)
    rest = rest.rpartition("@")[2] if "@" in rest.partition("/")[0] else rest  # no credentials in records
    if "/" in rest.rstrip("/"):
        store, path = _split(f"{protocol}://{rest.rstrip('/')}", storage_options)
        if store.exists(path):
            return [SourceFile(path, f"{protocol}://{rest}", store.size(path))]
    fixed = re.split(r"[*?\[]", rest, maxsplit=1)[0]
    root = rest.rstrip("/") if fixed == rest else fixed.rpartition("/")[0]
    pattern = rest[len(root) :].strip("/")
    found = Store.open(f"{protocol}://{root}", **storage_options).scan("")
    return [
        SourceFile(name, f"{protocol}://{root}/{name}", facts.size)
        for name, facts in sorted(found.items())
        if (_matches(name, pattern) if pattern else _is_rollout_name(name))
    ]


def _match_local(pattern: str) -> list[SourceFile]:
    """Absolute paths: a partition may be read by a process that works elsewhere."""
    path = Path(os.path.abspath(Path(pattern).expanduser()))
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.is_file())
        named = [(p.relative_to(path).as_posix(), p) for p in found]
        kept = [(name, p) for name, p in named if _is_rollout_name(name)]
    elif path.is_file():
        kept = [(path.name, path)]
    else:
        fixed = re.split(r"[*?\[]", str(path), maxsplit=1)[0].rpartition("/")[0] or "/"
        matches = map(Path, sorted(glob.glob(str(path), recursive=True)))
        kept = [(p.relative_to(fixed).as_posix(), p) for p in matches if p.is_file()]
    return [SourceFile(name, str(p), p.stat().st_size) for name, p in kept]


def _is_rollout_name(name: str) -> bool:
    """Whether a folder's file is a source, or a pickle that must not go unnoticed."""
    low = name.lower()
    plain = low.removesuffix(".gz").removesuffix(".zst")
    hidden = any(part.startswith(".") for part in name.split("/"))
    return not hidden and (plain.endswith(SUFFIXES) or low.endswith(PICKLE_SUFFIXES))


def _matches(name: str, pattern: str) -> bool:
    """A glob of '/'-separated parts: ``**`` stands for any number of folders, ``*`` stays in one."""
    parts, wanted = name.split("/"), pattern.split("/")
    if "**" not in wanted:
        return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))
    at = wanted.index("**")
    rest = "/".join(wanted[at + 1 :])
    if len(parts) < at or not all(map(fnmatch.fnmatchcase, parts[:at], wanted[:at])):
        return False
    return any(_matches("/".join(parts[i:]), rest) for i in range(at, len(parts)))


def _split(url: str, storage_options: Mapping[str, Any]) -> tuple[Store, str]:
    """The store of a file's folder, and the file's name in it."""
    protocol, separator, rest = url.partition("://")
    if not separator or protocol in ("file", "local"):
        path = Path(os.path.abspath(Path(rest if separator else url).expanduser()))
        return Store.open(str(path.parent)), path.name
    folder, _, name = url.rpartition("/")
    return Store.open(folder, **storage_options), name
