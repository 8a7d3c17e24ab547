"""What int8 aux features cost where it counts: tau of the shipped draft on the same rollouts, stored both ways."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from features.catalog import Catalog
from features.lake import Lake
from features.schema import AuxCodec, SelectionFilter, Split, TargetVersion
from features.windows import Window
from features.writer import write_fragment
from pipelines.context import RunContext
from pipelines.evaluate import EvalJob, evaluate
from pipelines.promote import import_draft
from training.artifact import EvalReport

Change = Callable[[Window], None]


def measured(
    origin: Path, url: Path, draft: Path, codec: AuxCodec, change: Change
) -> tuple[EvalReport, float]:
    """Tau on a copy of the lake with its windows stored that way, and the mean stated error."""
    old = Lake.open(str(origin))
    new = Lake.init(str(url), old.target)
    new.put_target_config(old.target_config())
    (record,) = old.versions()
    new.put_head(old.head(record.head_id))
    new.register_version(record)
    windows = [old.read_window(row) for row in Catalog.load(old).select(SelectionFilter()).rows]
    for window in windows:
        change(window)
    write_fragment(
        new, version=TargetVersion(0), head_id=record.head_id, plan_id="p", windows=windows, writer_id="w", codec=codec
    )  # fmt: skip
    artifact = import_draft(str(url), draft)
    report = evaluate(EvalJob(lake=str(url), artifact=artifact, split=Split.ALL), RunContext())
    errors = [row["aux_error"] or 0.0 for row in Catalog.load(new).select(SelectionFilter()).rows]
    return report, float(np.mean(errors))


def untouched(window: Window) -> None:
    del window


def mixed_up(window: Window) -> None:
    window.aux[:] = window.aux[::-1].copy()


def test_tau_of_both_encodings_is_the_same_and_another_would_show(
    collected: Path, draft: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    raw, none = measured(collected, tmp_path / "raw", draft, AuxCodec.NONE, untouched)
    int8, error = measured(collected, tmp_path / "int8", draft, AuxCodec.INT8, untouched)
    wrong, _ = measured(collected, tmp_path / "wrong", draft, AuxCodec.NONE, mixed_up)
    tau = {
        name: report.overall.tau.value for name, report in {"raw": raw, "int8": int8, "wrong": wrong}.items()
    }
    record_property("tau", {**tau, "aux_error": error, "rounds": raw.overall.rounds})
    assert none == 0
    assert 1e-4 < error < 0.01
    assert raw.overall.rounds > 100
    # Few hundred rounds: one round that turns out otherwise moves tau by half a percent of it at most.
    assert tau["int8"] == pytest.approx(tau["raw"], rel=0.02)
    assert tau["wrong"] < 0.98 * tau["raw"]
