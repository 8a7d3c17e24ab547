"""The live target inside a vLLM worker: is it still the same, and what is its final norm?

Imports torch; vLLM's modules are reached by name, so that the arithmetic can be tested without.
"""

# Shape legend: R = rows, H = hidden size.

import hashlib
import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from features.errors import EngineError

_CHUNK = 1 << 22
"""Elements summed at once: bounds the 64-bit copies that the sum needs."""
_INTEGER_OF_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WRAP = 1 << 64
_STEP = 0x9E3779B97F4A7C15
"""Odd, so that multiplying by it loses nothing modulo 2**64."""
_UNIT_OFFSET_NORMS = ("GemmaRMSNorm",)
"""vLLM norms that scale by ``1 + weight``."""
_PLAIN_NORMS = ("RMSNorm",)


def keep_cpu_weights() -> None:
    """On a CPU platform, keep Linear weights in place of packed copies, which cannot be read back.

    Must run before the model is loaded.
    """
    platforms = importlib.import_module("vllm.platforms")
    if not platforms.current_platform.is_cpu():
        return
    operators: Any = importlib.import_module("vllm._custom_ops")
    operators._supports_onednn = False
    layers: Any = importlib.import_module("vllm.model_executor.layers.utils")
    if hasattr(layers, "check_cpu_sgl_kernel"):
        layers.check_cpu_sgl_kernel = lambda n, k, dtype: False


@torch.no_grad()
def weights_checksum(model: Any) -> str:
    """Checksum over names, shapes and every bit of a model's parameters; computed where they are.

    A change of a single element always changes it (each element is multiplied by an odd number
    modulo 2**64); it is no cryptographic digest. Reads each parameter once.

    Raises:
        EngineError: a parameter is empty: a packed copy elsewhere is what the engine reads.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.numel() == 0:
            raise EngineError(
                f"parameter {name} of the engine's target is empty: its weights are packed elsewhere and a change "
                "could not be seen. Start the engine with the replay extension, which keeps them readable"
            )
        shape, dtype = tuple(parameter.shape), parameter.dtype
        digest.update(f"{name}\x00{shape}\x00{dtype}\x00{_bit_sum(parameter.data)}\n".encode())
    return digest.hexdigest()


def _bit_sum(tensor: Tensor) -> int:
    bits = tensor.contiguous().view(_INTEGER_OF_WIDTH[tensor.element_size()]).flatten()
    weights = torch.arange(min(_CHUNK, len(bits)), device=bits.device, dtype=torch.int64) * 2654435762 + 1
    total = 0
    for chunk in bits.split(_CHUNK):
        part = int((chunk.to(torch.int64) * weights[: len(chunk)]).sum())
        total = (total * _STEP + part) % _WRAP
    return total


@dataclass(frozen=True, slots=True)
class FinalNorm:
    """The target's RMS norm before its LM head, in float32 whatever the engine computes in.

    vLLM extracts the last block's output, not what the LM head reads; this turns one into the other.
    """

    module: Any
    epsilon: float
    unit_offset: bool

    @classmethod
    def of(cls, model: Any) -> "FinalNorm":
        """The final norm of vLLM's causal LM.

        Raises:
            EngineError: the model has none where it is looked for, or one of another kind.
        """
        language = model.get_language_model() if hasattr(model, "get_language_model") else model
        decoder = getattr(language, "model", language)
        norm: Any = getattr(decoder, "norm", None)
        kind = next(
            (c.__name__ for c in type(norm).__mro__ if c.__name__ in _PLAIN_NORMS + _UNIT_OFFSET_NORMS), ""
        )
        partial = getattr(norm, "variance_size_override", None) is not None
        if not kind or partial:
            raise EngineError(
                f"{type(language).__name__}: expected a final RMSNorm or GemmaRMSNorm over the whole row at "
                f"model.norm, found {type(norm).__name__}; the LM head's input cannot be derived from the last "
                "block's output. Collect this target with the transformers tap"
            )
        return cls(norm, float(norm.variance_epsilon), kind in _UNIT_OFFSET_NORMS)

    @torch.no_grad()
    def __call__(self, rows_RH: Tensor) -> Tensor:
        """``[R, H]`` pre-norm to ``[R, H]`` as the LM head reads it; float32, on the rows' device."""
        weight_H = self.module.weight.detach().to(rows_RH.device, torch.float32)
        scale_H = 1.0 + weight_H if self.unit_offset else weight_H
        rows_RH = rows_RH.float()
        variance_R1 = rows_RH.pow(2).mean(dim=-1, keepdim=True)
        return rows_RH * torch.rsqrt(variance_R1 + self.epsilon) * scale_H
