"""What a live collector is told, and what it tells."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from features.collect.proofs import AgreementSummary
from features.errors import InputError


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """How much a trainer gives to collecting. Sizes count feature bytes (aux and final)."""

    max_bytes: int = 512 << 20
    """Held in host memory at most, from the plan until committed. Encoding a fragment takes up to
    twice its larger array more; a version's head snapshot is held beside it."""
    when_full: Literal["drop", "block"] = "drop"
    """What :meth:`LiveCollector.plan` does when the rows would not fit: leave windows out and count
    them, or wait for room first."""
    budget_ms_per_step: float | None = None
    """With ``block``: how long one plan may wait before it drops after all; None waits for ever."""
    fragment_bytes: int = 64 << 20
    """A fragment closes when it holds this much; at most a quarter of ``max_bytes`` is used."""
    proof_tokens: int = 128
    """Tokens of a window that the logprob proof compares, evenly spread: most of what collecting costs the
    host. Fewer make the mean error noisier; the proof's limit allows for it and is then wider."""
    deadline_s: float = 30.0
    """A fragment closes when its first window has waited this long."""
    retry_s: float = 10.0
    """After a failed upload: how long until its windows are offered again. Doubles up to 16 times this."""

    def __post_init__(self) -> None:
        positive = (self.max_bytes, self.fragment_bytes, self.proof_tokens, self.deadline_s, self.retry_s)
        if min(positive) <= 0 or (self.budget_ms_per_step or 0.0) < 0:
            raise InputError(f"live options need sizes and times above 0, got {self}")
        if self.when_full not in ("drop", "block"):
            raise InputError(f"when_full is 'drop' or 'block', got {self.when_full!r}")
        if self.when_full == "drop" and self.budget_ms_per_step is not None:
            raise InputError("budget_ms_per_step is how long when_full='block' waits; 'drop' never waits")


DEFAULT_LIVE = LiveOptions()


@dataclass(frozen=True, slots=True)
class LiveReport:
    """What became of every sequence and window; :attr:`accounted_sequences` and :attr:`accounted_windows` add up.

    Sequences are refused before the forward, by their tokens; windows after it, by their features.
    """

    steps: int = 0
    sequences: int = 0
    """Sequences of all batches that were planned."""
    skipped_by_sampling: int = 0
    repeated_sequences: int = 0
    """Sequences whose sample id came before at this version, with equal tokens and masks."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Sequences by reason, before the forward."""
    planned_sequences: int = 0
    planned_windows: int = 0
    """Windows of these; of a sequence that does not fit the budget, all are dropped."""
    dropped_windows: int = 0
    """Left out because ``max_bytes`` were held."""
    dropped_tokens: int = 0
    over_budget_windows: int = 0
    """Left out because the version's token budget was spent."""
    abandoned_windows: int = 0
    """Planned, and the forward gave no rows (it raised, or its step was skipped)."""
    refused_windows: Mapping[str, int] = field(default_factory=dict)
    """By reason, after the forward: lengths, faults that features show, logprob disagreement."""
    windows: int = 0
    """Committed."""
    tokens: int = 0
    """Feature rows of these."""
    nbytes: int = 0
    fragments: int = 0
    duplicates: int = 0
    """Windows that the lake or the writer held already."""
    waiting: int = 0
    """Windows planned or taken, not committed yet."""
    lost: int = 0
    """Windows that were waiting when the collector was closed on a store that failed."""
    verified: int = 0
    """Windows whose recorded logprobs agree with features and head, when they were proven."""
    unverified: int = 0
    held_bytes: int = 0
    most_held_bytes: int = 0
    plan_s: float = 0.0
    """Wall time that the trainer's thread spent in ``plan``, waiting included."""
    offer_s: float = 0.0
    blocked_s: float = 0.0
    """Part of ``plan_s`` spent waiting for room."""
    background_s: float = 0.0
    """Wall time of the background thread for cutting, proofs and handing over; waiting not included."""
    proof_s: float = 0.0
    """Part of it for the logprob proof."""
    store_failures: int = 0
    last_error: str | None = None
    agreement: AgreementSummary = field(default_factory=AgreementSummary)

    @property
    def accounted_sequences(self) -> int:
        """Equals ``sequences``."""
        return (
            self.skipped_by_sampling
            + self.repeated_sequences
            + self.planned_sequences
            + sum(self.refused.values())
        )

    @property
    def accounted_windows(self) -> int:
        """Equals ``planned_windows``."""
        left_out = self.dropped_windows + self.over_budget_windows + self.abandoned_windows
        stored = self.windows + self.duplicates + self.waiting + self.lost
        return left_out + stored + sum(self.refused_windows.values())
