"""One rank of a sharded trainer over gloo: run by test_packed.py as its own process.

The model's blocks work on each token alone, so that every rank can compute just the rows that
it holds; where those rows are is what the test is about.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from features.collect.live import LiveBatch, LiveCollector
from features.collect.proofs import LogprobTolerance
from features.collect.sampling import SamplingPolicy
from features.collect.shards import PackedRows, RankShape, StageLayout
from features.collect.taps.packed import Groups, MicroBatch, PackedTap, gather_vocabulary_rows
from features.collect.taps.packed_head import gather_head
from features.collect.taps.packed_live import collecting
from features.errors import DraftlakeError
from features.heads import HeadSnapshot
from features.lake import Lake
from features.schema import FeatureDtype, FragmentLayout, TargetIdentity, TargetVersion, VersionRecord

HIDDEN, LAYERS, VOCAB, WORLD = 8, 4, 50, 4
LAYER_IDS = (0, 2, 3, 4)


@dataclass(frozen=True)
class Layout:
    name: str
    cp: int = 1
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    sequence_parallel: bool = False
    recompute: bool = False
    dtype: torch.dtype = torch.float32


LAYOUTS = (
    Layout("cp4", cp=4),
    Layout("cp2_tp2", cp=2, tp=2),
    Layout("cp2_tp2_sp", cp=2, tp=2, sequence_parallel=True),
    Layout("pp2_tp2_sp_recompute", pp=2, tp=2, sequence_parallel=True, recompute=True),
    Layout("pp2_cp2_virtual", pp=2, cp=2, chunks=2),
    Layout("pp4", pp=4),
    Layout("cp2_tp2_sp_bf16", cp=2, tp=2, sequence_parallel=True, dtype=torch.bfloat16),
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, stream: Tensor) -> Tensor:
        return stream + torch.tanh(self.inner(stream))


class TokenModel(nn.Module):
    """Embedding of token and position, blocks, final norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed, self.place = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(64, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)

    def embedded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.embed(tokens) + self.place(positions)


def batches() -> list[tuple[list[list[int]], PackedRows]]:
    """Two micro-batches of sequences of unequal length, padded to multiples of 8."""
    rng, out = np.random.default_rng(3), []
    for lengths in ((5, 13, 8), (3, 16)):
        tokens = [rng.integers(0, VOCAB, length).tolist() for length in lengths]
        out.append((tokens, PackedRows(tuple(lengths), tuple(-(-n // 8) * 8 for n in lengths))))
    return out


def wanted_rows(packed: PackedRows) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The end of each sequence but its first two tokens, last sequence first."""
    last_first = reversed(range(len(packed.lengths)))
    return np.concatenate([packed.flat(i, 2, packed.lengths[i]) for i in last_first])


def _flat(tokens: Sequence[Sequence[int]], packed: PackedRows) -> tuple[Tensor, Tensor]:
    ids, places = np.full(packed.total, VOCAB - 1), np.zeros(packed.total, np.int64)
    for start, sequence in zip(packed.starts, tokens, strict=True):
        ids[start : start + len(sequence)] = sequence
        places[start : start + len(sequence)] = np.arange(len(sequence))
    return torch.from_numpy(ids), torch.from_numpy(places)


class Rank:
    """This process's place in a layout: tensor-parallel ranks are neighbours, then context, then pipeline."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.rank = layout, dist.get_rank()
        self.width = layout.cp * layout.tp
        self.replicas = WORLD // (self.width * layout.pp)
        assert self.replicas == 1
        self.stage, self.place = divmod(self.rank, self.width)
        self.stages = StageLayout.even(LAYERS, stages=layout.pp, chunks=layout.chunks)
        row_groups = [
            dist.new_group([s * self.width + i for i in range(self.width)]) for s in range(layout.pp)
        ]
        stage_groups = [
            dist.new_group([s * self.width + i for s in range(layout.pp)]) for i in range(self.width)
        ]
        self.groups = Groups(row_groups[self.stage], stage_groups[self.place])

    def shape(self, place: int) -> RankShape:
        cp_rank, tp_rank = divmod(place, self.layout.tp)
        return RankShape(self.layout.cp, cp_rank, self.layout.tp, tp_rank, self.layout.sequence_parallel)

    def tap(self, model: TokenModel) -> PackedTap:
        own = [b for chunk in self.stages.blocks[self.stage] for b in chunk]
        last = self.stage == self.layout.pp - 1
        return PackedTap(
            {b: model.blocks[b] for b in own}, layer_ids=LAYER_IDS, stages=self.stages, stage=self.stage,
            rank_of=[self.shape(i) for i in range(self.width)], groups=self.groups,
            final_norm=model.norm if last else None,
        )  # fmt: skip

    def forward(self, model: TokenModel, tokens: Sequence[Sequence[int]], packed: PackedRows) -> None:
        """What this rank computes of a micro-batch; earlier stages' blocks stand in for what those would send."""
        ids, places = _flat(tokens, packed)
        held = torch.from_numpy(self.shape(self.place).rows_held(packed))
        stream = model.embedded(ids[held], places[held])[:, None]
        own = {b for chunk in self.stages.blocks[self.stage] for b in chunk}
        for number, block in enumerate(model.blocks):
            if number not in own:
                stream = type(block).forward(block, stream)  # not this rank's: its hooks are not called
            elif self.layout.recompute:
                stream = checkpoint(block, stream, use_reentrant=False)
            else:
                stream = block(stream)
        if self.stage == self.layout.pp - 1:
            stream = model.norm(stream)
        stream.float().pow(2).sum().backward()


def run(layout: Layout, out: Path) -> None:
    rank, model = Rank(layout), TokenModel().to(layout.dtype)
    tap = rank.tap(model)
    plan = [MicroBatch(f"v3/{i}", packed, wanted_rows(packed)) for i, (_, packed) in enumerate(batches())]
    with tap.step(plan) as gathered:
        for tokens, packed in batches():
            rank.forward(model, tokens, packed)
    if gathered:
        torch.save([(g.aux, g.final) for g in gathered], out / f"{layout.name}.pt")
    _fault(rank, tap, model, plan, out)
    tap.close()


def _fault(rank: Rank, tap: PackedTap, model: TokenModel, plan: list[MicroBatch], out: Path) -> None:
    """Every rank must be told when one of them saw too little, or was given another plan."""
    lazy = rank.rank == WORLD - 1
    faults: list[tuple[list[MicroBatch], int]] = [
        (plan, 1 if lazy else 2),
        ([MicroBatch("v4/0", plan[0].packed, plan[0].wanted), plan[1]] if lazy else plan, 2),
    ]
    for number, (given, forwards) in enumerate(faults):
        try:
            with tap.step(given):
                for tokens, packed in batches()[:forwards]:
                    rank.forward(model, tokens, packed)
        except Exception as error:
            (out / f"{rank.layout.name}.fault{number}.{rank.rank}").write_text(
                f"{type(error).__name__}: {error}"
            )


def run_head(out: Path) -> None:
    """A vocabulary of 50 rows over 4 ranks of 13, two of them padding."""
    whole = torch.arange(52 * HIDDEN).reshape(52, HIDDEN).to(torch.bfloat16)
    shard = whole.chunk(WORLD)[dist.get_rank()]
    head = gather_vocabulary_rows(shard, dist.group.WORLD, vocab_size=VOCAB)
    if head is not None:
        torch.save((head, whole), out / "head.pt")


def run_gathered_head(out: Path) -> None:
    """Two stages of two tensor-parallel ranks: the LM head on the last, the embedding on the first."""
    rank = Rank(next(layout for layout in LAYOUTS if layout.name == "pp2_tp2_sp_recompute"))
    matrices = torch.randn(2, 52, HIDDEN, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    lm_head, embedding = (matrix.chunk(2)[rank.place] for matrix in matrices)
    for name, given in (("untied", embedding), ("tied", None), ("equal", lm_head)):
        head = gather_head(
            lm_head if rank.stage == 1 else None, given if rank.stage == 0 else None,
            tensor_group=rank.groups.rows, stage_group=rank.groups.stages, vocab_size=VOCAB,
        )  # fmt: skip
        assert (head is None) == (rank.rank != 2), "the first rank of the last stage"
        if head is not None:
            whole = [matrix[:VOCAB].view(torch.int16).numpy().view(np.uint16) for matrix in matrices]
            expected = HeadSnapshot(
                lm_head=whole[0], dtype=FeatureDtype.BFLOAT16,
                embed_tokens=whole[1] if name == "untied" else None,
            )  # fmt: skip
            ids = [head.head_id, expected.head_id, head.embed_tokens is None]
            (out / f"head.{name}").write_text(json.dumps(ids))


def live_batches(model: TokenModel, version: int, prefix: str = "s") -> list[LiveBatch]:
    """The micro-batches as a trainer has them: each sequence padded, with the logprobs that it was sampled at."""
    out = []
    for number, (tokens, packed) in enumerate(batches()):
        ids, _ = _flat(tokens, packed)
        sampled, logprobs = np.zeros(packed.total, bool), np.full(packed.total, np.nan, np.float32)
        for at, sequence in zip(packed.starts, tokens, strict=True):
            sampled[at + 2 : at + len(sequence)] = True
            _, final = truth(model, sequence)
            log_p = (final @ model.embed.weight.T).log_softmax(-1)[:-1]
            logprobs[at + 1 : at + len(sequence)] = log_p[range(len(log_p)), sequence[1:]].detach()
        names = [f"{prefix}{number}-{i}" for i in range(len(tokens))]
        out.append(LiveBatch(
            token_ids=ids.numpy(), cu_seqlens=[*packed.starts, packed.total], lengths=packed.lengths,
            sampled_mask=sampled, logprobs=logprobs, logprob_kind="engine_raw", sample_ids=names,
            group_ids=names, versions=version,
        ))  # fmt: skip
    return out


def truth(model: TokenModel, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Streams of ``LAYER_IDS`` side by side, and final rows, of one sequence alone in one process."""
    streams = [model.embedded(torch.tensor(tokens), torch.arange(len(tokens)))]
    for block in model.blocks:
        streams.append(block(streams[-1]))
    return torch.cat([streams[k] for k in LAYER_IDS], dim=-1), model.norm(streams[-1])


def _open_collector(model: TokenModel, out: Path, version: int) -> LiveCollector:
    target = TargetIdentity(
        target_id="token-model", architecture="TokenModel", hidden_size=HIDDEN, num_layers=LAYERS,
        vocab_size=VOCAB, tokenizer_digest="t" * 64, config_digest="c" * 64,
    )  # fmt: skip
    collector = LiveCollector(
        Lake.init(str(out / "lake"), target), writer_id="rank0",
        layout=FragmentLayout(layer_ids=LAYER_IDS, dtype=FeatureDtype.FLOAT32, hidden_size=HIDDEN),
        policy=SamplingPolicy(max_tokens=6, context_rows=1),
        tolerance=LogprobTolerance.for_compute_dtype(FeatureDtype.FLOAT32),
    )  # fmt: skip
    head = HeadSnapshot(lm_head=model.embed.weight.detach().numpy().copy(), dtype=FeatureDtype.FLOAT32)
    collector.advance(
        VersionRecord(
            version=TargetVersion(version), target_id=target.target_id, config_digest=target.config_digest,
            tokenizer_digest=target.tokenizer_digest, hidden_size=HIDDEN, vocab_size=VOCAB,
            head_id=head.head_id, weights_digest=None,
        ),
        head,
    )  # fmt: skip
    return collector


def run_live(out: Path) -> None:
    """Steps that collect: nobody plans; a rank lacks a forward; all is well; nothing is wanted; other weights ran."""
    layout = next(layout for layout in LAYOUTS if layout.name == "cp2_tp2_sp")
    rank, model = Rank(layout), TokenModel()
    tap, last = rank.tap(model), dist.get_rank() == WORLD - 1
    collector = _open_collector(model, out, 3) if tap.gathers else None
    mine = None if collector is None else live_batches(model, 3)
    late = None if collector is None else live_batches(model, 3, "late")
    told = []
    for given, planner, forwards in (
        (None, None, 2), (mine, collector, 1 if last else 2), (mine, collector, 2), (mine, collector, 2),
        (late, collector, 2),
    ):  # fmt: skip
        if len(told) == 4:
            with torch.no_grad():  # an optimiser step that nobody told the collector of
                model.norm.weight *= 1.1
        try:
            with collecting(tap, given, planner, dist.group.WORLD):
                for tokens, packed in batches()[:forwards]:
                    rank.forward(model, tokens, packed)
            told.append("")
        except DraftlakeError as error:
            told.append(f"{type(error).__name__}: {error}")
    tap.close()
    report = None if collector is None else dataclasses.asdict(collector.close())
    (out / f"live.{dist.get_rank()}").write_text(json.dumps({"told": told, "report": report}))


def main() -> None:
    out, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=WORLD)
    for layout in LAYOUTS:
        run(layout, out)
    run_head(out)
    run_gathered_head(out)
    run_live(out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
