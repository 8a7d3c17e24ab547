"""What people see of a report: the ratios, each beside what it should be."""

from collections.abc import Mapping
from typing import Any

_TARGETS = (
    ("local.read_over_preadv", ">= 0.7"),
    ("local.read_crc_over_preadv", "stated"),
    ("local.reader_over_preadv", "stated"),
    ("local.read_over_zarr", ">= 5"),
    ("local.read_crc_over_zarr", "stated"),
    ("local.read_over_safetensors_per_window", "stated"),
    ("local.read_over_pt_per_window", "stated"),
    ("s3.requests_per_window_random", "<= 1, per array"),
    ("s3.requests_per_window_streaming", "<= 0.1, per array"),
    ("s3.reader_obstore_over_s3fs", "stated, with obstore"),
    ("s3.reader_cpu_s3fs_over_obstore", "stated, with obstore"),
    ("device.read_over_copy", "stated, with --device"),
    ("device.pinned_over_pageable", "stated, with --device"),
    ("commit.writers", "8"),
    ("commit.lost", "0"),
    ("commit.duplicated", "0"),
    ("commit.requests_per_commit", "2 beside the data"),
    ("commit.commits_per_s", "stated"),
    ("commit.p95_over_p50", "no collapse"),
    ("head.delta_ratio", "stated"),
)
"""Dotted paths into the report, and what the design promises."""


def shown(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per ratio; a section that was left out has no value."""
    return [{"measured": path, "found": _at(report, path), "should be": target} for path, target in _TARGETS]


def _at(report: Mapping[str, Any], path: str) -> Any:
    value: Any = report
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
