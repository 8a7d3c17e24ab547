"""One rank of an FSDP2 trainer on the CPU, which collects its own batch: ``fsdp_live_rank.py RANK FOLDER``."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from live_models import IDENTITY, LAYOUT, lay_out, make_model, sequences
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from features.collect.live import LiveCollector
from features.collect.proofs import LogprobTolerance
from features.collect.sampling import SamplingPolicy
from features.collect.taps import hf_live
from features.lake import Lake
from features.schema import FeatureDtype


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    if rank == 0:
        Lake.init(str(folder / "lake"), IDENTITY)
    dist.barrier()
    model = make_model("llama-tied")
    plains = sequences(model, (11, 3, 8), seed=rank)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    mesh = init_device_mesh("cpu", (2,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    live = LiveCollector(
        Lake.open(str(folder / "lake")), layout=LAYOUT, writer_id=f"rank{rank}",
        policy=SamplingPolicy(max_tokens=6, context_rows=1),
        tolerance=LogprobTolerance.for_compute_dtype(FeatureDtype.FLOAT32),
    )  # fmt: skip
    batch, inputs = lay_out(plains, ("right", "packed")[rank], first=3 * rank)
    with hf_live.tap(model, live) as t:
        t.advance(0)
        with t.step(batch):
            model(**inputs, use_cache=False).logits.float().pow(2).mean().backward()
    assert live.close().verified == 3
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
