"""Channels: compare-and-swap by creation, under real contention."""

import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from features.errors import CorruptDataError, InputError, ObjectExistsError, RegistryConflictError
from features.storage import LocalStore, Store
from publish.channels import Channel, ChannelEntry, derive_state, path_segment, rollback_target
from publish.evidence import Decision
from publish.registry import Registry
from publish.testing import TARGET_ID, write_artifact

REPO = Path(__file__).resolve().parents[2]
NOON = datetime(2026, 3, 4, 12, tzinfo=UTC)
A, B, C = "a" * 64, "b" * 64, "c" * 64


def open_channel(store: Store) -> Channel:
    return Channel(store, target_id=TARGET_ID, method="eagle3", channel="production", admit=lambda *_: None)


def advance(channel: Channel, seq: int, artifact: str = A, by: str = "ada", **more: Any) -> ChannelEntry:
    fields = {"action": "publish", "reason": "better", "at": NOON} | more
    return channel.advance(expected_seq=seq, artifact=artifact, by=by, **fields)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "lake"))


@pytest.fixture
def channel(store: Store) -> Channel:
    return open_channel(store)


def test_an_empty_channel_has_no_head(channel: Channel) -> None:
    assert channel.head() is None
    assert channel.history() == ()


def test_entries_are_numbered_from_one_and_name_what_was_before(channel: Channel, store: Store) -> None:
    first, second = advance(channel, 0, A), advance(channel, 1, B)
    assert channel.history() == (first, second)
    assert channel.head() == second
    assert [(e.seq, e.artifact, e.previous) for e in (first, second)] == [(1, A, None), (2, B, A)]
    assert store.list("registry/channels") == [
        "registry/channels/org%2Ftiny/eagle3/production/000000001.json",
        "registry/channels/org%2Ftiny/eagle3/production/000000002.json",
    ]


def test_times_are_kept_in_utc_and_naive_ones_refused(channel: Channel) -> None:
    entry = advance(channel, 0, at=NOON.astimezone(timezone(timedelta(hours=5))))
    assert entry.at == NOON
    assert entry.at.utcoffset() == timedelta(0)
    with pytest.raises(ValueError, match="timezone"):
        advance(channel, 1, B, at=NOON.replace(tzinfo=None))


@pytest.mark.parametrize("words", [{"by": ""}, {"reason": "  "}, {"action": "delete"}])
def test_an_entry_says_who_why_and_what(channel: Channel, words: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="ChannelEntry"):
        advance(channel, 0, **words)
    assert channel.head() is None


def test_the_loser_learns_who_won(channel: Channel) -> None:
    advance(channel, 0, A, by="grace")
    with pytest.raises(
        RegistryConflictError, match=r"entry 1 was taken by 'grace' .*publish of aaaaaaaaaaaa"
    ):
        advance(channel, 0, B, by="ada")
    assert [entry.artifact for entry in channel.history()] == [A]


def test_a_seq_beyond_the_head_makes_no_gap(channel: Channel) -> None:
    advance(channel, 0)
    with pytest.raises(InputError, match="is at entry 1; entry 5 was expected"):
        advance(channel, 5, B)


def test_running_the_same_request_again_returns_its_entry(channel: Channel) -> None:
    entry = advance(channel, 0, A, request_id="run-1")
    advance(channel, 1, B)
    assert advance(channel, 0, A, request_id="run-1") == entry
    with pytest.raises(RegistryConflictError):
        advance(channel, 0, A, request_id="run-2")
    assert len(channel.history()) == 2


def test_an_answer_lost_on_the_way_is_still_a_success(tmp_path: Path) -> None:
    class LossyStore(LocalStore):
        def create(self, path: str, data: bytes) -> None:
            super().create(path, data)
            raise ObjectExistsError(path)  # a client's own retry meets what its first try made

    entry = advance(open_channel(LossyStore(tmp_path)), 0)
    assert open_channel(Store.open(str(tmp_path))).history() == (entry,)


@pytest.mark.parametrize("seqs", [[1], [2]])
def test_a_missing_entry_is_refused(channel: Channel, tmp_path: Path, seqs: list[int]) -> None:
    for seq, artifact in enumerate((A, B, C)):
        advance(channel, seq, artifact)
    for path in (tmp_path / "lake").rglob("*.json"):
        if int(path.stem) in seqs:
            path.unlink()
    for read in (channel.head, channel.history):
        with pytest.raises(CorruptDataError, match=rf"entries \{seqs}"):
            read()


@pytest.mark.parametrize("content", ["{}", "{", '{"seq": 2}'])
def test_an_unreadable_entry_is_refused(channel: Channel, tmp_path: Path, content: str) -> None:
    advance(channel, 0)
    (path,) = (tmp_path / "lake").rglob("000000001.json")
    path.write_text(content)
    with pytest.raises(CorruptDataError, match="000000001"):
        channel.head()


def test_an_altered_ledger_is_refused(channel: Channel, tmp_path: Path) -> None:
    advance(channel, 0, A)
    advance(channel, 1, B)
    (path,) = (tmp_path / "lake").rglob("000000001.json")
    path.write_text(path.read_text().replace(A, C))
    with pytest.raises(CorruptDataError, match="ledger was altered"):
        channel.history()


def test_an_entry_moved_from_another_channel_is_refused(channel: Channel, tmp_path: Path) -> None:
    advance(channel, 0)
    (path,) = (tmp_path / "lake").rglob("000000001.json")
    path.write_text(path.read_text().replace('"eagle3"', '"dflash"'))
    with pytest.raises(CorruptDataError, match="dflash"):
        channel.head()


def test_leftovers_of_a_killed_writer_are_not_entries(channel: Channel, tmp_path: Path) -> None:
    advance(channel, 0)
    (path,) = (tmp_path / "lake").rglob("000000001.json")
    (path.parent / ".000000002.json.0123.partial").write_bytes(b"{")
    (path.parent / "notes.txt").write_bytes(b"")
    assert len(channel.history()) == 1


def test_channels_whose_names_begin_alike_are_apart(store: Store) -> None:
    advance(open_channel(store), 0)
    longer = Channel(
        store, target_id=TARGET_ID, method="eagle3", channel="production-eu", admit=lambda *_: None
    )
    assert longer.head() is None


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_a_name_that_would_leave_its_folder_is_refused(name: str) -> None:
    with pytest.raises(InputError):
        path_segment(name)
    assert "/" not in path_segment("../x/y")


@pytest.mark.parametrize("url", ["folder", "memory"])
def test_of_many_threads_exactly_one_wins_each_seq(tmp_path: Path, url: str) -> None:
    store = Store.open(str(tmp_path) if url == "folder" else f"memory://channels-{tmp_path.name}")
    num_threads, num_seqs = 8, 5
    barrier = threading.Barrier(num_threads)
    wins: list[tuple[int, str]] = []
    losses: list[tuple[int, str]] = []

    def race(name: str) -> None:
        channel = open_channel(store)
        for seq in range(num_seqs):
            barrier.wait(timeout=30)
            try:
                wins.append((advance(channel, seq, A if seq % 2 else B, by=name).seq, name))
            except RegistryConflictError as error:
                losses.append((seq + 1, str(error)))

    threads = [threading.Thread(target=race, args=(f"thread-{i}",)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    history = open_channel(store).history()
    assert sorted(wins) == [(entry.seq, entry.by) for entry in history]
    assert len(history) == num_seqs
    assert len(losses) == num_seqs * (num_threads - 1)
    winner = {entry.seq: entry.by for entry in history}
    assert all(f"{winner[seq]!r}" in message for seq, message in losses)


RACING_PROCESS = """
    import json, sys
    from datetime import datetime, timezone
    from features.errors import RegistryConflictError
    from features.storage import Store
    from publish.registry import Registry
    from publish.testing import TARGET_ID

    root, name, last, *artifacts = sys.argv[1:]
    channel = Registry(Store.open(root), TARGET_ID).channel("eagle3")
    wins, conflicts = [], 0
    print("ready", flush=True)
    sys.stdin.readline()
    while True:
        head = channel.head()
        seq = head.seq if head else 0
        if seq >= int(last):
            break
        artifact = next(a for a in artifacts if head is None or a != head.artifact)
        try:
            entry = channel.advance(expected_seq=seq, artifact=artifact, action="publish", reason="race",
                                    by=name, at=datetime.now(timezone.utc))
            wins.append(entry.seq)
        except RegistryConflictError as error:
            conflicts += 1
            assert "was taken by" in str(error)
    print(json.dumps([wins, conflicts]))
"""


def test_of_many_processes_exactly_one_wins_each_seq(tmp_path: Path) -> None:
    root, last, names = tmp_path / "lake", 24, [f"process-{i}" for i in range(4)]
    registry = Registry(Store.open(str(root)), TARGET_ID)
    artifacts = [
        registry.import_artifact(write_artifact(tmp_path / str(seed), seed=seed)) for seed in range(2)
    ]
    for digest in artifacts:
        registry.approve(digest, reviewer="ada", reason="race", at=NOON, force=True)
    environment = os.environ | {"PYTHONPATH": str(REPO), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(RACING_PROCESS), str(root), name, str(last), *artifacts],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    history = registry.channel("eagle3").history()
    assert [entry.seq for entry in history] == list(range(1, last + 1))
    claimed = sorted((seq, name) for name, (wins, _) in zip(names, outputs, strict=True) for seq in wins)
    assert claimed == [(entry.seq, entry.by) for entry in history]
    assert sum(conflicts for _, conflicts in outputs) > 0, "the processes never met: the test shows nothing"


def ledger(*moves: tuple[str, str]) -> Sequence[ChannelEntry]:
    return [
        ChannelEntry.model_validate(
            {
                "seq": seq,
                "target_id": TARGET_ID,
                "method": "eagle3",
                "channel": "production",
                "artifact": artifact,
                "previous": None,
                "action": action,
                "reason": "r",
                "by": "b",
                "at": NOON,
                "request_id": str(seq),
            }
        )
        for seq, (action, artifact) in enumerate(moves, start=1)
    ]


@pytest.mark.parametrize(
    ("moves", "target"),
    [
        ([], None),
        ([("publish", A)], None),
        ([("publish", A), ("publish", B)], A),
        ([("publish", A), ("publish", B), ("publish", C)], B),
        ([("publish", A), ("publish", B), ("publish", C), ("rollback", B)], A),
        ([("publish", A), ("publish", B), ("rollback", A)], None),
        ([("publish", A), ("publish", B), ("rollback", A), ("publish", C)], A),
        ([("publish", A), ("publish", B), ("publish", C), ("rollback", A)], None),
        ([("publish", A), ("publish", B), ("publish", A)], B),
    ],
)
def test_rolling_back_goes_back_and_not_forth(moves: list[tuple[str, str]], target: str | None) -> None:
    found = rollback_target(ledger(*moves))
    assert (found.artifact if found else None) == target


def decision(word: Any, minute: int) -> Decision:
    return Decision(decision=word, reviewer="ada", reason="r", at=NOON + timedelta(minutes=minute))


@pytest.mark.parametrize(
    ("decisions", "moves", "state"),
    [
        ([], [], "candidate"),
        ([("approve", 0)], [], "approved"),
        ([("approve", 0), ("reject", 1)], [], "rejected"),
        ([("reject", 0), ("approve", 1)], [], "approved"),
        ([("approve", 0), ("reject", 0)], [], "rejected"),
        ([("approve", 0)], [("publish", A)], "production"),
        ([("approve", 0), ("reject", 1)], [("publish", A)], "production"),
        ([("approve", 0)], [("publish", A), ("publish", B)], "retired"),
        ([("approve", 0), ("reject", 1)], [("publish", A), ("publish", B)], "rejected"),
        ([("approve", 0)], [("publish", A), ("publish", B), ("rollback", A)], "production"),
    ],
)
def test_state_follows_from_decisions_and_ledger_in_any_order(
    decisions: list[tuple[str, int]], moves: list[tuple[str, str]], state: str
) -> None:
    documents = [decision(word, minute) for word, minute in decisions]
    for order in (documents, documents[::-1]):
        assert derive_state(A, order, ledger(*moves)) == state
