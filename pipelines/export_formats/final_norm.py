"""From the LM head's input back to what the final norm was given, for trainers that apply the norm themselves.

An RMS norm forgets only the length of a row, and a trainer's own norm forgets it again: the row divided
by the norm's gain, whatever its length, gives the same teacher. What rounding costs is measured on every row.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from features.bfloat16 import Float32, Stored, bf16_to_float32, from_float32, to_float32
from features.checkpoint import open_checkpoint
from features.errors import InputError, ProofFailedError
from features.schema import FeatureDtype
from features.target import read_config, text_config

GAIN_PLUS_ONE = frozenset(
    {"gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_5", "qwen3_5_text", "recurrent_gemma"}
)
"""Model types whose norm multiplies by one plus its weight."""
TOLERANCE = 1e-2
"""Largest relative L2 error of a row after norm and rounding. bfloat16 rounds by at most 2 ** -9, twice here;
the gain of other weights, or a row too short for the norm's epsilon, shows as more."""

_NAMES = ("model.norm.weight", "language_model.norm.weight")


@dataclass(frozen=True, slots=True, eq=False)
class FinalNorm:
    """The RMS norm before a target's LM head."""

    gain: Float32
    """``[H]``: what a row of unit mean square is multiplied by."""
    eps: float

    def apply(self, hidden: Float32) -> Float32:
        """The norm of ``[T, H]``, in float32."""
        mean_square = np.mean(np.square(hidden, dtype=np.float64), axis=1, keepdims=True)
        normed: Float32 = (hidden / np.sqrt(mean_square + self.eps)).astype(np.float32) * self.gain
        return normed

    def undo(self, final: Stored, dtype: FeatureDtype, *, where: str) -> tuple[Stored, float]:
        """Rows ``[T, H]`` that the norm maps to ``final``, and the largest relative L2 error of a row.

        Raises:
            ProofFailedError: the norm does not map them back to ``final``.
        """
        wanted = to_float32(final, dtype)
        rows = from_float32(wanted / self.gain, dtype)
        off = np.linalg.norm(self.apply(to_float32(rows, dtype)) - wanted, axis=1)
        error = float(np.max(off / np.maximum(np.linalg.norm(wanted, axis=1), np.finfo(np.float32).tiny)))
        if not error <= TOLERANCE:
            raise ProofFailedError(
                f"{where}: the final norm of --target does not lead back to the stored LM head input: a row is off "
                f"by {error:.1%}, expected at most {TOLERANCE:.0%}. The weights in --target are not those the "
                f"features were made with, or their final norm is of another kind."
            )
        return rows, error


def read_final_norm(folder: Path) -> FinalNorm:
    """The final norm of a checkpoint, by name and config.

    Raises:
        InputError: it is no RMS norm, cannot be told by name, or its gain cannot be divided by.
    """
    config = text_config(read_config(folder))
    if not isinstance(config.get("rms_norm_eps"), int | float):
        raise InputError(
            f"{folder}: config.json has no rms_norm_eps, so the final norm is no RMS norm and cannot be undone. "
            f"Collect with the last block's layer id as well: it is what the norm is given."
        )
    checkpoint = open_checkpoint(folder)
    names = [name for name in checkpoint.names if any(name == n or name.endswith("." + n) for n in _NAMES)]
    if len(names) != 1:
        raise InputError(
            f"{folder}: expected one tensor named like {' or '.join(_NAMES)}, found {names or 'none'}. Collect with "
            f"the last block's layer id as well: it is what the norm is given."
        )
    tensor = checkpoint.read(names[0])
    gain = _gain(tensor.dtype, tensor.data, config)
    if not np.all(np.isfinite(gain)) or not np.all(np.abs(gain) > np.finfo(np.float32).tiny):
        raise InputError(
            f"{folder}: {names[0]} holds a zero, so what the norm was given cannot be told from what it gave. "
            f"Collect with the last block's layer id as well."
        )
    return FinalNorm(gain, float(config["rms_norm_eps"]))


def _gain(dtype: str, data: bytes, config: Mapping[str, Any]) -> Float32:
    match dtype:
        case "BF16":
            weight = bf16_to_float32(np.frombuffer(data, "<u2"))
        case "F32":
            weight = np.frombuffer(data, "<f4").astype(np.float32)
        case "F16":
            weight = np.frombuffer(data, "<f2").astype(np.float32)
        case _:
            raise InputError(f"the final norm is stored as {dtype}; expected BF16, F16 or F32")
    return weight + np.float32(config.get("model_type") in GAIN_PLUS_ONE)
