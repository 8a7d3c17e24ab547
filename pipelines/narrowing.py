"""What narrows a selection beyond versions, split and proof: the same fields wherever one is named."""

import math
from typing import Annotated

from pydantic import Field, model_validator

from features.schema import SelectionFilter, Split, VersionRange
from features.selection import BOUNDED
from training.spec import Spec

Positive = Annotated[int, Field(ge=1)]


class Narrowing(Spec):
    """Fields of ``SelectionFilter``, which says what each one means; empty and None narrow nothing."""

    samples: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()
    writers: tuple[str, ...] = ()
    newest_versions: Positive | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_acceptance_length: float | None = None
    max_acceptance_length: float | None = None
    min_acceptance_rate: float | None = None
    max_acceptance_rate: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    whole_sequences_only: bool = False
    max_windows: Positive | None = None

    @model_validator(mode="after")
    def _bounds_leave_room(self) -> "Narrowing":
        for name in BOUNDED:
            low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            for place, bound in ((f"min_{name}", low), (f"max_{name}", high)):
                if bound is not None and math.isnan(bound):
                    raise ValueError(f"{place} is no number, so nothing can match")
            if low is not None and high is not None and not low <= high:
                raise ValueError(f"min_{name} {low:g} is above max_{name} {high:g}, so nothing can match")
        return self

    def filter(
        self, versions: VersionRange, *, split: Split, held_out_percent: int, verified_only: bool
    ) -> SelectionFilter:
        """The whole filter."""
        return SelectionFilter(
            versions=versions,
            split=split,
            held_out_percent=held_out_percent,
            verified_only=verified_only,
            **self.model_dump(),
        )
