"""An exact list of windows, hashed: what a training run reads. Made by ``features.catalog``.

Free of polars, so that trainers and their loader processes can read a stored selection.
"""

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Selection:
    """Windows in the order (version, sample id, start); each row is one of ``COMMIT_SCHEMA``."""

    filter: SelectionFilter
    revision: LakeRevision
    rows: list[dict[str, Any]]
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
        for row in self.rows:
            digest.update(canonical_json([row[name] for name in _IDENTITY]) + b"\n")
        return digest.hexdigest()

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
        table = pa.Table.from_pylist(self.rows, COMMIT_SCHEMA)
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
                rows=table.select(COMMIT_SCHEMA.names).to_pylist(),
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
    digest = hashlib.blake2b(group_id.encode(), digest_size=8).digest()
    return Split.HELD_OUT if int.from_bytes(digest, "little") % 100 < held_out_percent else Split.TRAIN


def make_plan(rows: Sequence[Mapping[str, Any]], heads_missing: Sequence[int]) -> ReadPlan:
    """What reading these commit rows would cost."""
    versions = tuple(sorted({row["target_version"] for row in rows}))
    return ReadPlan(
        windows=len(rows),
        tokens=sum(row["num_rows"] for row in rows),
        nbytes=sum(row["nbytes"] for row in rows),
        versions=versions,
        heads_missing=tuple(v for v in versions if v in set(heads_missing)),
    )


def describe_filter(wanted: SelectionFilter) -> str:
    """A filter in words."""
    parts = [f"versions {wanted.versions}"]
    if wanted.split is not Split.ALL:
        parts.append(f"split {wanted.split} ({wanted.held_out_percent} % of groups held out)")
    if wanted.domains:
        parts.append(f"domains {', '.join(wanted.domains)}")
    parts += ["verified only"] if wanted.verified_only else []
    parts += ["whole sequences only"] if wanted.whole_sequences_only else []
    parts += [f"at most {wanted.max_windows} windows"] if wanted.max_windows is not None else []
    return ", ".join(parts)


def _filter(fields: Mapping[str, Any]) -> SelectionFilter:
    typed = {
        "versions": VersionRange(**fields["versions"]),
        "split": Split(fields["split"]),
        "domains": tuple(fields["domains"]),
    }
    return SelectionFilter(**{**fields, **typed})


def _plan(fields: Mapping[str, Any]) -> ReadPlan:
    tuples = {name: tuple(fields[name]) for name in ("versions", "heads_missing")}
    return ReadPlan(**{**fields, **tuples})
