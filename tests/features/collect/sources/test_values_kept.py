"""Null is not empty, ids are not text, and logprob i belongs to token i, through every kind of file."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from collect_toy_target import ToyTarget
from source_helpers import read_file, read_records, reasons, rollout

from features.collect.cut import cut_window
from features.collect.rollout import VersionSpan
from features.collect.rollouts import Rollout
from features.collect.sampling import WindowSpan
from features.collect.sources import lines
from features.collect.sources.mapping import load_columns
from features.collect.sources.normalised import normalised_schema, to_batch, write_normalised
from features.errors import InputError
from features.schema import FeatureDtype, FragmentLayout, TargetVersion

SLIME = {
    "file_step": 7, "group_index": 3, "index": 25, "tokens": [1, 2, 3, 4], "response_length": 3,
    "loss_mask": [1, 1, 1], "weight_versions": ["8"], "reward": 1.0, "status": "completed", "remove_sample": False,
}  # fmt: skip


def slime(**changes: Any) -> dict[str, Any]:
    return SLIME | changes


def as_parquet(path: Path, records: list[dict[str, Any]], *fields: pa.Field) -> Path:
    inferred = pa.Table.from_pylist(records)
    for field in fields:
        values = pa.array([r.get(field.name) for r in records], field.type)
        inferred = inferred.set_column(inferred.schema.get_field_index(field.name), field, values)
    pq.write_table(inferred, path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_file_of_null_logprobs_and_one_of_empty_ones_differ(tmp_path: Path, kind: str) -> None:
    def read(name: str, values: list[float] | None) -> list[Any]:
        records = [slime(tokens=[n, 2, 3, 4], rollout_log_probs=values) for n in range(3)]
        if kind == "jsonl":
            return read_records(tmp_path / f"{name}.jsonl", *records)
        return read_file(as_parquet(tmp_path / f"{name}.parquet", records))[0]

    assert [r.logprobs for r in read("null", None)] == [None] * 3
    assert reasons(read("empty", [])) == ["logprob_mismatch"] * 3


def test_normalised_columns_that_are_all_null_keep_their_declared_type(tmp_path: Path) -> None:
    plain = ToyTarget().rollout(0, logprobs=None, logprob_kind=None)
    write_normalised(tmp_path / "n.parquet", [plain])
    stored = pq.read_schema(tmp_path / "n.parquet")
    assert stored.equals(normalised_schema)
    assert stored.field("logprob").type == pa.large_list(pa.float32())
    (item,) = read_file(tmp_path / "n.parquet")[0]
    assert rollout([item]).logprobs is None
    holes = ToyTarget().rollout(0, logprobs=(None,) * 15)
    write_normalised(tmp_path / "n.parquet", [holes])
    assert rollout(read_file(tmp_path / "n.parquet")[0]).logprobs == (None,) * 15


def test_what_is_written_normalised_is_read_back(tmp_path: Path) -> None:
    full = ToyTarget(3).rollout(
        1, version=None, version_min=2, version_max=3, version_spans=(VersionSpan("2", 3, 9), VersionSpan("3", 9, 15)),
        version_source="spans", token_source="ids", trainer_logprobs=(None,) + (-0.5,) * 14, advantages=(0.25,) * 15,
        multimodal=False, source="vllm-generate", source_file="g.jsonl", source_row=4, branch=1, row_id="r",
        file_step=3, source_group="9", session_id="s", top_k=-1, reward=0.5, loss_mask=(True,) * 15,
        logprobs=(None,) * 3 + (-0.5,) * 12,
    )  # fmt: skip
    assert write_normalised(tmp_path / "n.parquet", [full]) == 1
    (item,) = read_file(tmp_path / "n.parquet")[0]
    assert item == full
    (row,) = to_batch([full]).to_pylist()
    assert (row["verify"], row["group_id"], row["split_group"]) == ("unverified", "9", full.group_id)
    (row,) = to_batch([ToyTarget(3).rollout(1)]).to_pylist()
    assert row["verify"] == "verifiable"


def test_stored_ids_are_the_truth_and_their_text_is_never_looked_at(tmp_path: Path) -> None:
    text = "\u00c3\u00a9 \ud55c\uad6d\uc5b4 \U0001f469\u200d\U0001f680"
    record = slime(tokens=[1, 240, 159, 145], response=text, prompt=text)
    assert rollout(read_records(tmp_path / "s.jsonl", record)).token_ids == (1, 240, 159, 145)


@pytest.mark.parametrize("values", [[-1.0, -2.0, -3.0, -4.0], [-1.0, -2.0]])
def test_logprobs_of_another_length_refuse_the_row_and_no_zero_is_made_up(
    tmp_path: Path, values: list[float]
) -> None:
    items = read_records(tmp_path / "s.jsonl", slime(rollout_log_probs=values))
    assert reasons(items) == ["logprob_mismatch"]


def test_nulls_in_the_middle_stay_where_they_are(tmp_path: Path) -> None:
    item = rollout(read_records(tmp_path / "s.jsonl", slime(rollout_log_probs=[-1.0, None, -3.0])))
    assert item.logprobs == (None, -1.0, None, -3.0)


def test_logprob_i_belongs_to_token_i_through_reading_and_windowing(tmp_path: Path) -> None:
    item = rollout(read_records(tmp_path / "s.jsonl", slime(rollout_log_probs=[-2.0, -3.0, -4.0])))
    assert dict(zip(item.token_ids, item.logprobs or (), strict=True)) == {1: None, 2: -2.0, 3: -3.0, 4: -4.0}
    rows = np.ones((4, 2), np.float32)
    window = cut_window(
        item, WindowSpan(1, 3), rows, rows, version=TargetVersion(7),
        layout=FragmentLayout((1,), FeatureDtype.BFLOAT16, 2),
    )  # fmt: skip
    assert window.token_ids.tolist() == [2, 3, 4]
    assert window.logprobs.tolist() == [-2.0, -3.0, -4.0]


def test_a_long_list_column_is_decoded_a_few_rows_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [slime(tokens=[n, *range(999)], response_length=999, loss_mask=None) for n in range(40)]
    path = as_parquet(tmp_path / "s.parquet", records, pa.field("loss_mask", pa.list_(pa.int64())))
    monkeypatch.setattr(lines, "PARQUET_VALUES", 3500)
    held: list[int] = []
    original = pq.ParquetFile.iter_batches

    def watched(self: pq.ParquetFile, **options: Any) -> Any:
        for batch in original(self, **options):
            held.append(len(batch["tokens"].flatten()))
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", watched)
    items, counts = read_file(path)
    assert (counts.rollouts, [rollout(items, i).token_ids[0] for i in range(40)]) == (40, list(range(40)))
    assert max(held) == 3000


def test_offsets_of_list_columns_are_64_bit() -> None:
    per_token = ("token_ids", "sampled_mask", "loss_mask", "logprob", "trainer_logprob", "advantage")
    assert all(pa.types.is_large_list(normalised_schema.field(name).type) for name in per_token)


# a mapping of one's own

COLUMNS = """
prompt_ids = "input.ids"
response_ids = "output"
response_mask = { value = "all" }
response_logprobs = "lp"
logprob_kind = { value = "engine_raw" }
version = "weights"
sample_id = "key"
temperature = "t.emp"
"""
OWN = {"input": {"ids": [1, 2]}, "output": [3, 4], "lp": [-0.5, 0.0], "weights": "5", "key": 7, "t.emp": 0.5}


def mapped(tmp_path: Path, record: dict[str, Any], columns: str = COLUMNS) -> list[Any]:
    (tmp_path / "columns.toml").write_text(columns)
    return read_records(tmp_path / "own.jsonl", record, columns=load_columns(tmp_path / "columns.toml"))


def test_a_mapping_reads_files_of_ones_own(tmp_path: Path) -> None:
    item = rollout(mapped(tmp_path, OWN))
    assert (item.token_ids, item.prompt_length, item.sampled_mask) == (
        (1, 2, 3, 4),
        2,
        (False, False, True, True),
    )
    assert item.logprobs == (None, None, -0.5, None)
    assert (item.version, item.version_source, item.version_label) == (5, "label", "5")
    assert (item.sample_id, item.logprob_kind, item.temperature) == ("7", "engine_raw", 0.5)
    assert (item.source, item.source_row) == ("mapping", 1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"output": None}, "token_ids_missing"),
        ({"lp": [-0.5]}, "logprob_mismatch"),
        ({"input": [1, 2]}, "token_ids_missing"),
        ({"t.emp": "hot"}, "bad_field"),
        ({"t.emp": -1.0}, "bad_field"),
    ],
)
def test_a_row_that_the_mapping_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    assert reasons(mapped(tmp_path, OWN | changes)) == [reason]


def test_a_mapped_row_without_a_version_has_none(tmp_path: Path) -> None:
    assert rollout(mapped(tmp_path, OWN | {"weights": None})).version is None
    assert rollout(mapped(tmp_path, OWN | {"weights": "main"})).version is None


WHOLE = {"token_ids": "ids", "prompt_length": "n", "sampled_mask": "m"}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (WHOLE | {"tokens": "x"}, "names 'tokens'; fields are token_ids"),
        ({"token_ids": "ids", "sampled_mask": "m"}, "token_ids and prompt_length, or"),
        ({"token_ids": "ids", "prompt_length": "n"}, "which tokens the target sampled"),
        (WHOLE | {"version": 5}, "version in the column mapping"),
        ([1], "a column mapping is a table"),
    ],
)
def test_a_mapping_that_leaves_something_open_is_an_error(tmp_path: Path, columns: Any, message: str) -> None:
    path = tmp_path / "columns.json"
    path.write_text(json.dumps(columns))
    with pytest.raises(InputError, match=message):
        load_columns(path)


def test_a_mapping_and_a_format_exclude_each_other(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match="give one of them"):
        read_file(tmp_path / "x.jsonl", "slime", columns=WHOLE)
    with pytest.raises(InputError, match="needs a column mapping"):
        read_file(tmp_path / "x.jsonl", "mapping")


def test_a_whole_mapping_over_json(tmp_path: Path) -> None:
    record = {"ids": [1, 2, 3], "n": 1, "m": [0, 1, 1], "lo": 4, "hi": 6}
    columns = WHOLE | {"version_min": "lo", "version_max": "hi"}
    (item,) = read_records(tmp_path / "x.jsonl", record, columns=columns)
    assert isinstance(item, Rollout)
    assert (item.version, item.version_min, item.version_max, item.loss_mask) == (None, 4, 6, None)
