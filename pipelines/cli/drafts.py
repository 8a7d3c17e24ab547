"""Commands about drafts: import, train, eval, approve, reject, registry."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import yaml

from features.errors import InputError
from pipelines import evaluate as evaluating
from pipelines import promote
from pipelines import train as training_pipeline
from pipelines.cli.output import (
    DryRunOption,
    FirstVersionOption,
    JsonOption,
    LakeOption,
    ReasonOption,
    ReviewerOption,
    StopVersionOption,
    console_context,
    default_of,
    emit,
    parse_spec,
)
from pipelines.cli.rows import draft_page, draft_row
from pipelines.cli.selecting import narrowed
from pipelines.evaluate import EvalJob
from pipelines.narrowing import Narrowing
from training.spec import TrainSpec

ArtifactArgument = Annotated[str, typer.Argument(help="Artifact digest, or its unique beginning.")]
registry_app = typer.Typer(help="Look into the registry of drafts.", no_args_is_help=True)


def add_commands(app: typer.Typer) -> None:
    """Mount this module's commands."""
    app.command("import", epilog="Example: draftlake import ./draft --lake ./lake")(import_)
    app.command(epilog="Example: draftlake train --lake ./lake --first-version 2 --stop-version 6 --dry-run")(
        train
    )
    app.command("eval", epilog="Example: draftlake eval 3f2a91 --lake ./lake --baseline 91bc04")(eval_)
    app.command(
        epilog="Example: draftlake approve 3f2a91 --lake ./lake --reviewer ada --reason 'gain is clear'"
    )(approve)
    app.command(
        epilog="Example: draftlake reject 3f2a91 --lake ./lake --reviewer ada --reason 'worse on prose'"
    )(reject)
    registry_app.command("ls", epilog="Example: draftlake registry ls --lake ./lake")(registry_ls)
    registry_app.command("show", epilog="Example: draftlake registry show 3f2a91 --lake ./lake")(
        registry_show
    )
    registry_app.command("diff", epilog="Example: draftlake registry diff 3f2a91 91bc04 --lake ./lake")(
        registry_diff
    )
    app.add_typer(registry_app, name="registry")


def import_(
    folder: Annotated[
        Path, typer.Argument(help="Draft folder: model.safetensors, config.json, manifest.json.")
    ],
    lake: LakeOption,
    json: JsonOption = False,
) -> None:
    """Register a draft folder as a candidate."""
    emit({"artifact": promote.import_draft(lake, folder)}, as_json=json, title="imported")


@narrowed
def train(
    lake: LakeOption,
    first_version: FirstVersionOption,
    stop_version: StopVersionOption,
    parent: Annotated[str | None, typer.Option(help="Registered draft to start from (digest).")] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML with training-spec fields that differ from the parent's, or the defaults."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Overrides epochs.")] = None,
    include_unverified: Annotated[
        bool, typer.Option("--include-unverified", help="Also train on windows without a logprob proof.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Lake revision to pin.")] = None,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    *,
    narrowing: Narrowing,
) -> None:
    """Train a draft on a range of target versions and register it as a candidate.

    With --parent it starts from that draft's weights and keeps its training spec.
    """
    _, registry = promote.open_registry(lake)
    parent = registry.resolve(parent) if parent else None
    inherited = registry.manifest(parent).spec if parent else {}
    job = training_pipeline.TrainJob(
        lake=lake,
        first_version=first_version,
        stop_version=stop_version,
        parent=parent,
        revision=revision,
        verified_only=not include_unverified,
        narrowing=narrowing,
        train=_train_spec(inherited, config, {"epochs": epochs}),
    )
    if dry_run:
        plan = training_pipeline.plan_training(job)
        emit(plan, as_json=json, title=f"would train on {plan.summary()}")
        return
    emit(training_pipeline.train(job, console_context()), as_json=json, title="trained")


def _train_spec(inherited: dict[str, Any], config: Path | None, options: dict[str, Any]) -> TrainSpec:
    """The parent's fields, then the config's, then the command line's; ``method`` is merged by field."""
    given = {} if config is None else _yaml_mapping(config)
    fields = inherited | given | {name: value for name, value in options.items() if value is not None}
    if isinstance(inherited.get("method"), dict) and isinstance(given.get("method"), dict):
        fields["method"] = inherited["method"] | given["method"]
    return parse_spec(TrainSpec, fields, where=str(config or "training spec"))


def _yaml_mapping(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(f"no such config file: {path}. Name a YAML file with fields of the training spec.")
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not YAML: {' '.join(str(error).split())}. Correct it.") from error
    if not isinstance(found, dict):
        raise InputError(
            f"{path} holds {type(found).__name__}, expected a mapping such as 'epochs: 2'. Correct it."
        )
    return found


def eval_(
    artifact: ArtifactArgument,
    lake: LakeOption,
    baseline: Annotated[str | None, typer.Option(help="Draft to compare with; default: production.")] = None,
    first_version: Annotated[
        int | None, typer.Option(min=0, help="Default: the newest version only.")
    ] = None,
    stop_version: Annotated[int | None, typer.Option(min=1, help="Stop before this version.")] = None,
    mode: Annotated[
        Literal["greedy", "sampled-onehot"],
        typer.Option(help="How the rollouts were sampled: at temperature 0, or above it."),
    ] = default_of(EvalJob, "mode"),
    num_speculative_tokens: Annotated[
        int, typer.Option("--k", min=1, max=16, help="Draft tokens per round.")
    ] = default_of(EvalJob, "num_speculative_tokens"),
    include_unverified: Annotated[
        bool, typer.Option("--include-unverified", help="Also walk windows without a logprob proof.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Measure offline tau on held-out groups, against the production draft; stored as evidence."""
    _, registry = promote.open_registry(lake)
    job = EvalJob(
        lake=lake,
        artifact=registry.resolve(artifact),
        baseline=registry.resolve(baseline) if baseline else None,
        first_version=first_version,
        stop_version=stop_version,
        mode=mode,
        num_speculative_tokens=num_speculative_tokens,
        verified_only=not include_unverified,
    )
    emit(evaluating.evaluate(job, console_context()), as_json=json, title="evaluation")


def approve(
    artifact: ArtifactArgument,
    lake: LakeOption,
    reason: ReasonOption,
    reviewer: ReviewerOption,
    force: Annotated[bool, typer.Option("--force", help="Override the gate; recorded as forced.")] = False,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Approve a draft whose gate passed (exit 3 when the gate refuses)."""
    if dry_run:
        decision = promote.judge(lake, artifact)
        emit(decision, as_json=json, title="gate")
        if not decision.passed:
            raise typer.Exit(3)
        return
    done = promote.approve(lake, artifact, console_context(), reviewer=reviewer, reason=reason, force=force)
    emit(done, as_json=json, title="approved")


def reject(
    artifact: ArtifactArgument,
    lake: LakeOption,
    reason: ReasonOption,
    reviewer: ReviewerOption,
    json: JsonOption = False,
) -> None:
    """Reject a draft: it can no longer be published."""
    done = promote.reject(lake, artifact, console_context(), reviewer=reviewer, reason=reason)
    emit(done, as_json=json, title="rejected")


def registry_ls(lake: LakeOption, json: JsonOption = False) -> None:
    """List drafts with state, method, versions trained on and measured tau."""
    _, registry = promote.open_registry(lake)
    drafts = registry.list()
    emit(drafts, as_json=json, title="drafts", shown=[draft_row(draft) for draft in drafts])


def registry_show(artifact: ArtifactArgument, lake: LakeOption, json: JsonOption = False) -> None:
    """Show a draft's config, manifest and all evidence about it."""
    _, registry = promote.open_registry(lake)
    found = registry.describe(registry.resolve(artifact))
    emit(found, as_json=json, title="draft", shown=draft_page(found))


def registry_diff(
    first: ArtifactArgument,
    second: Annotated[str, typer.Argument(help="The other digest.")],
    lake: LakeOption,
    json: JsonOption = False,
) -> None:
    """Show how two drafts differ: config, manifest, tensors, measured tau."""
    _, registry = promote.open_registry(lake)
    emit(registry.diff(registry.resolve(first), registry.resolve(second)), as_json=json, title="difference")
