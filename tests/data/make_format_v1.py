"""Made ``tests/data/format_v1``: a small lake in the first format, and what it holds in plain JSON.

It was run once. The lake it made is what every later release reads (``test_format_v1.py``): never
make it again over the old one. What the format gains later gets a folder of its own.

    python tests/data/make_format_v1.py tests/data/format_v1
"""

import hashlib
import json
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from features.bfloat16 import float32_to_bf16
from features.catalog import Catalog
from features.check import Finding, quarantine_damaged
from features.commits import CommitName, encode_commit
from features.compaction import compact, plan_prune, prune
from features.digests import canonical_json
from features.head_store import DeltaPolicy
from features.heads import HeadSnapshot
from features.lake import Lake
from features.quarantine import Refusal, quarantine
from features.schema import FeatureDtype, FragmentLayout, SelectionFilter
from features.target import config_digest, stable_config
from features.testing import TINY_TARGET, commit_tiny, tiny_record, tiny_window
from features.tombstones import FragmentName
from features.windows import Window

NOW = datetime(2026, 11, 30, tzinfo=UTC)
CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 4, "num_hidden_layers": 8, "vocab_size": 512}
TARGET = replace(
    TINY_TARGET, hidden_size=4, vocab_size=512, config_digest=config_digest(stable_config(CONFIG))
)
BF16 = FragmentLayout(layer_ids=(2, 5), dtype=FeatureDtype.BFLOAT16, hidden_size=4)
F32 = replace(BF16, dtype=FeatureDtype.FLOAT32, layer_ids=(1,))


def head(version: int) -> HeadSnapshot:
    """A keyframe, and one that moved a little."""
    weights = np.random.default_rng(0).standard_normal((512, 4), np.float32)
    moved = weights + version * 1e-4 * np.random.default_rng(1).standard_normal((512, 4), np.float32)
    return HeadSnapshot(
        float32_to_bf16(moved), FeatureDtype.BFLOAT16, bias=np.arange(512, dtype=np.float32), softcap=30.0
    )


def make(folder: Path) -> None:
    """Write the lake and ``expected.json`` into ``folder``, which must not exist."""
    folder.mkdir(parents=True)
    lake = Lake.init(str(folder / "lake"), TARGET)
    lake.put_target_config(CONFIG)
    for version in (0, 1):
        head_id = lake.put_head(head(version), delta=DeltaPolicy(min_bytes=0))
        lake.register_version(tiny_record(head_id, version, target=TARGET))
    masked = tiny_window(head(0), sample=1, num_rows=6, layout=BF16, reward=None, domain=None, finish=None)
    masked = replace(masked, loss_mask=np.arange(7) % 2 == 0, logprobs=np.full(7, np.nan, np.float32))
    commit_tiny(lake, 0, head(0).head_id, [tiny_window(head(0), sample=0, layout=BF16), masked])
    lake.store.create(CommitName(0, "fenced", 0).path, encode_commit([]))
    compact(lake, now=lambda: NOW)
    prune(lake, plan_prune(lake, grace=timedelta(days=1), now=NOW + timedelta(days=2)))
    commit_tiny(lake, 1, head(1).head_id, [tiny_window(head(1), version=1, sample=2, layout=F32)])
    damaged = commit_tiny(lake, 1, head(1).head_id, [tiny_window(head(1), version=1, sample=3, layout=BF16)])
    prefix = f"data/v=000000001/{damaged.plan_id}.{damaged.write_uuid}"
    name = FragmentName(damaged.commit_path, prefix)
    quarantine_damaged(lake, [Finding("wrong_bytes", prefix, "for the test", True, name)], NOW)
    refused = Refusal("rollouts.jsonl", 3, "version_missing", "expected a version", {"sample_id": "a"})
    quarantine(lake, [refused], "run-1")
    Catalog.load(lake).pin(lake)
    (folder / "expected.json").write_bytes(json.dumps(describe(lake), indent=1, sort_keys=True).encode())


def describe(lake: Lake) -> dict[str, Any]:
    """What a reader gets from the lake."""
    catalog = Catalog.load(lake)
    selection = catalog.select(SelectionFilter())
    return {
        "revision": catalog.revision.digest,
        "selection": selection.digest,
        "hidden_fragments": catalog.hidden_fragments,
        "heads": {
            str(record.version.number): describe_head(lake.head(record.head_id)) for record in lake.versions()
        },
        "windows": [describe_window(lake.read_window(row)) for row in selection.rows],
    }


def describe_head(stored: HeadSnapshot) -> dict[str, Any]:
    return {"lm_head": digest(stored.lm_head), "bias": digest(stored.bias), "softcap": stored.softcap}


def describe_window(window: Window) -> dict[str, Any]:
    meta = json.loads(canonical_json({
        name: getattr(window.meta, name)
        for name in ("sample_id", "group_id", "start", "prompt_length", "reward", "domain", "temperature", "finish")
    }))  # fmt: skip
    return {
        **meta,
        "version": window.meta.version.number,
        "layer_ids": list(window.layout.layer_ids),
        "token_ids": window.token_ids.tolist(),
        "sampled_mask": window.sampled_mask.tolist(),
        "loss_mask": None if window.loss_mask is None else window.loss_mask.tolist(),
        "logprobs": [None if np.isnan(value) else float(value) for value in window.logprobs],
        "aux": digest(window.aux),
        "final": digest(window.final),
    }


def digest(values: Any) -> str:
    """Type, shape and bytes of an array."""
    return f"{values.dtype.str} {list(values.shape)} {hashlib.sha256(values.tobytes()).hexdigest()}"


if __name__ == "__main__":
    make(Path(sys.argv[1]))
