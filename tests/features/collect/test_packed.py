"""Sharded packed batches against the unsharded truth: the layout algebra, and the gathers over real processes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from features.catalog import Catalog
from features.collect.live_batch import BatchLayout
from features.collect.shards import PackedRows, RankShape, StageLayout
from features.collect.taps import packed_live
from features.collect.taps.hf import aux_probe
from features.collect.taps.packed import Groups, PackedTap
from features.collect.taps.packed_head import gather_head
from features.errors import InputError, ProofFailedError
from features.lake import Lake
from features.schema import SelectionFilter, TargetVersion, Verification

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


@pytest.mark.parametrize("layout", ranks.LAYOUTS, ids=lambda layout: layout.name)
def test_gathered_rows_are_those_of_a_plain_forward(layout: "ranks.Layout", gathered: Path) -> None:
    batches = torch.load(gathered / f"{layout.name}.pt", weights_only=True)
    # The same sums in another order of rows: a matrix product may round its last bit otherwise.
    close = {"rtol": 1e-6, "atol": 1e-6} if layout.dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    assert len(batches) == len(ranks.batches())
    for (aux, final), (tokens, _packed) in zip(batches, ranks.batches(), strict=True):
        model = ranks.TokenModel().to(layout.dtype)
        truth = [ranks.truth(model, sequence) for sequence in reversed(tokens)]
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


@pytest.mark.parametrize("name", ["untied", "tied", "equal"])
def test_a_head_over_tensor_and_pipeline_ranks_is_whole_on_the_gathering_rank(
    gathered: Path, name: str
) -> None:
    found, expected, tied = json.loads((gathered / f"head.{name}").read_text())
    assert found == expected
    assert tied == (name != "untied")


def test_a_stage_that_gives_another_stages_weights_is_refused() -> None:
    with pytest.raises(InputError, match="the last stage gives the LM head"):
        gather_head(None, torch.zeros(4, 2), tensor_group=None, stage_group=None, vocab_size=4)


def test_a_sharded_trainer_collects_windows_that_equal_a_plain_forward(gathered: Path) -> None:
    lake, model = Lake.open(str(gathered / "lake")), ranks.TokenModel()
    windows = {
        row["sample_id"]: lake.read_window(row) for row in Catalog.load(lake).select(SelectionFilter()).rows
    }
    sequences = {
        f"s{number}-{i}": sequence
        for number, (tokens, _packed) in enumerate(ranks.batches())
        for i, sequence in enumerate(tokens)
    }
    assert set(windows) == set(sequences)
    for name, tokens in sequences.items():
        window, (aux, final) = windows[name], ranks.truth(model, tokens)
        rows = slice(window.meta.start, window.stop)
        assert window.num_rows == min(7, len(tokens))
        assert window.token_ids[:-1].tolist() == tokens[rows]
        assert (window.meta.verification, window.meta.version) == (Verification.VERIFIED, TargetVersion(3))
        # The same sums in another order of rows, as above.
        np.testing.assert_allclose(window.aux, aux.detach().numpy()[rows], rtol=1e-6, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(window.final, final.detach().numpy()[rows], rtol=1e-6, atol=1e-6)


def test_every_rank_hears_why_a_step_is_not_collected_and_its_windows_are_counted(gathered: Path) -> None:
    ends = [json.loads((gathered / f"live.{rank}").read_text()) for rank in range(ranks.WORLD)]
    for number, expected in enumerate(("gives a collector", "forwards seen per layer id", "", "", "")):
        assert all(expected in end["told"][number] for end in ends), ends
        assert bool(expected) == bool(ends[0]["told"][number])
    report = ends[0]["report"]
    assert [end["report"] for end in ends[1:]] == [None] * 3
    assert (report["windows"], report["verified"], report["abandoned_windows"]) == (5, 5, 5)
    assert (report["planned_windows"], report["repeated_sequences"], report["waiting"]) == (15, 5, 0)
    assert report["refused_windows"] == {"logprob_disagreement": 5}, (
        "rows of weights that are another version"
    )


def _tiny_llama() -> "transformers.LlamaForCausalLM":
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.2,
    ))  # fmt: skip


@pytest.mark.parametrize("shift", [0, 1])
def test_the_aux_probe_tells_blocks_that_are_numbered_wrong(shift: int) -> None:
    model, ids, tokens = _tiny_llama(), (1, 2, 3), [3, 1, 4, 1, 5, 9, 2, 6]
    blocks = {(number + shift) % 3: block for number, block in enumerate(model.model.layers)}
    tap = PackedTap(
        blocks, layer_ids=ids, stages=StageLayout.even(3), stage=0, rank_of=[RankShape()], groups=Groups(),
        final_norm=model.model.norm,
    )  # fmt: skip
    with tap.step([packed_live.whole_sequence(len(tokens))]) as gathered:
        model(input_ids=torch.tensor([tokens]), use_cache=False)
    tap.close()
    features = packed_live.probe_features(gathered[0])
    outcome = pytest.raises(ProofFailedError, match="layer id") if shift else nullcontext()
    with outcome:
        assert aux_probe(model, ids, tokens, tap=lambda *_: [features]).layer_ids == ids


def test_rows_behind_the_last_sequence_are_divided_like_one_of_their_own() -> None:
    layout = BatchLayout.packed([0, 8, 24], num_rows=32, lengths=[5, 13])
    assert packed_live.packed_rows(layout) == PackedRows((5, 13, 8), (8, 16, 8))
    with pytest.raises(InputError, match="packed batches"):
        packed_live.packed_rows(BatchLayout.right_padded([3], width=4))


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
        (lambda: PackedRows((), ()), "length <= padded length"),
        (lambda: PackedRows((0,), (4,)), "length <= padded length"),
        (lambda: PackedRows((5,), (4,)), "length <= padded length"),
        (lambda: PackedRows((5,), (5, 4)), "length <= padded length"),
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
