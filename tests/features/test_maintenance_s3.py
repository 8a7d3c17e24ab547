"""Compaction, pruning, gc, retention and quarantine on S3: each request goes wrong in turn, in each way, and
the process is killed before and after each. What a reader sees is the old state or the new one; a rerun
completes; fsck is clean or names exactly the orphan. ``make soak`` takes every job and request, ``make test``
a few."""

import itertools
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

from features.catalog import Catalog
from features.check import check_lake
from features.errors import DraftlakeError, LakeContractError
from features.lake import Lake
from features.schema import SelectionFilter
from features.testing_crash import kill_on_s3
from features.testing_s3 import PATIENCE, Fault, FaultKind, Request, ServedS3, impatient_clients

pytestmark = [pytest.mark.s3, pytest.mark.slow]

SOAK = "DRAFTLAKE_SOAK" in os.environ
FOR_EVER = 10_000

PREPARE = """
from datetime import UTC, datetime, timedelta
from features.catalog import Catalog
from features.check import check_lake, quarantine_damaged
from features.compaction import compact, plan_prune, prune
from features.gc import GcPolicy, apply_gc, plan_gc
from features.lake import Lake
from features.retention import RetentionPolicy, apply_retention, fragment_facts, pins, plan_retention
from features.schema import TargetVersion
from features.survey import survey
from features.testing import TINY_TARGET, commit_tiny, register_tiny_version, tiny_head, tiny_window
from features.writer import write_fragment

DAY, START = timedelta(days=1), datetime(2026, 1, 1, tzinfo=UTC)

def windows(version, *samples):
    return [tiny_window(tiny_head(version), version=version, sample=s, num_rows=5 + s) for s in samples]

def add(version, *samples):
    commit_tiny(lake, version, tiny_head(version).head_id, windows(version, *samples))

def stop(step):
    if step == "data/tokens.arrow":
        raise InterruptedError(step)

def retain(lake):
    now = datetime.now(UTC)
    facts = fragment_facts(lake, lake.store.scan("data"))
    policy = RetentionPolicy(keep_versions=1, max_pin_age=timedelta(0))
    plan = plan_retention(facts, policy, (), pins=pins(lake), now=now)
    apply_retention(lake, plan, now=now, reason="test")

lake = Lake.init(url, TINY_TARGET, **options)
for version in (0, 1):
    register_tiny_version(lake, version, tiny_head(version))
add(0, 0, 1)
compact(lake, now=lambda: START)
Catalog.load(lake).pin(lake)
add(0, 2)
add(1, 3)
try:
    write_fragment(
        lake, version=TargetVersion(1), head_id=tiny_head(1).head_id, plan_id="orphan", windows=windows(1, 9),
        writer_id="w", on_step=stop,
    )
except InterruptedError:
    pass
"""
"""Two versions, a snapshot and a tail, a pinned revision, and what a killed writer left."""
IMPORTS = PREPARE[: PREPARE.index("lake = Lake.init")] + "lake = Lake.open(url, **options)\n"


@dataclass(frozen=True)
class Job:
    """A run of maintenance: what it starts from, what it does, and how many windows it leaves."""

    act: str
    after: int
    before: int = 4
    prepare: str = PREPARE
    changes: int = 1
    """Requests that change the bucket, at least."""

    @property
    def source(self) -> str:
        return IMPORTS + self.act


JOBS = {
    "compact": Job(
        "compact(lake, now=lambda: START + DAY)\nprune(lake, plan_prune(lake, grace=DAY, now=START + 3 * DAY))\n",
        after=4, changes=7,
    ),
    "retain": Job("retain(lake)\n", after=1, changes=2),
    "gc": Job(
        "apply_gc(lake, plan_gc(survey(lake), GcPolicy(), now=datetime.now(UTC) + 3 * DAY))\n",
        before=1, after=1, prepare=PREPARE + "retain(lake)\n", changes=4,
    ),
    "quarantine": Job(
        "quarantine_damaged(lake, check_lake(lake, 2), START)\n", after=2,
        prepare=PREPARE + """
for row in Catalog.load(lake).frame.to_dicts():
    if row["sample_id"].endswith(("0002", "0003")):
        path = row["data_prefix"] + "/aux/c/0/0"
        whole = lake.store.read(path)
        lake.store.delete(path)
        lake.store.create(path, whole[:-1])
""", changes=2,
    ),
}  # fmt: skip
_names = itertools.count()


@pytest.fixture(scope="module")
def s3() -> Iterator[ServedS3]:
    with ServedS3() as server, impatient_clients():
        yield server


@pytest.fixture(scope="module")
def templates(s3: ServedS3) -> dict[str, str]:
    """A bucket for each job, as it starts."""
    made = {}
    for name, job in JOBS.items():
        made[name] = f"maintenance-template-{name}"
        exec(job.prepare, {"url": s3.make_bucket(made[name]), "options": s3.options()})
    return made


@pytest.fixture(scope="module")
def unharmed(s3: ServedS3, templates: dict[str, str]) -> dict[str, tuple[Request, ...]]:
    """What each job asks when nothing goes wrong."""
    asked = {}
    for name, job in JOBS.items():
        url = s3.copy_bucket(templates[name], f"maintenance-unharmed-{name}")
        s3.reset()
        run(job, url, s3.options(**PATIENCE))
        asked[name] = s3.requests
    return asked


def downloaded(s3: ServedS3, url: str, folder: Path) -> Lake:
    """The lake as it stands in the bucket, in a local folder: to look at it asks the server nothing."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    copy = folder / f"copy-{next(_names)}"
    for path, data in s3.objects(bucket, prefix).items():
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        (copy / path).write_bytes(data)
    return Lake.open(str(copy))


def run(job: Job, url: str, options: dict[str, Any]) -> None:
    exec(job.source, {"url": url, "options": options})


def readable(lake: Lake) -> set[str]:
    """Samples that a reader gets, each one checked to the last bit; what is damaged is left out."""
    found = set()
    for row in Catalog.load(lake).select(SelectionFilter()).rows:
        with suppress(LakeContractError):
            found.add(lake.read_window(row).meta.sample_id)
    return found


def judge(name: str, lake: Lake, where: object) -> None:
    """The old state or the new one, and nothing that fsck would not name."""
    job = JOBS[name]
    catalog = Catalog.load(lake)
    assert catalog.frame.height in range(job.after, job.before + 1), where
    if name != "quarantine":  # marks are made one by one, a version is given up at once
        assert catalog.frame.height in (job.before, job.after), where
        assert len(readable(lake)) == catalog.frame.height, where
    else:
        assert len(readable(lake)) == job.after, where
    findings = check_lake(lake, 1)
    harmful = {finding.code for finding in findings if finding.harmful}
    assert harmful <= ({"wrong_length", "wrong_index"} if name == "quarantine" else set()), where
    harmless = [finding for finding in findings if not finding.harmful and finding.code != "quarantined"]
    assert {finding.code for finding in harmless} <= {"orphan_data"}, where
    assert all("/orphan." in finding.path for finding in harmless), where


def judge_rerun(name: str, lake: Lake, where: object) -> None:
    assert len(readable(lake)) == Catalog.load(lake).frame.height == JOBS[name].after, where
    findings = check_lake(lake, 1)
    assert [finding for finding in findings if finding.harmful] == [], where
    match name:
        case "compact":
            assert lake.store.list("commits") == [], where
            # Of a superseded snapshot, the first one's marker stays.
            assert len(lake.store.list("snapshots")) == 4, where
        case "retain":
            assert lake.store.list("revisions") == [], where
        case "gc":
            assert findings == (), where
            assert all("v=000000001" in path for path in lake.store.list("data")), where
        case "quarantine":
            assert [f.code for f in findings if f.code != "orphan_data"] == ["quarantined"] * 2, where


def moments(name: str, kind: FaultKind, requests: tuple[Request, ...]) -> list[int]:
    """Requests that go wrong: in ``make soak`` each one that the fault can touch, else one, others by kind and job."""
    touched = [index for index, request in enumerate(requests) if kind.touches(request.kind)]
    assert touched
    place = 5 * list(FaultKind).index(kind) + 3 * list(JOBS).index(name)
    return touched if SOAK else [touched[place % len(touched)]]


LASTING = (FaultKind.UNAVAILABLE, FaultKind.LOST)
"""Faults that do not end either: nothing more is answered, or no answer arrives though all is done."""
# In `make test` each job meets half of the kinds.
CASES = [
    (name, kind)
    for n, name in enumerate(JOBS)
    for k, kind in enumerate(FaultKind)
    if SOAK or (n + k) % 2 == 0
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_fault_at_any_request_leaves_the_old_state_or_the_new_and_a_rerun_completes_it(
    s3: ServedS3,
    templates: dict[str, str],
    unharmed: dict[str, tuple[Request, ...]],
    tmp_path: Path,
    name: str,
    kind: FaultKind,
) -> None:
    for at in moments(name, kind, unharmed[name]):
        for count in (1, FOR_EVER) if SOAK and kind in LASTING else (FOR_EVER if kind in LASTING else 1,):
            url = s3.copy_bucket(templates[name], f"maintenance-fault-{next(_names)}")
            s3.inject(Fault(kind, at, count=count))
            with suppress(OSError, DraftlakeError):  # nothing is promised but what is judged below
                run(JOBS[name], url, s3.options(**PATIENCE))
            s3.reset()
            where = (name, kind, at, count)
            judge(name, downloaded(s3, url, tmp_path), where)
            run(JOBS[name], url, s3.options())
            judge_rerun(name, downloaded(s3, url, tmp_path), where)


@pytest.mark.parametrize("name", sorted(JOBS) if SOAK else ["gc"])
def test_maintenance_killed_at_any_request_leaves_the_old_state_or_the_new_and_a_rerun_completes_it(
    s3: ServedS3, tmp_path: Path, name: str
) -> None:
    job = JOBS[name]
    deaths = kill_on_s3(
        job.prepare, job.source, s3.make_bucket(f"killed-{next(_names)}"), s3.options(), tmp_path,
        every=SOAK, most=None if SOAK else 2,
    )  # fmt: skip
    assert len(deaths) >= (2 * job.changes if SOAK else 2)
    for moment, url in deaths:
        judge(name, downloaded(s3, url, tmp_path), (name, moment, url))
        run(job, url, s3.options())
        judge_rerun(name, downloaded(s3, url, tmp_path), (name, moment, url))


COMMIT = Job("add(1, 5, 6)\n", after=6)


def test_a_commit_killed_at_any_request_shows_all_or_nothing_and_a_rerun_completes_it(
    s3: ServedS3, tmp_path: Path
) -> None:
    deaths = kill_on_s3(
        COMMIT.prepare, COMMIT.source, s3.make_bucket(f"killed-{next(_names)}"), s3.options(), tmp_path,
        every=SOAK, most=None if SOAK else 3,
    )  # fmt: skip
    seen = []
    for moment, url in deaths:
        lake = downloaded(s3, url, tmp_path)
        seen.append(len(readable(lake)))
        assert {finding.code for finding in check_lake(lake, 1)} == {"orphan_data"}, moment
        run(COMMIT, url, s3.options())
        assert len(readable(downloaded(s3, url, tmp_path))) == COMMIT.after, moment
    # From one request on the fragment is there: that of its commit.
    assert seen == sorted(seen)
    assert set(seen) == {COMMIT.before, COMMIT.after}
