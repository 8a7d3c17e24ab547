"""The logprob proof passes what belongs together and refuses each planted fault of its kind."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from collect_toy_target import HIDDEN, LAYERS, ToyTarget, forward_features

from features.collect.cut import cut_window
from features.collect.proofs import (
    SPREAD,
    Agreement,
    AgreementTally,
    LogprobTolerance,
    feature_fault,
    logprob_agreement,
    neighbour_gap,
)
from features.collect.rollouts import Rollout
from features.collect.sampling import WindowSpan
from features.schema import FeatureDtype, FragmentLayout, TargetVersion
from features.windows import Window

BF16 = FragmentLayout((1, 2), FeatureDtype.BFLOAT16, HIDDEN)
FP32 = FragmentLayout((1, 2), FeatureDtype.FLOAT32, HIDDEN)
EXACT = LogprobTolerance.for_compute_dtype(FeatureDtype.FLOAT32)
TARGET = ToyTarget()


def window(
    rollout: Rollout | None = None,
    layout: FragmentLayout = BF16,
    target: ToyTarget = TARGET,
    layer_ids: tuple[int, ...] = (1, 2),
    span: WindowSpan | None = None,
) -> Window:
    rollout = rollout or TARGET.rollout(0, response=40)
    aux, final = forward_features(target, [rollout.token_ids], layer_ids)[0]
    span = span or WindowSpan(0, len(rollout.token_ids))
    return cut_window(rollout, span, aux, final, version=TargetVersion(0), layout=layout)


def judge(w: Window, target: ToyTarget = TARGET, tolerance: LogprobTolerance = EXACT) -> Agreement:
    return logprob_agreement(w, target.head, tolerance)


@pytest.mark.parametrize("layout", [BF16, FP32], ids=["bfloat16", "float32"])
def test_features_head_and_logprobs_of_one_version_agree(layout: FragmentLayout) -> None:
    for number in range(20):
        result = judge(window(TARGET.rollout(number, response=40), layout))
        assert result.verdict == "agrees"
        assert result.tokens == 40
        assert result.mean_error <= result.max_error


def test_a_window_inside_a_sequence_keeps_each_logprob_with_its_token() -> None:
    rollout = TARGET.rollout(3, response=40)
    inner = window(rollout, span=WindowSpan(10, 30))
    np.testing.assert_array_equal(inner.token_ids, rollout.token_ids[10:31])
    np.testing.assert_allclose(inner.logprobs, np.array(rollout.logprobs[10:31], np.float32))
    assert judge(inner).verdict == "agrees"


def test_the_limit_follows_the_measured_storage_noise() -> None:
    stored, exact = judge(window(layout=BF16)), judge(window(layout=FP32))
    assert exact.limit == pytest.approx(EXACT.engine_noise)
    assert stored.limit > exact.limit
    # The estimate is of the right size: the real rounding error is neither far above nor far below.
    storage = (stored.limit - EXACT.engine_noise) / (1 + SPREAD / np.sqrt(stored.tokens))
    assert 0.3 < stored.mean_error / storage < 3


@pytest.mark.parametrize("response", [1, 2, 5, 30])
def test_storage_noise_alone_never_refuses_a_window(response: int) -> None:
    """With no allowance for the engine at all: its logprobs are exact here."""
    exact_engine = LogprobTolerance(engine_noise=0.0)
    for number in range(150):
        rollout = TARGET.rollout(number % 25, response=30)
        sampled = tuple(i >= 3 and (i + number) % 30 < response for i in range(33))
        result = judge(window(replace(rollout, sampled_mask=sampled)), tolerance=exact_engine)
        assert result.verdict != "disagrees", (number, result)


def test_the_head_of_another_version_is_refused() -> None:
    assert judge(window(), ToyTarget(version=1)).verdict == "disagrees"


def test_perturbed_head_weights_are_refused() -> None:
    head = TARGET.head
    noise = np.random.default_rng(0).normal(size=head.lm_head.shape).astype(np.float32)
    perturbed = replace(head, lm_head=head.lm_head + 0.05 * noise)
    assert logprob_agreement(window(), perturbed, EXACT).verdict == "disagrees"


def test_features_of_another_version_are_refused() -> None:
    assert judge(window(target=ToyTarget(version=1))).verdict == "disagrees"


@pytest.mark.parametrize("shift", [-1, 1])
def test_shifted_logprobs_are_refused(shift: int) -> None:
    rollout = TARGET.rollout(0, response=40)
    assert rollout.logprobs is not None
    shifted = (*rollout.logprobs[1:], None) if shift < 0 else (None, *rollout.logprobs[:-1])
    assert judge(window(replace(rollout, logprobs=shifted))).verdict == "disagrees"


def test_final_rows_before_the_norm_are_refused() -> None:
    rollout = TARGET.rollout(0, response=40)
    aux, _ = forward_features(TARGET, [rollout.token_ids], (1, 2))[0]
    pre_norm = TARGET.stream(rollout.token_ids, LAYERS)
    span = WindowSpan(0, len(rollout.token_ids))
    wrong = cut_window(rollout, span, aux, pre_norm, version=TargetVersion(0), layout=BF16)
    assert judge(wrong).verdict == "disagrees"


def test_final_rows_off_by_one_position_are_refused() -> None:
    w = window()
    assert judge(replace(w, final=np.roll(w.final, 1, axis=0))).verdict == "disagrees"


def test_an_aux_layer_off_by_one_is_not_for_this_proof_to_see() -> None:
    assert judge(window(layer_ids=(2, 3))).verdict == "agrees"


def test_non_finite_recomputed_logprobs_do_not_agree() -> None:
    head = TARGET.head
    broken = replace(head, lm_head=np.full_like(head.lm_head, np.inf))
    with np.errstate(all="ignore"):
        assert logprob_agreement(window(layout=FP32), broken, EXACT).verdict == "disagrees"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logprob_kind": None}, "no logprobs of the engine"),
        ({"logprob_kind": "engine_unknown"}, "kind engine_unknown"),
        ({"logprobs": None}, "no sampled token with a logprob"),
        ({"logprobs": (0.0,) * 15}, "no sampled token with a logprob"),
        ({"logprobs": (-9999.0,) * 15}, "no sampled token with a logprob"),
        ({"logprobs": (float("nan"),) * 15}, "no sampled token with a logprob"),
        ({"logprob_kind": "engine_processed", "temperature": None}, "temperature"),
        ({"logprob_kind": "engine_processed", "temperature": 0.0}, "temperature"),
        ({"logprob_kind": "engine_processed", "top_p": 0.9}, "truncated"),
        ({"logprob_kind": "engine_processed", "top_p": None}, "truncated"),
        ({"logprob_kind": "engine_processed", "top_k": 20}, "truncated"),
    ],
    ids=str,
)
def test_windows_that_cannot_be_compared_are_unverified(changes: dict[str, Any], reason: str) -> None:
    result = judge(window(TARGET.rollout(0, **changes)))
    assert result.verdict == "unverified"
    assert reason in result.reason
    assert result.tokens == 0


def test_only_sampled_tokens_are_compared() -> None:
    rollout = TARGET.rollout(0, response=12)
    tool = tuple(s and i not in (7, 8) for i, s in enumerate(rollout.sampled_mask))
    assert rollout.logprobs is not None
    invented = tuple(-3.0 if i in (7, 8) else v for i, v in enumerate(rollout.logprobs))
    result = judge(window(replace(rollout, sampled_mask=tool, logprobs=invented)))
    assert (result.verdict, result.tokens) == ("agrees", 10)


@pytest.mark.parametrize("temperature", [0.5, 0.8, 1.3])
def test_processed_logprobs_are_compared_at_their_temperature(temperature: float) -> None:
    rollout = TARGET.rollout(0, response=40)
    final, ids = TARGET.final(rollout.token_ids), np.array(rollout.token_ids[1:])
    processed = TARGET.head.token_logprobs(final[:-1], ids, temperature=temperature)
    logprobs = (None, None, None, *map(float, processed[2:]))
    changed = replace(rollout, logprobs=logprobs, logprob_kind="engine_processed", temperature=temperature)
    assert judge(window(changed)).verdict == "agrees"
    assert judge(window(replace(changed, logprob_kind="engine_raw"))).verdict == "disagrees"


def test_the_stated_smallest_gap_bounds_what_is_refused() -> None:
    """Whatever moves the mean logprob by more than the stated gap is refused."""
    rollout = TARGET.rollout(0, response=40)
    tally = AgreementTally()
    tally.add(judge(window(rollout)))
    gap = tally.summary().smallest_gap
    assert rollout.logprobs is not None
    moved = tuple(None if v is None else v - 1.001 * gap for v in rollout.logprobs)
    assert judge(window(replace(rollout, logprobs=moved))).verdict == "disagrees"


def test_a_neighbour_gap_says_whether_that_version_would_have_been_refused() -> None:
    rollout = TARGET.rollout(0, response=40)
    final, ids = TARGET.final(rollout.token_ids)[:-1], np.array(rollout.token_ids[1:], np.int32)

    def gap(step: float) -> Any:
        other = ToyTarget(1, step=step).head
        return neighbour_gap(final, ids, own=TARGET.head, other=other, version=TargetVersion(1), needed=0.01)

    assert gap(0.3).resolved
    assert not gap(1e-5).resolved
    assert gap(0.3).mean_gap > gap(1e-3).mean_gap


def test_the_tally_keeps_refused_windows_out_of_the_means() -> None:
    tally = AgreementTally()
    good = judge(window())
    tally.add(good)
    tally.add(judge(window(), ToyTarget(1)))
    tally.add(judge(window(TARGET.rollout(0, logprobs=None))))
    summary = tally.summary()
    assert (summary.windows_compared, summary.windows_refused) == (2, 1)
    assert summary.tokens == good.tokens
    assert summary.mean_error == pytest.approx(good.mean_error)


@pytest.mark.parametrize(
    ("array", "row", "value", "reason"),
    [
        ("aux", 3, np.nan, "nonfinite_features"),
        ("final", 5, np.inf, "nonfinite_features"),
        ("final", 5, -np.inf, "nonfinite_features"),
        ("aux", 3, 3.4e38, "nonfinite_features"),
        ("aux", slice(None), 0.0, "zero_features"),
        ("final", 0, 0.0, "zero_features"),
    ],
)
def test_features_that_cannot_be_right_are_named(array: str, row: Any, value: float, reason: str) -> None:
    aux, final = forward_features(TARGET, [list(range(8))], (1, 2))[0]
    assert feature_fault(aux, final, rows=8, layout=BF16) is None
    (aux if array == "aux" else final)[row] = value
    fault = feature_fault(aux, final, rows=8, layout=BF16)
    assert fault is not None
    assert fault[0] == reason
    assert array in fault[1]


def test_a_zero_block_of_one_layer_id_is_seen() -> None:
    aux, final = forward_features(TARGET, [list(range(8))], (1, 2))[0]
    aux[4, HIDDEN:] = 0.0
    fault = feature_fault(aux, final, rows=8, layout=BF16)
    assert fault is not None
    assert "aux id 2" in fault[1]


def test_the_largest_bfloat16_is_not_called_an_overflow() -> None:
    aux, final = forward_features(TARGET, [list(range(8))], (1, 2))[0]
    aux[0, 0] = np.float32(np.ldexp(2.0 - 2.0**-7, 127))
    assert feature_fault(aux, final, rows=8, layout=BF16) is None


@pytest.mark.parametrize("cut", ["aux", "final", "both", "width", "dtype"])
def test_features_of_another_shape_are_refused(cut: str) -> None:
    aux, final = forward_features(TARGET, [list(range(40))], (1, 2))[0]
    aux = aux[:24] if cut in ("aux", "both") else aux[:, 1:] if cut == "width" else aux
    final = final[:24] if cut in ("final", "both") else final.astype(np.float64) if cut == "dtype" else final
    fault = feature_fault(aux, final, rows=40, layout=BF16)
    assert fault is not None
    assert fault[0] == "feature_shape"
