"""The backfill flow's steps, without a server: what is asked of which process, and how reports add up."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.states import Failed

from features.errors import DraftlakeError, InputError, ProofFailedError
from flows import backfill
from flows.subprocess_step import run_json
from pipelines.backfill_process import command, request
from pipelines.backfill_spec import BackfillReport, BackfillSpec


def report(**changes: Any) -> BackfillReport:
    values = {
        "version": 3, "partitions": 1, "partitions_finished": 1, "partitions_finished_before": 0, "rows_read": 10,
        "collected": 6, "duplicates": 1, "pad_rows": 0, "skipped_by_sampling": 1, "quarantined": {"bad_json": 2},
        "over_quota": 0, "windows_written": 6, "tokens_written": 60, "nbytes_written": 600, "fragments": 1,
        "verified": 6, "unverified": 0, "windows_compared": 6, "logprob_mean_error": 0.01, "smallest_gap": 0.05,
        "sampling_tokens": 400, "sampling_deviation": 10.0, "sampling_variance": 100.0, "sampling_z": 1.0,
        "seconds": 2.0, "tokens_per_second": 30.0, "lake_revision": "a" * 64, "content_digest": "b" * 64,
    }  # fmt: skip
    return BackfillReport.model_validate(values | changes)


def spec(**changes: Any) -> BackfillSpec:
    given = {"lake": "/lake", "sources": ("/rollouts/*.jsonl",), "target": "/target", "version": 3}
    return BackfillSpec.model_validate(given | changes)


def test_reports_of_tasks_add_up_to_the_runs() -> None:
    other = report(
        quarantined={"bad_json": 1, "too_long": 3}, collected=4, lake_revision="c" * 64, seconds=6.0
    )
    found = backfill.merged_reports([report(), other])
    assert (found.rows_read, found.collected, found.partitions) == (20, 10, 2)
    assert found.quarantined == {"bad_json": 3, "too_long": 3}
    assert found.accounted == found.rows_read
    assert (found.lake_revision, found.version) == ("c" * 64, 3)
    assert found.tokens_per_second == pytest.approx(30.0)
    assert (found.sampling_tokens, found.sampling_z) == (800, pytest.approx(20 / 200**0.5))


def test_partitions_share_a_bounded_number_of_tasks_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    waited: list[int] = []

    def submit(_spec: BackfillSpec, names: tuple[str, ...]) -> Any:
        asked.append(names)
        return SimpleNamespace(result=lambda: report(partitions=len(names)))

    monkeypatch.setattr(backfill, "collect", SimpleNamespace(submit=submit))
    monkeypatch.setattr(backfill, "wait", lambda futures: waited.append(len(futures)))
    names = [f"p{n}" for n in range(170)]
    reports = backfill._collected(spec(), names, concurrency=4)
    assert [name for group in asked for name in group] == names
    assert len(asked) <= backfill.MAX_TASKS
    assert max(waited) == 4
    assert sum(r.partitions for r in reports) == 170


@pytest.mark.parametrize(
    ("sources", "options", "said"),
    [
        (["rollouts/*.jsonl"], {}, "absolute"),
        (["/rollouts"], {"quota_tokens": 5}, "quota_tokens"),
        (["/rollouts"], {"lake": "/elsewhere"}, "lake"),
    ],
)
def test_what_a_run_cannot_mean_is_refused_at_its_start(
    sources: list[str], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        backfill._spec("/lake", sources, "/target", 3, options)


def test_options_are_fields_of_the_backfill() -> None:
    found = backfill._spec(
        "/lake", ["s3://b/r"], "/target", 3, {"assume_synchronous": True, "layer_ids": [2, 4]}
    )
    assert (found.assume_synchronous, found.layer_ids) == (True, (2, 4))


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (ConnectionError("reset"), True),
        (DraftlakeError("killed by SIGKILL"), True),
        (InputError("no lake"), False),
        (ProofFailedError("off by one"), False),
    ],
)
def test_only_trouble_that_can_pass_is_retried(error: Exception, again: bool) -> None:
    assert asyncio.run(backfill.may_pass(None, None, Failed(data=error))) is again


def test_a_task_is_a_process_whose_usage_error_comes_back_as_one(tmp_path: Any) -> None:
    file = tmp_path / "request.json"
    file.write_text(request(spec(lake=str(tmp_path / "nowhere")), ("a.jsonl",)))
    with pytest.raises(InputError, match="no lake at"):
        run_json(command(file), poll_s=0.05)


def test_the_page_names_every_fate_and_the_digest() -> None:
    page = backfill.render(report(over_quota=0, quarantined={"bad_json": 2}))
    for part in ("| rows read | 10 |", "| collected | 6 |", "| refused: bad_json | 2 |", "b" * 64):
        assert part in page
