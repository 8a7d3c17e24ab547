"""Bytes of the store into slabs, checked as they land, and windows of what landed."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from features.commits import TokenRow
from features.errors import CorruptDataError
from features.fragments import (
    assemble,
    land_checked,
    row_bytes,
    rows_of,
    tokens_of,
)
from features.storage import LocalStore
from features.windows import Window
from training.reading.caches import KnownTable, OpenObjects, TokenTables
from training.reading.slabs import Bytes, SlabPool

if TYPE_CHECKING:
    from features.lake import Lake

T = TypeVar("T")

ARRAYS = ("aux", "final")


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Windows of one fragment on their way into memory, as one range of rows of each array."""

    rows: Mapping[int, Mapping[str, Any]]
    """Commit rows of the windows, by their place in the selection."""
    begin: int
    """First row of the range."""
    widths: Mapping[str, int]
    """Bytes of a row of each array."""
    nbytes: int
    arrays: Mapping[str, Future[dict[str, Bytes]]]
    tokens: Future[KnownTable]

    def cancel(self) -> None:
        """Give up what has not begun."""
        for future in self.arrays.values():
            future.cancel()


class Landing:
    """Fetches parts and makes windows of them; requests by the threads it is given, one caller."""

    def __init__(self, lake: "Lake", rows: Sequence[Mapping[str, Any]], slabs: SlabPool) -> None:
        self._lake, self._rows, self._slabs = lake, rows, slabs
        self._readable = np.zeros(len(rows), np.bool_)
        self._objects = OpenObjects(lake.store)
        self.tables = TokenTables(lake.store)
        # One job for both arrays where a job costs as much as a read; requests of a server go side by side.
        self._jobs = [ARRAYS] if isinstance(lake.store, LocalStore) else [(array,) for array in ARRAYS]

    def fetch(self, members: Sequence[int], threads: Executor) -> Part:
        """Ask for windows of one fragment, given in storage order.

        Raises:
            LakeContractError: a row cannot be read from this lake (see ``Lake.check_row``).
        """
        rows = {index: self._rows[index] for index in members}
        for index, row in rows.items():
            if not self._readable[index]:
                self._lake.check_row(row)
                self._readable[index] = True
        first = rows[members[0]]
        tokens = self.tables.get(first["data_prefix"], threads)
        begin = first["row_offset"]
        count = max(row["row_offset"] + row["num_rows"] for row in rows.values()) - begin
        widths = {array: row_bytes(first, array) for array in ARRAYS}
        arrays = {}
        for job in self._jobs:
            future = threads.submit(self._land, {array: widths[array] for array in job}, rows, begin, count)
            arrays.update(dict.fromkeys(job, future))
        return Part(rows, begin, widths, count * sum(widths.values()), arrays, tokens)

    def window(self, part: Part, index: int) -> Window:
        """A window of a part, once it is there; its features share the part's memory.

        Raises:
            CorruptDataError: an object is absent or too short, or a checksum differs.
            LakeContractError: the row does not describe what is stored.
        """
        row, known = part.rows[index], part.tokens.result()
        aux, final = (
            rows_of(
                _slice(part.arrays[array].result()[array], row, part.begin, part.widths[array]),
                row,
                array,
                known.table.aux_scales,
                url=self._lake.url,
            )
            for array in ARRAYS
        )
        if index in known.checked:  # by an earlier epoch of this reader
            return assemble(row, known.table.rows[row["window_index"]], aux, final, vocab_size=None)
        known, tokens = self._tokens(known, row)
        window = assemble(row, tokens, aux, final, vocab_size=self._lake.target.vocab_size)
        known.checked.add(index)
        return window

    def _tokens(self, known: KnownTable, row: Mapping[str, Any]) -> tuple[KnownTable, TokenRow]:
        """A window's tokens, and the table they are from: another one when ``known`` was a cache's and wrong."""
        try:
            return known, tokens_of(known.table, row, url=self._lake.url)
        except CorruptDataError:
            other = self.tables.again(row["data_prefix"], known)
            if other is None:
                raise
        return other, tokens_of(other.table, row, url=self._lake.url)

    def _land(
        self, widths: Mapping[str, int], rows: Mapping[int, Mapping[str, Any]], begin: int, count: int
    ) -> dict[str, Bytes]:
        landed = {}
        for array, width in widths.items():
            data = self._slabs.take(count * width)
            land_checked(self._lake.store, self._objects.opened, begin, data, rows.values(), array)
            landed[array] = data
        return landed


def _slice(data: Bytes, row: Mapping[str, Any], begin: int, width: int) -> Bytes:
    """Bytes of a commit row's window in what landed from row ``begin`` on."""
    first = row["row_offset"] - begin
    return data[first * width : (first + row["num_rows"]) * width]


class CallingThread(Executor):
    """Does each job at once, in the thread that asks."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """The job's outcome, done."""
        done: Future[T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done
