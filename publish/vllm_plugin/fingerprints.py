"""Live parameters as a checkpoint would hold them: names, views, digests, ownership.

vLLM fuses q/k/v and gate/up and pads vocabularies; here that is undone by views, so that the
digest of a live tensor equals the digest of the tensor in the artifact's file. The scheme is
the artifacts' own: SHA-256 over the JSON of ``[dtype, shape]`` and the raw bytes; a test keeps
the two equal. ``t2d`` has no live counterpart (vLLM derives everything from ``d2t``), so it is
checked before a swap and takes no part in fingerprints of a live draft.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from publish.vllm_plugin.errors import EngineRefusedError

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""safetensors' dtype names."""

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
VOCAB_MAP = "d2t"


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys and no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def tensor_digest(tensor: Tensor) -> str:
    """SHA-256 over safetensors' dtype name, shape and raw little-endian bytes."""
    name = DTYPE_NAMES.get(tensor.dtype)
    if name is None:
        raise EngineRefusedError(
            f"cannot fingerprint a tensor of {tensor.dtype}: expected one of {sorted(DTYPE_NAMES.values())}"
        )
    digest = hashlib.sha256(canonical_json([name, list(tensor.shape)]))
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def fingerprint(digests: Mapping[str, str]) -> str:
    """One digest over named tensor digests."""
    return hashlib.sha256(canonical_json(dict(digests))).hexdigest()


def checkpoint_views(model: nn.Module) -> dict[str, Tensor]:
    """Views of all parameters under the names and shapes a checkpoint has, prefixes kept.

    A parameter registered under two names (tied embeddings) appears once, under the first.

    Raises:
        EngineRefusedError: a weight was packed away (empty) or is fused in a way not known here.
    """
    views: dict[str, Tensor] = {}
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            full_name = f"{module_name}.{name}" if module_name else name
            if parameter.numel() == 0:
                raise EngineRefusedError(
                    f"parameter {full_name} is empty: the engine packed it away, so it can be neither checked "
                    f"nor swapped. On a CPU, load the worker extension before the model (it turns packing off)."
                )
            views.update(_unfused(full_name, module, parameter.detach()))
    return views


def _unfused(full_name: str, module: nn.Module, data: Tensor) -> dict[str, Tensor]:
    parts = full_name.split(".")
    if len(parts) >= 2 and parts[-2] in FUSED:
        pieces = FUSED[parts[-2]]
        sizes = [int(size) for size in getattr(module, "output_sizes", ())]
        if len(sizes) != len(pieces) or sum(sizes) != data.shape[0]:
            raise EngineRefusedError(
                f"{full_name} holds {data.shape[0]} rows, expected {'+'.join(map(str, sizes)) or 'known sizes'} "
                f"for {'/'.join(pieces)}: tensor parallelism or a quantised layout, neither of which can be "
                f"swapped. Serve the draft unquantised on one worker."
            )
        split = torch.split(data, sizes, dim=0)
        return {
            ".".join([*parts[:-2], piece, parts[-1]]): view for piece, view in zip(pieces, split, strict=True)
        }
    rows = getattr(module, "org_vocab_size", None)
    if rows is not None and parts[-1] == "weight":
        return {full_name: data[: int(rows)]}
    return {full_name: data}


def draft_name(live_name: str) -> str:
    """Canonical checkpoint name of a draft's parameter: no ``model.``, ``layers.0`` for ``midlayer``."""
    if live_name.split(".")[-1] == "draft_id_to_target_id":
        return VOCAB_MAP
    return canonical_name(live_name)


def canonical_name(file_name: str) -> str:
    """One spelling for the spellings that vLLM's loaders take as equal."""
    name = file_name.removeprefix("model.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def storages(tensors: Iterable[Tensor]) -> set[int]:
    """Addresses of the memory behind tensors."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}


def owned_and_aliased(draft: nn.Module, target: nn.Module) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Views of what the draft owns, by canonical name, and the names of what it shares with the target."""
    shared = storages(target.parameters())
    owned: dict[str, Tensor] = {}
    aliased: list[str] = []
    for live_name, view in checkpoint_views(draft).items():
        name = draft_name(live_name)
        if view.untyped_storage().data_ptr() in shared:
            aliased.append(name)
        else:
            owned[name] = view
    return owned, tuple(sorted(aliased))


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Digest of each tensor."""
    return {name: tensor_digest(tensor) for name, tensor in tensors.items()}
