"""The commit: data first, marker last, created once. Crashes, races, conflicts, refusals."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from features.catalog import Catalog
from features.check import check_lake
from features.commits import CommitName, encode_commit
from features.errors import (
    CorruptDataError,
    LakeContractError,
    ObjectExistsError,
    PlanConflictError,
    TargetMismatchError,
    UnknownVersionError,
    VersionConflictError,
)
from features.lake import Lake
from features.schema import FeatureDtype, FragmentLayout, SelectionFilter, TargetVersion
from features.testing import (
    TINY_LAYOUT,
    TINY_TARGET,
    commit_tiny,
    register_tiny_version,
    tiny_head,
    tiny_lake,
    tiny_window,
)
from features.windows import Window
from features.writer import WRITE_STEPS, CommitResult, plan_digest, write_fragment

HEAD = tiny_head()
WINDOWS = [tiny_window(HEAD, sample=sample, num_rows=6 + sample) for sample in range(3)]


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = Lake.init(str(tmp_path / "lake"), TINY_TARGET)
    register_tiny_version(lake, 0, HEAD)
    return lake


def write(lake: Lake, windows: list[Window] = WINDOWS, **changes: object) -> CommitResult:
    arguments = {"version": TargetVersion(0), "head_id": HEAD.head_id, "plan_id": "plan", "writer_id": "test"}
    return write_fragment(lake, windows=windows, **{**arguments, **changes})  # type: ignore[arg-type]


def stored(lake: Lake) -> list[Window]:
    return [lake.read_window(row) for row in Catalog.load(lake).select(SelectionFilter()).rows]


def assert_same(found: Window, expected: Window) -> None:
    bits = np.uint16 if expected.layout.dtype is FeatureDtype.BFLOAT16 else np.uint32
    for name in ("aux", "final"):
        left, right = getattr(found, name), getattr(expected, name)
        assert left.shape == right.shape
        np.testing.assert_array_equal(left.view(bits), right.view(bits))
    for name in ("token_ids", "sampled_mask", "loss_mask", "logprobs"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    assert found.layout == expected.layout
    for name in expected.meta.__dataclass_fields__:
        value = getattr(expected.meta, name)
        rounded = float(np.float32(value)) if isinstance(value, float) else value
        assert getattr(found.meta, name) == rounded, name


def test_a_fragment_reads_back_as_it_was_written(lake: Lake) -> None:
    result = write(lake)
    assert (result.outcome, result.attempt, result.windows, result.tokens) == ("committed", 0, 3, 6 + 7 + 8)
    assert result.nbytes == 21 * (48 + 16) * 2
    assert result.commit_path == "commits/v=000000000/plan.0.parquet"
    for found, expected in zip(stored(lake), WINDOWS, strict=True):
        assert_same(found, expected)
    assert check_lake(lake, 2) == ()


def test_the_commit_is_the_last_object_and_every_step_is_told(lake: Lake) -> None:
    steps, visible = [], []

    def look(step: str) -> None:
        steps.append(step)
        visible.append(len(lake.commit_paths()))

    write(lake, on_step=look)
    assert tuple(steps) == WRITE_STEPS
    assert visible == [0] * (len(WRITE_STEPS) - 1) + [1]


@pytest.mark.parametrize("step", WRITE_STEPS)
def test_kill_9_after_any_step_leaves_no_half_fragment_and_a_rerun_completes(lake: Lake, step: str) -> None:
    script = f"""
import os, signal
from features.lake import Lake
from features.schema import TargetVersion
from features.testing import tiny_head, tiny_window
from features.writer import write_fragment
head = tiny_head()
def kill(step):
    if step == {step!r}:
        os.kill(os.getpid(), signal.SIGKILL)
write_fragment(
    Lake.open({lake.url!r}), version=TargetVersion(0), head_id=head.head_id, plan_id="plan", writer_id="killed",
    windows=[tiny_window(head, sample=s, num_rows=6 + s) for s in range(3)], on_step=kill,
)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", script], env=environment).returncode == -signal.SIGKILL
    visible = 3 if step == "commit" else 0
    assert len(stored(lake)) == visible
    assert not any(finding.harmful for finding in check_lake(lake, 2))
    assert write(lake).outcome == ("duplicate_plan" if visible else "committed")
    for found, expected in zip(stored(lake), WINDOWS, strict=True):
        assert_same(found, expected)
    left = [finding.code for finding in check_lake(lake, 2)]
    assert left == ([] if visible else ["orphan_data"])


def test_the_same_plan_again_is_a_duplicate_and_writes_nothing(lake: Lake) -> None:
    first = write(lake)
    before = lake.store.list("")
    second = write(lake, writer_id="someone else")
    assert (second.outcome, second.write_uuid) == ("duplicate_plan", first.write_uuid)
    assert lake.store.list("") == before


def racing(lake: Lake, windows: list[Window]) -> Callable[[str], None]:
    """A hook that lets another writer commit ``windows`` under the same plan just before we do."""

    def hook(step: str) -> None:
        if step == "data/tokens.arrow":
            write(Lake.open(lake.url), windows, writer_id="faster")

    return hook


def test_other_float_bytes_under_one_plan_are_a_duplicate_and_the_first_stays(lake: Lake) -> None:
    wobbled = [replace(window, final=window.final ^ np.uint16(1)) for window in WINDOWS]
    result = write(lake, wobbled, on_step=racing(lake, WINDOWS))
    assert result.outcome == "duplicate_plan"
    for found, expected in zip(stored(lake), WINDOWS, strict=True):
        assert_same(found, expected)
    assert [finding.code for finding in check_lake(lake, 2)] == ["orphan_data"]


def with_other_token(window: Window) -> Window:
    ids = window.token_ids.copy()
    ids[2] = (ids[2] + 1) % TINY_TARGET.vocab_size
    return replace(window, token_ids=ids)


CONFLICTS = {
    "token": [with_other_token(WINDOWS[0]), *WINDOWS[1:]],
    "sampled mask": [replace(WINDOWS[0], sampled_mask=~WINDOWS[0].sampled_mask), *WINDOWS[1:]],
    "loss mask": [replace(WINDOWS[0], loss_mask=WINDOWS[0].sampled_mask), *WINDOWS[1:]],
    "sample id": [replace(WINDOWS[0], meta=replace(WINDOWS[0].meta, sample_id="x")), *WINDOWS[1:]],
    "fewer": WINDOWS[:2],
    "more": [*WINDOWS, tiny_window(HEAD, sample=9)],
}


@pytest.mark.parametrize("name", sorted(CONFLICTS))
@pytest.mark.parametrize("moment", ["before", "at the commit"])
def test_other_samples_tokens_or_masks_under_one_plan_are_a_conflict_and_the_first_stays(
    lake: Lake, name: str, moment: str
) -> None:
    if moment == "before":
        write(lake)
    hook = racing(lake, WINDOWS) if moment != "before" else None
    with pytest.raises(PlanConflictError, match="plan_digest"):
        write(lake, CONFLICTS[name], on_step=hook)
    for found, expected in zip(stored(lake), WINDOWS, strict=True):
        assert_same(found, expected)


def test_a_commit_whose_answer_was_lost_is_our_success(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    create = lake.store.create

    def losing_answers(path: str, data: bytes) -> None:
        create(path, data)
        raise ObjectExistsError(path)

    monkeypatch.setattr(lake.store, "create", losing_answers)
    assert write(lake).outcome == "committed"
    assert len(stored(lake)) == 3


def test_a_store_that_mangles_data_under_a_fresh_name_is_found_out(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = lake.store.create

    def mangling(path: str, data: bytes) -> None:
        create(path, data[:-1])
        raise ObjectExistsError(path)

    monkeypatch.setattr(lake.store, "create", mangling)
    with pytest.raises(CorruptDataError, match="doctor"):
        write(lake)


def test_a_fenced_attempt_is_never_used_and_the_next_one_counts(lake: Lake) -> None:
    fence = CommitName(0, "plan", 0).path
    lake.store.create(fence, encode_commit([]))
    result = write(lake)
    assert (result.outcome, result.attempt) == ("committed", 1)
    assert lake.commit_paths() == [result.commit_path]
    assert len(stored(lake)) == 3
    assert write(lake).outcome == "duplicate_plan"


def test_a_late_writer_meets_the_fence_at_its_commit_and_starts_over(lake: Lake) -> None:
    def fence(step: str) -> None:
        path = CommitName(0, "plan", 0).path
        if step == "data/tokens.arrow" and not lake.store.exists(path):
            lake.store.create(path, encode_commit([]))

    assert write(lake, on_step=fence).attempt == 1
    assert len(stored(lake)) == 3


def test_of_two_committed_attempts_the_lowest_counts(lake: Lake) -> None:
    first = write(lake)
    write(lake, attempt=2)
    assert lake.commit_paths() == [first.commit_path]
    assert len(stored(lake)) == 3


def test_of_writers_racing_for_one_plan_exactly_one_commits(lake: Lake) -> None:
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda n: write(Lake.open(lake.url), writer_id=f"w{n}"), range(4)))
    assert sorted(result.outcome for result in results) == ["committed"] + ["duplicate_plan"] * 3
    assert len({result.write_uuid for result in results}) == 1
    assert [finding for finding in check_lake(lake, 2) if finding.harmful] == []
    assert len(stored(lake)) == 3


def test_writers_of_other_plans_never_touch_each_others_rows(lake: Lake) -> None:
    windows = [tiny_window(HEAD, sample=sample, num_rows=5 + sample) for sample in range(8)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: write(Lake.open(lake.url), [windows[n]], plan_id=f"plan{n}"), range(8)))
    for found, expected in zip(stored(lake), windows, strict=True):
        assert_same(found, expected)


def test_windows_or_head_of_another_version_are_refused_before_anything_is_written(lake: Lake) -> None:
    other = tiny_head(1)
    register_tiny_version(lake, 1, other)
    before = lake.store.list("")
    mixed = [WINDOWS[0], tiny_window(other, version=1, sample=5)]
    with pytest.raises(VersionConflictError, match="never mixes"):
        write(lake, mixed)
    with pytest.raises(VersionConflictError, match="same weights"):
        write(lake, head_id=other.head_id)
    with pytest.raises(UnknownVersionError):
        write(lake, version=TargetVersion(9))
    assert lake.store.list("") == before


def window_with(**changes: object) -> Window:
    return replace(WINDOWS[0], **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ([], "no window"),
        ([WINDOWS[0], WINDOWS[0]], "twice"),
        ([WINDOWS[0], tiny_window(HEAD, sample=7, layout=replace(TINY_LAYOUT, layer_ids=(1, 2)))], "layout"),
        ([window_with(token_ids=np.zeros(40, np.int32))], "40 entries, expected rows"),
        ([window_with(final=WINDOWS[0].final[:4])], "aux is"),
        ([window_with(token_ids=np.full(7, 64, np.int32))], "outside"),
    ],
    ids=["empty", "twice", "two layouts", "C1 features shorter than tokens", "arrays differ", "vocabulary"],
)
def test_malformed_fragments_are_refused_whole(lake: Lake, windows: list[Window], message: str) -> None:
    before = lake.store.list("")
    with pytest.raises(LakeContractError, match=message):
        write(lake, windows)
    assert lake.store.list("") == before


@pytest.mark.parametrize(
    "layout",
    [
        FragmentLayout((2, 4, 9), FeatureDtype.BFLOAT16, 16),
        FragmentLayout((-1, 4), FeatureDtype.BFLOAT16, 16),
        FragmentLayout((2, 4), FeatureDtype.BFLOAT16, 8),
    ],
    ids=["beyond the last block", "negative", "hidden size"],
)
def test_a_layout_that_the_target_cannot_have_is_refused(lake: Lake, layout: FragmentLayout) -> None:
    window = replace(
        WINDOWS[0], layout=layout, aux=np.zeros((6, layout.aux_width), np.uint16),
        final=np.zeros((6, layout.hidden_size), np.uint16),
    )  # fmt: skip
    with pytest.raises(TargetMismatchError, match="blocks applied"):
        write(lake, [window])


def test_the_last_blocks_output_is_a_legal_layer(lake: Lake) -> None:
    layout = FragmentLayout((0, 8), FeatureDtype.FLOAT32, 16)
    assert write(lake, [tiny_window(HEAD, layout=layout)]).outcome == "committed"


@pytest.mark.parametrize("plan_id", ["", "a/b", "a.b", "../x", "A"])
def test_a_plan_id_that_could_leave_its_folder_is_refused(lake: Lake, plan_id: str) -> None:
    with pytest.raises(ValueError, match="plan id"):
        write(lake, plan_id=plan_id)


def test_a_plan_is_named_by_all_that_decides_what_is_collected() -> None:
    base = {"target_id": "t", "version": TargetVersion(0), "source_ids": ["a", "b"], "sampling": {"seed": 0},
            "layout": TINY_LAYOUT}  # fmt: skip
    changes = [
        {}, {"target_id": "u"}, {"version": TargetVersion(1)}, {"source_ids": ["ab"]}, {"sampling": {"seed": 1}},
        {"layout": replace(TINY_LAYOUT, dtype=FeatureDtype.FLOAT32)},
        {"layout": replace(TINY_LAYOUT, layer_ids=(2, 4, 6))},
    ]  # fmt: skip
    plans = [plan_digest(**{**base, **change}) for change in changes]  # type: ignore[arg-type]
    assert len(set(plans)) == len(plans)
    assert plan_digest(**base) == plans[0]  # type: ignore[arg-type]
    assert len(plans[0]) == 32


def test_one_fragment_per_plan_however_often_the_tiny_lake_is_made(tmp_path: Path) -> None:
    first = tiny_lake(str(tmp_path), versions=1, samples_per_version=4, windows_per_fragment=2)
    again = tiny_lake(str(tmp_path), versions=1, samples_per_version=4, windows_per_fragment=2)
    assert first.commit_paths() == again.commit_paths()
    assert len(first.commit_paths()) == 2
    assert commit_tiny(first, 0, HEAD.head_id, stored(first)[:2]).outcome == "duplicate_plan"


@st.composite
def fragments(draw: st.DrawFn) -> list[Window]:
    """Windows of one layout with arbitrary feature bits, masks, gaps in logprobs, and partial spans."""
    dtype = draw(st.sampled_from(FeatureDtype))
    ids = tuple(sorted(draw(st.sets(st.integers(0, 8), min_size=1, max_size=3))))
    layout = FragmentLayout(ids, dtype, 16)
    bits = np.dtype("u2" if dtype is FeatureDtype.BFLOAT16 else "u4")
    windows = []
    for sample in range(draw(st.integers(1, 4))):
        num_rows, start = draw(st.integers(1, 9)), draw(st.integers(0, 5))
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        features = [
            rng.integers(0, 2 ** (8 * bits.itemsize), (num_rows, width), dtype=bits).view(dtype.numpy_name)
            for width in (layout.aux_width, 16)
        ]
        ends = draw(st.booleans())
        tokens = rng.integers(0, 64, num_rows + 1).astype(np.int32)
        tokens[-1] = -1 if ends else tokens[-1]
        logprobs = np.where(rng.random(num_rows + 1) < 0.5, np.nan, -rng.random(num_rows + 1)).astype(
            np.float32
        )
        window = tiny_window(
            HEAD, sample=sample, num_rows=num_rows, start=start,
            sequence_length=start + num_rows + (0 if ends else draw(st.integers(1, 3))),
            group_id=draw(st.text(max_size=5)), domain=draw(st.none() | st.text(max_size=5)),
            reward=draw(st.none() | st.floats(width=32, allow_nan=False)),
            top_k=draw(st.none() | st.integers(0, 100)), finish=draw(st.sampled_from(["stop", None])),
        )  # fmt: skip
        loss_mask = rng.random(num_rows + 1) < 0.5 if draw(st.booleans()) else None
        windows.append(
            replace(
                window,
                layout=layout,
                token_ids=tokens,
                sampled_mask=rng.random(num_rows + 1) < 0.5,
                loss_mask=loss_mask,
                logprobs=logprobs,
                aux=features[0],
                final=features[1],
            )
        )
    return windows


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fragments())
def test_whatever_is_written_is_read_back_bit_for_bit(windows: list[Window]) -> None:
    # A lake of its own for every example: hypothesis repeats examples while it shrinks a failure.
    lake = Lake.init(f"memory://hypothesis/{uuid.uuid4().hex}", TINY_TARGET)
    register_tiny_version(lake, 0, HEAD)
    write(lake, windows)
    for found, expected in zip(stored(lake), windows, strict=True):
        assert_same(found, expected)
    assert check_lake(lake, 2) == ()
    lake.store.delete_prefix("")
