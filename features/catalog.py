"""Polars view of a lake's commits: revisions, selections and what reading them would cost.

A selection, once made, is read without polars. Selecting touches few columns and makes no row:
rows come to life when a reader looks at them.
"""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.commits import revision_path
from features.errors import ObjectExistsError, PlanConflictError
from features.lake import Lake
from features.revisions import read_revision
from features.schema import LakeRevision, ReadPlan, SelectionFilter, Split, Verification
from features.selection import BOUNDED, RowTable, Selection, bucket_of, split_of
from features.snapshots import revision_of

__all__ = ["Catalog", "Selection", "split_of"]

_SAME_TOKENS = ("target_version", "sample_id", "start", "num_rows")
_SAME_WINDOW = (*_SAME_TOKENS, "layer_ids", "dtype")
Places = NDArray[np.int64]
"""Row numbers of a catalog, ascending."""


class Catalog:
    """All commit rows of one lake revision. Holds no features and never changes."""

    def __init__(
        self,
        frame: pl.DataFrame,
        commit_paths: Sequence[str],
        heads_missing: tuple[int, ...],
        hidden_fragments: int = 0,
    ) -> None:
        self.frame = frame
        """Every commit row, columns of ``COMMIT_SCHEMA``, in ``CATALOG_ORDER``."""
        self.commit_paths = tuple(sorted(commit_paths))
        self.revision = revision_of(commit_paths)
        self.heads_missing = heads_missing
        """Versions with windows whose record or head snapshot is absent."""
        self.hidden_fragments = hidden_fragments
        """Fragments left out because retention gave them up or they are in quarantine."""

    @staticmethod
    def load(lake: Lake, revision: str | None = None) -> "Catalog":
        """Read the commits that are visible now, or those of a pinned revision.

        However old the lake is, after maintenance this is a handful of requests: listings of
        commits, snapshots, tombstones, versions and heads, and three reads of the newest snapshot.

        Raises:
            InputError: ``revision`` is neither pinned nor the lake's present one, or retention took
                a part of it.
            CorruptDataError: a commit is unreadable.
        """
        found = read_revision(lake, revision)
        return Catalog(found.frame, found.commit_paths, found.heads_missing, found.hidden_fragments)

    def pin(self, lake: Lake) -> LakeRevision:
        """Write down which commits make this revision, so that it can be read again when more have come."""
        body = "".join(f"{path}\n" for path in self.commit_paths).encode()
        with suppress(ObjectExistsError):
            lake.store.create(revision_path(self.revision.digest), body)
        return self.revision

    def select(self, wanted: SelectionFilter) -> Selection:
        """Resolve a filter to an exact list of windows, ordered by (version, sample id, start).

        A window that several fragments hold (same sample, span and layout) is taken once.

        Raises:
            PlanConflictError: two fragments hold one sample's span with different tokens, or one
                sample in two groups.
        """
        mask = self.frame.select(self._condition(wanted).alias("wanted"))["wanted"].to_numpy()
        places = np.flatnonzero(mask)
        if self._in_two_groups:
            _require_one_group(self.frame[places])
        if wanted.split is not Split.ALL:
            held_out = self._buckets[places] < wanted.held_out_percent
            places = places[held_out if wanted.split is Split.HELD_OUT else ~held_out]
        found = len(places)
        if self._repeated:
            places = _distinct(self.frame, places)
        duplicates = found - len(places)
        if wanted.max_windows is not None and wanted.max_windows < len(places):
            order = np.argsort(self._ranks[places], kind="stable")
            places = np.sort(places[order[: wanted.max_windows]])
        rows = RowTable(lambda: self.frame[places].to_arrow(), len(places))
        return Selection(wanted, self.revision, rows, self._plan(places), self.summary(), duplicates)

    def explain(self, wanted: SelectionFilter) -> ReadPlan:
        """What a selection would read, before a byte of hidden state moves."""
        return self.select(wanted).plan

    def summary(self) -> str:
        """What the revision holds, in words."""
        return self._summary

    @cached_property
    def _summary(self) -> str:
        if not self.frame.height:
            return "no window at all"
        domains = sorted(str(domain) for domain in self.frame["domain"].unique().to_list())
        return (
            f"{self.frame.height:,} windows of {self.frame['group_id'].n_unique():,} groups, "
            f"versions {_shortened(self._versions)}, domains {_shortened(domains)}"
        )

    @cached_property
    def _versions(self) -> list[int]:
        return list(self.frame["target_version"].unique().sort().to_list())

    @cached_property
    def _buckets(self) -> NDArray[np.uint8]:
        """Percentile of each row's group in the split: below the share held out, it is held out."""
        groups = self.frame["group_id"].unique()
        buckets = pl.Series("bucket", [bucket_of(group) for group in groups], pl.UInt8)
        table = pl.DataFrame({"group_id": groups, "bucket": buckets})
        joined = self.frame.select("group_id").join(table, on="group_id", how="left", maintain_order="left")
        return joined["bucket"].to_numpy()

    @cached_property
    def _ranks(self) -> NDArray[np.uint64]:
        """The start of each row's sample's digest: an order that has nothing to do with the data."""
        digests = [hashlib.blake2b(s.encode(), digest_size=16).digest()[:8] for s in self.frame["sample_id"]]
        return np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)

    @cached_property
    def _fragments(self) -> NDArray[np.uint32]:
        """A small number for each row's fragment."""
        return self.frame["data_prefix"].cast(pl.Categorical).to_physical().to_numpy()

    @cached_property
    def _in_two_groups(self) -> bool:
        other_group = pl.col("group_id") != pl.col("group_id").shift()
        return bool(
            self.frame.select((_same_as_before("target_version", "sample_id") & other_group).any()).item()
        )

    @cached_property
    def _repeated(self) -> bool:
        """Whether any sample has two windows with one start; rows are sorted, so they are neighbours."""
        same = _same_as_before("target_version", "sample_id", "start")
        return bool(self.frame.select(same.any()).item())

    def _plan(self, places: Places) -> ReadPlan:
        versions = tuple(int(v) for v in _sorted_unique(self.frame["target_version"].to_numpy()[places]))
        fragments = _num_distinct(self._fragments[places])
        return ReadPlan(
            windows=len(places),
            tokens=int(self.frame["num_rows"].to_numpy()[places].sum(dtype=np.int64)),
            nbytes=int(self.frame["nbytes"].to_numpy()[places].sum()),
            versions=versions,
            heads_missing=tuple(v for v in versions if v in self.heads_missing),
            heads_present=tuple(v for v in versions if v not in self.heads_missing),
            fragments=fragments,
            requests=2 * len(places) + 3 * fragments,
        )

    def _condition(self, wanted: SelectionFilter) -> pl.Expr:
        first = wanted.versions.first
        if wanted.newest_versions is not None and self._versions:
            first = max(first, self._versions[-wanted.newest_versions :][0])
        condition = pl.col("target_version") >= first
        if wanted.versions.stop is not None:
            condition &= pl.col("target_version") < wanted.versions.stop
        listed = {
            "domain": wanted.domains, "sample_id": wanted.samples, "group_id": wanted.groups,
            "writer_id": wanted.writers,
        }  # fmt: skip
        for column, values in listed.items():
            if values:
                condition &= pl.col(column).is_in(list(values)).fill_null(False)
        for name, column in BOUNDED.items():
            low, high = getattr(wanted, f"min_{name}"), getattr(wanted, f"max_{name}")
            if low is not None:
                condition &= (pl.col(column) >= low).fill_null(False)
            if high is not None:
                condition &= (pl.col(column) <= high).fill_null(False)
        if wanted.verified_only:
            condition &= pl.col("verification") == Verification.VERIFIED.value
        if wanted.whole_sequences_only:
            condition &= (pl.col("start") == 0) & (pl.col("num_rows") == pl.col("sequence_length"))
        return condition


def _same_as_before(*columns: str) -> pl.Expr:
    same = [(pl.col(name) == pl.col(name).shift()).fill_null(False) for name in columns]
    return pl.all_horizontal(same)


def _sorted_unique(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Distinct values of a sorted array."""
    return values[np.flatnonzero(np.diff(values, prepend=-1))]


def _num_distinct(codes: NDArray[np.uint32]) -> int:
    """How many small numbers there are, without sorting them."""
    seen = np.zeros(int(codes.max(initial=0)) + 1, np.bool_)
    seen[codes] = True
    return int(np.count_nonzero(seen)) if len(codes) else 0


def _distinct(frame: pl.DataFrame, places: Places) -> Places:
    """Places of distinct windows; the first of several with equal tokens."""
    columns = [*_SAME_WINDOW, "crc32c_tokens", "plan_id"]
    found = frame.select(columns)[places].with_columns(pl.Series("place", places))
    contents = found.group_by(_SAME_TOKENS).agg(
        pl.col("crc32c_tokens").n_unique().alias("contents"), pl.col("plan_id").unique().sort()
    )
    clash = contents.filter(pl.col("contents") > 1).sort("target_version", "sample_id", "start")
    if clash.height:
        first = clash.row(0, named=True)
        raise PlanConflictError(
            f"sample {first['sample_id']!r} of v{first['target_version']:09d} at position "
            f"{first['start']} is stored with different tokens by plans {', '.join(first['plan_id'])} "
            f"({clash.height} such windows). A sample id names one rollout: collect it under its own "
            f"id, and narrow the selection to leave this version out."
        )
    return found.unique(subset=_SAME_WINDOW, keep="first", maintain_order=True)["place"].to_numpy()


def _require_one_group(frame: pl.DataFrame) -> None:
    # Asked before the split: a sample in two groups could be trained on and held out.
    groups = frame.group_by("target_version", "sample_id").agg(pl.col("group_id").unique().sort())
    clash = groups.filter(pl.col("group_id").list.len() > 1).sort("target_version", "sample_id")
    if clash.height:
        first = clash.row(0, named=True)
        raise PlanConflictError(
            f"sample {first['sample_id']!r} of v{first['target_version']:09d} is stored in groups "
            f"{', '.join(map(repr, first['group_id']))} ({clash.height} such samples): it could be trained on and "
            f"held out at once. A sample belongs to one prompt's group: collect it under one group id, and narrow "
            f"the selection to leave this version out."
        )


def _shortened(values: Sequence[object], limit: int = 12) -> str:
    if len(values) <= limit:
        return ", ".join(str(value) for value in values)
    return f"{values[0]} .. {values[-1]} ({len(values)})"
