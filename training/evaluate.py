"""Offline tau of a draft on held-out groups, alone and against another draft.

``walk`` has the counting, ``bootstrap`` the intervals; this module reads windows, lets the
draft propose and totals the rounds. Calibration against an engine compares
:func:`walk_windows` with the engine round by round.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from features.errors import InputError
from features.windows import Window, WindowMeta
from training.artifact import DraftArtifact, EvalReport, TauEstimate, TauMode, load_artifact
from training.bootstrap import bootstrap_tau, paired_gain
from training.feed import Feed
from training.held_out import check_held_out
from training.methods import DRAFT_METHODS, DraftMethod
from training.reading.reader import SelectionReader
from training.reading.spec import ReadSpec
from training.setup import check_layers, check_manifest, check_target
from training.walk import Round, WalkCounts, decoded_spans, walk

if TYPE_CHECKING:
    from features.catalog import Selection
    from features.lake import Lake

__all__ = [
    "WalkedWindow",
    "evaluate_draft",
    "paired_gain",
    "walk",
    "walk_windows",
]

log = logging.getLogger(__name__)

UNKNOWN_DOMAIN = "unknown"
DEFAULT_BATCH_TOKENS = 8192
"""Rows walked at a time, padding included."""


@dataclass(frozen=True, slots=True)
class WalkedWindow:
    """Rounds of one whole sequence."""

    meta: WindowMeta
    rounds: tuple[Round, ...]


def evaluate_draft(
    lake: "Lake",
    selection: "Selection",
    draft_folder: Path,
    *,
    k: int,
    mode: TauMode,
    baseline_folder: Path | None = None,
    seed: int = 0,
    batch_tokens: int = DEFAULT_BATCH_TOKENS,
    device: torch.device | str = "cpu",
    methods: Mapping[str, DraftMethod] = DRAFT_METHODS,
) -> EvalReport:
    """Estimate tau of a draft, and its gain over a baseline on the same windows.

    A caller beside whom retention may run holds a lease meanwhile (``training.reading.lease``).

    Args:
        k: draft tokens per round, the engine's ``num_speculative_tokens``.
        mode: ``greedy`` walks rollouts of temperature 0, ``sampled-onehot`` those above it.

    Raises:
        EmptySelectionError: nothing is selected.
        InputError: no window can be walked in this mode, with the reasons counted.
        TargetMismatchError, DraftLayoutError: a draft does not fit the lake's target or features.
    """
    selection.require_nonempty()
    skipped: Counter[str] = Counter()
    usable = _usable_windows(lake, selection.rows, mode, skipped)
    if not usable:
        raise _none_walked(selection, mode, skipped)
    # Padded batches; a walk is the same in any order, so every walk takes that of epoch 0.
    feed, how = Feed(lake, device), ReadSpec(batch_rows=batch_tokens, padded=True)
    reader = SelectionReader(lake, selection.at(usable), how, allocate=feed.allocate)

    def walked_by(folder: Path, skipped: Counter[str]) -> tuple[str, list[WalkedWindow]]:
        artifact = load_artifact(folder)
        check_target(artifact, lake.target, where=str(folder))
        check_held_out(artifact, selection, lake, where=str(folder))
        layer_ids = artifact.manifest.layer_ids
        check_layers(selection.rows, layer_ids)
        method = _method_of(artifact, folder, methods)
        model = method.load(folder).to(device).eval()
        check_manifest(artifact, method, model, where=str(folder))
        rounds = walk_windows(reader, feed, method, model, layer_ids=layer_ids, k=k, skipped=skipped)
        return artifact.digest, list(rounds)

    digest, walked = walked_by(draft_folder, skipped)
    if not walked:
        raise _none_walked(selection, mode, skipped)
    report = _report(selection, digest, walked, mode=mode, k=k, seed=seed, skipped=skipped)
    if baseline_folder is None:
        return report
    baseline_digest, baseline = walked_by(baseline_folder, Counter())  # what it skips was counted above
    return _with_baseline(report, walked, baseline, baseline_digest, k, seed)


def _none_walked(selection: "Selection", mode: TauMode, skipped: Mapping[str, int]) -> InputError:
    return InputError(
        f"none of {len(selection.rows)} windows can be walked in mode {mode!r}: {dict(skipped)}. "
        f"Choose the mode these rollouts were sampled in, or select whole sequences."
    )


def _report(
    selection: "Selection",
    digest: str,
    walked: Sequence[WalkedWindow],
    *,
    mode: TauMode,
    k: int,
    seed: int,
    skipped: Mapping[str, int],
) -> EvalReport:
    """The report of one draft, without a baseline."""
    temperatures = {window.meta.temperature for window in walked}
    versions = _parts(walked, lambda meta: meta.version.number)
    domains = _parts(walked, lambda meta: meta.domain or UNKNOWN_DOMAIN)
    return EvalReport(
        artifact=digest,
        lake_revision=selection.revision.digest,
        selection_digest=selection.digest,
        split=selection.filter.split.value,
        domains=selection.filter.domains,
        head_version=max(window.meta.version.number for window in walked),
        mode=mode,
        num_speculative_tokens=k,
        temperature=temperatures.pop() if len(temperatures) == 1 else None,
        overall=_estimate(walked, k, seed),
        by_version={version: _estimate(part, k, seed) for version, part in versions},
        by_domain={domain: _estimate(part, k, seed) for domain, part in domains},
        skipped=dict(skipped),
    )


def _with_baseline(
    report: EvalReport,
    walked: Sequence[WalkedWindow],
    baseline: Sequence[WalkedWindow],
    digest: str,
    k: int,
    seed: int,
) -> EvalReport:
    groups = sorted({w.meta.group_id for w in walked})
    gain = paired_gain(*_group_sums(walked, groups), *_group_sums(baseline, groups), k=k, seed=seed)
    return report.model_copy(
        update={"baseline": digest, "baseline_overall": _estimate(baseline, k, seed), "gain": gain}
    )


def _method_of(artifact: DraftArtifact, folder: Path, methods: Mapping[str, DraftMethod]) -> DraftMethod:
    name = artifact.manifest.method
    if name not in methods:
        raise InputError(f"{folder} is a {name!r} draft; known methods: {', '.join(sorted(methods))}")
    return methods[name]


def _usable_windows(
    lake: "Lake", rows: Sequence[Mapping[str, Any]], mode: TauMode, skipped: Counter[str]
) -> list[int]:
    """Indices of windows that can be walked, as far as their tokens say; the others are counted by reason."""
    if mode == "sampled-prob":
        raise InputError("mode 'sampled-prob' is not offered: engines draft by argmax; use 'sampled-onehot'")
    usable = []
    walked: set[tuple[int, str]] = set()
    for index, row in enumerate(rows):
        reason = _skip_row(row, mode)
        sample = (row["target_version"], row["sample_id"])
        if reason is None and sample in walked:
            reason = "recorded_twice"  # with other layers or dtype: its rounds would count twice
        if reason is None and lake.read_tokens(row).sampled_mask[0]:
            reason = "no_prompt"
        if reason is None:
            walked.add(sample)
            usable.append(index)
        else:
            skipped[reason] += 1
    return usable


def _skip_row(row: Mapping[str, Any], mode: TauMode) -> str | None:
    if row["start"] != 0 or row["num_rows"] != row["sequence_length"]:
        return "not_a_whole_sequence"
    if row["num_sampled"] == 0:
        return "no_sampled_token"
    if row["temperature"] is None:
        return "temperature_unknown"
    if (row["temperature"] == 0) != (mode == "greedy"):
        return "not_greedy" if mode == "greedy" else "not_sampled"
    return None


def walk_windows(
    reader: SelectionReader,
    feed: Feed,
    method: DraftMethod,
    model: torch.nn.Module,
    *,
    layer_ids: Sequence[int],
    k: int,
    skipped: Counter[str],
) -> Iterator[WalkedWindow]:
    """Walk whole-sequence windows as they are read; those with NaN or infinity are counted and left out."""
    for step in reader.read():
        windows, nonfinite = feed.finite(step.indices, step.windows)
        del step  # so that its memory is read into again
        if nonfinite:
            skipped["nonfinite_features"] += len(nonfinite)
        if not windows:
            continue
        batch = feed.batch(windows, layer_ids=layer_ids)
        with torch.no_grad():
            proposals = method.propose(model, batch, k).cpu().numpy()
        for window, rows in zip(windows, proposals, strict=True):
            yield WalkedWindow(window.meta, tuple(walk_window(window, rows, k)))


def walk_window(window: Window, proposals: NDArray[np.int64], k: int) -> list[Round]:
    """Rounds of every request in a whole-sequence window; ``proposals`` is ``[>= num_rows, k]``."""
    tokens = window.token_ids[:-1]
    spans = decoded_spans(window.sampled_mask[:-1])
    return [r for first, last in spans for r in walk(tokens, proposals, first=first, last=last, k=k)]


def _parts(
    walked: Sequence[WalkedWindow], key: Callable[[WindowMeta], Any]
) -> list[tuple[Any, list[WalkedWindow]]]:
    """Windows by ``key`` of their meta, in its order."""
    parts: dict[Any, list[WalkedWindow]] = {}
    for window in walked:
        parts.setdefault(key(window.meta), []).append(window)
    return sorted(parts.items())


def _group_sums(
    walked: Sequence[WalkedWindow], groups: Sequence[str]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rounds and accepted tokens of each group, in the order of ``groups``."""
    place = {group: i for i, group in enumerate(groups)}
    sums = np.zeros((2, len(groups)), np.int64)
    for window in walked:
        sums[:, place[window.meta.group_id]] += (len(window.rounds), sum(r.accepted for r in window.rounds))
    return sums[0], sums[1]


def _estimate(walked: Sequence[WalkedWindow], k: int, seed: int) -> TauEstimate:
    counts = WalkCounts.of([r for window in walked for r in window.rounds], k)
    groups = sorted({w.meta.group_id for w in walked})
    return TauEstimate(
        tau=bootstrap_tau(*_group_sums(walked, groups), k=k, seed=seed),
        rounds=counts.rounds,
        accepted=counts.accepted,
        accepted_per_position=counts.per_position,
        groups=len(groups),
    )
