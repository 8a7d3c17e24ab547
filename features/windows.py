"""A window in memory: a contiguous span of one rollout's tokens with its features."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from features.errors import LakeContractError
from features.schema import NO_TOKEN, FragmentLayout, TargetVersion, Verification


@dataclass(frozen=True, slots=True)
class WindowMeta:
    """What is known of a window besides its arrays. ``None`` is unknown, never a default."""

    sample_id: str
    group_id: str
    version: TargetVersion
    start: int
    """Absolute position of the first row in the sequence."""
    sequence_length: int
    prompt_length: int
    verification: Verification = Verification.UNVERIFIED
    logprob_kind: str | None = None
    logprob_tokens: int | None = None
    logprob_mean_error: float | None = None
    logprob_max_error: float | None = None
    reward: float | None = None
    acceptance_length: float | None = None
    acceptance_rate: float | None = None
    domain: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    finish: str | None = None
    sampling: str | None = None
    """How it was chosen: the policy's settings as canonical JSON."""


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens, masks and features of rows ``[start, start + num_rows)``; rows are unshifted.

    Shapes: ``token_ids``, ``sampled_mask``, ``loss_mask``, ``logprobs`` are ``[num_rows + 1]``
    (the last entry is the token one past the rows; ``NO_TOKEN``/False/NaN at the sequence's
    end). ``aux`` is ``[num_rows, m * H]``, pre-norm, ascending layer ids; ``final`` is
    ``[num_rows, H]``, the LM head's input. bfloat16 arrays hold raw ``uint16`` bits.
    """

    meta: WindowMeta
    layout: FragmentLayout
    token_ids: NDArray[np.int32]
    sampled_mask: NDArray[np.bool_]
    loss_mask: NDArray[np.bool_] | None
    logprobs: NDArray[np.float32]
    """Engine logprob of each token itself (index i belongs to token i); NaN where unknown."""
    aux: NDArray[np.uint16] | NDArray[np.float32]
    final: NDArray[np.uint16] | NDArray[np.float32]

    @property
    def num_rows(self) -> int:
        return int(self.final.shape[0])

    @property
    def stop(self) -> int:
        return self.meta.start + self.num_rows


def check_window(window: Window, *, vocab_size: int) -> None:
    """Refuse a window whose parts do not fit each other.

    Raises:
        LakeContractError: naming the sample, what was expected and what was found.
    """
    rows, layout = window.num_rows, window.layout
    problems = []
    if rows < 1:
        problems.append("it has no row")
    if window.aux.shape != (rows, layout.aux_width):
        problems.append(f"aux is {window.aux.shape}, expected {(rows, layout.aux_width)}")
    if window.final.shape != (rows, layout.hidden_size):
        problems.append(f"final is {window.final.shape}, expected {(rows, layout.hidden_size)}")
    for name in ("aux", "final"):
        found = getattr(window, name).dtype.name
        if found != layout.dtype.numpy_name:
            problems.append(f"{name} holds {found}, expected {layout.dtype.numpy_name} ({layout.dtype})")
    for name in ("token_ids", "sampled_mask", "loss_mask", "logprobs"):
        array = getattr(window, name)
        if array is not None and array.shape != (rows + 1,):
            problems.append(f"{name} has {array.shape[0]} entries, expected rows + 1 = {rows + 1}")
    problems += _token_problems(window, vocab_size=vocab_size)
    if problems:
        raise LakeContractError(
            f"window of sample {window.meta.sample_id!r} at position {window.meta.start} is refused: "
            + "; ".join(problems)
            + ". Record it again with features and tokens of the same computed range."
        )


def _token_problems(window: Window, *, vocab_size: int) -> list[str]:
    ids = window.token_ids
    ends_sequence = window.stop == window.meta.sequence_length
    body, last = ids[:-1], int(ids[-1]) if len(ids) else NO_TOKEN
    problems = []
    if len(body) and (int(body.min()) < 0 or int(body.max()) >= vocab_size):
        problems.append(f"a token id is outside [0, {vocab_size})")
    if ends_sequence != (last == NO_TOKEN):
        problems.append("the token one past the rows must be absent exactly at the sequence's end")
    elif last >= vocab_size:
        problems.append(f"token id {last} is outside [0, {vocab_size})")
    if window.stop > window.meta.sequence_length:
        problems.append(f"rows reach {window.stop}, the sequence has {window.meta.sequence_length}")
    return problems
