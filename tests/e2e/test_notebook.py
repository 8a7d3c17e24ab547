"""The notebook runs on the demo's lake and draws its plots."""

import base64
from pathlib import Path
from typing import Any

import jupytext
import pytest
from nbclient import NotebookClient

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "acceptance_drift.py"


def test_the_notebook_runs_on_the_demo_lake_and_draws_four_plots(
    demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTLAKE_LAKE", demo.lake)
    notebook = jupytext.read(NOTEBOOK)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    images = [base64.b64decode(o["data"]["image/png"]) for o in outputs if "image/png" in o.get("data", {})]
    assert len(images) == 4
    assert all(image.startswith(b"\x89PNG") for image in images)
