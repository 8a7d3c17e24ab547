"""``bench lake`` on toy sizes: every promised figure is there, comes from a measurement, and adds up."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

from features.errors import InputError
from pipelines.bench.device import bench_device
from pipelines.bench.lake import BenchSpec, bench_lake
from pipelines.bench.measure import Speed, interleaved
from pipelines.bench.plot import plot_bench
from pipelines.bench.report import shown
from pipelines.bench.subjects import Shape
from pipelines.cli.output import plain

TOY = BenchSpec(
    sizes=(Shape(16, 4, 2, rows=8), Shape(32, 2, 2, rows=8)), rounds=2, s3_shape=Shape(16, 40, 40, rows=8),
    writers=2, commits_per_writer=6, head_shape=(64, 16),
)  # fmt: skip
PROMISED = (
    "local.read_over_preadv", "local.read_over_zarr", "local.read_over_safetensors_per_window",
    "s3.requests_per_window_random", "s3.requests_per_window_streaming", "commit.writers", "commit.lost",
    "commit.requests_per_commit", "commit.p95_over_p50", "head.delta_ratio",
)  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return bench_lake(TOY, folder=tmp_path_factory.mktemp("bench"))


@pytest.mark.s3
def test_every_promised_figure_is_a_number_in_the_json(report: dict[str, Any]) -> None:
    read_back = json.loads(json.dumps(plain(report), allow_nan=False))
    for path in PROMISED:
        value: Any = read_back
        for name in path.split("."):
            value = value[name]
        assert isinstance(value, int | float), path
    measured = [row for row in shown(report) if not row["measured"].startswith("device.")]
    assert all(row["found"] is not None for row in measured)


@pytest.mark.s3
def test_s3_reads_have_a_speed_and_a_cost_for_each_client(report: dict[str, Any]) -> None:
    pytest.importorskip("obstore")
    speeds = report["s3"]["speeds"]
    ways = {f"{way}_{client}" for way in ("lake", "reader") for client in ("s3fs", "obstore")}
    assert set(speeds) == ways | {"safetensors_per_window"}
    assert all(len(s["gb_per_s"]) == TOY.rounds and s["cpu_s_per_gb"] > 0 for s in speeds.values())
    costs = [speeds[f"reader_{client}"]["cpu_s_per_gb"] for client in ("s3fs", "obstore")]
    assert report["s3"]["reader_cpu_s3fs_over_obstore"] == costs[0] / costs[1]


@pytest.mark.s3
def test_requests_and_commits_are_what_the_design_says(report: dict[str, Any]) -> None:
    assert report["s3"]["requests_per_window_random"] <= 1
    assert report["s3"]["requests_per_window_streaming"] <= 0.1
    commit = report["commit"]
    assert (commit["lost"], commit["duplicated"], commit["differing"]) == (0, 0, 0)
    # The newest snapshot is looked for once by each writer, and then once in a while.
    assert 2 <= commit["requests_per_commit"] <= 2 + commit["writers"] * 2 / commit["commits"]
    assert commit["requests_beside_data"]["CREATE"] == commit["commits"]


@pytest.mark.s3
def test_a_ratio_is_that_of_the_size_where_it_holds_least(report: dict[str, Any]) -> None:
    sizes = report["local"]["hidden_size"]
    assert set(sizes) == {"16", "32"}
    for name in ("read_over_preadv", "read_over_zarr"):
        assert report["local"][name] == min(size[name] for size in sizes.values())


@pytest.mark.s3
def test_the_plot_is_a_png(report: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_bench(report, tmp_path / "lake.png")
    assert (tmp_path / "lake.png").read_bytes().startswith(b"\x89PNG")


def test_without_s3_its_section_is_left_out_and_not_invented(tmp_path: Path) -> None:
    spec = BenchSpec(
        sizes=(Shape(16, 2, 2, rows=8),),
        rounds=1,
        writers=1,
        commits_per_writer=2,
        head_shape=(64, 16),
        s3=False,
    )
    report = bench_lake(spec, folder=tmp_path)
    assert "s3" not in report
    assert report["commit"]["requests_per_commit"] is None
    assert list(tmp_path.iterdir()) == []


def test_rivals_are_timed_in_turns_and_compared_within_a_round() -> None:
    order: list[str] = []
    subjects = {name: (lambda name=name: order.append(name)) for name in "ab"}
    speeds = interleaved(subjects, nbytes=1, rounds=2)
    first, *rest = order[2:]
    assert first == "a"
    assert rest[-1] == "a"  # the second round begins with b
    assert len(speeds["a"].gb_per_s) == 2
    slow_then_fast = Speed((1.0, 4.0, 9.0), 0.1)
    assert slow_then_fast.over(Speed((2.0, 4.0, 3.0), 0.1)) == 1.0


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_copies_to_an_accelerator_that_is_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="PyTorch sees none"):
        bench_device(tmp_path)
    assert not list(tmp_path.iterdir())
