"""What an offline format is given, and what it has to answer. Shape legend: T = rows, m = aux layers, H = hidden."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from features.bfloat16 import Stored
from features.schema import FeatureDtype


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One sequence: as many tokens as rows, entry i of everything belongs to token i; nothing is shifted."""

    token_ids: NDArray[np.int64]
    """``[T]``."""
    mask: NDArray[np.bool_]
    """``[T]``: token i is supervised."""
    aux: Stored
    """``[T, m * H]``, pre-norm, ascending layer ids, contiguous."""
    last: Stored
    """``[T, H]``: the LM head's input, or what the final norm was given, as the format asks for."""
    dtype: FeatureDtype
    num_layers: int
    """m."""


@dataclass(frozen=True, slots=True)
class TokenSample:
    """Tokens and mask of an exported sequence, for a format that keeps them apart from the features."""

    token_ids: NDArray[np.int64]
    mask: NDArray[np.bool_]


class TokenFiles(Protocol):
    """Files of a format that keeps tokens and masks apart from the features."""

    @property
    def samples_per_file(self) -> int: ...

    @property
    def num_closing(self) -> int:
        """How many files :meth:`closing` gives."""
        ...

    def encode(self, number: int, samples: Sequence[TokenSample]) -> tuple[str, bytes]:
        """Path and content of file ``number``, counted from 0."""
        ...

    def closing(self, paths: Sequence[str], *, digest: str) -> Sequence[tuple[str, bytes]]:
        """Files that name those files, in order; the trainer opens nothing without the last of them."""
        ...


class TrainerFormat(Protocol):
    """One trainer's offline format. ``index`` counts exported sequences from 0, without a gap."""

    @property
    def name(self) -> str:
        """As in ``--to``."""
        ...

    @property
    def before_final_norm(self) -> bool:
        """Whether the last hidden state is the final norm's input rather than the LM head's."""
        ...

    @property
    def token_files(self) -> TokenFiles | None:
        """None: tokens lie with the features."""
        ...

    def layer_names(self, layer_ids: Sequence[int]) -> tuple[int, ...]:
        """Our layer ids (decoder blocks applied) as this trainer numbers them.

        Raises:
            InputError: an id has no name there.
        """
        ...

    def refusal(self, mask: NDArray[np.bool_]) -> str | None:
        """Why this trainer could not use a sequence of that mask; None when it can."""
        ...

    def path(self, index: int) -> str:
        """Where a sequence lies in the exported folder."""
        ...

    def encode(self, sample: Sample) -> bytes:
        """The file of one sequence."""
        ...
