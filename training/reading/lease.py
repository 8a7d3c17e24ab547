"""A lease for as long as a selection is read: retention and gc keep their hands off what it needs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from features.commits import CommitName
from features.leases import Lease, held
from features.selection import RowTable
from features.tombstones import FragmentName

if TYPE_CHECKING:
    from features.lake import Lake
    from features.selection import Selection

_NAMED_BY = ("target_version", "plan_id", "attempt", "data_prefix")


def _now() -> datetime:
    return datetime.now(UTC)


@contextmanager
def read_lease(
    lake: "Lake", selection: "Selection", *, reader: str, now: Callable[[], datetime] = _now
) -> Iterator[Lease]:
    """Protect a selection's fragments until the context ends; renewed meanwhile by a thread.

    ``reader`` is what retention reports as the one who needs them. A killed reader's lease runs out
    after ``features.leases.DEFAULT_TTL``.

    Raises:
        InputError: retention gave one of them up since the selection was made.
    """
    revision, fragments = selection.revision.digest, fragments_of(selection)
    with held(lake, revision=revision, fragments=fragments, reader=reader, now=now) as lease:
        yield lease


def fragments_of(selection: "Selection") -> frozenset[FragmentName]:
    """The fragments that hold a selection's windows."""
    rows = selection.rows
    if isinstance(rows, RowTable):  # a million rows as dicts would take seconds
        named = rows.table.select(_NAMED_BY).group_by(list(_NAMED_BY)).aggregate([]).to_pylist()
    else:
        named = list(rows)
    return frozenset(
        FragmentName(
            CommitName(row["target_version"], row["plan_id"], row["attempt"]).path, row["data_prefix"]
        )
        for row in named
    )
