"""retain, gc and fsck at the command line: asked first, honest exit codes, one JSON value."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from command_outcome import Cli, objects

from features.catalog import Catalog
from features.gc import GcPolicy
from features.lake import Lake
from features.retention import Need, RetentionPolicy
from features.testing import tiny_lake
from pipelines import housekeeping
from pipelines.context import RunContext


@pytest.fixture
def small(tmp_path: Path) -> Path:
    tiny_lake(str(tmp_path / "small"), versions=3, samples_per_version=2)
    return tmp_path / "small"


def test_retain_asked_first_changes_nothing_then_does_what_it_said(cli: Cli, small: Path) -> None:
    arguments = ("retain", "--lake", small, "--keep-versions", 2, "--json")
    before = objects(small)
    plan = cli(*arguments, "--dry-run")
    assert (plan.code, plan.json["dropped"], plan.json["tombstone"]) == (0, [0], None)
    assert objects(small) == before
    done = cli(*arguments)
    assert (done.code, done.json["dropped"]) == (0, [0])
    assert set(objects(small)) - set(before) == {done.json["tombstone"]}
    again = cli(*arguments)
    assert (again.code, again.json["dropped"]) == (4, [])


def test_gc_frees_what_retain_gave_up(cli: Cli, small: Path) -> None:
    cli("retain", "--lake", small, "--keep-versions", 1)
    soon = cli("gc", "--lake", small, "--json")
    assert (soon.code, soon.json["waiting"]) == (4, {"retired less than the grace ago": 2})
    before = objects(small)
    plan = cli("gc", "--lake", small, "--grace", "0s", "--dry-run", "--json")
    assert (plan.code, plan.json["deleted"]) == (0, {"retired_data": 2})
    assert objects(small) == before
    done = cli("gc", "--lake", small, "--grace", "0s", "--json")
    assert (done.code, done.json["deleted"], done.json["nbytes"]) == (
        0,
        {"retired_data": 2},
        plan.json["nbytes"],
    )
    assert sum(before.values()) - sum(objects(small).values()) == done.json["nbytes"]
    assert cli("fsck", "--lake", small, "--level", 2).code == 0


def test_fsck_says_what_is_damaged_and_hides_it_when_told(cli: Cli, small: Path) -> None:
    assert cli("fsck", "--lake", small, "--level", 2, "--json").json["ok"] is True
    path = next(small.glob("data/v=000000001/*/final/c/0/0"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert cli("fsck", "--lake", small).code == 0
    found = cli("fsck", "--lake", small, "--level", 1, "--json")
    assert (found.code, found.json["ok"]) == (1, False)
    assert set(found.json["counts"]) == {"wrong_index", "wrong_length"}
    before = objects(small)
    asked = cli("fsck", "--lake", small, "--level", 1, "--quarantine", "--dry-run", "--json")
    assert (asked.code, len(asked.json["quarantined"])) == (1, 1)
    assert objects(small) == before
    hidden = cli("fsck", "--lake", small, "--level", 1, "--quarantine", "--json")
    assert (hidden.code, hidden.json["quarantined"]) == (0, asked.json["quarantined"])
    assert set(Catalog.load(Lake.open(str(small))).frame["target_version"]) == {0, 2}
    path.write_bytes(whole)
    released = cli("fsck", "--lake", small, "--level", 2, "--release", "--json")
    assert (released.code, released.json["released"]) == (0, asked.json["quarantined"])
    assert set(Catalog.load(Lake.open(str(small))).frame["target_version"]) == {0, 1, 2}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("retain",), "retention needs a limit"),
        (("retain", "--max-age", "soon"), "is no time"),
        (("retain", "--max-bytes", "5GB"), "is no size"),
        (("retain", "--max-age", "99999999999d"), "is longer than any time"),
        (("retain", "--max-age", "9" * 400 + "d"), "is longer than any time"),
        (("retain", "--max-bytes", "9" * 400), "is larger than any size"),
        (("gc", "--grace", "99999999999d"), "is longer than any time"),
        (("compact", "--grace-hours", "inf"), "--grace-hours"),
        (("compact", "--grace-hours", "1e300"), "--grace-hours"),
        (("ls", "--version", "1"), "--samples"),
        (("explain", "--min-reward", "nan"), "min_reward is no number"),
        (("gc", "--grace", "-1h"), "is no time"),
        (("fsck", "--release"), "--release trusts checksums only"),
        (("fsck", "--level", "3"), "--level"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    cli: Cli, small: Path, arguments: tuple[str, ...], expected: str
) -> None:
    before = objects(small)
    outcome = cli(*arguments, "--lake", small)
    assert outcome.code == 2
    assert expected in " ".join(outcome.err.replace("│", " ").split())
    assert objects(small) == before


def test_a_registered_draft_keeps_the_revision_it_was_trained_on(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake.open(str(small))
    catalog = Catalog.load(lake)
    pinned = catalog.pin(lake)

    class Manifest:
        lake_revision = pinned.digest

    class OneDraft:
        def __init__(self, *_arguments: object) -> None:
            pass

        def digests(self) -> tuple[str, ...]:
            return ("d" * 64,)

        def manifest(self, _digest: str) -> Manifest:
            return Manifest()

    monkeypatch.setattr(housekeeping, "Registry", OneDraft)
    assert housekeeping.draft_needs(lake, catalog) == (
        (Need("draft dddddddddddd", frozenset(catalog.commit_paths)),),
        0,
    )
    policy = RetentionPolicy(keep_versions=1, max_pin_age=timedelta(0))
    ctx = RunContext(now=lambda: datetime.now(UTC) + timedelta(days=9))
    kept = housekeeping.retain(str(small), policy, ctx, reason="test")
    assert kept.empty
    assert kept.versions[-1].needed_by == ("draft dddddddddddd", f"pinned revision {pinned.digest[:12]}")
    forced = housekeeping.retain(str(small), policy, ctx, reason="test", force=True)
    assert forced.dropped == (1, 0)
    later = RunContext(now=lambda: datetime.now(UTC) + timedelta(days=10))
    assert housekeeping.collect_garbage(str(small), GcPolicy(), later).deleted == {"retired_data": 2}
