"""Telemetry: labelled acceptance intervals on the store."""

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from features.errors import CorruptDataError, InputError
from features.storage import Store
from publish.engines import AcceptanceCounters, EngineState
from publish.telemetry import AcceptanceInterval, measure_interval, pooled, read_telemetry, write_telemetry

NOON = datetime(2026, 3, 4, 12, tzinfo=UTC)
ZERO = AcceptanceCounters(drafts=0, draft_tokens=0, accepted=0, accepted_per_position=(0, 0, 0))
LATER = AcceptanceCounters(drafts=100, draft_tokens=300, accepted=150, accepted_per_position=(80, 50, 20))
STATE = EngineState(
    engine="http://127.0.0.1:8000",
    vllm_version="0.32.0",
    method="eagle3",
    num_speculative_tokens=3,
    draft_artifact=None,
    draft_fingerprint="f" * 64,
    draft_tensors=(),
    target_fingerprint="t" * 64,
    aliased=(),
    owns_lm_head=True,
    owns_embed_tokens=False,
    prepared=None,
)


def interval(
    before: AcceptanceCounters = ZERO,
    after: AcceptanceCounters = LATER,
    started_at: datetime = NOON,
    ended_at: datetime = NOON + timedelta(minutes=1),
) -> AcceptanceInterval:
    return measure_interval(
        before,
        after,
        state=STATE,
        target_id="org/tiny",
        target_version=None,
        started_at=started_at,
        ended_at=ended_at,
    )


def test_an_interval_is_the_difference_of_two_readings() -> None:
    row = interval(before=LATER, after=replace(LATER, drafts=110, accepted=155))
    assert (row.drafts, row.accepted, row.accepted_per_position) == (10, 5, (0, 0, 0))
    assert row.tau == 1.5


def test_counters_that_went_backwards_are_refused_as_a_restart() -> None:
    with pytest.raises(InputError, match="restarted between the readings"):
        interval(before=LATER, after=ZERO)


def test_readings_over_other_positions_are_refused() -> None:
    with pytest.raises(InputError, match="3 and 2 draft positions"):
        interval(after=replace(LATER, accepted_per_position=(80, 50)))


@pytest.mark.parametrize("ended_at", [NOON - timedelta(seconds=1), NOON.replace(tzinfo=None)])
def test_naive_or_reversed_times_are_refused(ended_at: datetime) -> None:
    with pytest.raises(InputError, match="two aware times in order"):
        interval(ended_at=ended_at)


def test_pooled_tau_is_a_ratio_of_sums() -> None:
    small = interval(after=AcceptanceCounters(1, 3, 3, (1, 1, 1)))
    assert pooled([interval(), small]).tau == 1 + 153 / 101
    assert pooled([interval(), small]).accepted_per_position == (81, 51, 21)
    assert math.isnan(interval(after=ZERO).tau)


def test_intervals_of_other_widths_cannot_be_pooled() -> None:
    narrow = interval(
        before=replace(ZERO, accepted_per_position=(0,)), after=AcceptanceCounters(1, 1, 1, (1,))
    )
    with pytest.raises(InputError, match="one number of draft positions"):
        pooled([interval(), narrow])
    with pytest.raises(InputError, match="one number of draft positions"):
        pooled([])


@pytest.mark.parametrize("where", ["folder", "memory"])
def test_what_is_written_reads_back_with_nulls_kept(tmp_path: Path, where: str) -> None:
    store = Store.open(str(tmp_path) if where == "folder" else f"memory://telemetry-{tmp_path.name}")
    rows = (interval(), replace(interval(), target_version=3, draft_artifact="a" * 64, label="after swap"))
    write_telemetry(store, rows)
    assert set(read_telemetry(store)) == set(rows)


def test_paths_name_the_engine_and_the_utc_day(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    evening = datetime(2026, 3, 4, 23, 30, tzinfo=timezone(timedelta(hours=-2)))
    rows = (interval(), interval(started_at=evening, ended_at=evening))
    paths = write_telemetry(store, rows)
    assert [path.split("/")[:3] for path in paths] == [
        ["telemetry", "http%3A%2F%2F127.0.0.1%3A8000", "2026-03-04"],
        ["telemetry", "http%3A%2F%2F127.0.0.1%3A8000", "2026-03-05"],
    ]
    assert tuple(store.list("telemetry")) == paths


def test_writing_the_same_intervals_again_adds_nothing(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    assert write_telemetry(store, [interval()]) == write_telemetry(store, [interval()])
    assert len(read_telemetry(store)) == 1


def test_one_engine_is_read_without_the_others_whose_names_begin_alike(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    write_telemetry(store, [replace(interval(), engine=name) for name in ("a", "ab")])
    assert [row.engine for row in read_telemetry(store, "a")] == ["a"]
    assert [row.engine for row in read_telemetry(store)] == ["a", "ab"]


def test_a_store_without_telemetry_reads_as_none(tmp_path: Path) -> None:
    assert read_telemetry(Store.open(str(tmp_path))) == ()


def test_a_truncated_file_is_refused_by_name(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    (path,) = write_telemetry(store, [interval()])
    file = tmp_path / path
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(CorruptDataError, match=path.split("/")[-1]):
        read_telemetry(store)


def test_a_newer_nullable_column_does_not_stop_an_older_reader(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    store = Store.open(str(tmp_path))
    (path,) = write_telemetry(store, [interval()])
    wider = pq.read_table(tmp_path / path).append_column("added_later", pa.array(["x"]))
    pq.write_table(wider, tmp_path / path)
    assert read_telemetry(store) == (interval(),)
