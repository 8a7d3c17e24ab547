"""Who may import whom, and what may not be loaded along."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PACKAGES = ("features", "training", "publish", "pipelines", "flows")

TORCH = {"torch", "transformers", "accelerate", "vllm"}
LAKE_EXTRAS = {"polars", "zarr", "ml_dtypes", "pydantic", "httpx", "typer", "s3fs", "pandas"}
"""Packages that a collector inside a trainer does without."""
LAKE_CORE = (
    "storage", "checkpoint", "target", "heads", "lake", "writer", "selection", "quarantine", "check", "testing",
)  # fmt: skip
COLLECT_CORE = (
    "collector",
    "rollout",
    "rollouts",
    "sources",
    "sampling",
    "proofs",
    "report",
    "committed",
    "cut",
    "run",
    "live",
    "replay",
    "taps.vllm_arguments",
)


def environment(path: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(path), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}


def loaded_by(*modules: str) -> set[str]:
    """Names in ``sys.modules`` after a fresh interpreter imported the given modules."""
    source = f"import json, sys, {', '.join(modules)}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", source], env=environment(REPO), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        (tuple(f"features.{name}" for name in LAKE_CORE), TORCH | LAKE_EXTRAS),
        (tuple(f"features.collect.{name}" for name in COLLECT_CORE), TORCH | LAKE_EXTRAS),
        (("features.catalog",), TORCH | LAKE_EXTRAS - {"polars"}),
        (("training.artifact",), TORCH | {"polars", "zarr", "numpy"}),
        (("publish.registry", "publish.gates", "publish.telemetry"), TORCH | {"polars", "zarr", "httpx"}),
        (
            ("publish.swap", "publish.vllm_client", "publish.vllm_replay", "publish.launch"),
            TORCH | {"polars", "zarr"},
        ),
        (("publish.vllm_plugin", "publish.vllm_plugin.compat"), TORCH | {"features", "training", "pydantic"}),
        (("pipelines.cli",), TORCH),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_importing_stays_light(modules: tuple[str, ...], heavy: set[str]) -> None:
    loaded = loaded_by(*modules)
    assert loaded & heavy == set()
    assert "prefect" not in loaded


def lint(root: Path) -> "subprocess.CompletedProcess[str]":
    command = [
        str(Path(sys.executable).with_name("lint-imports")),
        "--no-cache",
        "--config",
        "pyproject.toml",
    ]
    return subprocess.run(
        command, cwd=root, env=environment(root), capture_output=True, text=True, check=False
    )


def test_imports_go_one_way() -> None:
    done = lint(REPO)
    assert done.returncode == 0, done.stdout


def skeleton(root: Path) -> Path:
    """A tree of the same modules, all empty, under the same contracts."""
    for package in PACKAGES:
        for path in (REPO / package).rglob("*.py"):
            empty = root / path.relative_to(REPO)
            empty.parent.mkdir(parents=True, exist_ok=True)
            empty.touch()
    (root / "pyproject.toml").write_text((REPO / "pyproject.toml").read_text())
    return root


@pytest.mark.parametrize(
    ("module", "planted", "contract"),
    [
        ("features/lake.py", "import training.artifact", "imports go one way"),
        ("training/loop.py", "import publish.registry", "imports go one way"),
        ("publish/swap.py", "import pipelines.train", "imports go one way"),
        ("pipelines/train.py", "import prefect", "Prefect is known to flows only"),
        ("publish/gates.py", "import training.loop", "publish sees training only through"),
        ("publish/vllm_plugin/backend.py", "import features.errors", "the vLLM plugin needs nothing"),
        ("publish/artifacts.py", "import torch", "the registry runs without a trainer"),
        ("features/storage.py", "import polars", "needs few packages"),
    ],
)
def test_a_planted_import_breaks_its_contract(
    tmp_path: Path, module: str, planted: str, contract: str
) -> None:
    root = skeleton(tmp_path)
    if module == "publish/artifacts.py":  # an indirect import counts as well
        (root / "publish/registry.py").write_text("import publish.artifacts\n")
    if module == "features/storage.py":
        (root / "features/lake.py").write_text("import features.storage\n")
    (root / module).write_text(f"{planted}\n")
    done = lint(root)
    broken = [line for line in done.stdout.splitlines() if line.endswith("BROKEN")]
    assert len(broken) == 1, done.stdout + done.stderr
    assert contract in broken[0]


def test_without_a_planted_import_the_skeleton_keeps_every_contract(tmp_path: Path) -> None:
    assert lint(skeleton(tmp_path)).returncode == 0
