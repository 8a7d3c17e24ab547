"""The slow twin of ``ttt`` and ``propose``: one row, one step, one key at a time.

Written from the engine's point of view, with an explicit key-value list per round and without
anything of the fast path but the model's own tensors. Tests hold the two together.
"""

import math

import torch
from torch import Tensor

from training.batches import DraftBatch
from training.losses import row_loss
from training.methods.eagle3.model import Eagle3Draft
from training.spec import Eagle3Spec

KeyValue = tuple[Tensor, Tensor]


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean() + eps) * weight


def _rope(x: Tensor, position: int, theta: float) -> Tensor:
    width = x.shape[-1]
    out = []
    for i in range(width):
        angle = position * theta ** (-2 * (i % (width // 2)) / width)
        partner = -x[:, i + width // 2] if i < width // 2 else x[:, i - width // 2]
        out.append(x[:, i] * math.cos(angle) + partner * math.sin(angle))
    return torch.stack(out, dim=-1)


def _layer_input(model: Eagle3Draft, embed: Tensor, hidden: Tensor) -> Tensor:
    layer, eps = model.midlayer, model.config.rms_norm_eps
    normed = _rms(embed, layer.input_layernorm.weight, eps), _rms(hidden, layer.hidden_norm.weight, eps)
    return torch.cat(normed)


def _key_value(model: Eagle3Draft, x: Tensor, position: int) -> KeyValue:
    config, attention = model.config, model.midlayer.self_attn
    key = (attention.k_proj.weight @ x).view(config.num_key_value_heads, config.head_dim)
    value = (attention.v_proj.weight @ x).view(config.num_key_value_heads, config.head_dim)
    return _rope(key, position, config.rope_theta), value


def _step(
    model: Eagle3Draft, embed: Tensor, hidden: Tensor, position: int, cache: list[KeyValue]
) -> tuple[Tensor, list[KeyValue]]:
    """The layer on one token; ``cache`` holds every earlier position and is returned longer by one."""
    config, layer = model.config, model.midlayer
    x = _layer_input(model, embed, hidden)
    cache = [*cache, _key_value(model, x, position)]
    query = (layer.self_attn.q_proj.weight @ x).view(config.num_attention_heads, config.head_dim)
    query = _rope(query, position, config.rope_theta)
    group = config.num_attention_heads // config.num_key_value_heads
    heads = []
    for n in range(config.num_attention_heads):
        scores = torch.stack([query[n] @ key[n // group] for key, _ in cache]) / math.sqrt(config.head_dim)
        values = torch.stack([value[n // group] for _, value in cache])
        heads.append(torch.softmax(scores, 0) @ values)
    residual = hidden + layer.self_attn.o_proj.weight @ torch.cat(heads)
    y = _rms(residual, layer.post_attention_layernorm.weight, config.rms_norm_eps)
    mlp = layer.mlp
    gated = torch.nn.functional.silu(mlp.gate_proj.weight @ y) * (mlp.up_proj.weight @ y)
    return residual + mlp.down_proj.weight @ gated, cache


def _logits(model: Eagle3Draft, hidden: Tensor) -> Tensor:
    return model.lm_head.weight @ _rms(hidden, model.norm.weight, model.config.rms_norm_eps)


def _context(model: Eagle3Draft, batch: DraftBatch, b: int, row: int) -> list[KeyValue]:
    """Keys of rows before ``row``, as the engine's draft cache holds them when a round starts there."""
    embedding, start = batch.heads[batch.head_of[b]].embedding, int(batch.starts[b])
    cache = []
    for p in range(row):
        x = _layer_input(model, embedding[batch.token_ids[b, p + 1]], model.fc.weight @ batch.aux[b, p])
        cache.append(_key_value(model, x, start + p))
    return cache


def reference_loss(model: Eagle3Draft, batch: DraftBatch, spec: Eagle3Spec) -> Tensor:
    """The TTT loss, scalar: mean over supervised rows per step, steps weighed by decay."""
    ids = torch.from_numpy(model.vocab.target_ids)
    losses: list[list[Tensor]] = [[] for _ in range(spec.ttt_steps)]
    for b in range(batch.num_windows):
        head, tokens = batch.heads[batch.head_of[b]], batch.token_ids[b]
        rows, start = int(batch.row_mask[b].sum()), int(batch.starts[b])
        for p in range(rows):
            cache, hidden = _context(model, batch, b, p), model.fc.weight @ batch.aux[b, p]
            for i in range(spec.ttt_steps):
                if p + 1 + i >= rows:
                    break
                hidden, cache = _step(model, head.embedding[tokens[p + 1 + i]], hidden, start + p + i, cache)
                if not batch.supervised[b, p + 2 + i]:
                    continue
                teacher = torch.softmax(head.logits(batch.final[b, p + 1 + i][None])[0][ids], 0)
                losses[i].append(row_loss(spec.loss, _logits(model, hidden)[None], teacher[None])[0])
    means = [spec.step_decay**i * torch.stack(rows).mean() for i, rows in enumerate(losses) if rows]
    return torch.stack(means).sum()


@torch.no_grad()
def reference_propose(model: Eagle3Draft, batch: DraftBatch, b: int, row: int, k: int) -> list[int]:
    """``k`` greedy draft tokens of window ``b`` when the token after ``row`` is the newest."""
    embedding, start = batch.heads[batch.head_of[b]].embedding, int(batch.starts[b])
    ids = model.vocab.target_ids
    cache, hidden = _context(model, batch, b, row), model.fc.weight @ batch.aux[b, row]
    token, drafted = int(batch.token_ids[b, row + 1]), []
    for i in range(k):
        hidden, cache = _step(model, embedding[token], hidden, start + row + i, cache)
        token = int(ids[int(_logits(model, hidden).argmax())])
        drafted.append(token)
    return drafted
