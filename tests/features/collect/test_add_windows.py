"""Handing over planned rows alone gives what whole sequences give, and is judged as strictly."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from collect_toy_target import HIDDEN, ToyTarget, forward_features

from features.collect.collector import Collector
from features.collect.sampling import SamplingPolicy
from features.commits import decode_commit
from features.lake import Lake
from features.schema import FeatureDtype, FragmentLayout, TargetVersion

TARGET = ToyTarget()
LAYOUT = FragmentLayout((1, 2), FeatureDtype.FLOAT32, HIDDEN)
WINDOW = 6


def collector(folder: Path) -> Collector:
    return Collector(
        TARGET.lake(str(folder)), version=TargetVersion(0), head_id=TARGET.head.head_id, layout=LAYOUT,
        policy=SamplingPolicy(max_tokens=WINDOW), writer_id="test",
    )  # fmt: skip


def run(folder: Path, *, whole: bool, spoil: Any = lambda aux, final: (aux, final)) -> Any:
    taker = collector(folder)
    for number in range(5):
        rollout = TARGET.rollout(number)
        spans = taker.admit(rollout)
        aux, final = forward_features(TARGET, [rollout.token_ids], LAYOUT.layer_ids)[0]
        if whole:
            taker.add(rollout, aux, final)
        else:
            taker.add_windows(rollout, [spoil(aux[s.start : s.stop], final[s.start : s.stop]) for s in spans])
    return taker.close()


def stored(folder: Path) -> list[tuple[str, int, bytes, bytes, bytes]]:
    lake = Lake.open(str(folder))
    rows = [r for p in lake.commit_paths() for r in decode_commit(lake.store.read(p), where=p).to_pylist()]
    windows = [lake.read_window(row) for row in rows]
    return [
        (w.meta.sample_id, w.meta.start, w.token_ids.tobytes(), w.aux.tobytes(), w.final.tobytes())
        for w in windows
    ]


def test_planned_rows_give_the_same_commit_as_whole_sequences(tmp_path: Path) -> None:
    outside, inside = run(tmp_path / "whole", whole=True), run(tmp_path / "rows", whole=False)
    assert outside == inside
    assert outside.verified == 5
    assert stored(tmp_path / "whole") == stored(tmp_path / "rows")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda aux, final: (aux[:-1], final[:-1]), "feature_shape"),
        (lambda aux, final: (np.full_like(aux, np.nan), final), "nonfinite_features"),
        (lambda aux, final: (aux, np.zeros_like(final)), "zero_features"),
        (lambda aux, final: (aux, np.roll(final, 1, axis=0)), "logprob_disagreement"),
    ],
)
def test_spoiled_rows_are_refused_by_reason(tmp_path: Path, spoil: Any, reason: str) -> None:
    report = run(tmp_path / "lake", whole=False, spoil=spoil)
    assert (report.quarantined, report.collected, report.windows) == ({reason: 5}, 0, 0)
