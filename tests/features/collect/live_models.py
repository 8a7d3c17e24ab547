"""Tiny random causal LMs of several families, batches in each layout, and a plain forward to compare with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers

from features.collect.live import LiveBatch
from features.lake import Lake
from features.schema import FeatureDtype, FragmentLayout, TargetIdentity
from features.snapshots import commits_of

LAYERS, HIDDEN, VOCAB = 4, 32, 64
IDS = (0, 2, LAYERS)
LAYOUT = FragmentLayout(layer_ids=IDS, dtype=FeatureDtype.FLOAT32, hidden_size=HIDDEN)
IDENTITY = TargetIdentity(
    target_id="tiny", architecture="x", hidden_size=HIDDEN, num_layers=LAYERS, vocab_size=VOCAB,
    tokenizer_digest="t" * 64, config_digest="c" * 64,
)  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-untied": ("LlamaConfig", {"tie_word_embeddings": False}),
    "qwen2-tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3-untied": ("Qwen3Config", {"tie_word_embeddings": False}),
    # Small caps, so that a forgotten softcap shows in the logits.
    "gemma2-softcap": ("Gemma2Config", {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0}),
}


def make_model(name: str = "llama-untied", dtype: torch.dtype = torch.float32) -> Any:
    """In training mode, as a trainer has it; the families used here have no dropout."""
    config_name, extra = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=64,
        initializer_range=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=2, **extra,
    )  # fmt: skip
    attention = "eager" if "gemma2" in name else "sdpa"  # only eager applies the attention softcap
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for module in model.modules():  # norms of ones would hide a norm applied twice or not at all
        if "RMSNorm" in type(module).__name__:
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
    return model.to(dtype).train()


@dataclass(frozen=True)
class Plain:
    """One sequence alone, in float32."""

    token_ids: np.ndarray
    states: list[np.ndarray]
    """``hidden_states[k]``; the last is post-norm."""
    logprobs: np.ndarray


@torch.no_grad()
def plain_forward(model: Any, token_ids: Sequence[int]) -> Plain:
    ids = torch.tensor([list(token_ids)])
    out = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    log_p = out.logits[0].log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
    states = [state[0].float().numpy() for state in out.hidden_states]
    return Plain(ids[0].numpy(), states, np.concatenate([[np.nan], log_p.numpy()]).astype(np.float32))


def sequences(model: Any, lengths: Sequence[int], seed: int = 0) -> list[Plain]:
    rng = np.random.default_rng(seed)
    return [plain_forward(model, rng.integers(3, VOCAB, n).tolist()) for n in lengths]


def lay_out(
    plains: Sequence[Plain], how: str, *, first: int = 0, version: int = 0, **changes: Any
) -> tuple[LiveBatch, dict[str, torch.Tensor]]:
    """The collector's batch and the model's inputs, in layout ``right``, ``left`` or ``packed``."""
    lengths = [len(p.token_ids) for p in plains]
    width, edges = max(lengths), np.cumsum([0, *lengths])
    size = (1, int(edges[-1])) if how == "packed" else (len(plains), width)
    ids, mask, positions = np.zeros(size, np.int64), np.zeros(size, np.int64), np.zeros(size, np.int64)
    sampled, logprobs = np.zeros(size, bool), np.full(size, np.nan, np.float32)
    for n, plain in enumerate(plains):
        row, at = {"right": (n, 0), "left": (n, width - lengths[n]), "packed": (0, int(edges[n]))}[how]
        place = (row, slice(at, at + lengths[n]))
        ids[place], logprobs[place], mask[place] = plain.token_ids, plain.logprobs, 1
        positions[place], sampled[place] = np.arange(lengths[n]), np.arange(lengths[n]) >= 2
    where = {"right": {"lengths": lengths}, "left": {"attention_mask": mask}, "packed": {"cu_seqlens": edges}}
    names = [f"s{first + n}" for n in range(len(plains))]
    batch = LiveBatch(**{
        "token_ids": ids, "sampled_mask": sampled, "logprobs": logprobs, "logprob_kind": "engine_raw",
        "sample_ids": names, "group_ids": names, "versions": version, **where[how], **changes,
    })  # fmt: skip
    inputs = {"input_ids": ids, "position_ids": positions}
    if how != "packed":
        inputs["attention_mask"] = mask
    return batch, {name: torch.from_numpy(value) for name, value in inputs.items()}


def stored_windows(lake: Lake) -> dict[str, Any]:
    """Every window of the lake, by sample id."""
    rows = [
        row
        for record in lake.versions()
        for table in commits_of(lake, record.version)
        for row in table.to_pylist()
    ]
    return {row["sample_id"]: lake.read_window(row) for row in rows}
