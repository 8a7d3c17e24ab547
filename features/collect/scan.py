"""A first pass over historical rollouts, without a model: how much there is, and which rows come twice.

Kept per partition as a small table, so that a backfill that was interrupted does not read its
sources again only to plan. Who owns a sample that occurs in several partitions is decided here, by
the order of the partitions; so it does not depend on which process comes first.
"""

import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from features.collect.rollouts import Rollout
from features.collect.sampling import SamplingPolicy, WindowSpan
from features.collect.sources import SourceCounts
from features.collect.trial import candidate_spans
from features.errors import CorruptDataError
from features.quarantine import Refusal
from features.schema import TargetVersion

_METADATA_KEY = b"draftlake.scan"
_U64 = NDArray[np.uint64]


class Fate(IntEnum):
    """What planning says of a candidate."""

    WANTED = 0
    REPEATED = 1
    """The same sample, or the same tokens at the same version, came before."""
    CONFLICT = 2
    """The same sample id came before with other tokens or masks."""


@dataclass(frozen=True, slots=True)
class ScanTotals:
    """What a pass over a partition counted: ``sequences == candidates + skipped + refused + other versions``."""

    lines: int = 0
    """Lines or rows of the source, blank ones left out."""
    sequences: int = 0
    """Rollouts and refusals: a line can hold several sequences."""
    source_duplicates: int = 0
    """Sequences whose tokens and version came before in the partition; the reader leaves them out."""
    pad_rows: int = 0
    skipped_by_sampling: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    """Lines that cannot be read, by reason."""
    version_missing: int = 0
    version_mismatch: int = 0


@dataclass(frozen=True, slots=True)
class PartitionScan:
    """The totals, and one entry per candidate in the order of the source."""

    totals: ScanTotals
    sample: _U64
    """Digest of the sample id."""
    content: _U64
    """Digest of what may not differ under one sample id."""
    tokens: _U64
    """Digest of the token ids."""
    num_rows: NDArray[np.uint32]
    """Feature rows that the sampling policy plans."""
    length: NDArray[np.uint32]
    """Tokens of the whole sequence: what the forward costs."""
    windows: NDArray[np.uint16]
    """Planned windows."""

    @property
    def candidates(self) -> int:
        """Rollouts of the wanted version that the sampling policy keeps."""
        return len(self.sample)


_COLUMNS: Mapping[str, Any] = {
    "sample": np.uint64, "content": np.uint64, "tokens": np.uint64, "num_rows": np.uint32, "length": np.uint32,
    "windows": np.uint16,
}  # fmt: skip


def scan_partition(
    items: Iterable[Rollout | Refusal],
    counts: SourceCounts,
    *,
    version: TargetVersion,
    policy: SamplingPolicy,
) -> PartitionScan:
    """Read a partition once, streaming; holds some 40 bytes per candidate.

    ``counts`` is the one that ``items`` fills while it is read.
    """
    columns: dict[str, list[int]] = {name: [] for name in _COLUMNS}
    reasons: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for item in items:
        seen["sequences"] += 1
        spans = candidate_spans(item, version, policy)
        if isinstance(item, Refusal):
            reasons[item.reason] += 1
        elif spans:
            for name, value in zip(_COLUMNS, _entry(item, spans), strict=True):
                columns[name].append(value)
        elif item.version == version.number:
            seen["skipped_by_sampling"] += 1
        else:
            seen["version_missing" if item.version is None else "version_mismatch"] += 1
    totals = ScanTotals(
        lines=counts.lines - counts.blank, source_duplicates=counts.duplicates, pad_rows=counts.pad_rows,
        refused=dict(sorted(reasons.items())), **seen,
    )  # fmt: skip
    return PartitionScan(totals, **{n: np.array(columns[n], dtype) for n, dtype in _COLUMNS.items()})


def _entry(rollout: Rollout, spans: Sequence[WindowSpan]) -> tuple[int, ...]:
    tokens = np.array(rollout.token_ids, np.int64).tobytes()
    return (
        short_digest(rollout.sample_id.encode()), short_digest(rollout.content_digest.encode()),
        short_digest(tokens), sum(span.num_rows for span in spans), len(rollout.token_ids), len(spans),
    )  # fmt: skip


def short_digest(data: bytes) -> int:
    """64 bits of BLAKE2b: two of ten million rows collide with probability 3e-6."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def fates_of(scans: Sequence[PartitionScan]) -> list[NDArray[np.uint8]]:
    """A :class:`Fate` per candidate of each partition; the first in the order of ``scans`` is wanted."""
    sizes = [scan.candidates for scan in scans]
    if not sum(sizes):
        return [np.zeros(0, np.uint8) for _ in scans]
    sample, content, tokens = (
        np.concatenate([getattr(scan, name) for scan in scans]) for name in ("sample", "content", "tokens")
    )
    fates = np.full(sum(sizes), Fate.WANTED, np.uint8)
    first = _first_places(sample)
    again = first != np.arange(len(first))
    fates[again] = Fate.REPEATED
    fates[again & (content != content[first])] = Fate.CONFLICT
    wanted = np.flatnonzero(fates == Fate.WANTED)
    # A refused conflict owns nothing: its tokens under another id are still wanted.
    same_tokens = _first_places(tokens[wanted]) != np.arange(len(wanted))
    fates[wanted[same_tokens]] = Fate.REPEATED
    return np.split(fates, np.cumsum(sizes)[:-1])


def _first_places(values: _U64) -> NDArray[np.int64]:
    """For each entry the place of the first equal one."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    places: NDArray[np.int64] = first[inverse]
    return places


def encode_scan(scan: PartitionScan) -> bytes:
    """A scan as one Parquet file."""
    table = pa.table({name: getattr(scan, name) for name in _COLUMNS})
    totals = json.dumps(asdict(scan.totals), sort_keys=True).encode()
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({_METADATA_KEY: totals}), sink, compression="zstd")
    return sink.getvalue()


def decode_scan(raw: bytes, *, where: str) -> PartitionScan:
    """Read :func:`encode_scan`.

    Raises:
        CorruptDataError: the bytes are no scan.
    """
    try:
        table = pq.read_table(io.BytesIO(raw))
        totals = ScanTotals(**json.loads((table.schema.metadata or {})[_METADATA_KEY]))
        columns = {name: table[name].to_numpy().astype(dtype) for name, dtype in _COLUMNS.items()}
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError) as error:
        raise CorruptDataError(
            f"{where} is no scan of a partition ({error}); delete it, and the source is read again"
        ) from error
    return PartitionScan(totals, **columns)
