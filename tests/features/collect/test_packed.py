"""Sharded packed batches against the unsharded truth: the layout algebra, and the gathers over real processes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from features.collect.shards import PackedRows, RankShape, StageLayout
from features.errors import InputError

HERE = Path(__file__).parent
TIMEOUT_S = 180


def _ranks_module() -> ModuleType:
    sys.path.insert(0, str(HERE))
    try:
        import packed_ranks
    finally:
        sys.path.remove(str(HERE))
    return packed_ranks


ranks = _ranks_module()


@pytest.fixture(scope="module")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What four gloo processes wrote, layout by layout."""
    out = tmp_path_factory.mktemp("ranks")
    path = os.pathsep.join([str(HERE.parents[2]), *sys.path])
    children = [
        subprocess.Popen(
            [sys.executable, str(HERE / "packed_ranks.py"), str(out)],
            env={**os.environ, "RANK": str(rank), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(ranks.WORLD)
    ]
    try:
        assert [child.wait(timeout=TIMEOUT_S) for child in children] == [0] * ranks.WORLD
        yield out
    finally:
        for child in children:
            child.kill()


def _truth(tokens: list[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Streams by layer id and final rows of one sequence alone, in one process."""
    model = ranks.TokenModel().to(dtype)
    stream = model.embedded(torch.tensor(tokens), torch.arange(len(tokens)))
    streams = [stream]
    for block in model.blocks:
        streams.append(block(streams[-1]))
    return torch.cat([streams[k] for k in ranks.LAYER_IDS], dim=-1), model.norm(streams[-1])


@pytest.mark.parametrize("layout", ranks.LAYOUTS, ids=lambda layout: layout.name)
def test_gathered_rows_are_those_of_a_plain_forward(layout: "ranks.Layout", gathered: Path) -> None:
    batches = torch.load(gathered / f"{layout.name}.pt", weights_only=True)
    # The same sums in another order of rows: a matrix product may round its last bit otherwise.
    close = {"rtol": 1e-6, "atol": 1e-6} if layout.dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    assert len(batches) == len(ranks.batches())
    for (aux, final), (tokens, _packed) in zip(batches, ranks.batches(), strict=True):
        truth = [_truth(sequence, layout.dtype) for sequence in reversed(tokens)]
        torch.testing.assert_close(aux, torch.cat([a[2:] for a, _ in truth]), **close)
        torch.testing.assert_close(final, torch.cat([f[2:] for _, f in truth]), **close)


@pytest.mark.parametrize("layout", ranks.LAYOUTS, ids=lambda layout: layout.name)
def test_every_rank_hears_of_a_missing_forward_and_of_another_plan(
    layout: "ranks.Layout", gathered: Path
) -> None:
    for number, expected in ((0, "forwards seen per layer id"), (1, "ranks planned different micro-batches")):
        told = [(gathered / f"{layout.name}.fault{number}.{rank}").read_text() for rank in range(ranks.WORLD)]
        assert all(expected in text for text in told), told


def test_a_vocabulary_parallel_head_is_joined_and_its_padding_cut(gathered: Path) -> None:
    head, whole = torch.load(gathered / "head.pt", weights_only=True)
    assert head.shape == (ranks.VOCAB, ranks.HIDDEN)
    assert torch.equal(head, whole[: ranks.VOCAB])


def test_zigzag_of_one_sequence() -> None:
    packed = PackedRows((7,), (8,))
    assert RankShape(cp_size=2, cp_rank=0).rows_held(packed).tolist() == [0, 1, 6, 7]
    assert RankShape(cp_size=2, cp_rank=1).rows_held(packed).tolist() == [2, 3, 4, 5]
    sharded = RankShape(cp_size=2, cp_rank=0, tp_size=2, tp_rank=1, sequence_parallel=True)
    assert sharded.rows_held(packed).tolist() == [6, 7]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    cp=st.integers(1, 4),
    tp=st.integers(1, 3),
    sequence_parallel=st.booleans(),
    data=st.data(),
)
def test_every_wanted_row_is_taken_from_exactly_one_rank(
    lengths: list[int], cp: int, tp: int, sequence_parallel: bool, data: st.DataObject
) -> None:
    multiple = 2 * cp * tp
    packed = PackedRows(tuple(lengths), tuple(-(-n // multiple) * multiple for n in lengths))
    everything = np.concatenate([packed.flat(i, 0, n) for i, n in enumerate(lengths)])
    wanted = np.array(data.draw(st.lists(st.sampled_from(everything.tolist()), unique=True)), np.int64)
    found = np.full(len(wanted), -1, np.int64)
    for cp_rank in range(cp):
        for tp_rank in range(tp):
            shape = RankShape(cp, cp_rank, tp, tp_rank, sequence_parallel)
            local, slots = shape.picks(packed, wanted)
            assert (found[slots] == -1).all()
            found[slots] = shape.rows_held(packed)[local]
    assert found.tolist() == wanted.tolist()


def test_stages_number_blocks_over_the_whole_model() -> None:
    stages = StageLayout.even(8, stages=2, chunks=2)
    assert stages.blocks == (((0, 1), (4, 5)), ((2, 3), (6, 7)))
    # Id 0 is block 0's input; id k is block k - 1's output.
    assert [stages.stage_of(k) for k in range(9)] == [0, 0, 0, 1, 1, 0, 0, 1, 1]
    assert stages.ids_of(0, (0, 2, 4, 6)) == (0, 2, 6)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: PackedRows.of_cu_seqlens([1, 5]), "start at 0"),
        (lambda: PackedRows.of_cu_seqlens([0, 5, 5]), "grow"),
        (lambda: PackedRows.of_cu_seqlens([0, 5], [0, 4]), "length <= padded length"),
        (lambda: PackedRows.of_cu_seqlens([0, 5], [0, 4, 8]), "length <= padded length"),
        (lambda: PackedRows((5,), (8,)).flat(0, 2, 6), "not within sequence 0"),
        (lambda: RankShape(cp_size=2, cp_rank=2), "rank < size"),
        (lambda: RankShape(cp_size=2).rows_held(PackedRows((6,), (6,))), "cannot be cut into 4"),
        (
            lambda: RankShape(tp_size=4, sequence_parallel=True).rows_held(PackedRows((6,), (6,))),
            "cannot be divided",
        ),
        (lambda: StageLayout((((0, 1),), ((1, 2),))), "exactly once"),
        (lambda: StageLayout.even(7, stages=2), "cannot be divided"),
    ],
)
def test_contradictions_are_refused(make: "object", told: str) -> None:
    with pytest.raises(InputError, match=told):
        make()  # type: ignore[operator]
