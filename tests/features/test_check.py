"""Every planted fault has its finding, at the lowest level that can see it."""

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from features.catalog import Catalog
from features.check import CheckOptions, check_lake, quarantine_damaged, release_restored
from features.compaction import compact
from features.lake import Lake
from features.schema import TargetVersion
from features.storage import Store
from features.testing import commit_tiny, tiny_lake
from features.testing_crash import kill_everywhere

NOW = datetime(2026, 7, 1, tzinfo=UTC)


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


REPAIRABLE = sorted(name for name, (_, code, _) in FAULTS.items() if code not in (
    "orphan_data", "temporary_file", "version_unusable",
))  # fmt: skip


@pytest.mark.parametrize("name", REPAIRABLE)
@pytest.mark.parametrize("compacted", [False, True])
def test_a_damaged_fragment_in_quarantine_is_skipped_counted_and_collected_again(
    tmp_path: Path, name: str, compacted: bool
) -> None:
    lake = tiny_lake(str(tmp_path), versions=1, samples_per_version=8)
    windows = [lake.read_window(row) for row in Catalog.load(lake).frame.to_dicts()]
    FAULTS[name][2](tmp_path)
    if compacted:
        if name == "cut commit":
            pytest.skip("an unreadable commit cannot be covered")
        compact(lake, now=lambda: NOW)
    lake = Lake.open(str(tmp_path))
    marked = quarantine_damaged(lake, check_lake(lake, 2), NOW)
    assert len(marked) == 1
    assert quarantine_damaged(lake, check_lake(lake, 2), NOW) == ()
    catalog = Catalog.load(lake)
    assert (catalog.frame.height, catalog.hidden_fragments) == (4, 1)
    for row in catalog.frame.to_dicts():
        lake.read_window(row)
    assert {f.code for f in check_lake(lake, 2) if not f.harmful} >= {"quarantined"}
    assert not [f for f in check_lake(lake, 2) if f.harmful]
    plans = {row["sample_id"] for row in catalog.frame.to_dicts()}
    lost = [window for window in windows if window.meta.sample_id not in plans]
    done = commit_tiny(lake, 0, lake.version(TargetVersion(0)).head_id, lost)
    assert (done.outcome, done.attempt) == ("committed", 1)
    assert Catalog.load(lake).frame.height == 8


def test_a_fragment_that_was_put_back_is_released_after_its_checksums_were_read(tmp_path: Path) -> None:
    lake = tiny_lake(str(tmp_path), versions=1, samples_per_version=8)
    path = one(tmp_path, "data/*/*/aux/c/0/0")
    whole, before = path.read_bytes(), Catalog.load(lake).revision.digest
    path.write_bytes(whole[:-1])
    quarantine_damaged(lake, check_lake(lake, 1), NOW)
    assert release_restored(lake, check_lake(lake, 2)) == ()
    path.write_bytes(whole)
    assert [f.code for f in check_lake(lake, 1)] == ["quarantined"]
    findings = check_lake(lake, 2)
    assert [f.code for f in findings] == ["restored"]
    assert len(release_restored(lake, findings)) == 1
    assert check_lake(lake, 2) == ()
    assert Catalog.load(lake).revision.digest == before


def test_a_snapshot_s_fragments_are_checked_when_their_commits_are_gone(tmp_path: Path) -> None:
    lake = tiny_lake(str(tmp_path), versions=1, samples_per_version=8)
    compact(lake, now=lambda: NOW)
    for path in tmp_path.glob("commits/*/*"):
        path.unlink()
    assert check_lake(lake, 2) == ()
    FAULTS["changed feature"][2](tmp_path)
    assert [f.code for f in check_lake(lake, 2)] == ["wrong_bytes"]
    one(tmp_path, "snapshots/*.rows.parquet").unlink()
    assert "snapshot_unreadable" in {f.code for f in check_lake(lake, 0) if f.harmful}


def test_a_share_is_the_same_for_one_seed_and_other_seeds_reach_other_windows(tmp_path: Path) -> None:
    lake = tiny_lake(str(tmp_path), versions=1, samples_per_version=64, windows_per_fragment=64)
    rows = Catalog.load(lake).frame.to_dicts()
    taken = [{r["window_index"] for r in rows if CheckOptions(2, 0.25, seed).takes(r)} for seed in (0, 0, 1)]
    assert taken[0] == taken[1] != taken[2]
    assert 4 <= len(taken[0]) <= 32
    assert all(CheckOptions(2).takes(row) for row in rows)
    assert not any(CheckOptions(2, 0.0).takes(row) for row in rows)


PREPARE = """
from pathlib import Path
from features.testing import tiny_lake
tiny_lake(url, versions=1, samples_per_version=8, windows_per_fragment=2)
for path in sorted(Path(url).glob("data/*/*/aux/c/0/0"))[:2]:
    path.write_bytes(path.read_bytes()[:-1])
"""
QUARANTINE = """
from datetime import UTC, datetime
from features.check import check_lake, quarantine_damaged
from features.lake import Lake
lake = Lake.open(url)
quarantine_damaged(lake, check_lake(lake, 1), datetime(2026, 7, 1, tzinfo=UTC))
"""


@pytest.mark.slow
def test_quarantine_killed_at_any_moment_hides_only_what_is_damaged_and_a_rerun_completes_it(
    tmp_path: Path,
) -> None:
    seen = set()
    for moment, folder in kill_everywhere(
        PREPARE, QUARANTINE, tmp_path, every="DRAFTLAKE_SOAK" in os.environ
    ):
        lake = Lake.open(str(folder))
        seen.add(Catalog.load(lake).frame.height)
        assert {f.code for f in check_lake(lake, 1) if f.harmful} <= {"wrong_length", "wrong_index"}, moment
        quarantine_damaged(lake, check_lake(lake, 1), NOW)
        assert {f.code for f in check_lake(lake, 2)} <= {"quarantined", "temporary_file"}, moment
        rows = Catalog.load(lake).frame.to_dicts()
        assert len(rows) == 4, moment
        for row in rows:
            lake.read_window(row)
    assert seen == {8, 6, 4}


@pytest.mark.parametrize("folder", ["data", "versions", "commits"])
def test_an_object_that_is_once_answered_as_absent_is_no_damage_to_quarantine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    lake = tiny_lake(str(tmp_path), versions=1, samples_per_version=8)
    real, missed = type(lake.store).read, []

    def read(store: Store, path: str) -> bytes:
        if path.startswith(f"{folder}/") and not missed:
            missed.append(path)
            raise FileNotFoundError(path)
        return real(store, path)

    monkeypatch.setattr(type(lake.store), "read", read)
    findings = check_lake(lake, 2)
    assert missed
    assert quarantine_damaged(lake, findings, NOW) == ()
    assert Catalog.load(lake).frame.height == 8


def test_a_damaged_version_hides_no_fragment(tmp_path: Path) -> None:
    lake = tiny_lake(str(tmp_path), versions=1, samples_per_version=8)
    cut("versions/*/*")(tmp_path)
    findings = check_lake(lake, 2)
    assert {f.code for f in findings if f.harmful} == {"version_unusable"}
    assert quarantine_damaged(lake, findings, NOW) == ()


def test_a_listing_that_is_behind_shows_no_absent_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = tiny_lake(str(tmp_path), versions=1, samples_per_version=8)
    real = type(lake.store).list
    behind = [path for path in real(lake.store, "") if not path.startswith("data/")]
    monkeypatch.setattr(type(lake.store), "list", lambda own, prefix: real(own, prefix) if prefix else behind)
    assert check_lake(lake, 2) == ()
