"""What a collection run did, so that every rollout is accounted for."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from features.collect.proofs import AgreementSummary
from features.schema import TargetVersion


@dataclass(frozen=True, slots=True)
class CollectReport:
    """What became of every rollout.

    ``received == collected + duplicates + skipped_by_sampling + sum(quarantined.values())``,
    all in rollouts (:attr:`accounted`); windows and tokens are counted beside.
    """

    version: TargetVersion
    received: int = 0
    collected: int = 0
    """Rollouts whose windows were committed by this run."""
    duplicates: int = 0
    """Rollouts seen twice, or whose windows the lake has already."""
    skipped_by_sampling: int = 0
    quarantined: Mapping[str, int] = field(default_factory=dict)
    """Refused rollouts (or lines) by reason."""
    windows: int = 0
    """Windows committed by this run: ``verified + unverified``."""
    tokens: int = 0
    """Feature rows committed by this run."""
    tokens_outside_windows: int = 0
    """Tokens of collected rollouts that the sampling policy left out."""
    fragments: int = 0
    nbytes: int = 0
    verified: int = 0
    """Windows whose recorded logprobs agree with features and head."""
    unverified: int = 0
    """Windows without comparable logprobs: taken, but never called passed."""
    agreement: AgreementSummary = field(default_factory=AgreementSummary)
    commits: tuple[str, ...] = ()

    @property
    def accounted(self) -> int:
        """Sum over every fate of a rollout; equals ``received`` once the collector is closed."""
        return self.collected + self.duplicates + self.skipped_by_sampling + sum(self.quarantined.values())
