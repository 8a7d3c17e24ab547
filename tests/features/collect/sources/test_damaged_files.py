"""A damaged line, stream or row group costs what is damaged; the rest is read, and everything is counted."""

import gzip
import io
import itertools
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from source_helpers import read_file, reasons, response, rollout

from features.collect.rollouts import Rollout
from features.collect.sources import SourceOptions, open_source
from features.collect.sources.files import PICKLE_SUFFIXES, jsonl_parts
from features.collect.sources.lines import json_rows
from features.errors import InputError

LINES = [json.dumps(response(first)).encode() for first in range(10, 210)]


def compressed(data: bytes, codec: str) -> bytes:
    return gzip.compress(data, mtime=0) if codec == "gzip" else pa.compress(data, codec="zstd", asbytes=True)


def test_each_kind_of_bad_line_is_refused_by_number_and_the_rest_is_read(tmp_path: Path) -> None:
    separator = json.dumps(response(7) | {"request_id": "a\u2028b"}, ensure_ascii=False).encode()
    lines = [
        *LINES[:99],
        b'{"a":1,"logprobs":[NaN',
        *LINES[99:120],
        separator,
        b'{"choices": "\xff"}',
        b"[1]",
        b"",
    ]
    raw = b"\xef\xbb\xbf" + b"\r\n".join(lines)
    (tmp_path / "generate.jsonl").write_bytes(raw)
    items, counts = read_file(tmp_path / "generate.jsonl")
    bad = [(item.line, item.reason) for item in items if not isinstance(item, Rollout)]
    assert bad == [(100, "bad_json"), (123, "bad_encoding"), (124, "bad_json")]
    assert (counts.lines, counts.rollouts, counts.refused) == (124, 121, 3)
    assert rollout(items, 121).session_id == "a\u2028b"
    assert [r.source_row for r in items if isinstance(r, Rollout)][:100:99] == [1, 101]


def test_bare_nan_and_infinity_are_no_value(tmp_path: Path) -> None:
    record = response()
    record["choices"][0]["logprobs"]["content"][0]["logprob"] = float("nan")
    record["choices"][0]["logprobs"]["content"][1]["logprob"] = float("-inf")
    (tmp_path / "g.jsonl").write_text(json.dumps(record))
    assert "NaN" in (tmp_path / "g.jsonl").read_text()
    assert rollout(read_file(tmp_path / "g.jsonl")[0]).logprobs == (None, None, None, None)


@pytest.mark.parametrize("codec", ["gzip", "zstd"])
def test_a_compressed_file_reads_as_the_plain_one_whatever_it_is_called(tmp_path: Path, codec: str) -> None:
    data = b"\n".join(LINES)
    (tmp_path / "plain.jsonl").write_bytes(data)
    members = compressed(data[:5000], codec) + compressed(data[5000:], codec)
    (tmp_path / "packed.jsonl").write_bytes(members)
    plain, _ = read_file(tmp_path / "plain.jsonl")
    packed, _ = read_file(tmp_path / "packed.jsonl")
    assert [rollout(packed, i).sample_id for i in range(200)] == [
        rollout(plain, i).sample_id for i in range(200)
    ]


@pytest.mark.parametrize("codec", ["gzip", "zstd"])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.999])
def test_a_cut_stream_keeps_every_row_before_the_cut(tmp_path: Path, codec: str, share: float) -> None:
    # Bytes that do not compress stand between the tokens, so that the cut falls between rows.
    draw = random.Random(0)
    lines = [
        json.dumps(json.loads(line) | {"request_id": draw.randbytes(800).hex()}).encode() for line in LINES
    ]
    packed = compressed(b"\n".join(lines), codec)
    cut = packed[: int(len(packed) * share)]
    (tmp_path / "g.jsonl.gz").write_bytes(cut)
    items, counts = read_file(tmp_path / "g.jsonl.gz", "vllm-generate")
    assert counts.truncated == 1
    assert reasons(items)[-1] == "truncated_file"
    whole = counts.rollouts
    assert [r.source_row for r in items if isinstance(r, Rollout)] == list(range(1, whole + 1))
    assert reasons(items)[whole:] in (["truncated_file"], ["bad_json", "truncated_file"])
    if codec == "gzip":
        import zlib

        decoded = zlib.decompressobj(31).decompress(cut)
        assert whole == decoded.count(b"\n")


@pytest.mark.parametrize("where", ["middle", "checksum"])
def test_of_a_stream_whose_bytes_were_changed_no_row_is_believed(tmp_path: Path, where: str) -> None:
    draw = random.Random(1)
    lines = [
        json.dumps(json.loads(line) | {"request_id": draw.randbytes(800).hex()}).encode() for line in LINES
    ]
    packed = bytearray(gzip.compress(b"\n".join(lines), mtime=0))
    place = len(packed) // 2 if where == "middle" else len(packed) - 8
    packed[place] ^= 0xFF
    (tmp_path / "g.jsonl.gz").write_bytes(packed)
    items, counts = read_file(tmp_path / "g.jsonl.gz", "vllm-generate")
    assert reasons(items) == ["damaged_file"]
    assert (counts.lines, counts.truncated, counts.refused) == (0, 1, 1)


def test_a_damaged_row_group_is_refused_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "g.parquet"
    rows = [json.loads(line) for line in LINES[:40]]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=10, compression="zstd")
    column = pq.ParquetFile(path).metadata.row_group(1).column(1)
    raw = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    raw[start : start + column.total_compressed_size] = b"\x7f" * column.total_compressed_size
    path.write_bytes(raw)
    items, counts = read_file(path)
    assert (counts.lines, counts.rollouts, counts.truncated) == (30, 30, 1)
    assert reasons(items).count("truncated_file") == 1
    assert [r.source_row for r in items if isinstance(r, Rollout)][9:11] == [10, 21]


def test_rows_of_a_parquet_file_that_names_a_column_twice_are_refused_each(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([json.loads(line) for line in LINES[:5]])
    pq.write_table(
        table.append_column("request_id", pa.array(["other"] * 5)), tmp_path / "g.parquet", row_group_size=2
    )
    items, counts = read_file(tmp_path / "g.parquet", "vllm-generate")
    refused = [(item.line, item.reason) for item in items if not isinstance(item, Rollout)]
    assert refused == [(row, "bad_field") for row in range(1, 6)]
    assert (counts.lines, counts.rollouts) == (5, 0)


def test_a_parquet_file_without_its_footer_is_one_refusal(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([json.loads(LINES[0])]), tmp_path / "g.parquet")
    raw = (tmp_path / "g.parquet").read_bytes()
    (tmp_path / "g.parquet").write_bytes(raw[:-20])
    items, counts = read_file(tmp_path / "g.parquet", "vllm-generate")
    assert reasons(items) == ["truncated_file"]
    assert counts.truncated == 1
    with pytest.raises(InputError, match="none of its first 1 lines is a record"):
        read_file(tmp_path / "g.parquet")


@pytest.mark.parametrize("suffix", PICKLE_SUFFIXES)
def test_names_of_pickles_are_refused(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"7{suffix}").write_bytes(LINES[0])
    with pytest.raises(InputError, match="a pickle is never opened"):
        open_source([str(tmp_path / "*")], format="slime", options=SourceOptions())


def test_a_pickle_under_another_name_is_known_by_its_bytes_and_never_run(tmp_path: Path) -> None:
    import pickle

    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "opened",)  # type: ignore[return-value]

    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "7.jsonl").write_bytes(pickle.dumps(Trap(), protocol=protocol))
        with pytest.raises(InputError, match="a pickle is never opened"):
            open_source([str(tmp_path)], format="slime", options=SourceOptions())
    (tmp_path / "7.jsonl").write_bytes(b"PK\x03\x04" + bytes(64))  # what torch.save writes
    with pytest.raises(InputError, match="a pickle is never opened"):
        open_source([str(tmp_path)], format="slime", options=SourceOptions())
    assert not (tmp_path / "opened").exists()


def test_a_line_that_never_ends_is_refused_and_the_next_is_read() -> None:
    raw = b'{"a": "' + b"x" * 300 + b'"}\n{"b": 1}\n' + b"y" * 101
    rows = list(json_rows(io.BufferedReader(io.BytesIO(raw)), max_line_bytes=100))  # type: ignore[arg-type]
    assert [(r.number, r.record, r.error and r.error.reason) for r in rows] == [
        (1, None, "line_too_long"), (2, {"b": 1}, None), (3, None, "line_too_long"),
    ]  # fmt: skip


LINE = st.one_of(
    st.binary(max_size=30).filter(lambda b: b"\n" not in b),
    st.dictionaries(
        st.text(max_size=4), st.one_of(st.none(), st.floats(), st.text(max_size=6)), max_size=3
    ).map(lambda d: json.dumps(d, ensure_ascii=False).encode("utf-8", "surrogatepass")),
)


@given(lines=st.lists(LINE, max_size=8), first=st.integers(1, 50), limit=st.integers(4, 60))
def test_any_bytes_give_one_row_per_line(lines: list[bytes], first: int, limit: int) -> None:
    raw = b"\n".join(lines)
    rows = list(json_rows(io.BufferedReader(io.BytesIO(raw)), first, max_line_bytes=limit))  # type: ignore[arg-type]
    expected = raw.count(b"\n") + (not raw.endswith(b"\n") and raw != b"")
    assert [row.number for row in rows] == list(range(first, first + expected))
    assert all((row.record is None) or (row.error is None) for row in rows)


@given(raw=st.binary(max_size=200), part=st.integers(1, 60), chunk=st.integers(1, 70))
def test_parts_cover_a_file_cut_between_lines_however_it_is_read(raw: bytes, part: int, chunk: int) -> None:
    chunks = [raw[i : i + chunk] for i in range(0, len(raw), chunk)]
    parts = list(jsonl_parts(chunks, part))
    assert parts == list(jsonl_parts([raw] if raw else [], part))
    assert (parts[0].start, parts[-1].stop) == (0, len(raw))
    for left, right in itertools.pairwise(parts):
        assert left.stop == right.start
        assert raw[: right.start].endswith(b"\n")
        assert right.first_row == raw[: right.start].count(b"\n") + 1
        assert left.nbytes >= part


@given(raw=st.binary(max_size=120), more=st.binary(max_size=60), part=st.integers(1, 30))
def test_a_file_that_has_grown_keeps_its_earlier_parts(raw: bytes, more: bytes, part: int) -> None:
    before, after = (list(jsonl_parts([data] if data else [], part)) for data in (raw, raw + more))
    assert after[: len(before) - 1] == before[:-1]
