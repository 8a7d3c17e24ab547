"""What the demo is told, and the one JSON object it ends with."""

import math
from pathlib import Path
from typing import Annotated

from pydantic import Field

from training.artifact import Document
from training.spec import Eagle3Spec, Spec, TrainSpec

ASSETS = Path(__file__).parent / "assets"
TARGET_ASSET = ASSETS / "target"
DRAFT_ASSET = ASSETS / "draft"
TARGET_ID = "tiny"
DRAFT_VOCAB_SIZE = 768
"""Of the target's 1,024 tokens: small enough that the vocabulary map is really used."""
REPAIR = TrainSpec(
    method=Eagle3Spec(draft_vocab_size=DRAFT_VOCAB_SIZE, ttt_steps=3),
    epochs=4,
    batch_tokens=512,
    learning_rate=2e-3,
    warmup_ratio=0.1,
    save_dtype="float32",
)
"""How the stale draft is trained on: it starts from the stale draft, for about a minute on one core."""


class HistorySpec(Spec):
    """How the target moves: one short, real training run per version."""

    last_version: Annotated[int, Field(ge=2)] = 5
    update_steps: int = 32
    update_batch: int = 16
    update_length: int = 156
    """Tokens per sequence; 32 * 16 * 156 = 79,872 tokens per version."""
    learning_rate: float = 6e-4


class RolloutSpec(Spec):
    """What the engine samples at each version."""

    groups: int = 40
    """Prompts per version."""
    samples_per_group: int = 3
    prompt_tokens: int = 24
    max_tokens: int = 96
    temperature: float = 0.8


class DemoSpec(Spec):
    """The miniature RL history and what is done with it."""

    out: str = "draftlake-demo"
    history: HistorySpec = HistorySpec()
    rollouts: RolloutSpec = RolloutSpec()
    num_speculative_tokens: int = 3
    max_num_seqs: int = 32
    """Requests that the engine decodes at once."""
    first_train_version: int = 2
    """Drafts are trained on versions [first_train_version, last_version]."""
    fresh_prompts: int = 40
    fresh_samples: int = 4
    """Samples per fresh prompt, before and after the swap alike."""
    seed: int = 0
    train: TrainSpec = REPAIR


class DemoResult(Document):
    """Measured on the live engine unless the name says ``offline``."""

    tau_stale: float
    tau_published: float
    tau_gain: float
    tau_gain_ci: tuple[float, float]
    """95 % interval of the gain, paired bootstrap over fresh prompts."""
    greedy_equal: bool
    """Greedy text with speculation (stale and published) equals greedy decoding without a draft."""
    target_unchanged: bool
    draft_matches_artifact: bool
    offline_tau: float
    engine_tau: float
    """Counters of exactly the sequences that ``offline_tau`` walked."""
    tau_by_version: dict[int, float]
    """Engine counters with the first draft, version by version."""
    offline_tau_by_version: dict[str, dict[int, float]]
    """Held-out groups: ``stale`` and ``published``."""
    versions: tuple[int, ...]
    lake: str
    lake_revision: str
    artifact: str
    stale_artifact: str
    verified_windows: int
    quarantined: dict[str, int]
    pause_seconds: dict[str, float]
    plot: str
    engine_start_seconds: float = math.nan
    """Of which the first start on a machine spends most on vLLM's architecture inspection."""
    seconds: float = math.nan
    peak_rss_bytes: int = 0
    """Of this process and the one that moves the target, summed; the engine's own is not in it."""

    @property
    def succeeded(self) -> bool:
        """The published draft is better beyond chance, and the swap changed nothing else."""
        harmless = self.greedy_equal and self.target_unchanged and self.draft_matches_artifact
        return harmless and self.tau_gain_ci[0] > 0
