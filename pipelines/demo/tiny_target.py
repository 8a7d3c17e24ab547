"""The demo's target: how the shipped model and its tokenizer are made, and made to move.

``make tiny-target`` runs :func:`build_target`; its output is committed under
``pipelines/demo/assets``. :func:`further_train` is the demo's stand-in for an RL update:
a short, real gradient run that gives the next target version.
"""

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.demo.corpus import corpus_digest, documents, split_documents

log = logging.getLogger(__name__)

PAD, BOS, EOS, MASK = "<pad>", "<s>", "</s>", "<mask>"
VOCAB_SIZE = 1024


@dataclass(frozen=True, slots=True)
class PretrainSpec:
    """How the shipped target was trained."""

    seed: int = 20261130
    steps: int = 1800
    batch: int = 24
    """Sequences per step."""
    length: int = 192
    """Tokens per sequence."""
    learning_rate: float = 3e-3
    warmup: int = 100


def train_tokenizer(texts: Sequence[str]) -> Any:
    """A byte-level BPE tokenizer of ``VOCAB_SIZE`` entries; every byte can be encoded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, EOS, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, bos_token=BOS, eos_token=EOS, mask_token=MASK
    )


def token_stream(tokenizer: Any, texts: Sequence[str]) -> NDArray[np.int64]:
    """All documents as one stream, each between BOS and EOS, shape ``[N]``."""
    streams = tokenizer(list(texts))["input_ids"]
    return np.concatenate([np.array([*ids, tokenizer.eos_token_id], dtype=np.int64) for ids in streams])


def target_config() -> Any:
    """Llama, 8 layers: enough that the default aux ids (2, 4, 5) differ."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=384, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=1024,
        rms_norm_eps=1e-6, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip


def sample_batch(
    stream: NDArray[np.int64], rng: np.random.Generator, *, batch: int, length: int
) -> torch.Tensor:
    """Random spans of the stream, shape ``[batch, length + 1]``."""
    starts = rng.integers(0, len(stream) - length - 1, size=batch)
    return torch.from_numpy(np.stack([stream[s : s + length + 1] for s in starts]))


def causal_lm_loss(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Mean next-token cross-entropy in nats of ``ids`` ``[B, L + 1]``."""
    logits = model(input_ids=ids[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, stream: NDArray[np.int64], *, length: int = 256) -> float:
    """Mean cross-entropy in nats per token over at most 64 consecutive spans."""
    count = min(64, (len(stream) - 1) // length)
    spans = torch.from_numpy(np.stack([stream[i * length : (i + 1) * length + 1] for i in range(count)]))
    return float(np.mean([causal_lm_loss(model, part).item() for part in spans.split(16)]))


def pretrain(spec: PretrainSpec, stream: NDArray[np.int64]) -> Any:
    """Train the target from scratch (AdamW, cosine decay)."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(spec.seed)
    rng = np.random.default_rng(spec.seed)
    model = LlamaForCausalLM(target_config()).float().train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=spec.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    for step in range(spec.steps):
        warm = min(1.0, (step + 1) / spec.warmup)
        rate = spec.learning_rate * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / spec.steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids = sample_batch(stream, rng, batch=spec.batch, length=spec.length)
        loss = causal_lm_loss(model, ids)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            log.info("pretrain step %d loss %.3f", step, loss.item())
    return model.eval()


def further_train(
    model: torch.nn.Module,
    stream: NDArray[np.int64],
    *,
    steps: int,
    batch: int,
    length: int,
    learning_rate: float,
    seed: int,
) -> None:
    """One demo "policy update" in place: ``steps * batch * length`` tokens."""
    rng = np.random.default_rng(seed)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    for _ in range(steps):
        loss = causal_lm_loss(model, sample_batch(stream, rng, batch=batch, length=length))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


def build_target(out: Path, spec: PretrainSpec) -> dict[str, Any]:
    """Make the shipped target under ``out`` and return what was measured on held-out text."""
    torch.set_num_threads(1)
    splits = {d: split_documents(documents(d)) for d in ("code", "prose")}
    tokenizer = train_tokenizer([*splits["code"][0], *splits["prose"][0]])
    train = {d: token_stream(tokenizer, split[0]) for d, split in splits.items()}
    log.info("tokens: %s", {d: len(s) for d, s in train.items()})
    model = pretrain(spec, train["code"]).bfloat16()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    model = model.float()
    losses = {d: held_out_loss(model, token_stream(tokenizer, split[1])) for d, split in splits.items()}
    measured = {
        "held_out_loss_nats": {d: round(v, 4) for d, v in losses.items()},
        "parameters": sum(p.numel() for p in model.parameters()),
        "corpus_sha256": {d: corpus_digest(split[0]) for d, split in splits.items()},
        "spec": {f: getattr(spec, f) for f in spec.__dataclass_fields__},
    }
    (out / "training.json").write_text(json.dumps(measured, indent=1) + "\n")
    return measured
