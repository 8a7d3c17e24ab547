"""The report of ``bench collect`` as rows for people and as one picture."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from features.errors import InputError


def shown_collect(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per sampling rate, then one per store."""
    rates = report["cost"]["rates"]
    rows = [
        {
            "measured": f"overhead at {100 * float(name):g} % of tokens",
            "found": f"{100 * rate['overhead_fraction']:.1f} %",
            "interval": "{:.1f} to {:.1f} %".format(*(100 * edge for edge in rate["overhead_interval"])),
            "dropped": rate["dropped_windows"],
            "peak_host_bytes": rate["peak_host_bytes"],
        }
        for name, rate in rates.items()
    ]
    return rows + [
        {
            "measured": f"memory with a {name} store",
            "found": "within its budget" if store["within_budget"] else "ABOVE its budget",
            "interval": f"budget {store['budget_bytes']:,}",
            "dropped": store["dropped_windows"],
            "peak_host_bytes": store["peak_host_bytes"],
        }
        for name, store in report["stores"].items()
    ]


def plot_collect(report: Mapping[str, Any], path: Path) -> None:
    """Write a PNG: overhead by sampling rate with its interval, and what was held with a slow and a dead store.

    Raises:
        InputError: matplotlib is absent.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(f"--plot needs matplotlib ({error}): pip install matplotlib") from error
    rates, stores = report["cost"]["rates"], report["stores"]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    labels = [f"{100 * float(name):g} %" for name in rates]
    found = [100 * rate["overhead_fraction"] for rate in rates.values()]
    edges = [[100 * edge for edge in rate["overhead_interval"]] for rate in rates.values()]
    errors = [
        [value - low for value, (low, _) in zip(found, edges, strict=True)],
        [high - value for value, (_, high) in zip(found, edges, strict=True)],
    ]
    left.bar(labels, found, color="tab:blue", width=0.5)
    left.errorbar(labels, found, yerr=errors, fmt="none", color="black", capsize=4)
    left.axhline(8, color="tab:red", linestyle="--", linewidth=1, label="8 % (limit at 5 % of tokens)")
    left.set_xlabel("tokens collected")
    left.set_ylabel("% of forward time, median and 95 %")
    spec = report["spec"]
    left.set_title(
        f"{spec['sequences'] * spec['length']:,} tokens a step, H = {spec['hidden_size']}", fontsize=10
    )
    left.legend(fontsize=8)
    heights = [store["peak_host_bytes"] / 2**20 for store in stores.values()]
    bars = right.bar(list(stores), heights, color="tab:blue", width=0.5)
    labels = [f"{s['committed_windows']} committed\n{s['dropped_windows']} dropped" for s in stores.values()]
    right.bar_label(bars, labels, label_type="center", color="white", fontsize=8)
    budget = max(store["budget_bytes"] for store in stores.values()) / 2**20
    right.axhline(budget, color="tab:red", linestyle="--", linewidth=1, label="budget")
    right.set_ylabel("feature bytes held at most, MiB")
    right.set_title("store slower than the trainer", fontsize=10)
    right.set_ylim(top=1.25 * budget)
    right.legend(fontsize=8, loc="upper right")
    figure.savefig(path, dpi=150)
