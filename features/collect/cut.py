"""Cut a window out of a rollout and the features of its whole sequence."""

import math
from collections.abc import Sequence
from dataclasses import replace
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
    return window_of_rows(rollout, span, aux[rows], final[rows], version=version, layout=layout)


def window_of_rows(
    rollout: Rollout,
    span: WindowSpan,
    aux: Float32,
    final: Float32,
    *,
    version: TargetVersion,
    layout: FragmentLayout,
    sampling: str | None = None,
) -> Window:
    """Like :func:`cut_window`, from the span's own rows: ``aux`` ``[R, m * H]``, ``final`` ``[R, H]``.

    ``sampling`` is recorded with the window: how it was chosen, as JSON.
    """
    logprobs = (None,) * len(rollout.token_ids) if rollout.logprobs is None else rollout.logprobs
    values = [math.nan if logprob_value(v) is None else v for v in logprobs]
    loss_mask = rollout.loss_mask
    return Window(
        meta=replace(_meta(rollout, span, version), sampling=sampling),
        layout=layout,
        token_ids=with_next(rollout.token_ids, span, NO_TOKEN, np.int32),
        sampled_mask=window_mask(rollout.sampled_mask, span),
        loss_mask=None if loss_mask is None else window_mask(loss_mask, span),
        logprobs=with_next(values, span, math.nan, np.float32),
        aux=from_float32(aux, layout.dtype),
        final=from_float32(final, layout.dtype),
    )


def _meta(rollout: Rollout, span: WindowSpan, version: TargetVersion) -> WindowMeta:
    return WindowMeta(
        sample_id=rollout.sample_id, group_id=rollout.group_id, version=version, start=span.start,
        sequence_length=len(rollout.token_ids), prompt_length=rollout.prompt_length,
        logprob_kind=rollout.logprob_kind, reward=rollout.reward, domain=rollout.domain,
        acceptance_length=rollout.acceptance_length, acceptance_rate=rollout.acceptance_rate,
        temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k, finish=rollout.finish,
    )  # fmt: skip


def window_mask(mask: Sequence[bool], span: WindowSpan) -> NDArray[np.bool_]:
    """A sequence's mask as a window has it, ``[num_rows + 1]``, context cleared.

    Entry i is about token ``start + i``, which row ``start + i - 1`` predicts; hence
    ``context + 1`` entries are cleared where there is context.
    """
    entries = with_next(mask, span, False, np.bool_)
    if span.context:
        entries[: span.context + 1] = False
    return entries


def with_next(values: Sequence[Any], span: WindowSpan, beyond: Any, dtype: type[np.generic]) -> NDArray[Any]:
    """Entries ``start..stop`` inclusive; ``beyond`` stands in for what follows the sequence's end."""
    part = list(values[span.start : span.stop + 1])
    return np.array(part + [beyond] * (span.num_rows + 1 - len(part)), dtype=dtype)
