"""What is in the lake, without fetching a hidden state."""

import json
from dataclasses import asdict
from typing import Any

import polars as pl

from features.catalog import Catalog
from features.errors import InputError
from features.lake import Lake
from features.quarantine import list_quarantine
from features.schema import ReadPlan, SelectionFilter, TargetVersion, VersionRange


def newest_version(lake: Lake) -> int:
    """The newest registered target version.

    Raises:
        InputError: no version was ever collected.
    """
    versions = lake.versions()
    if not versions:
        raise InputError(f"{lake.url} holds no target version yet; collect one with: draftlake collect")
    return max(r.version.number for r in versions)


def version_range(first: int, stop: int | None) -> VersionRange:
    """The versions ``[first, stop)``; ``stop=None`` is open.

    Raises:
        InputError: the range holds no version.
    """
    if stop is not None and stop <= first:
        raise InputError(
            f"versions [{first}, {stop}) are none at all: the stop version is exclusive, so give "
            f"--stop-version {first + 1} or more for --first-version {first}"
        )
    return VersionRange(first, stop)


def list_versions(url: str) -> list[dict[str, Any]]:
    """One row per target version: windows, tokens, bytes, groups, verified windows, acceptance as recorded, head."""
    lake = Lake.open(url)
    frame = Catalog.load(lake).frame
    counts = frame.group_by("target_version").agg(
        pl.len().alias("windows"),
        pl.col("num_rows").sum().alias("tokens"),
        pl.col("nbytes").sum().alias("nbytes"),
        pl.col("group_id").n_unique().alias("groups"),
        (pl.col("verification") == "verified").sum().alias("verified"),
        pl.col("acceptance_length").mean().alias("mean_acceptance_length"),
    )
    by_version = {row.pop("target_version"): row for row in counts.to_dicts()}
    empty = {
        "windows": 0,
        "tokens": 0,
        "nbytes": 0,
        "groups": 0,
        "verified": 0,
        "mean_acceptance_length": None,
    }
    return [
        {"version": r.version.number, "head": r.head_id[:12], **empty, **by_version.get(r.version.number, {})}
        for r in lake.versions()
    ]


def show_lake(url: str) -> dict[str, Any]:
    """The lake as a whole: target, revision and totals."""
    lake = Lake.open(url)
    catalog = Catalog.load(lake)
    return {
        "lake": lake.url,
        "target": asdict(lake.target),
        "revision": catalog.revision.digest,
        "fragments": catalog.revision.num_fragments,
        "windows": catalog.frame.height,
        "hidden_fragments": catalog.hidden_fragments,
        "versions": [r.version.number for r in lake.versions()],
    }


def show_version(url: str, number: int) -> dict[str, Any]:
    """One version: its record, its fragments and what was collected how.

    Raises:
        UnknownVersionError: the version was never registered.
    """
    lake = Lake.open(url)
    record = lake.version(TargetVersion(number))
    frame = Catalog.load(lake).frame.filter(_is_version(number))
    fragments = (
        frame.group_by("data_prefix", "writer_id", "layer_ids", "dtype", "codec")
        .agg(pl.len().alias("windows"), pl.col("aux_error").mean().alias("mean_aux_error"))
        .sort("data_prefix")
    )
    shown = asdict(record) | {"version": number}
    return {"record": shown, "windows": frame.height, "fragments": fragments.to_dicts()}


def show_sample(url: str, sample_id: str) -> list[dict[str, Any]]:
    """Every window of one rollout.

    Raises:
        InputError: the lake holds no window of it.
    """
    frame = Catalog.load(Lake.open(url)).frame.filter(pl.col("sample_id") == sample_id)
    if frame.is_empty():
        raise InputError(
            f"{url} holds no window of sample {sample_id!r}; `draftlake ls --samples` lists them"
        )
    rows = frame.sort("target_version", "start").to_dicts()
    return [row | {"sampling": json.loads(row["sampling"]) if row["sampling"] else None} for row in rows]


def list_samples(url: str, number: int | None) -> list[dict[str, Any]]:
    """Sample ids with version, group, rows and proof outcome."""
    frame = Catalog.load(Lake.open(url)).frame
    if number is not None:
        frame = frame.filter(_is_version(number))
    columns = ["target_version", "group_id", "sample_id", "start", "num_rows", "verification"]
    return frame.select(columns).sort(columns[:3]).to_dicts()


def show_quarantine(url: str) -> list[dict[str, Any]]:
    """One row per refused record: run, source, line, reason code and what to do about it."""
    return [
        {
            "run": run.run_id,
            "source": refusal.source,
            "line": refusal.line,
            "reason": refusal.reason,
            "detail": refusal.detail,
        }
        for run in list_quarantine(Lake.open(url))
        for refusal in run.refusals
    ]


def show_heads(url: str) -> dict[str, Any]:
    """What head snapshots cost: in all, and one row each with its versions and the keyframe it is a delta to."""
    sizes = Lake.open(url).head_sizes()
    stored, decoded = sum(s.stored_bytes for s in sizes), sum(s.decoded_bytes for s in sizes)
    rows = [
        {
            "head": size.head_id,
            "versions": list(size.versions),
            "base": size.base,
            "stored_bytes": size.stored_bytes,
            "decoded_bytes": size.decoded_bytes,
            "ratio": size.ratio,
        }
        for size in sizes
    ]
    return {
        "heads": len(rows),
        "keyframes": sum(size.base is None for size in sizes),
        "stored_bytes": stored,
        "decoded_bytes": decoded,
        "ratio": stored / decoded if decoded else None,
        "snapshots": rows,
    }


def explain(url: str, wanted: SelectionFilter) -> ReadPlan:
    """What a selection would read, before a byte of hidden state moves."""
    return Catalog.load(Lake.open(url)).explain(wanted)


def _is_version(number: int) -> pl.Expr:
    return pl.col("target_version") == number
