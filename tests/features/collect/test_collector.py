"""The collector accounts for every rollout, and takes only what it can vouch for."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from collect_toy_target import HIDDEN, LAYERS, ToyTarget, forward_features

from features.collect.collector import Collector
from features.collect.report import CollectReport
from features.collect.rollouts import Rollout
from features.collect.sampling import SamplingPolicy
from features.commits import decode_commit
from features.errors import HeadMissingError, PlanConflictError, UnknownVersionError, VersionConflictError
from features.lake import Lake
from features.quarantine import Refusal
from features.schema import FeatureDtype, FragmentLayout, HeadId, TargetVersion

TARGET = ToyTarget()
LAYOUT = FragmentLayout((1, 2), FeatureDtype.BFLOAT16, HIDDEN)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return TARGET.lake(str(tmp_path / "lake"))


def make(lake: Lake, **changes: Any) -> Collector:
    settings: dict[str, Any] = {
        "version": TargetVersion(0), "head_id": TARGET.head.head_id, "layout": LAYOUT,
        "policy": SamplingPolicy(max_tokens=64), "writer_id": "test", "fragment_tokens": 40,
    }  # fmt: skip
    return Collector(lake, **settings | changes)


def feed(
    collector: Collector, items: Sequence[Rollout | Refusal], spoil: dict[str, Any] | None = None
) -> CollectReport:
    """Collect everything; ``spoil`` maps a sample id to a function on its (aux, final)."""
    for item in items:
        if collector.admit(item):
            assert isinstance(item, Rollout)
            aux, final = forward_features(TARGET, [item.token_ids], LAYOUT.layer_ids)[0]
            if spoil and item.sample_id in spoil:
                aux, final = spoil[item.sample_id](aux.copy(), final.copy())
            collector.add(item, aux, final)
    return collector.close()


def stored_rows(lake: Lake) -> list[dict[str, Any]]:
    return [r for p in lake.commit_paths() for r in decode_commit(lake.store.read(p), where=p).to_pylist()]


def at_row(name: str, row: int, value: float) -> Any:
    def spoil(aux: np.ndarray, final: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        (aux if name == "aux" else final)[row] = value
        return aux, final

    return spoil


def test_collected_windows_hold_the_rollouts_tokens_and_features(lake: Lake) -> None:
    rollouts = [TARGET.rollout(n, reward=float(n)) for n in range(5)]
    report = feed(make(lake), rollouts)
    assert (report.windows, report.verified, report.fragments) == (5, 5, 2)
    assert sorted(report.commits) == lake.commit_paths()
    windows = {w.meta.sample_id: w for w in map(lake.read_window, stored_rows(lake))}
    for rollout in rollouts:
        window = windows[rollout.sample_id]
        aux, _ = forward_features(TARGET, [rollout.token_ids], LAYOUT.layer_ids)[0]
        assert window.token_ids[:-1].tolist() == list(rollout.token_ids)
        assert window.sampled_mask[:-1].tolist() == list(rollout.sampled_mask)
        assert window.loss_mask is None
        assert (window.meta.start, window.stop) == (0, window.meta.sequence_length)
        assert (window.meta.reward, window.meta.group_id) == (rollout.reward, rollout.group_id)
        np.testing.assert_allclose((window.aux.astype(np.uint32) << 16).view(np.float32), aux, rtol=2**-8)
        assert window.meta.verification == "verified"
        assert window.meta.logprob_tokens == 12


def test_logprob_i_belongs_to_token_i_after_windowing(lake: Lake) -> None:
    fixed = TARGET.rollout(0, logprobs=tuple(-float(i + 1) for i in range(15)), logprob_kind="engine_unknown")
    feed(make(lake, policy=SamplingPolicy(max_tokens=6)), [fixed])
    window = lake.read_window(stored_rows(lake)[0])
    start = window.meta.start
    assert window.logprobs.tolist()[:6] == [-float(start + i + 1) for i in range(6)]
    assert window.token_ids.tolist()[:6] == list(fixed.token_ids[start : start + 6])


def test_unknown_logprobs_are_stored_as_nan_and_never_as_zero(lake: Lake) -> None:
    holes = TARGET.rollout(0, logprobs=(None, 0.0, -9999.0, *(-1.0,) * 12), logprob_kind="engine_unknown")
    feed(make(lake), [holes])
    window = lake.read_window(stored_rows(lake)[0])
    assert np.isnan(window.logprobs[:3]).all()
    assert np.isnan(window.logprobs[-1])


def test_windows_without_logprobs_are_unverified_never_passed(lake: Lake) -> None:
    report = feed(make(lake), [TARGET.rollout(0), TARGET.rollout(1, logprobs=None)])
    assert (report.verified, report.unverified) == (1, 1)
    by_id = {row["sample_id"]: row for row in stored_rows(lake)}
    assert by_id["s1"]["verification"] == "unverified"
    assert by_id["s1"]["logprob_tokens"] is None


def test_versions_are_never_taken_as_current(lake: Lake) -> None:
    """Labels 0, 0, 1 and missing, as in a run that mixed weights."""
    versions = [0, 0, 1, None]
    report = feed(
        make(lake), [TARGET.rollout(n, version=v, version_label="0") for n, v in enumerate(versions)]
    )
    assert report.windows == 2
    assert report.quarantined == {"version_mismatch": 1, "version_missing": 1}


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (at_row("aux", 2, np.nan), "nonfinite_features"),
        (at_row("final", 2, np.inf), "nonfinite_features"),
        (at_row("final", 4, 0.0), "zero_features"),
        (lambda aux, final: (np.zeros_like(aux), np.zeros_like(final)), "zero_features"),
        (lambda aux, final: (aux[:9], final[:9]), "feature_shape"),
        (lambda aux, final: (aux, final + 1), "logprob_disagreement"),
        (lambda aux, final: (aux, np.roll(final, 1, axis=0)), "logprob_disagreement"),
    ],
    ids=["nan", "inf", "zero-row", "all-zero", "prefix-cache", "moved", "rolled"],
)
def test_a_bad_sample_is_quarantined_and_the_rest_kept(lake: Lake, spoil: Any, reason: str) -> None:
    collector = make(lake)
    report = feed(collector, [TARGET.rollout(n) for n in range(4)], {"s1": spoil})
    assert report.quarantined == {reason: 1}
    assert {row["sample_id"] for row in stored_rows(lake)} == {"s0", "s2", "s3"}
    (refused,) = collector.refusals
    assert refused.sample is not None
    assert refused.sample["sample_id"] == "s1"


def test_final_rows_before_the_norm_are_refused(lake: Lake) -> None:
    rollout = TARGET.rollout(0)
    pre_norm = TARGET.stream(rollout.token_ids, LAYERS)
    report = feed(make(lake), [rollout], {"s0": lambda aux, final: (aux, pre_norm)})
    assert report.quarantined == {"logprob_disagreement": 1}
    assert report.agreement.windows_refused == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_ids": (47, 48) + (1,) * 13}, "token_out_of_vocab"),
        ({"token_ids": (-1,) + (1,) * 14}, "token_out_of_vocab"),
        ({"sampled_mask": (False,) * 15}, "nothing_sampled"),
        ({"logprobs": (-1.0,) * 16}, "logprob_mismatch"),
        ({"token_ids": (1,) * 14}, "length_mismatch"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_rollouts_that_do_not_fit_never_reach_the_model(
    lake: Lake, changes: dict[str, Any], reason: str
) -> None:
    collector = make(lake)
    assert collector.admit(TARGET.rollout(0, **changes)) == ()
    assert collector.close().quarantined == {reason: 1}


def test_every_rollout_is_accounted_for_once(lake: Lake) -> None:
    items: list[Rollout | Refusal] = [TARGET.rollout(n) for n in range(30)]
    items += [TARGET.rollout(0), TARGET.rollout(1, sampled_mask=(False,) * 14 + (True,))]
    items += [TARGET.rollout(40, version=None), TARGET.rollout(41, version=3)]
    items += [Refusal(source="f", line=3, reason="bad_json", detail="cut")]
    policy = SamplingPolicy(sample_rate=0.6, max_tokens=10)
    report = feed(make(lake, policy=policy), items, {"s2": at_row("aux", 0, np.nan)})
    assert report.received == len(items) == report.accounted
    assert report.skipped_by_sampling > 0
    assert report.duplicates == 1
    assert report.windows == report.verified + report.unverified == len(stored_rows(lake))
    assert report.tokens == sum(row["num_rows"] for row in stored_rows(lake)) == 10 * report.windows
    assert report.tokens_outside_windows == 5 * report.collected
    assert report.nbytes == sum(row["nbytes"] for row in stored_rows(lake))
    assert report.quarantined["version_missing"] == report.quarantined["version_mismatch"] == 1


def test_one_sample_id_with_two_contents_is_a_conflict_not_last_wins(lake: Lake) -> None:
    first, second = TARGET.rollout(0), replace(TARGET.rollout(1), sample_id="s0")
    report = feed(make(lake), [first, second])
    assert report.quarantined == {"sample_conflict": 1}
    again = feed(make(lake), [second])
    assert (again.quarantined, again.windows) == ({"sample_conflict": 1}, 0)
    assert lake.read_window(stored_rows(lake)[0]).token_ids[:-1].tolist() == list(first.token_ids)


def test_a_longer_rollout_under_a_known_id_is_a_conflict(lake: Lake) -> None:
    feed(make(lake), [TARGET.rollout(0)])
    report = feed(make(lake), [TARGET.rollout(0, response=13)])
    assert report.quarantined == {"sample_conflict": 1}


def test_collecting_again_adds_nothing_and_a_grown_file_adds_the_rest(lake: Lake) -> None:
    rollouts = [TARGET.rollout(n) for n in range(8)]
    feed(make(lake), rollouts[:5])
    again = feed(make(lake), rollouts[:5])
    assert (again.windows, again.duplicates, again.accounted) == (0, 5, 5)
    grown = feed(make(lake), rollouts)
    assert (grown.windows, grown.duplicates) == (3, 5)
    assert sorted(row["sample_id"] for row in stored_rows(lake)) == sorted(r.sample_id for r in rollouts)


def test_another_layout_of_the_same_samples_is_collected_beside_the_first(lake: Lake) -> None:
    feed(make(lake), [TARGET.rollout(0)])
    other = make(lake, layout=replace(LAYOUT, dtype=FeatureDtype.FLOAT32))
    report = feed(other, [TARGET.rollout(0)])
    assert (report.windows, report.duplicates) == (1, 0)


def test_two_writers_of_one_plan_leave_one_fragment(lake: Lake) -> None:
    first, second = make(lake), make(lake, writer_id="other")  # both opened before either commits
    reports = [feed(c, [TARGET.rollout(n) for n in range(3)]) for c in (first, second)]
    assert [r.collected for r in reports] == [3, 0]
    assert [r.duplicates for r in reports] == [0, 3]
    assert all(r.accounted == r.received for r in reports)
    assert len(stored_rows(lake)) == 3


def test_two_writers_with_other_tokens_under_one_plan_conflict(lake: Lake) -> None:
    first, second = make(lake), make(lake)
    feed(first, [TARGET.rollout(0)])
    with pytest.raises(PlanConflictError):
        feed(second, [replace(TARGET.rollout(1), sample_id="s0")])


def test_another_versions_head_is_refused_before_anything_is_read(lake: Lake) -> None:
    with pytest.raises(VersionConflictError, match="another version's head"):
        make(lake, head_id=ToyTarget(1).head.head_id)


def test_an_unregistered_version_is_refused(lake: Lake) -> None:
    with pytest.raises(UnknownVersionError):
        make(lake, version=TargetVersion(9))


def test_a_version_whose_head_is_gone_is_refused(lake: Lake, tmp_path: Path) -> None:
    for blob in (tmp_path / "lake" / "blobs").iterdir():
        blob.unlink()
    with pytest.raises(HeadMissingError):
        make(lake, head_id=HeadId(TARGET.head.head_id))


def test_the_report_states_the_smallest_gap_and_the_neighbours(lake: Lake) -> None:
    near = ToyTarget(1, step=0.3)
    lake.put_head(near.head)
    lake.register_version(near.record)
    report = feed(make(lake), [TARGET.rollout(n, response=30) for n in range(6)])
    agreement = report.agreement
    assert agreement.tokens == 6 * 30
    assert 0 < agreement.mean_error < agreement.limit < agreement.smallest_gap
    (neighbour,) = agreement.neighbours
    assert neighbour.version == TargetVersion(1)
    assert neighbour.resolved
    assert neighbour.mean_gap > agreement.smallest_gap


def test_without_another_version_no_neighbour_is_claimed(lake: Lake) -> None:
    assert feed(make(lake), [TARGET.rollout(0)]).agreement.neighbours == ()


def test_closing_with_features_outstanding_is_the_callers_bug(lake: Lake) -> None:
    collector = make(lake)
    collector.admit(TARGET.rollout(0))
    with pytest.raises(AssertionError, match="neither added nor refused"):
        collector.close()
