"""The seeded script behind ``assets/``: the target, and a first EAGLE-3 draft for it.

Run with ``make tiny-target`` (about 40 minutes on one core). The draft is trained through
the same pipeline a user runs: rollouts of version 0, a lake, ``train``.
"""

import argparse
import json
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

from features.collect.rollouts import Rollout, write_rollouts
from features.lake import Lake
from pipelines.collect import CollectSpec, collect, load_target
from pipelines.context import RunContext
from pipelines.demo.prompts import Prompt, group_prompts
from pipelines.demo.spec import DRAFT_ASSET, DRAFT_VOCAB_SIZE, TARGET_ASSET, TARGET_ID, RolloutSpec
from pipelines.demo.tiny_target import PretrainSpec, build_target
from pipelines.evaluate import EvalJob, evaluate
from pipelines.progress import OnConsole
from pipelines.start import init_lake
from pipelines.train import TrainJob, train
from publish.registry import Registry
from training.spec import Eagle3Spec, TrainSpec

log = logging.getLogger(__name__)

GROUPS_PER_DOMAIN = 1000
FIRST_DRAFT = TrainSpec(
    method=Eagle3Spec(draft_vocab_size=DRAFT_VOCAB_SIZE, ttt_steps=4),
    epochs=14,
    batch_tokens=512,
    learning_rate=2e-3,
    save_dtype="float32",
)


def sample_without_engine(
    model: Any, prompts: list[Prompt], spec: RolloutSpec, *, seed: int
) -> list[Rollout]:
    """Rollouts of the target itself through transformers, one sample per prompt."""
    import torch

    torch.manual_seed(seed)
    rollouts = []
    for first in range(0, len(prompts), 64):
        batch = prompts[first : first + 64]
        ids = torch.tensor([p.token_ids for p in batch])
        out = model.generate(
            ids, do_sample=True, temperature=spec.temperature, top_k=0, top_p=1.0,
            min_new_tokens=spec.max_tokens, max_new_tokens=spec.max_tokens, pad_token_id=0,
        )  # fmt: skip
        rollouts += [_rollout(p, row.tolist(), spec) for p, row in zip(batch, out, strict=True)]
    return rollouts


def _rollout(prompt: Prompt, ids: list[int], spec: RolloutSpec) -> Rollout:
    prompt_length = len(prompt.token_ids)
    return Rollout(
        sample_id=f"{prompt.group_id}-v0-0",
        group_id=prompt.group_id,
        token_ids=tuple(ids),
        prompt_length=prompt_length,
        sampled_mask=tuple(i >= prompt_length for i in range(len(ids))),
        version=0,
        temperature=spec.temperature,
        top_p=1.0,
        domain=prompt.group_id.split("-")[0],
        finish="length",
    )


def build_draft(out: Path, *, seed: int) -> dict[str, Any]:
    """Train the first draft on version 0's own rollouts of both domains; returns its evaluation."""
    from transformers import AutoTokenizer

    ctx = RunContext(progress=OnConsole())
    tokenizer = AutoTokenizer.from_pretrained(TARGET_ASSET)
    spec = RolloutSpec()
    prompts = [
        p
        for domain in ("code", "prose")
        for p in group_prompts(
            tokenizer, domain, count=GROUPS_PER_DOMAIN, length=spec.prompt_tokens, seed=seed + 1
        )
    ]
    with tempfile.TemporaryDirectory() as scratch:
        lake_url = str(Path(scratch) / "lake")
        init_lake(lake_url, target=TARGET_ASSET, target_id=TARGET_ID)
        path = Path(scratch) / "rollouts.jsonl"
        write_rollouts(path, sample_without_engine(load_target(TARGET_ASSET), prompts, spec, seed=seed))
        collect(CollectSpec(lake=lake_url, rollouts=(str(path),), target=str(TARGET_ASSET), version=0), ctx)
        job = TrainJob(lake=lake_url, first_version=0, stop_version=1, verified_only=False, train=FIRST_DRAFT)
        digest = train(job, ctx).artifact
        report = evaluate(EvalJob(lake=lake_url, artifact=digest, verified_only=False), ctx)
        lake = Lake.open(lake_url)
        shutil.rmtree(out, ignore_errors=True)
        Registry(lake.store, TARGET_ID).fetch(digest, out)
    return {"artifact": digest, "tau": report.overall.tau.model_dump()}


def main() -> None:
    """Build both assets; ``--draft-only`` keeps the committed target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draft-only", action="store_true")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if not options.draft_only:
        log.info("target: %s", json.dumps(build_target(TARGET_ASSET, PretrainSpec())))
    log.info("draft: %s", json.dumps(build_draft(DRAFT_ASSET, seed=PretrainSpec().seed)))


if __name__ == "__main__":
    main()
