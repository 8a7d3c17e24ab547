"""What a target's folder says about its identity, read with the standard library only."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from features.checkpoint import open_checkpoint
from features.digests import canonical_json
from features.errors import InputError
from features.schema import TargetIdentity

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"

# Written by whoever saved the checkpoint last; they say nothing about the function it computes.
_VOLATILE_KEYS = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})


def read_config(folder: Path) -> dict[str, Any]:
    """The target's ``config.json``.

    Raises:
        InputError: absent or not a JSON object.
    """
    return _read_json(folder, CONFIG_FILE)


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config: multimodal targets nest it."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def describe_target(folder: Path, target_id: str) -> TargetIdentity:
    """Read a target's identity from ``config.json`` and ``tokenizer.json``.

    Raises:
        InputError: a file or a field is missing.
    """
    if not target_id:
        raise InputError("a target needs a name that its versions share; got an empty target id")
    config = read_config(folder)
    text = text_config(config)
    fields = ("hidden_size", "num_hidden_layers", "vocab_size")
    wrong = [name for name in fields if not isinstance(text.get(name), int) or text[name] < 1]
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        wrong.append("architectures")
    if wrong or not isinstance(architectures, list):
        raise InputError(
            f"{folder / CONFIG_FILE} lacks {', '.join(wrong)}: a target is described by these. "
            f"Point at the folder that save_pretrained wrote."
        )
    return TargetIdentity(
        target_id=target_id,
        architecture=str(architectures[0]),
        hidden_size=text["hidden_size"],
        num_layers=text["num_hidden_layers"],
        vocab_size=text["vocab_size"],
        tokenizer_digest=tokenizer_digest(folder),
        config_digest=config_digest(config),
    )


def stable_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without the keys that only say who saved it and in which dtype."""
    return dict(_without_volatile(dict(config)))


def config_digest(config: Mapping[str, Any]) -> str:
    """SHA-256 of a config's stable part."""
    return hashlib.sha256(canonical_json(stable_config(config))).hexdigest()


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 of the tokenizer's rules, equal however the JSON was laid out.

    Truncation and padding are per-call settings that a fast tokenizer writes into its file, and
    merges are saved as ``"a b"`` or ``["a", "b"]`` by different releases: neither changes an id.
    """
    rules = _read_json(folder, TOKENIZER_FILE)
    rules.pop("truncation", None)
    rules.pop("padding", None)
    model = rules.get("model")
    if isinstance(model, dict) and isinstance(model.get("merges"), list):
        model["merges"] = [m.split(" ", 1) if isinstance(m, str) else m for m in model["merges"]]
    return hashlib.sha256(canonical_json(rules)).hexdigest()


def weights_digest(folder: Path) -> str:
    """One digest over every tensor of a checkpoint, whatever its order and sharding.

    Raises:
        InputError: there are no weights.
        CorruptDataError: a shard is absent, cut or not what the index says.
    """
    digests = {name: tensor.digest for name, tensor in open_checkpoint(folder).tensors()}
    return hashlib.sha256(canonical_json(digests)).hexdigest()


def default_layer_ids(num_layers: int) -> tuple[int, ...]:
    """Aux layer ids ``(2, n // 2, n - 3)`` (blocks applied), what engines assume when told nothing.

    Raises:
        InputError: the target is so shallow that they coincide or leave their order.
    """
    ids = (2, num_layers // 2, num_layers - 3)
    if not ids[0] < ids[1] < ids[2]:
        raise InputError(
            f"a target of {num_layers} layers has no default aux layers: (2, n//2, n-3) = {ids} must ascend. "
            f"Name the layer ids explicitly."
        )
    return ids


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(
            f"no {name} in {folder}: expected a Hugging Face model folder with {CONFIG_FILE} and "
            f"{TOKENIZER_FILE}. Check the path, or save the tokenizer next to the model."
        ) from error
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON ({error}); copy it again from its source") from error
    if not isinstance(value, dict):
        raise InputError(
            f"{path} holds {type(value).__name__}, expected a JSON object; copy it again from its source"
        )
    return value


def _without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_volatile(item) for key, item in value.items() if key not in _VOLATILE_KEYS}
    return value
