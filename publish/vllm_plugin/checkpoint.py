"""Fetch an artifact from an allowed root, prove it is the one asked for, hold it in host memory."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from publish.vllm_plugin.errors import EngineRefusedError, LayoutRefusedError
from publish.vllm_plugin.fingerprints import canonical_json, digests_of, fingerprint
from publish.vllm_plugin.layout import LiveLayout, check_config, check_tensors, check_vocab_map, match_names
from publish.vllm_plugin.roots import checked_uri

WEIGHTS_FILE, CONFIG_FILE, MANIFEST_FILE = "model.safetensors", "config.json", "manifest.json"


@dataclass(frozen=True, slots=True)
class Staged:
    """A checked artifact in host memory, ready to load."""

    digest: str
    uri: str
    tensors: Mapping[str, Tensor]
    """What the draft owns, by canonical name."""
    names: Mapping[str, str]
    """Canonical name -> name in the artifact's file."""
    digests: Mapping[str, str]
    """Digest of each of ``tensors``, by canonical name."""


def stage(uri: str, digest: str, *, roots: tuple[str, ...], live: LiveLayout) -> Staged:
    """Fetch, check everything that can be checked without touching the model, and keep it.

    Raises:
        EngineRefusedError: the place is not allowed, cannot be read, or holds another artifact.
        LayoutRefusedError: the artifact does not fit the live draft.
    """
    place = checked_uri(uri, roots)
    raw = {name: _read(f"{place}/{name}") for name in (CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE)}
    config = _json(raw[CONFIG_FILE], place, CONFIG_FILE)
    manifest = _json(raw[MANIFEST_FILE], place, MANIFEST_FILE)
    try:
        tensors = load(raw.pop(WEIGHTS_FILE))
    except SafetensorError as error:
        raise LayoutRefusedError(
            f"{place}/{WEIGHTS_FILE} is no complete safetensors file: {error}. Copy it again from its source."
        ) from error
    digests = digests_of(tensors)
    found = artifact_digest(config, manifest, digests)
    if found != digest:
        raise EngineRefusedError(
            f"{uri!r} holds artifact {found}, expected {digest}: it was changed, or the wrong folder is "
            f"named. Import the draft into the registry again and publish that digest."
        )
    return fit(tensors, digests, config, digest=digest, uri=place, live=live)


def fit(
    tensors: Mapping[str, Tensor],
    digests: Mapping[str, str],
    config: Mapping[str, Any],
    *,
    digest: str,
    uri: str,
    live: LiveLayout,
) -> Staged:
    """Check an artifact in memory against the live draft; keeps only what the draft owns.

    Raises:
        LayoutRefusedError: with every reason of the first kind of fault met.
    """
    check_config(config, live)
    names = match_names(list(tensors), live)
    by_canonical = {canonical: tensors[name] for canonical, name in names.items()}
    check_tensors(by_canonical, live)
    check_vocab_map(by_canonical, live)
    owned = sorted(live.shapes)
    return Staged(
        digest=digest,
        uri=uri,
        tensors={name: by_canonical[name] for name in owned},
        names={name: names[name] for name in owned},
        digests={name: digests[names[name]] for name in owned},
    )


def artifact_digest(
    config: Mapping[str, Any], manifest: Mapping[str, Any], digests: Mapping[str, str]
) -> str:
    """Digest of an artifact: decoded weights, config and manifest (the registry's own scheme)."""
    body = {"config": config, "manifest": manifest, "weights": fingerprint(digests)}
    return hashlib.sha256(canonical_json(body)).hexdigest()


def boot_config(folder: str, loaded: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` of the engine's boot draft; what vLLM loaded if that folder is not local."""
    path = Path(folder) / CONFIG_FILE
    return dict(json.loads(path.read_text())) if path.is_file() else dict(loaded)


def boot_names(folder: str) -> list[str]:
    """Tensor names in the boot draft's file; empty when it is not a local single-file checkpoint."""
    path = Path(folder) / WEIGHTS_FILE
    if not path.is_file():
        return []
    with safe_open(str(path), framework="pt") as file:
        return list(file.keys())


def _read(url: str) -> bytes:
    try:
        with fsspec.open(url, "rb") as file:
            return bytes(file.read())
    except OSError as error:
        raise EngineRefusedError(
            f"cannot read {url}: {error}. The engine's host needs access to the registry; check path and "
            f"credentials."
        ) from error


def _json(raw: bytes, place: str, name: str) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise LayoutRefusedError(
            f"{place}/{name} is no JSON: {error}. Copy it again from its source."
        ) from error
    if not isinstance(value, dict):
        raise LayoutRefusedError(f"{place}/{name} holds a {type(value).__name__}, expected an object")
    return value
