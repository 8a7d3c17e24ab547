"""Documents about artifacts, kept beside them and never inside their digest.

A document is JSON with a ``kind``. Its id is the digest of its content, so that filing the
same document twice is one document. Documents are created once and never changed: what is
believed of an artifact is derived from the whole set, not from a field that somebody edits.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, BaseModel, StringConstraints

from features.digests import canonical_json
from features.errors import InputError
from training.artifact import Document


def _to_utc(moment: datetime) -> datetime:
    return moment.astimezone(UTC)


UtcDatetime = Annotated[AwareDatetime, AfterValidator(_to_utc)]
"""An aware time, stored in UTC. A time without a zone is refused."""

Stated = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
"""Text that somebody has to have written: an empty reviewer or reason is refused."""


class EvidenceKind(StrEnum):
    """What a document about an artifact says."""

    EVALUATION = "evaluation"
    """Offline tau on held-out groups (``training.artifact.EvalReport``)."""
    GATE = "gate"
    """A gate's verdict over one evaluation (``publish.gates.GateDecision``)."""
    DECISION = "decision"
    """Somebody approved or rejected it (``Decision``)."""
    PUBLICATION = "publication"
    """The report of a swap."""
    CALIBRATION = "calibration"
    """Offline tau against an engine's counters."""


class Decision(Document):
    """A reviewer's word on an artifact. ``decision`` has no default: an empty form approves nothing."""

    kind: Literal["decision"] = "decision"
    artifact: str | None = None
    """Digest of what was decided on. Every filed decision names it, so that none holds for another artifact."""
    decision: Literal["approve", "reject"]
    reviewer: Stated
    reason: Stated
    at: UtcDatetime
    gate: str | None = None
    """Id of the passing gate document that an approval rests on."""
    baseline: str | None = None
    """Artifact that gate compared with: an approval holds against this one only."""
    forced: bool = False
    """Approved although no gate allowed it."""
    overruled: tuple[str, ...] = ()
    """What a forced approval set aside."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One stored document with its id."""

    id: str
    kind: str
    document: dict[str, Any]


def as_document(document: BaseModel | Mapping[str, Any]) -> dict[str, Any]:
    """The document as plain JSON values, exactly as it will read back.

    Raises:
        InputError: it has no ``kind``, or holds something JSON cannot (a NaN, a path, a time object).
    """
    raw = document.model_dump(mode="json") if isinstance(document, BaseModel) else dict(document)
    try:
        plain: dict[str, Any] = json.loads(json.dumps(raw, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"a document of kind {raw.get('kind')!r} cannot be stored as JSON: {error}. "
            f"Use null for an unknown number and ISO 8601 text for a time."
        ) from error
    if plain.get("kind") not in set(EvidenceKind):
        known = ", ".join(EvidenceKind)
        raise InputError(f"a document needs a 'kind' out of {known}; found {plain.get('kind')!r}")
    return plain


def evidence_id(document: BaseModel | Mapping[str, Any]) -> str:
    """Digest of a document's content (64 hex digits): equal documents have equal ids."""
    return hashlib.sha256(canonical_json(as_document(document))).hexdigest()


def last_decision(decisions: Iterable[Decision]) -> Decision | None:
    """The decision that holds: the latest one; at the same instant a rejection outweighs an approval."""
    return max(decisions, key=lambda d: (d.at, d.decision == "reject"), default=None)
