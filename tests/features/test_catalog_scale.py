"""A lake of a million windows in 16,000 commits, compacted: opened in a handful of requests, selected at once."""

import hashlib
import os
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from features.catalog import Catalog
from features.commits import CommitName
from features.compaction import compact, encode_rows, prune_commits
from features.lake import Lake
from features.schema import COMMIT_SCHEMA, SelectionFilter, Split, VersionRange
from features.snapshot_format import Covered, Part, Snapshot, encode_covered, encode_marker, marker_path
from features.snapshots import CATALOG_ORDER
from features.testing import TINY_TARGET, commit_tiny, register_tiny_version, tiny_head, tiny_window

pytestmark = pytest.mark.slow

WINDOWS, COMMITS, VERSIONS = 1_000_000, 16_000, 100
SELECT_LIMIT_S = 0.1
MAX_REQUESTS = 9
FILTERS = {
    "everything": SelectionFilter(),
    "ten versions": SelectionFilter(VersionRange(50, 60)),
    "train": SelectionFilter(split=Split.TRAIN),
    "held out, sampled": SelectionFilter(split=Split.HELD_OUT, max_windows=5000),
    "narrow": SelectionFilter(
        VersionRange(10),
        Split.TRAIN,
        domains=("code",),
        verified_only=True,
        min_reward=0.5,
        newest_versions=40,
    ),
}


class CountingStore:
    """Passes calls on and counts those that are requests to a bucket."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        self.requests += name in ("list", "read", "read_range", "exists", "size", "scan")
        return getattr(self._store, name)


def synthetic_rows() -> pl.DataFrame:
    rng = np.random.default_rng(0)
    commit = np.arange(WINDOWS) * COMMITS // WINDOWS
    version = np.arange(COMMITS) * VERSIONS // COMMITS
    plan = np.array([hashlib.sha256(str(i).encode()).hexdigest()[:32] for i in range(COMMITS)])
    head = np.array([hashlib.sha256(str(i).encode()).hexdigest() for i in range(VERSIONS)])
    prefix = np.array([f"data/v={v:09d}/{p}.{p[::-1]}" for v, p in zip(version, plan, strict=True)])
    constant: dict[str, Any] = {
        "schema_version": 1, "target_id": "tiny", "attempt": 0, "start": 0, "sequence_length": 600, "prompt_length": 50,
        "layer_ids": [2, 4, 5], "dtype": "bfloat16", "hidden_size": 16, "codec": "none", "logprob_kind": "engine_raw",
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "finish": "length", "write_uuid": "0" * 32,
    }  # fmt: skip
    varied: dict[str, Any] = {
        "target_version": version[commit], "head_id": head[version[commit]], "plan_id": plan[commit],
        "data_prefix": prefix[commit], "writer_id": np.array([f"w{i}" for i in range(8)])[commit % 8],
        "window_index": np.arange(WINDOWS) - np.searchsorted(commit, commit),
        "sample_id": np.char.add("rollout-", rng.permutation(WINDOWS).astype(str)),
        "group_id": np.char.add("g", rng.integers(0, WINDOWS // 8, WINDOWS).astype(str)),
        "domain": np.array(["code", "maths", "prose"])[rng.integers(0, 3, WINDOWS)],
        "verification": np.array(["verified", "unverified"])[rng.integers(0, 2, WINDOWS)],
    }  # fmt: skip
    known = pl.DataFrame(pl.from_arrow(COMMIT_SCHEMA.empty_table())).schema
    numbers = {name: rng.integers(100, 513, WINDOWS) for name in known if name not in constant | varied}
    numbers |= {"reward": rng.random(WINDOWS)}
    columns = [pl.lit(value, known[name]).alias(name) for name, value in constant.items()]
    frame = pl.DataFrame(varied | numbers).with_columns(columns)
    return frame.select(list(known)).cast(known).sort(CATALOG_ORDER)


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Commits, versions and heads stand as a snapshot has them; there are no features."""
    lake = Lake.init(str(tmp_path_factory.mktemp("large")), TINY_TARGET)
    frame = synthetic_rows()
    heads = dict(frame.select("target_version", "head_id").unique().rows())
    names = frame.select("target_version", "plan_id", "data_prefix").unique().rows()
    covered = {CommitName(version, plan, 0): Covered("kept", prefix) for version, plan, prefix in names}
    assert len(covered) == COMMITS
    objects = {"rows": encode_rows(frame), "commits": encode_covered(covered)}
    parts = {kind: Part.of(1, kind, data) for kind, data in objects.items()}
    for kind, part in parts.items():
        lake.store.create(part.path, objects[kind])
    for version, head in heads.items():
        lake.store.create(f"versions/v={version:09d}/version.json", b"")
        lake.store.create(f"blobs/{head}.safetensors", b"")
    now = datetime(2026, 1, 1, tzinfo=UTC)
    snapshot = Snapshot(1, None, now, "0" * 32, lake.target.target_id, WINDOWS, heads, **parts)
    lake.store.create(marker_path(1), encode_marker(snapshot))
    return lake


@pytest.fixture(scope="module")
def catalog(lake: Lake) -> Catalog:
    return Catalog.load(lake)


def test_it_opens_in_a_handful_of_requests(lake: Lake) -> None:
    store = CountingStore(lake.store)
    opened = Catalog.load(Lake(store, lake.target))  # type: ignore[arg-type]
    assert (opened.frame.height, opened.revision.num_fragments) == (WINDOWS, COMMITS)
    assert store.requests <= MAX_REQUESTS


@pytest.mark.parametrize("name", sorted(FILTERS))
def test_a_warm_select_takes_less_than_a_tenth_of_a_second(catalog: Catalog, name: str) -> None:
    assert_select_is_fast(catalog, FILTERS[name])


def assert_select_is_fast(catalog: Catalog, wanted: SelectionFilter) -> None:
    catalog.select(wanted)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        found = catalog.select(wanted)
        times.append(time.perf_counter() - start)
    assert len(found) == found.plan.windows > 1000
    # The best of seven: other work on the machine is no property of the code.
    assert min(times) < SELECT_LIMIT_S, times


def commit_for_real(lake: Lake, commits: int, windows: int) -> None:
    """So many fragments through the writer: small windows, each sample once, spread over the versions."""
    for version in range(VERSIONS):
        head = tiny_head(version)
        head_id = register_tiny_version(lake, version, head)
        made = [
            tiny_window(head, version=version, sample=sample, num_rows=3, prompt_length=1, reward=1.0)
            for sample in range(windows)
        ]
        for commit in range(version * commits // VERSIONS, (version + 1) * commits // VERSIONS):
            renamed = [
                replace(
                    window,
                    meta=replace(window.meta, sample_id=f"c{commit}-{n}", group_id=f"c{commit}-{n // 8}"),
                )
                for n, window in enumerate(made)
            ]
            commit_tiny(lake, version, head_id, renamed)


@pytest.mark.skipif("DRAFTLAKE_SOAK" not in os.environ, reason="writes 128,000 objects: DRAFTLAKE_SOAK=1")
def test_sixteen_thousand_real_commits_open_in_a_handful_of_requests_after_maintenance(
    tmp_path: Path,
) -> None:
    lake, windows = Lake.init(str(tmp_path), TINY_TARGET), 63
    commit_for_real(lake, COMMITS, windows)
    before = Catalog.load(lake).revision
    now = datetime.now(UTC)
    made = compact(lake, now=lambda: now)
    assert (made.outcome, made.new_commits) == ("written", COMMITS)
    pruned = prune_commits(lake, grace=timedelta(days=1), now=now + timedelta(days=2))
    assert len(pruned.commits) == COMMITS
    store = CountingStore(lake.store)
    opened = Catalog.load(Lake(store, lake.target))  # type: ignore[arg-type]
    assert store.requests <= MAX_REQUESTS
    assert (opened.revision, opened.frame.height) == (before, COMMITS * windows)
    for name in sorted(FILTERS):
        assert_select_is_fast(opened, FILTERS[name])
    for row in opened.select(SelectionFilter(max_windows=100)).rows:
        assert lake.read_window(row).meta.sample_id == row["sample_id"]
