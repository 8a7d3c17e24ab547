"""Head snapshots in a lake: named by their values, stored once, in full or as a delta to a keyframe.

A delta starts from a keyframe, not from the delta before it: reading a head takes two objects,
and a lost object takes at most one keyframe's row of heads with it. A chain of deltas would
store a quarter less, and read up to ``keyframe_every`` objects.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from features.errors import (
    CorruptDataError,
    HeadMissingError,
    LakeContractError,
    ObjectExistsError,
    TargetMismatchError,
)
from features.head_delta import HEADER_BYTES, DeltaLink, can_delta, decode_delta, delta_link, encode_delta
from features.heads import HeadSnapshot
from features.schema import HeadId, TargetIdentity, VersionRecord
from features.storage import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeltaPolicy:
    """When a head is stored as a delta. ``keyframe_every=1``: never.

    The defaults are measured on simulated updates of a [49152, 576] bfloat16 head
    (docs/lake-format.md, "Head snapshots").
    """

    keyframe_every: int = 16
    """A full snapshot and at most this many less one deltas to it."""
    max_ratio: float = 0.5
    """A delta that is longer than this share of the values is not worth a second read."""
    min_bytes: int = 1 << 20
    """Smaller heads are stored in full: what counts for them are requests."""

    def __post_init__(self) -> None:
        if self.keyframe_every < 1 or not 0 < self.max_ratio <= 1 or self.min_bytes < 0:
            raise ValueError(f"needs keyframe_every >= 1, 0 < max_ratio <= 1, min_bytes >= 0, got {self}")


DEFAULT_DELTA = DeltaPolicy()
FULL_HEADS = DeltaPolicy(keyframe_every=1)


@dataclass(frozen=True, slots=True)
class HeadSize:
    """What a stored head costs."""

    head_id: HeadId
    versions: tuple[int, ...]
    """Target versions registered with it."""
    base: HeadId | None
    """The keyframe it is a delta to; None when it is stored in full."""
    stored_bytes: int
    decoded_bytes: int
    """Length of its values: what a full snapshot takes, but for some hundred bytes."""

    @property
    def ratio(self) -> float:
        """Stored over decoded bytes."""
        return self.stored_bytes / self.decoded_bytes


class HeadStore:
    """The head snapshots of one target's lake. Safe to share between threads."""

    def __init__(self, store: Store, target: TargetIdentity) -> None:
        self._store = store
        self._target = target

    def has(self, head_id: HeadId) -> bool:
        """Whether the snapshot is stored, without reading it."""
        return self._store.exists(head_path(head_id))

    def lacking(self, head_id: HeadId) -> HeadId | None:
        """The first blob that is absent of those that reading a head takes, itself among them; None: all are there.

        Two requests for each; only headers are read.

        Raises:
            CorruptDataError: a header cannot be read.
        """
        passed: list[HeadId] = []
        needed: HeadId | None = head_id
        while needed is not None and needed not in passed:
            passed.append(needed)
            try:
                needed = self.keyframe_of(needed)
            except HeadMissingError:
                return needed
        return None

    def put(self, head: HeadSnapshot, policy: DeltaPolicy, newest: Callable[[], HeadId | None]) -> HeadId:
        """Store a snapshot under its digest; storing it again changes nothing.

        ``newest`` gives the head that the next one is probably near to, and is asked only when
        a delta is wanted.

        Raises:
            TargetMismatchError: its shape is not that of this lake's target.
        """
        shape, expected = head.lm_head.shape, (self._target.vocab_size, self._target.hidden_size)
        if shape != expected or head.embedding.shape != expected:
            raise TargetMismatchError(
                f"a head of shape {shape} with embedding {head.embedding.shape} does not fit target "
                f"{self._target.target_id!r} of {self._store.url}: expected {expected}. Use the checkpoint of "
                f"that target."
            )
        head_id = head.head_id
        # Asked first: a head is large, and collectors offer the same one again and again.
        if not self.has(head_id):
            raw = self._delta(head, policy, newest) or head.to_bytes()
            try:
                self._store.create(head_path(head_id), raw)
            except ObjectExistsError:
                log.debug("head %s was stored by another writer meanwhile", head_id)
            else:
                log.info("head %s stored bytes=%d of=%d", head_id, len(raw), head.nbytes)
        return head_id

    def read(self, head_id: HeadId) -> HeadSnapshot:
        """Read a head snapshot and check that its values have the digest it is named by.

        Raises:
            HeadMissingError: it, or the keyframe it is a delta to, is not in the lake.
            CorruptDataError: the stored bytes are cut or changed.
        """
        where = f"{self._store.url}/{head_path(head_id)}"
        snapshot, keyframe = self._load(head_id, ())
        found = snapshot.head_id
        if found != head_id:
            culprit = where
            if keyframe is not None and keyframe[1].head_id != keyframe[0]:
                culprit = f"{self._store.url}/{head_path(keyframe[0])}, the keyframe of head {head_id},"
            raise CorruptDataError(
                f"{culprit} decodes to other values than it is named by (head {found}): they changed after "
                f"they were written. Restore the blob from a copy."
            )
        expected = (self._target.vocab_size, self._target.hidden_size)
        if snapshot.lm_head.shape != expected:
            raise CorruptDataError(
                f"{where} is a head of shape {snapshot.lm_head.shape}, this lake's target has "
                f"{expected}: it was copied from another lake. Remove it and put the head of this target."
            )
        return snapshot

    def keyframe_of(self, head_id: HeadId) -> HeadId | None:
        """The head that this one cannot be read without; None when it is stored in full.

        Raises:
            HeadMissingError: the head is not in the lake.
            CorruptDataError: its header cannot be read.
        """
        link = self._link(head_id, self._size(head_id))
        return None if link is None else link.base

    def sizes(self, records: Iterable[VersionRecord]) -> tuple[HeadSize, ...]:
        """What the heads of these versions cost, in order of their first version; two requests each.

        Keyframes that no version is registered with are listed too: they cannot be spared.
        """
        versions: dict[HeadId, list[int]] = {}
        for record in sorted(records, key=lambda record: record.version):
            versions.setdefault(record.head_id, []).append(record.version.number)
        sizes: dict[HeadId, HeadSize] = {}
        waiting = list(versions)
        while waiting:
            head_id = waiting.pop(0)
            if head_id not in sizes:
                sizes[head_id] = self._head_size(head_id, tuple(versions.get(head_id, ())))
                waiting += [base for base in [sizes[head_id].base] if base is not None]
        return tuple(sizes.values())

    def _delta(
        self, head: HeadSnapshot, policy: DeltaPolicy, newest: Callable[[], HeadId | None]
    ) -> bytes | None:
        """The snapshot as a delta, or None when it is to be stored in full."""
        if policy.keyframe_every == 1 or head.nbytes < policy.min_bytes:
            return None
        try:
            near = newest()
            if near is None:
                return None
            link = self._link(near, self._size(near))
            keyframe, index = (near, 1) if link is None else (link.base, link.index + 1)
            if index >= policy.keyframe_every:
                return None
            base = self.read(keyframe)
        except LakeContractError as error:
            # An older head that was lost or damaged must not keep new ones out.
            log.warning("head is stored in full, its neighbour cannot be read: %s", error)
            return None
        if not can_delta(head, base):
            return None
        raw = encode_delta(head, base, base_id=keyframe, index=index)
        return raw if len(raw) <= policy.max_ratio * head.nbytes else None

    def _load(
        self, head_id: HeadId, above: tuple[HeadId, ...]
    ) -> tuple[HeadSnapshot, tuple[HeadId, HeadSnapshot] | None]:
        """A snapshot and the keyframe it was decoded with, digests not yet compared."""
        raw = self._read(head_id)
        try:
            link = delta_link(raw[:HEADER_BYTES])
            if link is None:
                return HeadSnapshot.from_bytes(raw), None
            if link.base in (*above, head_id):
                raise CorruptDataError("it starts, through others, from itself")
        except CorruptDataError as error:
            raise CorruptDataError(f"{self._store.url}/{head_path(head_id)}: {error}") from error
        # A keyframe that was lost and put again may be a delta to a later one.
        base, _ = self._load(link.base, (*above, head_id))
        try:
            return decode_delta(raw, base), (link.base, base)
        except CorruptDataError as error:
            raise CorruptDataError(f"{self._store.url}/{head_path(head_id)}: {error}") from error

    def _head_size(self, head_id: HeadId, versions: tuple[int, ...]) -> HeadSize:
        stored = self._size(head_id)
        link = self._link(head_id, stored)
        if link is not None:
            return HeadSize(head_id, versions, link.base, stored, link.decoded_bytes)
        start = self._store.read_range(head_path(head_id), 0, 8)
        return HeadSize(head_id, versions, None, stored, stored - 8 - int.from_bytes(start, "little"))

    def _link(self, head_id: HeadId, size: int) -> DeltaLink | None:
        start = self._store.read_range(head_path(head_id), 0, min(size, HEADER_BYTES))
        try:
            return delta_link(start)
        except CorruptDataError as error:
            raise CorruptDataError(f"{self._store.url}/{head_path(head_id)}: {error}") from error

    def _size(self, head_id: HeadId) -> int:
        try:
            return self._store.size(head_path(head_id))
        except FileNotFoundError as error:
            raise self._missing(head_id) from error

    def _read(self, head_id: HeadId) -> bytes:
        try:
            return self._store.read(head_path(head_id))
        except FileNotFoundError as error:
            raise self._missing(head_id) from error

    def _missing(self, head_id: HeadId) -> HeadMissingError:
        return HeadMissingError(
            f"head snapshot {head_id} is not in the lake: expected {self._store.url}/{head_path(head_id)}. "
            f"Put the head of that version again from its checkpoint, or narrow the selection."
        )


def head_path(head_id: HeadId) -> str:
    """Where a head snapshot is."""
    return f"blobs/{head_id}.safetensors"
