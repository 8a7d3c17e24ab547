"""What a lake holds, apart from who wrote it, how it was cut into fragments and on which machine."""

import hashlib
from collections.abc import Iterator
from typing import Any

from features.digests import canonical_json
from features.lake import Lake
from features.schema import TargetVersion
from features.snapshots import commits_of

_COLUMNS = [
    "target_id", "target_version", "sample_id", "group_id", "start", "num_rows", "sequence_length",
    "prompt_length", "layer_ids", "dtype", "codec", "crc32c_tokens",
]  # fmt: skip
"""A window's identity. Its checksum of tokens, masks and logprobs stands for those; no float of a feature."""


def content_digest(lake: Lake, version: TargetVersion | None = None) -> str:
    """SHA-256 (64 hex digits) over the distinct logical windows of one version, or of all.

    Two lakes with the same samples, spans, tokens, masks, logprobs, versions and layouts have the
    same digest, however their fragments were cut, in whatever order they came, and though another
    processor rounded the features differently. Reads commits, no token table and no feature;
    holds about 100 bytes per window.

    Raises:
        CorruptDataError: a commit is unreadable.
    """
    versions = [version] if version is not None else [record.version for record in lake.versions()]
    windows = {_window_digest(row) for number in versions for row in _rows(lake, number)}
    digest = hashlib.sha256()
    for window in sorted(windows):
        digest.update(window)
    return digest.hexdigest()


def _rows(lake: Lake, version: TargetVersion) -> Iterator[dict[str, Any]]:
    for table in commits_of(lake, version):
        yield from table.select(_COLUMNS).to_pylist()


def _window_digest(row: dict[str, Any]) -> bytes:
    return hashlib.blake2b(canonical_json([row[name] for name in _COLUMNS]), digest_size=16).digest()
