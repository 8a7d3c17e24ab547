"""Reading rollout files: a bad line costs that line, and nothing is converted or invented."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from collect_toy_target import ToyTarget
from hypothesis import given
from hypothesis import strategies as st

from features.collect.rollouts import (
    ReadCounts,
    Rollout,
    logprob_value,
    read_rollouts,
    rollout_problem,
    write_rollouts,
)
from features.errors import InputError
from features.quarantine import Refusal


def record(**changes: Any) -> dict[str, Any]:
    base = {
        "sample_id": "a", "group_id": "g", "token_ids": [1, 2, 3], "prompt_length": 1,
        "sampled_mask": [False, True, True], "logprobs": [None, -0.5, -0.25], "logprob_kind": "engine_raw",
        "version": 4,
    }  # fmt: skip
    return base | changes


def read_lines(path: Path, *lines: str | bytes) -> tuple[list[Rollout | Refusal], ReadCounts]:
    raw = [line if isinstance(line, bytes) else line.encode() for line in lines]
    path.write_bytes(b"\n".join(raw))
    counts = ReadCounts()
    return list(read_rollouts(path, counts)), counts


def read_one(tmp_path: Path, **changes: Any) -> Rollout | Refusal:
    (item,), _ = read_lines(tmp_path / "r.jsonl", json.dumps(record(**changes)))
    return item


def refusal(item: Rollout | Refusal) -> Refusal:
    assert isinstance(item, Refusal), item
    return item


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    rollouts = [ToyTarget(v).rollout(n) for v, n in ((0, 1), (3, 2))]
    full = Rollout(
        sample_id="\u00fc\u2028x", group_id="g", token_ids=(1, 2), prompt_length=0, sampled_mask=(True, False),
        loss_mask=(False, False), logprobs=(-0.5, None), logprob_kind="engine_processed", version=0,
        version_label="step-7", temperature=0.8, top_p=0.9, top_k=-1, reward=-1.5, domain="code",
        finish="stop", acceptance_length=2.5, acceptance_rate=0.4,
    )  # fmt: skip
    path = tmp_path / "rollouts.jsonl"
    assert write_rollouts(path, [*rollouts, full]) == 3
    assert list(read_rollouts(path)) == [*rollouts, full]
    assert [p.name for p in tmp_path.iterdir()] == ["rollouts.jsonl"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    good = ToyTarget().rollout(0)
    write_rollouts(path, [good])
    bad = ToyTarget().rollout(1, logprobs=(-1.0,))
    with pytest.raises(ValueError, match="logprobs has 1 entries for 15"):
        write_rollouts(path, [good, bad])
    assert list(read_rollouts(path)) == [good]
    assert len(list(tmp_path.iterdir())) == 1


def test_bad_lines_are_refused_by_number_and_the_others_are_read(tmp_path: Path) -> None:
    good = json.dumps(record())
    separator = json.dumps(record(sample_id="u\u2028v"), ensure_ascii=False)
    lines = [
        b"\xef\xbb\xbf" + good.encode(),
        b'{"a":1,"logprobs":[NaN',
        good.encode() + b"\r",
        separator.encode(),
        b'{"sample_id": "\xff"}',
        b"[1, 2]",
        b"",
        b'{"sample_id": "a", "sample_id": "b"}',
        b"[" * 200_000,
        good.encode(),
        b"",
    ]
    items, counts = read_lines(tmp_path / "r.jsonl", *lines)
    assert [(i.line, i.reason) for i in items if isinstance(i, Refusal)] == [
        (2, "bad_json"), (5, "bad_encoding"), (6, "bad_json"), (8, "bad_json"), (9, "bad_json"),
    ]  # fmt: skip
    assert [i.sample_id for i in items if isinstance(i, Rollout)] == ["a", "a", "u\u2028v", "a"]
    assert counts.nbytes == (tmp_path / "r.jsonl").stat().st_size
    assert counts.rollouts + counts.refused + counts.blank == counts.lines == 10


def test_bare_nan_and_infinity_are_no_value(tmp_path: Path) -> None:
    text = json.dumps(record(logprobs=[None, math.nan, -math.inf], reward=math.nan, temperature=math.inf))
    assert "NaN" in text
    assert "Infinity" in text
    (item,), _ = read_lines(tmp_path / "r.jsonl", text)
    assert isinstance(item, Rollout)
    assert (item.logprobs, item.reward, item.temperature) == ((None, None, None), None, None)


def test_logprobs_null_absent_and_empty_differ(tmp_path: Path) -> None:
    assert read_one(tmp_path, logprobs=None).logprobs is None  # type: ignore[union-attr]
    item = refusal(read_one(tmp_path, logprobs=[]))
    assert (item.reason, item.detail) == ("logprob_mismatch", "logprobs has 0 entries for 3 token ids")


def test_files_where_every_logprob_is_null_or_empty_keep_their_meaning(tmp_path: Path) -> None:
    all_null, _ = read_lines(tmp_path / "null.jsonl", *[json.dumps(record(logprobs=None))] * 3)
    entries_null, _ = read_lines(tmp_path / "entries.jsonl", *[json.dumps(record(logprobs=[None] * 3))] * 3)
    all_empty, _ = read_lines(tmp_path / "empty.jsonl", *[json.dumps(record(logprobs=[]))] * 3)
    assert [r.logprobs for r in all_null] == [None] * 3  # type: ignore[union-attr]
    assert [r.logprobs for r in entries_null] == [(None, None, None)] * 3  # type: ignore[union-attr]
    assert [refusal(r).reason for r in all_empty] == ["logprob_mismatch"] * 3


def test_one_logprob_too_many_is_refused_not_cut(tmp_path: Path) -> None:
    item = refusal(read_one(tmp_path, logprobs=[None, -0.5, -0.25, -0.1]))
    assert item.reason == "logprob_mismatch"


def test_a_logprob_entry_that_is_an_object_refuses_the_whole_record(tmp_path: Path) -> None:
    entries = [None, {"token_id": 2, "logprob": -0.5}, {"logprob": -0.25}]
    assert refusal(read_one(tmp_path, logprobs=entries)).reason == "bad_field"


def test_a_null_in_the_middle_stays_null_and_pairs_do_not_slip(tmp_path: Path) -> None:
    item = read_one(tmp_path, logprobs=[-1.0, None, -3.0])
    assert isinstance(item, Rollout)
    assert item.logprobs == (-1.0, None, -3.0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_ids": []}, "length_mismatch"),
        ({"sampled_mask": [True]}, "length_mismatch"),
        ({"loss_mask": [True] * 4}, "length_mismatch"),
        ({"prompt_length": 4}, "length_mismatch"),
        ({"sampled_mask": [True, True, True]}, "bad_field"),
        ({"sampled_mask": [0, 1, 1]}, "bad_field"),
        ({"token_ids": [1, 2.0, 3]}, "bad_field"),
        ({"token_ids": [1, True, 3]}, "bad_field"),
        ({"token_ids": [1, -2, 3]}, "bad_field"),
        ({"token_ids": "123"}, "bad_field"),
        ({"version": "4"}, "bad_field"),
        ({"version": -1}, "bad_field"),
        ({"version": True}, "bad_field"),
        ({"version": 4.0}, "bad_field"),
        ({"logprobs": [None, 0.5, -1]}, "logprob_mismatch"),
        ({"logprob_kind": "trainer"}, "bad_field"),
        ({"sample_id": None}, "bad_field"),
        ({"sample_id": "\ud800"}, "bad_field"),
        ({"reward": "1"}, "bad_field"),
        ({"reward": 10**400}, "bad_field"),
        ({"top_k": -2}, "bad_field"),
        ({"weight_version": 4}, "bad_field"),
        ({"format": "draftlake-rollout-2"}, "bad_field"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_with_its_reason(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    item = refusal(read_one(tmp_path, **changes))
    assert item.reason == reason
    assert (item.line, item.source) == (1, str(tmp_path / "r.jsonl"))


def test_a_record_without_a_version_is_read_as_unknown(tmp_path: Path) -> None:
    item = read_one(tmp_path, version=None, version_label="7")
    assert isinstance(item, Rollout)
    assert item.version is None


@pytest.mark.parametrize("value", [0.0, -0.0, -9999.0, -1e9, math.nan, math.inf, -math.inf, None])
def test_placeholder_logprobs_are_no_value(value: float | None) -> None:
    assert logprob_value(value) is None


def test_a_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no rollout file"):
        next(read_rollouts(tmp_path / "absent.jsonl"))


def test_content_digest_covers_version_tokens_and_masks_only() -> None:
    base = ToyTarget().rollout(0)
    assert base.content_digest == ToyTarget().rollout(0, reward=3.0, logprobs=None).content_digest
    changed = [{"version": 1}, {"loss_mask": (True,) * 15}, {"sampled_mask": (False,) * 15}]
    digests = {ToyTarget().rollout(0, **c).content_digest for c in changed}
    assert len(digests | {base.content_digest}) == 4


@given(st.lists(st.binary(max_size=40).filter(lambda b: b"\n" not in b), max_size=8))
def test_any_bytes_are_accounted_for_line_by_line(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "r.jsonl"
    path.write_bytes(b"\n".join(lines))
    counts = ReadCounts()
    items = list(read_rollouts(path, counts))
    assert counts.nbytes == path.stat().st_size
    assert counts.refused + counts.rollouts == len(items)
    assert counts.refused + counts.rollouts + counts.blank == counts.lines


def test_the_toy_rollout_is_whole() -> None:
    assert rollout_problem(ToyTarget().rollout(0)) is None
