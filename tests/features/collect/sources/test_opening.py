"""Which files a url means, which format they have, and what names their content."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from source_helpers import read_file, read_records, reasons, response

from features.collect.sources import SourceOptions, open_source, read_partition
from features.collect.sources.formats import FORMATS
from features.errors import InputError
from features.testing_s3 import Fault, FaultKind, ServedS3

NONE = SourceOptions()


def line(first: int) -> str:
    return json.dumps(response(first)) + "\n"


def test_a_folder_a_glob_and_names_find_each_file_once(tmp_path: Path) -> None:
    for name in ("b.jsonl", "sub/a.jsonl.gz", "c.txt", ".hidden.jsonl", "STABLE"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(line(3))
    found = open_source(
        [str(tmp_path), str(tmp_path / "*.jsonl"), str(tmp_path / "b.jsonl")], format=None, options=NONE
    )
    assert [p.name for p in found] == ["b.jsonl", "sub/a.jsonl.gz"]
    (named,) = open_source([str(tmp_path / "*.txt")], format=None, options=NONE)
    assert named.name == "c.txt"


def test_partitions_of_one_source_have_distinct_names(tmp_path: Path) -> None:
    for name in ("a/x/1.jsonl", "b/x/1.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(line(3))
    globbed = open_source([str(tmp_path / "*/x/*.jsonl")], format=None, options=NONE)
    assert [p.name for p in globbed] == ["a/x/1.jsonl", "b/x/1.jsonl"]
    named = open_source([p.url for p in globbed], format=None, options=NONE)
    assert [p.name for p in named] == [p.url for p in globbed]


@pytest.mark.parametrize("name", ["absent.jsonl", "*.absent", "empty"])
def test_a_url_that_finds_nothing_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no rollout file at"):
        open_source([str(tmp_path / name)], format=None, options=NONE)


def test_equal_bytes_have_equal_digests_wherever_they_lie(tmp_path: Path) -> None:
    for name, first in (("a", 3), ("b", 3), ("c", 9)):
        (tmp_path / f"{name}.jsonl").write_text(line(first))
    a, b, c = open_source([str(tmp_path)], format=None, options=NONE)
    assert a.digest == b.digest != c.digest
    assert a.nbytes == len(line(3))


def test_a_large_file_is_cut_into_parts_that_together_read_as_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "g.jsonl"
    path.write_text("".join(line(n) for n in range(10, 40)))
    (whole,) = open_source([str(path)], format=None, options=NONE)
    parts = open_source([str(path)], format=None, options=NONE, part_bytes=2000)
    assert len(parts) > 3
    rows = [item.source_row for part in parts for item in read_partition(part, NONE)]  # type: ignore[union-attr]
    assert rows == list(range(1, 31))
    assert sum(p.nbytes for p in parts) == whole.nbytes
    path.write_text(path.read_text() + line(99))
    grown = open_source([str(path)], format=None, options=NONE, part_bytes=2000)
    assert [p.digest for p in grown][: len(parts) - 1] == [p.digest for p in parts][:-1]


def test_a_parquet_file_is_cut_between_row_groups(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([response(n) for n in range(10, 30)])
    pq.write_table(table, tmp_path / "g.parquet", row_group_size=5)
    parts = open_source([str(tmp_path)], format=None, options=NONE, part_bytes=1)
    assert [(p.start, p.stop, p.first_row) for p in parts] == [(0, 1, 1), (1, 2, 6), (2, 3, 11), (3, 4, 16)]
    assert len({p.digest for p in parts}) == 4
    rows = [item.source_row for part in parts for item in read_partition(part, NONE)]  # type: ignore[union-attr]
    assert rows == list(range(1, 21))


def test_an_ambiguous_record_is_refused_with_the_candidates(tmp_path: Path) -> None:
    both = response() | {"tokens": [1], "response_length": 1, "file_step": 0, "weight_versions": []}
    with pytest.raises(InputError, match=r"could be slime or vllm-generate .*--format"):
        read_records(tmp_path / "x.jsonl", both)
    assert reasons(read_records(tmp_path / "x.jsonl", both, format="vllm-generate")) == [None]


def test_a_record_of_no_format_is_refused_with_the_list(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot tell the format .*keys prompt, text.*nemo-rl.*--columns"):
        read_records(tmp_path / "x.jsonl", {"prompt": "a", "text": "b"})
    with pytest.raises(InputError, match="no source format 'nemo'; known are draftlake-rollout-1"):
        read_records(tmp_path / "x.jsonl", {"prompt": "a"}, format="nemo")


def test_files_without_a_record_are_empty_and_counted(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_bytes(b"")
    (tmp_path / "blank.jsonl").write_bytes(b"\n\r\n")
    items, counts = read_file(tmp_path)
    assert (items, counts.lines, counts.blank) == ([], 2, 2)


def test_of_prime_rl_traces_all_is_read_and_effective_is_not(tmp_path: Path) -> None:
    episode = json.dumps({"id": "e", "traces": [{"nodes": [{"token_ids": [1], "mask": [True]}]}]})
    for kind in ("all", "effective"):
        path = tmp_path / f"rollouts/step_1/train/{kind}/traces.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text(episode)
    found = open_source([str(tmp_path)], format=None, options=NONE)
    assert [p.name for p in found] == ["rollouts/step_1/train/all/traces.jsonl"]
    (one,) = open_source([str(tmp_path / "**/effective/*.jsonl")], format=None, options=NONE)
    assert one.format == "prime-rl"


def test_no_format_has_a_signature_of_another(tmp_path: Path) -> None:
    lines = (Path(__file__).parent / "ten_examples.jsonl").read_text().splitlines()
    for record in (json.loads(raw)["rec"] for raw in lines):
        assert sum(bool(f.signature and f.signature(record)) for f in FORMATS.values()) == 1


@pytest.mark.s3
def test_globs_folders_and_files_on_s3(tmp_path: Path) -> None:
    with ServedS3() as server:
        bucket = server.make_bucket("runs")
        options = SourceOptions(storage_options=server.options())
        import fsspec

        fs = fsspec.filesystem("s3", **server.options())
        for name in ("a/1.jsonl", "a/2.jsonl", "a/deep/3.jsonl", "b/4.jsonl", "a/5.pt"):
            fs.pipe_file(f"runs/{name}", line(int(name[-7] if name[-1] == "l" else 5)).encode())
        names = [p.url for p in open_source([f"{bucket}/a/*.jsonl"], format=None, options=options)]
        assert names == ["s3://runs/a/1.jsonl", "s3://runs/a/2.jsonl"]
        deep = [p.url for p in open_source([f"{bucket}/**/*.jsonl"], format=None, options=options)]
        assert deep == [f"s3://runs/{n}.jsonl" for n in ("a/1", "a/2", "a/deep/3", "b/4")]
        with pytest.raises(InputError, match="a pickle is never opened"):
            open_source([f"{bucket}/a"], format=None, options=options)
        with pytest.raises(InputError, match="no rollout file at"):
            open_source([f"{bucket}/c"], format=None, options=options)
        (one,) = open_source([f"{bucket}/b/4.jsonl"], format=None, options=options)
        (tmp_path / "4.jsonl").write_text(line(4))
        (local,) = open_source([str(tmp_path)], format=None, options=NONE)
        assert one.digest == local.digest
        server.reset()
        server.inject(Fault(FaultKind.UNAVAILABLE, at=0, count=2))
        assert reasons(list(read_partition(one, options))) == [None]
