"""A short forward over the first rollouts, before a version number is given to weights for ever."""

import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from features.collect.collector import admission_problem
from features.collect.cut import cut_window
from features.collect.forwards import DEFAULT_BATCH_TOKENS, TapModule, batches, longest_sequence
from features.collect.proofs import LogprobTolerance, logprob_agreement
from features.collect.rollouts import Rollout, rollout_problem
from features.collect.sampling import SamplingPolicy, WindowSpan
from features.errors import ProofFailedError
from features.heads import HeadSnapshot
from features.lake import Lake
from features.quarantine import Refusal
from features.schema import FragmentLayout, TargetVersion, VersionRecord

_TRIED_ROLLOUTS = 16
_ENOUGH_WINDOWS = 4
"""Compared windows from which on a trial in which none agrees is no accident."""

Item = Rollout | Refusal


@dataclass(frozen=True, slots=True)
class Trial:
    """What the forward of a few rollouts showed."""

    tokens_per_second: float
    windows_compared: int
    """Windows with logprobs that could be compared."""
    windows_agreeing: int


def candidate_spans(item: Item, version: TargetVersion, policy: SamplingPolicy) -> tuple[WindowSpan, ...]:
    """The spans that are wanted of a record; none of a refusal, of another version, or when sampled out."""
    if isinstance(item, Refusal) or item.version != version.number or rollout_problem(item) is not None:
        return ()
    return policy.plan(item, version)


class Candidates:
    """Rollouts of which the first wanted ones are looked at before all are gone through."""

    def __init__(self, items: Iterable[Item], record: VersionRecord, policy: SamplingPolicy) -> None:
        self._items, self._record, self._policy = iter(items), record, policy
        self._seen: list[Item] = []

    def some(self) -> Iterator[Item]:
        """As many as a trial runs, and what lies between them; all of them when there are fewer."""
        wanted = 0
        while wanted < _TRIED_ROLLOUTS and (item := next(self._items, None)) is not None:
            self._seen.append(item)
            wanted += bool(candidate_spans(item, self._record.version, self._policy))
            yield item

    def everything(self) -> Iterator[Item]:
        """All of them, from the first."""
        return chain(self._seen, self._items)


def try_rollouts(
    items: Iterable[Item],
    *,
    tap: TapModule,
    target: Callable[[], Any],
    record: VersionRecord,
    head: HeadSnapshot,
    layout: FragmentLayout,
    policy: SamplingPolicy,
    tolerance: LogprobTolerance,
) -> Trial | None:
    """Run the first rollouts that collecting would run, twice, and time the second; None without any.

    Writes nothing. ``target`` loads the model, when there is a rollout for it.
    """
    version = record.version

    def may_run(rollout: Rollout) -> bool:
        # One that collecting refuses says nothing of the weights, and could end the forward.
        if not candidate_spans(rollout, version, policy) or admission_problem(rollout, record):
            return False
        longest = longest_sequence(target())
        return longest is None or len(rollout.token_ids) <= longest

    wanted = (item for item in items if isinstance(item, Rollout) and may_run(item))
    batch = next(batches(list(islice(wanted, _TRIED_ROLLOUTS)), DEFAULT_BATCH_TOKENS), None)
    if batch is None:
        return None
    ids = [rollout.token_ids for rollout in batch]
    for _ in range(2):
        started = time.perf_counter()
        features = tap.forward_features(target(), ids, layout.layer_ids)
        elapsed = time.perf_counter() - started
    windows = [
        cut_window(rollout, span, aux, final, version=version, layout=layout)
        for rollout, (aux, final) in zip(batch, features, strict=True)
        for span in candidate_spans(rollout, version, policy)
    ]
    verdicts = [logprob_agreement(window, head, tolerance).verdict for window in windows]
    return Trial(
        tokens_per_second=sum(map(len, ids)) / elapsed,
        windows_compared=len(verdicts) - verdicts.count("unverified"),
        windows_agreeing=verdicts.count("agrees"),
    )


def none_agrees(*, compared: int, agreeing: int) -> bool:
    """Whether a trial shows that these weights did not sample these rollouts."""
    return compared >= _ENOUGH_WINDOWS and not agreeing


def require_agreement(record: VersionRecord, *, compared: int, agreeing: int) -> None:
    """Refuse weights with which no window of a trial agrees.

    Raises:
        ProofFailedError: none of several agrees.
    """
    if none_agrees(compared=compared, agreeing=agreeing):
        raise ProofFailedError(
            f"not one of the first {compared} windows agrees with its recorded logprobs: these are not the weights "
            f"that sampled them, or the logprobs were not recorded as stated. No window was written, and "
            f"{record.version} is still free. Check --target, --version, --logprob-kind and --temperature."
        )


def is_registered(lake: Lake, record: VersionRecord) -> bool:
    """Whether the lake has this version number already."""
    return any(known.version == record.version for known in lake.versions())


def unregistered(lake: Lake, record: VersionRecord, head: HeadSnapshot) -> Lake:
    """A lake in memory that has the version, for collecting of which nothing but refusals will come.

    A version number that was typed wrongly is then not taken for ever.
    """
    apart = Lake.init(f"memory://draftlake-{uuid.uuid4().hex}", lake.target)
    apart.put_head(head)
    apart.register_version(record)
    return apart
