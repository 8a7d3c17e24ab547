"""A trainer's batch as the collector sees it: which flat rows belong to which token of which sequence.

Imports no framework: tensors on the host pass as they are (anything numpy can read).
"""

# Shape legend: B = sequences, T = padded length, N = rows of a packed batch.

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from features.collect.rollout import Rollout
from features.errors import InputError


@dataclass(frozen=True, slots=True, eq=False)
class BatchLayout:
    """Where each sequence lies among the flat rows of a batch (``[B * T]`` or ``[N]``)."""

    starts: NDArray[np.int64]
    """Flat row of each sequence's first token."""
    lengths: NDArray[np.int64]
    num_rows: int
    """Flat rows of the whole batch, padding included: what the model's forward sees."""
    share_row: bool = False
    """Sequences lie behind each other in one batch row: only their positions keep them apart."""
    padded_lengths: NDArray[np.int64] | None = None
    """Of a packed batch: flat rows that each sequence takes, its own padding included."""

    @classmethod
    def right_padded(cls, lengths: ArrayLike, *, width: int) -> "BatchLayout":
        """``[B, T]`` with each sequence from column 0 on."""
        sizes = np.asarray(lengths, np.int64).reshape(-1)
        if len(sizes) and not 0 <= sizes.min() <= sizes.max() <= width:
            raise InputError(f"lengths {sizes.min()} to {sizes.max()} do not fit a batch of width {width}")
        return cls(np.arange(len(sizes)) * width, sizes, len(sizes) * width)

    @classmethod
    def packed(
        cls, cu_seqlens: ArrayLike, *, num_rows: int, lengths: ArrayLike | None = None
    ) -> "BatchLayout":
        """``[N]``: sequence i takes rows ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]``; rows after the last are padding.

        With ``lengths``, only the first ``lengths[i]`` of these are tokens, the others padding.
        """
        edges = np.asarray(cu_seqlens, np.int64).reshape(-1)
        if not len(edges) or edges[0] != 0 or (np.diff(edges) < 0).any() or edges[-1] > num_rows:
            raise InputError(
                f"cu_seqlens must start at 0, never fall and end within the batch's {num_rows} rows, got {edges}"
            )
        padded = np.diff(edges)
        sizes = padded if lengths is None else np.asarray(lengths, np.int64).reshape(-1)
        if len(sizes) != len(padded) or (sizes < 0).any() or (sizes > padded).any():
            raise InputError(
                f"lengths {sizes} do not fit the sequences of cu_seqlens, which take {padded} rows: beside lengths, "
                f"give the cu_seqlens of the padded sequences"
            )
        return cls(edges[:-1], sizes, num_rows, share_row=True, padded_lengths=padded)

    @classmethod
    def of_mask(cls, attention_mask: ArrayLike) -> "BatchLayout":
        """``[B, T]``, ones where tokens are, padded on either side.

        Raises:
            InputError: the ones of a row are not one run (the positions of its tokens are then unknown).
        """
        mask = np.asarray(attention_mask).astype(bool)
        if mask.ndim != 2:
            raise InputError(
                f"an attention mask is [B, T], found {mask.shape}; packed batches give cu_seqlens"
            )
        lengths = mask.sum(axis=1)
        first = np.where(lengths > 0, mask.argmax(axis=1), 0)
        run = (np.arange(mask.shape[1]) >= first[:, None]) & (
            np.arange(mask.shape[1]) < (first + lengths)[:, None]
        )
        if (holes := np.flatnonzero((run != mask).any(axis=1))).size:
            raise InputError(
                f"row {holes[0]} of the attention mask has a hole: its tokens' positions cannot be told. "
                f"Give lengths, cu_seqlens or a mask that is one run per row."
            )
        return cls(np.arange(len(mask)) * mask.shape[1] + first, lengths.astype(np.int64), mask.size)

    def rows(self, sequence: int, start: int, stop: int) -> NDArray[np.int64]:
        """Flat rows of tokens ``[start, stop)`` of a sequence."""
        base = self.starts[sequence]
        return np.arange(base + start, base + stop, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class LiveBatch:
    """What a step's forward runs over. Per-token arrays have the shape of ``token_ids``; ``None`` is unknown.

    Give exactly one of ``lengths`` (right-padded), ``cu_seqlens`` (packed) and ``attention_mask``. Where
    each sequence of a packed batch is padded, give its ``lengths`` beside the padded ``cu_seqlens``.
    """

    token_ids: ArrayLike
    """``[B, T]`` or packed ``[N]`` (also ``[1, N]``)."""
    sample_ids: Sequence[str]
    """One id per rollout, unique within a version: names the sequence in the lake."""
    group_ids: Sequence[str]
    """The prompt's identity."""
    sampled_mask: ArrayLike
    """Tokens that the target sampled."""
    versions: int | Sequence[int | None]
    """Version of the weights that sampled each sequence; a version is data, never assumed."""
    lengths: ArrayLike | None = None
    cu_seqlens: ArrayLike | None = None
    attention_mask: ArrayLike | None = None
    loss_mask: ArrayLike | None = None
    logprobs: ArrayLike | None = None
    """The engine's logprob of each token itself; NaN or 0.0 where there is none."""
    logprob_kind: str | None = None
    prompt_lengths: Sequence[int] | None = None
    """None: up to the first sampled token."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    rewards: Sequence[float | None] | None = None
    domains: Sequence[str | None] | None = None
    acceptance_lengths: Sequence[float | None] | None = None
    """Measured on the engine."""
    layout: BatchLayout = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", self._layout())
        count = len(self.layout.lengths)
        named = {"sample_ids": self.sample_ids, "group_ids": self.group_ids, "rewards": self.rewards,
                 "domains": self.domains, "acceptance_lengths": self.acceptance_lengths,
                 "prompt_lengths": self.prompt_lengths,
                 "versions": None if isinstance(self.versions, int) else self.versions}  # fmt: skip
        for name, values in named.items():
            if values is not None and len(values) != count:
                raise InputError(f"{name} has {len(values)} entries for {count} sequences of the batch")
        for name in ("sampled_mask", "loss_mask", "logprobs"):
            values = getattr(self, name)
            if values is not None and np.asarray(values).size != self.layout.num_rows:
                raise InputError(
                    f"{name} has {np.asarray(values).size} entries, the batch has {self.layout.num_rows} rows: "
                    f"give it in the shape of token_ids, entry i about token i itself"
                )

    def __len__(self) -> int:
        return len(self.layout.lengths)

    def version_of(self, sequence: int) -> int | None:
        """Version that sampled a sequence."""
        return self.versions if isinstance(self.versions, int) else self.versions[sequence]

    def rollout(self, sequence: int) -> Rollout:
        """One sequence of the batch, without padding."""
        at = self.layout.starts[sequence]
        rows = slice(int(at), int(at + self.layout.lengths[sequence]))
        sampled = self._flat["sampled_mask"][rows].astype(bool)
        prompt = int(sampled.argmax()) if sampled.any() else len(sampled)
        loss, logprobs = self._flat["loss_mask"], self._flat["logprobs"]
        return Rollout(
            sample_id=self.sample_ids[sequence], group_id=self.group_ids[sequence],
            token_ids=tuple(self._flat["token_ids"][rows].tolist()),
            prompt_length=prompt if self.prompt_lengths is None else int(self.prompt_lengths[sequence]),
            sampled_mask=tuple(sampled.tolist()),
            loss_mask=None if loss is None else tuple(loss[rows].astype(bool).tolist()),
            logprobs=None if logprobs is None else tuple(logprobs[rows].tolist()),
            logprob_kind=self.logprob_kind, version=self.version_of(sequence), temperature=self.temperature,
            top_p=self.top_p, top_k=self.top_k, reward=_entry(self.rewards, sequence),
            domain=_entry(self.domains, sequence),
            acceptance_length=_entry(self.acceptance_lengths, sequence),
        )  # fmt: skip

    def content_digest(self, sequence: int) -> bytes:
        """Of what may never differ under one sample id at a version: group, prompt, tokens and masks."""
        at = self.layout.starts[sequence]
        rows = slice(int(at), int(at + self.layout.lengths[sequence]))
        prompt = None if self.prompt_lengths is None else self.prompt_lengths[sequence]
        digest = hashlib.blake2b(repr((self.group_ids[sequence], prompt)).encode(), digest_size=16)
        for name, dtype in (("token_ids", "<i8"), ("sampled_mask", "u1"), ("loss_mask", "u1")):
            values = self._flat[name]
            digest.update(b"" if values is None else np.ascontiguousarray(values[rows], dtype).tobytes())
        return digest.digest()

    @cached_property
    def _flat(self) -> dict[str, Any]:
        names = ("token_ids", "sampled_mask", "loss_mask", "logprobs")
        given = {name: getattr(self, name) for name in names}
        return {n: None if v is None else np.asarray(v).reshape(-1) for n, v in given.items()}

    def _layout(self) -> BatchLayout:
        shape = np.asarray(self.token_ids).shape
        given = [n for n in ("lengths", "cu_seqlens", "attention_mask") if getattr(self, n) is not None]
        if len(given) != 1 and given != ["lengths", "cu_seqlens"]:
            raise InputError(
                f"a batch gives exactly one of lengths, cu_seqlens, attention_mask, or lengths beside padded "
                f"cu_seqlens; got {given}"
            )
        if self.cu_seqlens is not None:
            if len(shape) == 2 and shape[0] != 1:
                raise InputError(f"a packed batch is [N] or [1, N], token_ids are {list(shape)}")
            return BatchLayout.packed(self.cu_seqlens, num_rows=int(np.prod(shape)), lengths=self.lengths)
        if len(shape) != 2:
            raise InputError(f"a padded batch is [B, T], token_ids are {list(shape)}")
        if self.lengths is not None:
            layout = BatchLayout.right_padded(self.lengths, width=shape[1])
        else:
            layout = BatchLayout.of_mask(self.attention_mask)  # type: ignore[arg-type]  # one is given
        if layout.num_rows != shape[0] * shape[1]:
            raise InputError(f"token_ids are {list(shape)}, {given[0]} describe {layout.num_rows} rows")
        return layout


def _entry(values: Sequence[Any] | None, sequence: int) -> Any:
    return None if values is None else values[sequence]
