"""How content is named: canonical JSON, and the digest of a tensor. Heads, plans and drafts share both."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys and no spaces: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def tensor_digest(dtype: str, shape: Sequence[int], data: bytes | bytearray | memoryview) -> str:
    """SHA-256 (64 hex digits) over canonical JSON ``[dtype, shape]`` and the raw little-endian bytes.

    ``dtype`` is safetensors' name of the element type, e.g. ``F32``.
    """
    digest = hashlib.sha256(canonical_json([dtype, [int(size) for size in shape]]))
    digest.update(data)
    return digest.hexdigest()
