"""gc deletes what nobody can need, fences before it deletes, and waits for whoever may still read."""

import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from features.catalog import Catalog
from features.check import check_lake
from features.commits import CommitName, encode_commit
from features.compaction import compact, plan_prune, prune
from features.errors import CorruptDataError, InputError
from features.gc import GcPlan, GcPolicy, GcReport, apply_gc, plan_gc
from features.lake import Lake
from features.leases import acquire
from features.retention import (
    Need,
    RetentionPolicy,
    apply_retention,
    fragment_facts,
    fragment_names,
    plan_retention,
)
from features.schema import TargetVersion
from features.survey import survey
from features.testing import TINY_LAYOUT, tiny_head, tiny_lake, tiny_window
from features.testing_crash import kill_everywhere
from features.tombstones import hidden
from features.writer import WRITE_STEPS, CommitResult, plan_digest, write_fragment

NOW = datetime.now(UTC)
LATER = NOW + timedelta(days=3)
POLICY = GcPolicy()
DAY = timedelta(days=1)


class KilledError(Exception):
    pass


def write(
    lake: Lake, *, die_after: str | None = None, sample: int = 90, tokens_of: int | None = None
) -> CommitResult:
    """Commit one window of v0 whose plan is named by ``sample``; or die after a step, the data left behind."""
    window = tiny_window(tiny_head(0), sample=sample if tokens_of is None else tokens_of)
    plan = plan_digest("tiny", TargetVersion(0), [f"s{sample}"], {}, TINY_LAYOUT)

    def on_step(step: str) -> None:
        if step == die_after:
            raise KilledError(step)

    return write_fragment(
        lake, version=TargetVersion(0), head_id=lake.version(TargetVersion(0)).head_id, plan_id=plan,
        windows=[window], writer_id="test", on_step=on_step,
    )  # fmt: skip


def gc(
    lake: Lake, now: datetime = LATER, needs: tuple[Need, ...] = (), **how: Any
) -> tuple[GcPlan, GcReport]:
    plan = plan_gc(survey(lake), POLICY, needs, now=now, **how)
    return plan, apply_gc(lake, plan)


def retire_oldest(lake: Lake, now: datetime = NOW, *, force: bool = False) -> None:
    facts = fragment_facts(lake, lake.store.scan("data"))
    plan = plan_retention(facts, RetentionPolicy(keep_versions=1), (), now=now, force=force)
    apply_retention(lake, plan, now=now, reason="test")


@pytest.fixture(params=["local", "memory"])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Lake:
    url = str(tmp_path / "lake") if request.param == "local" else f"memory://gc-{tmp_path.name}"
    return tiny_lake(url, versions=2, samples_per_version=4)


def test_a_clean_lake_has_nothing_to_delete(lake: Lake) -> None:
    plan, report = gc(lake)
    assert plan.actions == ()
    assert report.deleted == {}


@pytest.mark.parametrize("step", WRITE_STEPS[:-1])
def test_an_orphan_goes_whole_once_it_is_old(lake: Lake, step: str) -> None:
    with pytest.raises(KilledError):
        write(lake, die_after=step)
    before = Catalog.load(lake).revision
    young = plan_gc(survey(lake), POLICY, now=NOW)
    assert young.actions == ()
    assert young.waiting == {"orphan younger than its ttl": 1}
    _, report = gc(lake)
    assert report.deleted == {"orphan": 1}
    assert check_lake(lake, 2) == ()
    assert Catalog.load(lake).revision.digest == before.digest


def test_a_writer_that_resumes_after_gc_starts_over_and_loses_nothing(lake: Lake) -> None:
    collected: list[GcReport] = []

    class Zombie:
        """Pauses before its commit for so long that gc takes it for dead."""

        def __call__(self, step: str) -> None:
            if step == WRITE_STEPS[-2] and not collected:
                collected.append(gc(lake)[1])

    window = tiny_window(tiny_head(0), sample=91)
    result = write_fragment(
        lake, version=TargetVersion(0), head_id=lake.version(TargetVersion(0)).head_id,
        plan_id=plan_digest("tiny", TargetVersion(0), ["zombie"], {}, TINY_LAYOUT),
        windows=[window], writer_id="zombie", on_step=Zombie(),
    )  # fmt: skip
    assert collected[0].deleted == {"orphan": 1}
    assert (result.outcome, result.attempt) == ("committed", 1)
    assert check_lake(lake, 2) == ()
    rows = [row for row in Catalog.load(lake).frame.to_dicts() if row["plan_id"] == result.plan_id]
    assert [row["attempt"] for row in rows] == [1]


def test_a_fence_takes_the_name_of_the_attempt_that_was_being_written(lake: Lake) -> None:
    with pytest.raises(KilledError):
        write(lake, die_after=WRITE_STEPS[0])
    gc(lake)
    with pytest.raises(KilledError):
        write(lake, die_after=WRITE_STEPS[0])  # starts at attempt 1, for 0 is fenced off
    plan = plan_gc(survey(lake), POLICY, now=LATER)
    assert [CommitName.parse(a.fence or "").attempt for a in plan.actions] == [1]  # type: ignore[union-attr]


def test_an_orphan_that_was_committed_between_plan_and_deletion_stays(lake: Lake) -> None:
    with pytest.raises(KilledError):
        write(lake, die_after=WRITE_STEPS[-2])
    plan = plan_gc(survey(lake), POLICY, now=LATER)
    prefix, fence = plan.actions[0].path, plan.actions[0].fence
    assert fence is not None
    other = tiny_lake(f"memory://gc-other-{prefix[-32:]}", versions=1, samples_per_version=0)
    done = write(
        other
    )  # the same plan: its commit, made to name the orphan, is what a late writer would create
    rows = other.read_commit(done.commit_path).to_pylist()
    uuid = prefix.rsplit(".", 1)[1]
    lake.store.create(
        fence, encode_commit([{**row, "data_prefix": prefix, "write_uuid": uuid} for row in rows])
    )
    report = apply_gc(lake, plan)
    assert report.kept == {prefix: "its writer committed it meanwhile"}
    assert check_lake(lake, 2) == ()


def test_the_loser_of_two_writers_of_one_plan_is_an_orphan_and_needs_no_fence(lake: Lake) -> None:
    done: list[CommitResult] = []

    def second(step: str) -> None:
        if step == WRITE_STEPS[-2] and not done:
            done.append(write(lake))

    result = write_fragment(
        lake, version=TargetVersion(0), head_id=lake.version(TargetVersion(0)).head_id,
        plan_id=plan_digest("tiny", TargetVersion(0), ["s90"], {}, TINY_LAYOUT),
        windows=[tiny_window(tiny_head(0), sample=90)], writer_id="first", on_step=second,
    )  # fmt: skip
    assert result.outcome == "duplicate_plan"
    plan, report = gc(lake)
    assert [(a.kind, a.fence) for a in plan.actions] == [("orphan", None)]
    assert report.deleted == {"orphan": 1}
    assert check_lake(lake, 2) == ()


def test_an_unreadable_commit_stops_gc_before_it_deletes(lake: Lake) -> None:
    lake.store.create(f"commits/v=000000000/{'a' * 32}.0.parquet", b"cut")
    with pytest.raises(CorruptDataError, match="nothing is deleted"):
        survey(lake)


def test_retired_data_go_after_the_grace_and_the_lake_reads_without_them(lake: Lake) -> None:
    retire_oldest(lake)
    assert set(Catalog.load(lake).frame["target_version"]) == {1}
    early = plan_gc(survey(lake), POLICY, now=NOW + timedelta(minutes=30))
    assert early.actions == ()
    assert early.waiting == {"retired less than the grace ago": 1}
    _, report = gc(lake, now=NOW + timedelta(hours=2))
    assert report.deleted == {"retired_data": 1}
    assert report.nbytes > 0
    assert [path for path in lake.store.list("data") if "v=000000000" in path] == []
    assert set(Catalog.load(lake).frame["target_version"]) == {1}
    assert not [f for f in check_lake(lake, 2) if f.harmful]
    assert gc(lake, now=NOW + timedelta(hours=2))[0].actions == ()


def test_gc_waits_for_a_lease_and_no_longer(lake: Lake) -> None:
    catalog = Catalog.load(lake)
    acquire(
        lake, revision=catalog.revision.digest, fragments=fragment_names(catalog), reader="trainer-7", now=NOW,
        ttl=timedelta(hours=10),
    )  # fmt: skip
    retire_oldest(lake)
    held = plan_gc(survey(lake), POLICY, now=NOW + timedelta(hours=9))
    assert held.actions == ()
    assert held.waiting == {"needed by lease of trainer-7": 1}
    assert plan_gc(survey(lake), POLICY, now=NOW + timedelta(hours=9), force=True).counts == {
        "retired_data": 1
    }
    _, report = gc(lake, now=NOW + timedelta(hours=12))
    assert report.deleted == {"expired_lease": 1, "retired_data": 1}
    assert lake.store.list("leases") == []


@pytest.mark.parametrize("who", ["pin", "draft"])
def test_gc_keeps_what_a_pin_or_a_registered_draft_came_to_need(lake: Lake, who: str) -> None:
    catalog = Catalog.load(lake)
    needs: tuple[Need, ...] = ()
    retire_oldest(lake)
    if who == "pin":
        catalog.pin(lake)  # after the tombstone: retention could not see it
    else:
        needs = (Need("draft abc", frozenset(catalog.commit_paths)),)
    plan = plan_gc(survey(lake), POLICY, needs, now=LATER)
    assert plan.actions == ()
    assert sum(plan.waiting.values()) == 1
    assert plan_gc(survey(lake), POLICY, needs, now=LATER, force=True).counts == {"retired_data": 1}


def test_a_tombstone_stays_until_a_snapshot_says_the_same(lake: Lake) -> None:
    retire_oldest(lake)
    gc(lake)
    assert plan_gc(survey(lake), POLICY, now=LATER).actions == ()
    compact(lake, now=lambda: NOW)
    plan, _ = gc(lake)
    assert plan.counts == {"spent_tombstone": 1}
    assert hidden(lake.store).tombstones == ()
    assert set(Catalog.load(lake).frame["target_version"]) == {1}


def test_what_was_given_up_so_long_ago_that_its_tombstone_is_gone_is_collected_again(lake: Lake) -> None:
    done = write(lake, sample=91)
    catalog = Catalog.load(lake)
    catalog.pin(lake)
    late = Lake(lake.store, lake.target)  # a writer that has looked for the newest snapshot before
    assert late.snapshots.committed(CommitName(0, "p", 0)) is None
    compact(lake, now=lambda: NOW)
    retire_oldest(lake, force=True)
    gc(lake)
    compact(lake, now=lambda: NOW)
    assert gc(lake)[1].deleted == {"spent_tombstone": 1}
    assert lake.store.exists(done.commit_path)  # no snapshot has covered it for long enough
    with pytest.raises(InputError, match="retention gave up"):
        Catalog.load(lake, revision=catalog.revision.digest)
    assert write(late, sample=91).attempt == 1
    assert write(Lake.open(lake.url), sample=91).outcome == "duplicate_plan"
    assert not [f for f in check_lake(lake, 2) if f.harmful]


@pytest.mark.parametrize("folder", ["snapshots", "commits", "tombstones", "leases", "revisions"])
def test_a_listing_that_is_behind_deletes_nothing_that_is_needed(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    with pytest.raises(KilledError):
        write(lake, die_after=WRITE_STEPS[-2])  # an orphan, the only thing that may go
    compact(lake, now=lambda: NOW)
    prune(lake, plan_prune(lake, grace=DAY, now=LATER))
    write(lake, sample=95)
    catalog = Catalog.load(lake)
    catalog.pin(lake)
    acquire(
        lake, revision=catalog.revision.digest, fragments=fragment_names(catalog), reader="r", now=NOW,
        ttl=timedelta(days=9),
    )  # fmt: skip
    retire_oldest(lake)
    real = lake.store.list
    monkeypatch.setattr(lake.store, "list", lambda prefix: [] if prefix == folder else real(prefix))
    monkeypatch.setattr(
        lake.store,
        "scan",
        lambda prefix: {} if prefix == folder else type(lake.store).scan(lake.store, prefix),
    )
    other = Lake(lake.store, lake.target)
    if folder == "snapshots":  # looked for by name
        assert plan_gc(survey(other), POLICY, now=LATER).counts == {"orphan": 1}
        return
    with pytest.raises(CorruptDataError, match="Nothing was deleted"):
        survey(other)
    monkeypatch.undo()
    assert plan_gc(survey(other), POLICY, now=LATER).counts == {"orphan": 1}


def test_a_reader_whose_listing_of_tombstones_is_behind_sees_whole_windows_or_is_refused(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Catalog.load(lake).revision
    retire_oldest(lake)
    real = lake.store.list
    monkeypatch.setattr(lake.store, "list", lambda prefix: [] if prefix == "tombstones" else real(prefix))
    catalog = Catalog.load(lake)
    assert catalog.revision == before
    rows = catalog.frame.to_dicts()
    assert [lake.read_window(row).meta.sample_id for row in rows] == [row["sample_id"] for row in rows]
    monkeypatch.undo()
    gc(lake)
    late = Lake(lake.store, lake.target)
    with pytest.raises(CorruptDataError, match="absent"):
        late.read_window(rows[0])


@pytest.mark.parametrize("which", ["commits/", "zarr.json", "tombstones/", "lease.json"])
def test_an_object_that_is_once_answered_as_absent_is_not_taken_for_gone(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    with pytest.raises(KilledError):
        write(lake, die_after=WRITE_STEPS[-2])
    catalog = Catalog.load(lake)
    acquire(
        lake, revision=catalog.revision.digest, fragments=fragment_names(catalog), reader="r", now=NOW,
        ttl=timedelta(days=9),
    )  # fmt: skip
    retire_oldest(lake)
    whole = survey(lake)
    real, answered = lake.store.read, []

    def read(path: str) -> bytes:
        if which in path and not answered:
            answered.append(path)
            raise FileNotFoundError(path)
        return real(path)

    monkeypatch.setattr(lake.store, "read", read)
    found = survey(Lake(lake.store, lake.target))
    assert answered
    assert plan_gc(found, POLICY, now=LATER).actions == plan_gc(whole, POLICY, now=LATER).actions
    assert (found.committed, found.attempts) == (whole.committed, whole.attempts)


def test_temporary_files_go_when_they_are_old(tmp_path: Path) -> None:
    lake = tiny_lake(str(tmp_path), versions=1, samples_per_version=1)
    (tmp_path / "commits/.x.1.partial").write_bytes(b"x")
    assert plan_gc(survey(lake), POLICY, now=NOW).waiting == {"temporary file younger than the ttl": 1}
    assert gc(lake)[1].deleted == {"temporary_file": 1}
    assert not (tmp_path / "commits/.x.1.partial").exists()


def test_what_is_not_ours_is_never_deleted(lake: Lake) -> None:
    for path in ("data/notes/a/b.txt", "data/v=000000000/readme/x", "elsewhere/file"):
        lake.store.create(path, b"x")
    before = lake.store.list("")
    plan, _ = gc(lake)
    assert plan.waiting == {"data under no name of ours": 2}
    assert lake.store.list("") == before


def test_waiting_times_are_not_negative() -> None:
    with pytest.raises(InputError):
        replace(POLICY, grace=timedelta(seconds=-1))


PREPARE = """
from datetime import UTC, datetime, timedelta
from features.catalog import Catalog
from features.retention import RetentionPolicy, apply_retention, fragment_facts, plan_retention
from features.testing import TINY_LAYOUT, tiny_head, tiny_lake, tiny_window, tiny_record
from features.writer import plan_digest, write_fragment
from features.schema import TargetVersion

lake = tiny_lake(url, versions=2, samples_per_version=1)
facts = fragment_facts(lake, lake.store.scan("data"))
now = datetime.now(UTC)
plan = plan_retention(facts, RetentionPolicy(keep_versions=1), (), now=now)
apply_retention(lake, plan, now=now, reason="test")
class Stop(Exception): pass
def die(step):
    if step == "data/tokens.arrow": raise Stop
try:
    write_fragment(lake, version=TargetVersion(1), head_id=lake.version(TargetVersion(1)).head_id, plan_id="a" * 32,
        windows=[tiny_window(tiny_head(1), version=1, sample=50)], writer_id="w", on_step=die)
except Stop: pass
"""
ACT = """
from datetime import UTC, datetime, timedelta
from features.gc import GcPolicy, apply_gc, plan_gc
from features.survey import survey
from features.lake import Lake
from features.survey import survey

lake = Lake.open(url)
apply_gc(lake, plan_gc(survey(lake), GcPolicy(), now=datetime.now(UTC) + timedelta(days=3)))
"""


@pytest.mark.slow
def test_gc_killed_at_any_moment_leaves_every_reader_whole_and_a_rerun_completes_it(tmp_path: Path) -> None:
    moments = kill_everywhere(PREPARE, ACT, tmp_path, every="DRAFTLAKE_SOAK" in os.environ)
    expected = Catalog.load(Lake.open(str(moments[0][1]))).revision.digest
    assert len(moments) > 20
    for moment, folder in moments:
        lake = Lake.open(str(folder))
        assert Catalog.load(lake).revision.digest == expected, moment
        assert not [f for f in check_lake(lake, 2) if f.harmful], moment
        gc(lake)
        assert {f.code for f in check_lake(lake, 2)} <= {"temporary_file"}, moment
        assert not [p for p in lake.store.list("data") if "v=000000000" in p], moment


def test_a_file_that_is_no_snapshot_is_passed_over(tmp_path: Path) -> None:
    lake = tiny_lake(str(tmp_path), versions=1, samples_per_version=2)
    compact(lake, now=lambda: NOW)
    (tmp_path / "snapshots" / "notes.json").write_bytes(b"{}")
    assert plan_gc(survey(lake), POLICY, now=LATER).actions == ()


def test_a_lease_that_ends_after_the_calendar_is_named(tmp_path: Path) -> None:
    lake = tiny_lake(str(tmp_path), versions=1, samples_per_version=2)
    lake.store.create(f"leases/{'a' * 32}/until.{'9' * 15}", b"")
    with pytest.raises(CorruptDataError, match=f"leases/{'a' * 32}"):
        survey(lake)


def test_a_grace_longer_than_the_calendar_prunes_nothing(tmp_path: Path) -> None:
    lake = tiny_lake(str(tmp_path), versions=1, samples_per_version=2)
    compact(lake, now=lambda: NOW)
    assert plan_prune(lake, grace=timedelta(days=10**6), now=LATER) == plan_prune(
        lake, grace=10 * DAY, now=LATER
    )
