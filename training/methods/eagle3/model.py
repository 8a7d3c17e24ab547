"""The EAGLE-3 draft in plain torch; parameter names are the checkpoint's.

The arithmetic is that of vLLM's ``llama_eagle3`` with its raw-config defaults:
``norm_before_residual``, ``norm_before_fc``, ``fc_norm`` and ``norm_output`` all off, one layer,
NeoX-style RoPE of the default kind. Shape legend: H = hidden, m = aux layers, n/k/d = query heads,
key heads, head size, D = draft vocabulary, ... = any leading dimensions.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from features.errors import DraftLayoutError, InputError
from features.schema import TargetIdentity
from training.spec import Eagle3Spec
from training.vocab import VocabMap

INIT_STD = 0.02


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Sizes and ids of one draft: all that its checkpoint's ``config.json`` says."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int
    layer_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                f"{self.num_attention_heads} attention heads cannot share {self.num_key_value_heads} key heads: "
                f"the first must be a multiple of the second"
            )
        if not self.layer_ids or list(self.layer_ids) != sorted(set(self.layer_ids)):
            raise DraftLayoutError(
                f"aux layer ids must be ascending and distinct, got {list(self.layer_ids)}"
            )

    @property
    def aux_width(self) -> int:
        """Columns of ``fc``: one hidden state per aux layer."""
        return len(self.layer_ids) * self.hidden_size

    @classmethod
    def for_target(
        cls,
        target: TargetIdentity,
        target_config: dict[str, Any],
        spec: Eagle3Spec,
        vocab: VocabMap,
        layer_ids: tuple[int, ...],
    ) -> "Eagle3Config":
        """Sizes from the target's ``config.json`` where the spec leaves them open.

        Raises:
            InputError: the config lacks a size, or an aux layer id does not exist in the target.
        """
        beyond = [k for k in layer_ids if not 0 <= k <= target.num_layers]
        if beyond:
            raise InputError(
                f"aux layer ids {list(layer_ids)}: {beyond} do not exist in a target of {target.num_layers} blocks "
                f"(an id counts blocks applied, 0 to {target.num_layers})"
            )
        heads = spec.num_attention_heads or _need(target_config, "num_attention_heads")
        kv_heads = spec.num_key_value_heads or target_config.get("num_key_value_heads") or heads
        return cls(
            hidden_size=target.hidden_size,
            intermediate_size=spec.intermediate_size or _need(target_config, "intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=spec.head_dim or target_config.get("head_dim") or target.hidden_size // heads,
            rms_norm_eps=float(target_config.get("rms_norm_eps") or 1e-6),
            rope_theta=_rope_theta(target_config),
            vocab_size=target.vocab_size,
            draft_vocab_size=vocab.size,
            max_position_embeddings=int(target_config.get("max_position_embeddings") or 2048),
            layer_ids=layer_ids,
        )


def _need(config: dict[str, Any], key: str) -> int:
    if not isinstance(config.get(key), int):
        raise InputError(f"the target's config.json has no integer {key!r}; name it in the draft's spec")
    return int(config[key])


def _rope_theta(config: dict[str, Any]) -> float:
    # The draft declares its own plain RoPE, so a target's scaling does not carry over; only the base does.
    nested = config.get("rope_parameters") or {}
    return float(nested.get("rope_theta") or config.get("rope_theta") or 10000.0)


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Projections only: who attends to whom is the caller's business."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        width, kv_width = (
            n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.q_proj = nn.Linear(2 * config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class MidLayer(nn.Module):
    """The one decoder layer; its attention reads ``[embedding, hidden]``, 2H wide."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Eagle3Draft(nn.Module):
    """Trainable tensors of a draft, and the steps of its forward pass."""

    def __init__(self, config: Eagle3Config, vocab: VocabMap) -> None:
        super().__init__()
        self.config = config
        self.vocab = vocab
        self.fc = nn.Linear(config.aux_width, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        ids = None if vocab.is_full else torch.from_numpy(vocab.target_ids)
        self.register_buffer("target_ids", ids, persistent=False)
        self.target_ids: Tensor | None

    @torch.no_grad()
    def initialize(self, seed: int) -> "Eagle3Draft":
        """Draw every matrix from N(0, 0.02) and set norms to one, from ``seed`` alone."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * INIT_STD)
        return self

    def combine(self, aux: Tensor) -> Tensor:
        """Aux states ``[..., m*H]`` to the first hidden state ``[..., H]``."""
        combined: Tensor = self.fc(aux)
        return combined

    def attention_input(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """``[..., 2H]``: the normed embedding beside the normed hidden state."""
        layer = self.midlayer
        return torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(hidden)], dim=-1)

    def query(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotated queries ``[..., n, d]``."""
        config = self.config
        q = self.midlayer.self_attn.q_proj(x).unflatten(-1, (config.num_attention_heads, config.head_dim))
        return rotate(q, positions, config.rope_theta)

    def key_value(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values, both ``[..., k, d]``."""
        config, attention = self.config, self.midlayer.self_attn
        shape = (config.num_key_value_heads, config.head_dim)
        k, v = attention.k_proj(x).unflatten(-1, shape), attention.v_proj(x).unflatten(-1, shape)
        return rotate(k, positions, config.rope_theta), v

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Residual, MLP, residual: the next hidden state, pre-norm; ``attended`` is ``[..., n*d]``."""
        layer = self.midlayer
        residual = hidden + layer.self_attn.o_proj(attended)
        out: Tensor = residual + layer.mlp(layer.post_attention_layernorm(residual))
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """``[..., D]`` from the pre-norm hidden state."""
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft ids as target ids, any shape."""
        return draft_ids if self.target_ids is None else self.target_ids[draft_ids]


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """NeoX-style RoPE of ``x`` ``[..., heads, d]`` at integer ``positions`` ``[...]``."""
    half = x.shape[-1] // 2
    exponents = torch.arange(half, dtype=torch.float32, device=x.device) / half
    angles = (positions.to(torch.float32)[..., None] * theta**-exponents)[..., None, :]
    cos, sin = angles.cos(), angles.sin()
    first, second = torch.split(x.float(), half, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
