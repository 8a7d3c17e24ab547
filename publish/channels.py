"""Channels: which draft is to be served, as a ledger that grows by compare-and-swap.

A channel is the sequence of objects ``<seq>.json`` under one prefix, from 1 without gaps.
Creating ``seq = n + 1`` is the compare-and-swap: the store lets one writer create it, and
everybody else learns who it was. Nothing is ever rewritten, so the sequence is also the
history, and the draft in production is the artifact of the last entry.
"""

import json
import logging
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Literal
from urllib.parse import quote

from pydantic import Field

from features.digests import canonical_json
from features.errors import CorruptDataError, InputError, ObjectExistsError, RegistryConflictError
from features.storage import Store
from publish.evidence import Decision, Stated, UtcDatetime, last_decision
from training.artifact import Document

logger = logging.getLogger(__name__)

PRODUCTION = "production"
"""The channel that engines follow unless told otherwise."""

SEQ_DIGITS = 9

Action = Literal["publish", "rollback"]


class ArtifactState(StrEnum):
    """Where an artifact stands; derived from ledger and evidence, stored nowhere."""

    CANDIDATE = "candidate"
    """Registered, and nobody has decided on it."""
    APPROVED = "approved"
    PRODUCTION = "production"
    """The last entry of the production channel, whatever was decided since: it is what is served."""
    RETIRED = "retired"
    """Was in production and is no longer."""
    REJECTED = "rejected"


class ChannelEntry(Document):
    """One move of a channel."""

    seq: Annotated[int, Field(ge=1)]
    target_id: str
    method: str
    channel: str
    artifact: str
    previous: str | None
    """Artifact of the entry before; None for the first."""
    action: Action
    reason: Stated
    by: Stated
    at: UtcDatetime
    request_id: str
    """Names the attempt: meeting one's own request in the ledger is success, not a conflict."""


def path_segment(text: str) -> str:
    """``text`` as one path segment: a ``/`` in a target's or engine's name makes no folder.

    Raises:
        InputError: empty, or a name with a meaning of its own to a file system.
    """
    if text in ("", ".", ".."):
        raise InputError(f"{text!r} cannot be used as a name in the registry; give a non-empty plain name")
    return quote(text, safe="")


class Channel:
    """One channel of one target and method. Cheap to make; holds no state of its own."""

    def __init__(
        self,
        store: Store,
        *,
        target_id: str,
        method: str,
        channel: str,
        admit: Callable[[str, Action, Sequence[ChannelEntry]], None],
    ) -> None:
        """``admit(artifact, action, history)`` raises when the move may not follow the history."""
        self._store = store
        self._admit = admit
        self.target_id, self.method, self.name = target_id, method, channel
        segments = "/".join(path_segment(part) for part in (target_id, method, channel))
        self._prefix = f"registry/channels/{segments}"

    def __str__(self) -> str:
        return f"{self.target_id}/{self.method}/{self.name}"

    def history(self) -> tuple[ChannelEntry, ...]:
        """Every entry, oldest first; each call reads the store anew.

        Raises:
            CorruptDataError: an entry is missing, unreadable, or does not follow the one before.
        """
        entries = tuple(self._read(seq) for seq in range(1, self._last_seq() + 1))
        for before, entry in pairwise(entries):
            if entry.previous != before.artifact:
                raise CorruptDataError(
                    f"channel {self}: entry {entry.seq} follows artifact {entry.previous}, but entry "
                    f"{before.seq} names {before.artifact}. The ledger was altered; restore it from a copy."
                )
        return entries

    def head(self) -> ChannelEntry | None:
        """The last entry, or None for a channel that was never moved."""
        seq = self._last_seq()
        return self._read(seq) if seq else None

    def check(self, artifact: str, action: Action) -> None:
        """Raise what ``advance`` would raise now, and move nothing: to ask before engines are touched.

        Raises:
            GateRefusedError: the artifact is not approved, or was compared with another baseline.
            InputError: unknown artifact, or nothing to move.
        """
        self._admit(artifact, action, self.history())

    def advance(
        self,
        *,
        expected_seq: int,
        artifact: str,
        action: Action,
        reason: str,
        by: str,
        at: datetime,
        request_id: str | None = None,
    ) -> ChannelEntry:
        """Move the channel to ``artifact`` by creating entry ``expected_seq + 1``.

        Args:
            expected_seq: ``seq`` of the head this decision was made on; 0 for an empty channel.
            artifact: digest of a registered artifact.
            action: ``publish`` takes an approved artifact, ``rollback`` one that was here before.
            reason: why, for the ledger.
            by: who.
            at: aware time of the decision.
            request_id: stable name of the attempt, when the caller may run again after a crash:
                the same id again returns the entry it already made. Default: a fresh one.

        Raises:
            RegistryConflictError: somebody else moved the channel first; names them.
            GateRefusedError: the artifact is not approved, or was compared with another baseline.
            InputError: unknown artifact, or nothing to move.
        """
        history = self.history()
        request_id = request_id or uuid.uuid4().hex
        if len(history) > expected_seq:
            return self._own_or_conflict(history[expected_seq], artifact, request_id)
        if len(history) < expected_seq:
            raise InputError(
                f"channel {self} is at entry {len(history)}; entry {expected_seq} was expected and does "
                f"not exist. Read the head again: draftlake status"
            )
        entry = ChannelEntry(
            seq=expected_seq + 1,
            target_id=self.target_id,
            method=self.method,
            channel=self.name,
            artifact=artifact,
            previous=history[-1].artifact if history else None,
            action=action,
            reason=reason,
            by=by,
            at=at,
            request_id=request_id,
        )
        self._admit(artifact, action, history)
        try:
            self._store.create(self._path(entry.seq), canonical_json(entry.model_dump(mode="json")))
        except ObjectExistsError:
            return self._own_or_conflict(self._read(entry.seq), artifact, request_id)
        logger.info("channel %s moved to %s by %s (entry %d, %s)", self, artifact, by, entry.seq, action)
        return entry

    def _own_or_conflict(self, winner: ChannelEntry, artifact: str, request_id: str) -> ChannelEntry:
        if winner.request_id == request_id and winner.artifact == artifact:
            return winner
        raise RegistryConflictError(
            f"channel {self}: entry {winner.seq} was taken by {winner.by!r} at {winner.at.isoformat()} "
            f"({winner.action} of {winner.artifact[:12]}: {winner.reason}). Nothing was changed; look at "
            f"the new head (draftlake status) and decide again."
        )

    def _path(self, seq: int) -> str:
        return f"{self._prefix}/{seq:0{SEQ_DIGITS}d}.json"

    def _last_seq(self) -> int:
        entry_path = re.compile(re.escape(f"{self._prefix}/") + rf"(\d{{{SEQ_DIGITS}}})\.json")
        matches = (entry_path.fullmatch(path) for path in self._store.list(self._prefix))
        seqs = sorted(int(match[1]) for match in matches if match)
        if seqs != list(range(1, len(seqs) + 1)):
            missing = sorted(set(range(1, seqs[-1])) - set(seqs))
            raise CorruptDataError(
                f"channel {self}: entries {missing} are missing below entry {seqs[-1]} in {self._prefix}. "
                f"Entries are never deleted; restore them from a copy."
            )
        return len(seqs)

    def _read(self, seq: int) -> ChannelEntry:
        path = self._path(seq)
        try:
            entry = ChannelEntry.model_validate(json.loads(self._store.read(path)))
        except (FileNotFoundError, ValueError) as error:
            raise CorruptDataError(
                f"channel {self}: entry {path} cannot be read: {error}. Restore it from a copy."
            ) from error
        if (entry.seq, entry.target_id, entry.method, entry.channel) != (
            seq,
            self.target_id,
            self.method,
            self.name,
        ):
            raise CorruptDataError(
                f"channel {self}: {path} holds entry {entry.seq} of "
                f"{entry.target_id}/{entry.method}/{entry.channel}. Restore it from a copy."
            )
        return entry


def rollback_target(history: Sequence[ChannelEntry]) -> ChannelEntry | None:
    """The entry that a rollback of the head returns to; None when there is nothing before it.

    Publishing stacks up and a rollback takes down to the artifact it names, so that rolling
    back twice goes two drafts back instead of forth and back between two.
    """
    stack: list[ChannelEntry] = []
    for entry in history:
        known = [i for i, below in enumerate(stack) if below.artifact == entry.artifact]
        if entry.action == "rollback" and known:
            del stack[known[-1] + 1 :]
        else:
            stack.append(entry)
    return stack[-2] if len(stack) > 1 else None


def derive_state(
    digest: str, decisions: Iterable[Decision], production: Sequence[ChannelEntry]
) -> ArtifactState:
    """State of an artifact, a pure function of its decisions and the production ledger."""
    if production and production[-1].artifact == digest:
        return ArtifactState.PRODUCTION
    decision = last_decision(decisions)
    if decision is not None and decision.decision == "reject":
        return ArtifactState.REJECTED
    if any(entry.artifact == digest for entry in production):
        return ArtifactState.RETIRED
    return ArtifactState.APPROVED if decision is not None else ArtifactState.CANDIDATE
