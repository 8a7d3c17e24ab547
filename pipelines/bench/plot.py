"""The report of ``bench lake`` as one picture."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from features.errors import InputError

_LABELS = {
    "preadv": "preadv, the ceiling",
    "lake": "lake, no check",
    "lake_crc": "lake, crc checked",
    "lake_window": "lake, read_window",
    "lake_reader": "lake, training reader *",
    "zarr": "zarr-python",
    "safetensors_per_window": "safetensors per window",
    "pt_per_window": ".pt per window",
}
_CEILING, _OURS, _RIVAL = "tab:gray", "tab:blue", "tab:orange"


def plot_bench(report: Mapping[str, Any], path: Path) -> None:
    """Write a PNG: read speed of each way, for each hidden size.

    Raises:
        InputError: matplotlib is absent.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(f"--plot needs matplotlib ({error}): pip install matplotlib") from error
    sizes = report["local"]["hidden_size"]
    figure = Figure(figsize=(5 * len(sizes), 3.6), layout="constrained")
    for axes, (hidden, size) in zip(
        figure.subplots(1, len(sizes), squeeze=False)[0], sizes.items(), strict=True
    ):
        speeds = size["speeds"]
        names = list(speeds)[::-1]
        values = [speeds[name]["median_gb_per_s"] for name in names]
        bars = axes.barh([_LABELS[name] for name in names], values, color=[_colour(name) for name in names])
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
        axes.set_title(f"H = {hidden}, windows of {size['window_bytes'] / 2**20:.2f} MiB", fontsize=10)
        axes.set_xlabel("GB/s, page cache hot, one thread (* its own threads)", fontsize=8)
        axes.margins(x=0.15)
    figure.savefig(path, dpi=150)


def _colour(name: str) -> str:
    if name.startswith("lake"):
        return _OURS
    return _CEILING if name == "preadv" else _RIVAL
