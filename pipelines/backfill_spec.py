"""What a backfill is told, what it would do, and what it did."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from features.collect.collector import DEFAULT_FRAGMENT_TOKENS
from features.collect.proofs import AgreementSummary, LogprobTolerance
from features.collect.sampling import SamplingPolicy
from features.collect.sampling_proof import SamplingEvidence
from features.collect.sources import SourceOptions
from features.schema import MAX_VERSION, FeatureDtype
from training.spec import Spec

_SAMPLING = SamplingPolicy()
_OPTIONS = SourceOptions()


class TargetSpec(Spec):
    """Which weights recompute which rows, into which lake."""

    lake: str
    target: str
    """Directory of the target's weights at ``version``."""
    version: Annotated[int, Field(ge=0, le=MAX_VERSION)]
    """Rollouts of other versions are counted, and taken by a backfill of their own."""
    take_unversioned: bool = False
    """Take rollouts of unknown or mixed version as ``version``; their windows stay unverified."""
    layer_ids: tuple[int, ...] | None = None
    """Aux layer ids (blocks applied); None takes the EAGLE-3 default (2, n/2, n-3)."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    engine_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type in which the engine that recorded the logprobs computed; float32 allows a sharper proof."""
    sample_rate: Annotated[float, Field(gt=0, le=1)] = _SAMPLING.sample_rate
    """Share of rollouts to keep."""
    max_tokens: Annotated[int, Field(ge=8)] = _SAMPLING.max_tokens
    """Rows per window at most."""
    seed: int = _SAMPLING.seed
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Further settings of the sampling policy, such as ``placement`` or ``context_rows``."""
    fragment_tokens: Annotated[int, Field(ge=1)] = DEFAULT_FRAGMENT_TOKENS
    """Rows at which a fragment is committed: what a crash may lose, and what is held in memory."""
    writer_id: str = "draftlake-backfill"

    @model_validator(mode="after")
    def _is_a_sampling_policy(self) -> "TargetSpec":
        known = {f.name for f in fields(SamplingPolicy)} - {"sample_rate", "max_tokens", "seed"}
        if unknown := sorted(self.sampling.keys() - known):
            raise ValueError(f"sampling has no setting {unknown[0]!r}; it takes {', '.join(sorted(known))}")
        try:
            self.policy  # noqa: B018 - built to be checked
        except (TypeError, KeyError) as error:
            raise ValueError(f"sampling does not fit: {error}") from error
        return self

    @property
    def policy(self) -> SamplingPolicy:
        """Which rollouts, and which of their rows."""
        plain = {"sample_rate": self.sample_rate, "max_tokens": self.max_tokens, "seed": self.seed}
        return SamplingPolicy.from_mapping(self.sampling | plain)

    @property
    def tolerance(self) -> LogprobTolerance:
        """Of the logprob proof."""
        return LogprobTolerance.for_compute_dtype(FeatureDtype(self.engine_dtype))

    @property
    def source_options(self) -> SourceOptions:
        """The user's statements about the rollouts."""
        return SourceOptions(user_version=self.version if self.take_unversioned else None)


class BackfillSpec(TargetSpec):
    """Which old rollouts, read how, recomputed with which weights."""

    sources: Annotated[tuple[str, ...], Field(min_length=1)]
    """Files, folders or globs, local or ``s3://``; JSONL (plain, gzip, zstd) or Parquet."""
    format: str | None = None
    """Name of the sources' format; None tells it by the first record of each file."""
    columns: dict[str, Any] | None = None
    """Our field to their column, for the format ``mapping``."""
    assume_synchronous: bool = _OPTIONS.assume_synchronous
    """The run trained each batch right after sampling it: a version may be inferred from the step."""
    evaluation: bool = _OPTIONS.evaluation
    """The files are of evaluations, which run after the update of their step."""
    allow_retokenise: bool = _OPTIONS.allow_retokenise
    """Tokenise text of sources without token ids; their windows stay unverified."""
    label_offset: int = _OPTIONS.label_offset
    """Added to an engine's numeric weight label to give the version."""
    logprob_kind: Literal["engine_raw", "engine_processed", "engine_unknown"] | None = None
    """What the engine recorded, where the source does not say; so are the next three."""
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    quota_tokens: Annotated[int, Field(ge=1)] | None = None
    """Feature rows that this run may add to the lake."""
    quota_bytes: Annotated[int, Field(ge=1)] | None = None
    """Feature bytes that this run may add to the lake."""
    workers: Annotated[int, Field(ge=1)] = 1
    """Processes, each with the target loaded once; a partition is done by one of them."""

    @model_validator(mode="after")
    def _columns_are_for_mappings(self) -> "BackfillSpec":
        if self.columns is not None and self.format not in (None, "mapping"):
            raise ValueError(
                f"columns belong to the format 'mapping', not to {self.format!r}; give one of both"
            )
        return self

    @property
    def source_options(self) -> SourceOptions:
        """The user's statements about the sources."""
        return replace(
            super().source_options, assume_synchronous=self.assume_synchronous, evaluation=self.evaluation,
            allow_retokenise=self.allow_retokenise,
            tokenizer=self.target if self.allow_retokenise else None, columns=self.columns,
            label_offset=self.label_offset, logprob_kind=self.logprob_kind, temperature=self.temperature,
            top_p=self.top_p, top_k=self.top_k,
        )  # fmt: skip


class BackfillPlan(Spec):
    """What a backfill would do; an upper bound where the lake holds a part already."""

    partitions: int
    partitions_finished: int
    """Partitions that an earlier run finished; nothing below counts them but ``rows_read``."""
    source_bytes: int
    rows_read: int
    """Sequences of all partitions: a line of several conversations counts each."""
    refused: dict[str, int]
    """Lines that cannot be read, by reason."""
    version_missing: int
    """Rollouts of unknown or mixed version."""
    version_mismatch: int
    """Rollouts of another version."""
    duplicates: int
    skipped_by_sampling: int
    rollouts: int
    """Rollouts to run the target over."""
    windows: int
    tokens: int
    """Feature rows to write."""
    nbytes: int
    """Feature bytes to write."""
    forward_tokens: int
    """Tokens of whole sequences: a window's rows need everything before them."""
    tokens_per_second: float | None
    """Measured by a short forward over the first rollouts, times ``workers``; None without any."""
    seconds: float | None
    """Estimate for the forwards."""
    trial_windows: int
    """Windows of that short forward whose recorded logprobs could be compared."""
    trial_agreeing: int
    """Of them, those that agree. None of several: these are not the weights that sampled them."""


class BackfillReport(Spec):
    """What became of every sequence of the sources.

    ``rows_read == collected + duplicates + pad_rows + skipped_by_sampling + over_quota +
    sum(quarantined.values())``; windows and tokens are what this run wrote.
    """

    version: int
    partitions: int
    partitions_finished: int
    """Whole partitions in the lake now; with ``over_quota`` fewer than ``partitions``."""
    partitions_finished_before: int
    rows_read: int
    collected: int
    """Rollouts whose windows this run committed."""
    duplicates: int
    """Rollouts that came before, in the sources or in the lake."""
    pad_rows: int
    """Rows that a framework added to fill a batch."""
    skipped_by_sampling: int
    quarantined: dict[str, int]
    over_quota: int
    """Sequences that the quota left for another run."""
    windows_written: int
    tokens_written: int
    nbytes_written: int
    fragments: int
    verified: int
    unverified: int
    windows_compared: int
    """Windows whose recorded logprobs were compared with recomputed ones."""
    logprob_mean_error: float | None
    """Nats, over the windows that agreed."""
    smallest_gap: float | None
    """Smallest mean logprob change, in nats, that must have been refused."""
    sampling_tokens: int
    """Sampled tokens of which it was asked whether they come from the recorded temperature and these weights."""
    sampling_deviation: float
    """Their logprobs less the expected ones, summed, in nats."""
    sampling_variance: float
    sampling_z: float | None
    """The deviation in standard deviations; beyond 6 over hundreds of tokens they were sampled otherwise."""
    seconds: float
    tokens_per_second: float | None
    """Tokens of the forwards of this run, over its time."""
    lake_revision: str
    content_digest: str
    """Digest of the version's logical windows: equal for an interrupted and an uninterrupted run."""

    @property
    def accounted(self) -> int:
        """Sum over every fate; equals ``rows_read``."""
        settled = self.collected + self.duplicates + self.pad_rows + self.skipped_by_sampling
        return settled + self.over_quota + sum(self.quarantined.values())


def merged_agreement(parts: Iterable[AgreementSummary]) -> AgreementSummary:
    """The proof over several partitions: means weighted by tokens, without neighbouring versions."""
    found = list(parts)
    tokens = sum(part.tokens for part in found)

    def mean(name: str) -> float:
        if not tokens:
            return math.nan
        return sum(getattr(part, name) * part.tokens for part in found if part.tokens) / tokens

    error, limit = mean("mean_error"), mean("limit")
    return AgreementSummary(
        windows_compared=sum(part.windows_compared for part in found),
        windows_refused=sum(part.windows_refused for part in found),
        tokens=tokens,
        mean_error=error,
        max_error=max((part.max_error for part in found if part.tokens), default=math.nan),
        limit=limit,
        smallest_gap=limit + error,
    )


def merged_sampling(parts: Iterable[BackfillReport]) -> SamplingEvidence:
    """What several reports say of how their tokens were sampled."""
    found = (SamplingEvidence(p.sampling_tokens, p.sampling_deviation, p.sampling_variance) for p in parts)
    return sum(found, SamplingEvidence())


def merged_counts(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Counts by reason, added up."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(sorted(total.items()))


_SHARED = (
    "version",
    "sampling_z",
    "logprob_mean_error",
    "smallest_gap",
    "tokens_per_second",
    "lake_revision",
    "content_digest",
)


def merged_reports(parts: Sequence[BackfillReport]) -> BackfillReport:
    """One report of disjoint partitions, in the order they were done; the lake is as the last one saw it.

    ``seconds`` is the sum over the parts.
    """
    sums = [n for n in BackfillReport.model_fields if n not in (*_SHARED, "quarantined")]
    errors = [(p.logprob_mean_error, p.windows_compared) for p in parts if p.logprob_mean_error is not None]
    compared = sum(windows for _, windows in errors)
    rates = [part.tokens_per_second * part.seconds for part in parts if part.tokens_per_second]
    last = parts[-1]
    return BackfillReport(
        **{name: sum(getattr(part, name) for part in parts) for name in sums},
        quarantined=merged_counts(part.quarantined for part in parts),
        version=last.version,
        sampling_z=merged_sampling(parts).z,
        logprob_mean_error=sum(e * n for e, n in errors) / compared if compared else None,
        smallest_gap=max(
            (part.smallest_gap for part in parts if part.smallest_gap is not None), default=None
        ),
        tokens_per_second=sum(rates) / sum(part.seconds for part in parts) if rates else None,
        lake_revision=last.lake_revision,
        content_digest=last.content_digest,
    )
