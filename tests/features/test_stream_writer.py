"""The stream writer: bounded, in the background, by size and by deadline, and nothing lost in silence."""

import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from features.catalog import Catalog
from features.errors import (
    InputError,
    LakeContractError,
    PlanConflictError,
    StreamClosedError,
    TargetMismatchError,
    UnknownVersionError,
    VersionConflictError,
)
from features.heads import HeadSnapshot
from features.lake import Lake
from features.schema import FragmentLayout, HeadId, SelectionFilter, TargetVersion
from features.stream_options import StreamOptions
from features.stream_writer import StreamWriter
from features.testing import TINY_LAYOUT, TINY_TARGET, register_tiny_version, tiny_head, tiny_window
from features.windows import Window

REPO = Path(__file__).resolve().parents[2]
SIZE = 12 * TINY_LAYOUT.hidden_size * 2 * 4
"""Feature bytes of a window of 12 rows: three aux ids and the final hidden state, bfloat16."""
PATIENT = StreamOptions(deadline_s=600.0)
LIMIT_S = 20.0


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = Lake.init(str(tmp_path / "lake"), TINY_TARGET)
    for number in range(2):
        register_tiny_version(lake, number, tiny_head(number))
    return lake


HEADS: dict[int, HeadSnapshot] = {number: tiny_head(number) for number in range(2)}


def head_id(number: int = 0) -> HeadId:
    return HEADS[number].head_id


def window(sample: int, version: int = 0, **changes: Any) -> Window:
    return tiny_window(HEADS[version], version=version, sample=sample, **changes)


def open_writer(lake: Lake, options: StreamOptions = PATIENT, **extra: Any) -> StreamWriter:
    return StreamWriter(lake, writer_id="test", sampling={"test": 1}, options=options, **extra)


def committed(lake: Lake) -> list[str]:
    """Sample ids a reader sees, each as often as it is selected."""
    return sorted(row["sample_id"] for row in Catalog.load(lake).select(SelectionFilter()).rows)


def until(condition: Callable[[], bool]) -> None:
    stop_at = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < stop_at, "it did not happen in time"
        time.sleep(0.01)


class Gate:
    """Storage that stands still until it is opened, as seen through ``on_step``."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()

    def __call__(self, step: str) -> None:
        self.reached.set()
        assert self.opened.wait(LIMIT_S)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


def test_everything_offered_is_committed_at_close_and_reads_back_bit_for_bit(lake: Lake) -> None:
    windows = [window(n, num_rows=8 + n) for n in range(5)]
    with open_writer(lake) as writer:
        assert all(writer.append(w, head_id=head_id()) for w in windows)
        assert committed(lake) == []
    report = writer.report()
    assert (report.windows, report.fragments, report.waiting, report.held_bytes) == (5, 1, 0, 0)
    assert (report.tokens, report.nbytes) == (50, sum(w.aux.nbytes + w.final.nbytes for w in windows))
    for row, expected in zip(Catalog.load(lake).select(SelectionFilter()).rows, windows, strict=True):
        found = lake.read_window(row)
        assert found.meta == expected.meta
        np.testing.assert_array_equal(found.aux, expected.aux)
        np.testing.assert_array_equal(found.final, expected.final)


def test_a_fragment_closes_at_its_size_without_waiting_for_the_deadline(lake: Lake) -> None:
    writer = open_writer(lake, replace(PATIENT, flush_bytes=2 * SIZE))
    for n in range(5):
        writer.append(window(n), head_id=head_id())
    until(lambda: writer.report().fragments == 2)
    assert writer.report().waiting == 1
    assert writer.close().fragments == 3


def test_a_fragment_closes_at_its_deadline_without_another_call(lake: Lake) -> None:
    with open_writer(lake, StreamOptions(deadline_s=0.05)) as writer:
        writer.append(window(0), head_id=head_id())
        until(lambda: committed(lake) != [])
        writer.append(window(1), head_id=head_id())
        until(lambda: len(committed(lake)) == 2)


def test_flush_returns_when_a_reader_sees_what_was_taken(lake: Lake) -> None:
    with open_writer(lake) as writer:
        for n in range(3):
            writer.append(window(n), head_id=head_id())
        assert writer.flush().windows == 3
        assert len(committed(lake)) == 3
        assert writer.flush().fragments == 1


def test_versions_and_layouts_never_share_a_fragment(lake: Lake) -> None:
    other = FragmentLayout(layer_ids=(1, 2), dtype=TINY_LAYOUT.dtype, hidden_size=16)
    with open_writer(lake) as writer:
        for n in range(2):
            writer.append(window(n), head_id=head_id())
            writer.append(window(n, version=1), head_id=head_id(1))
            writer.append(window(10 + n, layout=other), head_id=head_id())
    assert writer.report().fragments == 3
    frame = Catalog.load(lake).frame
    assert frame.height == 6
    assert frame.n_unique("data_prefix") == frame.n_unique(["target_version", "layer_ids"]) == 3


def test_the_callers_buffers_may_be_reused_at_once(lake: Lake) -> None:
    kept, offered = window(0), window(0)
    with open_writer(lake) as writer:
        writer.append(offered, head_id=head_id())
        for array in (offered.aux, offered.final, offered.token_ids, offered.logprobs):
            array[...] = 0
    (row,) = Catalog.load(lake).select(SelectionFilter()).rows
    np.testing.assert_array_equal(lake.read_window(row).aux, kept.aux)
    np.testing.assert_array_equal(lake.read_window(row).token_ids, kept.token_ids)


def test_a_full_writer_blocks_until_an_upload_makes_room(lake: Lake, gate: Gate) -> None:
    options = replace(PATIENT, max_bytes=2 * SIZE, flush_bytes=SIZE, num_uploads=1)
    writer = open_writer(lake, options, on_step=gate)
    writer.append(window(0), head_id=head_id())
    writer.append(window(1), head_id=head_id())
    third = threading.Thread(target=writer.append, args=(window(2),), kwargs={"head_id": head_id()})
    third.start()
    third.join(0.3)
    assert third.is_alive()
    gate.opened.set()
    third.join(LIMIT_S)
    report = writer.close()
    assert (report.windows, report.dropped) == (3, 0)
    assert report.blocked_s > 0.1
    assert report.most_held_bytes <= 2 * SIZE


def test_a_full_writer_drops_and_counts_when_told_to(lake: Lake, gate: Gate) -> None:
    options = StreamOptions(max_bytes=2 * SIZE, flush_bytes=SIZE, when_full="drop", num_uploads=1)
    writer = open_writer(lake, options, on_step=gate)
    taken = [writer.append(window(n), head_id=head_id()) for n in range(5)]
    assert taken == [True, True, False, False, False]
    gate.opened.set()
    report = writer.close()
    assert (report.windows, report.dropped, report.dropped_tokens, report.blocked_s) == (2, 3, 36, 0.0)
    assert report.most_held_bytes <= 2 * SIZE


def test_waiting_for_room_closes_open_fragments_of_any_size(lake: Lake) -> None:
    """Two versions fill the memory together; neither reaches its own size or deadline."""
    options = replace(PATIENT, max_bytes=3 * SIZE, flush_bytes=3 * SIZE)
    writer = open_writer(lake, options)

    def produce() -> None:
        for n in range(8):
            assert writer.append(window(n, version=n % 2), head_id=head_id(n % 2))

    producer = threading.Thread(target=produce, daemon=True)
    producer.start()
    producer.join(LIMIT_S)
    assert not producer.is_alive(), "it waits for room that nobody makes"
    assert writer.close().windows == 8
    assert writer.report().most_held_bytes <= 3 * SIZE


def test_a_dropped_window_closes_open_fragments_so_that_later_ones_find_room(lake: Lake) -> None:
    options = replace(PATIENT, max_bytes=3 * SIZE, flush_bytes=3 * SIZE, when_full="drop")
    with open_writer(lake, options) as writer:
        taken = [writer.append(window(n, version=n % 2), head_id=head_id(n % 2)) for n in range(4)]
        assert taken == [True, True, True, False]
        until(lambda: writer.report().held_bytes == 0)
        assert writer.append(window(3, version=1), head_id=head_id(1))
    assert writer.report().windows == 4


def test_many_producers_lose_and_double_nothing(lake: Lake) -> None:
    options = StreamOptions(max_bytes=6 * SIZE, flush_bytes=2 * SIZE, deadline_s=0.02, num_uploads=3)
    with open_writer(lake, options) as writer:

        def produce(first: int) -> None:
            for n in range(first, first + 15):
                writer.append(window(n), head_id=head_id())

        threads = [threading.Thread(target=produce, args=(100 * k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
    report = writer.report()
    assert (report.windows, report.duplicates, report.waiting) == (60, 0, 0)
    assert len(set(committed(lake))) == len(committed(lake)) == 60
    assert report.most_held_bytes <= 6 * SIZE


REFUSED: dict[str, tuple[type[Exception], Callable[[], Window], int]] = {
    "rows and tokens differ": (
        LakeContractError,
        lambda: replace(window(0), token_ids=window(0).token_ids[1:]),
        0,
    ),
    "another version's head": (VersionConflictError, lambda: window(0), 1),
    "unknown version": (
        UnknownVersionError,
        lambda: replace(window(0), meta=replace(window(0).meta, version=TargetVersion(9))),
        0,
    ),
    "foreign layer ids": (
        TargetMismatchError,
        lambda: window(0, layout=replace(TINY_LAYOUT, layer_ids=(2, 4, 9))),
        0,
    ),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_bad_window_is_refused_at_once_and_the_others_go_on(lake: Lake, name: str) -> None:
    error, make, head = REFUSED[name]
    with open_writer(lake) as writer:
        writer.append(window(1), head_id=head_id())
        with pytest.raises(error):
            writer.append(make(), head_id=head_id(head))
        writer.append(window(2), head_id=head_id())
    assert committed(lake) == ["v0-s0001", "v0-s0002"]


def test_a_window_larger_than_the_memory_is_refused_not_waited_for(lake: Lake) -> None:
    with (
        open_writer(lake, StreamOptions(max_bytes=SIZE, flush_bytes=SIZE)) as writer,
        pytest.raises(InputError, match="max_bytes"),
    ):
        writer.append(window(0, num_rows=13), head_id=head_id())


def test_a_window_offered_twice_is_written_once_and_counted(lake: Lake) -> None:
    with open_writer(lake) as writer:
        for _ in range(2):
            writer.append(window(0), head_id=head_id())
        assert writer.flush().repeated == 1
        writer.append(window(0), head_id=head_id())
    assert writer.report().duplicates == 1
    assert committed(lake) == ["v0-s0000"]


def test_one_sample_with_two_contents_is_refused(lake: Lake) -> None:
    with open_writer(lake) as writer:
        writer.append(window(0), head_id=head_id())
        with pytest.raises(LakeContractError, match="offered before"):
            writer.append(window(0, seed=5), head_id=head_id())
    assert committed(lake) == ["v0-s0000"]


def test_a_failed_upload_surfaces_at_the_next_call_and_gives_the_windows_back(lake: Lake) -> None:
    def broken(step: str) -> None:
        raise OSError("no space left")

    writer = open_writer(lake, replace(PATIENT, flush_bytes=SIZE), on_step=broken)
    writer.append(window(0), head_id=head_id())
    until(lambda: writer._error is not None)
    for call in (lambda: writer.append(window(1), head_id=head_id()), writer.flush, writer.close):
        with pytest.raises(OSError, match="no space left"):
            call()
    assert writer.report().waiting == 1
    with open_writer(lake) as another:
        for left in writer.uncommitted:
            another.append(left, head_id=head_id())
    assert committed(lake) == ["v0-s0000"]


def test_an_error_wakes_a_call_that_waits_for_room(lake: Lake, gate: Gate) -> None:
    def breaks_when_opened(step: str) -> None:
        gate(step)
        raise OSError("gone")

    options = replace(PATIENT, max_bytes=SIZE, flush_bytes=SIZE)
    writer = open_writer(lake, options, on_step=breaks_when_opened)
    writer.append(window(0), head_id=head_id())
    threading.Timer(0.2, gate.opened.set).start()
    with pytest.raises(OSError, match="gone"):
        writer.append(window(1), head_id=head_id())


def test_a_conflict_in_the_lake_surfaces_and_the_first_stays(lake: Lake) -> None:
    with open_writer(lake) as writer:
        writer.append(window(0), head_id=head_id())
    with pytest.raises(PlanConflictError), open_writer(lake) as writer:
        writer.append(window(0, seed=5), head_id=head_id())
    (row,) = Catalog.load(lake).select(SelectionFilter()).rows
    np.testing.assert_array_equal(lake.read_window(row).token_ids, window(0).token_ids)


def test_an_error_of_the_callback_surfaces_and_the_fragment_counts_as_committed(lake: Lake) -> None:
    def refuse(result: Any) -> None:
        raise RuntimeError(f"callback refuses {result.windows}")

    writer = open_writer(lake, on_commit=refuse)
    writer.append(window(0), head_id=head_id())
    with pytest.raises(RuntimeError, match="refuses 1"):
        writer.close()
    assert (writer.report().windows, writer.uncommitted) == (1, ())


def test_a_closed_writer_takes_nothing_and_closes_again(lake: Lake) -> None:
    writer = open_writer(lake)
    writer.append(window(0), head_id=head_id())
    assert writer.close() == writer.close()
    with pytest.raises(StreamClosedError):
        writer.append(window(1), head_id=head_id())
    assert not any(thread.is_alive() for thread in writer._threads)


def test_stop_ends_a_call_that_waits_and_close_commits_the_rest(lake: Lake, gate: Gate) -> None:
    options = replace(PATIENT, max_bytes=SIZE, flush_bytes=SIZE)
    writer = open_writer(lake, options, on_step=gate)
    writer.append(window(0), head_id=head_id())
    threading.Timer(0.2, writer.stop).start()
    with pytest.raises(StreamClosedError):
        writer.append(window(1), head_id=head_id())
    gate.opened.set()
    assert writer.close().windows == 1


def test_close_with_a_limit_says_what_is_left_and_can_be_called_again(lake: Lake, gate: Gate) -> None:
    writer = open_writer(lake, on_step=gate)
    writer.append(window(0), head_id=head_id())
    with pytest.raises(TimeoutError, match="1 windows"):
        writer.close(timeout_s=0.1)
    gate.opened.set()
    assert writer.close().windows == 1


def test_an_exception_in_the_block_is_not_hidden_and_what_was_taken_is_committed(lake: Lake) -> None:
    def use() -> None:
        with open_writer(lake) as writer:
            writer.append(window(0), head_id=head_id())
            raise KeyError("of the producer")

    with pytest.raises(KeyError, match="of the producer"):
        use()
    assert committed(lake) == ["v0-s0000"]


def test_memory_stays_bounded_however_much_is_offered(tmp_path: Path, gate: Gate) -> None:
    """Eight times ``max_bytes`` through a storage that stands still at first."""
    target = replace(TINY_TARGET, hidden_size=256)
    head, layout = tiny_head(target=target), replace(TINY_LAYOUT, hidden_size=256)
    lake = Lake.init(str(tmp_path / "wide"), target)
    register_tiny_version(lake, 0, head)
    offered = tiny_window(head, num_rows=128, layout=layout)
    size = offered.aux.nbytes + offered.final.nbytes
    options = replace(PATIENT, max_bytes=16 * size, flush_bytes=4 * size, num_uploads=1)
    tracemalloc.start()
    try:
        with open_writer(lake, options, on_step=gate) as writer:
            threading.Timer(0.2, gate.opened.set).start()
            for n in range(8 * 16):
                meta = replace(offered.meta, sample_id=f"s{n}")
                writer.append(replace(offered, meta=meta), head_id=head.head_id)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert writer.report().windows == 8 * 16
    # What may be held, the window being taken, and one fragment's aux (3/4 of it) being encoded
    # and handed to storage; the rest is Parquet, tokens and Python.
    assert peak < (16 + 1 + 3 * 4) * size + (4 << 20)


@pytest.mark.s3
def test_a_stream_reaches_s3_from_its_own_threads_and_survives_busy_answers() -> None:
    pytest.importorskip("s3fs")
    testing_s3 = pytest.importorskip("features.testing_s3")
    with testing_s3.ServedS3() as server:
        lake = Lake.init(f"{server.make_bucket('stream')}/lake", TINY_TARGET, **server.options())
        register_tiny_version(lake, 0, HEADS[0])
        options = StreamOptions(flush_bytes=3 * SIZE, deadline_s=600.0)
        server.reset()
        server.inject(*(testing_s3.Fault(testing_s3.FaultKind.UNAVAILABLE, at=at) for at in (2, 9)))
        with open_writer(lake, options) as writer:
            for n in range(7):
                writer.append(window(n), head_id=head_id())
        assert sum(request.fault is not None for request in server.requests) == 2
        assert writer.report().windows == 7
        assert writer.report().fragments == 3
        assert len(committed(lake)) == 7


@pytest.mark.parametrize(
    "wrong",
    [
        {"flush_bytes": 0},
        {"flush_bytes": 2, "max_bytes": 1},
        {"deadline_s": 0},
        {"num_uploads": 0},
        {"when_full": "x"},
    ],
)
def test_options_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        StreamOptions(**wrong)


CHILD = """
import signal, sys
from features.errors import StreamClosedError
from features.lake import Lake
from features.stream_options import StreamOptions
from features.stream_writer import StreamWriter
from features.testing import tiny_head, tiny_window

lake, way = Lake.open(sys.argv[1]), sys.argv[2]
head = tiny_head()
options = StreamOptions(max_bytes=40_000, flush_bytes=10_000, deadline_s=600.0)
writer = StreamWriter(lake, writer_id="child", sampling={}, options=options)
handler = (lambda *_: writer.stop()) if way == "stop" else (lambda *_: sys.exit(143))
signal.signal(signal.SIGTERM, handler)
taken = 0
try:
    with writer:
        while not writer.stopping:
            window = tiny_window(head, sample=taken)
            try:
                writer.append(window, head_id=head.head_id)
            except StreamClosedError:
                break
            taken += 1
            print(taken, flush=True)
finally:
    print("windows", writer.report().windows, writer.report().waiting, flush=True)
"""


@pytest.mark.parametrize("way", ["stop", "exit"])
def test_a_terminated_process_commits_every_window_it_took(lake: Lake, way: str) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, lake.url, way], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert child.stdout is not None
    taken = 0
    for line in child.stdout:
        if line.startswith("windows"):
            windows, waiting = map(int, line.split()[1:])
            break
        taken = int(line)
        if taken == 25:
            child.send_signal(signal.SIGTERM)
    assert child.wait(LIMIT_S) == (0 if way == "stop" else 143)
    assert waiting == 0
    # The signal may arrive between taking a window and saying so.
    assert windows - taken in (0, 1)
    assert len(set(committed(lake))) == len(committed(lake)) == windows
