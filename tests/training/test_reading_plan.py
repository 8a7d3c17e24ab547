"""Which rank reads which windows when: a pure function, so everything is checked without a lake."""

import itertools
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from features.errors import InputError
from features.schema import AuxCodec
from training.reading.plan import EpochPlan, buffer_shuffled, plan_epoch, streams
from training.reading.spec import Position, ReadSpec, decode_state, encode_state
from training.reading.table import WindowTable, cut_parts

KIB = 1024
SPEC = ReadSpec(batch_rows=64, order="random", part_bytes=8 * KIB, gap_bytes=KIB, buffer_bytes=32 * KIB)


def make_table(lengths: list[int], *, per_fragment: int = 8, row_bytes: int = 64) -> WindowTable:
    rows: list[dict[str, Any]] = []
    for place, length in enumerate(lengths):
        if place % per_fragment == 0:
            offset = 0
        rows.append({
            "data_prefix": f"data/{place // per_fragment:03d}", "row_offset": offset, "num_rows": length,
            "layer_ids": [1], "hidden_size": row_bytes // 4, "dtype": "bfloat16", "codec": AuxCodec.NONE,
        })  # fmt: skip
        offset += length
    return WindowTable.of(rows)


def plans_of(table: WindowTable, spec: ReadSpec, world_size: int, epoch: int = 0) -> list[EpochPlan]:
    return [
        plan_epoch(table, spec, epoch=epoch, rank=rank, world_size=world_size) for rank in range(world_size)
    ]


LENGTHS = np.random.default_rng(0).integers(4, 33, 300).tolist()


@given(
    lengths=st.lists(st.integers(1, 40), min_size=12, max_size=60),
    world_size=st.integers(1, 4),
    lanes=st.integers(1, 3),
    order=st.sampled_from(["random", "stream"]),
    padded=st.booleans(),
    batch_rows=st.integers(8, 120),
    epoch=st.integers(0, 3),
)
def test_ranks_take_equal_steps_and_share_no_window(
    lengths: list[int], world_size: int, lanes: int, order: Any, padded: bool, batch_rows: int, epoch: int
) -> None:
    spec = replace(SPEC, order=order, lanes=lanes, padded=padded, batch_rows=batch_rows)
    plans = plans_of(make_table(lengths), spec, world_size, epoch)
    assert len({len(plan.steps) for plan in plans}) == 1
    assert len({plan.dropped for plan in plans}) == 1
    read = Counter(index for plan in plans for step in plan.steps for index in step)
    read.update(plans[0].dropped)
    assert read == Counter(range(len(lengths))), "every window is read once, or named as left out"
    for plan in plans:
        assert all(len(step) > 0 for step in plan.steps)
        counted = [
            [max(lengths[i] for i in step) if padded else lengths[i] for i in step] for step in plan.steps
        ]
        assert all(len(step) == 1 or sum(step) <= batch_rows for step in counted)
    if order == "random":
        assert len(plans[0].dropped) < 2 * world_size * lanes


@pytest.mark.parametrize("order", ["random", "stream"])
def test_ranks_read_about_as_many_tokens(order: Any) -> None:
    plans = plans_of(make_table(LENGTHS), replace(SPEC, order=order), 4)
    tokens = [sum(LENGTHS[i] for step in plan.steps for i in step) for plan in plans]
    assert max(tokens) < 1.15 * min(tokens)
    assert plans[0].dropped == ()


@pytest.mark.parametrize("order", ["random", "stream"])
def test_padded_steps_hold_windows_of_similar_length(order: Any) -> None:
    spec = replace(SPEC, order=order, batch_rows=256)
    padding = {}
    for padded in (False, True):
        plan = plan_epoch(make_table(LENGTHS), replace(spec, padded=padded), epoch=0)
        assert sorted(i for step in plan.steps for i in step) == list(range(len(LENGTHS)))
        padding[padded] = sum(len(step) * max(LENGTHS[i] for i in step) for step in plan.steps) / sum(LENGTHS)
    assert padding[True] < 1.15 < 1.4 < padding[False]


def test_a_window_longer_than_a_padded_step_goes_alone() -> None:
    plan = plan_epoch(make_table([10, 500, 10]), replace(SPEC, padded=True), epoch=0)
    assert sorted(tuple(sorted(step)) for step in plan.steps) == [(0, 2), (1,)]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("order", ["random", "stream"])
def test_the_order_depends_on_seed_and_epoch_alone(order: Any, padded: bool) -> None:
    table, spec = make_table(LENGTHS), replace(SPEC, order=order, padded=padded)
    first = plan_epoch(table, spec, epoch=0)
    assert plan_epoch(table, spec, epoch=0) == first
    assert plan_epoch(table, spec, epoch=1) != first
    assert plan_epoch(table, replace(spec, seed=1), epoch=0) != first


def test_a_streamed_order_mixes_fragments_and_differs_from_storage() -> None:
    plan = plan_epoch(make_table(LENGTHS), replace(SPEC, order="stream"), epoch=0)
    fragments_per_step = [len({i // 8 for i in step}) for step in plan.steps]
    assert np.mean(fragments_per_step) > 2.0


def test_fewer_windows_than_lanes_are_refused_with_both_counts() -> None:
    with pytest.raises(InputError, match="3 windows cannot be read by 2 ranks with 2 lanes"):
        plan_epoch(make_table([5, 5, 5]), replace(SPEC, lanes=2), epoch=0, world_size=2)


def test_windows_that_no_round_can_hold_are_left_out_and_others_next_epoch() -> None:
    table, spec = make_table([64] * 11), replace(SPEC, batch_rows=64)
    left = [plans_of(table, spec, 4, epoch)[0].dropped for epoch in range(4)]
    assert all(len(dropped) == 3 for dropped in left)
    assert len(set(left)) > 1


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=80),
    buffer_rows=st.integers(1, 500),
    seed=st.integers(0, 5),
)
def test_a_shuffle_buffer_never_holds_more_than_its_bytes(
    lengths: list[int], buffer_rows: int, seed: int
) -> None:
    nbytes = np.array(lengths, np.int64)
    order = np.arange(len(lengths))
    out = buffer_shuffled(order, nbytes, buffer_rows, np.random.default_rng(seed))
    assert sorted(out.tolist()) == order.tolist()
    read_until, given_out = 0, set()
    for index in out.tolist():  # everything up to the window that is due was read, in order
        read_until = max(read_until, index + 1)
        held = sum(lengths[i] for i in range(read_until) if i not in given_out)
        assert held <= buffer_rows + lengths[read_until - 1]
        given_out.add(index)


@given(
    chosen=st.sets(st.integers(0, 39), min_size=1),
    part_rows=st.integers(1, 60),
    gap_rows=st.integers(0, 30),
)
def test_parts_are_neighbours_within_both_limits(chosen: set[int], part_rows: int, gap_rows: int) -> None:
    lengths = [3 + i % 7 for i in range(40)]
    table = make_table(lengths, per_fragment=10)
    members = np.array(sorted(chosen, key=lambda i: -i), np.int64)
    parts = cut_parts(table, members, part_bytes=64 * part_rows, gap_bytes=64 * gap_rows)
    assert [i for part in parts for i in part.tolist()] == sorted(chosen)
    for part in parts:
        first, last = int(part[0]), int(part[-1])
        assert table.fragment[first] == table.fragment[last]
        span = table.offset[last] + table.num_rows[last] - table.offset[first]
        assert len(part) == 1 or span <= part_rows
        holes = np.diff(table.offset[part]) - table.num_rows[part][:-1]
        assert (holes <= gap_rows).all()
    for left, right in itertools.pairwise(parts):  # no two parts could have been one
        a, b = int(left[-1]), int(right[0])
        hole = table.offset[b] - table.offset[a] - table.num_rows[a]
        span = table.offset[b] + table.num_rows[b] - table.offset[left[0]]
        assert table.fragment[a] != table.fragment[b] or hole > gap_rows or span > part_rows


def test_small_windows_are_streamed_and_large_ones_are_not() -> None:
    auto = replace(SPEC, order="auto")
    assert streams(make_table([512], row_bytes=4095), auto)
    assert not streams(make_table([512], row_bytes=4096), auto)


IDENTITY = {"selection": "abc", "world_size": 2, "seed": 0}


def test_a_state_is_small_json_and_gives_its_position_back() -> None:
    raw = json.dumps(encode_state(Position(3, 14), IDENTITY))
    assert len(raw) < 500
    assert decode_state(json.loads(raw), IDENTITY) == Position(3, 14)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"world_size": 4}, r"world_size 2 \(now 4\)"),
        ({"selection": "abd"}, r"selection 'abc' \(now 'abd'\)"),
        ({"lanes": 2}, r"lanes None \(now 2\)"),
    ],
)
def test_a_state_of_other_settings_is_refused_naming_them(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        decode_state(encode_state(Position(0, 5), IDENTITY), {**IDENTITY, **changed})


@pytest.mark.parametrize("state", [{}, {"format": 1}, {"format": 1, "reads": {}, "epoch": "x", "step": 0}])
def test_what_is_no_state_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="no reader state"):
        decode_state(state, IDENTITY)


def test_a_state_of_a_later_format_is_refused() -> None:
    with pytest.raises(InputError, match="format 2"):
        decode_state({**encode_state(Position(), IDENTITY), "format": 2}, IDENTITY)


@pytest.mark.parametrize(
    "wrong", [{"batch_rows": 0}, {"lanes": 0}, {"gap_bytes": -1}, {"seed": -1}, {"concurrency": -1}]
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ReadSpec(**wrong)  # type: ignore[arg-type]
