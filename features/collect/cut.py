"""Cut a window out of a rollout and the features of its whole sequence."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.bfloat16 import Float32, from_float32
from features.collect.rollouts import Rollout, logprob_value
from features.collect.sampling import WindowSpan
from features.schema import NO_TOKEN, FragmentLayout, TargetVersion
from features.windows import Window, WindowMeta


def cut_window(
    rollout: Rollout,
    span: WindowSpan,
    aux: Float32,
    final: Float32,
    *,
    version: TargetVersion,
    layout: FragmentLayout,
) -> Window:
    """Rows ``span`` of a sequence, unshifted, with the token one past them where there is one.

    ``aux`` ``[T, m * H]`` and ``final`` ``[T, H]`` cover the whole sequence; they are rounded
    to the layout's dtype here. The window is unverified until a proof says otherwise.
    """
    rows = slice(span.start, span.stop)
    logprobs = (None,) * len(rollout.token_ids) if rollout.logprobs is None else rollout.logprobs
    values = [math.nan if logprob_value(v) is None else v for v in logprobs]
    loss_mask = rollout.loss_mask
    return Window(
        meta=_meta(rollout, span, version),
        layout=layout,
        token_ids=with_next(rollout.token_ids, span, NO_TOKEN, np.int32),
        sampled_mask=with_next(rollout.sampled_mask, span, False, np.bool_),
        loss_mask=None if loss_mask is None else with_next(loss_mask, span, False, np.bool_),
        logprobs=with_next(values, span, math.nan, np.float32),
        aux=from_float32(aux[rows], layout.dtype),
        final=from_float32(final[rows], layout.dtype),
    )


def _meta(rollout: Rollout, span: WindowSpan, version: TargetVersion) -> WindowMeta:
    return WindowMeta(
        sample_id=rollout.sample_id, group_id=rollout.group_id, version=version, start=span.start,
        sequence_length=len(rollout.token_ids), prompt_length=rollout.prompt_length,
        logprob_kind=rollout.logprob_kind, reward=rollout.reward, domain=rollout.domain,
        acceptance_length=rollout.acceptance_length, acceptance_rate=rollout.acceptance_rate,
        temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k, finish=rollout.finish,
    )  # fmt: skip


def with_next(values: Sequence[Any], span: WindowSpan, beyond: Any, dtype: type[np.generic]) -> NDArray[Any]:
    """Entries ``start..stop`` inclusive; ``beyond`` stands in for what follows the sequence's end."""
    part = list(values[span.start : span.stop + 1])
    return np.array(part + [beyond] * (span.num_rows + 1 - len(part)), dtype=dtype)
