"""Input that was refused: with its place, a reason code and the record itself. Nothing is dropped unseen."""

import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from features.digests import canonical_json
from features.errors import CorruptDataError, ObjectExistsError
from features.lake import Lake
from features.paths import checked_path

QUARANTINE_SCHEMA = pa.schema(
    [
        pa.field("source", pa.string(), nullable=False),
        pa.field("line", pa.int64()),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
        pa.field("sample", pa.string()),
    ]
)
"""One row per refused record; ``sample`` is its JSON when it could be parsed."""

_RESOLUTIONS = "resolutions"


@dataclass(frozen=True, slots=True)
class Refusal:
    """One record of input that was not taken."""

    source: str
    """File or stream it came from."""
    line: int | None
    """1-based line in the source, when it has lines."""
    reason: str
    """Code to count by, e.g. ``version_missing``."""
    detail: str
    """Expected, found, remedy."""
    sample: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class QuarantinedRun:
    """What one run refused, or a part of it: a run that stores its refusals as it goes has several."""

    run_id: str
    path: str
    refusals: tuple[Refusal, ...]
    resolved: frozenset[int] = frozenset()
    """Places in ``refusals`` of those that were taken after all, by another try."""

    @property
    def counts(self) -> dict[str, int]:
        """Number of refusals by reason code, resolved ones too."""
        return dict(sorted(Counter(refusal.reason for refusal in self.refusals).items()))

    @property
    def open(self) -> tuple[tuple[int, Refusal], ...]:
        """Refusals that nobody has resolved, with their places."""
        return tuple((n, refusal) for n, refusal in enumerate(self.refusals) if n not in self.resolved)


def quarantine(lake: Lake, refusals: Sequence[Refusal], run_id: str, *, part: int = 0) -> None:
    """Store what a run refused. Storing the same again changes nothing; other content is added beside it.

    The same are the same records with the same reasons: a detail may tell a measurement that came
    out a little different. ``part`` is for a run that stores its refusals as it goes.
    """
    if not refusals:
        return
    if "/" in run_id:
        raise ValueError(f"a run id is one path segment, got {run_id!r}")
    sequence = part
    while True:
        path = checked_path(f"quarantine/{run_id}.{sequence}.parquet")
        try:
            lake.store.create(path, _encode(refusals))
            return
        except ObjectExistsError:
            stored = _decode(lake.store.read(path), where=f"{lake.url}/{path}")
            if _without_details(stored) == _without_details(_decode(_encode(refusals), where=path)):
                return
            sequence += 1


def _without_details(refusals: Sequence[Refusal]) -> list[Refusal]:
    return [replace(refusal, detail="") for refusal in refusals]


def resolve(lake: Lake, run: QuarantinedRun, places: Iterable[int], how: Mapping[str, Any]) -> None:
    """Write down that these refusals of ``run`` were taken after all; doing it again changes nothing.

    The refusals themselves stay as they are. ``how`` says with which weights and statements.
    """
    body = canonical_json({"path": run.path, "resolved": sorted(places), "how": dict(how)})
    name = run.path.removeprefix("quarantine/").removesuffix(".parquet")
    with suppress(ObjectExistsError):
        lake.store.create(f"{_RESOLUTIONS}/{name}/{hashlib.sha256(body).hexdigest()[:16]}.json", body)


def list_quarantine(lake: Lake, run_id: str | None = None) -> tuple[QuarantinedRun, ...]:
    """Everything in quarantine, by path; with ``run_id`` only that run's."""
    return tuple(iter_quarantine(lake, run_id))


def iter_quarantine(lake: Lake, run_id: str | None = None) -> Iterator[QuarantinedRun]:
    """Like :func:`list_quarantine`, one stored part at a time.

    Raises:
        CorruptDataError: a stored part, or what resolved some of it, is unreadable.
    """
    resolutions: dict[str, list[str]] = {}
    for path in lake.store.list(_RESOLUTIONS):
        resolutions.setdefault(path.split("/")[1], []).append(path)
    for path in lake.store.list("quarantine"):
        name = path.removeprefix("quarantine/").removesuffix(".parquet")
        found = name.rsplit(".", 1)[0]
        if run_id is None or found == run_id:
            refusals = _decode(lake.store.read(path), where=f"{lake.url}/{path}")
            documents = [_resolved(lake, document) for document in resolutions.get(name, ())]
            yield QuarantinedRun(found, path, refusals, frozenset[int]().union(*documents))


def _resolved(lake: Lake, path: str) -> frozenset[int]:
    try:
        return frozenset(map(int, json.loads(lake.store.read(path))["resolved"]))
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptDataError(
            f"{lake.url}/{path} resolves nothing ({error!r}); delete it, and its refusals count as open again"
        ) from error


def _encode(refusals: Sequence[Refusal]) -> bytes:
    rows = [
        {
            "source": refusal.source,
            "line": refusal.line,
            "reason": refusal.reason,
            "detail": refusal.detail,
            # default=str: a refused record may hold anything, and keeping it beats refusing it twice.
            "sample": None if refusal.sample is None else json.dumps(refusal.sample, default=str),
        }
        for refusal in refusals
    ]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, QUARANTINE_SCHEMA), sink, compression="zstd")
    return sink.getvalue()


def _decode(raw: bytes, *, where: str) -> tuple[Refusal, ...]:
    try:
        rows = pq.read_table(io.BytesIO(raw)).select(QUARANTINE_SCHEMA.names).to_pylist()
        return tuple(
            Refusal(**{**row, "sample": None if row["sample"] is None else json.loads(row["sample"])})
            for row in rows
        )
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise CorruptDataError(f"{where} is no quarantine file ({error}); restore it from a copy") from error
