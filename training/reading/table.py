"""A selection's rows as columns, and what of a fragment is read at once. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.fragments import row_bytes

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class WindowTable:
    """Columns ``[N]`` of a selection's windows, by their place in it."""

    fragment: Index
    """Number of the window's fragment; fragments are numbered by their path."""
    offset: Index
    """First row in the fragment's arrays."""
    num_rows: Index
    row_bytes: Index
    """Bytes of one row, both arrays together."""

    @staticmethod
    def of(rows: Sequence[Mapping[str, Any]]) -> "WindowTable":
        """The columns of commit rows."""
        prefixes = sorted({row["data_prefix"] for row in rows})
        number = {prefix: place for place, prefix in enumerate(prefixes)}
        columns = (
            [number[row["data_prefix"]] for row in rows],
            [row["row_offset"] for row in rows],
            [row["num_rows"] for row in rows],
            [row_bytes(row, "aux") + row_bytes(row, "final") for row in rows],
        )
        return WindowTable(*(np.array(column, np.int64) for column in columns))

    def __len__(self) -> int:
        return len(self.fragment)

    @property
    def nbytes(self) -> Index:
        """Feature bytes of each window."""
        return self.num_rows * self.row_bytes

    def storage_order(self, members: Index) -> Index:
        """``members`` as they lie in storage."""
        keys = (self.offset[members], self.fragment[members])
        return members[np.lexsort(keys)]


def cut_parts(table: WindowTable, members: Index, *, part_bytes: int, gap_bytes: int) -> list[Index]:
    """Windows that are read together: neighbours in one fragment, each part in storage order.

    A part spans at most ``part_bytes``, unless one window alone is larger, and no hole above
    ``gap_bytes``.
    """
    if len(members) < 2:
        return [members] if len(members) else []
    order = table.storage_order(members)
    fragment, size = table.fragment[order].tolist(), table.row_bytes[order].tolist()
    first = table.offset[order].tolist()
    stop = (table.offset[order] + table.num_rows[order]).tolist()
    cuts, begin, reach = [0], first[0], stop[0]
    for place in range(1, len(order)):
        hole = (first[place] - reach) * size[place]
        span = (max(reach, stop[place]) - begin) * size[place]
        if fragment[place] != fragment[place - 1] or hole > gap_bytes or span > part_bytes:
            cuts.append(place)
            begin, reach = first[place], stop[place]
        reach = max(reach, stop[place])
    return np.split(order, cuts[1:])
