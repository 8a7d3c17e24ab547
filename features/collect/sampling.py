"""Which rollouts, and which rows of them, are collected: a pure function of identities and measurements.

Every choice follows from the policy, the target version and the rollout itself, so it is the same
whoever asks, however often and in whatever order. Where windows lie: ``sampling_places``.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Literal

from features.collect.rollout import Rollout
from features.collect.sampling_places import PLACEMENTS, Placement, WindowSpan, place_windows
from features.digests import canonical_json
from features.schema import TargetVersion

__all__ = ["LowAcceptance", "Placement", "SamplingPolicy", "Strata", "TokenBudget", "WindowSpan"]


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Feature rows wanted of one version, given what is expected to come.

    Rollouts are thinned by hash to ``tokens / expected_tokens``, so that which are kept does not
    depend on their order; ``tokens`` is met in expectation. A live collector also stops at
    ``tokens``, and counts what it leaves: that matters only where more came than was expected.
    """

    tokens: int
    expected_tokens: int
    """Rows that the rest of the policy would keep of a version without a budget."""

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.expected_tokens < 1:
            raise ValueError(f"a token budget needs tokens and expected_tokens >= 1, got {self}")

    @property
    def share(self) -> float:
        """Share of the otherwise kept rollouts that stay."""
        return min(1.0, self.tokens / self.expected_tokens)


@dataclass(frozen=True, slots=True)
class LowAcceptance:
    """Draw rollouts whose measured acceptance was low at a rate of their own."""

    below: float
    """Acceptance length, as the engine measured it; a rollout without the measurement is not low."""
    sample_rate: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.sample_rate <= 1.0:
            raise ValueError(f"sample_rate of low acceptance must be in (0, 1], got {self.sample_rate}")


@dataclass(frozen=True, slots=True)
class Strata:
    """Even out, or set, the shares of domains or reward ranges among the kept rollouts.

    A stratum's rollouts are thinned by ``wanted / expected``, scaled so that the one that is
    rarest for what is wanted of it keeps all it would without strata. Rollouts of a stratum that
    is not named (or whose domain or reward is unknown) are not thinned: nothing is lost for want
    of a label.
    """

    by: Literal["domain", "reward"]
    expected: Mapping[str, float]
    """Share of each stratum among the rollouts that come; a previous version's will do."""
    wanted: Mapping[str, float] | None = None
    """Share of each stratum among those kept; None: equal ones."""
    reward_edges: tuple[float, ...] = ()
    """With ``by="reward"``: stratum ``"0"`` is below the first edge, ``"1"`` from it on, and so forth."""

    def __post_init__(self) -> None:
        wanted = self.wanted if self.wanted is not None else dict.fromkeys(self.expected, 1.0)
        if not self.expected or set(wanted) != set(self.expected):
            raise ValueError(f"strata need the same names in expected and wanted, got {self}")
        if min(*self.expected.values(), *wanted.values()) <= 0:
            raise ValueError(f"strata need shares above 0, got {self}")
        if self.by not in ("domain", "reward") or (self.by == "reward") != bool(self.reward_edges):
            raise ValueError(f"strata are by 'domain', or by 'reward' with reward_edges, got {self}")
        if list(self.reward_edges) != sorted(set(self.reward_edges)):
            raise ValueError(f"reward_edges must ascend, got {self.reward_edges}")
        names = {str(n) for n in range(len(self.reward_edges) + 1)}
        if self.by == "reward" and not set(self.expected) <= names:
            raise ValueError(
                f"reward strata of {len(self.reward_edges)} edges are {sorted(names)}, got {self}"
            )

    def stratum(self, rollout: Rollout) -> str | None:
        """The rollout's stratum; None when its label is unknown."""
        if self.by == "domain":
            return rollout.domain
        if rollout.reward is None:
            return None
        return str(sum(edge <= rollout.reward for edge in self.reward_edges))

    def share(self, rollout: Rollout) -> float:
        """Share of the rollout's stratum that stays."""
        name = self.stratum(rollout)
        if name is None or name not in self.expected:
            return 1.0
        ratios = {n: (self.wanted[n] if self.wanted else 1.0) / e for n, e in self.expected.items()}
        return ratios[name] / max(ratios.values())


@dataclass(frozen=True, slots=True)
class SamplingPolicy:
    """Which rollouts are kept, and which windows of each."""

    sample_rate: float = 1.0
    """Share of rollouts that are kept, by hash of (seed, version, sample id). 0 only with ``low_acceptance``."""
    max_tokens: int = 512
    """Rows of the longest window, context left out; a shorter sequence is kept whole."""
    seed: int = 0
    placement: Placement = "around_response"
    """See ``sampling_places``."""
    context_rows: int = 0
    """Rows before each window's supervised ones, as far as the sequence has them; never supervised."""
    stride: int | None = None
    """With ``placement="strided"``: rows from one window's start to the next's; None: ``max_tokens``."""
    every_versions: int = 1
    """Only versions that are multiples of this."""
    token_budget: TokenBudget | None = None
    low_acceptance: LowAcceptance | None = None
    strata: Strata | None = None

    def __post_init__(self) -> None:
        lowest_open = self.low_acceptance is None
        if not 0.0 <= self.sample_rate <= 1.0 or (lowest_open and self.sample_rate == 0.0):
            raise ValueError(f"sample_rate must be in (0, 1], got {self.sample_rate}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")
        if self.context_rows < 0 or self.every_versions < 1:
            raise ValueError(f"context_rows must be >= 0 and every_versions must be >= 1, got {self}")
        if self.placement not in PLACEMENTS:
            raise ValueError(f"placement must be one of {', '.join(PLACEMENTS)}, got {self.placement!r}")
        if self.stride is not None and (self.placement != "strided" or self.stride < self.max_tokens):
            raise ValueError(
                f"stride must be >= max_tokens and goes with placement='strided' (windows that overlap would "
                f"supervise tokens twice), got {self.stride}"
            )

    def as_mapping(self) -> dict[str, Any]:
        """What a plan id covers, and what is recorded with each window: settings that are not at rest."""
        first = ("sample_rate", "max_tokens", "seed")
        defaults = {f.name: f.default for f in fields(self) if f.default is not MISSING}
        changed = {n: v for n, v in asdict(self).items() if n in first or getattr(self, n) != defaults[n]}
        return {n: _plain(v) for n, v in changed.items()}

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> "SamplingPolicy":
        """The policy whose :meth:`as_mapping` this is."""
        parts: dict[str, Any] = dict(settings)
        for name, kind in (("token_budget", TokenBudget), ("low_acceptance", LowAcceptance)):
            if parts.get(name) is not None:
                parts[name] = kind(**parts[name])
        if parts.get("strata") is not None:
            strata = dict(parts["strata"])
            parts["strata"] = Strata(**strata | {"reward_edges": tuple(strata["reward_edges"])})
        return cls(**parts)

    @property
    def recorded(self) -> str:
        """:meth:`as_mapping` as canonical JSON."""
        return canonical_json(self.as_mapping()).decode()

    def plan(self, rollout: Rollout, version: TargetVersion) -> tuple[WindowSpan, ...]:
        """The spans to collect of one rollout, ascending; empty when it is sampled out."""
        if not self.may_keep(rollout.sample_id, version):
            return ()
        keep, place = self._draws(rollout.sample_id, version)
        if keep >= self._share(rollout):
            return ()
        return place_windows(
            rollout.sampled_mask, rollout.prompt_length, place, placement=self.placement,
            max_rows=self.max_tokens, context_rows=self.context_rows, stride=self.stride or self.max_tokens,
        )  # fmt: skip

    def may_keep(self, sample_id: str, version: TargetVersion) -> bool:
        """False: no rollout of this name is kept, whatever is measured of it. Reads no tokens."""
        if version.number % self.every_versions:
            return False
        low = 0.0 if self.low_acceptance is None else self.low_acceptance.sample_rate
        return self._draws(sample_id, version)[0] < max(self.sample_rate, low) * self._budget_share

    @property
    def _budget_share(self) -> float:
        return 1.0 if self.token_budget is None else self.token_budget.share

    def _share(self, rollout: Rollout) -> float:
        """Chance with which this rollout is kept."""
        rate, low = self.sample_rate, self.low_acceptance
        measured = rollout.acceptance_length
        if low is not None and measured is not None and measured < low.below:
            rate = low.sample_rate
        return rate * self._budget_share * (1.0 if self.strata is None else self.strata.share(rollout))

    def _draws(self, sample_id: str, version: TargetVersion) -> tuple[float, float]:
        """Two independent uniform numbers in [0, 1) of this rollout."""
        key = f"{self.seed}\x00{version.number}\x00{sample_id}".encode()
        digest = hashlib.blake2b(key, digest_size=16).digest()
        return (int.from_bytes(digest[:8]) >> 11) / 2**53, (int.from_bytes(digest[8:]) >> 11) / 2**53


def _plain(value: Any) -> Any:
    """As JSON has it: tuples are lists."""
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    return list(value) if isinstance(value, tuple) else value
