"""Revisions and selections: exact, ordered, hashed, split by group."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from features.catalog import Catalog
from features.commits import COMMIT_SCHEMA, decode_commit, encode_commit
from features.errors import (
    CorruptDataError,
    EmptySelectionError,
    InputError,
    LakeContractError,
    PlanConflictError,
)
from features.lake import Lake
from features.schema import FORMAT_VERSION, SelectionFilter, Split, Verification, VersionRange
from features.seals import sealed
from features.selection import Selection, split_of
from features.testing import commit_tiny, tiny_head, tiny_lake, tiny_window


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return tiny_lake(f"memory://{tmp_path}", versions=3, samples_per_version=20)


def ids(selection: Selection) -> list[tuple[int, str, int]]:
    return [(row["target_version"], row["sample_id"], row["start"]) for row in selection.rows]


def test_a_selection_is_ordered_by_version_sample_and_start(lake: Lake) -> None:
    selection = Catalog.load(lake).select(SelectionFilter())
    assert ids(selection) == sorted(ids(selection))
    assert len(selection) == 60 == selection.plan.windows
    assert selection.plan.tokens == sum(row["num_rows"] for row in selection.rows)
    assert selection.plan.nbytes == selection.plan.tokens * 64 * 2
    assert selection.plan.versions == (0, 1, 2)
    assert selection.plan.heads_missing == ()


@pytest.mark.parametrize(("first", "stop", "versions"), [(1, 2, {1}), (1, None, {1, 2}), (0, 2, {0, 1})])
def test_a_version_range_excludes_its_stop(
    lake: Lake, first: int, stop: int | None, versions: set[int]
) -> None:
    selection = Catalog.load(lake).select(SelectionFilter(VersionRange(first, stop)))
    assert {row["target_version"] for row in selection.rows} == versions


def test_the_split_is_by_group_and_the_same_at_every_version(lake: Lake) -> None:
    catalog = Catalog.load(lake)
    sides = {
        split: catalog.select(SelectionFilter(split=split, held_out_percent=40))
        for split in (Split.TRAIN, Split.HELD_OUT)
    }
    groups = {split: {row["group_id"] for row in side.rows} for split, side in sides.items()}
    assert groups[Split.TRAIN] & groups[Split.HELD_OUT] == set()
    assert all(groups.values())
    assert sum(map(len, sides.values())) == 60


def test_the_split_of_a_group_never_changes() -> None:
    held_out = [group for group in (f"g{n:04d}" for n in range(40)) if split_of(group, 20) is Split.HELD_OUT]
    assert held_out == FROZEN_HELD_OUT
    assert all(split_of(group, 60) is Split.HELD_OUT for group in held_out)
    assert split_of("anything", 0) is Split.TRAIN
    share = np.mean([split_of(f"group-{n}", 20) is Split.HELD_OUT for n in range(5000)])
    # Standard deviation of a share of 5000 draws at 0.2 is 0.006; this is four of them.
    assert abs(share - 0.2) < 0.024


def test_domains_verification_and_whole_sequences_narrow_a_selection(lake: Lake) -> None:
    head = tiny_head()
    part = tiny_window(head, sample=90, num_rows=6, sequence_length=20, domain=None,
                       verification=Verification.UNVERIFIED)  # fmt: skip
    tokens = part.token_ids.copy()
    tokens[-1] = 5
    commit_tiny(lake, 0, head.head_id, [replace(part, token_ids=tokens)])
    catalog = Catalog.load(lake)
    assert len(catalog.select(SelectionFilter())) == 61
    assert len(catalog.select(SelectionFilter(verified_only=True))) == 60
    assert len(catalog.select(SelectionFilter(whole_sequences_only=True))) == 60
    domains = {row["domain"] for row in catalog.select(SelectionFilter(domains=("code",))).rows}
    assert domains == {"code"}


def test_max_windows_takes_the_same_ones_every_time_and_grows_by_inclusion(lake: Lake) -> None:
    catalog = Catalog.load(lake)
    small = ids(catalog.select(SelectionFilter(max_windows=5)))
    assert len(small) == 5
    assert set(small) < set(ids(catalog.select(SelectionFilter(max_windows=9))))
    assert small == sorted(small) == ids(Catalog.load(lake).select(SelectionFilter(max_windows=5)))
    assert small != ids(catalog.select(SelectionFilter()))[:5]


def test_explain_costs_what_the_selection_reads(lake: Lake) -> None:
    wanted = SelectionFilter(VersionRange(1, 2), Split.HELD_OUT)
    catalog = Catalog.load(lake)
    assert catalog.explain(wanted) == catalog.select(wanted).plan


def test_an_empty_selection_says_what_there_is(lake: Lake) -> None:
    selection = Catalog.load(lake).select(SelectionFilter(VersionRange(7, 9), domains=("maths",)))
    with pytest.raises(
        EmptySelectionError, match=r"\[7, 9\).*maths.*60 windows of 10 groups, versions 0, 1, 2"
    ):
        selection.require_nonempty()
    full = Catalog.load(lake).select(SelectionFilter())
    assert full.require_nonempty() is full


def test_an_empty_lake_has_a_revision_and_an_empty_selection(tmp_path: Path) -> None:
    empty = tiny_lake(f"memory://{tmp_path}", versions=0)
    catalog = Catalog.load(empty)
    assert catalog.revision.num_fragments == 0
    with pytest.raises(EmptySelectionError, match="no window at all"):
        catalog.select(SelectionFilter()).require_nonempty()
    empty_again = Selection.from_arrow_bytes(catalog.select(SelectionFilter()).to_arrow_bytes())
    assert len(empty_again) == 0


def test_a_pinned_revision_is_read_again_after_more_commits(lake: Lake) -> None:
    before = Catalog.load(lake)
    pinned = before.pin(lake)
    assert before.pin(lake) == pinned
    head = tiny_head()
    commit_tiny(lake, 0, head.head_id, [tiny_window(head, sample=99)])
    again = Catalog.load(lake, revision=pinned.digest)
    assert again.revision == pinned
    assert again.frame.equals(before.frame)
    assert again.select(SelectionFilter()).digest == before.select(SelectionFilter()).digest


def test_a_revision_that_was_not_pinned_is_refused_once_the_lake_moved(lake: Lake) -> None:
    pinned = Catalog.load(lake).revision
    assert Catalog.load(lake, revision=pinned.digest).revision == pinned
    head = tiny_head()
    commit_tiny(lake, 0, head.head_id, [tiny_window(head, sample=99)])
    assert Catalog.load(lake).revision != pinned
    with pytest.raises(InputError, match="was never pinned"):
        Catalog.load(lake, revision=pinned.digest)


def test_a_stored_selection_is_itself_again(lake: Lake) -> None:
    wanted = SelectionFilter(
        VersionRange(0, 2), Split.TRAIN, 30, ("code",), verified_only=True, max_windows=9
    )
    selection = Catalog.load(lake).select(wanted)
    found = Selection.from_arrow_bytes(selection.to_arrow_bytes())
    assert found == selection
    assert found.digest == selection.digest
    assert lake.read_window(found.rows[0]).num_rows == found.rows[0]["num_rows"]


def test_a_stored_selection_that_was_changed_or_cut_is_refused(lake: Lake) -> None:
    selection = Catalog.load(lake).select(SelectionFilter())
    raw = selection.to_arrow_bytes()
    for bad in (raw[:-9], b"", b"ARROW1", raw.replace(b"v0-s0001", b"v0-s9991")):
        with pytest.raises(CorruptDataError, match="select"):
            Selection.from_arrow_bytes(bad)


def test_the_digest_depends_on_windows_and_order_only(lake: Lake) -> None:
    catalog = Catalog.load(lake)
    selection = catalog.select(SelectionFilter())
    assert catalog.select(SelectionFilter(VersionRange(0, 3))).digest == selection.digest
    assert replace(selection, rows=selection.rows[::-1]).digest != selection.digest
    assert replace(selection, rows=selection.rows[1:]).digest != selection.digest


def test_one_window_in_two_fragments_is_taken_once_and_counted(lake: Lake) -> None:
    head = tiny_head()
    row = Catalog.load(lake).select(SelectionFilter()).rows[0]
    commit_tiny(lake, 0, head.head_id, [lake.read_window(row)])
    selection = Catalog.load(lake).select(SelectionFilter())
    assert (len(selection), selection.duplicates) == (60, 1)


def test_one_sample_id_with_two_token_sequences_is_a_conflict_and_not_last_wins(lake: Lake) -> None:
    head = tiny_head()
    row = Catalog.load(lake).select(SelectionFilter()).rows[0]
    window = lake.read_window(row)
    tokens = window.token_ids.copy()
    tokens[1] = (tokens[1] + 1) % 64
    commit_tiny(lake, 0, head.head_id, [replace(window, token_ids=tokens)])
    catalog = Catalog.load(lake)
    with pytest.raises(PlanConflictError, match="v0-s0000"):
        catalog.select(SelectionFilter())
    assert len(catalog.select(SelectionFilter(VersionRange(1, None)))) == 40


def test_a_commit_that_is_cut_or_newer_or_something_else_is_named(lake: Lake) -> None:
    rows = decode_commit(lake.store.read(lake.commit_paths()[0]), where="x").to_pylist()
    lake.store.create("commits/v=000000000/cut.0.parquet", encode_commit(rows)[:-5])
    with pytest.raises(CorruptDataError, match=r"cut\.0\.parquet"):
        Catalog.load(lake)
    with pytest.raises(LakeContractError, match="Upgrade"):
        decode_commit(
            encode_commit([{**row, "schema_version": FORMAT_VERSION + 1} for row in rows]), where="x"
        )


def test_a_later_writers_extra_column_is_left_out_and_an_absent_nullable_one_is_null(lake: Lake) -> None:
    table = decode_commit(lake.store.read(lake.commit_paths()[0]), where="x")
    for changed in (table.append_column("new", pa.nulls(table.num_rows)), table.drop_columns(["reward"])):
        sink = io.BytesIO()
        pq.write_table(sealed(changed), sink)
        found = decode_commit(sink.getvalue(), where="x")
        assert found.schema == COMMIT_SCHEMA
    assert found["reward"].null_count == table.num_rows
    sink = io.BytesIO()
    pq.write_table(table.drop_columns(["write_uuid"]), sink)
    with pytest.raises(CorruptDataError, match="write_uuid"):
        decode_commit(sink.getvalue(), where="x")


# Fixed when the format was: a change here would move held-out groups into training.
FROZEN_HELD_OUT = ["g0000", "g0001", "g0008", "g0011", "g0014", "g0024", "g0026", "g0038"]
