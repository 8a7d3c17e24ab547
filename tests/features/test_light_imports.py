"""The lake's core runs inside other people's trainers: what it must not load."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("polars", "zarr", "torch", "pydantic", "transformers", "ml_dtypes", "s3fs", "pandas")
LIGHT = (
    "storage",
    "checkpoint",
    "target",
    "heads",
    "lake",
    "writer",
    "selection",
    "quarantine",
    "check",
    "testing",
    "windows",
)


def loaded_by(module: str) -> list[str]:
    script = f"import {module}, sys, json; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True)
    found: list[str] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize("name", LIGHT)
def test_a_core_module_loads_nothing_heavy(name: str) -> None:
    assert loaded_by(f"features.{name}") == []


def test_only_the_catalog_loads_polars() -> None:
    assert loaded_by("features.catalog") == ["polars"]
