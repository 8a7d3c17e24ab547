"""What readers must not see: fragments that retention gave up, and damaged ones. Needs no catalog.

A tombstone names the fragments of one retention run, a quarantine mark one damaged fragment. Both
are created once, before anything is deleted, so a reader that starts later never meets a hole.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from features.commits import CommitName
from features.digests import canonical_json
from features.errors import CorruptDataError, ObjectExistsError
from features.schema import TargetVersion
from features.storage import Store

FOLDER = "tombstones"

_RETIRED = re.compile(r"tombstones/retired/([0-9a-f]{32})\.json")
_QUARANTINED = re.compile(r"tombstones/quarantined/v=(\d{9,})/([0-9a-z_-]+)\.(\d+)\.([0-9a-z]+)\.json")
_UNREADABLE = "unreadable"
"""Stands for the write uuid of a commit that cannot be read and so does not say where its data are."""


@dataclass(frozen=True, slots=True, order=True)
class FragmentName:
    """A fragment by its commit and its data."""

    commit_path: str
    data_prefix: str | None
    """None: the commit is unreadable, so nobody knows."""


@dataclass(frozen=True, slots=True)
class Tombstone:
    """The fragments that one retention run gave up."""

    at: datetime
    """When, by the clock of whoever ran it; aware."""
    reason: str
    forced: bool
    """Set aside what pinned revisions and registered drafts need."""
    fragments: tuple[FragmentName, ...]

    @property
    def path(self) -> str:
        """Named by its fragments, so that two runs with one outcome meet."""
        body = [[f.commit_path, f.data_prefix] for f in sorted(self.fragments)]
        return f"{FOLDER}/retired/{hashlib.sha256(canonical_json(body)).hexdigest()[:32]}.json"


@dataclass(frozen=True, slots=True)
class Hidden:
    """All tombstones and quarantine marks of a lake."""

    tombstones: tuple[Tombstone, ...] = ()
    quarantined: tuple[FragmentName, ...] = ()

    @property
    def retired(self) -> tuple[FragmentName, ...]:
        return tuple(fragment for tombstone in self.tombstones for fragment in tombstone.fragments)

    @property
    def suspects(self) -> frozenset[str]:
        """Commits to look at twice: hidden, unless the name was used again after gc deleted the first."""
        return frozenset(fragment.commit_path for fragment in (*self.retired, *self.quarantined))

    @property
    def unreadable(self) -> frozenset[str]:
        """Commits in quarantine that are not to be read."""
        return frozenset(mark.commit_path for mark in self.quarantined if mark.data_prefix is None)

    @property
    def prefixes(self) -> frozenset[str]:
        """Data prefixes of fragments that are not to be read; every one is of one attempt, for ever."""
        found = (*self.retired, *self.quarantined)
        return frozenset(fragment.data_prefix for fragment in found if fragment.data_prefix)


def hidden(store: Store) -> Hidden:
    """What is hidden now: one listing, and one read per tombstone.

    Raises:
        CorruptDataError: a tombstone is unreadable, so what it hides is not known.
    """
    tombstones, marks = [], []
    for path in store.list(FOLDER):
        if match := _QUARANTINED.fullmatch(path):
            name = CommitName(int(match[1]), match[2], int(match[3]))
            prefix = f"data/{TargetVersion(name.version).folder}/{name.plan_id}.{match[4]}"
            marks.append(FragmentName(name.path, None if match[4] == _UNREADABLE else prefix))
        elif _RETIRED.fullmatch(path):
            with suppress(FileNotFoundError):  # spent, and deleted since it was listed
                tombstones.append(_decode(store.read(path), path, where=f"{store.url}/{path}"))
    return Hidden(tuple(tombstones), tuple(marks))


def is_hidden(store: Store, fragment: FragmentName) -> bool:
    """Whether a commit counts as if it were not there, so that another attempt of its plan may count."""
    found = hidden(store)
    return fragment.data_prefix in found.prefixes or fragment.commit_path in found.unreadable


def retire(store: Store, tombstone: Tombstone) -> str:
    """Hide fragments for good; doing it again changes nothing. Returns the tombstone's path."""
    body = {
        "at": tombstone.at.isoformat(),
        "reason": tombstone.reason,
        "forced": tombstone.forced,
        "fragments": [[f.commit_path, f.data_prefix] for f in sorted(tombstone.fragments)],
    }
    with suppress(ObjectExistsError):
        store.create(tombstone.path, canonical_json(body))
    return tombstone.path


def mark_path(fragment: FragmentName) -> str:
    """Where the quarantine mark of a fragment is."""
    name = CommitName.parse(fragment.commit_path)
    if name is None:
        raise ValueError(f"{fragment.commit_path!r} is no path of a commit")
    uuid = fragment.data_prefix.rsplit(".", 1)[1] if fragment.data_prefix else _UNREADABLE
    folder = f"{FOLDER}/quarantined/{TargetVersion(name.version).folder}"
    return f"{folder}/{name.plan_id}.{name.attempt}.{uuid}.json"


def mark_damaged(store: Store, fragment: FragmentName, problems: Iterable[str], at: datetime) -> bool:
    """Hide a damaged fragment, saying why; its objects stay. False: it was marked before."""
    body = {"at": at.isoformat(), "problems": list(problems)}
    try:
        store.create(mark_path(fragment), canonical_json(body))
    except ObjectExistsError:
        return False
    return True


def unmark(store: Store, fragment: FragmentName) -> None:
    """Show a fragment again: its objects were restored and checked."""
    store.delete(mark_path(fragment))


def _decode(raw: bytes, path: str, *, where: str) -> Tombstone:
    try:
        body: dict[str, Any] = json.loads(raw)
        fragments = tuple(FragmentName(commit, prefix) for commit, prefix in body["fragments"])
        at = datetime.fromisoformat(body["at"])
        tombstone = Tombstone(at, body["reason"], body["forced"], fragments)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptDataError(f"{where} is no tombstone ({error!r}); restore it from a copy") from error
    if tombstone.path != path:
        raise CorruptDataError(
            f"{where} names other fragments than it was written for; restore it from a copy"
        )
    return tombstone
