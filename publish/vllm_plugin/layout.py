"""Does a candidate fit the live draft? Pure checks; every reason is collected, nothing is fixed up."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from publish.vllm_plugin.errors import LayoutRefusedError
from publish.vllm_plugin.fingerprints import DTYPE_NAMES, VOCAB_MAP, canonical_name

TARGET_TO_DRAFT = "t2d"


@dataclass(frozen=True, slots=True)
class LiveLayout:
    """What the live draft can take, read from the engine and never changed by a swap."""

    method: str
    shapes: Mapping[str, tuple[int, ...]]
    """Owned tensors by canonical checkpoint name."""
    dtypes: Mapping[str, torch.dtype]
    aliased: tuple[str, ...]
    target_vocab: int
    config: Mapping[str, Any]
    """``config.json`` of the draft that the engine was booted with."""


# Defaults are vLLM's own, so that an absent key and its default count as equal.
_FACT_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": None,
    "intermediate_size": None,
    "num_hidden_layers": 1,
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "vocab_size": None,
    "attention_bias": False,
    "norm_before_residual": False,
    "fc_norm": False,
    "norm_output": False,
    "logit_scale": 1.0,
    "block_size": None,
    "mask_token_id": None,
    "markov_rank": None,
    "markov_head_type": None,
    "enable_confidence_head": None,
    "confidence_head_with_markov": None,
    "sample_from_anchor": None,
    "layer_types": None,
    "sliding_window": None,
    "target_layer_ids": None,
    "dflash_config": None,
}


def frozen_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config fixes about the draft's arithmetic, whatever its spelling.

    Raises:
        LayoutRefusedError: the two places for the aux layer ids name different ids.
    """
    facts: dict[str, Any] = {key: config.get(key, default) for key, default in _FACT_DEFAULTS.items()}
    nested = config.get("eagle_config") or {}
    ids, top = nested.get("eagle_aux_hidden_state_layer_ids"), config.get("eagle_aux_hidden_state_layer_ids")
    if ids is not None and top is not None and list(ids) != list(top):
        raise LayoutRefusedError(
            f"config.json names aux layers {list(top)} at the top and {list(ids)} in eagle_config; engines read "
            f"one or the other. Export the draft again."
        )
    chosen = ids if ids is not None else top
    facts["aux_layer_ids"] = list(chosen) if chosen is not None else None
    facts["use_aux_hidden_state"] = bool(nested.get("use_aux_hidden_state", True))
    facts["norm_before_fc"] = bool(nested.get("norm_before_fc", config.get("norm_before_fc", False)))
    facts["draft_vocab_size"] = config.get("draft_vocab_size") or config.get("vocab_size")
    facts["target_hidden_size"] = config.get("target_hidden_size") or config.get("hidden_size")
    facts["architecture"] = [name.replace("Eagle3", "") for name in config.get("architectures") or ()]
    facts["rope"] = _rope(config)
    return facts


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    kind = rope.pop("type", None)
    rope.setdefault("rope_type", kind or "default")
    rope.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    return rope | {"rope_theta": float(rope["rope_theta"])}


def match_names(file_names: list[str], live: LiveLayout) -> dict[str, str]:
    """Pair the file's tensors with the live draft's: ``{canonical name: name in the file}``.

    The optional ``t2d`` is paired too; an all-zero ``d2t`` of a full-vocabulary draft is judged
    by ``check_vocab_map``.

    Raises:
        LayoutRefusedError: a tensor is missing, unknown, spelled twice or shared with the target.
    """
    pairs: dict[str, str] = {}
    problems: list[str] = []
    for name in sorted(file_names):
        canonical = canonical_name(name)
        if canonical in pairs:
            problems.append(f"{name!r} and {pairs[canonical]!r} are the same tensor")
        pairs[canonical] = name
    optional = {TARGET_TO_DRAFT, VOCAB_MAP} - set(live.shapes)
    missing = sorted(set(live.shapes) - set(pairs))
    shared = sorted(set(pairs) & set(live.aliased))
    unknown = sorted(set(pairs) - set(live.shapes) - optional - set(shared))
    if missing:
        problems.append(f"missing {missing}")
    if unknown:
        problems.append(f"unknown {[pairs[name] for name in unknown]}")
    if shared:
        problems.append(f"{shared} would overwrite what the live draft shares with the target")
    if problems:
        raise LayoutRefusedError(
            f"the file's tensors are not exactly those the live {live.method} draft owns ({len(live.shapes)} "
            f"tensors): {'; '.join(problems)}. Export the draft for this engine, or boot the engine with a "
            f"draft of this layout."
        )
    return pairs


def check_tensors(tensors: Mapping[str, Tensor], live: LiveLayout) -> None:
    """Refuse wrong shapes, wrong dtypes and non-finite values; ``tensors`` by canonical name.

    Raises:
        LayoutRefusedError: naming every tensor at fault.
    """
    problems = []
    for name, shape in live.shapes.items():
        tensor, dtype = tensors[name], live.dtypes[name]
        if tuple(tensor.shape) != tuple(shape):
            problems.append(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
        if tensor.dtype != dtype:
            problems.append(
                f"{name} is {DTYPE_NAMES.get(tensor.dtype, tensor.dtype)}, expected {DTYPE_NAMES[dtype]}"
            )
        elif tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            problems.append(f"{name} has {bad} NaN or infinite values")
    if problems:
        raise LayoutRefusedError(
            f"{len(problems)} problems with the tensors: {'; '.join(problems)}. Train and export the draft with "
            f"the shapes and the dtype that the engine runs (save_dtype in the training spec)."
        )


def check_vocab_map(tensors: Mapping[str, Tensor], live: LiveLayout) -> None:
    """Check ``d2t`` (offsets: target id = i + d2t[i]) against the *target's* vocabulary, and ``t2d`` with it.

    Raises:
        LayoutRefusedError: ids out of range, not strictly increasing, or the two maps disagree.
    """
    offsets, mask = tensors.get(VOCAB_MAP), tensors.get(TARGET_TO_DRAFT)
    problems = []
    if offsets is not None:
        targets = torch.arange(offsets.numel(), dtype=torch.int64) + offsets.reshape(-1).to(torch.int64)
        if int(targets.min()) < 0 or int(targets.max()) >= live.target_vocab:
            problems.append(
                f"d2t reaches target ids {int(targets.min())}..{int(targets.max())}, the target has "
                f"[0, {live.target_vocab})"
            )
        elif not bool((targets[1:] > targets[:-1]).all()):
            problems.append("d2t does not give strictly increasing target ids")
        elif mask is not None and (
            tuple(mask.shape) != (live.target_vocab,)
            or int(mask.sum()) != targets.numel()
            or not bool(mask[targets].all())
        ):
            problems.append("t2d does not mark exactly the target ids of d2t")
        if VOCAB_MAP not in live.shapes and bool((offsets != 0).any()):
            problems.append("d2t is not the identity, but the live draft proposes over the full vocabulary")
    if problems:
        raise LayoutRefusedError(
            f"the vocabulary map is wrong: {'; '.join(problems)}. d2t holds offsets, not ids; build it with "
            f"the target's own vocabulary."
        )


def check_config(candidate: Mapping[str, Any], live: LiveLayout) -> None:
    """Refuse a config that fixes another arithmetic than the live draft's.

    Raises:
        LayoutRefusedError: listing each fact with both values.
    """
    wanted, found = frozen_facts(live.config), frozen_facts(candidate)
    differing = [
        f"{key} {found[key]!r}, expected {wanted[key]!r}" for key in wanted if found[key] != wanted[key]
    ]
    if differing:
        raise LayoutRefusedError(
            f"config.json does not fit the live {live.method} draft: {'; '.join(differing)}. These are fixed "
            f"when the engine starts; restart it with this draft instead of swapping."
        )
