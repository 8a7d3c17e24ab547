"""Commands that keep a lake small and sound: retain, gc, fsck."""

import re
from datetime import timedelta
from typing import Annotated, Any

import typer

from features.check import Level
from features.gc import GcPolicy
from features.retention import RetentionPolicy
from pipelines import housekeeping
from pipelines.cli.output import (
    NOTHING_TO_DO,
    DryRunOption,
    JsonOption,
    LakeOption,
    ReasonOption,
    console_context,
    emit,
    plain,
)

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_BYTES = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def _duration(text: str) -> timedelta:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no time: write a number and s, m, h or d, such as 12h or 30d")
    try:
        return timedelta(seconds=float(match[1]) * _SECONDS[match[2]])
    except OverflowError:
        raise typer.BadParameter(f"{text[:40]!r} is longer than any time: write one such as 30d") from None


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(|KiB|MiB|GiB|TiB)", text)
    if match is None:
        raise typer.BadParameter(
            f"{text!r} is no size: write a number and KiB, MiB, GiB or TiB, such as 500GiB"
        )
    try:
        return int(float(match[1]) * _BYTES[match[2]])
    except OverflowError:
        raise typer.BadParameter(f"{text[:40]!r} is larger than any size: write one such as 500GiB") from None


ForceOption = Annotated[
    bool, typer.Option("--force", help="Overrule what pinned revisions, leases and registered drafts need.")
]


def add_commands(app: typer.Typer) -> None:
    """Mount this module's commands."""
    app.command(epilog="Example: draftlake retain --lake ./lake --keep-versions 20 --max-age 30d --dry-run")(
        retain
    )
    app.command(epilog="Example: draftlake gc --lake ./lake --dry-run")(gc)
    app.command(epilog="Example: draftlake fsck --lake ./lake --level 2 --share 0.1")(fsck)


def retain(
    lake: LakeOption,
    max_age: Annotated[
        timedelta | None,
        typer.Option(
            parser=_duration, metavar="TIME", help="Give up versions with no newer fragment: 30d, 12h."
        ),
    ] = None,
    keep_versions: Annotated[
        int | None, typer.Option(min=1, help="Keep so many of the newest versions.")
    ] = None,
    max_bytes: Annotated[
        int | None,
        typer.Option(parser=_size, metavar="SIZE", help="Keep the newest versions that fit: 500GiB."),
    ] = None,
    max_pin_age: Annotated[
        timedelta | None,
        typer.Option(
            parser=_duration,
            metavar="TIME",
            help="Release older pinned revisions that no lease or draft needs.",
        ),
    ] = None,
    reason: ReasonOption = "retention",
    force: ForceOption = False,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Give up old target versions that nobody needs: readers skip them at once, gc frees them later."""
    policy = RetentionPolicy(max_age, keep_versions, max_bytes, max_pin_age)
    report = housekeeping.retain(lake, policy, console_context(), reason=reason, force=force, dry_run=dry_run)
    shown: dict[str, Any] = plain(report)
    rows = [{k: v for k, v in row.items() if k != "newest"} for row in shown["versions"]]
    emit(report, as_json=json, title=lake, shown=rows)
    if report.empty:
        raise typer.Exit(NOTHING_TO_DO)


def gc(
    lake: LakeOption,
    orphan_ttl: Annotated[
        timedelta,
        typer.Option(parser=_duration, metavar="TIME", help="Age of data without a commit before they go."),
    ] = "24h",  # type: ignore[assignment]
    grace: Annotated[
        timedelta,
        typer.Option(
            parser=_duration, metavar="TIME", help="Wait after a tombstone and after a lease's end."
        ),
    ] = "1h",  # type: ignore[assignment]
    force: ForceOption = False,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Delete data of given-up versions, orphans of killed writers, old temporary files and expired leases."""
    summary = housekeeping.collect_garbage(
        lake, GcPolicy(orphan_ttl, grace), console_context(), force=force, dry_run=dry_run
    )
    emit(summary, as_json=json, title=lake, shown={k: v for k, v in plain(summary).items() if k != "actions"})
    if summary.empty:
        raise typer.Exit(NOTHING_TO_DO)


def fsck(
    lake: LakeOption,
    level: Annotated[
        int, typer.Option(min=0, max=2, help="0: listings; 1: lengths and indexes; 2: checksums.")
    ] = 0,
    share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the windows that level 2 reads.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Another seed takes another share.")] = 0,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Hide damaged fragments; they can be collected again.")
    ] = False,
    release: Annotated[
        bool, typer.Option("--release", help="Show fragments again whose objects were put back (level 2).")
    ] = False,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Check a lake against its commits, and hide what is damaged."""
    if release and (level < 2 or share < 1):
        raise typer.BadParameter("--release trusts checksums only: give --level 2 and the whole --share")
    checked: Level = 0 if level == 0 else 1 if level == 1 else 2
    report = housekeeping.fsck(
        lake, console_context(), level=checked, share=share, seed=seed, quarantine=quarantine, release=release,
        dry_run=dry_run,
    )  # fmt: skip
    rows = [
        {"code": f.code, "path": f.path, "harmful": f.harmful, "detail": f.detail} for f in report.findings
    ]
    emit(report, as_json=json, title=f"{lake}: {'sound' if report.ok else 'damaged'}", shown=rows)
    if not report.ok:
        raise typer.Exit(1)
