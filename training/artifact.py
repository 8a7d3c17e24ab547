"""A draft artifact: weights, config and training manifest under one digest; and its evidence.

Torch-free: publishing and registries read artifacts on machines without a trainer. Tensors
are read through safetensors' raw form, never through pickle.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from safetensors import deserialize

from features.digests import canonical_json, tensor_digest
from features.errors import DraftLayoutError

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
MANIFEST_FILE = "manifest.json"
ARTIFACT_FILES = (WEIGHTS_FILE, CONFIG_FILE, MANIFEST_FILE)

TauMode = Literal["greedy", "sampled-onehot", "sampled-prob"]


class Document(BaseModel):
    """Base of every stored document: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TrainingManifest(Document):
    """How a draft came to be. Holds no clock, host or path, so equal runs give equal digests."""

    method: str
    target_id: str
    tokenizer_digest: str
    hidden_size: int
    vocab_size: int
    layer_ids: tuple[int, ...]
    """Aux layer ids of the features it was trained on (blocks applied)."""
    lake_revision: str
    selection_digest: str
    versions: tuple[int, ...]
    """Target versions in the selection, ascending; the last is the newest trained on."""
    parent: str | None
    """Digest of the draft it was warm-started from."""
    spec: dict[str, Any]
    """The full training spec, without paths."""
    packages: dict[str, str]
    """Versions of the packages that decide the numbers."""
    steps: int
    tokens: int
    """Supervised tokens seen, all epochs."""
    held_out_percent: Annotated[int, Field(ge=0, le=100)] | None = None
    """Share of the lake's rollout groups that neither this draft nor its parents were trained on. None: not
    recorded."""


class DraftArtifact(Document):
    """A complete draft on disk, checked, with its digest."""

    digest: str
    weights_digest: str
    config: dict[str, Any]
    manifest: TrainingManifest
    tensors: dict[str, str]
    """Digest of each tensor: dtype, shape and bytes."""


class Interval(Document):
    """A point estimate with its 95 % interval."""

    value: float
    low: float
    high: float


class TauEstimate(Document):
    """``tau = 1 + accepted / rounds`` of a walk, with what it was measured on."""

    tau: Interval
    rounds: Annotated[int, Field(ge=0)]
    accepted: Annotated[int, Field(ge=0)]
    accepted_per_position: tuple[int, ...]
    """Rounds in which the draft token at position i (0-based) was accepted."""
    groups: int


class EvalReport(Document):
    """Offline evaluation of one artifact on held-out groups: evidence, never part of the digest."""

    kind: Literal["evaluation"] = "evaluation"
    artifact: str
    lake_revision: str
    selection_digest: str
    split: Literal["all", "train", "held_out"] | None = None
    """Which rollout groups were walked. None is unknown, and no gate accepts it."""
    domains: tuple[str, ...] = ()
    """Domains the windows were narrowed to; empty: every domain, which is what a gate accepts."""
    head_version: int
    """Version whose head scored it: always the windows' own and, for a gate, the newest."""
    mode: TauMode
    num_speculative_tokens: int
    temperature: float | None
    overall: TauEstimate
    by_version: dict[int, TauEstimate]
    by_domain: dict[str, TauEstimate]
    skipped: dict[str, int]
    """Windows left out, by reason."""
    baseline: str | None = None
    baseline_overall: TauEstimate | None = None
    gain: Interval | None = None
    """tau(artifact) - tau(baseline), paired bootstrap over groups of a ratio of sums."""


def fingerprint(tensors: dict[str, str]) -> str:
    """One digest over named tensor digests, whatever order or file they came in."""
    return hashlib.sha256(canonical_json(tensors)).hexdigest()


def artifact_digest(config: dict[str, Any], manifest: TrainingManifest, tensors: dict[str, str]) -> str:
    """Digest of an artifact: decoded weights, config and manifest.

    Only fields that the manifest's file holds count, as in the engine, which knows no defaults.
    """
    stated = manifest.model_dump(mode="json", exclude_unset=True)
    body = {"config": config, "manifest": stated, "weights": fingerprint(tensors)}
    return hashlib.sha256(canonical_json(body)).hexdigest()


def load_artifact(folder: Path) -> DraftArtifact:
    """Read and check a draft directory.

    Raises:
        DraftLayoutError: a file is missing, cut short or not what its name says.
    """
    return check_artifact(read_artifact_files(folder), where=str(folder))


def read_artifact_files(folder: Path) -> dict[str, bytes]:
    """The three files of a draft directory, by name and unchecked.

    Raises:
        DraftLayoutError: one is missing.
    """
    missing = [name for name in ARTIFACT_FILES if not (folder / name).is_file()]
    if missing:
        raise DraftLayoutError(
            f"{folder} is no draft artifact: {', '.join(missing)} missing (a draft holds "
            f"{', '.join(ARTIFACT_FILES)}). Point at a folder that `draftlake train` wrote, or fetch it from "
            f"the registry again."
        )
    return {name: (folder / name).read_bytes() for name in ARTIFACT_FILES}


def check_artifact(files: Mapping[str, bytes], *, where: str) -> DraftArtifact:
    """Check the three files of an artifact held in memory and compute its digest.

    Raises:
        DraftLayoutError: a file is cut short, or not what its name says.
    """
    tensors = read_tensor_digests(files[WEIGHTS_FILE], where=f"{where}/{WEIGHTS_FILE}")
    try:
        config = json.loads(files[CONFIG_FILE])
        manifest = TrainingManifest.model_validate_json(files[MANIFEST_FILE])
        return DraftArtifact(
            digest=artifact_digest(config, manifest, tensors),
            weights_digest=fingerprint(tensors),
            config=config,
            manifest=manifest,
            tensors=tensors,
        )
    except ValueError as error:  # JSON, text encoding and pydantic errors alike
        raise DraftLayoutError(
            f"{where}: {CONFIG_FILE} or {MANIFEST_FILE} is not what a draft artifact holds: {error}. "
            f"Copy the folder again from where `draftlake train` wrote it."
        ) from error


def read_tensor_digests(raw: bytes, *, where: str) -> dict[str, str]:
    """Digest of every tensor in a safetensors file held in memory.

    Raises:
        DraftLayoutError: the bytes are no complete safetensors file.
    """
    try:
        entries = deserialize(raw)
    except Exception as error:
        raise DraftLayoutError(
            f"{where} ({len(raw):,} bytes) is no complete safetensors file: {error}. "
            f"It may be cut short or a pointer file; copy it again from its source."
        ) from error
    return {name: tensor_digest(view["dtype"], view["shape"], view["data"]) for name, view in entries}
