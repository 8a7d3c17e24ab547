"""The files of an EAGLE-3 draft as vLLM's ``Eagle3LlamaForCausalLM`` loads them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from features.errors import DraftLayoutError
from training.artifact import CONFIG_FILE, WEIGHTS_FILE
from training.methods.eagle3.model import Eagle3Config, Eagle3Draft
from training.vocab import D2T, T2D, VocabMap

ARCHITECTURE = "LlamaForCausalLMEagle3"
LAYER_IDS_KEY = "eagle_aux_hidden_state_layer_ids"
_SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "draft_vocab_size", "max_position_embeddings",
)  # fmt: skip
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "attention_bias")
"""Variants of the forward pass this model does not have; written as false and refused when true."""


def export_config(model: Eagle3Draft) -> dict[str, Any]:
    """``config.json``: ids both at the top and in ``eagle_config``, since engines read either."""
    config = model.config
    ids = list(config.layer_ids)
    if model.fc.in_features != len(ids) * config.hidden_size:
        raise DraftLayoutError(
            f"fc has {model.fc.in_features} inputs, {len(ids)} aux layers of {config.hidden_size} need "
            f"{len(ids) * config.hidden_size}"
        )
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        **{name: getattr(config, name) for name in _SIZES},
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "target_hidden_size": config.hidden_size,
        "num_aux_hidden_states": len(ids),
        LAYER_IDS_KEY: ids,
        "eagle_config": {LAYER_IDS_KEY: ids, "use_aux_hidden_state": True},
        **dict.fromkeys(_FLAGS, False),
        "tie_word_embeddings": False,
    }


def export_tensors(model: Eagle3Draft) -> dict[str, Tensor]:
    """Trained tensors and, for a reduced vocabulary, the map. The embedding is the target's: left out."""
    tensors = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}
    tensors.update({name: torch.from_numpy(array.copy()) for name, array in model.vocab.tensors().items()})
    return tensors


def load_model(folder: Path) -> Eagle3Draft:
    """The float32 model of a draft folder.

    Raises:
        DraftLayoutError: config and tensors do not describe this model exactly.
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise DraftLayoutError(
                f"{folder}: {name} is missing. Point at a folder that a training run wrote."
            )
    config = parse_config(json.loads((folder / CONFIG_FILE).read_text()), where=str(folder / CONFIG_FILE))
    where = str(folder / WEIGHTS_FILE)
    tensors = _read_tensors(folder / WEIGHTS_FILE)
    maps = {name: tensors.pop(name).numpy() for name in (D2T, T2D) if name in tensors}
    vocab = VocabMap.from_tensors(
        maps, draft_vocab_size=config.draft_vocab_size, vocab_size=config.vocab_size, where=where
    )
    model = Eagle3Draft(config, vocab)
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    _check_tensors(expected, {name: tuple(t.shape) for name, t in tensors.items()}, where)
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=True)
    return model


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except Exception as error:
        raise DraftLayoutError(f"{path} is no complete safetensors file: {error}. Copy it again.") from error
    return tensors


def parse_config(raw: dict[str, Any], *, where: str) -> Eagle3Config:
    """The sizes of a ``config.json``; refuses another architecture, a variant flag or absent ids."""
    if ARCHITECTURE not in raw.get("architectures", []):
        raise DraftLayoutError(
            f"{where}: architectures is {raw.get('architectures')}, expected [{ARCHITECTURE!r}]. "
            f"Point at an EAGLE-3 draft."
        )
    on = [flag for flag in _FLAGS if raw.get(flag)]
    if on:
        raise DraftLayoutError(
            f"{where}: {', '.join(on)} is on; this model has only the plain forward pass. "
            f"Start from a draft without it, or train from scratch."
        )
    nested = (raw.get("eagle_config") or {}).get(LAYER_IDS_KEY)
    ids = raw.get(LAYER_IDS_KEY, nested)
    if not ids or (nested is not None and list(nested) != list(ids)):
        raise DraftLayoutError(
            f"{where}: {LAYER_IDS_KEY} is {raw.get(LAYER_IDS_KEY)} at the top and {nested} in eagle_config; "
            f"expected the same ids. An engine without them guesses. Export the draft again."
        )
    missing = [name for name in (*_SIZES, "rms_norm_eps", "rope_theta") if raw.get(name) is None]
    if missing:
        raise DraftLayoutError(f"{where}: {', '.join(missing)} missing. Export the draft again.")
    return Eagle3Config(
        **{name: int(raw[name]) for name in _SIZES},
        rms_norm_eps=float(raw["rms_norm_eps"]),
        rope_theta=float(raw["rope_theta"]),
        layer_ids=tuple(int(k) for k in ids),
    )


def _check_tensors(
    expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]], where: str
) -> None:
    missing, unknown = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    wrong = sorted(name for name in expected.keys() & found.keys() if expected[name] != found[name])
    if missing or unknown or wrong:
        shapes = {name: (found[name], expected[name]) for name in wrong}
        raise DraftLayoutError(
            f"{where}: missing tensors {missing}, unknown {unknown}, other shapes (found, expected) {shapes}. "
            f"Nothing was loaded. Export the draft again from its training run."
        )
