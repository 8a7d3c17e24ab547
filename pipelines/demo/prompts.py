"""Prompts of the demo: rollout groups that come back at every version, and fresh ones."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.demo.corpus import Domain, documents, split_documents


@dataclass(frozen=True, slots=True)
class Prompt:
    """One rollout group's prompt; ``group_id`` names the prompt, not the version."""

    group_id: str
    token_ids: tuple[int, ...]


def group_prompts(tokenizer: Any, domain: Domain, *, count: int, length: int, seed: int) -> list[Prompt]:
    """``count`` prompts of ``length`` tokens from the domain's training documents."""
    train, _ = split_documents(documents(domain))
    return _spans(tokenizer, train, f"{domain}", count=count, length=length, seed=seed)


def fresh_prompts(tokenizer: Any, domain: Domain, *, count: int, length: int, seed: int) -> list[Prompt]:
    """Prompts from held-out documents: neither target nor draft ever saw them."""
    _, held_out = split_documents(documents(domain))
    return _spans(tokenizer, held_out, f"fresh-{domain}", count=count, length=length, seed=seed)


def _spans(
    tokenizer: Any, texts: list[str], name: str, *, count: int, length: int, seed: int
) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    streams = [ids for ids in tokenizer(texts, add_special_tokens=False)["input_ids"] if len(ids) > length]
    weights = np.array([len(ids) for ids in streams], dtype=np.float64)
    prompts = []
    for index in range(count):
        ids = streams[rng.choice(len(streams), p=weights / weights.sum())]
        start = int(rng.integers(0, len(ids) - length + 1))
        body = ids[start : start + length - 1]
        prompts.append(Prompt(f"{name}-{seed}-{index:04d}", (tokenizer.bos_token_id, *body)))
    return prompts
