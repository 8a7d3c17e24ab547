"""Compaction changes how a lake is read and never what it holds."""

import copy
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from features import selection, snapshots
from features.catalog import Catalog
from features.check import check_lake
from features.commits import CommitName, encode_commit
from features.compaction import (
    COMPACTION_STEPS,
    Compaction,
    PrunePlan,
    compact,
    plan_prune,
    prune_commits,
)
from features.errors import (
    CorruptDataError,
    InputError,
    LakeContractError,
    ObjectExistsError,
    PlanConflictError,
)
from features.lake import Lake
from features.schema import SelectionFilter, Split, TargetVersion
from features.selection import Selection
from features.snapshot_format import Snapshot, decode_marker, encode_marker
from features.snapshots import commits_of
from features.storage import Store
from features.testing import commit_tiny, tiny_head, tiny_lake, tiny_window
from features.testing_crash import kill_everywhere
from features.tombstones import FragmentName, Tombstone, mark_damaged, retire, unmark
from features.writer import CommitResult, write_fragment

NOW = datetime(2026, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)
ALL = SelectionFilter()


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return tiny_lake(str(tmp_path / "lake"), versions=2, samples_per_version=6, windows_per_fragment=2)


def compacted(lake: Lake, at: datetime = NOW, **options: Any) -> Compaction:
    return compact(lake, now=lambda: at, **options)


def pruned(lake: Lake, at: datetime = NOW + 2 * DAY) -> PrunePlan:
    return prune_commits(lake, grace=DAY, now=at)


def view(lake: Lake) -> tuple[str, str, list[dict[str, Any]]]:
    """All that a reader can see, through a lake opened anew."""
    catalog = Catalog.load(Lake.open(lake.url))
    return catalog.revision.digest, catalog.select(ALL).digest, catalog.frame.to_dicts()


def add(lake: Lake, *samples: int, version: int = 0) -> CommitResult:
    head = tiny_head(version)
    windows = [tiny_window(head, version=version, sample=sample) for sample in samples]
    return commit_tiny(lake, version, head.head_id, windows)


def write(lake: Lake, plan: str, *samples: int, **options: Any) -> CommitResult:
    head = tiny_head()
    windows = [tiny_window(head, sample=sample) for sample in samples]
    return write_fragment(
        lake,
        version=TargetVersion(0),
        head_id=head.head_id,
        plan_id=plan,
        windows=windows,
        writer_id="w",
        **options,
    )


def markers(lake: Lake) -> list[str]:
    return lake.store.list("commits")


def test_a_snapshot_and_pruning_change_nothing_that_a_reader_sees(lake: Lake) -> None:
    before = view(lake)
    paths = lake.commit_paths()
    made = compacted(lake)
    assert (made.outcome, made.new_commits) == ("written", 6)
    assert made.snapshot is not None
    assert (made.snapshot.number, made.snapshot.parent, made.snapshot.windows) == (1, None, 12)
    assert view(lake) == before
    assert len(pruned(lake).commits) == 6
    assert markers(lake) == []
    assert view(lake) == before
    assert Lake.open(lake.url).commit_paths() == paths


def test_commits_after_a_snapshot_are_read_beside_it_and_covered_by_the_next(
    lake: Lake, tmp_path: Path
) -> None:
    plain = tiny_lake(str(tmp_path / "plain"), versions=2, samples_per_version=6, windows_per_fragment=2)
    compacted(lake)
    pruned(lake)
    for samples in ((20, 21), (22,)):
        add(lake, *samples)
        add(plain, *samples)
    assert view(lake)[:2] == view(plain)[:2]
    second = compacted(lake, NOW + 3 * DAY)
    assert second.snapshot is not None
    assert (second.snapshot.number, second.snapshot.parent, second.new_commits) == (2, 1, 2)
    pruned(lake, NOW + 9 * DAY)
    assert view(lake)[:2] == view(plain)[:2]
    assert len(lake.store.list("snapshots")) == 4


def test_nothing_new_writes_nothing_and_few_commits_can_wait(lake: Lake, tmp_path: Path) -> None:
    assert compacted(lake, min_commits=7).outcome == "nothing"
    assert lake.store.list("snapshots") == []
    assert compacted(lake, min_commits=6).outcome == "written"
    assert compacted(lake).outcome == "nothing"
    empty = tiny_lake(str(tmp_path / "empty"), versions=1, samples_per_version=0)
    assert compacted(empty).snapshot is None


def test_a_marker_goes_only_when_it_was_covered_for_the_whole_grace(lake: Lake) -> None:
    compacted(lake, NOW)
    add(lake, 30)
    compacted(lake, NOW + DAY)
    assert plan_prune(lake, grace=DAY, now=NOW + DAY - timedelta(seconds=1)).empty
    first = pruned(lake, NOW + DAY + timedelta(hours=1))
    assert len(first.commits) == 6
    assert first.snapshots == ()
    assert len(markers(lake)) == 1
    assert len(pruned(lake, NOW + 3 * DAY).commits) == 1
    assert pruned(lake, NOW + 9 * DAY).empty


def test_a_grace_shorter_than_writers_look_back_is_refused_unless_forced(lake: Lake) -> None:
    compacted(lake)
    with pytest.raises(InputError, match="--force"):
        plan_prune(lake, grace=timedelta(minutes=1), now=NOW + DAY)
    assert len(plan_prune(lake, grace=timedelta(0), now=NOW + DAY, force=True).commits) == 6


def test_opening_an_old_lake_takes_a_handful_of_requests(tmp_path: Path) -> None:
    lake = tiny_lake(str(tmp_path), versions=4, samples_per_version=24, windows_per_fragment=1)
    compacted(lake)
    pruned(lake)
    add(lake, 90)
    counted = Lake(CountingStore(lake.store), lake.target)  # type: ignore[arg-type]
    catalog = Catalog.load(counted)
    assert catalog.revision.num_fragments == 97
    calls = counted.store.calls  # type: ignore[attr-defined]
    assert [call for call in calls if call[0] == "list"] == [
        ("list", name) for name in ("tombstones", "commits", "snapshots", "versions", "blobs")
    ]
    # A look for a newer snapshot, the snapshot's three objects and the one commit of the tail.
    assert len(calls) == 10


@pytest.mark.parametrize("maintained", ["once", "twice"])
@pytest.mark.parametrize("shown", ["nothing", "the first", "as before the last"])
def test_a_listing_of_snapshots_that_is_behind_never_shows_too_little(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, maintained: str, shown: str
) -> None:
    compacted(lake)
    add(lake, 50)
    before_last = lake.store.list("snapshots")
    compacted(lake, NOW + DAY)
    pruned(lake, NOW + 3 * DAY)
    if maintained == "twice":
        add(lake, 51)
        before_last = lake.store.list("snapshots")
        compacted(lake, NOW + 4 * DAY)
        pruned(lake, NOW + 9 * DAY)
    expected = view(lake)
    assert markers(lake) == []
    behind = {"nothing": [], "the first": ["snapshots/000000001.json"], "as before the last": before_last}[
        shown
    ]
    real = type(lake.store).list
    monkeypatch.setattr(
        type(lake.store), "list", lambda own, prefix: behind if prefix == "snapshots" else real(own, prefix)
    )
    if maintained == "twice" and shown != "as before the last":
        # What follows the first was pruned, so the newest cannot be found by name.
        with pytest.raises(CorruptDataError, match="the listing is behind"):
            view(lake)
        with pytest.raises(CorruptDataError, match="is absent"):
            write(Lake.open(lake.url), "plan", 50)
    else:
        assert view(lake) == expected


def test_a_plan_is_found_again_after_its_marker_is_gone(lake: Lake) -> None:
    write(lake, "plan", 40, 41, 39)
    compacted(lake)
    pruned(lake)
    again = write(Lake.open(lake.url), "plan", 40, 41, 39)
    assert (again.outcome, again.attempt) == ("duplicate_plan", 0)
    with pytest.raises(PlanConflictError, match="other samples"):
        write(Lake.open(lake.url), "plan", 42)
    assert markers(lake) == []


def test_a_writer_overtaken_while_it_writes_finds_the_covered_plan(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "MAX_VIEW_AGE_S", 0.0)  # as if it had slept for longer than that

    def overtake(step: str) -> None:
        if step == "data/tokens.arrow":
            other = Lake.open(lake.url)
            write(other, "plan", 40)
            compacted(other)
            pruned(other)

    assert write(lake, "plan", 40, on_step=overtake).outcome == "duplicate_plan"
    assert markers(lake) == []


def test_a_zombie_that_commits_a_pruned_name_again_is_not_read_twice(lake: Lake) -> None:
    write(lake, "plan", 40)
    raw = lake.store.read(CommitName(0, "plan", 0).path)
    compacted(lake)
    pruned(lake)
    before = view(lake)
    lake.store.create(CommitName(0, "plan", 0).path, raw)
    assert view(lake) == before
    assert compacted(lake).outcome == "nothing"


def test_a_covered_fence_still_stops_its_writer(lake: Lake) -> None:
    lake.store.create(CommitName(0, "plan", 0).path, encode_commit([]))
    before = view(lake)
    compacted(lake)
    pruned(lake)
    assert markers(lake) == []
    assert view(lake) == before
    result = write(Lake.open(lake.url), "plan", 40)
    assert (result.outcome, result.attempt) == ("committed", 1)


def test_a_lower_attempt_that_comes_after_a_snapshot_counts(lake: Lake) -> None:
    write(lake, "plan", 40, attempt=2)
    compacted(lake)
    late = encode_rows(lake, CommitName(0, "plan", 2), attempt=0)
    lake.store.create(CommitName(0, "plan", 0).path, late)
    for _ in range(2):
        names = [path for path in Catalog.load(lake).commit_paths if "plan" in path]
        assert names == [CommitName(0, "plan", 0).path]
        assert [t["attempt"][0].as_py() for t in tables_of(lake, "plan")] == [0]
        assert [path for path in lake.commit_paths() if "plan" in path] == names
        compacted(lake)
        pruned(lake)


def test_racing_compactors_make_one_sequence_and_agree(lake: Lake) -> None:
    before = view(lake)
    barrier = threading.Barrier(6)

    def race(_: int) -> Compaction:
        own = Lake.open(lake.url)
        barrier.wait()
        return compacted(own)

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(race, range(6)))
    outcomes = [result.outcome for result in results]
    assert outcomes.count("written") == 1
    assert [snapshot.number for snapshot in lake.snapshots.all()] == [1]
    assert {r.snapshot.rows.sha256 for r in results if r.snapshot} == {lake.snapshots.all()[0].rows.sha256}
    assert view(lake) == before


def test_writers_and_compactors_at_once_lose_and_double_nothing(lake: Lake) -> None:
    done = threading.Event()

    def maintain() -> None:
        own = Lake.open(lake.url)
        while not done.is_set():
            compacted(own)
            prune_commits(own, grace=timedelta(0), now=NOW, force=True)

    with ThreadPoolExecutor(5) as pool:
        keepers = [pool.submit(maintain) for _ in range(2)]
        try:
            list(pool.map(lambda n: [add(Lake.open(lake.url), 100 * n + i) for i in range(8)], range(1, 4)))
        finally:
            done.set()
        for keeper in keepers:
            keeper.result()
    selected = Catalog.load(lake).select(ALL)
    assert (len(selected), selected.duplicates) == (12 + 24, 0)


@pytest.mark.parametrize("step", COMPACTION_STEPS)
def test_a_compactor_that_fails_after_any_step_changes_nothing_and_a_rerun_completes(
    lake: Lake, step: str
) -> None:
    before = view(lake)

    def die(at: str) -> None:
        if at == step:
            raise RuntimeError(at)

    with pytest.raises(RuntimeError):
        compacted(lake, on_step=die)
    assert view(lake) == before
    add(lake, 50)
    before = view(lake)
    compacted(lake, NOW + DAY)
    assert view(lake) == before
    pruned(lake, NOW + 9 * DAY)
    assert view(lake) == before
    assert markers(lake) == []
    # Leftovers are gone too; of a superseded snapshot, the first one's marker stays.
    assert len(lake.store.list("snapshots")) == (4 if step == "marker" else 3)


PREPARE = """
from datetime import *
from features.testing import *
from features.compaction import *
start = datetime(2026, 1, 1, tzinfo=UTC)
lake = tiny_lake(url, versions=1, samples_per_version=3, windows_per_fragment=2)
compact(lake, now=lambda: start)
commit_tiny(lake, 0, tiny_head().head_id, [tiny_window(tiny_head(), sample=9)])
"""
MAINTAIN = """
from datetime import *
from features.lake import Lake
from features.compaction import *
lake, start = Lake.open(url), datetime(2026, 1, 1, tzinfo=UTC)
compact(lake, now=lambda: start + timedelta(days=1))
prune_commits(lake, grace=timedelta(days=1), now=start + timedelta(days=3))
"""


@pytest.mark.slow
def test_maintenance_killed_at_any_step_changes_nothing_and_a_rerun_completes(tmp_path: Path) -> None:
    deaths = kill_everywhere(PREPARE, MAINTAIN, tmp_path, every="DRAFTLAKE_SOAK" in os.environ)
    assert len(deaths) > 10
    expected = view(Lake.open(str(tmp_path / "template")))
    for moment, folder in deaths:
        lake = Lake.open(str(folder))
        assert view(lake) == expected, moment
        assert [finding for finding in check_lake(lake) if finding.harmful] == [], moment
        compacted(lake, NOW + DAY)
        pruned(lake, NOW + 3 * DAY)
        assert view(lake) == expected, moment
        assert markers(lake) == [], moment
        assert len(lake.store.list("snapshots")) == 4, moment


def test_a_marker_whose_answer_was_lost_is_recognised(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    create = lake.store.create

    def lossy(path: str, data: bytes) -> None:
        create(path, data)
        if path.endswith(".json"):
            raise ObjectExistsError(path)

    monkeypatch.setattr(lake.store, "create", lossy)
    assert compacted(lake).outcome == "written"
    assert [snapshot.number for snapshot in lake.snapshots.all()] == [1]


def test_a_pinned_revision_is_read_from_a_later_snapshot(lake: Lake) -> None:
    before = Catalog.load(lake)
    before.pin(lake)
    add(lake, 60)
    compacted(lake)
    pruned(lake)
    again = Catalog.load(Lake.open(lake.url), revision=before.revision.digest)
    assert again.revision == before.revision
    assert again.frame.equals(before.frame)


def test_retired_fragments_leave_the_next_snapshot_and_pinned_revisions_say_so(lake: Lake) -> None:
    pinned = Catalog.load(lake).pin(lake)
    compacted(lake)
    row = Catalog.load(lake).select(ALL).rows[0]
    name = CommitName(row["target_version"], row["plan_id"], row["attempt"])
    tombstone = retire(
        lake.store, Tombstone(NOW, "age", False, (FragmentName(name.path, row["data_prefix"]),))
    )
    hidden = view(lake)
    assert len(hidden[2]) == 10
    assert Catalog.load(lake).hidden_fragments == 1
    assert compacted(lake, NOW + DAY).dropped == 1
    lake.store.delete(tombstone)  # gc does so once no snapshot holds the rows
    assert view(lake) == hidden
    assert name.path not in lake.commit_paths()
    pruned(lake, NOW + 9 * DAY)
    with pytest.raises(InputError, match="retention gave up"):
        Catalog.load(lake, revision=pinned.digest)


def test_a_damaged_fragment_stays_in_snapshots_and_is_seen_again_when_restored(lake: Lake) -> None:
    before = view(lake)
    row = Catalog.load(lake).select(ALL).rows[0]
    name = CommitName(row["target_version"], row["plan_id"], row["attempt"])
    mark = FragmentName(name.path, row["data_prefix"])
    mark_damaged(lake.store, mark, ["cut"], NOW)
    compacted(lake)
    pruned(lake)
    assert len(view(lake)[2]) == 10
    unmark(lake.store, mark)
    assert view(lake) == before


def flip(lake: Lake, path: str) -> None:
    file = Path(lake.url) / path
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


PARTS: dict[str, Callable[[Snapshot], str]] = {
    "marker": lambda s: s.path,
    "rows": lambda s: s.rows.path,
    "commits": lambda s: s.commits.path,
}


@pytest.mark.parametrize("part", sorted(PARTS))
def test_a_snapshot_with_a_changed_or_absent_object_is_refused_by_name(lake: Lake, part: str) -> None:
    snapshot = compacted(lake).snapshot
    assert snapshot is not None
    flip(lake, PARTS[part](snapshot))
    with pytest.raises(LakeContractError, match=PARTS[part](snapshot)):
        Catalog.load(Lake.open(lake.url))
    if part != "marker":
        (Path(lake.url) / PARTS[part](snapshot)).unlink()
        with pytest.raises(CorruptDataError, match="snapshots"):
            Catalog.load(Lake.open(lake.url))


def test_a_snapshot_of_another_lake_or_a_newer_format_is_refused(lake: Lake) -> None:
    snapshot = compacted(lake).snapshot
    assert snapshot is not None
    path = Path(lake.url) / snapshot.path
    path.write_bytes(encode_marker(replace(snapshot, target_id="elsewhere")))
    with pytest.raises(CorruptDataError, match="elsewhere"):
        Catalog.load(lake)
    with pytest.raises(LakeContractError, match="Upgrade"):
        decode_marker(b'{"format_version": 99, "seal": "x"}', where="x")
    assert decode_marker(encode_marker(snapshot), where="x") == snapshot


def test_a_selection_narrows_by_everything_a_commit_says(lake: Lake) -> None:
    compacted(lake)
    catalog = Catalog.load(lake)
    rows = list(catalog.select(ALL).rows)
    row = rows[3]

    def kept(condition: Callable[[dict[str, Any]], bool], **wanted: Any) -> bool:
        found = catalog.select(SelectionFilter(**wanted))
        expected = [row for row in rows if condition(row)]
        assert 0 < len(expected) < len(rows)
        return list(found.rows) == expected and Selection.from_arrow_bytes(found.to_arrow_bytes()) == found

    assert kept(lambda r: r["sample_id"] == row["sample_id"], samples=(row["sample_id"],))
    assert kept(lambda r: r["group_id"] == row["group_id"], groups=(row["group_id"],))
    assert kept(lambda r: r["target_version"] == 1, newest_versions=1)
    assert kept(lambda r: r["reward"] >= 0.5, min_reward=0.5)
    assert kept(lambda r: r["num_rows"] <= row["num_rows"], max_tokens=row["num_rows"])
    assert len(catalog.select(SelectionFilter(writers=("nobody",)))) == 0
    assert len(catalog.select(SelectionFilter(writers=("features.testing",)))) == len(rows)
    assert len(catalog.select(SelectionFilter(min_acceptance_length=0.0))) == 0  # not recorded: left out


def test_a_plan_counts_fragments_requests_and_heads(lake: Lake) -> None:
    plan = Catalog.load(lake).explain(ALL)
    assert (plan.fragments, plan.requests, plan.heads_present) == (6, 2 * 12 + 3 * 6, (0, 1))


def test_a_large_selection_makes_its_rows_as_they_are_read(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = Catalog.load(lake)
    small = catalog.select(ALL)
    kept = list(small.rows)
    monkeypatch.setattr(selection, "_KEPT_ROWS", 0)
    monkeypatch.setattr(selection, "_BATCH", 5)
    large = catalog.select(ALL)
    assert list(large.rows) == kept
    assert [large.rows[i] for i in (0, 7, -1)] == [kept[i] for i in (0, 7, -1)]
    assert large.rows[::-3] == kept[::-3]
    assert large.rows == kept
    assert large.rows != kept[1:]
    with pytest.raises(IndexError):
        large.rows[12]
    assert large.digest == small.digest
    # As a loader process gets it.
    assert copy.deepcopy(large) == small


def test_the_split_of_a_compacted_lake_is_that_of_its_commits(lake: Lake) -> None:
    wanted = [SelectionFilter(split=split, held_out_percent=40) for split in Split]
    before = [Catalog.load(lake).select(w).digest for w in wanted]
    compacted(lake)
    pruned(lake)
    assert [Catalog.load(lake).select(w).digest for w in wanted] == before


class CountingStore:
    """Passes calls on and remembers them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.calls: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._store, name)
        if name not in ("list", "read", "exists", "size", "read_range"):
            return attribute

        def call(path: str, *arguments: Any) -> Any:
            self.calls.append((name, path))
            return attribute(path, *arguments)

        return call


def tables_of(lake: Lake, plan: str) -> list[Any]:
    found = [
        t.filter([p == plan for p in t["plan_id"].to_pylist()]) for t in commits_of(lake, TargetVersion(0))
    ]
    return [table for table in found if table.num_rows]


def encode_rows(lake: Lake, name: CommitName, **changed: Any) -> bytes:
    return encode_commit([{**row, **changed} for row in lake.read_commit(name.path).to_pylist()])
