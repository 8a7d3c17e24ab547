"""Drafts, selections and specs that contradict each other are refused, not averaged over."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from features.catalog import Catalog
from features.errors import CorruptDataError, DraftLayoutError, InputError
from features.lake import Lake
from features.schema import SelectionFilter, Split
from features.testing import tiny_lake
from training.artifact import load_artifact
from training.evaluate import evaluate_draft
from training.export import Staging
from training.loop import train_draft
from training.methods.eagle3.method import EAGLE3
from training.setup import take_census
from training.spec import Eagle3Spec, TrainSpec
from training.testing import TARGET_CONFIG, ToyLake, make_window

SPEC = TrainSpec(
    method=Eagle3Spec(ttt_steps=2, draft_vocab_size=24), batch_tokens=64, max_steps=1, save_dtype="float32"
)


def _windows(count: int = 4, **changes: Any) -> list[Any]:
    return [
        make_window(f"s{i}", length=14, prompt=3, seed=i, predictable=True, **changes) for i in range(count)
    ]


def _train(out: Path, wanted: SelectionFilter = SelectionFilter(), **kwargs: Any) -> Path:  # noqa: B008
    lake = ToyLake(_windows())
    kwargs = {"spec": SPEC} | kwargs
    return train_draft(lake, lake.select(wanted), out=out, target_config=TARGET_CONFIG, **kwargs).folder


def _evaluate(folder: Path, wanted: SelectionFilter = SelectionFilter(), **kwargs: Any) -> Any:  # noqa: B008
    lake = ToyLake(_windows())
    return evaluate_draft(lake, lake.select(wanted), folder, k=3, mode="sampled-onehot", **kwargs)


def train_side(percent: int) -> SelectionFilter:
    return SelectionFilter(split=Split.TRAIN, held_out_percent=percent)


def held_out(percent: int) -> SelectionFilter:
    return SelectionFilter(split=Split.HELD_OUT, held_out_percent=percent)


def edit(folder: Path, name: str, **values: Any) -> None:
    document = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**document, **values}))


def test_a_draft_is_not_measured_on_groups_that_it_was_trained_on(tmp_path: Path) -> None:
    draft = _train(tmp_path / "a", train_side(10))
    assert load_artifact(draft).manifest.held_out_percent == 10
    assert _evaluate(draft, held_out(10)).split == "held_out"
    with pytest.raises(InputError, match=r"10 %.*20 %"):
        _evaluate(draft, held_out(20))
    with pytest.raises(InputError, match="has seen some of them"):
        _evaluate(_train(tmp_path / "b", train_side(20)), held_out(20), baseline_folder=draft)
    assert _evaluate(draft, train_side(20)).split == "train"


def test_a_draft_trained_on_everything_has_no_held_out_groups(tmp_path: Path) -> None:
    draft = _train(tmp_path / "a")
    with pytest.raises(InputError, match="train it on split 'train'"):
        _evaluate(draft, held_out(5))


def test_a_warm_start_inherits_what_its_parent_has_seen(tmp_path: Path) -> None:
    parent = _train(tmp_path / "a", train_side(10))
    child = _train(tmp_path / "b", train_side(30), parent=parent)
    assert load_artifact(child).manifest.held_out_percent == 10


def test_a_parent_of_another_lake_has_seen_nothing_of_this_one(tmp_path: Path) -> None:
    parent = _train(tmp_path / "a")
    edit(parent, "manifest.json", lake_revision="another lake's")
    child = _train(tmp_path / "b", train_side(30), parent=parent)
    assert load_artifact(child).manifest.held_out_percent == 30
    assert _evaluate(parent, held_out(20)).split == "held_out"


def test_a_manifest_without_the_share_keeps_its_digest(tmp_path: Path) -> None:
    """Its file has no such field, and the engine digests the file."""
    draft = _train(tmp_path / "a")
    manifest = json.loads((draft / "manifest.json").read_text())
    del manifest["held_out_percent"]
    (draft / "manifest.json").write_text(json.dumps(manifest))
    artifact = load_artifact(draft)
    checkpoint = pytest.importorskip("publish.vllm_plugin.checkpoint")
    assert checkpoint.artifact_digest(artifact.config, manifest, artifact.tensors) == artifact.digest


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("manifest.json", {"layer_ids": [1, 2, 4]}),
        ("config.json", {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "eagle_config": {}}),
    ],
)
def test_config_and_manifest_of_different_drafts_are_refused(
    tmp_path: Path, file: str, values: dict[str, Any]
) -> None:
    """Ids 1, 2, 4 are recorded too: the walk would read them, the engine the others."""
    draft = _train(tmp_path / "a")
    edit(draft, file, **values)
    lake = ToyLake(_windows(layers=(1, 2, 3, 4)))
    with pytest.raises(DraftLayoutError, match="layer_ids"):
        evaluate_draft(lake, lake.select(), draft, k=3, mode="sampled-onehot")
    with pytest.raises(DraftLayoutError, match="layer_ids"):
        train_draft(lake, lake.select(), SPEC, out=tmp_path / "b", target_config=TARGET_CONFIG, parent=draft)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("sizes", [{"intermediate_size": 48}, {"num_attention_heads": 8}, {"head_dim": 8}])
def test_a_warm_start_never_ignores_a_size_that_was_asked_for(tmp_path: Path, sizes: dict[str, int]) -> None:
    parent = _train(tmp_path / "a")
    spec = SPEC.model_copy(update={"method": SPEC.method.model_copy(update=sizes)})
    with pytest.raises(DraftLayoutError, match=next(iter(sizes))):
        _train(tmp_path / "b", spec=spec, parent=parent)


@pytest.mark.parametrize("ids", [(3, 1, 2), (1, 1, 2)])
def test_layer_ids_out_of_order_or_twice_are_refused(tmp_path: Path, ids: tuple[int, ...]) -> None:
    with pytest.raises(DraftLayoutError, match="ascending and distinct"):
        _train(tmp_path / "a", layer_ids=ids)


def test_a_sample_recorded_in_two_layouts_counts_once(tmp_path: Path) -> None:
    draft = _train(tmp_path / "a")
    once = _windows()
    again = [replace(w, layout=replace(w.layout)) for w in _windows(layers=(1, 2, 3, 4))]
    single, double = ToyLake(once), ToyLake(once + again)
    reports = [
        evaluate_draft(lake, lake.select(), draft, k=3, mode="sampled-onehot") for lake in (single, double)
    ]
    assert reports[0].overall == reports[1].overall
    assert reports[1].skipped == {"recorded_twice": 4}
    result = train_draft(
        double, double.select(), SPEC, out=tmp_path / "b", target_config=TARGET_CONFIG, layer_ids=(1, 2, 3)
    )
    assert result.counts["windows_recorded_twice"] == 4
    assert result.counts["windows_without_supervised_tokens"] == 0


def test_a_vocabulary_is_never_counted_from_damaged_tokens(tmp_path: Path) -> None:
    lake = tiny_lake(str(tmp_path / "lake"), versions=1, samples_per_version=4, windows_per_fragment=2)
    rows = Catalog.load(lake).select(SelectionFilter()).rows
    first, second = sorted({row["data_prefix"] for row in rows})
    names = [Path(lake.url) / prefix / "tokens.arrow" for prefix in (first, second)]
    contents = [name.read_bytes() for name in names]
    names[0].write_bytes(contents[1])
    lake = Lake.open(lake.url)
    with pytest.raises(CorruptDataError):
        take_census(lake, rows, SPEC, EAGLE3)


def test_two_runs_never_share_a_folder_and_a_dead_one_holds_none(tmp_path: Path) -> None:
    out = tmp_path / "draft"
    program = (
        "import sys, time; from pathlib import Path; from training.export import Staging; "
        f"s = Staging(Path({str(out)!r})); s.open(); s.append_metrics({{'step': 1.0}}); "
        "print('open', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(InputError, match="another training run"):
            Staging(out).open()
        assert (tmp_path / "draft.partial" / "metrics.jsonl").is_file()
    finally:
        other.kill()
        other.wait()
    staging = Staging(out)
    staging.open()
    assert not list((tmp_path / "draft.partial").iterdir())
    staging.close()


def test_a_failed_run_lets_go_of_its_folder(tmp_path: Path) -> None:
    def stop(_record: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _train(tmp_path / "a", on_progress=stop)
    assert _train(tmp_path / "a").is_dir()
