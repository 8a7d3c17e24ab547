"""The one place that talks to storage. ``Store.create`` is the commit primitive of everything.

A store holds immutable objects under '/'-separated paths relative to its root. There is no
append, rename, overwrite or lock: ``create`` makes an object visible whole, once, or refuses.
A local folder, ``memory://`` and ``s3://`` keep that promise in their own ways. Nothing
is cached: a listing shows what other processes committed a moment ago.
"""

import os
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from features.errors import CorruptDataError, InputError, ObjectExistsError
from features.local_files import (
    OpenFile,
    fsync_folder,
    leads_up,
    make_folders,
    no_hard_links,
    read_fully,
)
from features.paths import checked_path, without_credentials

T = TypeVar("T")
_Names = list[str]  # a class with a method `list` cannot name the builtin in its signatures

TEMPORARY_SUFFIX = ".partial"
"""Local files that a killed writer may leave behind; no listing shows them."""

_MEMORY_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    """What a listing says of an object: its length in bytes, and when it was written (UTC, by the store's clock)."""

    size: int
    written_at: datetime


class Store(ABC):
    """Immutable objects under one root. Paths are relative, without '.', '..' or empty segments."""

    @staticmethod
    def open(url: str, **storage_options: Any) -> "Store":
        """The store behind a local path, ``file://``, ``memory://`` or ``s3://`` url.

        Nothing is created or contacted. ``storage_options`` are for S3 (``S3Store.open_bucket``).

        Raises:
            InputError: the protocol has no create-only write that we have tested, or the settings of S3
                are wrong.
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
                from features.s3_store import S3Store  # it builds on this module

                return S3Store.open_bucket(url, storage_options)
        raise InputError(
            f"cannot keep a lake at {without_credentials(url)!r}: expected a local path, file://, "
            f"memory:// or s3://, found protocol {protocol!r}. Only these have a create-only write that is "
            f"tested here."
        )

    @property
    @abstractmethod
    def url(self) -> str:
        """Where the store is, for people and logs; never holds credentials."""

    @property
    def about(self) -> str:
        """How the store is used, for people; never holds credentials."""
        return self.url

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
    def _read_at_most(self, path: str, start: int, stop: int) -> bytes | memoryview: ...

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """Bytes ``[start, stop)`` of an object, in one request.

        Raises:
            FileNotFoundError: the object is absent.
            CorruptDataError: the object ends before ``stop``.
        """
        return bytes(self._range(path, start, stop))

    def _range(self, path: str, start: int, stop: int) -> bytes | memoryview:
        if not 0 <= start <= stop:
            raise ValueError(f"byte range needs 0 <= start <= stop, got [{start}, {stop})")
        data = self._read_at_most(path, start, stop) if stop > start else b""
        self._require_length(path, start, stop, len(data))
        return data

    def read_into(self, path: str, start: int, into: memoryview) -> None:
        """Fill writable bytes from byte ``start`` of an object on, in one request.

        Raises:
            FileNotFoundError, CorruptDataError: as :meth:`read_range`; ``into`` then holds anything.
        """
        self.opened(path)(start, into)

    def opened(self, path: str) -> Callable[[int, memoryview], None]:
        """:meth:`read_into` of one object, many times: a local file stays open until this is let go."""
        return lambda start, into: into.__setitem__(slice(None), self._range(path, start, start + len(into)))

    def _require_length(self, path: str, start: int, stop: int, found: int) -> None:
        if found != stop - start:
            raise CorruptDataError(
                f"{self.url}/{path} is too short: expected bytes [{start:,}, {stop:,}), found {found:,} "
                f"of {stop - start:,}. The object was cut; restore it from a copy or collect the fragment "
                f"again."
            )

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

    @abstractmethod
    def scan(self, prefix: str) -> dict[str, ObjectFacts]:
        """:meth:`list` with facts, in one listing; a local folder's temporary files are among them."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete one object, absent or not; readers and writers never call it."""

    @property
    def origin(self) -> "Store":
        """The store that holds the objects: this one, unless it reads through a cache."""
        return self

    def distrust(self, path: str) -> bool:
        """Told by a reader that an object's bytes are wrong; whether to read again, as they may have been a cache's."""
        del path
        return False


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
        make_folders(target.parent)
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
            if temporary.exists() and no_hard_links(error):
                raise InputError(
                    f"cannot keep a lake at {self.url}: its filesystem has no hard links "
                    f"({error.strerror}), which a create-only write needs. Use a folder on another "
                    f"filesystem, or s3://."
                ) from error
            raise
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()
        fsync_folder(target.parent)

    def read(self, path: str) -> bytes:
        return self._at(path).read_bytes()

    def _read_at_most(self, path: str, start: int, stop: int) -> bytes:
        with self._at(path).open("rb", buffering=0) as file:
            file.seek(start)
            return read_fully(file.read, stop - start)

    def opened(self, path: str) -> Callable[[int, memoryview], None]:
        file = OpenFile(self._at(path))
        return lambda start, into: self._require_length(
            path, start, start + len(into), file.read_into(start, into)
        )

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

    def scan(self, prefix: str) -> dict[str, ObjectFacts]:
        found: dict[str, ObjectFacts] = {}
        for name in sorted(self._walk(prefix)):
            with suppress(FileNotFoundError):  # deleted since it was listed
                facts = self._at(name).stat()
                found[name] = ObjectFacts(facts.st_size, datetime.fromtimestamp(facts.st_mtime, UTC))
        return found

    def delete(self, path: str) -> None:
        self._at(path).unlink(missing_ok=True)

    def _walk(self, prefix: str, *, follow: bool = True) -> Iterator[str]:
        """Names of all files; a folder that was moved and linked is part of the store, unless it leads upwards."""
        base = self._root if prefix == "" else self._at(prefix)
        for folder, folders, files in os.walk(base, followlinks=follow):
            here = os.path.realpath(folder)
            folders[:] = [name for name in folders if not leads_up(os.path.join(folder, name), here)]
            relative = Path(folder).relative_to(self._root)
            yield from ((relative / name).as_posix() for name in files)

    def _at(self, path: str) -> Path:
        return self._root / checked_path(path)


class FsspecStore(Store):
    """What ``memory://`` and ``s3://`` share."""

    def __init__(self, url: str, filesystem: Any) -> None:
        self._url = without_credentials(url).rstrip("/")
        self._fs = filesystem
        self._root = filesystem._strip_protocol(self._url).rstrip("/")

    @property
    def url(self) -> str:
        return self._url

    def read(self, path: str) -> bytes:
        return bytes(self._call(lambda: self._fs.cat_file(self._at(path))))

    def _read_at_most(self, path: str, start: int, stop: int) -> bytes | memoryview:
        return bytes(self._call(lambda: self._fs.cat_file(self._at(path), start=start, end=stop)))

    def exists(self, path: str) -> bool:
        return bool(self._call(lambda: self._fs.isfile(self._at(path))))

    def size(self, path: str) -> int:
        return int(self._call(lambda: self._fs.info(self._at(path)))["size"])

    def list(self, prefix: str) -> _Names:
        return sorted(self._find(prefix))

    def scan(self, prefix: str) -> dict[str, ObjectFacts]:
        # s3fs says `LastModified`, memory:// `created`: a date, or seconds since 1970 in a listing.
        found = {n: (i["size"], i.get("LastModified") or i["created"]) for n, i in self._find(prefix).items()}
        return {
            name: ObjectFacts(int(size), at if isinstance(at, datetime) else datetime.fromtimestamp(at, UTC))
            for name, (size, at) in sorted(found.items())
        }

    def delete(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._call(lambda: self._fs.rm_file(self._at(path)))

    def _find(self, prefix: str) -> dict[str, Any]:
        base = self._at(prefix) if prefix else self._root
        self._fs.invalidate_cache()
        try:
            found = self._call(lambda: self._under(base))
        except FileNotFoundError:
            return {}
        return {name[len(self._root) :].lstrip("/"): info for name, info in found.items() if name != base}

    def _under(self, base: str) -> dict[str, Any]:
        return dict(self._fs.find(base, detail=True))

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
