"""The one place that talks to storage. ``Store.create`` is the commit primitive of everything.

A store holds immutable objects under '/'-separated paths relative to its root. There is no
append, rename, overwrite or lock: ``create`` makes an object visible whole, once, or refuses.
A local folder, ``memory://`` and ``s3://`` keep that promise in their own ways. Nothing
is cached: a listing shows what other processes committed a moment ago.
"""

import errno
import logging
import os
import random
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import fsspec

from features.errors import CorruptDataError, InputError, ObjectExistsError

log = logging.getLogger(__name__)

T = TypeVar("T")
_Names = list[str]  # a class with a method `list` cannot name the builtin in its signatures

TEMPORARY_SUFFIX = ".partial"
"""Local files that a killed writer may leave behind; no listing shows them."""

_RETRIED_STATUS = frozenset({409, 500, 502, 503})
_MAX_ATTEMPTS = 6
_MEMORY_LOCK = threading.Lock()


class Store(ABC):
    """Immutable objects under one root. Paths are relative, without '.', '..' or empty segments."""

    @staticmethod
    def open(url: str, **storage_options: Any) -> "Store":
        """The store behind a local path, ``file://``, ``memory://`` or ``s3://`` url.

        Nothing is created or contacted. ``storage_options`` go to fsspec (S3 only).

        Raises:
            InputError: the protocol has no create-only write that we have tested.
        """
        protocol, separator, rest = str(url).partition("://")
        if not separator:
            return LocalStore(Path(url))
        match protocol:
            case "file" | "local":
                return LocalStore(Path(rest))
            case "memory":
                return MemoryStore(url, fsspec.filesystem("memory"))
            case "s3" | "s3a":
                return S3Store(url, _s3_filesystem(storage_options))
        raise InputError(
            f"cannot keep a lake at {_without_credentials(url)!r}: expected a local path, file://, "
            f"memory:// or s3://, found protocol {protocol!r}. Only these have a create-only write that is "
            f"tested here."
        )

    @property
    @abstractmethod
    def url(self) -> str:
        """Where the store is, for people and logs; never holds credentials."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @abstractmethod
    def create(self, path: str, data: bytes) -> None:
        """Make an object, visible whole or not at all, durable on return.

        Raises:
            ObjectExistsError: there is an object at ``path``; it is unchanged.
        """

    @abstractmethod
    def read(self, path: str) -> bytes:
        """The whole object; ``FileNotFoundError`` when absent."""

    @abstractmethod
    def _read_at_most(self, path: str, start: int, stop: int) -> bytes: ...

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """Bytes ``[start, stop)`` of an object, in one request.

        Raises:
            FileNotFoundError: the object is absent.
            CorruptDataError: the object ends before ``stop``.
        """
        if not 0 <= start <= stop:
            raise ValueError(f"byte range needs 0 <= start <= stop, got [{start}, {stop})")
        data = self._read_at_most(path, start, stop) if stop > start else b""
        if len(data) != stop - start:
            raise CorruptDataError(
                f"{self.url}/{path} is too short: expected bytes [{start:,}, {stop:,}), found {len(data):,} "
                f"of {stop - start:,}. The object was cut; restore it from a copy or collect the fragment "
                f"again."
            )
        return data

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether there is an object at ``path``, asked anew each time."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Length of an object in bytes; ``FileNotFoundError`` when absent."""

    @abstractmethod
    def list(self, prefix: str) -> _Names:
        """Every object under the folder ``prefix`` (``""``: all), sorted, asked anew each time."""

    @abstractmethod
    def delete_prefix(self, prefix: str) -> None:
        """Delete every object under a folder (``""``: all); readers and writers never call it."""


class LocalStore(Store):
    """A folder. ``create`` is temp file, fsync, hard link, fsync of the folder.

    A hard link refuses an existing name and makes the complete file appear at once. Opening
    with ``O_EXCL`` would do the first but show a half-written file after a crash.
    """

    def __init__(self, root: Path) -> None:
        self._root = Path(os.path.abspath(root.expanduser()))

    @property
    def url(self) -> str:
        return str(self._root)

    def create(self, path: str, data: bytes) -> None:
        target = self._at(path)
        _make_folders(target.parent)
        temporary = target.parent / f".{target.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}"
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(temporary, target)
        except FileExistsError as error:
            raise ObjectExistsError(path) from error
        except OSError as error:
            if temporary.exists() and _no_hard_links(error):
                raise InputError(
                    f"cannot keep a lake at {self.url}: its filesystem has no hard links "
                    f"({error.strerror}), which a create-only write needs. Use a folder on another "
                    f"filesystem, or s3://."
                ) from error
            raise
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()
        _fsync_folder(target.parent)

    def read(self, path: str) -> bytes:
        return self._at(path).read_bytes()

    def _read_at_most(self, path: str, start: int, stop: int) -> bytes:
        with self._at(path).open("rb", buffering=0) as file:
            file.seek(start)
            return _read_fully(file.read, stop - start)

    def exists(self, path: str) -> bool:
        return self._at(path).is_file()

    def size(self, path: str) -> int:
        return self._at(path).stat().st_size

    def list(self, prefix: str) -> _Names:
        return sorted(name for name in self._walk(prefix) if not name.endswith(TEMPORARY_SUFFIX))

    def list_temporary(self) -> _Names:
        """Temp files of writers that are at work or were killed, sorted."""
        return sorted(name for name in self._walk("") if name.endswith(TEMPORARY_SUFFIX))

    def delete_prefix(self, prefix: str) -> None:
        for name in self._walk(prefix, follow=False):
            self._at(name).unlink(missing_ok=True)
        base = self._root if prefix == "" else self._at(prefix)
        for folder, _, _ in os.walk(base, topdown=False):
            with suppress(OSError):
                os.rmdir(folder)

    def _walk(self, prefix: str, *, follow: bool = True) -> Iterator[str]:
        """Names of all files; a folder that was moved and linked is part of the store, unless it leads upwards."""
        base = self._root if prefix == "" else self._at(prefix)
        for folder, folders, files in os.walk(base, followlinks=follow):
            here = os.path.realpath(folder)
            folders[:] = [name for name in folders if not _leads_up(os.path.join(folder, name), here)]
            relative = Path(folder).relative_to(self._root)
            yield from ((relative / name).as_posix() for name in files)

    def _at(self, path: str) -> Path:
        return self._root / checked_path(path)


class FsspecStore(Store):
    """What ``memory://`` and ``s3://`` share."""

    def __init__(self, url: str, filesystem: Any) -> None:
        self._url = _without_credentials(url).rstrip("/")
        self._fs = filesystem
        self._root = filesystem._strip_protocol(self._url).rstrip("/")

    @property
    def url(self) -> str:
        return self._url

    def read(self, path: str) -> bytes:
        return bytes(self._call(lambda: self._fs.cat_file(self._at(path))))

    def _read_at_most(self, path: str, start: int, stop: int) -> bytes:
        return bytes(self._call(lambda: self._fs.cat_file(self._at(path), start=start, end=stop)))

    def exists(self, path: str) -> bool:
        return bool(self._call(lambda: self._fs.isfile(self._at(path))))

    def size(self, path: str) -> int:
        return int(self._call(lambda: self._fs.info(self._at(path)))["size"])

    def list(self, prefix: str) -> _Names:
        base = self._at(prefix) if prefix else self._root
        self._fs.invalidate_cache()
        try:
            found = self._call(lambda: self._fs.find(base))
        except FileNotFoundError:
            return []
        return sorted(name[len(self._root) :].lstrip("/") for name in found if name != base)

    def delete_prefix(self, prefix: str) -> None:
        for name in self.list(prefix):
            self._call(lambda name=name: self._fs.rm_file(self._at(name)))  # type: ignore[misc]

    def _call(self, operation: Callable[[], T]) -> T:
        return operation()

    def _at(self, path: str) -> str:
        return f"{self._root}/{checked_path(path)}"


class MemoryStore(FsspecStore):
    """A dictionary shared by this process: for tests and examples."""

    def create(self, path: str, data: bytes) -> None:
        with _MEMORY_LOCK:
            if self._fs.exists(self._at(path)):
                raise ObjectExistsError(path)
            self._fs.pipe_file(self._at(path), bytes(data))


class S3Store(FsspecStore):
    """A bucket. ``create`` is ``PUT`` with ``If-None-Match: *``; busy answers are tried again."""

    def create(self, path: str, data: bytes) -> None:
        try:
            self._call(lambda: self._fs.pipe_file(self._at(path), data, mode="create"))
        except FileExistsError as error:
            raise ObjectExistsError(path) from error
        except OSError as error:
            if _http_status(error) == 412:
                raise ObjectExistsError(path) from error
            raise

    def _read_at_most(self, path: str, start: int, stop: int) -> bytes:
        try:
            return super()._read_at_most(path, start, stop)
        except OSError as error:
            # The range starts past the object's end: as short as an object can be.
            if _http_status(error) == 416:
                return b""
            raise

    def _call(self, operation: Callable[[], T]) -> T:
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            try:
                return operation()
            except OSError as error:
                status = _http_status(error)
                if status not in _RETRIED_STATUS or attempt == _MAX_ATTEMPTS:
                    raise
                pause_s = random.uniform(0.5, 1.0) * 0.1 * 2**attempt
                log.warning("storage answered %s, trying again in %.2f s (%d)", status, pause_s, attempt)
                time.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")


def checked_path(path: str) -> str:
    """``path`` itself when it is relative, '/'-separated and stays under the root; else ``ValueError``."""
    segments = path.split("/")
    if any(segment in ("", ".", "..") for segment in segments) or "\\" in path or "\0" in path:
        raise ValueError(f"object paths are relative with plain segments, got {path!r}")
    return path


def _s3_filesystem(storage_options: dict[str, Any]) -> Any:
    try:
        return fsspec.filesystem("s3", **{**storage_options, "use_listings_cache": False})
    except ImportError as error:
        raise InputError(f"an s3:// lake needs s3fs ({error}): pip install 'draftlake[s3]'") from error


def _without_credentials(url: str) -> str:
    parts = urlsplit(str(url))
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))


def _http_status(error: OSError) -> int | None:
    # s3fs keeps the client's answer as the cause of the OSError it translates to.
    response = getattr(error.__cause__, "response", None) or {}
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return int(status) if status is not None else None


def _no_hard_links(error: OSError) -> bool:
    return error.errno in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP)


def _read_fully(read: Callable[[int], bytes | None], count: int) -> bytes:
    """Read ``count`` bytes, or fewer when the file ends: one unbuffered read may return less."""
    parts: list[bytes] = []
    while count > 0:
        part = read(count)
        if not part:
            break
        parts.append(part)
        count -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _leads_up(path: str, here: str) -> bool:
    """Whether ``path`` is a link to a folder that holds the folder ``here``: walking it would never end."""
    if not os.path.islink(path):
        return False
    target = os.path.realpath(path)
    return os.path.commonpath([target, here]) == target


def _make_folders(folder: Path) -> None:
    """Create a folder and its parents so that a power cut cannot lose the names."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        with suppress(FileExistsError):
            path.mkdir()
        _fsync_folder(path.parent)


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
