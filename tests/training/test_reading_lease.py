"""What is being read is not deleted: retain and gc of another process, beside a reader and beside eval."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import training.evaluate
from features.catalog import Catalog
from features.errors import InputError
from features.lake import Lake
from features.leases import leases
from features.retention import fragment_names
from features.schema import SelectionFilter
from features.selection import Selection
from features.testing import TINY_TARGET, tiny_lake
from pipelines.context import RunContext
from pipelines.evaluate import EvalJob, evaluate
from publish.registry import Registry
from training.loop import train_draft
from training.reading.dataset import WindowDataset
from training.reading.lease import fragments_of
from training.reading.spec import ReadSpec
from training.spec import Eagle3Spec, TrainSpec

DRAFTLAKE = Path(sys.executable).with_name("draftlake")
ONE_BY_ONE = ReadSpec(batch_rows=1, order="random", read_ahead_bytes=1)
CONFIG = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 16}


def draftlake(*arguments: str) -> int:
    """Run a command in a process of its own."""
    done = subprocess.run([str(DRAFTLAKE), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 4), done.stderr
    return done.returncode


def retain_the_newest(url: str) -> int:
    """Whether retention gave versions up (0) or found nothing to do (4)."""
    return draftlake("retain", "--lake", url, "--keep-versions", "1")


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return tiny_lake(str(tmp_path / "lake"), versions=2, samples_per_version=4)


@pytest.fixture
def selection(lake: Lake) -> Selection:
    return Catalog.load(lake).select(SelectionFilter())


def test_the_fragments_of_a_selection_are_those_it_reads(lake: Lake, selection: Selection) -> None:
    catalog = Catalog.load(lake)
    assert fragments_of(selection) == fragment_names(catalog)
    some = selection.at([0, 1])
    listed = Selection(some.filter, some.revision, list(some.rows), some.plan, some.available)
    assert fragments_of(some) == fragments_of(listed)
    assert {f.data_prefix for f in fragments_of(some)} == {row["data_prefix"] for row in some.rows}


def test_retain_of_another_process_waits_for_a_reader(lake: Lake, selection: Selection) -> None:
    steps = iter(WindowDataset(lake.url, selection, ONE_BY_ONE))
    read = [next(steps).indices]
    assert [lease.reader for lease in leases(lake)] == ["loader of rank 0"]
    assert retain_the_newest(lake.url) == 4
    draftlake("gc", "--lake", lake.url, "--grace", "0s", "--orphan-ttl", "0s")
    read += [step.indices for step in steps]
    assert sorted(index for indices in read for index in indices) == list(range(len(selection)))
    assert leases(lake) == ()
    assert retain_the_newest(lake.url) == 0
    with pytest.raises(InputError, match="given up by retention"):
        next(iter(WindowDataset(lake.url, selection, ONE_BY_ONE)))


def test_an_abandoned_reader_gives_its_lease_back(lake: Lake, selection: Selection) -> None:
    steps: Any = iter(WindowDataset(lake.url, selection, ONE_BY_ONE))
    next(steps)
    steps.close()
    assert leases(lake) == ()


def test_retain_of_another_process_waits_for_eval(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Trained on another lake: a draft of this one would keep its revision by itself.
    other = tiny_lake(str(tmp_path / "other"), versions=1, samples_per_version=4, seed=7)
    selection = Catalog.load(other).select(SelectionFilter())
    spec = TrainSpec(method=Eagle3Spec(ttt_steps=1), max_steps=1)
    draft = train_draft(other, selection, spec, out=tmp_path / "draft", target_config=CONFIG)
    digest = Registry(lake.store, TINY_TARGET.target_id).import_artifact(draft.folder)
    codes = []
    walk: Callable[..., Any] = training.evaluate.evaluate_draft

    def walk_beside_retention(*args: Any, **kwargs: Any) -> Any:
        codes.append(retain_the_newest(lake.url))
        return walk(*args, **kwargs)

    monkeypatch.setattr(training.evaluate, "evaluate_draft", walk_beside_retention)
    job = EvalJob(lake=lake.url, artifact=digest, first_version=0, stop_version=1, split="all")
    report = evaluate(job, RunContext())
    assert codes == [4]
    assert list(report.by_version) == [0]
    assert leases(lake) == ()
    assert retain_the_newest(lake.url) == 0
