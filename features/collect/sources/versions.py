"""Which weights sampled a rollout: data, or null.

Trust falls from recorded spans over recorded bounds and one recorded label to the step of a run
that the user says was synchronous. Mixed and unknown are null.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from features.collect.rollout import VersionSpan

LabelReader = Callable[[str], int | None]


@dataclass(frozen=True, slots=True)
class VersionFacts:
    """What a record says about its weights."""

    version: int | None = None
    version_source: str = "unknown"
    version_min: int | None = None
    version_max: int | None = None
    version_label: str | None = None
    version_spans: tuple[VersionSpan, ...] | None = None
    span_versions: tuple[int | None, ...] = ()
    """Version of each span; null where a label is no number."""

    @property
    def says_nothing(self) -> bool:
        """Whether nothing recorded would contradict an inferred version."""
        return self.version_min is None and self.version is None and not self.version_spans


UNKNOWN = VersionFacts()


def numeric_label(offset: int = 0) -> LabelReader:
    """Reads a decimal label; ``offset`` is added, and anything else has no version."""

    def read(label: str) -> int | None:
        # isascii: str.isdigit takes digits of other scripts. The lake counts versions in 9 digits.
        if not (label.isascii() and label.isdigit() and len(label) <= 9):
            return None
        number = int(label) + offset
        return number if number >= 0 else None

    return read


def from_spans(spans: Sequence[VersionSpan], sampled: Sequence[bool], read: LabelReader) -> VersionFacts:
    """One version when every sampled token lies in a span and all labels mean the same."""
    versions = tuple(read(span.label) for span in spans)
    known = [v for v in versions if v is not None]
    covered = {i for span in spans for i in range(span.start, span.stop)}
    whole = len(known) == len(versions) and all(i in covered for i, s in enumerate(sampled) if s)
    labels = list(dict.fromkeys(span.label for span in spans))
    facts = VersionFacts(
        version_spans=tuple(spans),
        span_versions=versions,
        version_label=labels[0] if len(labels) == 1 else None,
    )
    return _bounded(facts, known, source="spans", whole=whole)


def from_bounds(low: int | None, high: int | None) -> VersionFacts:
    """Recorded first and last version of a trajectory."""
    known = [v for v in (low, high) if v is not None]
    return _bounded(UNKNOWN, known, source="min_max", whole=len(known) == 2)


def from_labels(labels: Sequence[str], read: LabelReader) -> VersionFacts:
    """Labels of the engine calls of a rollout, without places; two that differ are mixed."""
    distinct = list(dict.fromkeys(labels))
    known = [v for v in map(read, distinct) if v is not None]
    facts = VersionFacts(version_label=distinct[0] if len(distinct) == 1 else None)
    return _bounded(facts, known, source="label", whole=len(known) == len(distinct))


def inferred(step_version: int | None) -> VersionFacts:
    """From the step of a synchronous run."""
    if step_version is None or step_version < 0:
        return UNKNOWN
    return VersionFacts(version=step_version, version_source="inferred")


def named_by_user(
    facts: VersionFacts, version: int, sampled: tuple[bool, ...]
) -> tuple[VersionFacts, tuple[bool, ...]]:
    """Fill an unknown or mixed version, within what was recorded; never for tokens of another span.

    A version outside the recorded bounds contradicts the record, which stays as it is.
    """
    if facts.version is not None:
        return facts, sampled
    low, high = facts.version_min, facts.version_max
    if (low is not None and version < low) or (high is not None and version > high):
        return facts, sampled
    others = [
        span
        for span, known in zip(facts.version_spans or (), facts.span_versions, strict=True)
        if known is not None and known != version
    ]
    foreign = {i for span in others for i in range(span.start, span.stop)}
    kept = tuple(s and i not in foreign for i, s in enumerate(sampled))
    return replace(facts, version=version, version_source="user"), kept


def _bounded(facts: VersionFacts, known: Sequence[int], *, source: str, whole: bool) -> VersionFacts:
    """With the bounds of ``known``, and the version when they agree and nothing is missing."""
    if not known:
        return facts
    low, high = min(known), max(known)
    version = low if low == high and whole else None
    said = source if whole or low != high else "unknown"
    return replace(facts, version=version, version_min=low, version_max=high, version_source=said)
