"""``draftlake backfill``: old rollouts to windows, counted, resumable, the same whoever does it."""

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import backfill_toy
import pytest
from backfill_toy import ToyTarget, make_lake, write_source
from command_outcome import Cli, Outcome, objects

from features.catalog import Catalog
from features.collect.rollouts import Rollout, write_rollouts
from features.content import content_digest
from features.lake import Lake
from features.quarantine import list_quarantine
from features.schema import TargetVersion
from pipelines.start import init_lake

Backfill = Callable[..., Outcome]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    backfill_toy.use_toy_target(monkeypatch.setattr)


@pytest.fixture
def toy_lake(tmp_path: Path) -> Lake:
    return make_lake(str(tmp_path / "lake"))


@pytest.fixture
def backfill(cli: Cli, toy: None, toy_lake: Lake) -> Backfill:
    """The command on the toy target at version 0; one fragment per 40 rows."""

    def run(*sources: Any, lake: str = toy_lake.url, **options: Any) -> Outcome:
        return cli("backfill", *sources, *arguments(lake, **options))

    return run


def arguments(lake: str, **changes: Any) -> list[Any]:
    given = {
        "lake": lake, "target": "v0", "version": 0, "layer-ids": "1,2", "dtype": "float32",
        "engine-dtype": "float32", "fragment-tokens": 40,
    } | {name.replace("_", "-"): value for name, value in changes.items()}  # fmt: skip
    flags = [
        [f"--{n}"] if value is True else [f"--{n}", value] for n, value in given.items() if value is not None
    ]
    return [*(part for flag in flags for part in flag), "--json"]


def adds_up(report: dict[str, Any]) -> bool:
    fates = ("collected", "duplicates", "pad_rows", "skipped_by_sampling", "over_quota")
    return report["rows_read"] == sum(report[name] for name in fates) + sum(report["quarantined"].values())


def toy_file(path: Path, numbers: range, **changes: Any) -> Path:
    write_rollouts(path, [ToyTarget().rollout(n, **changes) for n in numbers])
    return path


# -- what becomes of every line


def test_the_report_accounts_for_every_line_and_running_again_finds_everything_done(
    backfill: Backfill, toy_lake: Lake, tmp_path: Path
) -> None:
    sources = [write_source(tmp_path / f"{n}.jsonl", range(5 * n, 5 * n + 5)) for n in range(2)]
    first = backfill(*sources)
    assert first.code == 0, first.err
    report = first.json
    assert adds_up(report)
    assert (report["rows_read"], report["collected"], report["verified"]) == (18, 10, 10)
    refused = {"bad_json": 2, "logprob_disagreement": 2, "version_mismatch": 2, "version_missing": 2}
    assert report["quarantined"] == refused
    assert report["windows_written"] == 10
    assert report["lake_revision"] == Catalog.load(toy_lake).revision.digest
    assert report["content_digest"] == content_digest(toy_lake, TargetVersion(0))
    before = objects(tmp_path / "lake")
    again = backfill(*sources)
    assert again.code == 4, again.err
    assert adds_up(again.json)
    assert (again.json["collected"], again.json["duplicates"]) == (0, 10)
    assert again.json["quarantined"] == refused
    assert again.json["partitions_finished_before"] == 2
    assert again.json["content_digest"] == report["content_digest"]
    assert objects(tmp_path / "lake") == before


def test_a_refused_record_keeps_its_file_and_line(backfill: Backfill, toy_lake: Lake, tmp_path: Path) -> None:
    source = write_source(tmp_path / "a.jsonl", range(4))
    assert backfill(source).code == 0
    found = {(r.reason, r.line) for part in list_quarantine(toy_lake) for r in part.refusals}
    assert found == {
        ("version_mismatch", 3), ("version_missing", 4), ("logprob_disagreement", 5), ("bad_json", 8)
    }  # fmt: skip
    places = {r.source for part in list_quarantine(toy_lake) for r in part.refusals}
    assert {Path(place).name for place in places} == {"a.jsonl"}


def test_hostile_lines_cost_only_themselves(backfill: Backfill, tmp_path: Path) -> None:
    """A cut line, a bare NaN, a byte-order mark, CRLF, U+2028, an empty last line, all logprobs null, all empty."""
    lines = []
    for n in range(8):
        record = ToyTarget().rollout(n).to_json_dict()
        lines.append({name: value for name, value in record.items() if value is not None})
    lines[1]["reward"] = float("nan")
    lines[2]["domain"] = "a\u2028b"
    lines[3]["logprobs"] = [None] * len(lines[3]["token_ids"])
    lines[4]["logprobs"] = []
    lines[5]["logprobs"] = [*lines[5]["logprobs"], -1.0]
    text = [json.dumps(line, ensure_ascii=False).encode() for line in lines]
    text[6] = text[6][:100]
    path = tmp_path / "hostile.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(text) + b"\r\n\r\n")
    report = backfill(path).json
    assert adds_up(report)
    assert report["rows_read"] == 8
    assert report["quarantined"] == {"bad_json": 1, "logprob_mismatch": 2}
    assert (report["collected"], report["verified"], report["unverified"]) == (5, 4, 1)


def test_repeats_and_conflicts_are_settled_by_the_order_of_the_sources_not_by_who_comes_first(
    backfill: Backfill, toy_lake: Lake, tmp_path: Path
) -> None:
    conflict = ToyTarget().rollout(8, sample_id="s1")
    copy = ToyTarget().rollout(0, sample_id="copy-of-s0")
    write_rollouts(tmp_path / "a.jsonl", [ToyTarget().rollout(n) for n in range(3)])
    write_rollouts(tmp_path / "b.jsonl", [ToyTarget().rollout(2), conflict, copy, ToyTarget().rollout(3)])
    report = backfill(tmp_path / "a.jsonl", tmp_path / "b.jsonl").json
    assert adds_up(report)
    assert (report["collected"], report["duplicates"]) == (4, 2)
    assert report["quarantined"] == {"sample_conflict": 1}
    assert set(Catalog.load(toy_lake).frame["sample_id"]) == {"s0", "s1", "s2", "s3"}
    stored = {row["sample_id"]: toy_lake.read_tokens(row) for row in Catalog.load(toy_lake).frame.to_dicts()}
    assert tuple(stored["s1"].token_ids[:-1]) == ToyTarget().rollout(1).token_ids


def test_a_partition_alone_owns_what_it_owned_among_all(toy: None, toy_lake: Lake, tmp_path: Path) -> None:
    from pipelines.backfill import backfill, partition_names
    from pipelines.context import RunContext

    files = [toy_file(tmp_path / "a.jsonl", range(3)), toy_file(tmp_path / "b.jsonl", range(2, 5))]
    spec = backfill_toy.spec(toy_lake.url, *files)
    first, second = partition_names(spec)
    late = backfill(spec, RunContext(), only=[second])
    assert (late.collected, late.duplicates, late.rows_read) == (2, 1, 3)
    early = backfill(spec, RunContext(), only=[first])
    assert (early.collected, early.duplicates) == (3, 0)
    together = make_lake(str(tmp_path / "together"))
    assert (
        backfill(backfill_toy.spec(together.url, *files), RunContext()).content_digest == early.content_digest
    )


# -- versions


def test_rollouts_without_a_version_are_taken_only_when_told_and_stay_unverified(
    backfill: Backfill, toy_lake: Lake, tmp_path: Path
) -> None:
    path = toy_file(tmp_path / "a.jsonl", range(3), version=None)
    refused = backfill(path)
    assert refused.code == 1
    assert refused.json["quarantined"] == {"version_missing": 3}
    assert toy_lake.versions() == (), "a number that nothing was sampled by is not taken"
    taken = backfill(path, take_unversioned=True)
    assert taken.code == 0, taken.err
    assert (taken.json["verified"], taken.json["unverified"]) == (0, 3)


def test_weights_with_which_nothing_agrees_are_refused_before_they_take_a_version_number(
    backfill: Backfill, toy_lake: Lake, tmp_path: Path
) -> None:
    source = toy_file(tmp_path / "a.jsonl", range(5))
    plan = backfill(source, target="v1", dry_run=True).json
    assert (plan["trial_windows"], plan["trial_agreeing"]) == (5, 0)
    found = backfill(source, target="v1")
    assert found.code == 1
    assert "is still free" in found.err
    assert toy_lake.versions() == ()
    assert toy_lake.commit_paths() == []
    assert backfill(source).json["verified"] == 5


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"multimodal": True}, "multimodal"),
        ({"token_ids": "out of vocabulary"}, "token_out_of_vocab"),
        ({"token_ids": "larger than any integer column"}, "token_out_of_vocab"),
    ],
)
def test_rollouts_that_collecting_refuses_have_no_say_in_the_trial_and_do_not_end_it(
    backfill: Backfill, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    toy = ToyTarget()
    foreign = {"out of vocabulary": toy.record.vocab_size, "larger than any integer column": 2**70}
    refused = []
    for n in range(20):  # more than a trial takes, and none of them agrees
        rollout = toy.rollout(n)
        first = foreign.get(changes.get("token_ids", ""), rollout.token_ids[0])
        fields = changes | {"token_ids": (first, *rollout.token_ids[1:])}
        refused.append(replace(rollout, logprobs=(*(rollout.logprobs or ())[1:], None), **fields))
    path = tmp_path / "a.jsonl"
    text = [json.dumps(r.to_json_dict()) for r in (*refused, *(toy.rollout(n) for n in range(20, 24)))]
    path.write_text("\n".join(text) + "\n")
    plan = backfill(path, dry_run=True)
    assert (plan.json["trial_windows"], plan.json["trial_agreeing"]) == (4, 4), plan.err
    report = backfill(path).json
    assert (report["collected"], report["quarantined"]) == (4, {reason: 20})
    assert adds_up(report)


@pytest.mark.parametrize(
    "option",
    [{"version": 2**63}, {"top_k": -2}, {"top_k": 2**31}, {"temperature": "inf"}, {"temperature": "nan"}],
    ids=str,
)
def test_a_statement_that_nothing_real_has_is_an_error_of_usage(
    backfill: Backfill, toy_lake: Lake, tmp_path: Path, option: dict[str, Any]
) -> None:
    before = objects(tmp_path / "lake")
    found = backfill(toy_file(tmp_path / "a.jsonl", range(2)), **option)
    assert found.code == 2, found.err
    assert objects(tmp_path / "lake") == before


@pytest.mark.parametrize("recorded", [None, "engine_unknown"])
def test_a_stated_kind_of_logprobs_fills_an_unknown_one(
    backfill: Backfill, tmp_path: Path, recorded: str | None
) -> None:
    source = toy_file(tmp_path / "a.jsonl", range(3), logprob_kind=recorded)
    assert backfill(source, logprob_kind="engine_raw").json["verified"] == 3


def test_a_wrongly_recorded_temperature_is_told_and_nothing_is_refused(
    backfill: Backfill, tmp_path: Path
) -> None:
    rightly = backfill(toy_file(tmp_path / "a.jsonl", range(12), response=40))
    assert "warning" not in rightly.err
    assert rightly.json["sampling_tokens"] == 480
    assert abs(rightly.json["sampling_z"]) < 4
    wrongly = backfill(toy_file(tmp_path / "b.jsonl", range(20, 32), response=40, temperature=2.0))
    assert wrongly.code == 0
    assert "standard deviations" in wrongly.err
    assert wrongly.json["sampling_z"] > 6
    assert wrongly.json["verified"] == 12, "raw logprobs agree: only the z-test sees it"


def test_too_few_to_judge_are_refused_one_by_one(backfill: Backfill, tmp_path: Path) -> None:
    found = backfill(toy_file(tmp_path / "a.jsonl", range(3)), target="v1")
    assert found.code == 1
    assert found.json["quarantined"] == {"logprob_disagreement": 3}
    assert found.json["windows_written"] == 0


# -- other people's files


def test_a_framework_s_file_is_padded_synchronous_and_taken_at_its_inferred_version(
    backfill: Backfill, toy_lake: Lake, tmp_path: Path
) -> None:
    """NeMo-RL: one-element lists, right padding with a real token, 0.0 for no logprob, file N of version N - 1."""
    path = tmp_path / "train_data_step1.jsonl"
    with path.open("w") as file:
        for n in range(4):
            r, pad = ToyTarget().rollout(n), 3
            record = {
                "rewards": [1.0], "input_lengths": [len(r.token_ids)], "token_ids": [[*r.token_ids, *[0] * pad]],
                "token_loss_mask": [[*map(int, r.sampled_mask), *[0] * pad]], "sample_loss_mask": [1.0],
                "generation_logprobs": [[*(v or 0.0 for v in r.logprobs or ()), *[0.0] * pad]], "idx": n,
            }  # fmt: skip
            file.write(json.dumps(record) + "\n")
    asynchronous = backfill(path)
    assert asynchronous.json["quarantined"] == {"version_missing": 4}
    found = backfill(path, assume_synchronous=True, logprob_kind="engine_raw")
    assert found.code == 0, found.err
    assert adds_up(found.json)
    assert (found.json["collected"], found.json["verified"]) == (4, 4)
    assert set(Catalog.load(toy_lake).frame["num_rows"]) == {15}


def test_an_answer_that_two_versions_sampled_is_refused_and_taken_only_when_told(
    backfill: Backfill, tmp_path: Path
) -> None:
    """vLLM's generate endpoint with weight versions by span."""
    r, path = ToyTarget().rollout(0), tmp_path / "generate.jsonl"
    response = r.token_ids[r.prompt_length :]
    spans = [{"version": "0", "start": 0, "end": 5}, {"version": "1", "start": 5, "end": len(response)}]
    choice = {"index": 0, "finish_reason": "length", "token_ids": response, "weight_versions": spans}
    path.write_text(
        json.dumps(
            {"request_id": "q", "prompt_token_ids": r.token_ids[: r.prompt_length], "choices": [choice]}
        )
    )
    assert backfill(path).json["quarantined"] == {"version_mixed": 1}
    told = backfill(path, take_unversioned=True).json
    assert (told["collected"], told["verified"], told["unverified"]) == (1, 0, 1)


# -- estimate and quota


def test_a_dry_run_writes_nothing_and_says_what_a_run_then_does(
    backfill: Backfill, toy_lake: Lake, tmp_path: Path
) -> None:
    source = write_source(tmp_path / "a.jsonl", range(5))
    plan = backfill(source, dry_run=True)
    assert plan.code == 0, plan.err
    assert toy_lake.store.list("") == ["lake.json"]
    report = backfill(source).json
    assert plan.json["rows_read"] == report["rows_read"] == 9
    assert plan.json["windows"] == report["windows_written"] + 1, (
        "one of them disagrees, which a plan cannot know"
    )
    assert (plan.json["version_missing"], plan.json["version_mismatch"]) == (1, 1)
    assert plan.json["refused"] == {"bad_json": 1}
    assert plan.json["seconds"] == pytest.approx(plan.json["forward_tokens"] / plan.json["tokens_per_second"])


def test_a_quota_ends_a_run_within_it_and_the_next_one_goes_on_to_the_same_lake(
    backfill: Backfill, toy_lake: Lake, tmp_path: Path
) -> None:
    sources = [write_source(tmp_path / f"{n}.jsonl", range(4 * n, 4 * n + 4)) for n in range(3)]
    whole = make_lake(str(tmp_path / "whole"))
    expected = backfill(*sources, lake=whole.url).json
    written, runs = 0, 0
    while (found := backfill(*sources, quota_tokens=50)).code == 3:
        report, runs = found.json, runs + 1
        assert adds_up(report)
        assert report["over_quota"] > 0
        assert 0 < report["tokens_written"] <= 50
        assert report["rows_read"] == expected["rows_read"]
        written += report["tokens_written"]
        assert runs < 20
    assert found.code == 0, found.err
    assert runs >= 2
    assert written + found.json["tokens_written"] == expected["tokens_written"]
    assert found.json["quarantined"] == expected["quarantined"]
    assert found.json["content_digest"] == expected["content_digest"]
    kept = sorted((r.source, r.line, r.reason) for part in list_quarantine(toy_lake) for r in part.refusals)
    assert kept == sorted(
        (r.source, r.line, r.reason) for part in list_quarantine(whole) for r in part.refusals
    )


def test_a_quota_in_bytes_counts_feature_bytes(backfill: Backfill, tmp_path: Path) -> None:
    row_bytes = 3 * 16 * 4
    report = backfill(toy_file(tmp_path / "a.jsonl", range(5)), quota_bytes=35 * row_bytes).json
    assert (report["tokens_written"], report["over_quota"]) == (30, 3)
    assert report["nbytes_written"] == 30 * row_bytes


# -- what is finished


def test_what_retention_took_is_collected_again(backfill: Backfill, toy_lake: Lake, tmp_path: Path) -> None:
    source = toy_file(tmp_path / "a.jsonl", range(6))
    digest = backfill(source).json["content_digest"]
    for path in toy_lake.commit_paths()[:1]:
        (tmp_path / "lake" / path).unlink()
    again = backfill(source)
    assert again.code == 0, again.err
    assert again.json["collected"] > 0
    assert again.json["content_digest"] == digest


def test_a_grown_source_is_read_again_and_only_what_is_new_is_collected(
    backfill: Backfill, tmp_path: Path
) -> None:
    source = toy_file(tmp_path / "a.jsonl", range(3))
    assert backfill(source).json["collected"] == 3
    toy_file(source, range(5))
    grown = backfill(source).json
    assert (grown["collected"], grown["duplicates"]) == (2, 3)


def test_a_compressed_copy_adds_nothing(backfill: Backfill, tmp_path: Path) -> None:
    source = toy_file(tmp_path / "a.jsonl", range(3))
    first = backfill(source).json
    packed = tmp_path / "copy.jsonl.gz"
    packed.write_bytes(gzip.compress(source.read_bytes()))
    again = backfill(packed)
    assert again.code == 4
    assert (again.json["collected"], again.json["duplicates"]) == (0, 3)
    assert again.json["content_digest"] == first["content_digest"]


# -- wrong input


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"columns": "nothing.toml"}, "column mapping"),
        ({"quota_tokens": 0}, "quota_tokens"),
        ({"layer_ids": "2,1"}, "layer ids"),
        ({"format": "no-such"}, "no-such"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(
    backfill: Backfill, toy_lake: Lake, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    found = backfill(toy_file(tmp_path / "a.jsonl", range(1)), **options)
    assert found.code == 2
    assert said in found.line
    assert toy_lake.store.list("") == ["lake.json"]


def test_a_missing_source_is_named(backfill: Backfill, tmp_path: Path) -> None:
    found = backfill(tmp_path / "nowhere-*.jsonl")
    assert found.code == 2
    assert "nowhere" in found.line


# -- the shipped target, as users run it


def real(lake: Path, target: Path, *sources: Path, **options: Any) -> list[Any]:
    return ["backfill", *sources, *arguments(str(lake), target=target, layer_ids=None, **options)]


def test_two_workers_make_the_lake_that_one_makes(
    cli: Cli, target: Path, rollouts: list[Rollout], tmp_path: Path
) -> None:
    files = []
    for n in range(3):
        files.append(tmp_path / f"{n}.jsonl")
        write_rollouts(files[-1], rollouts[8 * n : 8 * n + 8 + 2])  # two of each come again in the next
    reports = []
    for workers in (1, 2):
        lake = tmp_path / str(workers)
        init_lake(str(lake), target=target, target_id="tiny")
        found = cli(*real(lake, target, *files, workers=workers))
        assert found.code == 0, found.err
        reports.append(found.json)
        assert adds_up(found.json)
    one, two = reports
    assert (one["collected"], one["verified"], one["duplicates"]) == (24, 24, 4)
    timings = {"seconds", "tokens_per_second"}
    measured = {"logprob_mean_error", "smallest_gap", "sampling_deviation", "sampling_variance", "sampling_z"}
    assert {k: v for k, v in one.items() if k not in timings | measured} == {
        k: v for k, v in two.items() if k not in timings | measured
    }
    assert {k: one[k] for k in measured} == pytest.approx({k: two[k] for k in measured}, rel=1e-4)
