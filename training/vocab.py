"""Draft vocabulary maps: which target ids a draft can propose.

``d2t`` is an *offset*: ``target_id = draft_id + d2t[draft_id]``. Target ids are strictly
increasing, so a map is fully given by the set of target ids it holds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.errors import DraftLayoutError, InputError

D2T, T2D = "d2t", "t2d"


@dataclass(frozen=True, slots=True, eq=False)
class VocabMap:
    """A checked map; build one with a classmethod."""

    d2t: NDArray[np.int64]
    """Offsets, ``[Vd]``."""
    t2d: NDArray[np.bool_]
    """True where a target id is in the draft vocabulary, ``[V]``; ``sum == Vd``."""

    @classmethod
    def identity(cls, vocab_size: int) -> "VocabMap":
        """The full vocabulary: every offset is zero."""
        return cls(np.zeros(vocab_size, np.int64), np.ones(vocab_size, np.bool_)).validate()

    @classmethod
    def from_target_ids(cls, target_ids: NDArray[np.integer[Any]], vocab_size: int) -> "VocabMap":
        """The map over the given distinct target ids, in any order."""
        ids = np.sort(np.asarray(target_ids, dtype=np.int64))
        t2d = np.zeros(vocab_size, np.bool_)
        if len(ids) and ids[0] >= 0 and ids[-1] < vocab_size:
            t2d[ids] = True
        return cls(ids - np.arange(len(ids), dtype=np.int64), t2d).validate()

    @classmethod
    def from_counts(cls, counts: NDArray[np.integer[Any]], size: int) -> "VocabMap":
        """The ``size`` most frequent target ids of ``counts`` ``[V]``.

        Ties, and the places left when fewer ids occur than asked for, go to the smallest ids.

        Raises:
            InputError: ``size`` exceeds the vocabulary, or nothing was counted.
        """
        vocab_size = len(counts)
        if not 1 <= size <= vocab_size:
            raise InputError(
                f"draft vocabulary of {size:,} entries asked for, the target has {vocab_size:,}. "
                f"Set draft_vocab_size to at most {vocab_size:,}, or leave it out for the whole vocabulary."
            )
        if size == vocab_size:
            return cls.identity(vocab_size)
        if not counts.any():
            raise InputError(
                f"a draft vocabulary of {size:,} out of {vocab_size:,} needs token counts, and no supervised "
                f"token was counted. Widen the selection, or leave draft_vocab_size out."
            )
        ranked = np.lexsort((np.arange(vocab_size), -np.asarray(counts, dtype=np.int64)))
        return cls.from_target_ids(ranked[:size], vocab_size)

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, NDArray[Any]], *, draft_vocab_size: int, vocab_size: int, where: str
    ) -> "VocabMap":
        """Read the map of a checkpoint; without tensors only the full vocabulary is a map.

        Raises:
            DraftLayoutError: a tensor is absent, of another type or shape, or they disagree.
        """
        if D2T not in tensors and T2D not in tensors:
            if draft_vocab_size == vocab_size:
                return cls.identity(vocab_size)
            raise DraftLayoutError(
                f"{where}: the draft's vocabulary has {draft_vocab_size:,} of the target's {vocab_size:,} entries, "
                f"but the tensors d2t and t2d are missing. An engine would take the first {draft_vocab_size:,} ids. "
                f"Export the draft again with its map inside the weights file."
            )
        missing = [name for name in (D2T, T2D) if name not in tensors]
        if missing:
            raise DraftLayoutError(
                f"{where}: {missing[0]} is missing while the other half of the map is there"
            )
        d2t, t2d = tensors[D2T], tensors[T2D]
        expected = {D2T: ("int64", (draft_vocab_size,)), T2D: ("bool", (vocab_size,))}
        for name, array in ((D2T, d2t), (T2D, t2d)):
            found = (array.dtype.name, tuple(array.shape))
            if found != expected[name]:
                raise DraftLayoutError(
                    f"{where}: {name} is {found}, expected {expected[name]}. Export it again."
                )
        return cls(d2t, t2d).validate(where=where)

    @property
    def target_ids(self) -> NDArray[np.int64]:
        """Target id of each draft id, strictly increasing, ``[Vd]``."""
        return np.arange(len(self.d2t), dtype=np.int64) + self.d2t

    @property
    def size(self) -> int:
        """Entries of the draft vocabulary, ``Vd``."""
        return len(self.d2t)

    @property
    def vocab_size(self) -> int:
        """Entries of the target vocabulary, ``V``."""
        return len(self.t2d)

    @property
    def is_full(self) -> bool:
        """True when the draft can propose every id of the *target's* vocabulary."""
        return self.size == self.vocab_size

    def tensors(self) -> dict[str, NDArray[Any]]:
        """What goes into the weights file: nothing for the full vocabulary, else ``d2t`` and ``t2d``."""
        return {} if self.is_full else {D2T: self.d2t, T2D: self.t2d}

    def validate(self, where: str = "vocabulary map") -> "VocabMap":
        """Return self, or raise :class:`DraftLayoutError` naming what is wrong."""
        ids = self.target_ids
        problems = []
        if len(ids) == 0:
            problems.append("it is empty")
        elif int(ids[0]) < 0 or int(ids.max()) >= self.vocab_size:
            problems.append(
                f"target ids span [{int(ids.min())}, {int(ids.max())}], outside [0, {self.vocab_size}): "
                f"d2t holds offsets (target = i + d2t[i]), not ids"
            )
        elif (np.diff(ids) <= 0).any():
            problems.append("target ids are not strictly increasing")
        elif not np.array_equal(np.flatnonzero(self.t2d), ids):
            problems.append(
                f"t2d marks {int(self.t2d.sum())} ids and d2t names {len(ids)}; they must be the same set"
            )
        if problems:
            raise DraftLayoutError(
                f"{where} is refused: {problems[0]}. Build the map again from token counts."
            )
        return self
