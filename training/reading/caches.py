"""What a reader keeps between reads: token tables, and open files of fragments."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

from features.commits import TokenTable
from features.fragments import TOKENS_FILE, read_table
from features.storage import Store

TOKEN_TABLE_BYTES = 256 * 2**20
"""Token tables kept, about; they are small beside the features, and read once per fragment."""

OPEN_OBJECTS = 256
"""Objects kept open; on a local folder each is a file descriptor."""

_BYTES_PER_TOKEN = 10

Fill = Callable[[int, memoryview], None]


@dataclass(frozen=True, slots=True, eq=False)
class KnownTable:
    """A token table, and which windows of the selection were checked against it."""

    table: TokenTable
    checked: set[int] = field(default_factory=set)


class TokenTables:
    """Token tables by fragment, the least recently used dropped first; asked from one thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tables: OrderedDict[str, Future[KnownTable]] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def get(self, data_prefix: str, threads: Executor) -> Future[KnownTable]:
        """A fragment's table: one request, however many parts of the fragment are under way."""
        if data_prefix not in self._tables:
            self._tables[data_prefix] = threads.submit(self._read, data_prefix)
        self._tables.move_to_end(data_prefix)
        with self._lock:
            while self._kept_bytes > TOKEN_TABLE_BYTES and len(self._tables) > 1:
                oldest, _ = self._tables.popitem(last=False)
                self._kept_bytes -= self._sizes.pop(oldest, 0)
        return self._tables[data_prefix]

    def again(self, data_prefix: str, wrong: KnownTable) -> KnownTable | None:
        """Another table than ``wrong``, whose tokens are not those of a commit; None when there is no other."""
        current = self._tables.get(data_prefix)
        if current is not None and current.done() and (known := current.result()) is not wrong:
            return known
        if not self._store.distrust(f"{data_prefix}/{TOKENS_FILE}"):
            return None
        with self._lock:
            self._kept_bytes -= self._sizes.pop(data_prefix, 0)
        read: Future[KnownTable] = Future()
        read.set_result(self._read(data_prefix))
        self._tables[data_prefix] = read
        return read.result()

    def forget_failures(self) -> None:
        """Drop what was given up or failed, so that the next read asks again."""
        for data_prefix, table in list(self._tables.items()):
            if not table.done() or table.cancelled() or table.exception() is not None:
                del self._tables[data_prefix]

    def _read(self, data_prefix: str) -> KnownTable:
        table = read_table(self._store, data_prefix)
        size = _BYTES_PER_TOKEN * sum(len(row.token_ids) for row in table.rows)
        with self._lock:
            self._sizes[data_prefix] = size
            self._kept_bytes += size
        return KnownTable(table)


class OpenObjects:
    """Objects kept open, the least recently used let go first; safe to share between threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._open: OrderedDict[str, Fill] = OrderedDict()
        self._lock = threading.Lock()

    def opened(self, path: str) -> Fill:
        """As ``Store.opened``. Objects never change, so an open one stays true; a deleted one may still be read."""
        with self._lock:
            found = self._open.get(path)
            if found is not None:
                self._open.move_to_end(path)
                return found
        found = self._store.opened(path)
        with self._lock:
            self._open[path] = found
            while len(self._open) > OPEN_OBJECTS:
                self._open.popitem(last=False)
        return found
