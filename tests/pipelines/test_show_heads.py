"""What head snapshots cost, for people and machines."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from command_outcome import Cli

from features.bfloat16 import float32_to_bf16
from features.head_store import DeltaPolicy
from features.heads import HeadSnapshot
from features.lake import Lake
from features.schema import FeatureDtype
from features.testing import TINY_TARGET, tiny_record

TARGET = replace(TINY_TARGET, vocab_size=512, hidden_size=64)


def test_show_heads_lists_keyframes_and_deltas_with_their_bytes(cli: Cli, tmp_path: Path) -> None:
    lake = Lake.init(str(tmp_path / "lake"), TARGET)
    weights, ids = np.random.default_rng(0).standard_normal((512, 64), np.float32), []
    for number in range(3):
        head = HeadSnapshot(float32_to_bf16(weights * np.float32(1 + 1e-5 * number)), FeatureDtype.BFLOAT16)
        ids.append(lake.put_head(head, delta=DeltaPolicy(min_bytes=0)))
        lake.register_version(tiny_record(ids[-1], number, target=TARGET))
    done = cli("show", "heads", "--lake", lake.url, "--json")
    assert done.code == 0
    assert [(row["head"], row["versions"], row["base"]) for row in done.json["snapshots"]] == [
        (ids[0], [0], None),
        (ids[1], [1], ids[0]),
        (ids[2], [2], ids[0]),
    ]
    assert (done.json["heads"], done.json["keyframes"]) == (3, 1)
    assert done.json["stored_bytes"] == sum(lake.store.size(path) for path in lake.store.list("blobs"))
    assert done.json["ratio"] == done.json["stored_bytes"] / (3 * 2 * 512 * 64)
    shown = cli("show", "heads", "--lake", lake.url).out
    assert "keyframes" in shown
    assert ids[2][:12] in shown


def test_show_heads_of_a_lake_without_heads_says_none(cli: Cli, tmp_path: Path) -> None:
    lake = Lake.init(str(tmp_path / "lake"), TARGET)
    done = cli("show", "heads", "--lake", lake.url, "--json")
    assert (done.code, done.json["heads"], done.json["ratio"]) == (0, 0, None)
