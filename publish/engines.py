"""What publishing needs from a rollout engine, and nothing more."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class EngineState:
    """What an engine really holds, as its own process reports it."""

    engine: str
    vllm_version: str
    method: str
    num_speculative_tokens: int
    draft_artifact: str | None
    """Digest of the artifact last committed by this plugin; None after a restart (the boot draft)."""
    draft_fingerprint: str
    """Fingerprint of the live draft's own tensors in checkpoint form (``training.artifact.fingerprint``)."""
    draft_tensors: tuple[str, ...]
    """Checkpoint names of the tensors the draft owns."""
    target_fingerprint: str
    aliased: tuple[str, ...]
    """Draft tensors that share storage with the target: never written."""
    owns_lm_head: bool
    owns_embed_tokens: bool
    prepared: str | None
    """Digest staged in host memory, if any."""


@dataclass(frozen=True, slots=True)
class AcceptanceCounters:
    """Cumulative speculative-decoding counters; subtract two readings to label an interval."""

    drafts: int
    draft_tokens: int
    accepted: int
    accepted_per_position: tuple[int, ...]

    def __sub__(self, earlier: "AcceptanceCounters") -> "AcceptanceCounters":
        pairs = zip(self.accepted_per_position, earlier.accepted_per_position, strict=True)
        return AcceptanceCounters(
            drafts=self.drafts - earlier.drafts,
            draft_tokens=self.draft_tokens - earlier.draft_tokens,
            accepted=self.accepted - earlier.accepted,
            accepted_per_position=tuple(a - b for a, b in pairs),
        )

    @property
    def tau(self) -> float:
        """Acceptance length ``1 + accepted / drafts``; NaN without a round."""
        return 1 + self.accepted / self.drafts if self.drafts else float("nan")


@dataclass(frozen=True, slots=True)
class GeneratedSequence:
    """One finished request: ids as the engine saw and sampled them."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    finish: str
    weight_versions: tuple[tuple[str, int, int], ...] = ()
    """(label, start, end) spans over the output tokens, as the engine reported them."""


class RolloutEngine(Protocol):
    """A running engine that serves a target with a draft."""

    @property
    def name(self) -> str: ...

    def state(self) -> EngineState:
        """Fingerprints, ownership and loaded names, read inside the engine."""
        ...

    def prepare(self, artifact_uri: str, digest: str) -> None:
        """Fetch, check and stage an artifact in host memory while the engine keeps serving."""
        ...

    def commit(self, digest: str) -> dict[str, float]:
        """Swap the staged draft in and resume.

        Returns the pause window in seconds, by part: what they are is the engine's own, ``total`` is always there.
        """
        ...

    def revert(self) -> None:
        """Put back the draft that the last commit replaced, from the engine's own memory."""
        ...

    def counters(self) -> AcceptanceCounters:
        """Speculation counters since the engine started."""
        ...
