"""Rollouts plus the weights that sampled them, to windows in the lake."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from features.collect.collector import DEFAULT_FRAGMENT_TOKENS
from features.collect.proofs import LogprobTolerance
from features.collect.replay import replay_rollouts
from features.collect.report import CollectReport
from features.collect.rollouts import Rollout, read_rollouts
from features.collect.run import collect_rollouts
from features.collect.sampling import SamplingPolicy
from features.errors import InputError, TargetMismatchError, VersionConflictError
from features.heads import HeadSnapshot, head_from_checkpoint
from features.lake import Lake
from features.schema import MAX_VERSION, FeatureDtype, FragmentLayout, TargetVersion, VersionRecord
from features.target import default_layer_ids, describe_target, weights_digest
from pipelines.context import RunContext
from pipelines.device import compute_device
from pipelines.progress import Advance
from pipelines.replay import served_engine, started_engine
from training.spec import Spec

_SAMPLING = SamplingPolicy()


class CollectSpec(Spec):
    """What to collect, and from what."""

    lake: str
    rollouts: tuple[str, ...]
    """Rollout files, one JSON object per line."""
    target: str
    """Directory of the target's weights at ``version``."""
    version: Annotated[int, Field(ge=0, le=MAX_VERSION)]
    layer_ids: tuple[int, ...] | None = None
    """Aux layer ids (blocks applied); None takes the EAGLE-3 default (2, n/2, n-3)."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    engine_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type in which the engine that recorded the logprobs computed; float32 allows a sharper proof."""
    sample_rate: Annotated[float, Field(gt=0, le=1)] = _SAMPLING.sample_rate
    """Share of rollouts to keep."""
    max_tokens: Annotated[int, Field(ge=8)] = _SAMPLING.max_tokens
    """Rows per window at most. A longer rollout is cut, and offline tau walks whole rollouts only."""
    fragment_tokens: Annotated[int, Field(ge=1)] = DEFAULT_FRAGMENT_TOKENS
    """Rows at which a fragment is committed: what a crash may lose, and what is held in memory."""
    seed: int = _SAMPLING.seed
    engine: Annotated[str, Field(pattern=r"^(transformers|vllm|https?://.+)$")] = "transformers"
    """What computes the features: the target as a transformers module, a vLLM started here, or a served one's URL."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """With ``vllm``: further arguments of ``vllm.LLM``, such as ``max_model_len``."""
    writer_id: str = "draftlake-collect"


def collect(spec: CollectSpec, ctx: RunContext) -> CollectReport:
    """Run the target over sampled rollouts and commit their windows.

    Both authenticity proofs are on: the aux probe before the first window, logprob agreement
    for every window. Running it again commits nothing twice.

    Raises:
        InputError: a file is missing, a layer id does not fit, or the target is not the lake's.
        VersionConflictError: the version number is taken by other weights.
        ProofFailedError: the tap does not read what it claims to read.
        EngineError: the vLLM engine refused or failed.
    """
    lake = Lake.open(spec.lake)
    folder = Path(spec.target)
    layer_ids = layer_ids_of(spec.layer_ids, lake)
    paths = _existing(spec.rollouts)
    record, head = describe_version(lake, folder, TargetVersion(spec.version))
    entries = [entry for path in paths for entry in read_rollouts(path)]
    with (
        _source(spec, layer_ids, lake.target.num_layers) as collect_from,
        ctx.progress.bar(f"collect {record.version}", total=len(entries)) as advance,
    ):
        return collect_from(
            lake,
            entries,
            head=head,
            record=record,
            layer_ids=layer_ids,
            dtype=FeatureDtype(spec.dtype),
            policy=_policy(spec),
            writer_id=spec.writer_id,
            tolerance=LogprobTolerance.for_compute_dtype(FeatureDtype(spec.engine_dtype)),
            fragment_tokens=spec.fragment_tokens,
            progress=_advance_by(advance),
        )


@contextmanager
def _source(
    spec: CollectSpec, layer_ids: tuple[int, ...], num_layers: int
) -> Iterator[Callable[..., CollectReport]]:
    """The collecting function of the asked engine, which lives as long as the block."""
    folder = Path(spec.target)
    if spec.engine_options and spec.engine != "vllm":
        raise InputError(
            f"engine options {sorted(spec.engine_options)} are for a vLLM that is started here: give --engine vllm"
        )
    if spec.engine == "transformers":
        yield partial(collect_rollouts, model=load_target(folder, compute_device()))
    elif spec.engine == "vllm":
        with started_engine(
            folder,
            layer_ids=layer_ids,
            num_layers=num_layers,
            dtype=spec.engine_dtype,
            options=spec.engine_options,
        ) as engine:
            yield partial(replay_rollouts, engine=engine)
    else:
        with served_engine(spec.engine, folder) as engine:
            yield partial(replay_rollouts, engine=engine)


def _advance_by(advance: Advance) -> Callable[[CollectReport], None]:
    """Turn running reports into steps of a bar."""
    shown = 0

    def report(so_far: CollectReport) -> None:
        nonlocal shown
        advance(so_far.accounted - shown)
        shown = so_far.accounted

    return report


class CollectPlan(Spec):
    """What a collection would write, known before the target is loaded."""

    rollouts: int
    refused: dict[str, int]
    """Lines that cannot be read as rollouts, by reason."""
    other_version: int
    """Readable rollouts that name no version or another one; they would be quarantined."""
    windows: int
    tokens: int
    nbytes: int


def plan_collect(spec: CollectSpec) -> CollectPlan:
    """Count what :func:`collect` would keep; runs no model and writes nothing.

    Raises:
        InputError, VersionConflictError: as :func:`collect` would raise them.
    """
    lake = Lake.open(spec.lake)
    layer_ids = layer_ids_of(spec.layer_ids, lake)
    version = TargetVersion(spec.version)
    describe_version(lake, Path(spec.target), version)
    entries = [e for path in _existing(spec.rollouts) for e in read_rollouts(path)]
    readable = [e for e in entries if isinstance(e, Rollout)]
    ours = [r for r in readable if r.version == spec.version]
    policy = _policy(spec)
    spans = [span for r in ours for span in policy.plan(r, version)]
    tokens = sum(span.num_rows for span in spans)
    layout = FragmentLayout(layer_ids, FeatureDtype(spec.dtype), lake.target.hidden_size)
    return CollectPlan(
        rollouts=len(readable),
        refused=dict(Counter(str(e.reason) for e in entries if not isinstance(e, Rollout))),
        other_version=len(readable) - len(ours),
        windows=len(spans),
        tokens=tokens,
        nbytes=tokens * layout.row_bytes,
    )


def _policy(spec: CollectSpec) -> SamplingPolicy:
    return SamplingPolicy(sample_rate=spec.sample_rate, max_tokens=spec.max_tokens, seed=spec.seed)


def layer_ids_of(asked: tuple[int, ...] | None, lake: Lake) -> tuple[int, ...]:
    """The asked aux layer ids, or the default ones.

    Raises:
        InputError: they are not ascending ids of this target.
    """
    num_layers = lake.target.num_layers
    ids = asked or default_layer_ids(num_layers)
    if list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] > num_layers:
        raise InputError(
            f"layer ids {list(ids)} do not fit a target of {num_layers} blocks: a layer id is the number of "
            f"blocks applied, so give ascending, distinct ids in [0, {num_layers}]"
        )
    return ids


def describe_version(lake: Lake, folder: Path, version: TargetVersion) -> tuple[VersionRecord, HeadSnapshot]:
    """Record and head of the weights in ``folder`` as ``version``; writes nothing.

    Raises:
        InputError: ``folder`` is no model directory.
        TargetMismatchError: another architecture, size or tokenizer than the lake's target.
        VersionConflictError: the number is taken by other weights.
    """
    found = describe_target(folder, lake.target.target_id)
    if found != lake.target:
        names = [f for f in found.__dataclass_fields__ if getattr(found, f) != getattr(lake.target, f)]
        raise TargetMismatchError(
            f"{folder} is not the target of {lake.url}: "
            + "; ".join(f"{n} is {getattr(found, n)}, expected {getattr(lake.target, n)}" for n in names)
            + ". Point --target at this lake's target, or create another lake with: draftlake init"
        )
    head = head_from_checkpoint(folder)
    digest = weights_digest(folder)
    _require_free(lake, version, digest, folder)
    record = VersionRecord(
        version=version,
        target_id=found.target_id,
        config_digest=found.config_digest,
        tokenizer_digest=found.tokenizer_digest,
        hidden_size=found.hidden_size,
        vocab_size=found.vocab_size,
        head_id=head.head_id,
        weights_digest=digest,
    )
    return record, head


def _require_free(lake: Lake, version: TargetVersion, digest: str, folder: Path) -> None:
    """Refuse a number that names other weights, before a head or a window of these is stored."""
    known = next((r for r in lake.versions() if r.version == version), None)
    if known is not None and known.weights_digest not in (None, digest):
        raise VersionConflictError(
            f"{version} of {lake.url} names weights {str(known.weights_digest)[:12]}, and {folder} holds "
            f"{digest[:12]}. A version number names one set of weights for ever: give --version the number "
            f"of these weights"
        )


def load_target(folder: Path, device: str = "cpu") -> Any:
    """The target as a transformers module, float32, eval mode, nothing fetched from a hub."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.to(device).eval()


def _existing(paths: tuple[str, ...]) -> list[Path]:
    missing = [p for p in paths if not Path(p).is_file()]
    if missing or not paths:
        raise InputError(
            f"no such rollout file: {', '.join(missing) or '(none given)'}. Name JSONL files that exist."
        )
    return [Path(p) for p in paths]
