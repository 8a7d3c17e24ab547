"""Leases: a reader says which fragments it needs, and until when. Retention waits for live ones.

The lease is created first and the tombstones are read after it; retention creates its tombstone
first and reads the leases after that. Whoever comes second sees the other, so no fragment is
deleted under a reader that was told it may go on. Times are the callers' own: their clocks may
differ by less than the grace that `gc` waits.
"""

import json
import logging
import re
import threading
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from features.digests import canonical_json
from features.errors import CorruptDataError, InputError, ObjectExistsError
from features.lake import Lake
from features.tombstones import FragmentName, hidden

log = logging.getLogger(__name__)

DEFAULT_TTL = timedelta(minutes=30)
"""How long a lease lives without renewal; a killed reader delays retention by so much."""

_UNTIL = re.compile(r"leases/([0-9a-f]{32})/until\.(\d{15})")


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """One lease as retention sees it."""

    lease_id: str
    expires_at: datetime
    reader: str
    revision: str | None
    fragments: frozenset[FragmentName] | None
    """What it needs. None: still being made, so it may need anything."""

    @property
    def path(self) -> str:
        return f"leases/{self.lease_id}"

    @property
    def commits(self) -> frozenset[str] | None:
        """Commits of the fragments that it needs; None: any."""
        return None if self.fragments is None else frozenset(f.commit_path for f in self.fragments)


class Lease:
    """A lease of this process. Renew it before it runs out, release it at the end."""

    def __init__(self, lake: Lake, lease_id: str, ttl: timedelta, expires_at: datetime) -> None:
        self.lease_id = lease_id
        self.expires_at = expires_at
        self._lake, self._ttl = lake, ttl

    def renew(self, now: datetime) -> None:
        """Live for another ``ttl`` from now.

        Raises:
            InputError: it has run out, and what it protected may be gone.
        """
        if now >= self.expires_at:
            raise InputError(
                f"lease {self.lease_id} ran out at {self.expires_at.isoformat()}, it is {now.isoformat()}: its "
                f"fragments may be deleted by now. Load the catalog again and take a new lease; renew it more often."
            )
        _extend(self._lake, self.lease_id, now + self._ttl)
        self.expires_at = max(self.expires_at, now + self._ttl)

    def release(self) -> None:
        """Give it back; doing so again changes nothing."""
        self._lake.store.delete_prefix(f"leases/{self.lease_id}")


def acquire(
    lake: Lake,
    *,
    revision: str,
    fragments: Collection[FragmentName],
    reader: str,
    now: datetime,
    ttl: timedelta = DEFAULT_TTL,
) -> Lease:
    """Protect the fragments of a lake revision until ``now + ttl``.

    Raises:
        InputError: retention gave one of them up since the catalog was loaded.
    """
    if ttl <= timedelta(0):
        raise ValueError(f"a lease lives for a time, got {ttl}")
    lease_id = uuid.uuid4().hex
    # Its end first: a lease that says no more protects everything, and a killed reader leaves no lease for ever.
    _extend(lake, lease_id, now + ttl)
    body: dict[str, Any] = {"reader": reader, "revision": revision, "since": now.isoformat()}
    body["fragments"] = [[f.commit_path, f.data_prefix] for f in sorted(fragments)]
    lake.store.create(f"leases/{lease_id}/lease.json", canonical_json(body))
    lease = Lease(lake, lease_id, ttl, now + ttl)
    prefixes = hidden(lake.store).prefixes
    if gone := sorted(f.data_prefix for f in fragments if f.data_prefix in prefixes):
        lease.release()
        raise InputError(
            f"{len(gone)} fragments of lake revision {revision[:12]} were given up by retention or put into "
            f"quarantine meanwhile, {gone[0]} among them. Load the catalog again and select anew."
        )
    return lease


@contextmanager
def held(
    lake: Lake,
    *,
    revision: str,
    fragments: Collection[FragmentName],
    reader: str,
    now: Callable[[], datetime],
    ttl: timedelta = DEFAULT_TTL,
) -> Iterator[Lease]:
    """A lease that a background thread renews until the context ends.

    Raises:
        InputError: as :func:`acquire`.
    """
    lease = acquire(lake, revision=revision, fragments=fragments, reader=reader, now=now(), ttl=ttl)
    done = threading.Event()
    keeper = threading.Thread(target=_keep, args=(lease, ttl, now, done), name="draftlake-lease", daemon=True)
    keeper.start()
    try:
        yield lease
    finally:
        done.set()
        keeper.join()
        lease.release()


def leases(lake: Lake) -> tuple[LeaseRecord, ...]:
    """Every lease, live or not, by id: one listing and one read each.

    Raises:
        CorruptDataError: a lease is unreadable.
    """
    ends: dict[str, int] = {}
    for path in lake.store.list("leases"):
        if match := _UNTIL.fullmatch(path):
            ends[match[1]] = max(ends.get(match[1], 0), int(match[2]))
    return tuple(_record(lake, lease_id, end) for lease_id, end in sorted(ends.items()))


def _record(lake: Lake, lease_id: str, end_ms: int) -> LeaseRecord:
    path = f"leases/{lease_id}/lease.json"
    try:
        expires_at = datetime.fromtimestamp(end_ms / 1000, UTC)
        body = json.loads(lake.store.read(path))
        fragments = frozenset(FragmentName(commit, prefix) for commit, prefix in body["fragments"])
        return LeaseRecord(lease_id, expires_at, body["reader"], body["revision"], fragments)
    except FileNotFoundError:
        return LeaseRecord(lease_id, expires_at, "unknown", None, None)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptDataError(
            f"{lake.url}/{path} is no lease ({error!r}). Remove the folder leases/{lease_id} if its reader ended."
        ) from error


def _extend(lake: Lake, lease_id: str, until: datetime) -> None:
    with suppress(ObjectExistsError):
        lake.store.create(f"leases/{lease_id}/until.{int(until.timestamp() * 1000):015d}", b"")


def _keep(lease: Lease, ttl: timedelta, now: Callable[[], datetime], done: threading.Event) -> None:
    while not done.wait(ttl.total_seconds() / 3):
        try:
            lease.renew(now())
        except InputError as error:
            log.error("%s", error)
            return
        except OSError as error:  # two thirds of its life are left to try again
            log.warning("lease %s could not be renewed, trying again: %s", lease.lease_id, error)
