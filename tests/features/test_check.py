"""Every planted fault has its finding, at the lowest level that can see it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from features.check import check_lake
from features.testing import tiny_lake


def one(root: Path, pattern: str) -> Path:
    return sorted(root.glob(pattern))[0]


def cut(pattern: str) -> Callable[[Path], None]:
    return lambda root: one(root, pattern).write_bytes(one(root, pattern).read_bytes()[:-1])


def remove(pattern: str) -> Callable[[Path], None]:
    return lambda root: one(root, pattern).unlink()


def flip(pattern: str, at: int) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        path = one(root, pattern)
        raw = bytearray(path.read_bytes())
        raw[at] ^= 1
        path.write_bytes(raw)

    return damage


def add(path: str) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(b"x")

    return damage


FAULTS = {
    "absent shard": (0, "object_absent", remove("data/*/*/aux/c/0/0")),
    "absent tokens": (0, "object_absent", remove("data/*/*/tokens.arrow")),
    "absent metadata": (0, "object_absent", remove("data/*/*/zarr.json")),
    "cut commit": (0, "commit_unreadable", cut("commits/*/*")),
    "absent head": (0, "version_unusable", remove("blobs/*")),
    "absent version": (0, "version_unusable", remove("versions/*/*")),
    "orphan": (0, "orphan_data", add("data/v=000000000/p.u/zarr.json")),
    "temp file": (0, "temporary_file", add("commits/v=000000000/.x.parquet.1.partial")),
    "cut shard": (1, "wrong_length", cut("data/*/*/final/c/0/0")),
    "changed index": (1, "wrong_index", flip("data/*/*/aux/c/0/0", -6)),
    "cut tokens": (1, "wrong_length", cut("data/*/*/tokens.arrow")),
    "changed feature": (2, "wrong_bytes", flip("data/*/*/aux/c/0/0", 0)),
    "changed head": (2, "version_unusable", flip("blobs/*", -1)),
}


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_planted_fault_is_found_at_its_level_and_not_below(tmp_path: Path, name: str) -> None:
    level, code, plant = FAULTS[name]
    lake = tiny_lake(str(tmp_path), versions=2, samples_per_version=3)
    assert check_lake(lake, 2) == ()
    plant(tmp_path)
    for at in (0, 1, 2):
        codes = {finding.code for finding in check_lake(lake, at)}  # type: ignore[arg-type]
        assert (code in codes) is (at >= level)


def test_leftovers_of_killed_writers_are_harmless_and_damage_is_not(tmp_path: Path) -> None:
    lake = tiny_lake(str(tmp_path), versions=1, samples_per_version=1)
    FAULTS["orphan"][2](tmp_path)
    FAULTS["temp file"][2](tmp_path)
    assert [finding.harmful for finding in check_lake(lake)] == [False, False]
    FAULTS["absent shard"][2](tmp_path)
    assert any(finding.harmful for finding in check_lake(lake))
