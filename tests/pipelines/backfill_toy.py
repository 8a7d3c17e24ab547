"""Backfills with the toy target in place of a checkpoint: exact logprobs, no framework, milliseconds."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "features" / "collect"))

from collect_toy_target import IDENTITY, ToyTarget

import pipelines.backfill
import pipelines.backfill_worker
import pipelines.quarantine
from features.collect.rollouts import Rollout, write_rollouts
from features.lake import Lake
from pipelines.backfill_spec import BackfillReport, BackfillSpec
from pipelines.context import RunContext

FRAGMENT_TOKENS = 40


def use_toy_target(patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """From now on a target directory ``vN`` is the toy target at version N."""
    for module in (pipelines.backfill, pipelines.backfill_worker, pipelines.quarantine):
        patch(module, "describe_version", _describe)
    for module in (pipelines.backfill_worker, pipelines.quarantine):
        patch(module, "load_target", lambda folder, _device: ToyTarget(_version_of(folder)))
        patch(module, "compute_device", lambda: "cpu")
    patch(pipelines.backfill_worker, "HF_TAP", "collect_toy_target")


def _version_of(folder: Path) -> int:
    return int(folder.name.removeprefix("v"))


def _describe(_lake: Lake, folder: Path, version: Any) -> tuple[Any, Any]:
    toy = ToyTarget(_version_of(folder))
    return replace(toy.record, version=version, weights_digest=str(toy.version) * 64), toy.head


def make_lake(url: str) -> Lake:
    return Lake.init(url, IDENTITY)


def spec(lake: str, *sources: Any, **changes: Any) -> BackfillSpec:
    settings = {
        "lake": lake, "sources": tuple(map(str, sources)), "target": "v0", "version": 0, "layer_ids": (1, 2),
        "dtype": "float32", "engine_dtype": "float32", "fragment_tokens": FRAGMENT_TOKENS,
    }  # fmt: skip
    return BackfillSpec(**settings | changes)


def run(lake: str, *sources: Any, **changes: Any) -> BackfillReport:
    return pipelines.backfill.backfill(spec(lake, *sources, **changes), RunContext())


def write_source(path: Path, numbers: range, **changes: Any) -> Path:
    """Rollouts of version 0, with a cut line, one of another version, one without, and one that disagrees."""
    rollouts: list[Rollout] = [ToyTarget().rollout(n, **changes) for n in numbers]
    shifted = (*(rollouts[0].logprobs or ())[1:], None)
    odd = [
        ToyTarget(1).rollout(numbers.stop, sample_id=f"other-{path.stem}"),
        ToyTarget().rollout(numbers.stop + 500, sample_id=f"none-{path.stem}", version=None),
        replace(
            rollouts[0], sample_id=f"shifted-{path.stem}", token_ids=(*rollouts[0].token_ids[:-1], 2),
            logprobs=shifted,
        ),
    ]  # fmt: skip
    write_rollouts(path, [*rollouts[:2], *odd, *rollouts[2:]])
    path.write_bytes(path.read_bytes() + b'{"sample_id": "cut", "logprobs": [NaN\n')
    return path
