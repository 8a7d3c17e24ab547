"""A rollout with a value that nothing real has is refused alone; it neither stops a run nor hides in it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from collect_toy_target import HIDDEN, ToyTarget, forward_features

from features.catalog import Catalog
from features.collect.collector import Collector
from features.collect.rollouts import Rollout, read_rollouts, write_rollouts
from features.collect.sampling import SamplingPolicy
from features.collect.scan import scan_partition
from features.collect.sources import SourceCounts
from features.lake import Lake
from features.quarantine import Refusal
from features.schema import FeatureDtype, FragmentLayout, SelectionFilter, TargetVersion

TARGET = ToyTarget()
LAYOUT = FragmentLayout((1, 2), FeatureDtype.BFLOAT16, HIDDEN)

IMPOSSIBLE = [
    {"temperature": -1.0},
    {"temperature": float("nan")},
    {"temperature": 1e300},
    {"top_p": 1.5},
    {"top_k": 2**40},
    {"reward": 1e300},
    {"reward": float("nan")},
    {"acceptance_rate": 17.0},
    {"acceptance_length": -1.0},
    {"sample_id": ""},
    {"group_id": ""},
]


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return TARGET.lake(str(tmp_path / "lake"))


def collect(lake: Lake, rollouts: list[Rollout], layout: FragmentLayout = LAYOUT) -> Any:
    collector = Collector(
        lake, version=TargetVersion(0), head_id=TARGET.head.head_id, layout=layout,
        policy=SamplingPolicy(max_tokens=64), writer_id="test",
    )  # fmt: skip
    for rollout in rollouts:
        if collector.admit(rollout):
            collector.add(rollout, *forward_features(TARGET, [rollout.token_ids], layout.layer_ids)[0])
    return collector.close()


@pytest.mark.parametrize("changes", IMPOSSIBLE, ids=str)
def test_an_impossible_value_costs_its_rollout_and_no_other(lake: Lake, changes: dict[str, Any]) -> None:
    report = collect(lake, [TARGET.rollout(0), TARGET.rollout(1, **changes), TARGET.rollout(2)])
    assert (report.collected, report.quarantined) == (2, {"bad_field": 1})


@pytest.mark.parametrize("token", [-1, 2**31, 2**63, 10**400], ids=["negative", "int32", "int64", "huge"])
def test_a_token_id_that_no_column_holds_costs_its_rollout_only(lake: Lake, token: int) -> None:
    wrong = TARGET.rollout(1)
    wrong = replace(wrong, token_ids=(token, *wrong.token_ids[1:]))
    report = collect(lake, [TARGET.rollout(0), wrong, TARGET.rollout(2)])
    assert (report.collected, report.quarantined) == (2, {"token_out_of_vocab": 1})
    scan = scan_partition([wrong], SourceCounts(), version=TargetVersion(0), policy=SamplingPolicy())
    assert scan.candidates == 0


@pytest.mark.parametrize("name", ["temperature", "top_k", "acceptance_rate"])
def test_a_line_with_an_impossible_value_is_a_refusal(tmp_path: Path, name: str) -> None:
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(path, [TARGET.rollout(0)])
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {name: -(2**70)}))
    (item,) = read_rollouts(path)
    assert isinstance(item, Refusal)
    assert item.reason == "bad_field"
    assert name in item.detail


def test_the_same_sample_under_another_group_is_a_conflict_within_a_run(lake: Lake) -> None:
    first = TARGET.rollout(0)
    report = collect(lake, [first, replace(first, group_id="another prompt")])
    assert report.quarantined == {"sample_conflict": 1}


@pytest.mark.parametrize("layout", [LAYOUT, replace(LAYOUT, layer_ids=(1,))], ids=["same", "other layers"])
def test_the_same_sample_under_another_group_is_a_conflict_with_the_lake(
    lake: Lake, layout: FragmentLayout
) -> None:
    first = TARGET.rollout(0)
    collect(lake, [first])
    report = collect(lake, [replace(first, group_id="another prompt"), TARGET.rollout(1)], layout)
    assert report.quarantined == {"sample_conflict": 1}
    assert len(Catalog.load(lake).select(SelectionFilter())) == 2
