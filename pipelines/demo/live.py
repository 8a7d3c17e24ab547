"""What is done to, and measured on, the running engine."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.collect.rollouts import Rollout
from features.errors import EngineError
from features.storage import Store
from pipelines.demo.prompts import Prompt
from pipelines.demo.spec import TARGET_ID, RolloutSpec
from pipelines.progress import Advance
from publish.engines import GeneratedSequence
from publish.telemetry import AcceptanceInterval, measure_interval, write_telemetry
from publish.vllm_client import VllmEngine


@dataclass(frozen=True, slots=True)
class LiveAcceptance:
    """Counters per prompt, and the sequences they counted."""

    drafts: tuple[int, ...]
    accepted: tuple[int, ...]
    sequences: tuple[tuple[GeneratedSequence, ...], ...]

    @property
    def sums(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rounds and accepted tokens by prompt."""
        return np.array(self.drafts), np.array(self.accepted)

    @property
    def tau(self) -> float:
        """Acceptance length over all prompts."""
        return 1 + sum(self.accepted) / sum(self.drafts)


@contextmanager
def recorded(
    engine: VllmEngine, store: Store, now: Callable[[], datetime], *, version: int, label: str
) -> Iterator[list[AcceptanceInterval]]:
    """Store what the engine's counters say of the enclosed work, as telemetry; the list then holds it."""
    state, before, started = engine.state(), engine.counters(), now()
    found: list[AcceptanceInterval] = []
    yield found
    interval = measure_interval(
        before,
        engine.counters(),
        state=state,
        target_id=TARGET_ID,
        target_version=version,
        started_at=started,
        ended_at=now(),
        label=label,
    )
    write_telemetry(store, [interval])
    found.append(interval)


def move_engine(engine: VllmEngine, folder: Path, version: int) -> None:
    """Give the engine the next target weights, as an RL trainer would; the draft must not move.

    Raises:
        EngineError: the target did not change, or the draft did.
    """
    before = engine.state()
    engine.call_worker("reload_weights", {"weights_path": str(folder)})
    engine.set_target_version(str(version))
    after = engine.state()
    if after.draft_fingerprint != before.draft_fingerprint:
        raise EngineError(
            f"the target sync to v{version} also changed the draft of {engine.name}; restart the engine"
        )
    if after.target_fingerprint == before.target_fingerprint:
        raise EngineError(f"the target sync to v{version} changed no target weight in {engine.name}")


def sample_rollouts(
    engine: VllmEngine, prompts: Sequence[Prompt], spec: RolloutSpec, *, seed: int, domain: str
) -> list[Rollout]:
    """Sample every prompt ``samples_per_group`` times."""
    repeated = [p for p in prompts for _ in range(spec.samples_per_group)]
    sequences = engine.generate(
        [p.token_ids for p in repeated],
        max_tokens=spec.max_tokens,
        temperature=spec.temperature,
        seed=seed,
        logprobs=True,
        ignore_eos=True,
    )
    pairs = zip(repeated, sequences, strict=True)
    return [
        as_rollout(p, s, sample=i % spec.samples_per_group, temperature=spec.temperature, domain=domain)
        for i, (p, s) in enumerate(pairs)
    ]


def as_rollout(
    prompt: Prompt, sequence: GeneratedSequence, *, sample: int, temperature: float, domain: str
) -> Rollout:
    """One engine output as a rollout record; the version is what the engine says it was, or None."""
    labels = {label for label, _, _ in sequence.weight_versions}
    label = labels.pop() if len(labels) == 1 else None
    prompt_length, sampled = len(sequence.prompt_token_ids), len(sequence.token_ids)
    return Rollout(
        sample_id=f"{prompt.group_id}-v{label}-{sample}",
        group_id=prompt.group_id,
        token_ids=(*sequence.prompt_token_ids, *sequence.token_ids),
        prompt_length=prompt_length,
        sampled_mask=(False,) * prompt_length + (True,) * sampled,
        logprobs=(None,) * prompt_length + tuple(sequence.logprobs),
        logprob_kind="engine_raw",
        version=int(label) if label is not None and label.isdigit() else None,
        version_label=label,
        temperature=temperature,
        top_p=1.0,
        domain=domain,
        finish=sequence.finish,
    )


def measure_acceptance(
    engine: VllmEngine,
    prompts: Sequence[Prompt],
    spec: RolloutSpec,
    *,
    samples: int,
    seed: int,
    advance: Advance,
) -> LiveAcceptance:
    """Counters prompt by prompt, so that prompts can be paired before and after a swap."""
    drafts, accepted, sequences = [], [], []
    for prompt in prompts:
        before = engine.counters()
        outputs = engine.generate(
            [prompt.token_ids] * samples,
            max_tokens=spec.max_tokens,
            temperature=spec.temperature,
            seed=seed,
            logprobs=True,
            ignore_eos=True,
        )
        counted = engine.counters() - before
        drafts.append(counted.drafts)
        accepted.append(counted.accepted)
        sequences.append(tuple(outputs))
        advance(1)
    return LiveAcceptance(tuple(drafts), tuple(accepted), tuple(sequences))


def greedy_sequences(
    engine: VllmEngine, prompts: Sequence[Prompt], *, max_tokens: int
) -> list[GeneratedSequence]:
    """Greedy text of the engine, drafting as it does."""
    return engine.generate([p.token_ids for p in prompts], max_tokens=max_tokens, ignore_eos=True)


def is_greedy_without_draft(model: Any, sequences: Sequence[GeneratedSequence]) -> bool:
    """True when every token is the target's own argmax given the tokens before it.

    By induction that is the same as comparing with greedy decoding without a draft, in one
    forward pass of the target instead of one per token.
    """
    import torch

    for sequence in sequences:
        ids = torch.tensor([[*sequence.prompt_token_ids, *sequence.token_ids]])
        with torch.no_grad():
            best = model(input_ids=ids).logits[0].argmax(-1)
        first = len(sequence.prompt_token_ids)
        if not torch.equal(best[first - 1 : -1], ids[0, first:]):
            return False
    return True
