"""What people see of records that are too deep for a table: one flat row each."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.cli.tables import SHORT_DIGEST, cell
from publish.evidence import Evidence, EvidenceKind
from publish.registry import ArtifactDescription, ArtifactSummary


def version_rows(versions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Target versions in ``ls``; a column that no version has a value for is left out."""
    return [
        {name: value for name, value in row.items() if any(other[name] is not None for other in versions)}
        for row in versions
    ]


def draft_row(draft: ArtifactSummary) -> dict[str, Any]:
    """A draft in ``registry ls``."""
    ends = dict.fromkeys((*draft.versions[:1], *draft.versions[-1:]))
    return {
        "digest": draft.digest,
        "state": draft.state,
        "method": draft.method,
        "versions": "..".join(f"v{number}" for number in ends),
        "parent": draft.parent,
        "steps": draft.steps,
        "tau": draft.tau,
        "measured on": None if draft.tau_head_version is None else f"v{draft.tau_head_version}",
    }


def draft_page(draft: ArtifactDescription) -> dict[str, Any]:
    """A draft in ``registry show``: as it is, with a line for each document about it."""
    page = draft.model_dump(mode="json", exclude={"evidence"})
    return page | {"evidence": [evidence_row(item) for item in draft.evidence]}


def evidence_row(evidence: Evidence) -> dict[str, Any]:
    """A document about a draft."""
    return {"id": evidence.id, "kind": evidence.kind, "what": _summary(evidence.kind, evidence.document)}


def engine_row(state: Mapping[str, Any]) -> dict[str, Any]:
    """An engine in ``status``."""
    draft = "no answer" if state["error"] else state["draft_artifact"] or "as started"
    return {
        "engine": state["engine"],
        "vllm": state.get("vllm_version"),
        "method": state.get("method"),
        "K": state.get("num_speculative_tokens"),
        "draft": draft,
        "serves production": state["serves_production"],
        "target": state.get("target_fingerprint"),
    }


def _summary(kind: str, document: Mapping[str, Any]) -> str:
    match kind:
        case EvidenceKind.EVALUATION:
            gain, baseline = document.get("gain"), document.get("baseline")
            against = f"; gain {cell(gain)} over {baseline[:SHORT_DIGEST]}" if gain and baseline else ""
            return f"tau {cell(document['overall'])} on v{document['head_version']}{against}"
        case EvidenceKind.GATE:
            refused = [check["name"] for check in document["checks"] if not check["passed"]]
            return f"refused for {', '.join(refused)}" if refused else "passed"
        case EvidenceKind.DECISION:
            forced = " against the gate" if document.get("forced") else ""
            return f"{document['decision']}{forced} by {document['reviewer']}: {document['reason']}"
    return cell({name: value for name, value in document.items() if name != "kind"}, short=True)
