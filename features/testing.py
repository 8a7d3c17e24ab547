"""Small synthetic lakes for tests and examples: deterministic, consistent, made in milliseconds.

Tokens are sampled from the head on random final hidden states, so recorded logprobs agree with
stored features the way real ones do; aux rows are noise around the final hidden state.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from features.bfloat16 import Float32, Stored, float32_to_bf16, from_float32, to_float32
from features.heads import HeadSnapshot
from features.lake import Lake
from features.schema import (
    NO_TOKEN,
    FeatureDtype,
    FragmentLayout,
    HeadId,
    TargetIdentity,
    TargetVersion,
    Verification,
    VersionRecord,
)
from features.windows import Window, WindowMeta
from features.writer import CommitResult, plan_digest, write_fragment

TINY_TARGET = TargetIdentity(
    target_id="tiny", architecture="LlamaForCausalLM", hidden_size=16, num_layers=8, vocab_size=64,
    tokenizer_digest="0" * 64, config_digest="1" * 64,
)  # fmt: skip
TINY_LAYOUT = FragmentLayout(layer_ids=(2, 4, 5), dtype=FeatureDtype.BFLOAT16, hidden_size=16)


def tiny_head(version: int = 0, *, seed: int = 0, target: TargetIdentity = TINY_TARGET) -> HeadSnapshot:
    """A tied bfloat16 head that moves a little with each version."""
    shape = (target.vocab_size, target.hidden_size)
    weights = np.random.default_rng([seed, 101]).standard_normal(shape, np.float32)
    for step in range(version):
        weights += 0.1 * np.random.default_rng([seed, 102, step]).standard_normal(shape, np.float32)
    return HeadSnapshot(float32_to_bf16(weights), FeatureDtype.BFLOAT16)


def tiny_window(
    head: HeadSnapshot,
    *,
    version: int = 0,
    sample: int = 0,
    num_rows: int = 12,
    prompt_length: int = 4,
    layout: FragmentLayout = TINY_LAYOUT,
    seed: int = 0,
    **meta: object,
) -> Window:
    """One whole-sequence window; ``meta`` replaces fields of its ``WindowMeta``."""
    rng = np.random.default_rng([seed, version, sample])
    final = 0.7 * rng.standard_normal((num_rows, layout.hidden_size), np.float32)
    aux = np.tile(final, len(layout.layer_ids)) + 0.1 * rng.standard_normal(
        (num_rows, layout.aux_width), np.float32
    )
    stored_final = from_float32(final, layout.dtype)
    kept_final = to_float32(stored_final, layout.dtype)
    tokens = _sampled_tokens(head, kept_final, rng)
    sampled = np.arange(num_rows + 1) >= prompt_length
    sampled[-1] = False
    logprobs = np.full(num_rows + 1, np.nan, np.float32)
    rows = np.nonzero(sampled)[0]
    logprobs[rows] = head.token_logprobs(kept_final[rows - 1], tokens[rows])
    known = WindowMeta(
        sample_id=f"v{version}-s{sample:04d}", group_id=f"g{sample // 2:04d}", version=TargetVersion(version),
        start=0, sequence_length=num_rows, prompt_length=prompt_length, verification=Verification.VERIFIED,
        logprob_kind="engine_raw", logprob_tokens=len(rows), logprob_mean_error=0.0, logprob_max_error=0.0,
        reward=float(sample % 2), domain=("code", "prose")[sample % 2], temperature=1.0, top_p=1.0, finish="length",
    )  # fmt: skip
    return Window(
        replace(known, **meta),  # type: ignore[arg-type]
        layout, tokens, sampled, None, logprobs, aux=from_float32(aux, layout.dtype), final=stored_final,
    )  # fmt: skip


def tiny_lake(
    url: str,
    *,
    versions: int | Sequence[int] = 2,
    samples_per_version: int = 8,
    seed: int = 0,
    target: TargetIdentity = TINY_TARGET,
    layout: FragmentLayout = TINY_LAYOUT,
    num_rows: tuple[int, int] = (8, 24),
    windows_per_fragment: int = 4,
    same_samples: bool = False,
) -> Lake:
    """A lake with ``samples_per_version`` whole-sequence windows at each version.

    ``versions`` is a count or the numbers themselves; ``num_rows`` the inclusive range of
    lengths. Two consecutive samples share a group, and groups are shared by versions. With
    ``same_samples`` every version holds version 0's sample ids and tokens.
    """
    lake = Lake.init(url, target)
    for number in range(versions) if isinstance(versions, int) else versions:
        head = tiny_head(number, seed=seed, target=target)
        head_id = register_tiny_version(lake, number, head)
        windows = [
            _lake_window(number, sample, head, seed=seed, layout=layout, num_rows=num_rows, same=same_samples)
            for sample in range(samples_per_version)
        ]
        for first in range(0, len(windows), windows_per_fragment):
            commit_tiny(lake, number, head_id, windows[first : first + windows_per_fragment])
    return lake


def register_tiny_version(lake: Lake, number: int, head: HeadSnapshot) -> HeadId:
    """Store a head and register it as a version of the lake's target."""
    head_id = lake.put_head(head)
    lake.register_version(tiny_record(head_id, number, target=lake.target))
    return head_id


def tiny_record(head_id: HeadId, number: int = 0, *, target: TargetIdentity = TINY_TARGET) -> VersionRecord:
    """The record of a version of ``target`` that was seen as a live module."""
    return VersionRecord(
        version=TargetVersion(number), target_id=target.target_id, config_digest=target.config_digest,
        tokenizer_digest=target.tokenizer_digest, hidden_size=target.hidden_size, vocab_size=target.vocab_size,
        head_id=head_id, weights_digest=None,
    )  # fmt: skip


def commit_tiny(lake: Lake, number: int, head_id: HeadId, windows: Sequence[Window]) -> CommitResult:
    """Commit windows as one fragment whose plan names their samples."""
    version = TargetVersion(number)
    ids = [window.meta.sample_id for window in windows]
    plan_id = plan_digest(lake.target.target_id, version, ids, {"tiny": 1}, windows[0].layout)
    return write_fragment(
        lake, version=version, head_id=head_id, plan_id=plan_id, windows=windows, writer_id="features.testing"
    )


def _lake_window(
    number: int,
    sample: int,
    head: HeadSnapshot,
    *,
    seed: int,
    layout: FragmentLayout,
    num_rows: tuple[int, int],
    same: bool,
) -> Window:
    low, high = num_rows
    rows = int(np.random.default_rng([seed, 103, sample]).integers(low, high + 1))
    prompt = max(1, rows // 3)
    if not same or number == 0:
        return tiny_window(
            head, version=number, sample=sample, num_rows=rows, prompt_length=prompt, layout=layout, seed=seed
        )
    origin = tiny_window(
        tiny_head(0, seed=seed, target=_target_of(head)), sample=sample, num_rows=rows, prompt_length=prompt,
        layout=layout, seed=seed,
    )  # fmt: skip
    # Recorded by version 0 and replayed through this one: the logprobs say nothing of these weights.
    meta = replace(
        origin.meta, version=TargetVersion(number), verification=Verification.UNVERIFIED, logprob_kind=None,
        logprob_tokens=None, logprob_mean_error=None, logprob_max_error=None,
    )  # fmt: skip
    other = tiny_window(head, version=number, sample=sample, num_rows=rows, layout=layout, seed=seed)
    return replace(
        origin,
        meta=meta,
        logprobs=np.full(rows + 1, np.nan, np.float32),
        aux=_mixed(origin.aux, other.aux, layout, 0.1 * number),
        final=_mixed(origin.final, other.final, layout, 0.1 * number),
    )


def _mixed(origin: Stored, other: Stored, layout: FragmentLayout, share: float) -> Stored:
    values = to_float32(origin, layout.dtype) + np.float32(share) * to_float32(other, layout.dtype)
    return from_float32(values, layout.dtype)


def _target_of(head: HeadSnapshot) -> TargetIdentity:
    return replace(TINY_TARGET, vocab_size=head.vocab_size, hidden_size=head.hidden_size)


def _sampled_tokens(head: HeadSnapshot, final: Float32, rng: np.random.Generator) -> NDArray[np.int32]:
    """Token i + 1 drawn from the head's distribution at row i; the sequence ends with the rows."""
    logits = head.logits(final)
    drawn = np.argmax(logits + rng.gumbel(size=logits.shape), axis=1)
    tokens = np.full(len(final) + 1, NO_TOKEN, np.int32)
    tokens[0] = rng.integers(head.vocab_size)
    tokens[1:-1] = drawn[:-1]
    return tokens
