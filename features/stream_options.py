"""What a stream writer is told, and what it tells."""

from dataclasses import dataclass
from typing import Literal

from features.errors import InputError
from features.schema import AuxCodec


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Sizes count feature bytes (aux and final); tokens and masks are small beside them."""

    max_bytes: int = 512 << 20
    """Held at most, from ``append`` until committed. Encoding a fragment takes up to twice its larger
    array more, per upload."""
    flush_bytes: int = 128 << 20
    """A fragment closes when it holds this much."""
    deadline_s: float = 30.0
    """A fragment closes when its first window has waited this long."""
    when_full: Literal["block", "drop"] = "block"
    """What ``append`` does when ``max_bytes`` are held: wait for uploads, or drop the window and count it."""
    num_uploads: int = 2
    """Fragments on their way at once."""
    aux_codec: AuxCodec = AuxCodec.NONE
    """How aux features are stored; ``INT8`` halves them, and states per window what that lost."""

    def __post_init__(self) -> None:
        if not 0 < self.flush_bytes <= self.max_bytes or self.deadline_s <= 0 or self.num_uploads < 1:
            raise InputError(
                f"a stream writer needs 0 < flush_bytes <= max_bytes, deadline_s > 0 and num_uploads >= 1, "
                f"got {self}"
            )
        if self.when_full not in ("block", "drop"):
            raise InputError(f"when_full is 'block' or 'drop', got {self.when_full!r}")


DEFAULT_STREAM = StreamOptions()


@dataclass(frozen=True, slots=True)
class StreamReport:
    """What became of the windows that were offered.

    ``windows + duplicates + dropped + repeated + waiting`` are all that ``append`` did not refuse.
    """

    windows: int = 0
    """Committed."""
    tokens: int = 0
    """Feature rows of these."""
    nbytes: int = 0
    fragments: int = 0
    duplicates: int = 0
    """Windows of fragments whose plan was committed before."""
    repeated: int = 0
    """Windows offered again while the first was still waiting."""
    dropped: int = 0
    """Windows not taken because ``max_bytes`` were held."""
    dropped_tokens: int = 0
    waiting: int = 0
    """Windows taken and not committed yet; of a failed writer, those that never will be."""
    held_bytes: int = 0
    """Feature bytes of these."""
    most_held_bytes: int = 0
    blocked_s: float = 0.0
    """Time that ``append`` spent waiting for room."""
