"""The first pass over a source: counts, and who owns a sample that comes several times."""

from dataclasses import replace

import numpy as np
import pytest
from collect_toy_target import ToyTarget

from features.collect.rollouts import Rollout
from features.collect.sampling import SamplingPolicy
from features.collect.scan import Fate, PartitionScan, decode_scan, encode_scan, fates_of, scan_partition
from features.collect.sources import SourceCounts
from features.errors import CorruptDataError
from features.quarantine import Refusal
from features.schema import TargetVersion

VERSION = TargetVersion(0)
CUT = Refusal("a.jsonl", 3, "bad_json", "cut")


def scan(*items: Rollout | Refusal, policy: SamplingPolicy = SamplingPolicy()) -> PartitionScan:  # noqa: B008
    return scan_partition(iter(items), SourceCounts(lines=len(items)), version=VERSION, policy=policy)


def names(fates: list[np.ndarray]) -> list[list[str]]:
    return [[Fate(f).name for f in part] for part in fates]


def rollout(number: int, **changes: object) -> Rollout:
    return replace(ToyTarget().rollout(number), **changes)  # type: ignore[arg-type]


def test_every_sequence_is_counted_once() -> None:
    items = [rollout(0), rollout(1, version=None), rollout(2, version=7), CUT, rollout(3)]
    found = scan(*items)
    totals = found.totals
    assert totals.sequences == 5
    assert (found.candidates, totals.version_missing, totals.version_mismatch) == (2, 1, 1)
    assert totals.refused == {"bad_json": 1}
    assert found.num_rows.tolist() == [15, 15]
    thin = scan(*items, policy=SamplingPolicy(sample_rate=1e-9))
    assert (thin.candidates, thin.totals.skipped_by_sampling) == (0, 2)


def test_the_first_owner_is_decided_by_the_order_of_partitions() -> None:
    first = scan(rollout(0), rollout(1))
    second = scan(rollout(1), rollout(5, sample_id="s0"), rollout(0, sample_id="copy"), rollout(2))
    assert names(fates_of([first, second])) == [
        ["WANTED", "WANTED"], ["REPEATED", "CONFLICT", "REPEATED", "WANTED"]
    ]  # fmt: skip
    assert names(fates_of([second, first])) == [
        ["WANTED", "WANTED", "WANTED", "WANTED"], ["CONFLICT", "REPEATED"]
    ]  # fmt: skip


def test_the_tokens_of_a_refused_conflict_are_still_wanted_under_another_name() -> None:
    found = fates_of([scan(rollout(0), rollout(1, sample_id="s0"), rollout(1))])
    assert names(found) == [["WANTED", "CONFLICT", "WANTED"]]


def test_a_scan_survives_its_storage_and_a_broken_one_is_named() -> None:
    found = scan(rollout(0), CUT)
    again = decode_scan(encode_scan(found), where="here")
    assert again.totals == found.totals
    assert (again.tokens == found.tokens).all()
    assert again.length.dtype == np.uint32
    with pytest.raises(CorruptDataError, match="here"):
        decode_scan(b"PAR1", where="here")


def test_no_candidate_at_all() -> None:
    assert [len(f) for f in fates_of([scan(CUT), scan()])] == [0, 0]
