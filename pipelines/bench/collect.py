"""``draftlake bench collect``: what collecting costs a trainer, beside the same forward without it.

``cost`` runs one model over one batch in turns: a few steps without collecting, then the same
number at each sampling rate, until all they gave is committed. So proof and commit are in the
time, not only what the trainer's thread does. ``stores`` shows that memory stays within the
budget when storage is slow or dead.
"""

import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np

from features.collect.live import LiveBatch, LiveCollector, LiveOptions, LiveReport, RowsAtHand
from features.collect.proofs import LogprobTolerance
from features.collect.sampling import SamplingPolicy
from features.errors import InputError
from features.heads import HeadSnapshot
from features.lake import Lake
from features.schema import FeatureDtype, FragmentLayout, TargetIdentity, TargetVersion, VersionRecord
from features.storage import Store
from pipelines.progress import SILENT, Progress

RESAMPLES = 2000
"""Draws of the bootstrap behind each interval."""


@dataclass(frozen=True, slots=True)
class CollectBenchSpec:
    """What is measured. The model is a random Llama; the smaller it is, the larger collecting looms."""

    rates: tuple[float, ...] = (0.01, 0.05, 0.2)
    """Shares of the batch's tokens that are collected."""
    hidden_size: int = 512
    num_layers: int = 8
    vocab_size: int = 8192
    sequences: int = 16
    length: int = 512
    """Tokens of each sequence; the batch has ``sequences * length``."""
    steps: int = 2
    """Forwards of one turn."""
    rounds: int = 7
    """Turns of each rate, and of none."""
    store_budget_bytes: int = 16 << 20
    """``max_bytes`` of the collectors that meet a slow and a dead store."""
    store_bytes_per_s: float = 8e6
    """Of the slow one."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.rates or not all(0 < rate <= 1 for rate in self.rates):
            raise InputError(f"sampling rates lie in (0, 1], got {self.rates}")


def bench_collect(
    spec: CollectBenchSpec, *, folder: Path | None = None, progress: Progress = SILENT
) -> dict[str, Any]:
    """Run everything and return the report, ready for JSON.

    Raises:
        InputError: torch or transformers is absent.
    """
    with tempfile.TemporaryDirectory(prefix="draftlake-bench-", dir=folder) as scratch:
        root = Path(scratch)
        progress.say(f"forwards of {spec.sequences * spec.length:,} tokens, without and with collecting")
        cost = _cost(spec, root, progress)
        progress.say("a slow and a dead store")
        stores = {
            "throttled": _meet_store(spec, root / "slow", _SlowStore),
            "failing": _meet_store(spec, root / "dead", _DeadStore),
        }
    return {
        "machine": {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "threads": cost.pop("threads"),
        },
        "spec": asdict(spec),
        "overhead_fraction": {name: rate["overhead_fraction"] for name, rate in cost["rates"].items()},
        "overhead_interval": {name: rate["overhead_interval"] for name, rate in cost["rates"].items()},
        "bytes_per_token": cost["rates"][_name(spec.rates[-1])]["bytes_per_token"],
        "dropped_windows": sum(rate["dropped_windows"] for rate in cost["rates"].values()),
        "peak_host_bytes": max(rate["peak_host_bytes"] for rate in cost["rates"].values()),
        "cost": cost,
        "stores": stores,
    }


def _name(rate: float) -> str:
    return f"{rate:g}"


def _cost(spec: CollectBenchSpec, root: Path, progress: Progress) -> dict[str, Any]:
    trainer = _Trainer(spec)
    plain = "none"
    with _collecting(spec, trainer, root) as subjects:
        turns: dict[str, Callable[[], None]] = {plain: lambda: trainer.run(spec.steps), **subjects.turns}
        for turn in turns.values():
            turn()
        names = list(turns)
        walls: dict[str, list[float]] = {name: [] for name in names}
        cpus: dict[str, list[float]] = {name: [] for name in names}
        with progress.bar("bench collect", total=spec.rounds * len(names)) as advance:
            for number in range(spec.rounds):
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    wall, cpu = time.perf_counter(), time.process_time()
                    turns[name]()
                    walls[name].append((time.perf_counter() - wall) / spec.steps)
                    cpus[name].append((time.process_time() - cpu) / spec.steps)
                    advance(1)
    rates = {}
    for name, report in subjects.reports.items():
        # Of the same round: a shared machine slows all of it.
        ratios = [mine / without - 1 for mine, without in zip(walls[name], walls[plain], strict=True)]
        rates[name] = {
            "overhead_fraction": median(ratios),
            "overhead_interval": _interval(ratios, spec.seed),
            "cpu_overhead_fraction": median(
                mine / without - 1 for mine, without in zip(cpus[name], cpus[plain], strict=True)
            ),
            **_per_step(report),
        }
    return {"threads": trainer.threads, "step_s": walls, "cpu_s": cpus, "rates": rates}


def _per_step(report: LiveReport) -> dict[str, Any]:
    steps = report.steps
    return {
        "trainer_thread_s": (report.plan_s + report.offer_s) / steps,
        "background_s": report.background_s / steps,
        "proof_s": report.proof_s / steps,
        "tokens_per_step": report.tokens / steps,
        "bytes_per_token": report.nbytes / max(1, report.tokens),
        "dropped_windows": report.dropped_windows,
        "verified_windows": report.verified,
        "windows": report.windows,
        "peak_host_bytes": report.most_held_bytes,
    }


def _interval(values: Sequence[float], seed: int) -> list[float]:
    """95 % interval of the median, by bootstrap over rounds."""
    draws = np.random.default_rng(seed).choice(np.asarray(values), (RESAMPLES, len(values)))
    return [float(edge) for edge in np.percentile(np.median(draws, axis=1), (2.5, 97.5))]


class _Trainer:
    """A model and one batch; a step is its forward to logits, without gradients."""

    def __init__(self, spec: CollectBenchSpec) -> None:
        try:
            import torch
            import transformers
        except ImportError as error:
            raise InputError(
                f"bench collect runs a model ({error}): pip install 'draftlake[train]'"
            ) from error
        torch.manual_seed(spec.seed)
        heads = max(1, spec.hidden_size // 64)
        config = transformers.LlamaConfig(
            vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, num_hidden_layers=spec.num_layers,
            intermediate_size=spec.hidden_size * 11 // 4, num_attention_heads=heads, num_key_value_heads=heads,
            max_position_embeddings=spec.length, tie_word_embeddings=False,
        )  # fmt: skip
        self.model: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
        self.threads = torch.get_num_threads()
        rng = np.random.default_rng(spec.seed)
        self.token_ids = rng.integers(0, spec.vocab_size, (spec.sequences, spec.length))
        self._ids, self._torch = torch.from_numpy(self.token_ids), torch
        logits = self.forward().logits
        chosen = torch.from_numpy(self.token_ids[:, 1:, None])
        found = logits.log_softmax(-1)[:, :-1].gather(-1, chosen)[..., 0].numpy()
        self.logprobs = np.concatenate([np.full((spec.sequences, 1), np.nan, np.float32), found], axis=1)

    def forward(self) -> Any:
        with self._torch.no_grad():
            return self.model(input_ids=self._ids, use_cache=False)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.forward()


@dataclass(frozen=True, slots=True)
class _Subjects:
    turns: Mapping[str, Callable[[], None]]
    reports: dict[str, LiveReport]
    """Filled on leaving."""


@contextmanager
def _collecting(spec: CollectBenchSpec, trainer: _Trainer, root: Path) -> Iterator[_Subjects]:
    """One collector and tap for each rate, all on one model."""
    from features.collect.taps.hf_live import LiveTap

    collectors: dict[str, LiveCollector] = {}
    subjects = _Subjects(
        {name: _turn(spec, trainer, collectors, name, LiveTap) for name in map(_name, spec.rates)}, {}
    )
    for rate in spec.rates:
        lake = Lake.init(str(root / f"rate-{rate:g}"), _identity(spec))
        collectors[_name(rate)] = LiveCollector(
            lake, layout=_layout(spec), policy=_policy(spec, rate), writer_id="bench", options=LiveOptions(),
            tolerance=LogprobTolerance.for_compute_dtype(FeatureDtype.FLOAT32),
        )  # fmt: skip
    yield subjects
    for name, collector in collectors.items():
        subjects.reports[name] = collector.close()


def _turn(
    spec: CollectBenchSpec,
    trainer: _Trainer,
    collectors: Mapping[str, LiveCollector],
    name: str,
    make_tap: Any,
) -> Callable[[], None]:
    batches = _names_of(spec, name)

    def turn() -> None:
        collector = collectors[name]
        tap = make_tap(trainer.model, collector)
        try:
            tap.advance(0)  # does something in the first turn, which is not timed
            for _ in range(spec.steps):
                with tap.step(_batch(spec, next(batches), trainer.token_ids, trainer.logprobs)):
                    trainer.forward()
            collector.flush()
        finally:
            tap.close()

    return turn


def _kept(spec: CollectBenchSpec, rate: float) -> int:
    """Sequences of each batch that are kept."""
    return max(1, round(rate * spec.sequences + 0.499))


def _policy(spec: CollectBenchSpec, rate: float) -> SamplingPolicy:
    kept = _kept(spec, rate)
    rows = min(spec.length, max(1, round(rate * spec.sequences * spec.length / kept)))
    return SamplingPolicy(
        sample_rate=kept / spec.sequences, max_tokens=rows, placement="response_only", seed=spec.seed
    )


def _names_of(spec: CollectBenchSpec, name: str) -> Iterator[list[str]]:
    """Sample ids of one batch after another, of which the policy keeps equally many: steps are alike."""
    rate = float(name)
    policy, wanted, version = _policy(spec, rate), _kept(spec, rate), TargetVersion(0)
    pools: dict[bool, list[str]] = {True: [], False: []}
    number = 0
    while True:
        while len(pools[True]) < wanted or len(pools[False]) < spec.sequences - wanted:
            sample = f"s{number}"
            pools[policy.may_keep(sample, version)].append(sample)
            number += 1
        batch = [pools[True].pop() for _ in range(wanted)]
        yield batch + [pools[False].pop() for _ in range(spec.sequences - wanted)]


def _batch(
    spec: CollectBenchSpec, names: Sequence[str], token_ids: np.ndarray, logprobs: np.ndarray | None
) -> LiveBatch:
    return LiveBatch(
        token_ids=token_ids, lengths=[spec.length] * len(names), sample_ids=names, group_ids=names, versions=0,
        sampled_mask=np.broadcast_to(np.arange(spec.length) > 0, token_ids.shape), logprobs=logprobs,
        logprob_kind=None if logprobs is None else "engine_raw",
    )  # fmt: skip


def _identity(spec: CollectBenchSpec) -> TargetIdentity:
    return TargetIdentity(
        target_id="bench", architecture="LlamaForCausalLM", hidden_size=spec.hidden_size,
        num_layers=spec.num_layers, vocab_size=spec.vocab_size, tokenizer_digest="0" * 64, config_digest="0" * 64,
    )  # fmt: skip


def _layout(spec: CollectBenchSpec) -> FragmentLayout:
    ids = tuple(sorted({min(2, spec.num_layers), spec.num_layers // 2, max(spec.num_layers - 3, 0)}))
    return FragmentLayout(layer_ids=ids, dtype=FeatureDtype.BFLOAT16, hidden_size=spec.hidden_size)


class _SlowStore:
    """A store that takes its time over data."""

    def __init__(self, inner: Any, spec: CollectBenchSpec) -> None:
        self._inner, self._speed = inner, spec.store_bytes_per_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create(self, path: str, data: bytes) -> Any:
        if path.startswith("data/"):
            time.sleep(len(data) / self._speed)
        return self._inner.create(path, data)


class _DeadStore(_SlowStore):
    """A store that takes no data."""

    def create(self, path: str, data: bytes) -> Any:
        if path.startswith("data/"):
            raise OSError("no route to the store")
        return self._inner.create(path, data)


def _meet_store(spec: CollectBenchSpec, root: Path, kind: "type[_SlowStore]") -> dict[str, Any]:
    """Offer four budgets' worth of rows as fast as they can be made, and see what was held."""
    lake = Lake.init(str(root), _identity(spec))
    collector = _collector_on(spec, lake, kind)
    layout = collector.layout
    rng = np.random.default_rng(spec.seed)
    ids = rng.integers(0, spec.vocab_size, (1, spec.length))
    nbytes = spec.length * layout.row_bytes
    aux = rng.standard_normal((spec.length, layout.aux_width), np.float32)
    final = rng.standard_normal((spec.length, layout.hidden_size), np.float32)
    started, rss = time.perf_counter(), _rss()
    most_rss = rss
    for number in range(4 * spec.store_budget_bytes // nbytes):
        plan = collector.plan(_batch(spec, [f"s{number}"], ids, None))
        collector.offer(plan, RowsAtHand(aux, final))
        most_rss = max(most_rss, _rss())
    offered_s, error = time.perf_counter() - started, None
    try:
        collector.close()
    except OSError as failure:
        error = str(failure)
    report = collector.report()
    return {
        "budget_bytes": spec.store_budget_bytes,
        "peak_host_bytes": report.most_held_bytes,
        "within_budget": report.most_held_bytes <= spec.store_budget_bytes,
        "rss_growth_bytes": most_rss - rss,
        "offered_windows": report.planned_windows,
        "committed_windows": report.windows,
        "dropped_windows": report.dropped_windows,
        "lost_windows": report.lost,
        "accounted": report.accounted_windows == report.planned_windows,
        "offer_s": offered_s,
        "error": error,
    }


def _collector_on(spec: CollectBenchSpec, lake: Lake, kind: "type[_SlowStore]") -> LiveCollector:
    """A collector of version 0 whose lake has a store of ``kind``."""
    lake.store = cast(Store, kind(lake.store, spec))
    weights = np.random.default_rng(spec.seed).standard_normal(
        (spec.vocab_size, spec.hidden_size), np.float32
    )
    head, target = HeadSnapshot(weights, FeatureDtype.FLOAT32), lake.target
    record = VersionRecord(
        version=TargetVersion(0), target_id=target.target_id, config_digest=target.config_digest,
        tokenizer_digest=target.tokenizer_digest, hidden_size=spec.hidden_size, vocab_size=spec.vocab_size,
        head_id=head.head_id, weights_digest=None,
    )  # fmt: skip
    options = LiveOptions(max_bytes=spec.store_budget_bytes)
    collector = LiveCollector(
        lake, layout=_layout(spec), policy=SamplingPolicy(), writer_id="bench", options=options
    )
    collector.advance(record, head)
    return collector


def _rss() -> int:
    """Resident bytes of this process; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096
    except OSError:
        return 0
