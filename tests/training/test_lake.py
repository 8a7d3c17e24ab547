"""Training, evaluation and drift on a stored lake, through its own selections."""

from pathlib import Path

import pytest

from features.catalog import Catalog
from features.errors import EmptySelectionError
from features.schema import SelectionFilter, Split, VersionRange
from features.testing import tiny_lake
from training.drift import version_drift
from training.evaluate import evaluate_draft
from training.loop import train_draft
from training.spec import Eagle3Spec, TrainSpec

CONFIG = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 16}
SPEC = TrainSpec(method=Eagle3Spec(ttt_steps=2), epochs=2, batch_tokens=64)


def test_a_draft_goes_from_stored_windows_to_a_report(tmp_path: Path) -> None:
    lake = tiny_lake(str(tmp_path / "lake"), versions=2, samples_per_version=12)
    catalog = Catalog.load(lake)
    train = catalog.select(SelectionFilter(split=Split.TRAIN, held_out_percent=40))
    held_out = catalog.select(SelectionFilter(split=Split.HELD_OUT, held_out_percent=40))
    result = train_draft(lake, train, SPEC, out=tmp_path / "draft", target_config=CONFIG)
    manifest = result.artifact.manifest
    assert (manifest.lake_revision, manifest.selection_digest) == (catalog.revision.digest, train.digest)
    assert manifest.versions == (0, 1)
    modes = {"greedy" if row["temperature"] == 0 else "sampled-onehot" for row in held_out.rows}
    report = evaluate_draft(lake, held_out, result.folder, k=2, mode=modes.pop())
    assert report.artifact == result.artifact.digest
    assert report.overall.rounds > 0
    assert report.split == "held_out"


def test_another_lake_with_the_same_bytes_gives_the_same_weights(tmp_path: Path) -> None:
    digests = set()
    for name in ("a", "b"):
        lake = tiny_lake(str(tmp_path / name), versions=1, samples_per_version=6)
        selection = Catalog.load(lake).select(SelectionFilter())
        result = train_draft(lake, selection, SPEC, out=tmp_path / f"draft-{name}", target_config=CONFIG)
        digests.add(result.artifact.weights_digest)
    assert len(digests) == 1


def test_an_empty_selection_stops_before_anything_is_read(tmp_path: Path) -> None:
    lake = tiny_lake(str(tmp_path / "lake"), versions=1, samples_per_version=2)
    nothing = Catalog.load(lake).select(SelectionFilter(versions=VersionRange(5)))
    with pytest.raises(EmptySelectionError):
        train_draft(lake, nothing, SPEC, out=tmp_path / "draft", target_config=CONFIG)
    assert not (tmp_path / "draft").exists()


def test_drift_compares_the_samples_that_versions_share(tmp_path: Path) -> None:
    lake = tiny_lake(str(tmp_path / "lake"), versions=2, samples_per_version=4, same_samples=True)
    (drift,) = version_drift(lake, Catalog.load(lake).select(SelectionFilter()))
    assert drift.shared_tokens > 0
    assert drift.kl is not None
    assert drift.kl > 0
    assert drift.lm_head.cosine < 1
