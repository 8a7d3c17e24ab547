"""A remote store whose fragments are read through a local folder, so that a later epoch asks it for nothing.

Nothing but fragments is cached: listings, commits and versions are always asked anew. A reader checks what
it gets against the commit, from the cache as from the store, and says when it is wrong (``distrust``): what
the cache holds of that object is dropped and read again.
"""

import logging
import threading
from collections.abc import Callable, MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from features.errors import InputError
from features.read_cache import ReadCache, Span
from features.storage import ObjectFacts, Store

log = logging.getLogger(__name__)

_CACHED = "data/"
_Names = list[str]  # a class with a method `list` cannot name the builtin in its signatures

OPTIONS = ("cache_dir", "cache_bytes")
"""Storage options that switch the cache on; both or neither."""


@dataclass(slots=True)
class CacheCounts:
    """What a cached store did since it was opened, in this process."""

    hits: int = 0
    """Reads that asked the store for nothing."""
    misses: int = 0
    bytes_cached: int = 0
    """Taken from the folder."""
    bytes_fetched: int = 0
    """Taken from the store."""
    distrusted: int = 0
    """Parts that were dropped because they were cut, or a reader's check failed."""
    bytes_evicted: int = 0
    failed: int = 0
    """Parts that could not be kept: the disk is full or the folder is not writable. The read went on."""


def cache_from(options: MutableMapping[str, Any]) -> ReadCache | None:
    """The cache that ``options`` ask for; takes :data:`OPTIONS` out of them.

    Raises:
        InputError: one of the two is missing, or is no folder and no number of bytes.
    """
    folder, max_bytes = (options.pop(name, None) for name in OPTIONS)
    if folder is None and max_bytes is None:
        return None
    if not folder or not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 1:
        raise InputError(
            f"a read cache needs a folder and its most bytes: expected cache_dir = '/fast/disk' and "
            f"cache_bytes = 200000000000, found {folder!r} and {max_bytes!r}"
        )
    return ReadCache(Path(str(folder)).expanduser(), max_bytes)


class CachedStore(Store):
    """A store with a cache of its fragments before it."""

    def __init__(self, origin: Store, cache: ReadCache) -> None:
        self._origin = origin
        self._cache = cache
        self._counts = CacheCounts()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return self._origin.url

    @property
    def about(self) -> str:
        return f"{self._origin.about}; fragments are cached"

    @property
    def origin(self) -> Store:
        """The store itself, for who must see what it holds."""
        return self._origin

    def counts(self) -> CacheCounts:
        """A copy of the counts so far."""
        with self._lock:
            return CacheCounts(**asdict(self._counts))

    def distrust(self, path: str) -> bool:
        dropped = self._cache.drop(self._name(path)) if path.startswith(_CACHED) else 0
        if dropped:
            self._count(distrusted=dropped)
            log.warning("cache of %s/%s dropped: its bytes are not those of the commit", self.url, path)
        # Also when nothing was left to drop: another thread may just have dropped what this one had read.
        return path.startswith(_CACHED)

    def read(self, path: str) -> bytes:
        if not path.startswith(_CACHED):
            return self._origin.read(path)
        name = self._name(path)
        length = self._cache.length_of_whole(name)
        if length is not None:
            data = bytearray(length)
            if self._from_cache(name, 0, memoryview(data)) is None:
                self._count(hits=1, bytes_cached=length)
                return bytes(data)
        found = self._origin.read(path)
        self._count(misses=1, bytes_fetched=len(found))
        self._keep(name, 0, memoryview(found), length=len(found))
        return found

    def _read_at_most(self, path: str, start: int, stop: int) -> bytes | memoryview:
        data = bytearray(stop - start)
        self.opened(path)(start, memoryview(data))
        return bytes(data)

    def opened(self, path: str) -> Callable[[int, memoryview], None]:
        fetch = self._origin.opened(path)
        if not path.startswith(_CACHED):
            return fetch
        name = self._name(path)

        def fill(start: int, into: memoryview) -> None:
            gap = self._from_cache(name, start, into)
            if gap is None:
                self._count(hits=1, bytes_cached=len(into))
                return
            part = into[gap.start - start : gap.stop - start]
            fetch(gap.start, part)
            self._count(misses=1, bytes_cached=len(into) - len(part), bytes_fetched=len(part))
            self._keep(name, gap.start, part)

        return fill

    def size(self, path: str) -> int:
        if not path.startswith(_CACHED):
            return self._origin.size(path)
        name = self._name(path)
        found = self._cache.length(name)
        if found is None:
            found = self._origin.size(path)
            self._keep(name, 0, memoryview(b""), length=found)
        return found

    def create(self, path: str, data: bytes) -> None:
        self._origin.create(path, data)

    def exists(self, path: str) -> bool:
        return self._origin.exists(path)

    def list(self, prefix: str) -> _Names:
        return self._origin.list(prefix)

    def scan(self, prefix: str) -> dict[str, ObjectFacts]:
        return self._origin.scan(prefix)

    def delete(self, path: str) -> None:
        self._origin.delete(path)

    def delete_prefix(self, prefix: str) -> None:
        self._origin.delete_prefix(prefix)

    def _name(self, path: str) -> str:
        return f"{self.url}/{path}"

    def _from_cache(self, name: str, start: int, into: memoryview) -> Span | None:
        """Fill what is kept of the bytes asked for; the one range that still has to be fetched, None if none."""
        wanted = Span(start, start + len(into))
        taken, missing = _cover(self._cache.spans(name), wanted)
        for kept, part in taken:
            if not self._cache.read_into(
                name, kept, part.start, into[part.start - start : part.stop - start]
            ):
                self._lost(name, kept)
                return wanted
        return Span(missing[0].start, missing[-1].stop) if missing else None

    def _lost(self, name: str, span: Span) -> None:
        """A part is gone, deleted for room by another process, or cut: in that case, drop it."""
        if span in self._cache.spans(name):
            self._count(distrusted=self._cache.drop(name))

    def _keep(self, name: str, start: int, data: memoryview, *, length: int | None = None) -> None:
        try:
            if length is not None:
                self._cache.keep_length(name, length)
            self._count(bytes_evicted=self._cache.keep(name, start, data))
        except OSError as error:
            self._count(failed=1)
            log.warning("%r cannot keep a part of %s: %s", self._cache, name, error)

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, value in more.items():
                setattr(self._counts, name, getattr(self._counts, name) + value)


def _cover(kept: list[Span], wanted: Span) -> tuple[list[tuple[Span, Span]], list[Span]]:
    """Which kept part gives which bytes of ``wanted``, and the bytes that no part gives; ``kept`` is sorted."""
    taken, missing, place = [], [], wanted.start
    for span in kept:
        if span.stop <= place or span.start >= wanted.stop:
            continue
        if span.start > place:
            missing.append(Span(place, span.start))
        part = Span(max(place, span.start), min(span.stop, wanted.stop))
        taken.append((span, part))
        place = part.stop
    if place < wanted.stop:
        missing.append(Span(place, wanted.stop))
    return taken, missing
