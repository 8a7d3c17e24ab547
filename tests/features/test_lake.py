"""Opening a lake; versions and heads; reading windows that are whole, damaged or absent."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from features.bfloat16 import bf16_to_float32
from features.catalog import Catalog
from features.errors import (
    CorruptDataError,
    HeadMissingError,
    LakeContractError,
    LakeNotFoundError,
    TargetMismatchError,
    UnknownVersionError,
    VersionConflictError,
)
from features.head_store import head_path
from features.lake import Lake
from features.schema import FeatureDtype, FragmentLayout, HeadId, SelectionFilter, TargetVersion
from features.storage import Store
from features.testing import (
    TINY_TARGET,
    commit_tiny,
    register_tiny_version,
    tiny_head,
    tiny_lake,
    tiny_record,
    tiny_window,
)

V0 = TargetVersion(0)


def rows_of(lake: Lake) -> list[dict]:
    return Catalog.load(lake).select(SelectionFilter()).rows


def test_opening_what_is_no_lake_says_how_to_make_one(tmp_path: Path) -> None:
    for url in (str(tmp_path), str(tmp_path / "absent"), f"memory://{tmp_path}/none"):
        with pytest.raises(LakeNotFoundError, match="draftlake init"):
            Lake.open(url)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(LakeNotFoundError):
        Lake.open(str(tmp_path / "file"))


def test_initialising_again_is_fine_and_another_target_is_refused(tmp_path: Path) -> None:
    Lake.init(str(tmp_path), TINY_TARGET)
    assert Lake.init(str(tmp_path), TINY_TARGET).target == Lake.open(str(tmp_path)).target == TINY_TARGET
    with pytest.raises(TargetMismatchError, match="tokenizer_digest"):
        Lake.init(str(tmp_path), replace(TINY_TARGET, tokenizer_digest="9" * 64))
    assert Lake.open(str(tmp_path)).target == TINY_TARGET


def test_a_newer_format_is_refused_and_a_broken_file_named(tmp_path: Path) -> None:
    Lake.init(str(tmp_path), TINY_TARGET)
    path = tmp_path / "lake.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "format_version": 2}))
    with pytest.raises(LakeContractError, match="Upgrade"):
        Lake.open(str(tmp_path))
    for broken in ("", "[]", "{}", json.dumps({**document, "target": {}})):
        path.write_text(broken)
        with pytest.raises(CorruptDataError, match=r"lake\.json"):
            Lake.open(str(tmp_path))


def test_a_head_is_stored_once_and_read_back_by_its_digest(tmp_path: Path) -> None:
    lake = Lake.init(str(tmp_path), TINY_TARGET)
    head = tiny_head()
    assert lake.put_head(head) == lake.put_head(head) == head.head_id
    assert lake.store.list("blobs") == [head_path(head.head_id)]
    np.testing.assert_array_equal(lake.head(head.head_id).lm_head, head.lm_head)


def test_a_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    lake = Lake.init(str(tmp_path), TINY_TARGET)
    with pytest.raises(TargetMismatchError, match="vocab|expected"):
        lake.put_head(tiny_head(target=replace(TINY_TARGET, vocab_size=65)))
    assert lake.store.list("blobs") == []


def test_a_head_that_is_absent_cut_or_changed_is_never_used(tmp_path: Path) -> None:
    lake = tiny_lake(str(tmp_path), versions=2, samples_per_version=2)
    blob = tmp_path / head_path(lake.version(V0).head_id)
    raw = blob.read_bytes()
    blob.write_bytes(raw[:-1])
    with pytest.raises(CorruptDataError, match="blobs/"):
        lake.head_of(V0)
    blob.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(CorruptDataError, match="changed after"):
        lake.head_of(V0)
    blob.unlink()
    with pytest.raises(HeadMissingError, match="Put the head"):
        lake.head_of(V0)
    assert Catalog.load(lake).explain(SelectionFilter()).heads_missing == (0,)


def test_a_version_without_a_head_cannot_be_registered(tmp_path: Path) -> None:
    lake = Lake.init(str(tmp_path), TINY_TARGET)
    with pytest.raises(HeadMissingError, match="Put that head before"):
        lake.register_version(tiny_record(HeadId("e" * 64)))
    assert lake.versions() == ()


def test_a_version_number_names_one_set_of_weights_for_ever(tmp_path: Path) -> None:
    lake = Lake.init(str(tmp_path), TINY_TARGET)
    first, second = lake.put_head(tiny_head(0)), lake.put_head(tiny_head(1))
    assert lake.register_version(tiny_record(first)) == lake.register_version(tiny_record(first))
    for other in (tiny_record(second), replace(tiny_record(first), weights_digest="a" * 64)):
        with pytest.raises(VersionConflictError, match="other"):
            lake.register_version(other)
    assert Lake.open(str(tmp_path)).version(V0) == tiny_record(first)


@pytest.mark.parametrize("field", ["tokenizer_digest", "hidden_size", "vocab_size", "target_id"])
def test_a_version_of_another_target_is_refused(tmp_path: Path, field: str) -> None:
    lake = Lake.init(str(tmp_path), TINY_TARGET)
    head_id = lake.put_head(tiny_head())
    changed = {"tokenizer_digest": "9" * 64, "hidden_size": 17, "vocab_size": 65, "target_id": "other"}
    with pytest.raises(TargetMismatchError, match=field):
        lake.register_version(replace(tiny_record(head_id), **{field: changed[field]}))
    assert lake.versions() == ()


def test_an_unknown_version_lists_the_known_ones(tmp_path: Path) -> None:
    lake = tiny_lake(str(tmp_path), versions=(3, 7), samples_per_version=1)
    assert [r.version.number for r in lake.versions()] == [3, 7]
    with pytest.raises(UnknownVersionError, match="v000000003, v000000007"):
        lake.version(TargetVersion(5))


def test_a_version_record_copied_under_another_number_is_refused(tmp_path: Path) -> None:
    tiny_lake(str(tmp_path), versions=1, samples_per_version=1)
    folder = tmp_path / "versions"
    (folder / "v=000000004").mkdir()
    (folder / "v=000000004/version.json").write_bytes((folder / "v=000000000/version.json").read_bytes())
    with pytest.raises(CorruptDataError, match="v000000000"):
        Lake.open(str(tmp_path)).version(TargetVersion(4))


def test_a_version_registered_by_another_process_is_seen(tmp_path: Path) -> None:
    reader = Lake.init(str(tmp_path), TINY_TARGET)
    assert reader.versions() == ()
    with pytest.raises(UnknownVersionError):
        reader.version(V0)
    register_tiny_version(Lake.open(str(tmp_path)), 0, tiny_head())
    assert reader.version(V0).version == V0


def test_a_reader_sees_a_commit_of_another_process(tmp_path: Path) -> None:
    reader = tiny_lake(str(tmp_path), versions=1, samples_per_version=2)
    assert len(reader.commit_paths()) == 1
    script = f"""
from features.lake import Lake
from features.testing import *
lake = Lake.open({str(tmp_path)!r})
head = tiny_head()
commit_tiny(lake, 0, head.head_id, [tiny_window(head, sample=9)])
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    assert len(reader.commit_paths()) == 2
    assert len(rows_of(reader)) == 3


@pytest.mark.parametrize("array", ["aux", "final"])
def test_a_shard_that_cannot_be_found_once_fails_the_read_and_is_read_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, array: str
) -> None:
    lake = tiny_lake(str(tmp_path), versions=1, samples_per_version=1)
    row = Catalog.load(lake).frame.to_dicts()[0]
    before = lake.read_window(row)
    real, missed = type(lake.store).opened, []

    def opened(store: Store, path: str) -> Callable[[int, memoryview], None]:
        if f"/{array}/" in path and not missed:
            missed.append(path)
            raise FileNotFoundError(path)
        return real(store, path)

    monkeypatch.setattr(type(lake.store), "opened", opened)
    with pytest.raises(CorruptDataError, match=f"{array}/c/0/0"):
        lake.read_window(row)
    after = lake.read_window(row)
    np.testing.assert_array_equal(after.aux, before.aux)
    np.testing.assert_array_equal(after.final, before.final)


@pytest.mark.parametrize("array", ["aux", "final"])
@pytest.mark.parametrize("damage", ["absent", "short by one", "half", "one appended", "one bit", "zeros"])
def test_damaged_features_are_an_error_and_never_zeros(tmp_path: Path, array: str, damage: str) -> None:
    tiny_lake(str(tmp_path), versions=1, samples_per_version=3)
    (shard,) = tmp_path.glob(f"data/*/*/{array}/c/0/0")
    raw = shard.read_bytes()
    changed = {
        "short by one": raw[:-1],
        "half": raw[: len(raw) // 2],
        "one appended": raw + b"\0",
        "one bit": bytes([raw[0] ^ 1]) + raw[1:],
        "zeros": bytes(len(raw)),
    }
    shard.unlink() if damage == "absent" else shard.write_bytes(changed[damage])
    lake = Lake.open(str(tmp_path))
    with pytest.raises(CorruptDataError, match=f"{array}/c/0/0"):
        lake.read_window(rows_of(lake)[0])


@pytest.mark.parametrize("array", ["aux", "final"])
def test_a_shard_that_vanishes_while_it_is_read_is_an_error(tmp_path: Path, array: str) -> None:
    lake = tiny_lake(str(tmp_path), versions=1, samples_per_version=3)
    row = rows_of(lake)[0]
    lake.read_window(row)
    next(tmp_path.glob(f"data/*/*/{array}/c/0/0")).unlink()
    with pytest.raises(CorruptDataError, match="absent"):
        lake.read_window(row)


@pytest.mark.parametrize("damage", [lambda raw: raw[:-1], lambda raw: b"", None])
def test_damaged_tokens_are_an_error(tmp_path: Path, damage) -> None:
    tiny_lake(str(tmp_path), versions=1, samples_per_version=3)
    (tokens,) = tmp_path.glob("data/*/*/tokens.arrow")
    tokens.unlink() if damage is None else tokens.write_bytes(damage(tokens.read_bytes()))
    lake = Lake.open(str(tmp_path))
    with pytest.raises(CorruptDataError, match=r"tokens\.arrow"):
        lake.read_window(rows_of(lake)[0])


def test_tokens_of_another_window_do_not_pass_for_these(tmp_path: Path) -> None:
    lake = tiny_lake(str(tmp_path), versions=1, samples_per_version=3)
    first, second, _ = rows_of(lake)
    with pytest.raises(CorruptDataError, match="checksum"):
        lake.read_window({**first, "window_index": second["window_index"]})
    with pytest.raises(CorruptDataError, match="checksum"):
        lake.read_window({**first, "window_index": 99})


def test_an_unknown_codec_is_refused_and_not_decoded_as_raw(tmp_path: Path) -> None:
    lake = tiny_lake(str(tmp_path), versions=1, samples_per_version=1)
    with pytest.raises(LakeContractError, match="int8"):
        lake.read_window({**rows_of(lake)[0], "codec": "int8"})


def test_arrays_of_a_window_may_be_written_to(tmp_path: Path) -> None:
    lake = tiny_lake(str(tmp_path), versions=1, samples_per_version=1)
    row = rows_of(lake)[0]
    window = lake.read_window(row)
    for array in (window.aux, window.final, window.token_ids, window.sampled_mask, window.logprobs):
        array[...] = 0
    assert lake.read_window(row).token_ids.any()


def test_the_folder_is_a_zarr_group_that_zarr_python_reads_bit_for_bit(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    import features.zarr_bfloat16  # noqa: F401

    lake = tiny_lake(str(tmp_path), versions=1, samples_per_version=3)
    rows = rows_of(lake)
    group = zarr.open_group(tmp_path / rows[0]["data_prefix"], mode="r")
    attributes = group.attrs["draftlake"]
    assert attributes["layer_ids"] == [2, 4, 5]
    assert attributes["target_version"] == 0
    assert "blocks applied" in attributes["conventions"]["layer_id"]
    for row in rows:
        window = lake.read_window(row)
        span = slice(row["row_offset"], row["row_offset"] + row["num_rows"])
        np.testing.assert_array_equal(group["aux"][span].view(np.uint16), window.aux)
        np.testing.assert_array_equal(group["final"][span].view(np.uint16), window.final)


def test_the_tiny_lake_agrees_with_itself(tmp_path: Path) -> None:
    lake = tiny_lake(str(tmp_path), versions=2, samples_per_version=3)
    for row in rows_of(lake):
        window = lake.read_window(row)
        head = lake.head_of(window.meta.version)
        sampled = np.nonzero(window.sampled_mask)[0]
        found = head.token_logprobs(bf16_to_float32(window.final)[sampled - 1], window.token_ids[sampled])
        np.testing.assert_array_equal(found, window.logprobs[sampled])
    again = tiny_lake(f"memory://{tmp_path}", versions=2, samples_per_version=3)
    assert Catalog.load(again).revision == Catalog.load(lake).revision
    select = SelectionFilter()
    assert Catalog.load(again).select(select).digest == Catalog.load(lake).select(select).digest


def test_the_same_samples_at_two_versions_share_tokens_and_differ_in_features(tmp_path: Path) -> None:
    lake = tiny_lake(f"memory://{tmp_path}", versions=2, samples_per_version=1, same_samples=True)
    old, new = (lake.read_window(row) for row in rows_of(lake))
    assert old.meta.sample_id == new.meta.sample_id
    np.testing.assert_array_equal(old.token_ids, new.token_ids)
    assert (old.final != new.final).any()


def test_fragments_with_other_layer_ids_and_dtype_coexist(tmp_path: Path) -> None:
    lake = tiny_lake(str(tmp_path), versions=1, samples_per_version=1)
    head, layout = tiny_head(), FragmentLayout((0, 8), FeatureDtype.FLOAT32, 16)
    commit_tiny(lake, 0, head.head_id, [tiny_window(head, layout=layout)])
    found = [lake.read_window(row) for row in rows_of(lake)]
    assert sorted(window.aux.shape[1] for window in found) == [32, 48]
    assert {window.aux.dtype.name for window in found} == {"uint16", "float32"}
