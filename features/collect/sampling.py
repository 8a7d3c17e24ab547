"""Which rollouts, and which rows of them, are collected: a pure function of identities."""

import hashlib
from dataclasses import asdict, dataclass

from features.collect.rollouts import Rollout
from features.schema import TargetVersion


@dataclass(frozen=True, slots=True, order=True)
class WindowSpan:
    """Rows ``[start, stop)`` of a sequence, by absolute position."""

    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        """Rows of the window."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class SamplingPolicy:
    """At most one window per rollout, the same one whoever asks and however often."""

    sample_rate: float = 1.0
    """Share of rollouts that are kept, by hash of (seed, version, sample id)."""
    max_tokens: int = 512
    """Rows of the longest window; a shorter sequence is kept whole."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.sample_rate <= 1.0:
            raise ValueError(f"sample_rate must be in (0, 1], got {self.sample_rate}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")

    def as_mapping(self) -> dict[str, float | int]:
        """What a plan id covers and a report records."""
        return asdict(self)

    def plan(self, rollout: Rollout, version: TargetVersion) -> tuple[WindowSpan, ...]:
        """The spans to collect of one rollout; empty when it is sampled out.

        A window of a long sequence starts between half a window before the first sampled
        token and the last one, so that it holds tokens worth learning and some context.
        """
        keep, place = self._draws(rollout.sample_id, version)
        if keep >= self.sample_rate:
            return ()
        length = len(rollout.token_ids)
        if length <= self.max_tokens:
            return (WindowSpan(0, length),)
        sampled = [i for i, s in enumerate(rollout.sampled_mask) if s] or [rollout.prompt_length]
        latest = min(length - self.max_tokens, max(0, sampled[-1] - 1))
        earliest = min(latest, max(0, sampled[0] - self.max_tokens // 2))
        start = earliest + int(place * (latest - earliest + 1))
        return (WindowSpan(start, start + self.max_tokens),)

    def _draws(self, sample_id: str, version: TargetVersion) -> tuple[float, float]:
        """Two independent uniform numbers in [0, 1) of this rollout."""
        key = f"{self.seed}\x00{version.number}\x00{sample_id}".encode()
        digest = hashlib.blake2b(key, digest_size=16).digest()
        return (int.from_bytes(digest[:8]) >> 11) / 2**53, (int.from_bytes(digest[8:]) >> 11) / 2**53
