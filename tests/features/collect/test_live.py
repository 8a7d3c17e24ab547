"""The live collector: what is planned, offered and stored adds up, within the budget, whatever the store does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from collect_toy_target import HIDDEN, ToyTarget

from features.collect.live import LiveBatch, LiveCollector, LiveOptions, LivePlan, RowsAtHand
from features.collect.live_batch import BatchLayout
from features.collect.rollout import Rollout
from features.collect.sampling import SamplingPolicy, TokenBudget
from features.errors import InputError, VersionConflictError
from features.lake import Lake
from features.schema import FeatureDtype, FragmentLayout, SelectionFilter, TargetVersion

LAYOUT = FragmentLayout(layer_ids=(1, 3), dtype=FeatureDtype.FLOAT32, hidden_size=HIDDEN)
ROW_BYTES = 3 * HIDDEN * 4


def batch_of(rollouts: list[Rollout], how: str = "right", **changes: Any) -> LiveBatch:
    """The rollouts as one batch: padded right or left, or packed (each padded, or not) with a padded tail."""
    lengths = [len(r.token_ids) for r in rollouts]
    width, count = max(lengths), len(rollouts)
    taken = [-(-n // 8) * 8 for n in lengths] if how == "packed-padded" else lengths
    size = (1, sum(taken) + 3) if how.startswith("packed") else (count, width)
    ids, sampled = np.zeros(size, np.int64), np.zeros(size, bool)
    logprobs, mask = np.full(size, np.nan, np.float32), np.zeros(size, bool)
    edges = np.cumsum([0, *taken])
    for n, r in enumerate(rollouts):
        row, at = {"right": (n, 0), "left": (n, width - lengths[n])}.get(how, (0, edges[n]))
        place = (row, slice(at, at + lengths[n]))
        ids[place], sampled[place], mask[place] = r.token_ids, r.sampled_mask, True
        logprobs[place] = [np.nan if v is None else v for v in r.logprobs or ()]
    given = {
        "right": {"lengths": lengths}, "left": {"attention_mask": mask}, "packed": {"cu_seqlens": edges},
        "packed-padded": {"cu_seqlens": edges, "lengths": lengths},
    }  # fmt: skip
    return LiveBatch(**{
        "token_ids": ids, "sampled_mask": sampled, "logprobs": logprobs, "logprob_kind": "engine_raw",
        "sample_ids": [r.sample_id for r in rollouts], "group_ids": [r.group_id for r in rollouts],
        "versions": [r.version for r in rollouts], **given[how], **changes,
    })  # fmt: skip


def rows_of(target: ToyTarget, batch: LiveBatch, plan: LivePlan) -> RowsAtHand:
    """The planned rows of a forward over the whole batch, taken by flat index."""
    flat = {name: np.full((batch.layout.num_rows, width), np.nan, np.float32)
            for name, width in (("aux", 2 * HIDDEN), ("final", HIDDEN))}  # fmt: skip
    ids = np.asarray(batch.token_ids).reshape(-1)
    for start, length in zip(batch.layout.starts, batch.layout.lengths, strict=True):
        own = [int(t) for t in ids[start : start + length]]
        rows = slice(start, start + length)
        flat["aux"][rows] = np.concatenate([target.stream(own, k) for k in LAYOUT.layer_ids], axis=1)
        flat["final"][rows] = target.final(own)
    return RowsAtHand(flat["aux"][plan.index], flat["final"][plan.index])


def collector(lake: Lake, **changes: Any) -> LiveCollector:
    settings: dict[str, Any] = {"layout": LAYOUT, "policy": SamplingPolicy(), "writer_id": "rank0"}
    return LiveCollector(lake, **settings | changes)


@pytest.fixture
def target() -> ToyTarget:
    return ToyTarget()


@pytest.fixture
def lake(tmp_path: Path, target: ToyTarget) -> Lake:
    return Lake.init(str(tmp_path / "lake"), target.lake(str(tmp_path / "other")).target)


def windows_of(lake: Lake) -> dict[str, Any]:
    from features.catalog import Catalog

    found = Catalog.load(lake).select(SelectionFilter()).rows
    return {row["sample_id"]: lake.read_window(row) for row in found}


@pytest.mark.parametrize("how", ["right", "left", "packed", "packed-padded"])
def test_rows_are_stored_id_by_id_and_position_by_position(lake: Lake, target: ToyTarget, how: str) -> None:
    rollouts = [target.rollout(n, response=5 + 3 * n) for n in range(4)]
    live = collector(lake, policy=SamplingPolicy(max_tokens=9, placement="response_only", context_rows=2))
    live.advance(target.record, target.head)
    batch = batch_of(rollouts, how)
    plan = live.plan(batch)
    live.offer(plan, rows_of(target, batch, plan))
    report = live.close()
    assert report.windows == report.verified == 4
    assert report.tokens == len(plan.index) < sum(len(r.token_ids) for r in rollouts)
    for rollout in rollouts:
        window = windows_of(lake)[rollout.sample_id]
        rows = slice(window.meta.start, window.stop)
        np.testing.assert_array_equal(window.final, target.final(rollout.token_ids)[rows])
        np.testing.assert_array_equal(window.aux[:, HIDDEN:], target.stream(rollout.token_ids, 3)[rows])
        assert window.token_ids[:-1].tolist() == list(rollout.token_ids[rows])


def test_context_rows_are_there_and_not_supervised(lake: Lake, target: ToyTarget) -> None:
    rollout = target.rollout(0, prompt=3, response=40)
    live = collector(lake, policy=SamplingPolicy(max_tokens=8, placement="response_only", context_rows=4))
    live.advance(target.record, target.head)
    batch = batch_of([rollout])
    plan = live.plan(batch)
    (span,) = plan.pieces[0][1]
    assert span.context == 4
    assert span.start > 3, "the draw must lie inside the response"
    live.offer(plan, rows_of(target, batch, plan))
    assert live.close().verified == 1
    window = windows_of(lake)["s0"]
    assert window.num_rows == 12
    # Row 4 is the first supervised one, and predicts token 5.
    assert window.sampled_mask.tolist() == [False] * 5 + [True] * 7 + [span.stop < 43]
    assert '"context_rows":4' in str(window.meta.sampling)


def test_the_proof_compares_no_more_tokens_than_it_is_given(lake: Lake, target: ToyTarget) -> None:
    live = collector(lake, options=LiveOptions(proof_tokens=10))
    live.advance(target.record, target.head)
    batch = batch_of([target.rollout(0, response=30)])
    plan = live.plan(batch)
    live.offer(plan, rows_of(target, batch, plan))
    assert live.close().agreement.tokens == 10
    assert windows_of(lake)["s0"].meta.logprob_tokens == 10


def test_every_sequence_and_window_is_accounted_for(lake: Lake, target: ToyTarget) -> None:
    good = [target.rollout(n) for n in range(40)]
    bad = [
        target.rollout(40, version=7), target.rollout(41, version=None),
        target.rollout(42, sampled_mask=(False,) * 15), target.rollout(0, group_id="other"), good[3],
    ]  # fmt: skip
    rate = SamplingPolicy(sample_rate=0.5)
    live = collector(lake, policy=rate)
    live.advance(target.record, target.head)
    for some in (good, bad):
        batch = batch_of(some)
        plan = live.plan(batch)
        live.offer(plan, rows_of(target, batch, plan))
    report = live.close()
    assert report.sequences == report.accounted_sequences == 45
    assert report.planned_windows == report.accounted_windows == report.windows > 10
    assert report.refused["version_mismatch"] == report.refused["version_missing"] == 1
    kept = [r.sample_id for r in good if rate.plan(r, TargetVersion(0))]
    assert sorted(windows_of(lake)) == sorted(kept)


def test_truncated_states_are_refused_by_their_length(lake: Lake, target: ToyTarget) -> None:
    live = collector(lake)
    live.advance(target.record, target.head)
    batch = batch_of([target.rollout(0), target.rollout(1)])
    plan = live.plan(batch)
    rows = rows_of(target, batch, plan)
    live.offer(plan, RowsAtHand(rows.aux[:24], rows.final[:24]))
    report = live.close()
    assert report.refused_windows == {"feature_shape": 2}
    assert report.windows == 0


@pytest.mark.parametrize("fault", ["shifted", "wrong_version", "wrong_norm", "nan"])
def test_a_planted_fault_is_refused_and_counted(lake: Lake, target: ToyTarget, fault: str) -> None:
    live = collector(lake)
    live.advance(target.record, target.head)
    rollout = target.rollout(0)
    if fault == "shifted":
        rollout = target.rollout(0, logprobs=(None, *rollout.logprobs[:-1]))  # type: ignore[index,misc]
    batch = batch_of([rollout, target.rollout(1)])
    plan = live.plan(batch)
    rows = rows_of(ToyTarget(version=1) if fault == "wrong_version" else target, batch, plan)
    if fault == "wrong_norm":
        rows = RowsAtHand(rows.aux, rows.final * np.float32(1.5))
    if fault == "nan":
        rows.aux[3, 4] = np.nan
    live.offer(plan, rows)
    report = live.close()
    reason = "nonfinite_features" if fault == "nan" else "logprob_disagreement"
    refused = 2 if fault in ("wrong_version", "wrong_norm") else 1
    assert report.refused_windows == {reason: refused}
    assert report.windows == 2 - refused


def test_rows_of_a_version_that_is_gone_are_refused(lake: Lake, target: ToyTarget) -> None:
    newer = ToyTarget(version=1)
    live = collector(lake)
    live.advance(target.record, target.head)
    batch = batch_of([target.rollout(0)])
    plan = live.plan(batch)
    live.advance(newer.record, newer.head)
    live.offer(plan, rows_of(target, batch, plan))
    assert not live.plan(batch_of([target.rollout(1)])), "sampled by the version before"
    batch = batch_of([newer.rollout(2)])
    plan = live.plan(batch)
    live.offer(plan, rows_of(newer, batch, plan))
    report = live.close()
    assert report.refused_windows == {"version_mismatch": 1}
    assert report.refused == {"version_mismatch": 1}
    assert {n: w.meta.version.number for n, w in windows_of(lake).items()} == {"s2": 1}
    with pytest.raises(InputError, match="only grow"):
        live.advance(target.record, target.head)


def test_a_version_that_contradicts_the_lake_is_not_collected(lake: Lake, target: ToyTarget) -> None:
    other = ToyTarget(step=0.1, version=1)
    lake.put_head(other.head)
    lake.register_version(other.record)
    live, mine = collector(lake), ToyTarget(version=1)
    live.advance(mine.record, mine.head)
    batch = batch_of([mine.rollout(0)])
    plan = live.plan(batch)
    live.offer(plan, rows_of(mine, batch, plan))
    with pytest.raises(VersionConflictError):
        live.close()
    assert live.report().refused_windows == {"version_refused": 1}


def test_a_full_budget_drops_whole_windows_and_counts_them(lake: Lake, target: ToyTarget) -> None:
    live = collector(lake, options=LiveOptions(max_bytes=4 * 15 * ROW_BYTES))
    live.advance(target.record, target.head)
    plans = [live.plan(batch_of([target.rollout(n) for n in range(3 * k, 3 * k + 3)])) for k in range(2)]
    assert [p.num_windows for p in plans] == [3, 1]
    for plan in plans:
        live.abandon(plan)
    report = live.close()
    assert (report.dropped_windows, report.dropped_tokens, report.abandoned_windows) == (2, 30, 4)
    assert report.most_held_bytes == 4 * 15 * ROW_BYTES
    assert report.planned_windows == report.accounted_windows
    assert report.held_bytes == 0


def test_blocking_gives_up_after_its_budget(lake: Lake, target: ToyTarget) -> None:
    options = LiveOptions(max_bytes=15 * ROW_BYTES, when_full="block", budget_ms_per_step=30)
    live = collector(lake, options=options)
    live.advance(target.record, target.head)
    held = live.plan(batch_of([target.rollout(0)]))
    assert not live.plan(batch_of([target.rollout(1)]))
    live.abandon(held)
    assert live.plan(batch_of([target.rollout(1)])), "a dropped sample may come again"
    report = live.close()
    assert report.dropped_windows == 1
    assert report.blocked_s >= 0.03


def test_a_token_budget_is_met_by_hash_and_never_exceeded(lake: Lake, target: ToyTarget) -> None:
    live = collector(lake, policy=SamplingPolicy(token_budget=TokenBudget(60, 90)))
    live.advance(target.record, target.head)
    rollouts = [target.rollout(n) for n in range(30)]
    plan = live.plan(batch_of(rollouts))
    assert len(plan.index) == 60
    live.abandon(plan)
    report = live.close()
    assert report.over_budget_windows > 0
    assert report.skipped_by_sampling > 0


class FlakyStore:
    """The lake's store, whose data writes fail while ``broken``."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.broken = inner, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create(self, path: str, data: bytes) -> Any:
        if self.broken and path.startswith(("data/", "commits/")):
            raise OSError("no route to the store")
        return self._inner.create(path, data)


def broken_lake(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> FlakyStore:
    store = FlakyStore(lake.store)
    monkeypatch.setattr(lake, "store", store)
    return store


def test_windows_outlive_a_store_that_fails_for_a_while(
    lake: Lake, target: ToyTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = broken_lake(lake, monkeypatch)
    live = collector(lake, options=LiveOptions(max_bytes=4 * 15 * ROW_BYTES, retry_s=3600))
    live.advance(target.record, target.head)
    batch = batch_of([target.rollout(n) for n in range(4)])
    plan = live.plan(batch)
    live.offer(plan, rows_of(target, batch, plan))
    with pytest.raises(OSError, match="no route"):
        live.flush()
    assert not live.plan(batch_of([target.rollout(9)])), "what waits takes the whole budget"
    store.broken = False
    report = live.flush()
    assert (report.windows, report.dropped_windows, report.lost) == (4, 1, 0)
    assert report.store_failures >= 1
    assert len(windows_of(lake)) == 4
    live.close()


def test_windows_lost_to_a_dead_store_are_counted(
    lake: Lake, target: ToyTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_lake(lake, monkeypatch)
    live = collector(lake, options=LiveOptions(max_bytes=8 * 15 * ROW_BYTES))
    live.advance(target.record, target.head)
    for n in range(6):
        batch = batch_of([target.rollout(2 * n), target.rollout(2 * n + 1)])
        plan = live.plan(batch)
        live.offer(plan, rows_of(target, batch, plan))
    with pytest.raises(OSError, match="no route"):
        live.close()
    report = live.report()
    assert report.lost + report.dropped_windows == report.planned_windows == report.accounted_windows == 12
    assert report.lost == 8
    assert report.most_held_bytes <= 8 * 15 * ROW_BYTES
    assert report.held_bytes == 0


def test_an_unknown_fault_of_the_background_thread_is_raised_not_hidden(
    lake: Lake, target: ToyTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr("features.collect.live_worker.logprob_agreement", broken)
    live = collector(lake)
    live.advance(target.record, target.head)
    batch = batch_of([target.rollout(0)])
    plan = live.plan(batch)
    live.offer(plan, rows_of(target, batch, plan))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="planted"):
            live.flush()
    assert not live.plan(batch_of([target.rollout(1)]))
    with pytest.raises(RuntimeError, match="planted"):
        live.close()
    report = live.report()
    assert (report.waiting, report.dropped_windows, report.windows) == (1, 1, 0)
    assert report.accounted_windows == report.planned_windows


def test_a_head_that_did_not_change_is_stored_once(lake: Lake, target: ToyTarget) -> None:
    live = collector(lake)
    for version in (0, 1):
        live.advance(replace(target.record, version=TargetVersion(version)), target.head)
        batch = batch_of([target.rollout(version, version=version)])
        plan = live.plan(batch)
        live.offer(plan, rows_of(target, batch, plan))
    assert live.close().windows == 2
    assert [r.version.number for r in lake.versions()] == [0, 1]
    assert len(list(lake.store.list("blobs"))) == 1


def test_a_mask_with_a_hole_and_contradicting_lengths_are_refused() -> None:
    with pytest.raises(InputError, match="hole"):
        BatchLayout.of_mask([[1, 0, 1]])
    with pytest.raises(InputError, match="cu_seqlens"):
        BatchLayout.packed([0, 5, 3], num_rows=9)
    for lengths in ([6, 3], [5], [-1, 3]):
        with pytest.raises(InputError, match="padded sequences"):
            BatchLayout.packed([0, 5, 9], num_rows=9, lengths=lengths)
    with pytest.raises(InputError, match="width"):
        BatchLayout.right_padded([9], width=8)
    with pytest.raises(InputError, match="sampled_mask has 3 entries"):
        LiveBatch(token_ids=[[1, 2]], lengths=[2], sampled_mask=[True] * 3, sample_ids=["a"], group_ids=["g"],
                  versions=0)  # fmt: skip
    with pytest.raises(InputError, match="exactly one"):
        LiveBatch(
            token_ids=[[1, 2]], sampled_mask=[[True] * 2], sample_ids=["a"], group_ids=["g"], versions=0
        )
