"""Retention decides from facts alone, keeps what anybody needs, and hides before anything is deleted."""

import os
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from features.catalog import Catalog
from features.check import check_lake
from features.commits import CommitName
from features.compaction import compact
from features.errors import CorruptDataError, InputError
from features.lake import Lake
from features.leases import acquire, held, leases
from features.retention import (
    FragmentFacts,
    Need,
    Pin,
    RetentionPlan,
    RetentionPolicy,
    apply_retention,
    fragment_facts,
    fragment_names,
    lease_needs,
    pins,
    plan_retention,
    tombstoned,
)
from features.schema import SelectionFilter, TargetVersion
from features.testing import commit_tiny, tiny_head, tiny_lake, tiny_window
from features.testing_crash import kill_everywhere
from features.tombstones import FragmentName, Tombstone, hidden, retire
from features.writer import write_fragment

NOW = datetime(2026, 7, 1, tzinfo=UTC)
DAY = timedelta(days=1)
KEEP_ONE = RetentionPolicy(keep_versions=1)


def fact(version: int, *, nbytes: int = 10, age: int | None = None, plan: str = "a") -> FragmentFacts:
    """Version v was written 10 - v days ago, unless ``age`` days are given."""
    name = FragmentName(CommitName(version, plan, 0).path, f"data/v={version:09d}/{plan}.u")
    return FragmentFacts(name, version, nbytes, NOW - (10 - version if age is None else age) * DAY)


FACTS = [fact(v) for v in range(5)]


def dropped(plan: RetentionPlan) -> list[int]:
    return sorted(decision.version for decision in plan.versions if decision.dropped)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (RetentionPolicy(keep_versions=5), []),
        (RetentionPolicy(keep_versions=2), [0, 1, 2]),
        (RetentionPolicy(keep_versions=1), [0, 1, 2, 3]),
        (RetentionPolicy(max_age=8 * DAY), [0, 1]),
        (RetentionPolicy(max_age=timedelta(0)), [0, 1, 2, 3]),
        (RetentionPolicy(max_bytes=30), [0, 1]),
        (RetentionPolicy(max_bytes=29), [0, 1, 2]),
        (RetentionPolicy(max_bytes=0), [0, 1, 2, 3]),
        (RetentionPolicy(max_age=8 * DAY, keep_versions=4, max_bytes=30), [0, 1]),
    ],
)
def test_each_limit_gives_up_the_oldest_and_never_the_newest(
    policy: RetentionPolicy, expected: list[int]
) -> None:
    assert dropped(plan_retention(FACTS, policy, (), now=NOW)) == expected


def test_a_version_is_as_young_as_its_youngest_fragment() -> None:
    facts = [*FACTS, fact(0, age=1, plan="late")]
    assert dropped(plan_retention(facts, RetentionPolicy(max_age=8 * DAY), (), now=NOW)) == [1]


def test_a_needed_version_stays_whole_counts_its_bytes_and_says_for_whom() -> None:
    facts = [*FACTS, fact(2, plan="other")]
    need = Need("draft abc", frozenset({fact(2).name.commit_path}))
    plan = plan_retention(facts, RetentionPolicy(max_bytes=30), [need], now=NOW)
    assert dropped(plan) == [0, 1]
    kept = next(decision for decision in plan.versions if decision.version == 2)
    assert (kept.needed_by, kept.reasons) == (("draft abc",), ("beyond 30 bytes",))
    assert dropped(plan_retention(facts, RetentionPolicy(max_bytes=30), [need], now=NOW, force=True)) == [
        0,
        1,
        2,
    ]


def test_a_lease_that_is_still_being_made_keeps_everything() -> None:
    assert dropped(plan_retention(FACTS, KEEP_ONE, [Need("lease of unknown", None)], now=NOW)) == []


def test_old_pins_go_only_when_asked_and_only_when_nobody_needs_them() -> None:
    commits = frozenset({fact(0).name.commit_path})
    pin = Pin("revisions/d.txt", "d", NOW - 5 * DAY, commits)
    kept = plan_retention(FACTS, KEEP_ONE, (), pins=[pin], now=NOW)
    assert (dropped(kept), kept.pins) == ([1, 2, 3], ())
    policy = replace(KEEP_ONE, max_pin_age=4 * DAY)
    gone = plan_retention(FACTS, policy, (), pins=[pin], now=NOW)
    assert (dropped(gone), gone.pins) == ([0, 1, 2, 3], ("revisions/d.txt",))
    needed = plan_retention(FACTS, policy, [Need("draft abc", commits)], pins=[pin], now=NOW)
    assert (dropped(needed), needed.pins) == ([1, 2, 3], ())


@pytest.mark.parametrize("limits", [{}, {"keep_versions": 0}, {"max_bytes": -1}])
def test_a_policy_without_a_limit_or_with_an_absurd_one_is_refused(limits: dict[str, int]) -> None:
    with pytest.raises(InputError):
        RetentionPolicy(**limits)  # type: ignore[arg-type]


# -- on a lake


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return tiny_lake(str(tmp_path / "lake"), versions=3, samples_per_version=2)


def plan_for(lake: Lake, policy: RetentionPolicy = KEEP_ONE, *, force: bool = False) -> RetentionPlan:
    now = datetime.now(UTC)
    facts = fragment_facts(lake, lake.store.scan("data"))
    return plan_retention(facts, policy, lease_needs(lake, now), pins=pins(lake), now=now, force=force)


def retire_all_but_newest(lake: Lake, *, force: bool = False) -> None:
    apply_retention(lake, plan_for(lake, force=force), now=datetime.now(UTC), reason="test")


def versions_of(lake: Lake) -> list[int]:
    return sorted(set(Catalog.load(lake).frame["target_version"]))


def test_facts_are_what_lies_on_disk(lake: Lake) -> None:
    facts = fragment_facts(lake, lake.store.scan("data"))
    assert sum(f.nbytes for f in facts) == sum(lake.store.size(path) for path in lake.store.list("data"))
    assert all(abs(datetime.now(UTC) - f.written_at) < timedelta(minutes=5) for f in facts)


@pytest.mark.parametrize("compacted", ["never", "before", "after"])
def test_given_up_versions_are_hidden_at_once_and_no_byte_is_deleted(lake: Lake, compacted: str) -> None:
    if compacted == "before":
        compact(lake, now=lambda: NOW)
    data = lake.store.list("data")
    retire_all_but_newest(lake)
    if compacted == "after":
        compact(lake, now=lambda: NOW)
    assert versions_of(lake) == [2]
    assert lake.store.list("data") == data
    assert tombstoned(lake) == {"/".join(p.split("/")[:3]) for p in data if "v=000000002" not in p}
    assert check_lake(lake, 2) == ()
    again = plan_for(lake)
    assert (again.empty, [d.version for d in again.versions]) == (True, [2])


def test_progress_moves_by_pin_and_then_by_all_fragments_for_they_go_at_once(lake: Lake) -> None:
    Catalog.load(lake).pin(lake)
    policy = replace(KEEP_ONE, max_pin_age=timedelta(seconds=-1))
    told: list[int] = []
    apply_retention(lake, plan_for(lake, policy), now=NOW, reason="test", advance=told.append)
    assert told == [1, 2]


def test_two_runs_of_one_plan_make_one_tombstone(lake: Lake) -> None:
    plan = plan_for(lake)
    paths = {apply_retention(lake, plan, now=NOW + n * DAY, reason=f"run {n}") for n in range(2)}
    assert len(paths) == 1
    assert len(hidden(lake.store).tombstones) == 1


def test_a_pinned_revision_stays_readable_unless_forced_and_then_says_why(lake: Lake) -> None:
    pinned = Catalog.load(lake).pin(lake)
    commit_tiny(
        lake, 2, lake.version(TargetVersion(2)).head_id, [tiny_window(tiny_head(2), version=2, sample=77)]
    )
    assert plan_for(lake).empty
    retire_all_but_newest(lake, force=True)
    assert versions_of(lake) == [2]
    with pytest.raises(InputError, match="select anew"):
        Catalog.load(lake, revision=pinned.digest)


def test_what_was_given_up_can_be_collected_again_under_the_next_attempt(lake: Lake) -> None:
    row = Catalog.load(lake).frame.filter(Catalog.load(lake).frame["target_version"] == 0).to_dicts()[0]
    windows = [
        lake.read_window(r)
        for r in Catalog.load(lake).frame.to_dicts()
        if r["data_prefix"] == row["data_prefix"]
    ]
    retire_all_but_newest(lake)
    result = commit_tiny(lake, 0, row["head_id"], windows)
    assert (result.outcome, result.attempt) == ("committed", 1)
    assert versions_of(lake) == [0, 2]
    selection = Catalog.load(lake).select(SelectionFilter())
    assert len([lake.read_window(r) for r in selection.rows]) == len(selection)


@pytest.mark.parametrize("compacted", [False, True])
def test_an_attempt_that_counts_only_when_the_lower_one_is_hidden_goes_too(
    lake: Lake, compacted: bool
) -> None:
    version, head = TargetVersion(0), lake.version(TargetVersion(0)).head_id
    row = Catalog.load(lake).frame.filter(Catalog.load(lake).frame["target_version"] == 0).to_dicts()[0]
    write_fragment(
        lake, version=version, head_id=head, plan_id=row["plan_id"], windows=[tiny_window(tiny_head(0), sample=5)],
        writer_id="late", attempt=1,
    )  # fmt: skip
    if compacted:
        compact(lake, now=lambda: NOW)
    retire_all_but_newest(lake)
    assert versions_of(lake) == [2]


def test_a_changed_tombstone_is_refused_for_nobody_knows_what_it_hides(lake: Lake) -> None:
    path = retire(lake.store, Tombstone(NOW, "test", False, (fact(0).name,)))
    file = Path(lake.url) / path
    file.write_bytes(file.read_bytes().replace(b"v=000000000", b"v=000000001"))
    with pytest.raises(CorruptDataError, match="other fragments"):
        Catalog.load(lake)
    assert [f.code for f in check_lake(lake) if f.harmful] == ["tombstone_unreadable"]


# -- leases


def take(lake: Lake, *, ttl: timedelta = DAY, now: datetime = NOW):  # type: ignore[no-untyped-def]
    catalog = Catalog.load(lake)
    return acquire(
        lake,
        revision=catalog.revision.digest,
        fragments=fragment_names(catalog),
        reader="r",
        now=now,
        ttl=ttl,
    )


def test_a_lease_lives_until_its_end_and_is_renewed_and_released(lake: Lake) -> None:
    lease = take(lake)
    assert [record.expires_at for record in leases(lake)] == [NOW + DAY]
    lease.renew(NOW + DAY / 2)
    assert [record.expires_at for record in leases(lake)] == [NOW + 1.5 * DAY]
    assert [need.who for need in lease_needs(lake, NOW + DAY)] == ["lease of r"]
    assert lease_needs(lake, NOW + 2 * DAY) == ()
    with pytest.raises(InputError, match="ran out"):
        lease.renew(NOW + 2 * DAY)
    lease.release()
    lease.release()
    assert leases(lake) == ()


def test_retention_keeps_what_a_live_lease_needs(lake: Lake) -> None:
    lease = take(lake, now=datetime.now(UTC))
    assert plan_for(lake).empty
    lease.release()
    assert dropped(plan_for(lake)) == [0, 1]


def test_a_reader_that_is_too_late_for_its_fragments_is_told(lake: Lake) -> None:
    catalog = Catalog.load(lake)
    retire_all_but_newest(lake)
    with pytest.raises(InputError, match="2 fragments of lake revision"):
        acquire(
            lake, revision=catalog.revision.digest, fragments=fragment_names(catalog), reader="r", now=NOW
        )
    assert leases(lake) == ()


def test_a_lease_without_its_body_needs_everything_until_it_ends(lake: Lake) -> None:
    lake.store.create(f"leases/{'0' * 32}/until.{int((NOW + DAY).timestamp() * 1000):015d}", b"")
    assert [(need.who, need.commits) for need in lease_needs(lake, NOW)] == [("lease of unknown", None)]


def test_a_held_lease_is_renewed_in_the_background_and_given_back(lake: Lake) -> None:
    catalog = Catalog.load(lake)
    with held(
        lake, revision=catalog.revision.digest, fragments=fragment_names(catalog), reader="r",
        now=lambda: datetime.now(UTC), ttl=timedelta(seconds=3),
    ) as lease:  # fmt: skip
        first, deadline = lease.expires_at, time.monotonic() + 30
        while lease.expires_at == first and time.monotonic() < deadline:
            time.sleep(0.05)
        assert lease.expires_at > first
        assert len(leases(lake)) == 1
    assert leases(lake) == ()


PREPARE = """
from features.testing import tiny_lake
tiny_lake(url, versions=2, samples_per_version=1)
"""
ACT = """
from datetime import UTC, datetime
from features.catalog import Catalog
from features.lake import Lake
from features.retention import RetentionPolicy, apply_retention, fragment_facts, plan_retention
lake, now = Lake.open(url), datetime.now(UTC)
facts = fragment_facts(lake, lake.store.scan("data"))
apply_retention(lake, plan_retention(facts, RetentionPolicy(keep_versions=1), (), now=now), now=now, reason="t")
"""


@pytest.mark.slow
def test_retention_killed_at_any_moment_leaves_the_old_state_or_the_new_one(tmp_path: Path) -> None:
    moments = kill_everywhere(PREPARE, ACT, tmp_path, every="DRAFTLAKE_SOAK" in os.environ)
    seen = set()
    for moment, folder in moments:
        lake = Lake.open(str(folder))
        seen.add(tuple(versions_of(lake)))
        assert {f.code for f in check_lake(lake, 2)} <= {"temporary_file"}, moment
        retire_all_but_newest(lake)
        assert versions_of(lake) == [1], moment
    assert seen == {(0, 1), (1,)}
