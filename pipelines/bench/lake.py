"""``draftlake bench lake``: every claim about the lake's speed, measured where it is made.

Sections: ``local`` and ``s3`` reads, ``commit`` with many writers, ``head`` deltas. Each holds its
ratio and, beside it, the raw figures that it comes from.
"""

import contextlib
import platform
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from features.bfloat16 import float32_to_bf16
from features.catalog import Catalog
from features.errors import InputError
from features.head_delta import encode_delta
from features.heads import HeadSnapshot
from features.lake import Lake
from features.schema import FeatureDtype, SelectionFilter
from pipelines.bench.commits import ManyWriters, race_writers
from pipelines.bench.device import bench_device
from pipelines.bench.measure import Speed, interleaved
from pipelines.bench.remote import remote_speeds
from pipelines.bench.subjects import Shape, local_subjects, make_lake
from pipelines.progress import SILENT, Progress

HEAD_UPDATE = 1e-4
"""Simulated training step on the head, as a share of its weights' standard deviation."""
CEILING = "preadv"
RIVALS = ("zarr", "safetensors_per_window", "pt_per_window")

_S3_SHAPE = Shape(576, 28, 28)


@dataclass(frozen=True, slots=True)
class BenchSpec:
    """How much is measured."""

    sizes: tuple[Shape, ...] = (Shape(576, 32, 16), Shape(4096, 8, 4))
    """Windows of 512 rows; one fragment is about as large as a collector writes (36 to 64 MiB)."""
    rounds: int = 5
    s3_shape: Shape = _S3_SHAPE
    """One fragment of 63 MiB, half of what a collector writes to S3."""
    writers: int = 8
    commits_per_writer: int = 20
    head_shape: tuple[int, int] = (32_768, 576)
    s3: bool = True
    device: bool = False
    """Also copies to this machine's accelerator."""
    seed: int = 0


def bench_lake(spec: BenchSpec, *, folder: Path | None = None, progress: Progress = SILENT) -> dict[str, Any]:
    """Run everything and return the report, ready for JSON.

    Args:
        spec: how much.
        folder: where scratch files go; None: the system's temporary folder.
        progress: told what is measured.

    Raises:
        InputError: S3 is asked for and its packages are absent, or a device and there is none.
    """
    with tempfile.TemporaryDirectory(prefix="draftlake-bench-", dir=folder) as scratch, _server(spec) as s3:
        root = Path(scratch)
        progress.say("local reads: this lake, preadv, zarr-python, safetensors and .pt per window")
        report: dict[str, Any] = {"machine": _machine(), "local": _local(spec, root)}
        if s3 is not None:
            progress.say("S3 reads: requests per window, and what each client costs")
            report["s3"] = _remote(spec, s3) | remote_speeds(spec.s3_shape, rounds=spec.rounds)
        progress.say(f"commits: {spec.writers} writers, {spec.commits_per_writer} each")
        report["commit"] = _commits(spec, root, s3)
        if spec.device:
            progress.say("copies to the accelerator")
            report["device"] = bench_device(root, rounds=spec.rounds)
        progress.say("head deltas")
        report["head"] = _head(spec)
    return report


@contextlib.contextmanager
def _server(spec: BenchSpec) -> Iterator[Any]:
    if not spec.s3:
        yield None
        return
    try:
        from features.testing_s3 import ServedS3
    except ImportError as error:
        raise InputError(
            f"measuring S3 needs its client and a server ({error}): pip install 'draftlake[s3]' 'moto[server]', "
            f"or leave it out with --no-s3"
        ) from error
    with ServedS3() as server:
        yield server


def _machine() -> dict[str, Any]:
    return {"python": platform.python_version(), "machine": platform.machine(), "numpy": np.__version__}


def _local(spec: BenchSpec, root: Path) -> dict[str, Any]:
    sizes = {}
    for shape in spec.sizes:
        scratch = root / f"h{shape.hidden_size}"
        scratch.mkdir()
        lake = make_lake(str(scratch / "lake"), shape)
        selection = Catalog.load(lake).select(SelectionFilter())
        rows = list(selection.rows)
        random.Random(spec.seed).shuffle(rows)
        with local_subjects(lake, selection, rows, scratch) as subjects:
            speeds = interleaved(subjects, nbytes=shape.windows * shape.window_bytes, rounds=spec.rounds)
        sizes[str(shape.hidden_size)] = _compared(shape, speeds)
    ratios = [name for name in next(iter(sizes.values())) if "_over_" in name]
    # One number for each claim: the size where it holds least.
    return {name: min(size[name] for size in sizes.values()) for name in ratios} | {"hidden_size": sizes}


def _compared(shape: Shape, speeds: dict[str, Speed]) -> dict[str, Any]:
    plain, checked = speeds["lake"], speeds["lake_crc"]
    return {
        "read_over_preadv": plain.over(speeds[CEILING]),
        "read_crc_over_preadv": checked.over(speeds[CEILING]),
        "window_over_preadv": speeds["lake_window"].over(speeds[CEILING]),
        "reader_over_preadv": speeds["lake_reader"].over(speeds[CEILING]),
        # None of these rivals checks what it read; with our checks on, the ratio stands beside it.
        **{f"read_over_{rival}": plain.over(speeds[rival]) for rival in RIVALS},
        **{f"read_crc_over_{rival}": checked.over(speeds[rival]) for rival in RIVALS},
        "window_bytes": shape.window_bytes,
        "windows": shape.windows,
        "speeds": {
            name: {
                "median_gb_per_s": speed.median_gb_per_s,
                "cpu_s_per_gb": speed.cpu_s_per_gb,
                "gb_per_s": list(speed.gb_per_s),
            }
            for name, speed in speeds.items()
        },
    }


def _remote(spec: BenchSpec, s3: Any) -> dict[str, Any]:
    """Requests of the training reader for one epoch of windows of random, then of streaming order."""
    from training.reading.reader import SelectionReader
    from training.reading.spec import ReadSpec

    shape, options = spec.s3_shape, s3.options()
    url = make_lake(s3.make_bucket("bench-read") + "/lake", shape, **options).url
    report: dict[str, Any] = {"windows": shape.windows, "arrays": 2, "window_bytes": shape.window_bytes}
    orders = {
        "random": ReadSpec(order="random", batch_rows=shape.rows),
        "streaming": ReadSpec(order="stream"),
    }
    for name, how in orders.items():
        lake = Lake.open(url, **options)
        selection = Catalog.load(lake).select(SelectionFilter())
        s3.reset()
        read = sum(len(step.windows) for step in SelectionReader(lake, selection, how).read())
        if read != shape.windows:
            raise AssertionError(f"read {read} of {shape.windows} windows")
        ranges = [r for r in s3.requests if r.kind == "GET" and r.path.endswith("/c/0/0")]
        # Per window and array; all requests, those for token tables and lengths too, stand beside it.
        report[f"requests_per_window_{name}"] = len(ranges) / (2 * shape.windows)
        report[f"ranges_{name}"] = len(ranges)
        report[f"all_requests_{name}"] = len(s3.requests)
        report[f"bytes_over_features_{name}"] = sum(r.nbytes for r in ranges) / (
            shape.windows * shape.window_bytes
        )
    return report


def _commits(spec: BenchSpec, root: Path, s3: Any) -> dict[str, Any]:
    how: dict[str, Any] = {"writers": spec.writers, "commits_per_writer": spec.commits_per_writer}
    local = race_writers(str(root / "commits"), **how)
    if s3 is None:
        return {**_commit_figures(local), "requests_per_commit": None, "local": _commit_figures(local)}
    asked: list[Any] = []
    url, options = s3.make_bucket("bench-commit"), s3.options()
    plain = race_writers(
        f"{url}/plain", **how, storage_options=options, plain=True, at_start=s3.reset,
        at_end=lambda: asked.extend(s3.requests),
    )  # fmt: skip
    hostile = race_writers(f"{url}/hostile", **how, storage_options=options)
    beside_data = [request for request in asked if "/data/" not in request.path]
    kinds = {kind: sum(r.kind == kind for r in beside_data) for kind in sorted({r.kind for r in beside_data})}
    return {
        **_commit_figures(plain),
        "lost": local.lost + plain.lost + hostile.lost,
        "duplicated": local.duplicated + plain.duplicated + hostile.duplicated,
        "differing": local.differing + plain.differing + hostile.differing,
        "requests_per_commit": len(beside_data) / plain.commits,
        "requests_beside_data": kinds,
        "local": _commit_figures(local),
        "s3_with_fences_and_shared_plans": _commit_figures(hostile),
    }


def _commit_figures(result: ManyWriters) -> dict[str, Any]:
    names = ("writers", "commits", "plans", "lost", "duplicated", "differing", "harmful", "fenced", "seconds",
             "commits_per_s", "p50_s", "p95_s", "p95_over_p50")  # fmt: skip
    return {name: getattr(result, name) for name in names} | {"outcomes": dict(result.outcomes)}


def _head(spec: BenchSpec) -> dict[str, Any]:
    rng = np.random.default_rng(spec.seed)
    weights = 0.02 * rng.standard_normal(spec.head_shape, np.float32)
    step = HEAD_UPDATE * float(weights.std()) * rng.standard_normal(spec.head_shape, np.float32)
    base, updated = (
        HeadSnapshot(float32_to_bf16(values), FeatureDtype.BFLOAT16) for values in (weights, weights + step)
    )
    delta = len(encode_delta(updated, base, base_id=base.head_id))
    return {
        "delta_ratio": delta / updated.lm_head.nbytes,
        "delta_bytes": delta,
        "full_bytes": updated.lm_head.nbytes,
        "relative_update": HEAD_UPDATE,
    }
