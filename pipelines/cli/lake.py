"""Commands about the lake: init, doctor, collect, ls, show, explain."""

from pathlib import Path
from typing import Annotated

import typer

from features.collect.report import CollectReport
from features.schema import SelectionFilter, Split
from pipelines import collect as collecting
from pipelines import inspect, start
from pipelines.cli.output import (
    NOTHING_TO_DO,
    DryRunOption,
    FirstVersionOption,
    JsonOption,
    LakeOption,
    console_context,
    default_of,
    emit,
    json_object,
    parse_spec,
)
from pipelines.cli.rows import version_rows
from pipelines.cli.selecting import narrowed
from pipelines.collect import CollectSpec
from pipelines.context import LAKE_VARIABLE
from pipelines.narrowing import Narrowing

_SELECTION = SelectionFilter()


def add_commands(app: typer.Typer) -> None:
    """Mount this module's commands."""
    app.command(epilog="Example: draftlake init ./lake --target ./target/v0 --target-id tiny")(init)
    app.command(epilog="Example: draftlake doctor --lake ./lake --engine http://127.0.0.1:8000")(doctor)
    app.command(epilog="Example: draftlake collect r.jsonl --lake ./lake --target ./target/v3 --version 3")(
        collect
    )
    app.command("ls", epilog="Example: draftlake ls --lake ./lake")(list_)
    app.command(epilog="Example: draftlake show v3 --lake ./lake")(show)
    app.command(
        epilog="Example: draftlake explain --lake ./lake --newest-versions 3 --min-reward 0.5 --domain code"
    )(explain)


def init(
    lake: Annotated[str, typer.Argument(help="Folder or URL of the new lake.")],
    target: Annotated[Path, typer.Option(help="Model directory of any version of the target.")],
    target_id: Annotated[str, typer.Option(help="Name of the target in this lake.")],
    json: JsonOption = False,
) -> None:
    """Create the lake of one target (harmless when it is there already)."""
    emit(start.init_lake(lake, target=target, target_id=target_id), as_json=json, title=lake)


def doctor(
    lake: Annotated[str | None, typer.Option("--lake", envvar=LAKE_VARIABLE, help="Lake to check.")] = None,
    engine: Annotated[
        list[str] | None, typer.Option("--engine", help="vLLM server to check; repeatable.")
    ] = None,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Check packages, the store's create-if-absent, the lake and the engines' plugin."""
    report = start.doctor(console_context(), lake_url=lake, engines=tuple(engine or ()), dry_run=dry_run)
    emit(report if json else list(report.findings), as_json=json, title="doctor")
    if not report.ok:
        raise typer.Exit(1)


def collect(
    rollouts: Annotated[
        list[str], typer.Argument(help="Rollout files (JSON lines, format of docs/rollouts.md).")
    ],
    lake: LakeOption,
    target: Annotated[str, typer.Option(help="Model directory of the weights that sampled the rollouts.")],
    version: Annotated[int, typer.Option(min=0, help="Target version of these weights.")],
    layer_ids: Annotated[str | None, typer.Option(help="Aux layer ids, e.g. 2,4,5 (blocks applied).")] = None,
    dtype: Annotated[
        str, typer.Option(help="Type of the stored features: bfloat16 or float32.")
    ] = default_of(CollectSpec, "dtype"),
    engine_dtype: Annotated[
        str, typer.Option(help="Type the rollout engine computed in: bfloat16 or float32.")
    ] = default_of(CollectSpec, "engine_dtype"),
    sample_rate: Annotated[float, typer.Option(help="Share of rollouts to keep.")] = default_of(
        CollectSpec, "sample_rate"
    ),
    max_tokens: Annotated[
        int, typer.Option(help="Rows per window at most; eval walks whole rollouts only.")
    ] = default_of(CollectSpec, "max_tokens"),
    fragment_tokens: Annotated[
        int, typer.Option(help="Rows per fragment: what is held in memory, and committed at once.")
    ] = default_of(CollectSpec, "fragment_tokens"),
    seed: Annotated[int, typer.Option(help="Seed of the sampling policy.")] = default_of(CollectSpec, "seed"),
    engine: Annotated[
        str,
        typer.Option(help="What runs the target: transformers, vllm (started here), or a served vLLM's URL."),
    ] = default_of(CollectSpec, "engine"),
    engine_options: Annotated[
        str, typer.Option(help='More arguments of vllm.LLM, as JSON, e.g. {"max_model_len": 8192}.')
    ] = "{}",
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Run the target over rollouts and store sampled windows with the same-version head."""
    spec = parse_spec(
        CollectSpec,
        {
            "lake": lake,
            "rollouts": tuple(rollouts),
            "target": target,
            "version": version,
            "layer_ids": layer_ids.split(",") if layer_ids else None,
            "dtype": dtype,
            "engine_dtype": engine_dtype,
            "sample_rate": sample_rate,
            "max_tokens": max_tokens,
            "fragment_tokens": fragment_tokens,
            "seed": seed,
            "engine": engine,
            "engine_options": json_object(engine_options, option="--engine-options"),
        },
        where="collect",
    )
    if dry_run:
        emit(collecting.plan_collect(spec), as_json=json, title="would collect")
        return
    report = collecting.collect(spec, console_context())
    emit(report, as_json=json, title=f"collected v{version}")
    if report.quarantined:
        typer.echo(_refused(report, lake), err=True)
    if report.fragments == 0:
        raise typer.Exit(1 if report.quarantined and not report.duplicates else NOTHING_TO_DO)


def _refused(report: CollectReport, lake: str) -> str:
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(report.quarantined.items()))
    total = sum(report.quarantined.values())
    return (
        f"draftlake: {total} of {report.received} rollouts were refused ({reasons}). Each is kept with its "
        f"reason and remedy: draftlake show quarantine --lake {lake}"
    )


def list_(
    lake: LakeOption,
    samples: Annotated[bool, typer.Option("--samples", help="List windows instead of versions.")] = False,
    version: Annotated[int | None, typer.Option(min=0, help="Only this version's samples.")] = None,
    json: JsonOption = False,
) -> None:
    """List target versions with their windows, tokens and proofs; or the samples."""
    if version is not None and not samples:
        raise typer.BadParameter(
            "--version narrows the list of samples: give --samples too, or see `draftlake show`"
        )
    if samples:
        emit(inspect.list_samples(lake, version), as_json=json, title=lake)
        return
    rows = inspect.list_versions(lake)
    emit(rows, as_json=json, title=lake, shown=version_rows(rows))


def show(
    name: Annotated[
        str, typer.Argument(help="'lake', 'heads', 'quarantine', a version (v3), or a sample id.")
    ],
    lake: LakeOption,
    json: JsonOption = False,
) -> None:
    """Show the lake, its heads and their sizes, one version, one sample's windows, or what was refused."""
    if name == "lake":
        emit(inspect.show_lake(lake), as_json=json, title=lake)
    elif name == "heads":
        emit(inspect.show_heads(lake), as_json=json, title="head snapshots")
    elif name == "quarantine":
        emit(inspect.show_quarantine(lake), as_json=json, title="refused records")
    elif name.startswith("v") and name[1:].isdecimal():
        emit(inspect.show_version(lake, int(name[1:])), as_json=json, title=name)
    else:
        emit(inspect.show_sample(lake, name), as_json=json, title=name)


@narrowed
def explain(
    lake: LakeOption,
    first_version: FirstVersionOption = 0,
    stop_version: Annotated[int | None, typer.Option(min=1, help="Stop before this version.")] = None,
    split: Annotated[Split, typer.Option(help="all, train or held_out.")] = _SELECTION.split,
    held_out_percent: Annotated[
        int, typer.Option(min=0, max=90, help="Share of rollout groups that are held out.")
    ] = _SELECTION.held_out_percent,
    verified_only: Annotated[
        bool, typer.Option("--verified-only", help="Only windows whose logprobs agreed.")
    ] = _SELECTION.verified_only,
    json: JsonOption = False,
    *,
    narrowing: Narrowing,
) -> None:
    """Say what a selection would read: windows, tokens, bytes, versions, heads and requests."""
    wanted = narrowing.filter(
        inspect.version_range(first_version, stop_version),
        split=split,
        held_out_percent=held_out_percent,
        verified_only=verified_only,
    )
    plan = inspect.explain(lake, wanted)
    emit(plan, as_json=json, title=plan.summary())
    if plan.windows == 0:
        raise typer.Exit(NOTHING_TO_DO)
