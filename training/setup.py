"""What must be settled before the first step: layer ids, vocabulary map, parent, model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from features.errors import DraftLayoutError, InputError, TargetMismatchError, TrainingFailedError
from features.schema import TargetIdentity, TargetVersion
from training.artifact import DraftArtifact, load_artifact
from training.batches import layer_columns, supervision_mask
from training.feed import Feed
from training.held_out import kept_out_by
from training.methods import DraftMethod
from training.spec import TrainSpec
from training.vocab import VocabMap

if TYPE_CHECKING:
    from features.lake import Lake


@dataclass(frozen=True, slots=True)
class Setup:
    """A model ready to train, and where it came from."""

    model: nn.Module
    layer_ids: tuple[int, ...]
    parent: str | None
    parent_kept_out: int | None = None
    """Share of this lake's groups that the parent was not trained on; None when it says nothing of them."""


def find_method(spec: TrainSpec, methods: Mapping[str, DraftMethod]) -> DraftMethod:
    """The table's entry for a spec.

    Raises:
        InputError: the table has no such method.
    """
    if spec.method.method not in methods:
        raise InputError(f"unknown draft method {spec.method.method!r}; known: {', '.join(sorted(methods))}")
    return methods[spec.method.method]


def prepare_model(
    lake: "Lake",
    rows: Sequence[Mapping[str, Any]],
    feed: Feed,
    spec: TrainSpec,
    method: DraftMethod,
    *,
    token_counts: NDArray[np.int64],
    target_config: dict[str, Any],
    layer_ids: Sequence[int] | None,
    parent: Path | None,
) -> Setup:
    """Build a new model, or load the parent's with its vocabulary map and layer ids.

    Raises:
        DraftLayoutError: the features, the parent and the asked layer ids do not fit.
        TargetMismatchError: the parent was trained for another target.
    """
    wanted = None if layer_ids is None else tuple(layer_ids)
    if parent is not None:
        return _warm_start(lake, rows, spec, method, parent, wanted)
    recorded = {tuple(row["layer_ids"]) for row in rows}
    if wanted is None:
        agreed = len(recorded) == 1
        wanted = next(iter(recorded)) if agreed else method.default_layer_ids(lake.target.num_layers)
    check_layers(rows, wanted)
    vocab = _build_vocab(lake.target, token_counts, spec, method)
    newest = TargetVersion(max(row["target_version"] for row in rows))
    model = method.build(
        lake.target, target_config, spec.method, vocab, wanted, seed=spec.seed, head=feed.head(newest)
    )
    return Setup(model, wanted, None)


def _warm_start(
    lake: "Lake",
    rows: Sequence[Mapping[str, Any]],
    spec: TrainSpec,
    method: DraftMethod,
    parent: Path,
    wanted: tuple[int, ...] | None,
) -> Setup:
    artifact = load_artifact(parent)
    check_target(artifact, lake.target, where=str(parent))
    if artifact.manifest.method != method.name:
        raise DraftLayoutError(
            f"{parent} is a {artifact.manifest.method} draft, the spec asks for {method.name}. "
            f"Name a parent of that method, or train from scratch."
        )
    model = method.load(parent)
    check_manifest(artifact, method, model, where=str(parent))
    ids, size = method.layer_ids_of(model), method.draft_vocab_size(spec.method)
    if wanted is not None and wanted != ids:
        raise DraftLayoutError(
            f"{parent} reads aux layers {list(ids)}, {list(wanted)} were asked for. "
            f"A warm start keeps its parent's: leave the layer ids out, or train from scratch."
        )
    if size is not None and size != method.vocab_of(model).size:
        raise DraftLayoutError(
            f"{parent} has a draft vocabulary of {method.vocab_of(model).size:,}, the spec asks for {size:,}. "
            f"A warm start keeps its map: leave draft_vocab_size out, or train from scratch."
        )
    _check_sizes(parent, method, model, spec)
    check_layers(rows, ids)
    return Setup(model, ids, artifact.digest, kept_out_by(artifact, lake))


def _check_sizes(parent: Path, method: DraftMethod, model: nn.Module, spec: TrainSpec) -> None:
    """Refuse a spec that asks for other sizes than the parent's: the manifest would record what was not done."""
    config = method.export_config(model)
    asked = {k: v for k, v in spec.method.model_dump().items() if v is not None and k in config}
    differing = [f"{k} {config[k]!r} (asked for: {v!r})" for k, v in asked.items() if config[k] != v]
    if differing:
        raise DraftLayoutError(
            f"{parent} has {', '.join(differing)}. A warm start keeps its parent's sizes: leave them out of the "
            f"spec, or train from scratch."
        )


def check_manifest(artifact: DraftArtifact, method: DraftMethod, model: nn.Module, *, where: str) -> None:
    """Refuse a draft whose manifest says something else than the model that its config and weights make.

    An engine reads the config, the lake's windows are chosen by the manifest: they must be of one draft.

    Raises:
        DraftLayoutError: naming each field with both values.
    """
    made = {
        "layer_ids": method.layer_ids_of(model),
        "vocab_size": method.vocab_of(model).vocab_size,
        "hidden_size": method.export_config(model).get("hidden_size", artifact.manifest.hidden_size),
    }
    stated = {name: getattr(artifact.manifest, name) for name in made}
    differing = [f"{n} {stated[n]!r} (the model: {made[n]!r})" for n in made if stated[n] != made[n]]
    if differing:
        raise DraftLayoutError(
            f"{where}: manifest.json says {', '.join(differing)}: config and manifest are of different drafts. "
            f"Copy the folder again from its training run."
        )


def check_target(artifact: DraftArtifact, target: TargetIdentity, *, where: str) -> None:
    """Refuse a draft of another target, tokenizer or size.

    Raises:
        TargetMismatchError: naming what differs.
    """
    names = ("target_id", "tokenizer_digest", "hidden_size", "vocab_size")
    differing = [n for n in names if getattr(artifact.manifest, n) != getattr(target, n)]
    if differing:
        pairs = ", ".join(
            f"{n} {getattr(artifact.manifest, n)!r} vs {getattr(target, n)!r}" for n in differing
        )
        raise TargetMismatchError(
            f"{where} was trained for another target (draft vs lake): {pairs}. Use a draft of this lake's target."
        )


def check_layers(rows: Sequence[Mapping[str, Any]], wanted: Sequence[int]) -> None:
    """Refuse a selection of which some fragment lacks a wanted layer, before anything is read."""
    for recorded in sorted({tuple(row["layer_ids"]) for row in rows}):
        layer_columns(recorded, wanted, where="selection")


def _build_vocab(
    target: TargetIdentity, token_counts: NDArray[np.int64], spec: TrainSpec, method: DraftMethod
) -> VocabMap:
    size = method.draft_vocab_size(spec.method)
    if size is None:
        return VocabMap.identity(target.vocab_size)
    return VocabMap.from_counts(token_counts, size)


@dataclass(frozen=True, slots=True)
class Census:
    """What a selection's tokens offer a method, counted without reading a feature."""

    usable: tuple[int, ...]
    """Indices of windows with at least one token the method can learn to predict, each span once."""
    token_counts: NDArray[np.int64]
    """How often each target id is to be predicted in one epoch, ``[V]``."""
    duplicates: int
    """Windows left out because the same span is there with other layers or dtype."""


def take_census(
    lake: "Lake", rows: Sequence[Mapping[str, Any]], spec: TrainSpec, method: DraftMethod
) -> Census:
    """Count supervised tokens over all windows.

    Raises:
        TrainingFailedError: there is not one: training would look successful and teach nothing.
        LakeContractError: the loss mask is asked for and a window has none.
    """
    counts = np.zeros(lake.target.vocab_size, np.int64)
    usable = []
    seen: set[tuple[int, str, int, int]] = set()
    for index, row in enumerate(rows):
        span = (row["target_version"], row["sample_id"], row["start"], row["num_rows"])
        if span in seen:  # recorded again with other layers or dtype: it would weigh twice
            continue
        seen.add(span)
        tokens = lake.read_tokens(row)
        where = f"sample {row['sample_id']!r} of version {row['target_version']}"
        mask = method.supervised_tokens(supervision_mask(tokens, spec.mask, where=where)).numpy()
        ids = tokens.token_ids[mask & (tokens.token_ids >= 0)]
        if len(ids):
            usable.append(index)
            counts += np.bincount(ids, minlength=lake.target.vocab_size)
    if not usable:
        raise TrainingFailedError(
            f"none of {len(rows)} windows holds a token that {method.name} could learn to predict (mask "
            f"{spec.mask!r}). Widen the selection, or collect rollouts with their sampled tokens marked."
        )
    return Census(tuple(usable), counts, len(rows) - len(seen))
