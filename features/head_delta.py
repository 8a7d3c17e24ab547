"""A head snapshot as its difference to a keyframe's: XOR, byte planes, zstd; exact to the bit.

One RL step moves few weights far enough to change their bfloat16 bits, and mostly the low byte.
XOR leaves zeros where nothing moved, planes put equal bytes side by side, and zstd takes what
is left. There is no arithmetic on values, so NaN payloads and signs of zero come back as they were.

Shape legend: V = target vocabulary, H = target hidden size.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize

from features.bfloat16 import Stored
from features.checkpoint import RawTensor, write_safetensors
from features.errors import CorruptDataError, LakeContractError
from features.heads import HeadSnapshot
from features.schema import FeatureDtype, HeadId

ENCODING = "xor-planes-zstd"
"""``encoding`` in the metadata of a delta; a full snapshot has none."""
HEADER_BYTES = 4096
"""The header of a head blob, full or delta, fits into its first bytes."""

_BLOCK = 1 << 20
"""Elements compressed at a time: bounds what is held beside the two heads."""
_LEVEL = 1
_MATRICES = ("lm_head", "embed_tokens")


@dataclass(frozen=True, slots=True)
class DeltaLink:
    """Where a delta starts from."""

    base: HeadId
    """The keyframe: a snapshot stored in full."""
    index: int
    """Place in the keyframe's row of deltas, from 1."""
    decoded_bytes: int
    """Length of the values it stands for."""


def can_delta(head: HeadSnapshot, base: HeadSnapshot) -> bool:
    """Whether both hold matrices of the same type and shape; whether they are tied does not matter."""
    return head.dtype is base.dtype and (head.lm_head.shape, head.embedding.shape) == (
        base.lm_head.shape,
        base.embedding.shape,
    )


def encode_delta(head: HeadSnapshot, base: HeadSnapshot, *, base_id: HeadId, index: int = 1) -> bytes:
    """``head`` as one safetensors file that :func:`decode_delta` reads beside ``base``.

    The embedding is compared with the base's embedding, which is its LM head where that one is tied.

    Raises:
        ValueError: the two differ in type or shape (:func:`can_delta`).
    """
    if not can_delta(head, base):
        raise ValueError(
            f"a delta needs equal types and shapes, got {head.dtype}{head.lm_head.shape} on "
            f"{base.dtype}{base.lm_head.shape}"
        )
    tensors: dict[str, RawTensor] = {}
    pairs = {"lm_head": (head.lm_head, base.lm_head), "embed_tokens": (head.embed_tokens, base.embedding)}
    for name, (new, old) in pairs.items():
        if new is not None:
            frames = [frame for block in _frames(_bits(new), _bits(old)) for frame in block]
            data = b"".join(frames)
            sizes = np.array([len(frame) for frame in frames], "<i8").tobytes()
            tensors[f"{name}.frames"] = RawTensor("I64", (len(frames),), sizes)
            tensors[f"{name}.xor"] = RawTensor("U8", (len(data),), data)
    if head.bias is not None:
        # Whole: beside the matrices it is small.
        tensors["bias"] = RawTensor("F32", head.bias.shape, head.bias.astype("<f4").tobytes())
    place = {"encoding": ENCODING, "base": base_id, "index": str(index), "decoded_bytes": str(head.nbytes)}
    metadata = head.metadata() | place
    return write_safetensors(tensors, metadata)


def delta_link(head_of_blob: bytes) -> DeltaLink | None:
    """What a head blob starts from, by its first :data:`HEADER_BYTES`; None for a full snapshot.

    Raises:
        CorruptDataError: the bytes are no start of a head blob.
    """
    try:
        (size,) = struct.unpack_from("<Q", head_of_blob)
        metadata = json.loads(head_of_blob[8 : 8 + size])["__metadata__"]
        if "encoding" not in metadata:
            return None
        if metadata["encoding"] != ENCODING:
            raise ValueError(f"encoding {metadata['encoding']!r}, this program reads {ENCODING!r}")
        link = DeltaLink(HeadId(metadata["base"]), int(metadata["index"]), int(metadata["decoded_bytes"]))
        if len(link.base) != 64 or not set(link.base) <= set("0123456789abcdef"):
            raise ValueError(f"base {link.base!r} is no head id")
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise CorruptDataError(
            f"the header of a head blob cannot be read ({error}). Restore the blob from a copy, or put "
            f"the head of that version again."
        ) from error
    return link


def decode_delta(raw: bytes, base: HeadSnapshot) -> HeadSnapshot:
    """The snapshot that :func:`encode_delta` was given; the caller compares its digest.

    Raises:
        CorruptDataError: the bytes are cut or changed, or do not fit ``base``.
    """
    try:
        tensors = dict(deserialize(raw))
        (size,) = struct.unpack_from("<Q", raw)
        metadata = json.loads(raw[8 : 8 + size])["__metadata__"]
        unknown = set(tensors) - {"bias", *(f"{n}.{part}" for n in _MATRICES for part in ("xor", "frames"))}
        if unknown:
            raise ValueError(f"unknown tensors {sorted(unknown)}")
        bias = tensors.get("bias")
        return HeadSnapshot.from_parts(
            metadata,
            lm_head=_restored(tensors, "lm_head", base.lm_head),
            dtype=base.dtype,
            embed_tokens=(
                _restored(tensors, "embed_tokens", base.embedding) if "embed_tokens.xor" in tensors else None
            ),
            bias=np.frombuffer(bias["data"], "<f4").astype(np.float32) if bias is not None else None,
        )
    except (SafetensorError, ValueError, KeyError, OSError, struct.error, LakeContractError) as error:
        raise CorruptDataError(
            f"{len(raw):,} bytes are no delta of a head snapshot ({error}). Restore the blob from a copy, "
            f"or put the head of that version again."
        ) from error


def _frames(new: NDArray[Any], old: NDArray[Any]) -> Iterator[list[bytes]]:
    """Per block of elements one zstd frame for each byte plane, low byte first."""
    codec = pa.Codec("zstd", compression_level=_LEVEL)
    for start in range(0, new.size, _BLOCK):
        changed = new[start : start + _BLOCK] ^ old[start : start + _BLOCK]
        planes = changed.view(np.uint8).reshape(-1, new.dtype.itemsize).T
        yield [codec.compress(np.ascontiguousarray(plane), asbytes=True) for plane in planes]


def _restored(tensors: dict[str, Any], name: str, base: Stored) -> Stored:
    sizes = np.frombuffer(tensors[f"{name}.frames"]["data"], "<i8")
    data = memoryview(tensors[f"{name}.xor"]["data"])
    codec, old = pa.Codec("zstd"), _bits(base)
    width = old.dtype.itemsize
    if len(sizes) != -(-old.size // _BLOCK) * width or sizes.sum() != len(data) or (sizes < 0).any():
        raise ValueError(f"{name}: {len(sizes)} frames of {sizes.sum():,} bytes, found {len(data):,} bytes")
    out, position = np.empty_like(old), 0
    for block, start in enumerate(range(0, old.size, _BLOCK)):
        stop = min(start + _BLOCK, old.size)
        planes = np.empty((stop - start, width), np.uint8)
        for plane, length in enumerate(sizes[block * width : (block + 1) * width].tolist()):
            frame = data[position : position + length]
            planes[:, plane] = np.frombuffer(codec.decompress(frame, stop - start), np.uint8)
            position += length
        np.bitwise_xor(old[start:stop], planes.view(old.dtype)[:, 0], out=out[start:stop])
    return out.astype(out.dtype.newbyteorder("="), copy=False).view(base.dtype).reshape(base.shape)


def _bits(array: Stored) -> NDArray[Any]:
    """The elements in order as unsigned little-endian integers."""
    unsigned = np.dtype(np.uint16 if array.dtype.itemsize == FeatureDtype.BFLOAT16.itemsize else np.uint32)
    flat = np.ascontiguousarray(array).reshape(-1).view(unsigned)
    return flat.astype(unsigned.newbyteorder("<"), copy=False)
