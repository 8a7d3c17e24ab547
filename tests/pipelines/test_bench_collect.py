"""``bench collect`` on a tiny scale: the report holds what it says, and its parts agree."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from typer.testing import CliRunner

from pipelines.bench.collect import CollectBenchSpec, bench_collect
from pipelines.bench.collect_report import plot_collect, shown_collect
from pipelines.cli import build_app

TINY = CollectBenchSpec(
    rates=(0.05, 0.5), hidden_size=64, num_layers=3, vocab_size=128, sequences=4, length=40, steps=2, rounds=2,
    store_budget_bytes=256 << 10, store_bytes_per_s=2e6,
)  # fmt: skip


def test_the_report_counts_what_was_collected_and_keeps_to_its_budgets(tmp_path: Path) -> None:
    report = json.loads(json.dumps(bench_collect(TINY, folder=tmp_path)))
    assert set(report["overhead_fraction"]) == {"0.05", "0.5"}
    assert {"bytes_per_token", "dropped_windows", "peak_host_bytes"} <= set(report)
    for name, rate in report["cost"]["rates"].items():
        assert rate["tokens_per_step"] == pytest.approx(float(name) * 160)
        assert rate["verified_windows"] == rate["windows"] == (3 if name == "0.05" else 6) * 2
        low, high = report["overhead_interval"][name]
        assert low <= rate["overhead_fraction"] <= high
    # bfloat16 rows of two aux layers (2 and 1, of three) and the final state.
    assert report["bytes_per_token"] == 4 * 64 * 2
    for name, store in report["stores"].items():
        assert store["within_budget"]
        assert store["accounted"], name
        assert store["dropped_windows"] > 0
    assert report["stores"]["failing"]["committed_windows"] == 0
    assert report["stores"]["throttled"]["lost_windows"] == 0
    assert len(shown_collect(report)) == 4
    pytest.importorskip("matplotlib")
    plot_collect(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_dry_run_measures_nothing_and_a_rate_of_nothing_is_refused() -> None:
    shown = CliRunner().invoke(build_app(), ["bench", "collect", "--dry-run", "--json", "--rate", "0.05"])
    assert shown.exit_code == 0
    assert json.loads(shown.stdout)["rates"] == [0.05]
    refused = CliRunner().invoke(build_app(), ["bench", "collect", "--dry-run", "--rate", "0"])
    assert refused.exit_code != 0
