"""The training loop: a selection and a spec in, a checked draft artifact out.

Runs on one process or under ``accelerate launch``. Every loss is a sum over a count, totalled
over processes before the division, so that how windows fall on processes does not matter. Which
windows those are at each step is the reader's plan (``training.reading``), the same in every run.
"""

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from features.errors import TrainingFailedError
from features.schema import TargetIdentity
from training.artifact import DraftArtifact, TrainingManifest
from training.batches import DraftBatch
from training.export import Staging
from training.feed import Feed
from training.held_out import kept_out
from training.losses import LossTerms
from training.methods import DRAFT_METHODS, DraftMethod
from training.numerics import deterministic_algorithms
from training.provenance import package_versions
from training.reading.reader import ReadStep, SelectionReader
from training.reading.spec import Position, ReadSpec
from training.setup import Census, Setup, find_method, prepare_model, take_census
from training.spec import TrainSpec

if TYPE_CHECKING:
    from features.catalog import Selection
    from features.lake import Lake

log = logging.getLogger(__name__)

MIN_STEPS_TO_JUDGE = 10
"""Steps before the share of skipped ones is held against the limit."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a run gave; ``counts`` names everything left out."""

    artifact: DraftArtifact
    folder: Path
    metrics: list[dict[str, float]]
    counts: dict[str, int]


class _LossModule(nn.Module):
    """The forward pass as one module, so that a data-parallel wrapper sees every parameter used."""

    def __init__(self, method: DraftMethod, model: nn.Module, spec: TrainSpec) -> None:
        super().__init__()
        self.model = model
        self._method, self._spec = method, spec

    def forward(self, batch: DraftBatch) -> LossTerms:
        bf16 = self._spec.compute_dtype == "bfloat16"
        with torch.autocast(batch.aux.device.type, dtype=torch.bfloat16, enabled=bf16):
            return self._method.loss(self.model, batch, self._spec.method)


def train_draft(
    lake: "Lake",
    selection: "Selection",
    spec: TrainSpec,
    *,
    out: Path,
    target_config: dict[str, Any],
    layer_ids: Sequence[int] | None = None,
    parent: Path | None = None,
    on_progress: Callable[[Mapping[str, float]], None] | None = None,
    methods: Mapping[str, DraftMethod] = DRAFT_METHODS,
    read_threads: int | None = None,
) -> TrainResult:
    """Train a draft on a selection and write it to ``out``, which appears whole or not at all.

    A caller beside whom retention may run holds a lease meanwhile (``training.reading.lease``).

    Args:
        target_config: the target's ``config.json``; sizes the spec leaves open come from it.
        layer_ids: aux layers to read; None takes the recorded ones when all fragments agree,
            else the method's default. A warm start keeps its parent's.
        parent: draft folder to start from.
        on_progress: called after each step with its metrics.
        read_threads: reads under way at once, as ``ReadSpec.concurrency``; the outcome does not depend on it.

    Raises:
        EmptySelectionError: nothing is selected.
        InputError: ``out`` holds a draft already, the spec names an unknown method, or there are fewer
            windows than processes.
        DraftLayoutError: features, parent and spec do not fit each other.
        TrainingFailedError: no token is supervised, or too many steps were not finite.
    """
    method = find_method(spec, methods)
    selection.require_nonempty()
    accelerator = Accelerator()
    with closing(Staging(out)) as staging:
        rows = selection.rows
        feed = Feed(lake, accelerator.device)
        with deterministic_algorithms(spec.deterministic, accelerator.device):
            census = take_census(lake, rows, spec, method)
            setup = prepare_model(
                lake, rows, feed, spec, method, token_counts=census.token_counts,
                target_config=target_config, layer_ids=layer_ids, parent=parent,
            )  # fmt: skip
            reader = SelectionReader(
                lake, selection.at(census.usable), reading(spec, read_threads), allocate=feed.allocate,
                rank=accelerator.process_index, world_size=accelerator.num_processes,
            )  # fmt: skip
            run = _Run(accelerator, reader, feed, spec, method, setup)
            run.count_left_out(census, len(rows))
            if accelerator.is_main_process:
                staging.open()
            for record in run.steps():
                if accelerator.is_main_process:
                    staging.append_metrics(record)
                if on_progress:
                    on_progress(record)
            run.finish()
        manifest = make_manifest(
            lake.target, selection, spec, setup, steps=run.counts["steps"], tokens=run.tokens
        )
        if accelerator.is_main_process:
            staging.write(method, setup.model, manifest, save_dtype=spec.save_dtype)
            staging.publish()
        accelerator.wait_for_everyone()
    artifact = staging.load()
    log.info("trained %s: %s", artifact.digest, json.dumps(dict(run.counts), sort_keys=True))
    return TrainResult(artifact, out, run.metrics, dict(run.counts))


def make_manifest(
    target: TargetIdentity, selection: "Selection", spec: TrainSpec, setup: Setup, *, steps: int, tokens: int
) -> TrainingManifest:
    """The manifest of a finished run."""
    return TrainingManifest(
        method=spec.method.method,
        target_id=target.target_id,
        tokenizer_digest=target.tokenizer_digest,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        layer_ids=setup.layer_ids,
        lake_revision=selection.revision.digest,
        selection_digest=selection.digest,
        versions=tuple(sorted({int(row["target_version"]) for row in selection.rows})),
        parent=setup.parent,
        spec=spec.model_dump(mode="json"),
        packages=package_versions(),
        steps=steps,
        tokens=tokens,
        held_out_percent=kept_out(selection.filter, setup.parent_kept_out),
    )


def reading(spec: TrainSpec, threads: int | None) -> ReadSpec:
    """How a training run reads: padded batches, in an order that its own seed decides."""
    return ReadSpec(batch_rows=spec.batch_tokens, padded=True, seed=spec.seed, concurrency=threads)


def learning_rate_at(step: int, total: int, spec: TrainSpec) -> float:
    """Linear warm-up, then a cosine to zero at ``total``."""
    warm = math.ceil(spec.warmup_ratio * total)
    if step < warm:
        return spec.learning_rate * (step + 1) / warm
    return spec.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, total - warm)))


class _Run:
    """The state of one run: optimizer, plan and counts."""

    def __init__(
        self,
        accelerator: Accelerator,
        reader: SelectionReader,
        feed: Feed,
        spec: TrainSpec,
        method: DraftMethod,
        setup: Setup,
    ) -> None:
        self.counts: Counter[str] = Counter(steps=0, skipped_steps=0, nonfinite_rows=0)
        self.tokens = 0
        self.metrics: list[dict[str, float]] = []
        self._accelerator, self._reader, self._feed = accelerator, reader, feed
        self._spec, self._method, self._layer_ids = spec, method, setup.layer_ids
        loss_module = _LossModule(method, setup.model.to(accelerator.device).train(), spec)
        optimizer = torch.optim.AdamW(
            setup.model.parameters(), lr=spec.learning_rate, betas=(0.9, 0.95), weight_decay=spec.weight_decay
        )
        self._loss, self._optimizer = accelerator.prepare(loss_module, optimizer)
        self._nonfinite: set[int] = set()
        plans = [reader.planner.plan(epoch) for epoch in range(spec.epochs)]
        planned = sum(len(plan.steps) for plan in plans)
        self._total = min(planned, spec.max_steps or planned)
        self._not_dealt = sum(len(plan.dropped) for plan in plans)

    def count_left_out(self, census: Census, selected: int) -> None:
        """Count windows that no step will see, by reason."""
        self.counts["windows_recorded_twice"] = census.duplicates
        self.counts["windows_without_supervised_tokens"] = selected - len(census.usable) - census.duplicates
        if self._not_dealt:  # summed over epochs, each of which leaves out others
            self.counts["window_reads_left_out_for_equal_steps"] = self._not_dealt

    def steps(self) -> Iterator[dict[str, float]]:
        """Train, yielding each step's metrics."""
        started = time.monotonic()
        for epoch, batch in self._batches():
            attempted = self.counts["steps"] + self.counts["skipped_steps"]
            if attempted >= self._total:
                return
            record = self._step(batch, learning_rate_at(attempted, self._total, self._spec))
            if record is None:
                continue
            record |= {
                "epoch": float(epoch),
                "total_steps": float(self._total),
                "seconds": time.monotonic() - started,
            }
            self.metrics.append(record)
            yield record

    def _batches(self) -> Iterator[tuple[int, DraftBatch]]:
        """Batches in plan order, the next one made while the last one trains."""
        with closing(self._made()) as made, ThreadPoolExecutor(1, "draftlake-batch") as pool:
            pending = pool.submit(next, made, None)
            while (item := pending.result()) is not None:
                pending = pool.submit(next, made, None)
                yield item

    def _made(self) -> Generator[tuple[int, DraftBatch]]:
        for epoch in range(self._spec.epochs):
            for step in self._reader.read(Position(epoch)):
                batch = self._batch(step)
                del step  # so that its memory is read into again
                if batch is not None:
                    yield epoch, batch

    def _batch(self, step: ReadStep) -> DraftBatch | None:
        """A batch of the windows that are finite; None on a single process when none is."""
        windows, nonfinite = self._feed.finite(step.indices, step.windows)
        self._nonfinite.update(nonfinite)
        if windows:
            return self._feed.batch(windows, layer_ids=self._layer_ids, mask=self._spec.mask)
        return None if self._accelerator.num_processes == 1 else self._blank_batch(step)

    def _blank_batch(self, step: ReadStep) -> DraftBatch:
        # Other processes step now, so this one must join in: real shapes, nothing supervised.
        batch = self._feed.batch(step.windows[:1], layer_ids=self._layer_ids)
        return replace(
            batch,
            supervised=torch.zeros_like(batch.supervised),
            aux=torch.zeros_like(batch.aux),
            final=torch.zeros_like(batch.final),
        )

    def _step(self, batch: DraftBatch, rate: float) -> dict[str, float] | None:
        """One optimizer step; None when no process has a supervised token."""
        terms: LossTerms = self._loss(batch)
        counts = self._total_over_processes(terms.counts)
        sums = self._total_over_processes(terms.sums.detach())
        if not bool((counts > 0).any()) and not bool(self._total_over_processes(terms.nonfinite) > 0):
            return None
        # Data-parallel wrappers average gradients; the counts are already totals.
        self._accelerator.backward(terms.total(counts) * self._accelerator.num_processes)
        norm = self._accelerator.clip_grad_norm_(self._loss.parameters(), self._spec.grad_clip)
        finite = bool(torch.isfinite(torch.as_tensor(norm))) and bool((counts > 0).any())
        if finite:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._count_step(finite, terms)
        loss = float((terms.weights * sums / counts.clamp_min(1.0)).sum())
        return {
            "step": float(self.counts["steps"]),
            "loss": loss,
            "learning_rate": rate,
            "grad_norm": float(norm) if norm is not None else math.nan,
            "skipped": float(not finite),
            "supervised_tokens": float(self._total_over_processes(terms.supervised)),
            **self._mean_metrics(terms),
        }

    def _count_step(self, finite: bool, terms: LossTerms) -> None:
        self.counts["nonfinite_rows"] += int(self._total_over_processes(terms.nonfinite))
        if finite:
            self.counts["steps"] += 1
            self.tokens += int(self._total_over_processes(terms.supervised))
            return
        self.counts["skipped_steps"] += 1
        skipped, attempted = self.counts["skipped_steps"], self.counts["steps"] + self.counts["skipped_steps"]
        log.warning("step %d skipped: loss or gradient is not finite (%d skipped so far)", attempted, skipped)
        if attempted >= MIN_STEPS_TO_JUDGE and skipped > self._spec.max_skipped_share * attempted:
            raise TrainingFailedError(
                f"{skipped} of {attempted} steps were skipped for non-finite losses or gradients, more than the "
                f"allowed share {self._spec.max_skipped_share}. Lower learning_rate, or look at the features."
            )

    def _mean_metrics(self, terms: LossTerms) -> dict[str, float]:
        means = {}
        for name, (total, count) in terms.metrics.items():
            both = self._total_over_processes(torch.stack([total, count]).float())
            means[name] = float(both[0] / both[1]) if float(both[1]) else math.nan
        return means

    def _total_over_processes(self, value: Tensor) -> Tensor:
        if self._accelerator.num_processes == 1:
            return value
        return self._accelerator.reduce(value, reduction="sum")

    def finish(self) -> None:
        """Total what each process left out; raise :class:`TrainingFailedError` unless a step changed the weights."""
        num_windows = len(self._reader.planner.rows)
        seen = torch.zeros(num_windows, device=self._accelerator.device)
        seen[list(self._nonfinite)] = 1
        if nonfinite := int((self._total_over_processes(seen) > 0).sum()):
            self.counts["nonfinite_features"] = nonfinite
        if self.counts["steps"] == 0:
            raise TrainingFailedError(
                f"no step was made over {num_windows} windows: {dict(self.counts)}. "
                f"Look at the windows' features, or lower learning_rate."
            )
