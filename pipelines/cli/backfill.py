"""The command about old rollouts: ``draftlake backfill``, and the options it shares."""

from pathlib import Path
from typing import Annotated

import typer

from features.collect.sources.mapping import load_columns
from pipelines import backfill as backfilling
from pipelines.backfill_spec import BackfillReport, BackfillSpec
from pipelines.cli.output import (
    NOTHING_TO_DO,
    DryRunOption,
    JsonOption,
    LakeOption,
    console_context,
    default_of,
    emit,
    json_object,
    parse_spec,
)

OVER_QUOTA = 3
"""Exit code of a backfill that a quota ended: a script that goes on must not take it for complete."""


_DEFAULT = {name: default_of(BackfillSpec, name) for name in BackfillSpec.model_fields}


def add_commands(app: typer.Typer) -> None:
    """Mount this module's commands."""
    app.command(
        epilog="Example: draftlake backfill 'runs/*.jsonl.zst' --lake ./lake --target ./target/v3 --version 3"
    )(backfill)


SourcesArgument = Annotated[
    list[str], typer.Argument(help="Rollout files, folders or globs, local or s3:// (docs/backfill.md).")
]
TargetOption = Annotated[str, typer.Option(help="Model directory of the weights that sampled the rollouts.")]
VersionOption = Annotated[int, typer.Option(min=0, help="Target version of these weights.")]
FormatOption = Annotated[
    str | None, typer.Option("--format", help="Format of the sources; found out by default.")
]
ColumnsOption = Annotated[
    Path | None, typer.Option(help="TOML or JSON file: our field = their column (format mapping).")
]
UnversionedOption = Annotated[
    bool,
    typer.Option(
        "--take-unversioned", help="Take rollouts of unknown or mixed version as --version, unverified."
    ),
]
SynchronousOption = Annotated[
    bool, typer.Option("--assume-synchronous", help="The step in a file's name tells the version.")
]
EvaluationOption = Annotated[
    bool, typer.Option("--evaluation", help="The files are of evaluations, run after their step's update.")
]
RetokeniseOption = Annotated[
    bool, typer.Option("--allow-retokenise", help="Tokenise sources without token ids; stays unverified.")
]
LabelOffsetOption = Annotated[
    int, typer.Option(help="Added to an engine's weight label to give the version.")
]
KindOption = Annotated[
    str | None, typer.Option(help="Where unrecorded: engine_raw, engine_processed or engine_unknown.")
]
TemperatureOption = Annotated[float | None, typer.Option(help="Of the sampling, where unrecorded.")]
TopPOption = Annotated[float | None, typer.Option(help="Of the sampling, where unrecorded.")]
TopKOption = Annotated[int | None, typer.Option(help="Of the sampling, where unrecorded.")]
LayersOption = Annotated[str | None, typer.Option(help="Aux layer ids, e.g. 2,4,5 (blocks applied).")]
DtypeOption = Annotated[str, typer.Option(help="Type of the stored features: bfloat16 or float32.")]
EngineDtypeOption = Annotated[
    str, typer.Option(help="Type the rollout engine computed in: bfloat16 or float32.")
]
RateOption = Annotated[float, typer.Option(help="Share of rollouts to keep.")]
MaxTokensOption = Annotated[
    int, typer.Option(help="Rows per window at most; eval walks whole rollouts only.")
]
SeedOption = Annotated[int, typer.Option(help="Seed of the sampling policy.")]
SamplingOption = Annotated[
    str, typer.Option(help='More of the sampling policy, as JSON, e.g. {"placement": "response_only"}.')
]
FragmentOption = Annotated[
    int, typer.Option(help="Rows per fragment: what is held in memory, and committed at once.")
]
QuotaTokensOption = Annotated[int | None, typer.Option(help="Feature rows that this run may write.")]
QuotaBytesOption = Annotated[int | None, typer.Option(help="Feature bytes that this run may write.")]
WorkersOption = Annotated[int, typer.Option(min=1, help="Processes, each with the target loaded.")]


def backfill(
    sources: SourcesArgument,
    lake: LakeOption,
    target: TargetOption,
    version: VersionOption,
    format: FormatOption = None,
    columns: ColumnsOption = None,
    take_unversioned: UnversionedOption = _DEFAULT["take_unversioned"],
    assume_synchronous: SynchronousOption = _DEFAULT["assume_synchronous"],
    evaluation: EvaluationOption = _DEFAULT["evaluation"],
    allow_retokenise: RetokeniseOption = _DEFAULT["allow_retokenise"],
    label_offset: LabelOffsetOption = _DEFAULT["label_offset"],
    logprob_kind: KindOption = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    layer_ids: LayersOption = None,
    dtype: DtypeOption = _DEFAULT["dtype"],
    engine_dtype: EngineDtypeOption = _DEFAULT["engine_dtype"],
    sample_rate: RateOption = _DEFAULT["sample_rate"],
    max_tokens: MaxTokensOption = _DEFAULT["max_tokens"],
    seed: SeedOption = _DEFAULT["seed"],
    sampling: SamplingOption = "{}",
    fragment_tokens: FragmentOption = _DEFAULT["fragment_tokens"],
    quota_tokens: QuotaTokensOption = None,
    quota_bytes: QuotaBytesOption = None,
    workers: WorkersOption = _DEFAULT["workers"],
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Recompute the target's features for old rollouts of any known format and store windows; resumable."""
    given = {name: value for name, value in locals().items() if name not in ("dry_run", "json")}
    given |= {
        "sources": tuple(sources),
        "columns": None if columns is None else load_columns(columns),
        "layer_ids": layer_ids.split(",") if layer_ids else None,
        "sampling": json_object(sampling, option="--sampling"),
    }
    spec = parse_spec(BackfillSpec, given, where="backfill")
    if dry_run:
        emit(backfilling.plan_backfill(spec, console_context()), as_json=json, title="would backfill")
        return
    report = backfilling.backfill(spec, console_context())
    emit(report, as_json=json, title=f"backfilled v{version}")
    _tell(report, lake)


def _tell(report: BackfillReport, lake: str) -> None:
    """Say on stderr what was left or refused, and exit accordingly."""
    if report.quarantined:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in report.quarantined.items())
        total = sum(report.quarantined.values())
        typer.echo(
            f"draftlake: {total:,} of {report.rows_read:,} sequences were refused ({reasons}). Each is kept with "
            f"its reason: draftlake quarantine ls --lake {lake}",
            err=True,
        )
    if report.over_quota:
        typer.echo(
            f"draftlake: the quota ended it with {report.over_quota:,} sequences left; run the same command again, "
            f"with a larger quota or none, to go on.",
            err=True,
        )
        raise typer.Exit(OVER_QUOTA)
    if report.fragments == 0:
        raise typer.Exit(1 if report.quarantined and not report.duplicates else NOTHING_TO_DO)
