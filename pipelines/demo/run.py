"""The story of the demo, top to bottom: a target moves, its draft goes stale, and is repaired live."""

import shutil
import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from features.catalog import Catalog
from features.collect.rollouts import Rollout, write_rollouts
from features.errors import InputError
from features.lake import Lake
from features.schema import Split
from features.storage import Store
from pipelines import promote
from pipelines.collect import CollectSpec, collect, load_target
from pipelines.context import RunContext
from pipelines.demo.history import (
    MovingTarget,
    make_first_version,
    moving_target,
    peak_rss_bytes,
    version_folder,
)
from pipelines.demo.live import (
    LiveAcceptance,
    as_rollout,
    greedy_sequences,
    is_greedy_without_draft,
    measure_acceptance,
    move_engine,
    recorded,
    sample_rollouts,
)
from pipelines.demo.prompts import Prompt, fresh_prompts, group_prompts
from pipelines.demo.report import draw
from pipelines.demo.spec import DRAFT_ASSET, TARGET_ASSET, TARGET_ID, DemoResult, DemoSpec
from pipelines.evaluate import EvalJob, evaluate
from pipelines.start import init_lake
from pipelines.train import TrainJob, train
from publish.launch import LocalServer, serve_command
from publish.registry import Registry
from publish.swap import serves
from publish.vllm_client import VllmEngine
from training.artifact import EvalReport
from training.evaluate import paired_gain

_REVIEWER = "demo"
_SEEDS_PER_VERSION = 1000
"""Requests of a version sample with seeds of their own: more apart than a version has requests."""
_FRESH_SEED = 77
"""Fresh prompts sample with one seed before and after the swap, so that the two are paired."""


@dataclass(slots=True)
class _Story:
    """What the chapters hand on to each other."""

    spec: DemoSpec
    ctx: RunContext
    out: Path
    tokenizer: Any
    stale: str = ""
    published: str = ""
    tau_by_version: dict[int, float] = field(default_factory=dict)
    verified: int = 0
    quarantined: dict[str, int] = field(default_factory=dict)

    @property
    def lake(self) -> str:
        return str(self.out / "lake")

    @property
    def store(self) -> Store:
        return Lake.open(self.lake).store

    @property
    def targets(self) -> Path:
        return self.out / "target"


def run_demo(spec: DemoSpec, ctx: RunContext, *, overwrite: bool = False) -> DemoResult:
    """Run the whole loop under ``spec.out`` and return what was measured.

    Raises:
        InputError: ``spec.out`` holds something already and ``overwrite`` is off.
    """
    from transformers import AutoTokenizer

    began = time.monotonic()
    out = _empty_folder(Path(spec.out), overwrite)
    story = _Story(spec, ctx, out, AutoTokenizer.from_pretrained(TARGET_ASSET))
    with ExitStack() as stack:
        _first_version(story)
        target = stack.enter_context(moving_target(story.targets, spec.history, spec.seed))
        ctx.progress.say("start vLLM with target v0 and the first draft")
        server = _server(story)
        engine = stack.enter_context(server)
        _live_through_history(story, engine, target)
        makers_peak_bytes = target.peak_rss_bytes()
        reports = _train_and_approve(story)
        result = _swap_and_measure(story, engine, reports)
    costs = {
        "engine_start_seconds": server.start_seconds,
        "peak_rss_bytes": makers_peak_bytes + peak_rss_bytes(),
        "seconds": time.monotonic() - began,
    }
    return result.model_copy(update=costs)


def _empty_folder(out: Path, overwrite: bool) -> Path:
    if out.exists() and any(out.iterdir()):
        if not overwrite:
            raise InputError(f"{out} is not empty; choose another folder with --out, or add --overwrite")
        if not (out / "lake" / "lake.json").is_file():
            raise InputError(
                f"{out} does not look like an earlier demo (no lake/lake.json); remove it yourself"
            )
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    return out.resolve()


def _first_version(story: _Story) -> None:
    first = make_first_version(story.targets)
    init_lake(story.lake, target=first, target_id=TARGET_ID)
    lake = Lake.open(story.lake)
    story.stale = Registry(lake.store, TARGET_ID).import_artifact(DRAFT_ASSET)
    promote.bootstrap(story.lake, story.stale, story.ctx, by=_REVIEWER)


def _server(story: _Story) -> LocalServer:
    registry = Path(story.lake) / "registry"
    command = serve_command(
        version_folder(story.targets, 0),
        registry / "artifacts" / story.stale,
        port=_free_port(),
        num_speculative_tokens=story.spec.num_speculative_tokens,
        registry_roots=(str(registry),),
        max_num_seqs=story.spec.max_num_seqs,
        max_model_len=512,
    )
    return LocalServer(command, log_path=story.out / "engine.log")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _live_through_history(story: _Story, engine: VllmEngine, target: MovingTarget) -> None:
    spec = story.spec
    prompts = group_prompts(
        story.tokenizer,
        "prose",
        count=spec.rollouts.groups,
        length=spec.rollouts.prompt_tokens,
        seed=spec.seed,
    )
    for version in range(spec.history.last_version + 1):
        folder = target.wait_for(version)
        if version == 0:
            engine.set_target_version("0")
        else:
            move_engine(engine, folder, version)
        with recorded(engine, story.store, story.ctx.now, version=version, label="rollouts") as interval:
            rollouts = sample_rollouts(
                engine, prompts, spec.rollouts, seed=spec.seed + _SEEDS_PER_VERSION * version, domain="prose"
            )
        story.tau_by_version[version] = interval[0].tau
        _collect(story, rollouts, folder, version, name="rollouts")
        story.ctx.progress.say(
            f"v{version}: {len(rollouts)} rollouts, acceptance length {interval[0].tau:.2f}"
        )


def _collect(story: _Story, rollouts: list[Rollout], folder: Path, version: int, *, name: str) -> None:
    path = story.out / "rollouts" / f"{name}-v{version}.jsonl"
    path.parent.mkdir(exist_ok=True)
    write_rollouts(path, rollouts)
    job = CollectSpec(
        lake=story.lake, rollouts=(str(path),), target=str(folder), version=version, engine_dtype="float32"
    )
    report = collect(job, story.ctx)
    story.verified += report.verified
    for reason, count in report.quarantined.items():
        story.quarantined[reason] = story.quarantined.get(reason, 0) + count


def _train_and_approve(story: _Story) -> dict[str, EvalReport]:
    spec, ctx = story.spec, story.ctx
    stop = spec.history.last_version + 1
    ctx.progress.say(f"train a draft on versions [{spec.first_train_version}, {stop})")
    job = TrainJob(
        lake=story.lake,
        first_version=spec.first_train_version,
        stop_version=stop,
        parent=story.stale,
        train=spec.train,
    )
    story.published = train(job, ctx).artifact
    evaluate(_eval_job(story, story.published, baseline=story.stale), ctx)
    promote.approve(story.lake, story.published, ctx, reviewer=_REVIEWER, reason="the gate passed")
    over_time = {"first_version": 0, "stop_version": stop}
    return {
        "stale": evaluate(_eval_job(story, story.stale, **over_time), ctx),
        "published": evaluate(_eval_job(story, story.published, **over_time), ctx),
    }


def _eval_job(story: _Story, artifact: str, **more: Any) -> EvalJob:
    k = story.spec.num_speculative_tokens
    return EvalJob(lake=story.lake, artifact=artifact, num_speculative_tokens=k, **more)


def _swap_and_measure(story: _Story, engine: VllmEngine, reports: dict[str, EvalReport]) -> DemoResult:
    spec, ctx = story.spec, story.ctx
    last = spec.history.last_version
    prompts = fresh_prompts(
        story.tokenizer, "prose", count=spec.fresh_prompts, length=spec.rollouts.prompt_tokens, seed=spec.seed
    )
    model = load_target(version_folder(story.targets, last))
    before = engine.state()
    greedy = greedy_sequences(engine, prompts, max_tokens=spec.rollouts.max_tokens)
    stale = _measure(story, engine, prompts, "fresh prompts, stale draft")
    publication = promote.publish(story.lake, story.published, (engine.base_url,), ctx, by=_REVIEWER)
    after = engine.state()
    greedy_after = greedy_sequences(engine, prompts, max_tokens=spec.rollouts.max_tokens)
    published = _measure(story, engine, prompts, "fresh prompts, published draft")
    gain = paired_gain(*published.sums, *stale.sums, k=spec.num_speculative_tokens, seed=spec.seed)
    calibration = _calibrate(story, prompts, published)
    lake = Lake.open(story.lake)
    artifact = Registry(lake.store, TARGET_ID).artifact(story.published)
    result = DemoResult(
        tau_stale=stale.tau,
        tau_published=published.tau,
        tau_gain=gain.value,
        tau_gain_ci=(gain.low, gain.high),
        greedy_equal=is_greedy_without_draft(model, [*greedy, *greedy_after]),
        target_unchanged=before.target_fingerprint
        == after.target_fingerprint
        == engine.state().target_fingerprint,
        draft_matches_artifact=serves(after, artifact),
        offline_tau=calibration.overall.tau.value,
        engine_tau=published.tau,
        tau_by_version=story.tau_by_version,
        offline_tau_by_version={
            name: {v: t.tau.value for v, t in report.by_version.items()} for name, report in reports.items()
        },
        versions=tuple(range(last + 1)),
        lake=story.lake,
        lake_revision=Catalog.load(lake).revision.digest,
        artifact=story.published,
        stale_artifact=story.stale,
        verified_windows=story.verified,
        quarantined=story.quarantined,
        pause_seconds=publication.seconds,
        plot=str(story.out / "acceptance.png"),
    )
    draw(result, Path(result.plot))
    return result


def _measure(story: _Story, engine: VllmEngine, prompts: list[Prompt], label: str) -> LiveAcceptance:
    spec, version = story.spec, story.spec.history.last_version
    with (
        story.ctx.progress.bar(label, total=len(prompts)) as advance,
        recorded(engine, story.store, story.ctx.now, version=version, label=label),
    ):
        return measure_acceptance(
            engine,
            prompts,
            spec.rollouts,
            samples=spec.fresh_samples,
            seed=spec.seed + _FRESH_SEED,
            advance=advance,
        )


def _calibrate(story: _Story, prompts: list[Prompt], live: LiveAcceptance) -> EvalReport:
    """Walk offline exactly the sequences whose rounds the engine counted."""
    spec, last = story.spec, story.spec.history.last_version
    rollouts = [
        as_rollout(p, s, sample=i, temperature=spec.rollouts.temperature, domain="fresh")
        for p, sequences in zip(prompts, live.sequences, strict=True)
        for i, s in enumerate(sequences)
    ]
    _collect(story, rollouts, version_folder(story.targets, last), last, name="fresh")
    job = _eval_job(
        story, story.published, first_version=last, stop_version=last + 1, split=Split.ALL, domains=("fresh",)
    )
    return evaluate(job, story.ctx)
