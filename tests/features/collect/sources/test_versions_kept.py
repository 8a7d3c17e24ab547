"""A version is data or null: never the current one, never another span's, never a guess that verifies."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from collect_toy_target import HIDDEN, ToyTarget, forward_features
from source_helpers import read_file, read_records, response, rollout

from features.collect.collector import Collector
from features.collect.report import CollectReport
from features.collect.rollout import VersionSpan
from features.collect.rollouts import Rollout, write_rollouts
from features.collect.sampling import SamplingPolicy
from features.collect.sources.versions import from_spans, numeric_label
from features.lake import Lake
from features.quarantine import Refusal
from features.schema import FeatureDtype, FragmentLayout, TargetVersion

TARGET = ToyTarget(7)
LAYOUT = FragmentLayout((1, 2), FeatureDtype.BFLOAT16, HIDDEN)


def generate(number: int, *labels: tuple[str, int, int], target: ToyTarget = TARGET) -> dict[str, Any]:
    """A response of the toy engine, with the spans that the engine reports."""
    sampled = target.rollout(number)
    ids, values = sampled.token_ids, sampled.logprobs or ()
    entries = [{"token_id": t, "logprob": v} for t, v in zip(ids[3:], values[3:], strict=True)]
    choice = {
        "index": 0, "finish_reason": "length", "token_ids": list(ids[3:]), "logprobs": {"content": entries},
        "weight_versions": [{"version": v, "start": a, "end": b} for v, a, b in labels] or None,
    }  # fmt: skip
    return {"request_id": f"r{number}", "prompt_token_ids": list(ids[:3]), "choices": [choice]}


def collect(
    tmp_path: Path, items: list[Rollout | Refusal], target: ToyTarget = TARGET
) -> tuple[CollectReport, list[Refusal]]:
    lake = target.lake(str(tmp_path / f"lake-{target.version}"))
    assert isinstance(lake, Lake)
    collector = Collector(
        lake, version=TargetVersion(target.version), head_id=target.head.head_id, layout=LAYOUT,
        policy=SamplingPolicy(max_tokens=64), writer_id="test",
    )  # fmt: skip
    for item in items:
        if collector.admit(item):
            assert isinstance(item, Rollout)
            collector.add(item, *forward_features(target, [item.token_ids], LAYOUT.layer_ids)[0])
    report = collector.close()
    assert report.accounted == report.received
    return report, list(collector.refusals)


def test_versions_7_7_8_and_missing_are_three_classes_and_mixed_is_a_fourth(tmp_path: Path) -> None:
    records = [
        generate(0, ("7", 0, 12)), generate(1, ("7", 0, 12)), generate(2, ("8", 0, 12)), generate(3),
        generate(4, ("7", 0, 5), ("8", 5, 12)),
    ]  # fmt: skip
    items = read_records(tmp_path / "generate.jsonl", *records)
    report, refusals = collect(tmp_path, items)
    assert (report.collected, report.verified) == (2, 2)
    assert report.quarantined == {"version_mismatch": 1, "version_missing": 1, "version_mixed": 1}
    places = {r.reason: (Path(r.source).name, r.line) for r in refusals}
    assert places == {
        "version_mismatch": ("generate.jsonl", 3), "version_missing": ("generate.jsonl", 4),
        "version_mixed": ("generate.jsonl", 5),
    }  # fmt: skip


@pytest.mark.parametrize("version", [7, 8])
def test_a_rollout_of_two_spans_is_not_attributed_to_either_version(tmp_path: Path, version: int) -> None:
    items = read_records(tmp_path / "generate.jsonl", generate(4, ("7", 0, 5), ("8", 5, 12)))
    item = rollout(items)
    assert (item.version, item.version_min, item.version_max) == (None, 7, 8)
    assert item.version_spans == (VersionSpan("7", 3, 8), VersionSpan("8", 8, 15))
    report, _ = collect(tmp_path, items, ToyTarget(version))
    assert (report.collected, report.quarantined) == (0, {"version_mixed": 1})


@pytest.mark.parametrize(("named", "first", "last"), [(7, 3, 8), (8, 8, 15)])
def test_named_by_the_user_only_the_spans_of_that_version_count(
    tmp_path: Path, named: int, first: int, last: int
) -> None:
    record = generate(4, ("7", 0, 5), ("8", 5, 12))
    item = rollout(read_records(tmp_path / "generate.jsonl", record, user_version=named))
    assert (item.version, item.version_source, item.may_verify) == (named, "user", False)
    assert [i for i, s in enumerate(item.sampled_mask) if s] == list(range(first, last))


@pytest.mark.parametrize("named", [6, 9])
def test_a_version_outside_what_is_recorded_cannot_be_named(tmp_path: Path, named: int) -> None:
    record = generate(4, ("7", 0, 5), ("8", 5, 12))
    assert rollout(read_records(tmp_path / "generate.jsonl", record, user_version=named)).version is None


def test_a_recorded_version_is_not_overruled_by_the_user(tmp_path: Path) -> None:
    item = rollout(read_records(tmp_path / "g.jsonl", response(), user_version=9))
    assert (item.version, item.version_source) == (5, "spans")


def test_windows_of_a_version_that_the_user_named_stay_unverified_though_logprobs_agree(
    tmp_path: Path,
) -> None:
    items = read_records(tmp_path / "generate.jsonl", generate(0), generate(1), user_version=7)
    report, _ = collect(tmp_path, items)
    assert (report.collected, report.verified, report.unverified) == (2, 0, 2)
    assert report.agreement.windows_compared == 0


def test_a_wrong_version_that_the_user_named_is_still_refused_when_logprobs_disagree(tmp_path: Path) -> None:
    items = read_records(tmp_path / "generate.jsonl", generate(0, target=ToyTarget(3)), user_version=7)
    report, _ = collect(tmp_path, items)
    assert report.quarantined == {"logprob_disagreement": 1}


def test_tokens_from_text_stay_unverified_though_logprobs_agree(tmp_path: Path) -> None:
    retokenised = replace(TARGET.rollout(0), token_source="retokenised")
    write_rollouts(tmp_path / "r.jsonl", [retokenised])
    items, _ = read_file(tmp_path / "r.jsonl")
    report, _ = collect(tmp_path, items)
    assert (report.verified, report.unverified) == (0, 1)


def test_images_are_refused_because_text_alone_gives_other_states(tmp_path: Path) -> None:
    report, _ = collect(tmp_path, [replace(TARGET.rollout(0), multimodal=True), TARGET.rollout(1)])
    assert (report.collected, report.quarantined) == (1, {"multimodal": 1})


def test_spans_that_leave_a_sampled_token_open_name_no_version() -> None:
    sampled = [False, True, True, True]
    assert from_spans([VersionSpan("5", 1, 4)], sampled, numeric_label()).version == 5
    gap = from_spans([VersionSpan("5", 1, 3)], sampled, numeric_label())
    assert (gap.version, gap.version_source) == (None, "unknown")
    assert (
        from_spans([VersionSpan("5", 1, 3), VersionSpan("default", 3, 4)], sampled, numeric_label()).version
        is None
    )


@pytest.mark.parametrize("label", ["", "default", "-1", "1.0", "\u0663", "\u00b2", " 5", "5_0"])
def test_only_plain_digits_are_a_version(label: str) -> None:
    assert numeric_label()(label) is None


def test_a_label_offset_moves_vllm_labels(tmp_path: Path) -> None:
    assert rollout(read_records(tmp_path / "g.jsonl", response(), label_offset=-1)).version == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"version_min": 3, "version_max": 4},
        {"version_spans": (VersionSpan("1", 0, 2), VersionSpan("2", 2, 3))},
        {"version_spans": (VersionSpan("1", 2, 1),)},
        {"version_spans": (VersionSpan("1", 0, 99),)},
    ],
)
def test_a_version_that_its_own_record_contradicts_is_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    report, _ = collect(tmp_path, [replace(TARGET.rollout(0), **changes)])
    assert report.quarantined == {"bad_field": 1}


def test_what_a_source_says_of_a_rollout_is_written_and_read_back(tmp_path: Path) -> None:
    items = read_records(tmp_path / "g.jsonl", generate(4, ("7", 0, 5), ("8", 5, 12)), user_version=7)
    full = replace(
        rollout(items), trainer_logprobs=(None,) + (-1.0,) * 14, advantages=(0.5,) * 15, multimodal=False,
        file_step=8, source_group="3",
    )  # fmt: skip
    write_rollouts(tmp_path / "kept.jsonl", [full])
    assert read_file(tmp_path / "kept.jsonl")[0] == [full]
