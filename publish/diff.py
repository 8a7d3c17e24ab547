"""What differs between two artifacts: settings, provenance, tensors, and measured tau."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import deserialize

from features.bfloat16 import bf16_to_float32
from features.digests import tensor_digest
from training.artifact import Document, EvalReport, Interval

Change = Literal["added", "removed", "changed", "reshaped"]


class ValueChange(Document):
    """One setting with its two values; an absent one is None and named in ``absent``."""

    key: str
    """Dotted path: ``eagle_config.eagle_aux_hidden_state_layer_ids``."""
    a: Any
    b: Any
    absent: Literal["a", "b"] | None = None


class TensorChange(Document):
    """One tensor that is not the same on both sides."""

    name: str
    change: Change
    a: str | None
    """Element type and shape, ``F32[320, 64]``."""
    b: str | None
    relative_l2: float | None
    """``|a - b| / |a|`` in float64; None where the two cannot be subtracted or a is all zero."""


class TauEvidence(Document):
    """Evaluations of both sides under equal conditions."""

    mode: str
    num_speculative_tokens: int
    temperature: float | None
    head_version: int
    selection_digest: str
    a: Interval
    b: Interval


class ArtifactDiff(Document):
    """Differences from artifact ``a`` to artifact ``b``."""

    a: str
    b: str
    config: tuple[ValueChange, ...]
    manifest: tuple[ValueChange, ...]
    tensors: tuple[TensorChange, ...]
    tensors_equal: int
    """Tensors that are the same bit for bit."""
    tau: tuple[TauEvidence, ...]
    """Only pairs measured on the same selection, mode, K, temperature and head."""
    gain: Interval | None
    """tau(b) - tau(a), paired, when an evaluation of b has a as its baseline."""


def diff_values(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[ValueChange, ...]:
    """Settings that differ, by dotted key; nested mappings are compared inside, lists whole."""
    flat_a, flat_b = dict(_flatten(a)), dict(_flatten(b))
    changes = []
    for key in sorted(flat_a.keys() | flat_b.keys()):
        absent: Literal["a", "b"] | None = "a" if key not in flat_a else "b" if key not in flat_b else None
        if absent or flat_a[key] != flat_b[key]:
            changes.append(ValueChange(key=key, a=flat_a.get(key), b=flat_b.get(key), absent=absent))
    return tuple(changes)


def diff_tensors(a: bytes, b: bytes) -> tuple[tuple[TensorChange, ...], int]:
    """Tensors that differ between two safetensors files, and the number of equal ones."""
    views_a, views_b = dict(deserialize(a)), dict(deserialize(b))
    changes, equal = [], 0
    for name in sorted(views_a.keys() | views_b.keys()):
        left, right = views_a.get(name), views_b.get(name)
        if left is not None and right is not None and _digest(left) == _digest(right):
            equal += 1
        else:
            changes.append(_tensor_change(name, left, right))
    return tuple(changes), equal


def diff_tau(a: Iterable[EvalReport], b: Iterable[EvalReport]) -> tuple[TauEvidence, ...]:
    """Pairs of evaluations that may be compared, ordered by head version, mode and selection."""
    by_condition = {_condition(report): report for report in a}
    pairs = [(by_condition[_condition(report)], report) for report in b if _condition(report) in by_condition]
    evidence = [
        TauEvidence(
            mode=left.mode,
            num_speculative_tokens=left.num_speculative_tokens,
            temperature=left.temperature,
            head_version=left.head_version,
            selection_digest=left.selection_digest,
            a=left.overall.tau,
            b=right.overall.tau,
        )
        for left, right in pairs
    ]
    return tuple(sorted(evidence, key=lambda e: (e.head_version, e.mode, e.selection_digest)))


def gain_over(a: str, b_reports: Iterable[EvalReport]) -> Interval | None:
    """The paired gain of b over a at the newest head, when b was evaluated against a."""
    against = [r for r in b_reports if r.baseline == a and r.gain is not None]
    newest = max(against, key=lambda r: (r.head_version, r.overall.rounds), default=None)
    return newest.gain if newest else None


def _flatten(value: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flatten(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def _digest(view: Mapping[str, Any]) -> str:
    return tensor_digest(view["dtype"], view["shape"], view["data"])


def _tensor_change(name: str, a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> TensorChange:
    change: Change
    distance = None
    if a is None or b is None:
        change = "added" if a is None else "removed"
    elif (a["dtype"], a["shape"]) != (b["dtype"], b["shape"]):
        change = "reshaped"
    else:
        change, distance = "changed", _relative_l2(a, b)
    return TensorChange(name=name, change=change, a=_describe(a), b=_describe(b), relative_l2=distance)


def _describe(view: Mapping[str, Any] | None) -> str | None:
    return None if view is None else f"{view['dtype']}{list(view['shape'])}"


def _relative_l2(a: Mapping[str, Any], b: Mapping[str, Any]) -> float | None:
    left, right = _values(a), _values(b)
    if left is None or right is None:
        return None
    norm = float(np.linalg.norm(left))
    distance = float(np.linalg.norm(left - right))
    return distance / norm if norm > 0 and np.isfinite(distance / norm) else None


def _values(view: Mapping[str, Any]) -> NDArray[np.float64] | None:
    """A tensor's elements as float64; None for element types numpy has no match for."""
    raw = view["data"]
    if view["dtype"] == "BF16":
        return bf16_to_float32(np.frombuffer(raw, "<u2")).astype(np.float64)
    names = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "u1", "BOOL": "u1"}
    kind = names.get(view["dtype"])
    return None if kind is None else np.frombuffer(raw, kind).astype(np.float64)


def _condition(report: EvalReport) -> tuple[str, str, int, float | None, int]:
    return (
        report.selection_digest,
        report.mode,
        report.num_speculative_tokens,
        report.temperature,
        report.head_version,
    )
