"""What a lake remembers of backfills: a scan per partition, and what became of a finished one.

Both are create-only and named by what they depend on, so nothing has to be invalidated. That a
partition is finished is believed only while the lake still holds what the record says it kept.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.collect.partition import PartitionReport
from features.collect.sampling import SamplingPolicy
from features.collect.scan import PartitionScan, decode_scan, encode_scan, short_digest
from features.collect.sources import SourceOptions, SourcePartition
from features.digests import canonical_json
from features.errors import CorruptDataError, ObjectExistsError
from features.lake import Lake
from features.schema import FragmentLayout, TargetVersion
from features.snapshots import commits_of

_SCANS = "backfills/scans"
_FINISHED = "backfills/finished"


@dataclass(frozen=True, slots=True)
class FinishedPartition:
    """The fates of a partition's sequences, whichever run settled them."""

    kept: int
    """Rollouts whose windows the lake held when the partition was finished."""
    repeated: int
    skipped_by_sampling: int
    quarantined: Mapping[str, int]

    @staticmethod
    def of(report: PartitionReport) -> "FinishedPartition":
        """The record of a partition that was collected to its end."""
        return FinishedPartition(
            report.kept, report.repeated, report.skipped_by_sampling, dict(report.quarantined)
        )


def scan_keys(
    partitions: Sequence[SourcePartition],
    options: SourceOptions,
    *,
    version: TargetVersion,
    policy: SamplingPolicy,
) -> list[str]:
    """A name for each partition's scan: its bytes, and all that decides how they become candidates.

    Where the file lies is among that: some formats keep the step in a folder's or a file's name.
    """
    seen: dict[str, int] = {}
    keys = []
    for partition in partitions:
        body = {
            "digest": partition.digest, "url": partition.url, "format": partition.format,
            "start": partition.start, "stop": partition.stop, "options": options.as_mapping(),
            "version": version.number, "sampling": policy.as_mapping(),
        }  # fmt: skip
        key = _digest(body)
        # The same file twice is two partitions: the second repeats the first.
        copies = seen[key] = seen.get(key, -1) + 1
        keys.append(_digest({"copy": copies, "of": key}) if copies else key)
    return keys


def finished_key(
    scan_key: str,
    *,
    fates: NDArray[np.uint8],
    weights_digest: str,
    layout: FragmentLayout,
    engine_noise: float,
) -> str:
    """A name for what becomes of a partition: the scan's, the target's weights, and what others repeat."""
    body = {
        "scan": scan_key, "fates": hashlib.sha256(fates.tobytes()).hexdigest(), "weights": weights_digest,
        "layout": {**asdict(layout), "dtype": layout.dtype.value}, "engine_noise": engine_noise,
    }  # fmt: skip
    return _digest(body)


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(body)).hexdigest()[:32]


def store_scan(lake: Lake, key: str, scan: PartitionScan) -> None:
    """Keep a scan; keeping it again changes nothing."""
    with suppress(ObjectExistsError):
        lake.store.create(f"{_SCANS}/{key}.parquet", encode_scan(scan))


def stored_scans(lake: Lake, keys: Sequence[str]) -> dict[str, PartitionScan]:
    """The scans that are kept of ``keys``.

    Raises:
        CorruptDataError: one of them is unreadable.
    """
    known = set(lake.store.list(_SCANS))
    paths = {key: f"{_SCANS}/{key}.parquet" for key in keys}
    return {
        key: decode_scan(lake.store.read(path), where=f"{lake.url}/{path}")
        for key, path in paths.items()
        if path in known
    }


def store_finished(lake: Lake, key: str, finished: FinishedPartition) -> None:
    """Keep what became of a partition; keeping the same again changes nothing."""
    body = canonical_json(asdict(finished))
    with suppress(ObjectExistsError):
        lake.store.create(f"{_FINISHED}/{key}.{hashlib.sha256(body).hexdigest()[:12]}.json", body)


def stored_finished(lake: Lake, keys: Sequence[str]) -> dict[str, tuple[FinishedPartition, ...]]:
    """Everything that is kept of ``keys``.

    Raises:
        CorruptDataError: a record is unreadable.
    """
    wanted, found = set(keys), dict[str, tuple[FinishedPartition, ...]]()
    for path in lake.store.list(_FINISHED):
        key = path.removeprefix(f"{_FINISHED}/").split(".")[0]
        if key in wanted:
            record = _decode_finished(lake.store.read(path), where=f"{lake.url}/{path}")
            found[key] = (*found.get(key, ()), record)
    return found


def _decode_finished(raw: bytes, *, where: str) -> FinishedPartition:
    try:
        document = json.loads(raw)
        return FinishedPartition(**{f.name: document[f.name] for f in fields(FinishedPartition)})
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptDataError(
            f"{where} is no record of a finished partition ({error!r}); delete it, and the partition is read again"
        ) from error


def samples_held(lake: Lake, version: TargetVersion, layout: FragmentLayout) -> NDArray[np.uint64]:
    """Digests (``short_digest``) of the sample ids that the lake holds of a version in a layout, sorted."""
    ids = list(layout.layer_ids)
    found: set[int] = set()
    for table in commits_of(lake, version):
        for row in table.select(["sample_id", "layer_ids", "dtype"]).to_pylist():
            if row["layer_ids"] == ids and row["dtype"] == layout.dtype.value:
                found.add(short_digest(row["sample_id"].encode()))
    return np.array(sorted(found), np.uint64)
