"""What a snapshot consists of, and its objects as bytes. No storage, no decisions."""

import hashlib
import io
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from features.commits import CommitName
from features.digests import canonical_json
from features.errors import CorruptDataError, LakeContractError
from features.schema import FORMAT_VERSION

_MARKER = re.compile(r"snapshots/(\d{9,})\.json")

State = Literal["kept", "fence", "dropped"]
"""What a snapshot says of a commit: its rows are here; it has no row; retention gave it up."""

STATES_SCHEMA = pa.schema(
    [
        pa.field("target_version", pa.int64(), nullable=False),
        pa.field("plan_id", pa.string(), nullable=False),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("state", pa.string(), nullable=False),
        pa.field("data_prefix", pa.string()),
    ]
)
"""``<n>.<digest>.commits.parquet``: one row per covered commit; only a kept one has a data prefix."""


@dataclass(frozen=True, slots=True)
class Part:
    """An object that belongs to a snapshot, by its content."""

    path: str
    nbytes: int
    sha256: str

    @staticmethod
    def of(number: int, kind: str, data: bytes) -> "Part":
        digest = hashlib.sha256(data).hexdigest()
        return Part(f"snapshots/{number:09d}.{digest[:16]}.{kind}.parquet", len(data), digest)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """``snapshots/<n>.json``, which makes snapshot ``n`` visible."""

    number: int
    """Counts from 1 and is never used twice."""
    parent: int | None
    created_at: datetime
    """When the compactor was about to make it, by its clock."""
    write_uuid: str
    """Fresh for each attempt to make a snapshot: how a compactor recognises its own."""
    target_id: str
    windows: int
    heads: Mapping[int, str]
    """Head id of each version it holds windows of, as registered when it was made."""
    commits: Part
    """Which commits it covers, :data:`STATES_SCHEMA`."""
    rows: Part
    """The rows of the kept ones, ``COMMIT_SCHEMA``, ordered as the catalog is."""

    @property
    def path(self) -> str:
        return marker_path(self.number)


def marker_path(number: int) -> str:
    """Where a snapshot's marker is."""
    return f"snapshots/{number:09d}.json"


def marker_number(path: str) -> int | None:
    """The number of the snapshot whose marker this is; None: no name of ours."""
    match = _MARKER.fullmatch(path)
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class Covered:
    """One commit in a snapshot."""

    state: State
    data_prefix: str | None


def encode_covered(covered: Mapping[CommitName, Covered]) -> bytes:
    """``<n>.<digest>.commits.parquet``, sorted."""
    names = sorted(covered)
    columns = [
        [name.version for name in names],
        [name.plan_id for name in names],
        [name.attempt for name in names],
        [covered[name].state for name in names],
        [covered[name].data_prefix for name in names],
    ]
    arrays = [pa.array(c, f.type) for c, f in zip(columns, STATES_SCHEMA, strict=True)]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_arrays(arrays, schema=STATES_SCHEMA), sink, compression="zstd")
    return sink.getvalue()


def decode_covered(raw: bytes, *, where: str) -> dict[CommitName, Covered]:
    """Read :func:`encode_covered`.

    Raises:
        CorruptDataError: it is something else.
    """
    try:
        table = pq.read_table(io.BytesIO(raw), schema=STATES_SCHEMA)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptDataError(f"{where} is no list of covered commits: {error}. Restore it.") from error
    columns = [table[name].to_pylist() for name in STATES_SCHEMA.names]
    return {
        CommitName(version, plan, attempt): Covered(state, prefix)
        for version, plan, attempt, state, prefix in zip(*columns, strict=True)
    }


def encode_marker(snapshot: Snapshot) -> bytes:
    """``snapshots/<n>.json``, with a digest over itself."""
    document = asdict(snapshot) | {
        "format_version": FORMAT_VERSION,
        "created_at": snapshot.created_at.isoformat(),
        "heads": {str(number): head for number, head in snapshot.heads.items()},
    }
    return canonical_json({**document, "seal": hashlib.sha256(canonical_json(document)).hexdigest()})


def decode_marker(raw: bytes, *, where: str) -> Snapshot:
    """Read :func:`encode_marker`.

    Raises:
        CorruptDataError: it was cut or changed.
        LakeContractError: a newer format wrote it.
    """
    try:
        document = json.loads(raw)
        newest, seal = document["format_version"], document.pop("seal")
        if newest > FORMAT_VERSION:
            raise LakeContractError(
                f"{where} was written in format {newest} and this program reads up to {FORMAT_VERSION}. "
                f"Upgrade draftlake to read this lake."
            )
        if seal != hashlib.sha256(canonical_json(document)).hexdigest():
            raise ValueError("its digest differs")
        return Snapshot(
            number=document["number"],
            parent=document["parent"],
            created_at=datetime.fromisoformat(document["created_at"]),
            write_uuid=document["write_uuid"],
            target_id=document["target_id"],
            windows=document["windows"],
            heads={int(number): head for number, head in document["heads"].items()},
            commits=Part(**document["commits"]),
            rows=Part(**document["rows"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptDataError(
            f"{where} ({len(raw):,} bytes) is no snapshot as it was written: {error}. Restore it from a copy."
        ) from error
