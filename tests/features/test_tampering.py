"""Stored objects that were edited, swapped or rotted are named and refused, never used."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from features.catalog import Catalog
from features.check import check_lake
from features.commits import decode_commit
from features.errors import CorruptDataError, LakeContractError, PlanConflictError, VersionConflictError
from features.lake import Lake, version_path
from features.schema import COMMIT_SCHEMA, SelectionFilter, TargetVersion
from features.seals import sealed
from features.selection import Selection
from features.testing import (
    TINY_LAYOUT,
    commit_tiny,
    register_tiny_version,
    tiny_head,
    tiny_lake,
    tiny_window,
)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return tiny_lake(str(tmp_path / "lake"), versions=2, samples_per_version=4)


def overwrite(lake: Lake, path: str, data: bytes) -> None:
    (Path(lake.url) / path).write_bytes(data)


def edit_commit(lake: Lake, path: str, **values: Any) -> None:
    """What a person with a notebook does: read, set a column, write it back with all metadata."""
    table = pq.read_table(io.BytesIO(lake.store.read(path)))
    for name, value in values.items():
        place = table.schema.get_field_index(name)
        column = pa.array([value] * table.num_rows, table.schema.field(place).type)
        table = table.set_column(place, table.schema.field(place), column)
    sink = io.BytesIO()
    pq.write_table(table, sink)
    overwrite(lake, path, sink.getvalue())


def edit_version(lake: Lake, number: int, **values: Any) -> Lake:
    path = version_path(TargetVersion(number))
    document = json.loads(lake.store.read(path))
    overwrite(lake, path, json.dumps({**document, **values}).encode())
    return Lake.open(lake.url)


@pytest.mark.parametrize(
    "values",
    [
        {"group_id": "another-group"},
        {"temperature": 0.0},
        {"layer_ids": [1, 4, 5]},
        {"verification": "verified", "reward": 9.0},
        {"start": 3, "sequence_length": 40},
        {"prompt_length": 1},
    ],
)
def test_a_commit_whose_rows_were_edited_is_refused(lake: Lake, values: dict[str, Any]) -> None:
    path = lake.commit_paths()[0]
    edit_commit(lake, path, **values)
    with pytest.raises(CorruptDataError, match=r"changed after it was written.*Restore"):
        Catalog.load(lake)
    assert [f.code for f in check_lake(lake) if f.path == path] == ["commit_unreadable"]


def test_a_commit_without_its_digest_is_refused(lake: Lake) -> None:
    path = lake.commit_paths()[0]
    table = pq.read_table(io.BytesIO(lake.store.read(path))).replace_schema_metadata(None)
    sink = io.BytesIO()
    pq.write_table(table, sink)
    overwrite(lake, path, sink.getvalue())
    with pytest.raises(CorruptDataError, match="no digest"):
        Catalog.load(lake)


def test_no_rotten_byte_of_a_commit_changes_a_row_unseen(lake: Lake) -> None:
    raw = lake.store.read(lake.commit_paths()[0])
    whole = decode_commit(raw, where="x").to_pylist()
    for place in range(0, len(raw), 7):
        rotten = bytearray(raw)
        rotten[place] ^= 0x10
        try:
            found = decode_commit(bytes(rotten), where="x").to_pylist()
        except LakeContractError:
            continue
        assert found == whole, f"byte {place}"


@pytest.mark.parametrize("name", ["schema_version", "group_id", "row_offset"])
def test_a_null_where_a_value_must_be_is_refused(lake: Lake, name: str) -> None:
    rows = decode_commit(lake.store.read(lake.commit_paths()[0]), where="x").to_pylist()
    schema = pa.schema([f.with_nullable(True) for f in COMMIT_SCHEMA])
    table = pa.Table.from_pylist([{**row, name: None} for row in rows], schema)
    sink = io.BytesIO()
    pq.write_table(sealed(table), sink)
    with pytest.raises(CorruptDataError, match=name):
        decode_commit(sink.getvalue(), where="x")


@pytest.mark.parametrize("place", ["version", "plan"])
def test_a_commit_copied_under_another_name_is_refused(lake: Lake, place: str) -> None:
    source = next(path for path in lake.commit_paths() if "v=000000000" in path)
    copied = source.replace("v=000000000", "v=000000001")
    if place == "plan":
        copied = "commits/v=000000000/" + "0" * 32 + ".0.parquet"
    lake.store.create(copied, lake.store.read(source))
    with pytest.raises(CorruptDataError, match="moved or copied"):
        Catalog.load(lake)
    assert copied in [f.path for f in check_lake(lake) if f.harmful]


def test_a_fragment_of_another_target_is_refused(lake: Lake, tmp_path: Path) -> None:
    other = replace(lake.target, target_id="elsewhere")
    foreign = tiny_lake(str(tmp_path / "other"), versions=1, samples_per_version=1, target=other)
    path = foreign.commit_paths()[0]
    if path in lake.commit_paths():
        (Path(lake.url) / path).unlink()
    lake.store.create(path, foreign.store.read(path))
    with pytest.raises(CorruptDataError, match="elsewhere"):
        Catalog.load(lake)


def test_a_version_record_that_names_another_head_is_refused(lake: Lake) -> None:
    rows = Catalog.load(lake).select(SelectionFilter()).rows
    lake = edit_version(lake, 0, head_id=lake.version(TargetVersion(1)).head_id)
    with pytest.raises(VersionConflictError, match="collected with head"):
        Catalog.load(lake)
    with pytest.raises(VersionConflictError, match="collected with head"):
        lake.read_window(rows[0])


@pytest.mark.parametrize("field", ["target_id", "tokenizer_digest", "hidden_size", "vocab_size"])
def test_a_version_record_that_is_not_of_this_lakes_target_is_refused(lake: Lake, field: str) -> None:
    value = 7 if field in ("hidden_size", "vocab_size") else "other"
    with pytest.raises(CorruptDataError, match=field):
        edit_version(lake, 0, **{field: value}).version(TargetVersion(0))


def test_a_folder_that_is_no_version_does_not_hide_the_others(lake: Lake) -> None:
    for name in ("v=1", "draft", "v=abc"):
        lake.store.create(f"versions/{name}/version.json", b"{}")
    assert [record.version.number for record in lake.versions()] == [0, 1]


def test_a_window_whose_row_disagrees_with_its_tokens_is_refused(lake: Lake) -> None:
    row = Catalog.load(lake).select(SelectionFilter()).rows[0]
    for change in ({"start": 5}, {"sequence_length": row["sequence_length"] + 1}, {"target_id": "other"}):
        with pytest.raises(LakeContractError):
            lake.read_window({**row, **change})
        with pytest.raises(LakeContractError):
            lake.read_tokens({**row, **change})


def test_one_sample_in_two_groups_is_a_conflict_and_not_both_sides_of_the_split(lake: Lake) -> None:
    head = tiny_head()
    again = tiny_window(head, sample=90, group_id="first")
    commit_tiny(lake, 0, head.head_id, [again])
    cut = replace(again, meta=replace(again.meta, group_id="second"))
    commit_tiny(lake, 0, head.head_id, [cut, tiny_window(head, sample=91)])
    with pytest.raises(PlanConflictError, match=r"groups.*first.*second"):
        Catalog.load(lake).select(SelectionFilter())


def test_a_version_moved_to_another_disk_by_a_link_is_still_seen(lake: Lake, tmp_path: Path) -> None:
    before = Catalog.load(lake).revision
    for kind in ("commits", "data", "versions"):
        folder = Path(lake.url) / kind / "v=000000001"
        folder.rename(tmp_path / f"moved-{kind}")
        folder.symlink_to(tmp_path / f"moved-{kind}")
    assert Catalog.load(lake).revision == before
    assert not [f for f in check_lake(lake, 2) if f.harmful]


def test_a_link_that_goes_in_circles_ends(lake: Lake) -> None:
    (Path(lake.url) / "commits" / "again").symlink_to(lake.url)
    assert len(Catalog.load(lake).commit_paths) == 2


def test_deleting_never_follows_a_link(lake: Lake, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").write_bytes(b"x")
    (Path(lake.url) / "probe").mkdir()
    (Path(lake.url) / "probe" / "link").symlink_to(outside)
    lake.store.delete_prefix("probe")
    assert (outside / "keep").exists()


def _regroup(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "group_id": "another"}


def _relayer(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "layer_ids": [1, 4, 5]}


@pytest.mark.parametrize("change", [_regroup, _relayer])
def test_a_stored_selection_with_any_edited_column_is_refused(
    lake: Lake, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    raw = Catalog.load(lake).select(SelectionFilter()).to_arrow_bytes()
    table = pa.ipc.open_file(pa.BufferReader(raw)).read_all()
    edited = pa.Table.from_pylist([change(row) for row in table.to_pylist()], COMMIT_SCHEMA)
    edited = edited.replace_schema_metadata(table.schema.metadata)
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, edited.schema) as writer:
        writer.write_table(edited)
    with pytest.raises(CorruptDataError, match="changed after"):
        Selection.from_arrow_bytes(sink.getvalue())


def test_a_head_of_another_shape_under_its_own_digest_is_refused(lake: Lake) -> None:
    small = tiny_head(target=replace(lake.target, vocab_size=32))
    other = tiny_lake(f"memory://{lake.url}", versions=1, target=replace(lake.target, vocab_size=32))
    head_id = register_tiny_version(other, 5, small)
    lake.store.create(f"blobs/{head_id}.safetensors", small.to_bytes())
    with pytest.raises(CorruptDataError, match="32"):
        lake.head(head_id)


def test_one_sample_id_with_other_tokens_in_another_layout_is_a_conflict(lake: Lake) -> None:
    head = tiny_head()
    layout = replace(TINY_LAYOUT, layer_ids=(1, 2, 3))
    commit_tiny(lake, 0, head.head_id, [tiny_window(head, sample=90)])
    commit_tiny(lake, 0, head.head_id, [tiny_window(head, sample=90, layout=layout, seed=5)])
    with pytest.raises(PlanConflictError, match="different tokens"):
        Catalog.load(lake).select(SelectionFilter())


def test_no_changed_byte_of_a_token_table_ends_the_process_or_is_believed(tmp_path: Path) -> None:
    lake = tiny_lake(str(tmp_path / "flipped"), versions=1, samples_per_version=2)
    rows = Catalog.load(lake).select(SelectionFilter()).rows
    whole = [lake.read_window(row).token_ids.tolist() for row in rows]
    (path,) = (tmp_path / "flipped").rglob("tokens.arrow")
    raw, refused = path.read_bytes(), 0
    for at in range(0, len(raw), 2):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        try:
            reader = Lake(lake.store, lake.target)
            assert [reader.read_window(row).token_ids.tolist() for row in rows] == whole, at
        except CorruptDataError:
            refused += 1
    assert refused > 100
