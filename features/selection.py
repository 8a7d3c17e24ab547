"""An exact list of windows, hashed: what a training run reads. Made by ``features.catalog``.

Free of polars, so that trainers and their loader processes can read a stored selection.
"""

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, overload

import pyarrow as pa

from features.digests import canonical_json
from features.errors import CorruptDataError, EmptySelectionError
from features.schema import COMMIT_SCHEMA, LakeRevision, ReadPlan, SelectionFilter, Split, VersionRange
from features.seals import check_seal, sealed

_METADATA_KEY = b"draftlake.selection"
# What is read, not who wrote it: two lakes with equal bytes give equal digests.
_IDENTITY = (
    "target_id", "target_version", "plan_id", "window_index", "sample_id", "start", "num_rows",
    "crc32c_aux", "crc32c_final", "crc32c_tokens",
)  # fmt: skip


BOUNDED = {
    "reward": "reward",
    "acceptance_length": "acceptance_length",
    "acceptance_rate": "acceptance_rate",
    "tokens": "num_rows",
}
"""What a filter can bound with ``min_`` and ``max_``, and the column that holds it."""

_KEPT_ROWS = 20_000
_BATCH = 4096


class RowTable(Sequence[dict[str, Any]]):
    """Commit rows as dicts that are made when they are looked at: a million at once need gigabytes.

    Up to some thousands are kept once made. Pickles as an Arrow table.
    """

    def __init__(self, table: "pa.Table | Callable[[], pa.Table]", num_rows: int) -> None:
        self._source = table
        self._num_rows = num_rows
        self._kept: list[dict[str, Any]] | None = None

    @property
    def table(self) -> pa.Table:
        """The rows as an Arrow table, columns of ``COMMIT_SCHEMA``."""
        if callable(self._source):
            self._source = self._source()
        return self._source

    def __len__(self) -> int:
        return self._num_rows

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if self._num_rows <= _KEPT_ROWS:
            if self._kept is None:
                self._kept = self.table.to_pylist()
            return self._kept[index]
        picked = range(self._num_rows)[index]
        if isinstance(picked, range):
            return self.table.take(pa.array(picked, pa.int64())).to_pylist()
        return self.table.slice(picked, 1).to_pylist()[0]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for start in range(0, self._num_rows, _BATCH):
            yield from self[start : start + _BATCH]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(other) != len(self):
            return False
        return all(left == right for left, right in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"RowTable({self._num_rows:,} rows)"

    def __reduce__(self) -> Any:
        return (RowTable, (self.table, self._num_rows))


@dataclass(frozen=True, slots=True)
class Selection:
    """Windows in the order (version, sample id, start); each row is one of ``COMMIT_SCHEMA``."""

    filter: SelectionFilter
    revision: LakeRevision
    rows: Sequence[dict[str, Any]]
    plan: ReadPlan
    available: str
    """What the revision offers, in words: for the message about an empty selection."""
    duplicates: int = 0
    """Windows left out because another fragment holds the same one."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def digest(self) -> str:
        """SHA-256 over the ordered windows' identities and checksums."""
        digest = hashlib.sha256()
        for identity in _identities(self.rows):
            digest.update(canonical_json(identity) + b"\n")
        return digest.hexdigest()

    def at(self, places: Sequence[int]) -> "Selection":
        """The windows at ``places``, in that order; ``plan`` and ``duplicates`` stay those of the whole."""
        if isinstance(self.rows, RowTable):
            rows = RowTable(self.rows.table.take(pa.array(places, pa.int64())), len(places))
            return replace(self, rows=rows)
        return replace(self, rows=[self.rows[place] for place in places])

    def require_nonempty(self) -> "Selection":
        """The selection itself.

        Raises:
            EmptySelectionError: it has no window; says what there is instead.
        """
        if self.rows:
            return self
        raise EmptySelectionError(
            f"no window matches {describe_filter(self.filter)} in lake revision {self.revision.digest[:12]}, "
            f"which holds {self.available}. Widen the selection, or collect what is missing."
        )

    def to_arrow_bytes(self) -> bytes:
        """The selection as an Arrow IPC file, digest included."""
        document = {
            "filter": asdict(self.filter),
            "revision": asdict(self.revision),
            "plan": asdict(self.plan),
            "available": self.available,
            "duplicates": self.duplicates,
            "digest": self.digest,
        }
        table = _as_table(self.rows)
        table = sealed(table.replace_schema_metadata({_METADATA_KEY: canonical_json(document)}))
        sink = io.BytesIO()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        return sink.getvalue()

    @staticmethod
    def from_arrow_bytes(raw: bytes) -> "Selection":
        """Read :meth:`to_arrow_bytes`.

        Raises:
            CorruptDataError: the bytes are cut, changed or something else.
        """
        try:
            table = pa.ipc.open_file(pa.BufferReader(raw)).read_all()
            check_seal(table, where="stored selection")
            document = json.loads((table.schema.metadata or {})[_METADATA_KEY])
            selection = Selection(
                filter=_filter(document["filter"]),
                revision=LakeRevision(**document["revision"]),
                rows=RowTable(
                    table.select(COMMIT_SCHEMA.names).replace_schema_metadata(None), table.num_rows
                ),
                plan=_plan(document["plan"]),
                available=document["available"],
                duplicates=document["duplicates"],
            )
        except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
            raise CorruptDataError(
                f"{len(raw):,} bytes are no stored selection ({error}); select again"
            ) from error
        if selection.digest != document["digest"]:
            raise CorruptDataError(
                f"stored selection: its windows have digest {selection.digest[:12]}, the file says "
                f"{document['digest'][:12]}. It was changed after it was made; select again."
            )
        return selection


def split_of(group_id: str, held_out_percent: int) -> Split:
    """Which side of the split a rollout group is on: by its id alone, the same at every version, for ever."""
    return Split.HELD_OUT if bucket_of(group_id) < held_out_percent else Split.TRAIN


def bucket_of(group_id: str) -> int:
    """A group's place in ``[0, 100)``: it is held out by every share above that."""
    digest = hashlib.blake2b(group_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 100


def describe_filter(wanted: SelectionFilter) -> str:
    """A filter in words."""
    parts = [f"versions {wanted.versions}"]
    if wanted.split is not Split.ALL:
        parts.append(f"split {wanted.split} ({wanted.held_out_percent} % of groups held out)")
    if wanted.domains:
        parts.append(f"domains {', '.join(wanted.domains)}")
    parts += ["verified only"] if wanted.verified_only else []
    parts += ["whole sequences only"] if wanted.whole_sequences_only else []
    for name in ("samples", "groups", "writers"):
        values = getattr(wanted, name)
        parts += [f"{name} {', '.join(values[:4])}{' ...' if len(values) > 4 else ''}"] if values else []
    if wanted.newest_versions is not None:
        parts.append(f"the {wanted.newest_versions} newest versions")
    for name in BOUNDED:
        low, high = getattr(wanted, f"min_{name}"), getattr(wanted, f"max_{name}")
        if low is not None or high is not None:
            ends = ["..." if end is None else f"{end:g}" for end in (low, high)]
            parts.append(f"{name.replace('_', ' ')} {ends[0]} to {ends[1]}")
    parts += [f"at most {wanted.max_windows} windows"] if wanted.max_windows is not None else []
    return ", ".join(parts)


def _as_table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    if isinstance(rows, RowTable):
        return rows.table.cast(COMMIT_SCHEMA)
    return pa.Table.from_pylist(list(rows), COMMIT_SCHEMA)


def _identities(rows: Sequence[dict[str, Any]]) -> Iterator[list[Any]]:
    if not isinstance(rows, RowTable):
        yield from ([row[name] for name in _IDENTITY] for row in rows)
        return
    for batch in rows.table.select(_IDENTITY).to_batches(max_chunksize=_BATCH):
        yield from map(list, zip(*(column.to_pylist() for column in batch.columns), strict=True))


def _filter(fields: Mapping[str, Any]) -> SelectionFilter:
    typed = {
        "versions": VersionRange(**fields["versions"]),
        "split": Split(fields["split"]),
        **{name: tuple(fields[name]) for name in ("domains", "samples", "groups", "writers")},
    }
    return SelectionFilter(**{**fields, **typed})


def _plan(fields: Mapping[str, Any]) -> ReadPlan:
    tuples = {name: tuple(fields[name]) for name in ("versions", "heads_missing", "heads_present")}
    return ReadPlan(**{**fields, **tuples})
