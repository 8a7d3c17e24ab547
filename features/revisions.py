"""The rows of a lake revision: the newest snapshot, the tail of commits, or what a pinned list names."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl
import pyarrow as pa

from features.commits import CommitName
from features.errors import CorruptDataError, InputError
from features.head_store import head_path
from features.lake import Lake, version_path
from features.schema import COMMIT_SCHEMA, TargetVersion
from features.snapshot_format import Snapshot
from features.snapshots import (
    CATALOG_ORDER,
    Listing,
    first_attempts,
    is_usable,
    pinned_paths,
    read_commits,
    revision_of,
)

_LOADS = 5


@dataclass(frozen=True, slots=True)
class RevisionRows:
    """What a catalog is made of."""

    frame: pl.DataFrame
    """Columns of ``COMMIT_SCHEMA``, in ``CATALOG_ORDER``."""
    commit_paths: tuple[str, ...]
    heads_missing: tuple[int, ...]
    """Versions with windows whose record or head snapshot is absent."""
    hidden_fragments: int
    """Left out: given up by retention, or in quarantine."""


def read_revision(lake: Lake, revision: str | None = None) -> RevisionRows:
    """Read the commits that are visible now, or those of a pinned revision.

    Raises:
        InputError: ``revision`` is neither pinned nor the lake's present one, or retention took a
            part of it.
        CorruptDataError: a commit or the snapshot is unreadable.
        VersionConflictError: a version is registered with another head than its windows.
    """
    for _ in range(_LOADS):
        listing, tail = read_commits(lake)
        usable = [name for name, table in tail.items() if is_usable(table, listing.hidden)]
        names = first_attempts((*listing.usable, *usable))
        num_hidden = _num_hidden(listing, tail)
        if revision is not None and revision != revision_of(n.path for n in names).digest:
            names = _pinned(lake, revision, names)
            tail = tail | _absent_from(lake, listing, tail, names)
        try:
            frame = _frame(lake, listing, tail, names)
        except FileNotFoundError:  # the snapshot was pruned since it was listed: there is a newer one
            continue
        paths = tuple(name.path for name in names)
        return RevisionRows(frame, paths, _heads_missing(lake, listing, frame), num_hidden)
    raise CorruptDataError(f"{lake.url}/snapshots: rows of the newest snapshot are absent")


def _pinned(lake: Lake, revision: str, present: Sequence[CommitName]) -> list[CommitName]:
    current = revision_of(name.path for name in present)
    try:
        names = [name for name in map(CommitName.parse, pinned_paths(lake, revision)) if name is not None]
    except FileNotFoundError as error:
        raise InputError(
            f"lake revision {revision} was never pinned, and {lake.url} has moved on to {current.digest} with "
            f"{current.num_fragments} fragments. Name a revision that a training run recorded, or select again."
        ) from error
    return names


def _absent_from(
    lake: Lake, listing: Listing, tail: Mapping[CommitName, pa.Table], names: Sequence[CommitName]
) -> dict[CommitName, pa.Table]:
    """Commits of a pinned revision that neither the snapshot nor the tail can give; refused when hidden or gone."""
    kept = set(listing.usable)
    found: dict[CommitName, pa.Table] = {}
    for name in names:
        if name in kept:
            continue
        try:
            found[name] = tail[name] if name in tail else lake.read_commit(name.path)
            gone = name in listing.covered and listing.covered[name].state == "dropped"
            gone |= found[name].num_rows > 0 and not is_usable(found[name], listing.hidden)
        except FileNotFoundError:
            gone = True
        if gone:
            raise InputError(
                f"the revision needs {name.path} of {lake.url}, which retention gave up, or which is damaged and in "
                f"quarantine. It cannot be read again as it was: select anew."
            )
    return found


def _frame(
    lake: Lake, listing: Listing, tail: Mapping[CommitName, pa.Table], names: Sequence[CommitName]
) -> pl.DataFrame:
    """The rows of the named commits in ``CATALOG_ORDER``."""
    wanted = set(names)
    tables = [table for name, table in tail.items() if name in wanted]
    parts = [pl.DataFrame(pl.from_arrow(pa.concat_tables([COMMIT_SCHEMA.empty_table(), *tables])))]
    if listing.snapshot is not None:
        rows = _snapshot_rows(lake, listing.snapshot)
        kept = {name: c.data_prefix for name, c in listing.covered.items() if c.state == "kept"}
        if not kept.keys() <= wanted:
            prefixes = [prefix for name, prefix in kept.items() if name in wanted]
            rows = rows.filter(pl.col("data_prefix").is_in(prefixes))
        if not tables:
            return rows  # a snapshot's rows are in order
        parts.insert(0, rows)
    return pl.concat(parts).sort(CATALOG_ORDER)


def _snapshot_rows(lake: Lake, snapshot: Snapshot) -> pl.DataFrame:
    """Every row of a snapshot; columns that a later compactor added are left out."""
    raw, where = lake.snapshots.rows(snapshot), f"{lake.url}/{snapshot.rows.path}"
    known = pl.DataFrame(pl.from_arrow(COMMIT_SCHEMA.empty_table())).schema
    try:
        stored = set(pl.read_parquet_schema(io.BytesIO(raw)))
        found = pl.read_parquet(io.BytesIO(raw), columns=[name for name in known if name in stored])
        absent = [pl.lit(None, kind).alias(name) for name, kind in known.items() if name not in stored]
        rows = found.with_columns(absent).select(list(known)).cast(known)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise CorruptDataError(f"{where} is no snapshot's rows: {error}. Restore it from a copy.") from error
    empty = [f.name for f in COMMIT_SCHEMA if not f.nullable and rows[f.name].null_count()]
    if empty or rows.height != snapshot.windows:
        raise CorruptDataError(
            f"{where} holds {rows.height:,} rows, expected {snapshot.windows:,}, and lacks values in "
            f"{', '.join(empty) or 'no column'}: it is not what its snapshot says. Restore it from a copy."
        )
    return rows


def _num_hidden(listing: Listing, tail: Mapping[CommitName, pa.Table]) -> int:
    kept = sum(covered.state == "kept" for covered in listing.covered.values()) - len(listing.usable)
    in_tail = [t for n, t in tail.items() if n in set(listing.tail) and t.num_rows]
    return (
        kept + sum(not is_usable(table, listing.hidden) for table in in_tail) + len(listing.hidden.unreadable)
    )


def _heads_missing(lake: Lake, listing: Listing, frame: pl.DataFrame) -> tuple[int, ...]:
    """Versions whose record or head is absent; a version with another head than its windows is refused.

    Two listings; a record is read only when no snapshot vouches for it.
    """
    pairs = frame.select("target_version", "head_id").unique().sort("target_version", "head_id").rows()
    if not pairs:
        return ()
    records, blobs = set(lake.store.list("versions")), set(lake.store.list("blobs"))
    known = listing.snapshot.heads if listing.snapshot is not None else {}
    registered = {number for number, _ in pairs if version_path(TargetVersion(number)) in records}
    for number, head_id in pairs:
        if number in registered and known.get(number) != head_id:
            lake.check_version(TargetVersion(number), head_id, where=f"a fragment in {lake.url}")
    return tuple(v for v, head in pairs if v not in registered or head_path(head) not in blobs)
