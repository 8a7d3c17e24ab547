"""Polars view of a lake's commits: revisions, selections and what reading them would cost.

The only module of ``features`` that imports polars. A selection, once made, is read without it.
"""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import polars as pl
import pyarrow as pa

from features.commits import revision_path
from features.errors import CorruptDataError, InputError, ObjectExistsError, PlanConflictError
from features.lake import Lake
from features.schema import (
    COMMIT_SCHEMA,
    LakeRevision,
    ReadPlan,
    SelectionFilter,
    Split,
    TargetVersion,
    Verification,
)
from features.selection import Selection, make_plan, split_of

__all__ = ["Catalog", "Selection", "split_of"]

_READERS = 8
_ORDER = ("target_version", "sample_id", "start", "plan_id", "window_index")
_SAME_TOKENS = ("target_version", "sample_id", "start", "num_rows")
_SAME_WINDOW = (*_SAME_TOKENS, "layer_ids", "dtype")


class Catalog:
    """All commit rows of one lake revision. Holds no features and never changes."""

    def __init__(
        self, frame: pl.DataFrame, commit_paths: Sequence[str], heads_missing: tuple[int, ...]
    ) -> None:
        self.frame = frame
        """Every commit row, columns of ``COMMIT_SCHEMA``."""
        self.commit_paths = tuple(sorted(commit_paths))
        self.revision = revision_of(commit_paths)
        self.heads_missing = heads_missing
        """Versions with windows whose record or head snapshot is absent."""

    @staticmethod
    def load(lake: Lake, revision: str | None = None) -> "Catalog":
        """Read the commits that are visible now, or those of a pinned revision.

        Raises:
            InputError: ``revision`` is neither pinned nor the lake's present one.
            CorruptDataError: a commit is unreadable.
        """
        paths = lake.commit_paths()
        current = revision_of(paths)
        if revision is not None and revision != current.digest:
            paths = _pinned_paths(lake, revision, current)
        with ThreadPoolExecutor(_READERS) as pool:
            tables = list(pool.map(lambda path: _read_commit(lake, path), paths))
        table = pa.concat_tables(tables) if tables else COMMIT_SCHEMA.empty_table()
        frame = pl.DataFrame(pl.from_arrow(table)).sort(_ORDER)
        return Catalog(frame, paths, _check_versions(lake, frame))

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
        frame = self.frame.filter(_condition(wanted))
        _require_one_group(frame)
        if wanted.split is not Split.ALL:
            groups = frame["group_id"].unique().to_list()
            kept = [g for g in groups if split_of(g, wanted.held_out_percent) is wanted.split]
            frame = frame.filter(pl.col("group_id").is_in(kept))
        distinct = self._distinct(frame)
        duplicates = frame.height - distinct.height
        if wanted.max_windows is not None:
            distinct = _first_by_digest(distinct, wanted.max_windows)
        rows = distinct.to_dicts()
        return Selection(
            wanted, self.revision, rows, make_plan(rows, self.heads_missing), self.summary(), duplicates
        )

    def explain(self, wanted: SelectionFilter) -> ReadPlan:
        """What a selection would read, before a byte of hidden state moves."""
        return self.select(wanted).plan

    def summary(self) -> str:
        """What the revision holds, in words."""
        if not self.frame.height:
            return "no window at all"
        versions = self.frame["target_version"].unique().sort().to_list()
        domains = sorted(str(domain) for domain in self.frame["domain"].unique().to_list())
        return (
            f"{self.frame.height:,} windows of {self.frame['group_id'].n_unique():,} groups, "
            f"versions {_shortened(versions)}, domains {_shortened(domains)}"
        )

    def _distinct(self, frame: pl.DataFrame) -> pl.DataFrame:
        contents = frame.group_by(_SAME_TOKENS).agg(
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
        return frame.unique(subset=_SAME_WINDOW, keep="first", maintain_order=True)


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


def revision_of(commit_paths: Sequence[str]) -> LakeRevision:
    """The revision that a set of commits makes: SHA-256 over their sorted paths."""
    body = "\n".join(sorted(commit_paths)).encode()
    return LakeRevision(hashlib.sha256(body).hexdigest(), len(commit_paths))


def _pinned_paths(lake: Lake, revision: str, current: LakeRevision) -> list[str]:
    try:
        paths = lake.store.read(revision_path(revision)).decode().splitlines()
    except FileNotFoundError as error:
        raise InputError(
            f"lake revision {revision} was never pinned, and {lake.url} has moved on to {current.digest} with "
            f"{current.num_fragments} fragments. Name a revision that a training run recorded, or select again."
        ) from error
    if revision_of(paths).digest != revision:
        raise CorruptDataError(
            f"{lake.url}/{revision_path(revision)} does not list the commits it is named by"
        )
    return paths


def _read_commit(lake: Lake, path: str) -> pa.Table:
    try:
        return lake.read_commit(path)
    except FileNotFoundError as error:
        raise CorruptDataError(
            f"{lake.url}/{path} vanished while the catalog was read; load it again, and if that persists "
            f"check the lake"
        ) from error


def _check_versions(lake: Lake, frame: pl.DataFrame) -> tuple[int, ...]:
    """Versions whose record or head is absent; a version with another head than its windows is refused."""
    registered = {record.version.number for record in lake.versions()}
    pairs = frame.select("target_version", "head_id").unique().sort("target_version", "head_id").rows()
    for number, head_id in pairs:
        if number in registered:
            lake.check_version(TargetVersion(number), head_id, where=f"a fragment in {lake.url}")
    return tuple(v for v, head in pairs if v not in registered or not lake.has_head(head))


def _condition(wanted: SelectionFilter) -> pl.Expr:
    condition = pl.col("target_version") >= wanted.versions.first
    if wanted.versions.stop is not None:
        condition &= pl.col("target_version") < wanted.versions.stop
    if wanted.domains:
        condition &= pl.col("domain").is_in(list(wanted.domains)).fill_null(False)
    if wanted.verified_only:
        condition &= pl.col("verification") == Verification.VERIFIED.value
    if wanted.whole_sequences_only:
        condition &= (pl.col("start") == 0) & (pl.col("num_rows") == pl.col("sequence_length"))
    return condition


def _first_by_digest(frame: pl.DataFrame, count: int) -> pl.DataFrame:
    digests = [hashlib.blake2b(sample.encode(), digest_size=16).hexdigest() for sample in frame["sample_id"]]
    ranked = frame.with_columns(pl.Series("rank", digests, pl.String)).sort("rank", *_ORDER)
    return ranked.head(count).drop("rank").sort(_ORDER)


def _shortened(values: Sequence[object], limit: int = 12) -> str:
    if len(values) <= limit:
        return ", ".join(str(value) for value in values)
    return f"{values[0]} .. {values[-1]} ({len(values)})"
