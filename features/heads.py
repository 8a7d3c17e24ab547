"""Head snapshots: from final hidden state to logits, and the input embedding of the same version.

Shape legend: N = rows, H = target hidden size, V = target vocabulary (rows of the LM head).
"""

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize

from features.bfloat16 import Float32, Stored, bf16_to_float32, to_float32
from features.checkpoint import Checkpoint, RawTensor, open_checkpoint, write_safetensors
from features.digests import canonical_json
from features.errors import CorruptDataError, InputError, LakeContractError
from features.schema import FeatureDtype, HeadId
from features.target import read_config, text_config

VOCAB_BLOCK = 8192
"""LM head rows converted and multiplied at a time."""
_ROW_BLOCK = 1024

_SAFETENSORS_NAME = {FeatureDtype.BFLOAT16: "BF16", FeatureDtype.FLOAT32: "F32"}
_METADATA_FIELDS = ("logit_scale", "softcap")


@dataclass(frozen=True, slots=True, eq=False)
class HeadSnapshot:
    """Everything between the LM head's input and the logits of one target version.

    bfloat16 matrices hold raw ``uint16`` bits. Logits are
    ``softcap * tanh(logit_scale * (final @ lm_head.T + bias) / softcap)``.
    """

    lm_head: Stored
    """Shape [V, H]."""
    dtype: FeatureDtype
    """Of both matrices; the bias is always float32."""
    embed_tokens: Stored | None = None
    """Input embedding, shape [V, H]; None when it is the LM head itself (tied)."""
    bias: Float32 | None = None
    """Shape [V]."""
    logit_scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        matrices = {"lm_head": self.lm_head, "embed_tokens": self.embed_tokens}
        for name, matrix in matrices.items():
            if matrix is None:
                continue
            if matrix.ndim != 2 or matrix.dtype.name != self.dtype.numpy_name:
                raise LakeContractError(
                    f"head snapshot: {name} is {matrix.dtype.name}{list(matrix.shape)}, expected a matrix "
                    f"of {self.dtype.numpy_name} ({self.dtype})"
                )
        if self.embed_tokens is not None and self.embed_tokens.shape[1] != self.hidden_size:
            raise LakeContractError(
                f"head snapshot: embedding is {list(self.embed_tokens.shape)}, the LM head "
                f"{list(self.lm_head.shape)}"
            )
        if self.bias is not None and (self.bias.shape != (self.vocab_size,) or self.bias.dtype != np.float32):
            raise LakeContractError(
                f"head snapshot: bias is {self.bias.dtype}{list(self.bias.shape)}, expected [V]"
            )
        if self.softcap is not None and not self.softcap > 0:
            raise LakeContractError(f"head snapshot: softcap must be > 0, got {self.softcap}")

    @property
    def vocab_size(self) -> int:
        return int(self.lm_head.shape[0])

    @property
    def hidden_size(self) -> int:
        return int(self.lm_head.shape[1])

    @property
    def embedding(self) -> Stored:
        """The input embedding of the same version, shape [V, H], in ``dtype``."""
        return self.lm_head if self.embed_tokens is None else self.embed_tokens

    @property
    def nbytes(self) -> int:
        """Length of the values: matrices and bias."""
        arrays = (self.lm_head, self.embed_tokens, self.bias)
        return sum(array.nbytes for array in arrays if array is not None)

    @property
    def head_id(self) -> HeadId:
        """Digest of the decoded values: a tied and an equal untied embedding give one id."""
        parts = {name: tensor.digest for name, tensor in self._tensors().items()}
        parts.setdefault("embed_tokens", parts["lm_head"])
        parts.update({name: _hex(getattr(self, name)) for name in _METADATA_FIELDS})
        return HeadId(hashlib.sha256(canonical_json(parts)).hexdigest())

    def logits(self, final: Float32) -> Float32:
        """Reference logits in float32, shape [N, V], of float32 ``final`` [N, H]."""
        logits = np.empty((final.shape[0], self.vocab_size), np.float32)
        for start, stop, block in self._vocab_blocks(VOCAB_BLOCK):
            logits[:, start:stop] = self._scores(final, start, stop, block)
        return logits

    def token_logprobs(
        self,
        final: Float32,
        token_ids: NDArray[np.integer[Any]],
        *,
        temperature: float = 1.0,
        chunk: int = VOCAB_BLOCK,
    ) -> Float32:
        """Log-probability of one token per row, shape [N]; never holds an [N, V] array.

        ``final`` is float32 [N, H], ``token_ids`` [N] the token each row is asked about; logits
        are divided by ``temperature``. ``chunk`` is the number of LM head rows at a time.
        """
        ids = np.asarray(token_ids, np.int64)
        if ids.shape != final.shape[:1] or (ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size):
            raise ValueError(f"token ids must be one per row and in [0, {self.vocab_size}), got {ids.shape}")
        if not temperature > 0:
            raise ValueError(f"temperature must be > 0, got {temperature}")
        top = np.full(ids.shape, -np.inf)
        total, chosen = np.zeros(ids.shape), np.zeros(ids.shape)
        for start, stop, block in self._vocab_blocks(chunk):
            for first in range(0, len(ids), _ROW_BLOCK):
                rows = slice(first, first + _ROW_BLOCK)
                scores = self._scores(final[rows], start, stop, block).astype(np.float64) / temperature
                peak = np.maximum(top[rows], scores.max(axis=1))
                added = np.exp(scores - peak[:, None]).sum(axis=1)
                total[rows] = total[rows] * np.exp(top[rows] - peak) + added
                top[rows] = peak
                inside = np.nonzero((ids[rows] >= start) & (ids[rows] < stop))[0]
                chosen[first + inside] = scores[inside, ids[rows][inside] - start]
        logprobs: Float32 = (chosen - top - np.log(total)).astype(np.float32)
        return logprobs

    def to_bytes(self) -> bytes:
        """The snapshot as one safetensors file; equal snapshots give equal bytes."""
        return write_safetensors(self._tensors(), self.metadata())

    def metadata(self) -> dict[str, str]:
        """The numbers that are no tensor, in the one spelling they are stored in."""
        return {name: _hex(getattr(self, name)) for name in _METADATA_FIELDS}

    @staticmethod
    def from_parts(metadata: Mapping[str, str], **tensors: Any) -> "HeadSnapshot":
        """A snapshot of decoded tensors (fields of this class) and the numbers of :meth:`metadata`."""
        scale, softcap = (metadata[name] for name in _METADATA_FIELDS)
        return HeadSnapshot(
            logit_scale=float.fromhex(scale),
            softcap=None if softcap == "none" else float.fromhex(softcap),
            **tensors,
        )

    @staticmethod
    def from_bytes(raw: bytes) -> "HeadSnapshot":
        """Read :meth:`to_bytes`.

        Raises:
            CorruptDataError: the bytes are cut or hold something else.
        """
        try:
            tensors = dict(deserialize(raw))
            metadata = _metadata(raw)
            dtype = _dtype_of(tensors["lm_head"]["dtype"])
            bias = tensors.get("bias")
            return HeadSnapshot.from_parts(
                metadata,
                lm_head=_as_array(tensors["lm_head"], dtype),
                dtype=dtype,
                embed_tokens=_as_array(tensors["embed_tokens"], dtype) if "embed_tokens" in tensors else None,
                bias=np.frombuffer(bias["data"], "<f4").copy() if bias is not None else None,
            )
        except (SafetensorError, ValueError, KeyError, LakeContractError) as error:
            raise CorruptDataError(
                f"{len(raw):,} bytes are no head snapshot ({error}): expected safetensors with lm_head. "
                f"Restore the blob from a copy, or put the head of that version again."
            ) from error

    def _tensors(self) -> dict[str, RawTensor]:
        named = {"lm_head": self.lm_head, "embed_tokens": self.embed_tokens}
        tensors = {name: _as_raw(matrix, self.dtype) for name, matrix in named.items() if matrix is not None}
        if self.bias is not None:
            tensors["bias"] = _as_raw(self.bias, FeatureDtype.FLOAT32)
        return tensors

    def _vocab_blocks(self, rows: int) -> Iterator[tuple[int, int, Float32]]:
        for start in range(0, self.vocab_size, rows):
            block = self.lm_head[start : start + rows]
            yield start, start + len(block), to_float32(block, self.dtype)

    def _scores(self, final: Float32, start: int, stop: int, block: Float32) -> Float32:
        scores = final @ block.T
        if self.bias is not None:
            scores += self.bias[start:stop]
        if self.logit_scale != 1.0:
            scores *= np.float32(self.logit_scale)
        if self.softcap is not None:
            scores = np.float32(self.softcap) * np.tanh(scores / np.float32(self.softcap))
        return scores


def head_from_checkpoint(folder: Path) -> HeadSnapshot:
    """The head of a Hugging Face checkpoint, with numpy only.

    Raises:
        InputError: there are no weights, or embedding or LM head cannot be told by name.
        CorruptDataError: shards are broken, or the config contradicts the weights.
    """
    config = text_config(read_config(folder))
    checkpoint = open_checkpoint(folder)
    embed = _decoded(checkpoint, _only_name(checkpoint, ("embed_tokens.weight", "wte.weight"), required=True))
    lm_head_name = _only_name(checkpoint, ("lm_head.weight",), required=False)
    lm_head = _decoded(checkpoint, lm_head_name) if lm_head_name else None
    tied = config.get("tie_word_embeddings")
    if tied is None:
        tied = read_config(folder).get("tie_word_embeddings")
    lm_head = _resolve_tie(folder, embed, lm_head, tied)
    bias_name = _only_name(checkpoint, ("lm_head.bias",), required=False)
    dtype = FeatureDtype.BFLOAT16
    if embed.dtype == np.float32 or lm_head.dtype == np.float32:
        dtype, embed, lm_head = FeatureDtype.FLOAT32, _widened(embed), _widened(lm_head)
    return HeadSnapshot(
        lm_head=lm_head,
        dtype=dtype,
        embed_tokens=None if _same_bits(embed, lm_head) else embed,
        bias=_widened(_decoded(checkpoint, bias_name)) if bias_name else None,
        logit_scale=logit_scale(config),
        softcap=config.get("final_logit_softcapping"),
    )


def logit_scale(config: Mapping[str, Any]) -> float:
    """What multiplies the logits: Cohere's ``logit_scale``, or one over Granite's ``logits_scaling``; else 1."""
    if config.get("logit_scale") is not None:
        return float(config["logit_scale"])
    return 1.0 / float(config.get("logits_scaling") or 1.0)


def _metadata(raw: bytes) -> dict[str, str]:
    (size,) = struct.unpack_from("<Q", raw)
    metadata = json.loads(raw[8 : 8 + size]).get("__metadata__")
    if not isinstance(metadata, dict):
        raise ValueError("the header has no metadata")
    return metadata


def _hex(value: float | None) -> str:
    # Hexadecimal: the exact double, in one spelling.
    return "none" if value is None else float(value).hex()


def _as_raw(array: Stored, dtype: FeatureDtype) -> RawTensor:
    little = np.ascontiguousarray(array, f"<{array.dtype.kind}{array.dtype.itemsize}")
    return RawTensor(_SAFETENSORS_NAME[dtype], tuple(array.shape), little.tobytes())


def _dtype_of(name: str) -> FeatureDtype:
    for dtype, spelled in _SAFETENSORS_NAME.items():
        if spelled == name:
            return dtype
    raise ValueError(f"dtype {name}, expected one of {sorted(_SAFETENSORS_NAME.values())}")


def _as_array(view: dict[str, Any], dtype: FeatureDtype) -> Stored:
    if view["dtype"] != _SAFETENSORS_NAME[dtype]:
        raise ValueError(f"mixed dtypes {view['dtype']} and {_SAFETENSORS_NAME[dtype]}")
    flat = np.frombuffer(view["data"], np.dtype(dtype.numpy_name).newbyteorder("<"))
    return flat.reshape(view["shape"]).astype(dtype.numpy_name)


def _only_name(checkpoint: Checkpoint, endings: tuple[str, ...], *, required: bool) -> str:
    found = [n for n in checkpoint.names if any(n == e or n.endswith("." + e) for e in endings)]
    if len(found) > 1 or (required and not found):
        raise InputError(
            f"{checkpoint.folder}: expected {'one tensor' if required else 'at most one tensor'} named like "
            f"{' or '.join(endings)}, found {found or 'none'}. This architecture's head cannot be told by "
            f"name."
        )
    return found[0] if found else ""


def _decoded(checkpoint: Checkpoint, name: str) -> Stored:
    tensor = checkpoint.read(name)
    match tensor.dtype:
        case "BF16":
            return np.frombuffer(tensor.data, "<u2").reshape(tensor.shape).astype(np.uint16)
        case "F32":
            return np.frombuffer(tensor.data, "<f4").reshape(tensor.shape).astype(np.float32)
        case "F16":
            return np.frombuffer(tensor.data, "<f2").reshape(tensor.shape).astype(np.float32)
    raise InputError(
        f"{checkpoint.folder}: {name} is stored as {tensor.dtype}; a head snapshot needs BF16, F16 or F32. "
        f"Give the unquantised checkpoint of that version."
    )


def _resolve_tie(folder: Path, embed: Stored, lm_head: Stored | None, tied: bool | None) -> Stored:
    if lm_head is None:
        if tied is False:
            raise CorruptDataError(
                f"{folder}: tie_word_embeddings is false and there is no lm_head.weight. "
                f"A loader would leave a random head; copy the complete checkpoint."
            )
        return embed
    if tied and not _same_bits(embed, lm_head):
        raise CorruptDataError(
            f"{folder}: tie_word_embeddings is true and lm_head.weight differs from the embedding. "
            f"Loaders disagree about which one counts; drop the tensor or set the flag to false."
        )
    return lm_head


def _same_bits(left: Stored, right: Stored) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    unsigned = np.uint16 if left.dtype.itemsize == 2 else np.uint32
    return bool(np.array_equal(left.view(unsigned), right.view(unsigned)))


def _widened(array: Stored) -> Float32:
    return bf16_to_float32(array.view(np.uint16)) if array.dtype == np.uint16 else array.view(np.float32)
