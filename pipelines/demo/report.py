"""The closing table and the picture of the demo."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from pipelines.demo.spec import DemoResult

_STALE, _PUBLISHED = "#c44e52", "#2f7f5f"


def draw(result: DemoResult, path: Path) -> None:
    """Acceptance length by target version and, beside it, live before and after the swap (PNG)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(11, 4.4), width_ratios=(2.2, 1), layout="constrained"
    )
    versions = sorted(result.tau_by_version)
    left.plot(
        versions,
        [result.tau_by_version[v] for v in versions],
        "o-",
        color=_STALE,
        label="first draft, engine counters",
    )
    styles = {
        "stale": (_STALE, "first draft, offline walk"),
        "published": (_PUBLISHED, "new draft, offline walk"),
    }
    for name, (colour, label) in styles.items():
        series = result.offline_tau_by_version[name]
        left.plot(
            sorted(series), [series[v] for v in sorted(series)], "s--", color=colour, alpha=0.75, label=label
        )
    left.set(
        xlabel="target version",
        ylabel="acceptance length (tau)",
        title="The draft goes stale as the target moves",
    )
    left.set_xticks(versions)
    left.grid(alpha=0.3)
    left.legend(frameon=False)
    bars = right.bar(
        ["first draft", "published"],
        [result.tau_stale, result.tau_published],
        color=[_STALE, _PUBLISHED],
        width=0.6,
    )
    right.bar_label(bars, fmt="%.2f", padding=3)
    low, high = result.tau_gain_ci
    right.set(
        title=f"Live swap at v{versions[-1]}: {result.tau_gain:+.2f}\n95 % interval [{low:.2f}, {high:.2f}]",
        ylabel="acceptance length (tau)",
        ylim=(1, max(result.tau_published, result.tau_stale) * 1.15),
    )
    right.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def print_summary(result: DemoResult, console: Console) -> None:
    """The closing table: what was measured, and where things lie."""
    table = Table(title="One draft, before and after a live swap", show_header=False)
    table.add_column("what")
    table.add_column("measured", overflow="fold")
    by_version = ", ".join(f"v{v} {t:.2f}" for v, t in sorted(result.tau_by_version.items()))
    low, high = result.tau_gain_ci
    rows = {
        "first draft as the target moved (engine)": by_version,
        "fresh prompts, stale draft": f"{result.tau_stale:.3f}",
        "fresh prompts, published draft": f"{result.tau_published:.3f}",
        "gain (95 % interval over prompts)": f"{result.tau_gain:+.3f} [{low:+.3f}, {high:+.3f}]",
        "offline walk of the same sequences": f"{result.offline_tau:.3f} (engine {result.engine_tau:.3f})",
        "greedy text equal to decoding without a draft": _yes(result.greedy_equal),
        "target untouched by the swap": _yes(result.target_unchanged),
        "live draft equals the artifact": _yes(result.draft_matches_artifact),
        "engine paused for": f"{1000 * result.pause_seconds.get('total', float('nan')):.0f} ms",
        "windows verified / refused": f"{result.verified_windows} / {sum(result.quarantined.values())}",
        "lake": result.lake,
        "published draft": result.artifact,
        "picture": result.plot,
        "time": f"{result.seconds:.0f} s (engine start {result.engine_start_seconds:.0f} s of it)",
    }
    for what, measured in rows.items():
        table.add_row(what, measured)
    console.print(table)


def _yes(flag: bool) -> str:
    return "yes" if flag else "NO"
