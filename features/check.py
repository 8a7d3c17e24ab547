"""Check a lake against its commits: what is absent, cut, changed, or left over. Repairs nothing."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from features.commits import CommitName
from features.errors import LakeContractError
from features.fragments import TOKENS_FILE
from features.lake import Lake
from features.schema import HeadId, TargetVersion
from features.storage import LocalStore
from features.writer import ARRAYS
from features.zarr_layout import ARRAY_FILE, GROUP_FILE, SHARD_KEY, ShardLayout

Level = Literal[0, 1, 2]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as a commit, version or writer would leave it."""

    code: str
    """``commit_unreadable``, ``object_absent``, ``version_unusable``, ``wrong_length``, ``wrong_index``,
    ``wrong_rows``, ``wrong_bytes``, ``orphan_data``, ``temporary_file``."""
    path: str
    detail: str
    harmful: bool
    """False for leftovers of killed writers, which no reader ever sees."""


def check_lake(lake: Lake, level: Level = 0) -> tuple[Finding, ...]:
    """Check a lake; each level includes those below.

    0: the listing against the commits and versions. 1: lengths, shard indexes and row ranges.
    2: checksums of every window and head.
    """
    lake = Lake(lake.store, lake.target)  # what the caller's lake has read before must not hide a fault
    objects = set(lake.store.list(""))
    findings: list[Finding] = []
    committed: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(p for p in objects if CommitName.parse(p)):
        try:
            rows = lake.read_commit(path).to_pylist()
        except LakeContractError as error:
            findings.append(Finding("commit_unreadable", path, str(error), harmful=True))
            continue
        if rows:
            committed[rows[0]["data_prefix"]] = rows
    findings += _left_over(lake, objects, set(committed))
    findings += _versions(lake, committed, read_heads=level >= 2)
    for prefix, rows in committed.items():
        absent = [path for path in _fragment_paths(prefix) if path not in objects]
        findings += [Finding("object_absent", path, "a commit names it", harmful=True) for path in absent]
        if level >= 1 and not absent:
            lengths = list(_lengths(lake, prefix, rows))
            findings += lengths
            if level >= 2 and not lengths:
                findings += _checksums(lake, rows)
    return tuple(findings)


def _fragment_paths(prefix: str) -> tuple[str, ...]:
    arrays = [f"{prefix}/{array}/{name}" for array in ARRAYS for name in (ARRAY_FILE, SHARD_KEY)]
    return (f"{prefix}/{GROUP_FILE}", *arrays, f"{prefix}/{TOKENS_FILE}")


def _left_over(lake: Lake, objects: set[str], committed: set[str]) -> Iterator[Finding]:
    prefixes = {"/".join(path.split("/")[:3]) for path in objects if path.startswith("data/")}
    for prefix in sorted(prefixes - committed):
        detail = "no commit names it: a writer is at work, was killed, or lost to an earlier one"
        yield Finding("orphan_data", prefix, detail, harmful=False)
    if isinstance(lake.store, LocalStore):
        for path in lake.store.list_temporary():
            yield Finding("temporary_file", path, "a writer is at work or was killed", harmful=False)


def _versions(
    lake: Lake, committed: Mapping[str, list[dict[str, Any]]], *, read_heads: bool
) -> Iterator[Finding]:
    pairs = {(rows[0]["target_version"], rows[0]["head_id"]) for rows in committed.values()}
    for number, head_id in sorted(pairs):
        version = TargetVersion(number)
        yield from _caught(
            "version_unusable", str(version), _look_at_head, lake, version, head_id, read_heads
        )


def _look_at_head(lake: Lake, version: TargetVersion, head_id: HeadId, read_heads: bool) -> None:
    lake.check_version(version, head_id, where=f"a fragment in {lake.url}")
    record = lake.version(version)
    if read_heads or not lake.has_head(record.head_id):
        lake.head(record.head_id)


def _lengths(lake: Lake, prefix: str, rows: list[dict[str, Any]]) -> Iterator[Finding]:
    ends = [row["row_offset"] + row["num_rows"] for row in rows]
    if [row["row_offset"] for row in rows] != [0, *ends[:-1]] or any(row["num_rows"] < 1 for row in rows):
        yield Finding("wrong_rows", prefix, "the windows' rows are not back to back from 0", harmful=True)
    yield from _caught("wrong_length", prefix, lake.fragment_tokens, prefix)
    for array in ARRAYS:
        yield from _caught(
            "wrong_index", f"{prefix}/{array}", _look_at_index, lake, f"{prefix}/{array}", ends[-1]
        )


def _look_at_index(lake: Lake, folder: str, num_rows: int) -> None:
    layout = ShardLayout.from_metadata(
        lake.store.read(f"{folder}/{ARRAY_FILE}"), where=f"{folder}/{ARRAY_FILE}"
    )
    path = f"{folder}/{SHARD_KEY}"
    found = lake.store.size(path)
    if layout.num_rows != num_rows or found != layout.object_bytes:
        raise LakeContractError(
            f"{path}: metadata says {layout.num_rows} rows in {layout.object_bytes:,} bytes, "
            f"the commit {num_rows} rows, the object has {found:,} bytes"
        )
    if lake.store.read_range(path, layout.payload_bytes, layout.object_bytes) != layout.index():
        raise LakeContractError(f"{path}: the shard index is not that of rows in order")


def _checksums(lake: Lake, rows: list[dict[str, Any]]) -> Iterator[Finding]:
    for row in rows:
        yield from _caught("wrong_bytes", row["data_prefix"], lake.read_window, row)


def _caught(code: str, path: str, look: Callable[..., object], *arguments: Any) -> list[Finding]:
    try:
        look(*arguments)
    except LakeContractError as error:
        return [Finding(code, path, str(error), harmful=True)]
    return []
