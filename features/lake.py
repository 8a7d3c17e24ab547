"""Open a lake: its target, versions, heads and windows. Everything in it is immutable.

Fragments are written by ``features.writer`` and found by ``features.catalog``; what is here
needs neither polars nor zarr nor torch, so it runs inside other people's trainers.
"""

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

import pyarrow as pa

from features.commits import (
    CommitName,
    TokenRow,
    TokenTable,
    check_commit,
    decode_commit,
    revision_path,
)
from features.digests import canonical_json
from features.documents import (
    decode_lake,
    decode_version,
    encode_lake,
    encode_version,
    require_same_target,
    version_numbers,
)
from features.errors import (
    CorruptDataError,
    HeadMissingError,
    InputError,
    LakeNotFoundError,
    ObjectExistsError,
    TargetMismatchError,
    UnknownVersionError,
    VersionConflictError,
)
from features.fragments import Fragments, assemble, layout_of
from features.head_store import DEFAULT_DELTA, DeltaPolicy, HeadSize, HeadStore
from features.heads import HeadSnapshot
from features.s3_access import StoreAccessError
from features.schema import (
    HeadId,
    TargetIdentity,
    TargetVersion,
    VersionRecord,
)
from features.snapshots import Snapshots, commit_paths
from features.storage import Store
from features.target import config_digest, stable_config
from features.windows import Window

log = logging.getLogger(__name__)

LAKE_FILE = "lake.json"

_TARGET_FIELDS = ("target_id", "tokenizer_digest", "hidden_size", "vocab_size")
"""What a version's record shares with its lake's target."""


class Lake:
    """A feature lake of one target. Safe to share between threads; open it anew in a child process."""

    def __init__(self, store: Store, target: TargetIdentity) -> None:
        self.store = store
        self.target = target
        self._records: dict[TargetVersion, VersionRecord] = {}
        self.snapshots = Snapshots(store, target.target_id)
        self._fragments = Fragments(store)
        self._heads = HeadStore(store, target)

    @staticmethod
    def init(url: str, target: TargetIdentity, **storage_options: Any) -> "Lake":
        """Create a lake for one target; opening it again with the same identity is fine.

        Raises:
            TargetMismatchError: there is a lake for another target at ``url``.
            InputError: the store cannot be used: credentials, address, region, bucket or rights.
        """
        store = Store.open(url, **storage_options)
        try:
            store.create(LAKE_FILE, encode_lake(target))
        except StoreAccessError as error:
            raise InputError(str(error)) from error
        except ObjectExistsError:
            lake = Lake.open(url, **storage_options)
            names = tuple(field.name for field in fields(TargetIdentity))
            require_same_target(target, lake.target, names, where=f"the lake at {store.url}")
            return lake
        log.info("lake created url=%s target=%s", store.url, target.target_id)
        return Lake(store, target)

    @staticmethod
    def open(url: str, **storage_options: Any) -> "Lake":
        """Open an existing lake.

        Raises:
            LakeNotFoundError: there is none.
            LakeContractError: it was made by a newer format.
            CorruptDataError: ``lake.json`` is unreadable.
            InputError: the store cannot be used: credentials, address, region, bucket or rights.
        """
        store = Store.open(url, **storage_options)
        try:
            raw = store.read(LAKE_FILE)
        except StoreAccessError as error:
            raise InputError(str(error)) from error
        except (FileNotFoundError, NotADirectoryError) as error:
            raise LakeNotFoundError(store.url) from error
        return Lake(store, decode_lake(raw, where=f"{store.url}/{LAKE_FILE}"))

    @property
    def url(self) -> str:
        return self.store.url

    def __repr__(self) -> str:
        return f"Lake({self.url!r}, target={self.target.target_id!r})"

    def put_target_config(self, config: Mapping[str, Any]) -> None:
        """Keep the target's ``config.json``, from which drafts take their sizes; harmless when it is there.

        Raises:
            TargetMismatchError: it is not the config this lake's target is known by.
        """
        stable = stable_config(config)
        found = config_digest(stable)
        if found != self.target.config_digest:
            raise TargetMismatchError(
                f"this config digests to {found[:12]}, the target of {self.url} is known by "
                f"{self.target.config_digest[:12]}. Offer the config.json of this lake's target."
            )
        with suppress(ObjectExistsError):
            self.store.create(config_path(found), canonical_json(stable))

    def target_config(self) -> dict[str, Any]:
        """The target's ``config.json``, without keys that only say who saved it and in which dtype.

        Raises:
            CorruptDataError: it is absent, or is not the one this lake's target is known by.
        """
        path = config_path(self.target.config_digest)
        try:
            config = json.loads(self.store.read(path))
        except (FileNotFoundError, ValueError) as error:
            raise CorruptDataError(
                f"{self.url}/{path} cannot be read: {error}. Put it back with: draftlake init {self.url} "
                f"--target DIR --target-id {self.target.target_id}"
            ) from error
        if config_digest(config) != self.target.config_digest:
            raise CorruptDataError(f"{self.url}/{path} was altered; remove it and run draftlake init again")
        return dict(config)

    def put_head(self, head: HeadSnapshot, *, delta: DeltaPolicy = DEFAULT_DELTA) -> HeadId:
        """Store a head snapshot under its digest; storing it again changes nothing.

        A head near that of the newest version is stored as a delta, as ``delta`` allows.

        Raises:
            TargetMismatchError: its shape is not that of this lake's target.
        """
        return self._heads.put(head, delta, self._newest_head)

    def has_head(self, head_id: HeadId) -> bool:
        """Whether the snapshot is stored, and what it is a delta to; only headers are read.

        Raises:
            CorruptDataError: a header cannot be read.
        """
        return self._heads.lacking(head_id) is None

    def head(self, head_id: HeadId) -> HeadSnapshot:
        """Read a head snapshot and check that its values have the digest it is named by.

        Raises:
            HeadMissingError: it, or what it is a delta to, is not in the lake.
            CorruptDataError: the stored bytes are cut or changed.
        """
        return self._heads.read(head_id)

    def head_base(self, head_id: HeadId) -> HeadId | None:
        """The head whose blob this one's is a delta to; None when it is stored in full."""
        return self._heads.keyframe_of(head_id)

    def head_sizes(self) -> tuple[HeadSize, ...]:
        """What the heads of the registered versions cost, in order of their first version."""
        return self._heads.sizes(self.versions())

    def register_version(self, record: VersionRecord) -> VersionRecord:
        """Make a target version known; registering the same record again is fine.

        Raises:
            TargetMismatchError: the record belongs to another target or tokenizer.
            HeadMissingError: its head was not put first, or the one that it is a delta to was lost.
            VersionConflictError: the number is taken by other weights.
        """
        require_same_target(record, self.target, _TARGET_FIELDS, where=f"the lake at {self.url}")
        lacking = self._heads.lacking(record.head_id)
        if lacking is not None:
            needs = "" if lacking == record.head_id else f", a delta to head {lacking}"
            raise HeadMissingError(
                f"{record.version} of {record.target_id!r} names head {record.head_id}{needs}, which is not in "
                f"{self.url}. Put that head before registering the version."
            )
        try:
            self.store.create(version_path(record.version), encode_version(record))
        except ObjectExistsError:
            found = self.version(record.version)
            if found != record:
                differing = [
                    f.name for f in fields(record) if getattr(found, f.name) != getattr(record, f.name)
                ]
                raise VersionConflictError(
                    f"{record.version} is registered in {self.url} with other {', '.join(differing)}. A "
                    f"version number names one set of weights for ever: collect these under the next free "
                    f"number."
                ) from None
        self._records[record.version] = record
        return record

    def version(self, version: TargetVersion) -> VersionRecord:
        """The record of a registered version.

        Raises:
            UnknownVersionError: it was never registered.
        """
        if version not in self._records:
            path = version_path(version)
            try:
                raw = self.store.read(path)
            except FileNotFoundError as error:
                known = ", ".join(str(record.version) for record in self.versions()) or "none"
                raise UnknownVersionError(
                    f"{version} is not registered in {self.url} (registered: {known}). "
                    f"Collect that version first, or choose one of these."
                ) from error
            record = decode_version(raw, version, where=f"{self.url}/{path}")
            try:
                require_same_target(record, self.target, _TARGET_FIELDS, where=f"the lake at {self.url}")
            except TargetMismatchError as error:
                raise CorruptDataError(
                    f"{self.url}/{path} was edited or copied from another lake: {error}"
                ) from error
            self._records[version] = record
        return self._records[version]

    def versions(self) -> tuple[VersionRecord, ...]:
        """Every registered version, ascending; asked anew each time."""
        numbers = version_numbers(self.store.list("versions"))
        return tuple(self.version(TargetVersion(number)) for number in numbers)

    def head_of(self, version: TargetVersion) -> HeadSnapshot:
        """The head snapshot of a version, and of no other."""
        return self.head(self.version(version).head_id)

    def has_revision(self, digest: str) -> bool:
        """Whether a revision of this lake was pinned under that digest: every training run pins its own."""
        return self.store.exists(revision_path(digest))

    def commit_paths(self) -> list[str]:
        """Paths of the visible commits, sorted: of each version and plan the lowest attempt, fences aside."""
        return commit_paths(self)

    def read_commit(self, path: str) -> pa.Table:
        """A commit's rows, ``COMMIT_SCHEMA``; none when it is a fence.

        Raises:
            FileNotFoundError: the object is absent.
            CorruptDataError: it is cut, was changed, or was moved or copied from elsewhere.
        """
        name, where = CommitName.parse(path), f"{self.url}/{path}"
        if name is None:
            raise ValueError(f"{path!r} is no path of a commit")
        table = decode_commit(self.store.read(path), where=where)
        check_commit(table, name, self.target.target_id, where=where)
        return table

    def check_version(self, version: TargetVersion, head_id: HeadId, *, where: str) -> None:
        """Refuse rows whose version is registered with another head than they were collected with.

        Raises:
            UnknownVersionError: the version is not registered.
            VersionConflictError: version and head do not belong together.
        """
        found = self.version(version).head_id
        if found != head_id:
            raise VersionConflictError(
                f"{where} was collected with head {head_id} at {version}, and {self.url}/{version_path(version)} "
                f"names head {found}: one of them was edited. Restore it from a copy; features are never "
                f"scored with another version's head."
            )

    def read_window(self, row: Mapping[str, Any]) -> Window:
        """Read one window: a byte range per array, checked; ``row`` is a row of ``COMMIT_SCHEMA``.

        The token table of its fragment is read once and kept.

        Raises:
            CorruptDataError: an object is absent or too short, or a checksum differs.
            VersionConflictError: its version is registered with another head.
            LakeContractError: the row was written in a form this program does not know, or does
                not describe this window.
        """
        self.check_row(row)
        tokens = self.read_tokens(row)
        aux, final = self._fragments.rows(row, "aux"), self._fragments.rows(row, "final")
        return assemble(row, tokens, aux, final, vocab_size=self.target.vocab_size)

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Refuse a commit row whose window cannot be read from this lake, before any of its bytes is.

        Raises:
            VersionConflictError: its version is registered with another head.
            LakeContractError: it was written in a form this program does not know.
            CorruptDataError: it is of another target.
        """
        where = f"sample {row['sample_id']!r} in {row['data_prefix']}"
        self.check_version(TargetVersion(row["target_version"]), row["head_id"], where=where)
        layout_of(row)
        self._check_target(row)

    def fragment_tokens(self, data_prefix: str) -> TokenTable:
        """A fragment's token table, with both shard objects' lengths checked against it.

        Raises:
            CorruptDataError: an object of the fragment is absent or has another length.
        """
        return self._fragments.table(data_prefix)

    def read_tokens(self, row: Mapping[str, Any]) -> TokenRow:
        """Tokens and masks of one window, checked, without its features.

        Raises:
            CorruptDataError: an object is absent or cut, or the tokens are not those of ``row``.
        """
        self._check_target(row)
        return self._fragments.tokens(row)

    def _check_target(self, row: Mapping[str, Any]) -> None:
        if row["target_id"] != self.target.target_id:
            raise CorruptDataError(
                f"sample {row['sample_id']!r} is of target {row['target_id']!r}, {self.url} holds "
                f"{self.target.target_id!r}. Read it from the lake it was selected in."
            )

    def _newest_head(self) -> HeadId | None:
        numbers = version_numbers(self.store.list("versions"))
        return self.version(TargetVersion(numbers[-1])).head_id if numbers else None


def config_path(digest: str) -> str:
    """Where the target's config lies."""
    return f"blobs/{digest}.config.json"


def version_path(version: TargetVersion) -> str:
    """Where a version's record is."""
    return f"versions/{version.folder}/version.json"
