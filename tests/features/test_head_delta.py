"""Head snapshots as deltas: exact to the bit, smaller where weights moved little, never a way to lose one."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from features.bfloat16 import float32_to_bf16
from features.check import check_lake
from features.errors import CorruptDataError, HeadMissingError
from features.head_delta import HEADER_BYTES, can_delta, decode_delta, delta_link, encode_delta
from features.head_store import FULL_HEADS, DeltaPolicy, head_path
from features.heads import HeadSnapshot
from features.lake import Lake
from features.schema import FeatureDtype, HeadId
from features.testing import TINY_LAYOUT, TINY_TARGET, commit_tiny, tiny_record, tiny_window

V, H = 512, 64
TARGET = replace(TINY_TARGET, vocab_size=V, hidden_size=H)
EVERY_SIZE = DeltaPolicy(min_bytes=0)
BASE_ID = HeadId("ab" * 32)


def weights(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((V, H), np.float32)


def moved(values: np.ndarray, step: int, by: float = 1e-4) -> np.ndarray:
    return values + by * np.random.default_rng([9, step]).standard_normal(values.shape, np.float32)


def bf16(values: np.ndarray, **parts: object) -> HeadSnapshot:
    return HeadSnapshot(float32_to_bf16(values), FeatureDtype.BFLOAT16, **parts)  # type: ignore[arg-type]


def same(left: HeadSnapshot, right: HeadSnapshot) -> bool:
    return left.to_bytes() == right.to_bytes()


TIED = bf16(weights())
UNTIED = bf16(weights(), embed_tokens=float32_to_bf16(weights(1)))
BIAS = np.random.default_rng(3).standard_normal(V).astype(np.float32)
PAIRS = {
    "tied": (TIED, bf16(moved(weights(), 1))),
    "untied": (UNTIED, bf16(moved(weights(), 1), embed_tokens=float32_to_bf16(moved(weights(1), 2)))),
    "was tied": (TIED, bf16(moved(weights(), 1), embed_tokens=float32_to_bf16(moved(weights(), 2)))),
    "becomes tied": (UNTIED, bf16(moved(weights(), 1))),
    "bias": (TIED, bf16(moved(weights(), 1), bias=BIAS)),
    "bias goes": (bf16(weights(), bias=BIAS), bf16(moved(weights(), 1))),
    "scale and softcap": (TIED, bf16(moved(weights(), 1), logit_scale=0.3, softcap=30.0)),
    "nothing moved": (TIED, bf16(weights(), softcap=1.5)),
    "float32": (
        HeadSnapshot(weights(), FeatureDtype.FLOAT32),
        HeadSnapshot(moved(weights(), 1), FeatureDtype.FLOAT32),
    ),
}


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_a_delta_gives_back_every_bit_and_the_id(name: str) -> None:
    base, head = PAIRS[name]
    found = decode_delta(encode_delta(head, base, base_id=BASE_ID), base)
    assert same(found, head)
    assert found.head_id == head.head_id


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from([np.uint16, np.uint32]).flatmap(
        lambda dtype: arrays.arrays(dtype, (2, 7, 3), elements=arrays.from_dtype(np.dtype(dtype)))
    )
)
def test_any_bit_pattern_survives_nan_payloads_and_signed_zeros_too(bits: np.ndarray) -> None:
    wide = bits.dtype == np.uint32
    dtype = FeatureDtype.FLOAT32 if wide else FeatureDtype.BFLOAT16
    old, new = (HeadSnapshot(part.view(np.float32) if wide else part, dtype) for part in bits)
    assert same(decode_delta(encode_delta(new, old, base_id=BASE_ID), old), new)


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    base, head = PAIRS["untied"]
    monkeypatch.setattr("features.head_delta._BLOCK", 1000)  # leaves a part of a block at the end
    assert same(decode_delta(encode_delta(head, base, base_id=BASE_ID), base), head)


@pytest.mark.parametrize(("by", "at_most"), [(1e-5, 0.03), (1e-4, 0.08), (1e-3, 0.22)])
def test_a_small_update_takes_a_small_share_of_the_bytes(by: float, at_most: float) -> None:
    head = bf16(moved(weights(), 1, by))
    # Measured 0.011, 0.057 and 0.171 on a [49152, 576] head; frames weigh more on a small one.
    assert len(encode_delta(head, TIED, base_id=BASE_ID)) < at_most * head.nbytes


def test_heads_of_other_shape_or_type_have_no_delta() -> None:
    other = HeadSnapshot(weights(), FeatureDtype.FLOAT32)
    assert not can_delta(other, TIED)
    assert not can_delta(bf16(weights()[:-1]), TIED)
    with pytest.raises(ValueError, match="equal types and shapes"):
        encode_delta(other, TIED, base_id=BASE_ID)


def test_a_cut_or_changed_delta_is_refused_or_has_another_id() -> None:
    base, head = PAIRS["bias"]
    raw = encode_delta(head, base, base_id=BASE_ID)
    for stop in (0, 5, 60, len(raw) // 2, len(raw) - 1):
        with pytest.raises(CorruptDataError):
            decode_delta(raw[:stop], base)
    for position in range(0, len(raw), 97):
        changed = bytearray(raw)
        changed[position] ^= 0x40
        try:
            found = decode_delta(bytes(changed), base)
        except CorruptDataError:
            continue
        # The header's fields about the base are not values of the head.
        assert found.head_id != head.head_id or delta_link(bytes(changed)) != delta_link(raw)


def test_a_delta_is_no_full_snapshot_to_a_reader_that_does_not_know_it() -> None:
    base, head = PAIRS["tied"]
    with pytest.raises(CorruptDataError, match="no head snapshot"):
        HeadSnapshot.from_bytes(encode_delta(head, base, base_id=BASE_ID))


def test_the_header_says_where_a_delta_starts_and_what_it_stands_for() -> None:
    base, head = PAIRS["bias"]
    link = delta_link(encode_delta(head, base, base_id=BASE_ID, index=3)[:HEADER_BYTES])
    assert link is not None
    assert (link.base, link.index, link.decoded_bytes) == (BASE_ID, 3, 2 * V * H + 4 * V)
    assert delta_link(base.to_bytes()[:HEADER_BYTES]) is None


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.init(str(tmp_path / "lake"), TARGET)


def put_versions(lake: Lake, count: int, policy: DeltaPolicy = EVERY_SIZE) -> list[HeadId]:
    """Register versions whose weights walk by 1e-4 a step; returns their heads' ids."""
    values, ids = weights(), []
    for number in range(count):
        ids.append(lake.put_head(bf16(values), delta=policy))
        lake.register_version(tiny_record(ids[-1], number, target=TARGET))
        values = moved(values, number)
    return ids


def test_every_kth_head_is_a_keyframe_and_the_others_start_from_it(lake: Lake) -> None:
    ids = put_versions(lake, 7, DeltaPolicy(keyframe_every=3, min_bytes=0))
    assert [lake.head_base(i) for i in ids] == [None, ids[0], ids[0], None, ids[3], ids[3], None]


def test_heads_of_a_lake_read_back_whether_full_or_delta(lake: Lake) -> None:
    values = weights()
    for number, head_id in enumerate(put_versions(lake, 5)):
        assert same(Lake.open(lake.url).head(head_id), bf16(values))
        values = moved(values, number)


def test_putting_a_head_again_changes_nothing(lake: Lake) -> None:
    ids = put_versions(lake, 3)
    before = {path: lake.store.read(path) for path in lake.store.list("blobs")}
    assert lake.put_head(bf16(weights())) == ids[0]
    assert lake.put_head(lake.head(ids[2]), delta=FULL_HEADS) == ids[2]
    assert {path: lake.store.read(path) for path in lake.store.list("blobs")} == before


@pytest.mark.parametrize(
    ("values", "policy"),
    [
        (moved(weights(), 0), FULL_HEADS),
        (moved(weights(), 0), DeltaPolicy()),  # small: requests count, not bytes
        (weights(5), EVERY_SIZE),  # too far for a delta to pay
        (moved(weights(), 0), DeltaPolicy(min_bytes=0, max_ratio=1e-6)),
    ],
    ids=["deltas off", "small head", "other weights", "ratio"],
)
def test_a_delta_that_does_not_pay_is_not_written(
    lake: Lake, values: np.ndarray, policy: DeltaPolicy
) -> None:
    put_versions(lake, 1)
    assert lake.head_base(lake.put_head(bf16(values), delta=policy)) is None


def test_heads_are_deltas_by_default_from_a_megabyte_on(tmp_path: Path) -> None:
    target = replace(TARGET, vocab_size=8 * V, hidden_size=2 * H)
    lake = Lake.init(str(tmp_path / "large"), target)
    values = np.random.default_rng(0).standard_normal((8 * V, 2 * H), np.float32)
    first = lake.put_head(bf16(values))
    lake.register_version(tiny_record(first, target=target))
    assert lake.head_base(lake.put_head(bf16(moved(values, 1)))) == first


def test_a_lost_keyframe_is_named_and_putting_it_again_repairs_its_deltas(lake: Lake, tmp_path: Path) -> None:
    ids = put_versions(lake, 3)
    keyframe = tmp_path / "lake" / head_path(ids[0])
    keyframe.unlink()
    with pytest.raises(HeadMissingError, match=ids[0]):
        lake.head(ids[2])
    assert lake.put_head(bf16(weights()), delta=EVERY_SIZE) == ids[0]
    assert lake.head(ids[2]).head_id == ids[2]


def test_a_lost_keyframe_is_named_by_every_level_of_fsck_and_no_version_is_registered_on_it(
    lake: Lake,
) -> None:
    ids = put_versions(lake, 2)
    for number in range(2):
        windows = [
            tiny_window(lake.head(ids[number]), version=number, layout=replace(TINY_LAYOUT, hidden_size=H))
        ]
        commit_tiny(lake, number, ids[number], windows)
    assert lake.has_head(ids[1])
    assert check_lake(lake, 2) == ()
    (Path(lake.url) / head_path(ids[0])).unlink()
    assert not lake.has_head(ids[1])
    for level in (0, 1, 2):
        findings = {f.path: f for f in check_lake(lake, level)}  # type: ignore[arg-type]
        assert {f.code for f in findings.values()} == {"version_unusable"}
        assert set(findings) == {"v000000000", "v000000001"}
        assert all(ids[0] in finding.detail and finding.harmful for finding in findings.values())
    with pytest.raises(HeadMissingError, match=f"a delta to head {ids[0]}"):
        Lake.open(lake.url).register_version(tiny_record(ids[1], 7, target=lake.target))


def test_a_keyframe_put_again_as_a_delta_to_a_later_one_still_serves(lake: Lake, tmp_path: Path) -> None:
    ids = put_versions(lake, 4, DeltaPolicy(keyframe_every=3, min_bytes=0))
    (tmp_path / "lake" / head_path(ids[0])).unlink()
    lake.put_head(bf16(weights()), delta=EVERY_SIZE)
    assert lake.head_base(ids[0]) == ids[3]
    assert lake.head(ids[2]).head_id == ids[2]


def test_a_damaged_keyframe_is_named_and_never_decoded_into_other_weights(lake: Lake, tmp_path: Path) -> None:
    ids = put_versions(lake, 2)
    keyframe = tmp_path / "lake" / head_path(ids[0])
    raw = bytearray(keyframe.read_bytes())
    raw[-9] ^= 1
    keyframe.write_bytes(raw)
    with pytest.raises(CorruptDataError, match=rf"{ids[0]}.*the keyframe of head {ids[1]}"):
        lake.head(ids[1])


def test_a_damaged_neighbour_does_not_keep_a_new_head_out(lake: Lake, tmp_path: Path) -> None:
    ids = put_versions(lake, 2)
    for head_id in ids:
        (tmp_path / "lake" / head_path(head_id)).write_bytes(b"cut")
    new = lake.put_head(bf16(moved(weights(), 77)), delta=EVERY_SIZE)
    assert lake.head_base(new) is None
    assert lake.head(new).head_id == new


def test_a_delta_that_leads_to_itself_is_refused(lake: Lake, tmp_path: Path) -> None:
    ids = put_versions(lake, 2)
    loop = encode_delta(TIED, TIED, base_id=ids[1])
    (tmp_path / "lake" / head_path(ids[0])).write_bytes(loop)
    with pytest.raises(CorruptDataError, match="from itself"):
        lake.head(ids[1])


def test_a_delta_under_another_heads_name_is_refused(lake: Lake, tmp_path: Path) -> None:
    ids = put_versions(lake, 3)
    blobs = tmp_path / "lake"
    (blobs / head_path(ids[2])).write_bytes((blobs / head_path(ids[1])).read_bytes())
    with pytest.raises(CorruptDataError, match=f"{ids[2]}.*named by"):
        lake.head(ids[2])


def test_sizes_add_up_and_name_versions_and_keyframes(lake: Lake) -> None:
    ids = put_versions(lake, 3)
    lake.register_version(tiny_record(ids[1], 7, target=TARGET))
    sizes = lake.head_sizes()
    assert [(s.head_id, s.versions, s.base) for s in sizes] == [
        (ids[0], (0,), None),
        (ids[1], (1, 7), ids[0]),
        (ids[2], (2,), ids[0]),
    ]
    assert {s.decoded_bytes for s in sizes} == {2 * V * H}
    assert sum(s.stored_bytes for s in sizes) == sum(lake.store.size(p) for p in lake.store.list("blobs"))
    assert sizes[1].ratio < 0.1 < 1 <= sizes[0].ratio


def test_no_new_delta_starts_from_a_keyframe_whose_values_changed(lake: Lake, tmp_path: Path) -> None:
    (first,) = put_versions(lake, 1)
    keyframe = tmp_path / "lake" / head_path(first)
    intact = keyframe.read_bytes()
    keyframe.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    new = lake.put_head(bf16(moved(weights(), 77)), delta=EVERY_SIZE)
    keyframe.write_bytes(intact)
    assert lake.head_base(new) is None
    assert lake.head(new).head_id == new
