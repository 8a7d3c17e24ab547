"""A folder on a fast local disk that keeps parts of remote objects: bounded, shared by processes, never trusted.

Objects of a lake are immutable, so a part that was right stays right. Each object has a folder with one file
per part, named by its first byte and the one after its last, and an empty file that names the object's length.
Files appear whole, by renaming. A cache is no lake: whatever is lost or spoilt in it is read again from the
store, so nothing is made durable, and who finds a spoilt part drops it.
"""

import fcntl
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_LEDGER = "bytes"
"""Holds the bytes that are kept or being written, as text, and is the lock that all processes share."""
_LENGTH = "length-"
_TEMPORARY = ".partial"
_ABANDONED_S = 3600
"""Age at which a temporary file belongs to nobody any more."""
_ROOM = 16
"""Making room frees at least one part in so many of the whole, so that it is not done for every part."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Bytes ``[start, stop)`` of an object."""

    start: int
    stop: int

    @property
    def name(self) -> str:
        return f"{self.start}-{self.stop}"


class ReadCache:
    """Parts of objects in a folder, at most ``max_bytes`` of them. Safe for threads and processes.

    What cannot be looked at is not there. An ``OSError`` of a method that keeps something says that the disk
    is full or the folder cannot be written.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes

    def __repr__(self) -> str:
        return f"ReadCache({str(self._folder)!r}, max_bytes={self._max_bytes:,})"

    def spans(self, name: str) -> list[Span]:
        """Parts that are kept of an object, by their first byte; ``name`` is its url."""
        found = []
        with suppress(OSError), os.scandir(self._place(name)) as entries:
            for entry in entries:
                start, dash, stop = entry.name.partition("-")
                if dash and start.isdigit() and stop.isdigit():
                    found.append(Span(int(start), int(stop)))
        return sorted(found)

    def length(self, name: str) -> int | None:
        """Length of an object in bytes, as kept; None when unknown."""
        with suppress(OSError):
            for entry in os.listdir(self._place(name)):
                if entry.startswith(_LENGTH) and entry[len(_LENGTH) :].isdigit():
                    return int(entry[len(_LENGTH) :])
        return None

    def length_of_whole(self, name: str) -> int | None:
        """Length of an object whose parts can be all of it; None when unknown, or when less is kept than it says."""
        length, kept = self.length(name), 0
        with suppress(OSError), os.scandir(self._place(name)) as entries:
            kept = sum(entry.stat().st_size for entry in entries)
        return length if length is not None and length <= kept else None

    def keep_length(self, name: str, length: int) -> None:
        """Remember the length of an object."""
        place = self._place(name)
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{_LENGTH}{length}").touch()

    def read_into(self, name: str, span: Span, start: int, into: memoryview) -> bool:
        """Fill ``into`` from byte ``start`` of an object on, out of a kept part; False when it is gone or cut.

        A part that was read counts as the newest.
        """
        try:
            descriptor = os.open(self._place(name) / span.name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            if os.fstat(descriptor).st_size != span.stop - span.start:
                return False
            done = 0
            while done < len(into):
                count = os.preadv(descriptor, [into[done:]], start - span.start + done)
                if count == 0:
                    return False
                done += count
            os.utime(descriptor)
        finally:
            os.close(descriptor)
        return True

    def keep(self, name: str, start: int, data: memoryview) -> int:
        """Keep a part of an object, when it is not too large for that; how many bytes were given up for it."""
        span = Span(start, start + len(data))
        place = self._place(name)
        if not 0 < len(data) <= self._max_bytes - self._max_bytes // _ROOM or (place / span.name).exists():
            return 0
        evicted = self._reserve(len(data))
        place.mkdir(parents=True, exist_ok=True)
        temporary = place / f"{uuid.uuid4().hex}{_TEMPORARY}"
        try:
            temporary.write_bytes(data)
            temporary.replace(place / span.name)
        finally:
            temporary.unlink(missing_ok=True)
        return evicted

    def drop(self, name: str) -> int:
        """Give up all that is kept of an object; how many parts that was."""
        dropped = self.spans(name)
        shutil.rmtree(self._place(name), ignore_errors=True)
        return len(dropped)

    def _place(self, name: str) -> Path:
        digest = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
        return self._folder / digest[:2] / digest

    def _reserve(self, nbytes: int) -> int:
        """Enter bytes that are about to be written; how many others were deleted to make room for them."""
        evicted = 0
        with self._ledger() as ledger:
            text = os.pread(ledger, 32, 0)
            kept = int(text) if text.strip().isdigit() else None
            if kept is None or kept + nbytes > self._max_bytes:
                kept, evicted = self._make_room(nbytes)
            os.ftruncate(ledger, 0)
            os.pwrite(ledger, str(kept + nbytes).encode(), 0)
        return evicted

    @contextmanager
    def _ledger(self) -> Iterator[int]:
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._folder / _LEDGER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)

    def _make_room(self, nbytes: int) -> tuple[int, int]:
        """Delete what was read longest ago until ``nbytes`` fit; bytes that stay, and bytes deleted."""
        files = sorted(self._files())
        kept = sum(size for _, size, _ in files)
        goal = self._max_bytes - max(nbytes, self._max_bytes // _ROOM)
        evicted = 0
        for _, size, path in files:
            if kept - evicted <= goal and not _abandoned(path):
                continue
            with suppress(FileNotFoundError):
                path.unlink()
            evicted += size
            self._leave(path.parent)
        return kept - evicted, evicted

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """Time of last use, size and path of every part, temporary ones among them."""
        for folder, _, names in os.walk(self._folder):
            for name in names:
                path = Path(folder, name)
                if name != _LEDGER and not name.startswith(_LENGTH):
                    with suppress(FileNotFoundError):
                        facts = path.stat()
                        yield facts.st_mtime, facts.st_size, path

    @staticmethod
    def _leave(place: Path) -> None:
        """Remove the folder of an object of which nothing is kept any more."""
        with suppress(OSError):
            names = os.listdir(place)
            if all(name.startswith(_LENGTH) for name in names):
                for name in names:
                    (place / name).unlink()
                place.rmdir()


def _abandoned(path: Path) -> bool:
    with suppress(FileNotFoundError):
        return path.name.endswith(_TEMPORARY) and time.time() - path.stat().st_mtime > _ABANDONED_S
    return False
