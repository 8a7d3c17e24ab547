"""Exports read back from the documented layouts, by readers that share no code with the writers."""

import json
import os
import signal
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from command_outcome import Cli, objects

from features.bfloat16 import float32_to_bf16
from features.catalog import Catalog
from features.errors import ProofFailedError
from features.heads import HeadSnapshot
from features.lake import Lake
from features.schema import FeatureDtype, SelectionFilter, Split, VersionRange
from features.testing import (
    TINY_LAYOUT,
    TINY_TARGET,
    commit_tiny,
    register_tiny_version,
    tiny_head,
    tiny_lake,
    tiny_window,
)
from features.testing_crash import kill_everywhere
from features.windows import Window
from pipelines.collect import CollectSpec, collect, load_target
from pipelines.context import RunContext
from pipelines.export import REPORT_FILE, export
from pipelines.export_formats.final_norm import FinalNorm
from pipelines.export_formats.speculators import ArrowFiles
from pipelines.export_plan import PLAN_FILE, ExportSpec

LAYERS = 3
TORCH_OF = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The published layout: header length, JSON, then the bytes it points into."""
    raw = path.read_bytes()
    (size,) = struct.unpack_from("<Q", raw)
    body, header = raw[8 + size :], json.loads(raw[8 : 8 + size])
    header.pop("__metadata__")
    return {
        name: torch.frombuffer(
            bytearray(body[slice(*f["data_offsets"])]), dtype=TORCH_OF[f["dtype"]]
        ).reshape(f["shape"])
        for name, f in header.items()
    }


def read_speculators(out: Path) -> list[dict[str, torch.Tensor]]:
    """Row i of the saved data set with the features of ``hs_i``, split as that trainer splits them."""
    state = json.loads((out / "state.json").read_text())
    assert (state["_format_type"], state["_split"]) == ("torch", None)
    assert set(json.loads((out / "dataset_info.json").read_text())["features"]) == set(
        state["_format_columns"]
    )
    rows: list[dict[str, Any]] = []
    for file in state["_data_files"]:
        with pa.OSFile(str(out / file["filename"])) as source:
            rows += pa.ipc.open_stream(source).read_all().to_pylist()
    assert len(list((out / "hidden_states").iterdir())) == len(rows)
    found = []
    for index, row in enumerate(rows):
        stored = read_safetensors(out / "hidden_states" / f"hs_{index}.safetensors")
        assert stored["token_ids"].tolist() == row["input_ids"]
        assert row["seq_len"] == len(row["input_ids"]) == len(row["loss_mask"])
        hidden = stored["hidden_states"]
        found.append(
            {
                "input_ids": stored["token_ids"],
                "loss_mask": torch.tensor(row["loss_mask"]),
                "aux": hidden[:, :-1].flatten(1),
                "last": hidden[:, -1],
            }
        )
    return found


def read_specforge(out: Path) -> list[dict[str, torch.Tensor]]:
    """Every feature file, in the order of its number."""
    files = sorted(out.rglob("*.ckpt"), key=lambda path: int(path.stem.removeprefix("data_")))
    return [torch.load(path, weights_only=True) for path in files]


def selected(lake: Lake, version: int) -> list[Window]:
    """What an export of a version takes, read from the lake."""
    wanted = SelectionFilter(versions=VersionRange(version, version + 1), split=Split.TRAIN)
    return [lake.read_window(row) for row in Catalog.load(lake).select(wanted).rows]


def bits(array: Any) -> torch.Tensor:
    """Stored features as torch has them."""
    tensor = torch.from_numpy(np.array(array))
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


def exported(lake: Path | str, out: Path, **options: Any) -> Any:
    return export(ExportSpec(lake=str(lake), out=str(out), **options), RunContext())


def test_specforge_files_hold_the_windows_bit_for_bit_and_unshifted(cli: Cli, tmp_path: Path) -> None:
    lake, out = tiny_lake(str(tmp_path / "lake"), versions=2), tmp_path / "out"
    report = cli("export", out, "--to", "specforge", "--version", 1, "--lake", lake.url, "--json")
    assert report.code == 0, report.err
    windows, found = selected(lake, 1), read_specforge(out)
    assert len(found) == len(windows) == report.json["exported"] > 2
    for window, sample in zip(windows, found, strict=True):
        assert torch.equal(sample["aux_hidden_state"], bits(window.aux)[None])
        assert torch.equal(sample["hidden_state"], bits(window.final)[None])
        assert torch.equal(sample["hidden_states"], sample["aux_hidden_state"])
        assert torch.equal(sample["target_last_hidden_states"], sample["hidden_state"])
        assert sample["input_ids"].tolist() == window.token_ids[:-1].tolist()
        assert sample["loss_mask"].tolist() == window.sampled_mask[:-1].astype(int).tolist()
        assert sample["hidden_states"].data_ptr() == sample["aux_hidden_state"].data_ptr()
    assert report.json["layer_ids"] == [2, 4, 5]
    assert report.json["layer_ids_there"] == [1, 3, 4]
    assert report.json["supervised_tokens"] == sum(int(w.sampled_mask.sum()) for w in windows)
    assert report.json["nbytes"] == sum(path.stat().st_size for path in out.rglob("*.ckpt"))


def test_both_formats_give_the_targets_own_logits_where_their_loaders_look(
    cli: Cli, lake: Path, target: Path, tmp_path: Path
) -> None:
    arguments = ["--version", 0, "--target", target, "--lake", lake, "--json"]
    there = cli("export", tmp_path / "speculators", "--to", "speculators", *arguments)
    forge = cli("export", tmp_path / "specforge", "--to", "specforge", *arguments)
    assert (there.code, forge.code) == (0, 0), there.err + forge.err
    assert there.json["layer_ids_there"] == there.json["layer_ids"]
    assert there.json["final_error"] < 1e-5  # float32: eps and two roundings
    assert forge.json["final_error"] is None
    model, windows = load_target(target), selected(Lake.open(str(lake)), 0)
    last = model.config.num_hidden_layers
    samples = zip(
        windows,
        read_speculators(tmp_path / "speculators"),
        read_specforge(tmp_path / "specforge"),
        strict=True,
    )
    for window, speculators, specforge in samples:
        with torch.no_grad():
            expected = model(speculators["input_ids"][None], output_hidden_states=True)
            # Its loader pairs (x[t+1], g[t], y[t+1]) and norms y itself; nothing is shifted on disk.
            teacher = model.lm_head(model.model.norm(speculators["last"][1:]))
            shifted = model.lm_head(specforge["hidden_state"][0, 1:])
        layers = [layer for layer in window.layout.layer_ids if layer < last]
        wanted = torch.cat([expected.hidden_states[layer][0] for layer in layers], dim=1)
        width = wanted.shape[1]
        # Two forwards of one model in float32 differ by reordered sums.
        torch.testing.assert_close(teacher, expected.logits[0, 1:], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(shifted, expected.logits[0, 1:], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(speculators["aux"][:, :width], wanted, rtol=1e-3, atol=1e-3)
        assert torch.equal(speculators["aux"], specforge["aux_hidden_state"][0])
        assert torch.equal(speculators["aux"], bits(window.aux))
        supervised = speculators["input_ids"][speculators["loss_mask"].bool()]
        assert supervised.tolist() == window.token_ids[window.sampled_mask].tolist()


def test_the_norms_input_is_taken_as_stored_where_the_last_layer_was_collected(
    target: Path, rollout_file: Path, empty_lake: Path, tmp_path: Path
) -> None:
    last = load_target(target).config.num_hidden_layers
    spec = CollectSpec(
        lake=str(empty_lake), rollouts=(str(rollout_file),), target=str(target), version=0,
        layer_ids=(1, 2, last), dtype="bfloat16", engine_dtype="float32",
    )  # fmt: skip
    collect(spec, RunContext())
    report = exported(empty_lake, tmp_path / "out", to="speculators", layer_ids=(1, 2))
    assert (report.final_error, report.layer_ids_there) == (0.0, (1, 2))
    windows = selected(Lake.open(str(empty_lake)), 0)
    for window, sample in zip(windows, read_speculators(tmp_path / "out"), strict=True):
        width = 2 * window.layout.hidden_size
        assert torch.equal(sample["aux"], bits(window.aux[:, :width]))
        assert torch.equal(sample["last"], bits(window.aux[:, width:]))


def test_a_wrong_final_norm_is_noticed(cli: Cli, lake: Path, moved_target: Path, tmp_path: Path) -> None:
    to = ["--to", "speculators", "--lake", lake]
    without = cli("export", tmp_path / "out", *to)
    assert without.code == 2
    assert "--target" in without.line
    other = cli("export", tmp_path / "out", *to, "--target", moved_target)
    assert other.code == 1
    assert "names weights" in other.line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong", [{"gain": 1.05}, {"shift": 1}], ids=["scaled", "neighbour"])
def test_undoing_another_norm_is_refused(wrong: dict[str, float]) -> None:
    rng = np.random.default_rng(0)
    gain = (0.2 + rng.random(64)).astype(np.float32)
    norm, hidden = FinalNorm(gain, 1e-6), rng.standard_normal((9, 64)).astype(np.float32) * 30
    final = float32_to_bf16(norm.apply(hidden))
    rows, error = norm.undo(final, FeatureDtype.BFLOAT16, where="here")
    assert rows.dtype == np.uint16
    assert 0 < error < 2**-7  # bfloat16 rounds by 2 ** -9 at most, once in the file and once in the lake
    other = FinalNorm(np.roll(gain * np.float32(wrong.get("gain", 1)), int(wrong.get("shift", 0))), 1e-6)
    with pytest.raises(ProofFailedError, match="the weights in --target|The weights in --target"):
        other.undo(final, FeatureDtype.BFLOAT16, where="here")


def test_what_a_format_cannot_name_is_refused_with_the_way_out(cli: Cli, tmp_path: Path) -> None:
    lake, out = tiny_lake(str(tmp_path / "lake"), versions=3), tmp_path / "out"
    forge = ["--to", "specforge", "--lake", lake.url]
    mixed = cli("export", out, *forge)
    assert (mixed.code, "--version 2" in mixed.line) == (2, True)
    layout = replace(TINY_LAYOUT, layer_ids=(0, 4, 8))
    commit_tiny(
        lake, 2, tiny_head(2).head_id, [tiny_window(tiny_head(2), version=2, sample=40, layout=layout)]
    )
    layers = cli("export", out, *forge, "--version", 2, "--split", "all")
    assert (layers.code, "--layer-ids" in layers.line) == (2, True)
    unnamed = cli("export", out, *forge, "--version", 2, "--split", "all", "--layer-ids", "0,4")
    assert (unnamed.code, "layer id 0" in unnamed.line) == (2, True)
    absent = cli("export", out, *forge, "--version", 2, "--layer-ids", "3")
    assert (absent.code, "recorded are" in absent.line) == (2, True)
    assert not out.exists()
    shared = cli("export", out, *forge, "--version", 2, "--split", "all", "--layer-ids", "4", "--json")
    assert (shared.code, shared.json["exported"], shared.json["layer_ids_there"]) == (0, 9, [3])
    other = cli(
        "export", tmp_path / "b", *forge, "--version", 2, "--split", "all", "--layer-ids", "2,5", "--json"
    )
    assert (other.json["exported"], other.json["left_out"]) == (8, {"layer_ids_not_recorded": 1})
    assert "1 windows are left out, layer_ids_not_recorded" in other.err


def test_nothing_selected_is_exit_code_4_and_a_dry_run_writes_nothing(cli: Cli, tmp_path: Path) -> None:
    url, out = tmp_path / "lake", tmp_path / "out"
    tiny_lake(str(url), versions=1)
    before = objects(url)
    nothing = cli("export", out, "--to", "specforge", "--lake", url, "--domain", "none", "--json")
    assert (nothing.code, nothing.json["outcome"]) == (4, "nothing")
    planned = cli("export", out, "--to", "specforge", "--lake", url, "--dry-run", "--json").json
    assert (planned["outcome"], objects(url), out.exists()) == ("planned", before, False)
    done = cli("export", out, "--to", "specforge", "--lake", url, "--json").json
    for name in ("exported", "tokens", "files", "left_out", "layer_ids_there"):
        assert planned[name] == done[name], name
    assert 0 < planned["nbytes"] < done["nbytes"]
    files = objects(out)
    again = cli("export", out, "--to", "specforge", "--lake", url, "--json")
    assert (again.code, again.json["outcome"], objects(out)) == (4, "complete", files)
    assert {**again.json, "outcome": "written", "files_present": 0} == done


@pytest.mark.parametrize("damage", ["cut", "removed", "report", "plan"])
def test_an_export_that_was_damaged_is_not_called_complete(cli: Cli, tmp_path: Path, damage: str) -> None:
    url, out = tmp_path / "lake", tmp_path / "out"
    tiny_lake(str(url), versions=1)
    assert cli("export", out, "--to", "specforge", "--lake", url).code == 0
    sample = next(out.rglob("data_*.ckpt"))
    if damage == "removed":
        sample.unlink()
    elif damage == "cut":
        sample.write_bytes(sample.read_bytes()[:-1])
    else:
        (out / f"draftlake-export{'-report' if damage == 'report' else ''}.json").write_bytes(b"{")
    found = cli("export", out, "--to", "specforge", "--lake", url, "--json")
    assert (found.code, found.out) == (1, "")
    assert "export" in found.err


def test_a_folder_that_holds_something_else_is_left_alone(cli: Cli, tmp_path: Path) -> None:
    url, out = tmp_path / "lake", tmp_path / "out"
    tiny_lake(str(url), versions=2)
    forge = ["--to", "specforge", "--lake", url, "--version"]
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "film.partial").write_text("mine")
    refused = cli("export", tmp_path / "notes", *forge, 0)
    assert (refused.code, "film.partial" in refused.line) == (2, True)
    assert objects(tmp_path / "notes") == {"film.partial": 4}
    assert cli("export", out, *forge, 0).code == 0
    before = objects(out)
    other = cli("export", out, *forge, 1)
    assert (other.code, objects(out)) == (2, before)
    assert "version" in other.line
    assert cli("export", tmp_path / "notes" / "film.partial", *forge, 0).code == 2
    assert cli("export", "s3://bucket/out", *forge, 0).code == 2


def test_windows_a_trainer_cannot_use_are_left_out_and_counted(tmp_path: Path) -> None:
    lake, head = Lake.init(str(tmp_path / "lake"), TINY_TARGET), tiny_head()
    head_id = register_tiny_version(lake, 0, head)
    good, later, spoilt, silent = (tiny_window(head, sample=sample) for sample in range(4))
    spoilt.final[3, 1] = 0x7F80  # an infinity in bfloat16
    silent.sampled_mask[:] = False
    silent.sampled_mask[5:10:2] = True
    later = replace(later, meta=replace(later.meta, start=7, sequence_length=19))
    cut = tiny_window(head, sample=4)
    cut.token_ids[-1] = 5
    cut = replace(cut, meta=replace(cut.meta, sequence_length=30))
    commit_tiny(lake, 0, head_id, [good, later, spoilt, silent, cut])
    report = exported(lake.url, tmp_path / "out", to="specforge", split="all")
    assert report.exported == 2
    assert report.left_out == {"starts_after_0": 1, "not_finite": 1, "no_two_supervised_in_a_row": 1}
    assert (report.cut_sequences, report.without_context) == (1, 0)
    assert [path.name for path in sorted((tmp_path / "out").rglob("*.ckpt"))] == [
        "data_0.ckpt",
        "data_1.ckpt",
    ]
    partial = exported(lake.url, tmp_path / "partial", to="specforge", split="all", partial=True)
    assert (partial.exported, partial.without_context) == (3, 1)
    no_mask = exported(lake.url, tmp_path / "loss", to="specforge", split="all", mask="loss")
    assert (no_mask.outcome, no_mask.left_out) == ("nothing", {"starts_after_0": 1, "no_loss_mask": 4})


def test_a_head_that_the_trainer_cannot_apply_is_said(cli: Cli, tmp_path: Path) -> None:
    lake = Lake.init(str(tmp_path / "lake"), TINY_TARGET)
    head = HeadSnapshot(tiny_head().lm_head, FeatureDtype.BFLOAT16, softcap=30.0)
    commit_tiny(lake, 0, register_tiny_version(lake, 0, head), [tiny_window(head)])
    done = cli(
        "export", tmp_path / "out", "--to", "specforge", "--split", "all", "--lake", lake.url, "--json"
    )
    assert (done.code, len(done.json["notes"])) == (0, 1)
    assert "softcap 30.0" in done.err


def test_token_files_are_cut_and_named_in_order(
    lake: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ArrowFiles, "samples_per_file", 3)
    report = exported(lake, tmp_path / "out", to="speculators", target=str(target))
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.arrow"))
    assert shards == [f"data-{n:05d}.arrow" for n in range(-(-report.exported // 3))]
    assert report.files == report.exported + len(shards) + 2
    ids = [window.token_ids[:-1].tolist() for window in selected(Lake.open(str(lake)), 0)]
    assert [sample["input_ids"].tolist() for sample in read_speculators(tmp_path / "out")] == ids


DRAFTLAKE = Path(sys.executable).with_name("draftlake")


def contents(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_a_killed_export_is_completed_from_the_revision_it_began_with(cli: Cli, tmp_path: Path) -> None:
    lake, out = tiny_lake(str(tmp_path / "lake"), versions=1, samples_per_version=80), tmp_path / "out"
    arguments = ["--to", "specforge", "--lake", lake.url, "--json"]
    whole = cli("export", tmp_path / "whole", *arguments).json
    process = subprocess.Popen(
        [str(DRAFTLAKE), "export", str(out), *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 300
    try:
        while process.poll() is None and len(list(out.rglob("*.ckpt"))) < 3:
            assert time.monotonic() < deadline, "the command never began to write"
            time.sleep(0.001)
    finally:
        process.kill()
    assert process.wait(timeout=30) == -signal.SIGKILL, "it had ended before"
    assert not (out / REPORT_FILE).exists()
    commit_tiny(lake, 0, tiny_head().head_id, [tiny_window(tiny_head(), sample=90)])
    again = cli("export", out, *arguments)
    assert again.code == 0, again.err
    assert 3 <= again.json["files_present"] < whole["files"]
    assert {**again.json, "files_present": 0, "out": whole["out"]} == whole
    assert contents(out) == contents(tmp_path / "whole")


PREPARE = """
from features.testing import *
from features.lake import Lake
layout = FragmentLayout((2, 8), FeatureDtype.BFLOAT16, 16)
lake, head = Lake.init(url + "/lake", TINY_TARGET), tiny_head()
windows = [tiny_window(head, sample=s, layout=layout) for s in range(2)]
commit_tiny(lake, 0, register_tiny_version(lake, 0, head), windows)
"""
EXPORT = """
import pipelines.export as ours
from pipelines.context import RunContext
from pipelines.export_plan import PLAN_FILE, ExportSpec
ours._READERS = ours._READ_AHEAD = 1  # one thing at a time, so that a step has one number
ours.export(ExportSpec(lake=url + "/lake", out=url + "/out", to="speculators", split="all"), RunContext())
"""


@pytest.mark.skipif("DRAFTLAKE_SOAK" not in os.environ, reason="kills some fifty processes: DRAFTLAKE_SOAK=1")
def test_an_export_killed_at_any_step_is_completed_by_running_it_again(tmp_path: Path) -> None:
    deaths = kill_everywhere(PREPARE, EXPORT, tmp_path)
    unharmed = contents(tmp_path / "unharmed" / "out")
    assert len(unharmed) == 7  # plan, two sequences, tokens, two closing files, report
    assert len(deaths) > 3 * len(unharmed)
    resumed = 0
    for moment, folder in deaths:
        assert not (folder / "out" / REPORT_FILE).exists() or (folder / "out" / "state.json").exists(), moment
        # Commits that came meanwhile are not of the revision that the export began with.
        begun = (folder / "out" / PLAN_FILE).exists()
        if begun:
            head = tiny_head()
            layout = replace(TINY_LAYOUT, layer_ids=(2, 8))
            lake = Lake.open(str(folder / "lake"))
            commit_tiny(lake, 0, head.head_id, [tiny_window(head, sample=9, layout=layout)])
        report = exported(folder / "lake", folder / "out", to="speculators", split="all")
        resumed += 0 < report.files_present < report.files
        assert contents(folder / "out") == unharmed, moment
        assert len(read_speculators(folder / "out")) == 2
    assert resumed > 3
