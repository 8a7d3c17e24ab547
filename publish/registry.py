"""The registry: artifacts by digest, evidence about them, and channels that name what is served.

Layout under the lake's store::

    registry/artifacts/<digest>/{model.safetensors,config.json,manifest.json}
    registry/evidence/<digest>/<id>.json
    registry/channels/<target>/<method>/<channel>/<seq>.json

Every object is created once and never changed. Where an artifact stands is a pure function of
the evidence and the ledger; there is no status field that could disagree with them.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from pydantic import BaseModel

from features.digests import canonical_json
from features.errors import CorruptDataError, GateRefusedError, InputError, ObjectExistsError
from publish.artifacts import ArtifactStore
from publish.channels import PRODUCTION, Action, ArtifactState, Channel, ChannelEntry, derive_state
from publish.diff import ArtifactDiff, diff_tau, diff_tensors, diff_values, gain_over
from publish.evidence import Decision, Evidence, EvidenceKind, as_document, evidence_id, last_decision
from publish.gates import GateDecision, decide
from training.artifact import (
    WEIGHTS_FILE,
    Document,
    EvalReport,
    TauEstimate,
    TrainingManifest,
)

logger = logging.getLogger(__name__)

_EVIDENCE = "registry/evidence"

_DOCUMENT_TYPES: Mapping[str, type[Document]] = {
    EvidenceKind.EVALUATION: EvalReport,
    EvidenceKind.GATE: GateDecision,
    EvidenceKind.DECISION: Decision,
}
"""Kinds whose content the registry acts on, and therefore checks."""


class ArtifactSummary(Document):
    """One line of ``draftlake registry ls``."""

    digest: str
    state: ArtifactState
    method: str
    versions: tuple[int, ...]
    """Target versions it was trained on."""
    lake_revision: str
    parent: str | None
    steps: int
    tau: TauEstimate | None
    """On the newest version it was evaluated on, with that version's head."""
    tau_head_version: int | None


class ArtifactDescription(Document):
    """All that the registry knows of one artifact."""

    digest: str
    state: ArtifactState
    weights_digest: str
    tensors: int
    config: dict[str, Any]
    manifest: TrainingManifest
    evidence: tuple[Evidence, ...]
    """Every document, ordered by time and id."""


class Registry(ArtifactStore):
    """Artifacts of one target, the evidence about them, and the channels they are published to."""

    # -- evidence

    def add_evidence(self, digest: str, document: BaseModel | Mapping[str, Any]) -> str:
        """File a document about an artifact and return its id; filing it again is harmless.

        Raises:
            InputError: no such artifact, an unknown kind, or a document about another artifact.
        """
        self._known(digest)
        plain = as_document(document)
        if plain.get("artifact", digest) != digest:
            raise InputError(
                f"this {plain['kind']} is about artifact {plain['artifact']!r}; it cannot be filed under {digest}"
            )
        if expected := _DOCUMENT_TYPES.get(plain["kind"]):
            try:
                expected.model_validate(plain)
            except ValueError as error:
                raise InputError(f"this is no valid {plain['kind']} document: {error}") from error
            if plain.get("artifact") != digest:
                raise InputError(
                    f"a {plain['kind']} names its artifact; this one names none: expected {digest}"
                )
        document_id = evidence_id(plain)
        try:
            self._store.create(f"{_EVIDENCE}/{digest}/{document_id}.json", canonical_json(plain))
        except ObjectExistsError:
            logger.debug("evidence %s about %s is filed already", document_id, digest)
        return document_id

    def evidence(self, digest: str, kind: EvidenceKind | str | None = None) -> tuple[Evidence, ...]:
        """Documents about an artifact, of one kind when named, ordered by time and id.

        Raises:
            InputError: there is no such artifact.
            CorruptDataError: a document does not match its id.
        """
        prefix = f"{_EVIDENCE}/{self._known(digest)}"
        name = re.compile(re.escape(prefix) + r"/([0-9a-f]{64})\.json")
        matches = [match for path in self._store.list(prefix) if (match := name.fullmatch(path))]
        found = [self._read_evidence(match[0], match[1], digest) for match in matches]
        chosen = [item for item in found if kind is None or item.kind == kind]
        return tuple(sorted(chosen, key=lambda item: (str(item.document.get("at", "")), item.id)))

    def evaluations(self, digest: str) -> tuple[EvalReport, ...]:
        """Every evaluation on file, by head version and id."""
        found = self.evidence(digest, EvidenceKind.EVALUATION)
        reports = [EvalReport.model_validate(item.document) for item in found]
        return tuple(sorted(reports, key=lambda report: report.head_version))

    def decisions(self, digest: str) -> tuple[Decision, ...]:
        """Every approval and rejection on file, oldest first."""
        found = self.evidence(digest, EvidenceKind.DECISION)
        return tuple(sorted((Decision.model_validate(e.document) for e in found), key=lambda d: d.at))

    # -- decisions

    def approve(self, digest: str, *, reviewer: str, reason: str, at: datetime, force: bool = False) -> str:
        """Approve an artifact for publishing; returns the decision's id.

        The approval rests on a passing gate whose evaluation is on file and whose baseline is
        the draft in production now. With ``force`` it is given all the same, and the decision
        records what it set aside.

        Raises:
            GateRefusedError: no gate allows it.
            InputError: no such artifact, an empty reviewer or reason, or a time that is not
                later than the last decision's.
        """
        passing, refusals = self._passing_gate(digest)
        if passing is None and not force:
            lines = "\n  ".join(refusals)
            raise GateRefusedError(
                f"artifact {digest[:12]} cannot be approved:\n  {lines}\n"
                f"Evaluate it on held-out groups of the newest version against the draft in production "
                f"(draftlake eval), or approve it with --force and a reason, which is recorded."
            )
        fields: dict[str, Any] = {"decision": "approve", "forced": passing is None}
        if passing is None:
            fields["overruled"] = refusals
        else:
            gate_id, gate = passing
            fields |= {"gate": gate_id, "baseline": gate.baseline}
        return self._file_decision(digest, fields | {"reviewer": reviewer, "reason": reason, "at": at})

    def reject(self, digest: str, *, reviewer: str, reason: str, at: datetime) -> str:
        """Reject an artifact; returns the decision's id. A draft in production stays until rolled back.

        Raises:
            InputError: as for ``approve``.
        """
        return self._file_decision(
            digest, {"decision": "reject", "reviewer": reviewer, "reason": reason, "at": at}
        )

    # -- channels and state

    def channel(self, method: str, channel: str = PRODUCTION) -> Channel:
        """A channel of this registry's target."""
        admit = partial(self._admit, channel, method)
        return Channel(self._store, target_id=self.target_id, method=method, channel=channel, admit=admit)

    def state(self, digest: str) -> ArtifactState:
        """Where an artifact stands, derived from its decisions and the production ledger."""
        history = self.channel(self.manifest(digest).method).history()
        return derive_state(digest, self.decisions(digest), history)

    def list(self) -> tuple[ArtifactSummary, ...]:
        """Every artifact with its state, in the order of the newest version trained on."""
        summaries = []
        histories: dict[str, tuple[ChannelEntry, ...]] = {}
        for digest in self.digests():
            manifest = self.manifest(digest)
            if manifest.method not in histories:
                histories[manifest.method] = self.channel(manifest.method).history()
            newest = max(self.evaluations(digest), key=lambda report: report.head_version, default=None)
            summaries.append(
                ArtifactSummary(
                    digest=digest,
                    state=derive_state(digest, self.decisions(digest), histories[manifest.method]),
                    method=manifest.method,
                    versions=manifest.versions,
                    lake_revision=manifest.lake_revision,
                    parent=manifest.parent,
                    steps=manifest.steps,
                    tau=newest.by_version[newest.head_version] if newest else None,
                    tau_head_version=newest.head_version if newest else None,
                )
            )
        return tuple(sorted(summaries, key=lambda s: (s.method, s.versions[-1:], s.digest)))

    def describe(self, digest: str) -> ArtifactDescription:
        """One artifact with everything filed about it; its weights are checked on the way.

        Raises:
            InputError: there is no such artifact.
            CorruptDataError: it was altered.
        """
        artifact = self.artifact(digest)
        return ArtifactDescription(
            digest=digest,
            state=self.state(digest),
            weights_digest=artifact.weights_digest,
            tensors=len(artifact.tensors),
            config=artifact.config,
            manifest=artifact.manifest,
            evidence=self.evidence(digest),
        )

    def diff(self, a: str, b: str) -> ArtifactDiff:
        """What differs from artifact ``a`` to artifact ``b``, measured tau included.

        Raises:
            InputError: there is no such artifact.
            CorruptDataError: one of them was altered.
        """
        files_a, left = self._checked(a)
        files_b, right = self._checked(b)
        tensors, equal = diff_tensors(files_a[WEIGHTS_FILE], files_b[WEIGHTS_FILE])
        reports = self.evaluations(b)
        return ArtifactDiff(
            a=a,
            b=b,
            config=diff_values(left.config, right.config),
            manifest=diff_values(
                left.manifest.model_dump(mode="json"), right.manifest.model_dump(mode="json")
            ),
            tensors=tensors,
            tensors_equal=equal,
            tau=diff_tau(self.evaluations(a), reports),
            gain=gain_over(a, reports),
        )

    # -- inside

    def _read_evidence(self, path: str, document_id: str, digest: str) -> Evidence:
        try:
            document = json.loads(self._store.read(path))
            found = evidence_id(document)
        except (FileNotFoundError, ValueError, InputError) as error:
            raise CorruptDataError(f"{path} cannot be read: {error}. Restore it from a copy.") from error
        if found != document_id:
            raise CorruptDataError(
                f"{path} was altered: its content digests to {found}. Restore it from a copy."
            )
        kind = str(document["kind"])
        about = document.get("artifact", None if kind in _DOCUMENT_TYPES else digest)
        if about != digest:
            raise CorruptDataError(
                f"{path} is a {kind} about artifact {about}, and lies with those about {digest}: it was moved or "
                f"copied. Remove it from there; evidence about one artifact never counts for another."
            )
        return Evidence(id=document_id, kind=kind, document=document)

    def _passing_gate(self, digest: str) -> tuple[tuple[str, GateDecision] | None, tuple[str, ...]]:
        """The gate an approval may rest on, with its id, or why there is none.

        Gates over the newest version decide; each is judged again from its evaluation, so a
        document that only claims to have passed does not count.
        """
        filed = {e.id: e.document for e in self.evidence(digest)}
        gates = {
            id_: GateDecision.model_validate(document)
            for id_, document in filed.items()
            if document["kind"] == EvidenceKind.GATE
        }
        head = self.channel(self.manifest(digest).method).head()
        newest = max((gate.newest_version for gate in gates.values()), default=None)
        refusals = [] if gates else ["no gate decision is on file for it"]
        for id_, gate in gates.items():
            if gate.newest_version != newest:
                continue
            report = filed.get(gate.evaluation)
            if report is None:
                refusals.append(f"the evaluation {gate.evaluation[:12]} that a gate rests on is not on file")
            elif not _follows(gate, EvalReport.model_validate(report)):
                refusals.append(f"a gate document does not follow from evaluation {gate.evaluation[:12]}")
            elif not gate.passed:
                refusals.extend(gate.reasons)
            elif head is not None and head.artifact not in (digest, gate.baseline):
                refusals.append(_stale_baseline(gate.baseline, head.artifact))
            else:
                return (id_, gate), ()
        return None, tuple(refusals)

    def _file_decision(self, digest: str, fields: dict[str, Any]) -> str:
        earlier = self.decisions(digest)
        try:
            decision = Decision.model_validate({**fields, "artifact": digest})
        except ValueError as error:
            raise InputError(f"a decision needs a reviewer, a reason and an aware time: {error}") from error
        if earlier and decision not in earlier and decision.at <= earlier[-1].at:
            # An older time would be filed and yet not hold, since the latest decision does.
            raise InputError(
                f"artifact {digest[:12]} was decided on at {earlier[-1].at.isoformat()} by "
                f"{earlier[-1].reviewer!r}; a decision dated {decision.at.isoformat()} would not count. "
                f"Check this machine's clock."
            )
        document_id = self.add_evidence(digest, decision)
        logger.info("artifact %s: %s by %s", digest, decision.decision, decision.reviewer)
        return document_id

    def _admit(
        self, channel: str, method: str, artifact: str, action: Action, history: Sequence[ChannelEntry]
    ) -> None:
        """Refuse a channel move that evidence does not allow. The store's create is still the fence."""
        manifest = self.manifest(artifact)
        short = artifact[:12]
        if (manifest.method, manifest.target_id) != (method, self.target_id):
            raise InputError(
                f"artifact {short} is a draft of {manifest.target_id!r} by method {manifest.method} and cannot "
                f"enter channel {self.target_id}/{method}/{channel}"
            )
        head = history[-1] if history else None
        if head is not None and head.artifact == artifact:
            raise InputError(f"artifact {short} is the head of {channel!r} already (entry {head.seq})")
        decision = last_decision(self.decisions(artifact))
        if decision is None or decision.decision == "reject":
            found = "nobody has decided on it" if decision is None else f"{decision.reviewer!r} rejected it"
            raise GateRefusedError(
                f"artifact {short} is not approved ({found}); approve it first: draftlake approve {short}"
            )
        if action == "rollback" and all(past.artifact != artifact for past in history):
            raise InputError(f"artifact {short} was never in channel {channel!r}; publish it instead")
        compared = decision.forced or head is None or decision.baseline == head.artifact
        if action == "publish" and head is not None and not compared:
            raise GateRefusedError(
                f"artifact {short}: {_stale_baseline(decision.baseline, head.artifact)}. "
                f"Evaluate and approve it again, or roll back if it was in production before."
            )


def _follows(gate: GateDecision, report: EvalReport) -> bool:
    """Whether judging the evaluation again comes to the same checks and the same verdict."""
    again = decide(report, gate.spec, gate.newest_version)
    outcome = [[(check.name, check.passed) for check in each.checks] for each in (gate, again)]
    return outcome[0] == outcome[1] and gate.passed == again.passed


def _stale_baseline(baseline: str | None, head: str) -> str:
    compared = baseline[:12] if baseline else "nothing"
    return f"it was compared with {compared}, and production is {head[:12]} now"
