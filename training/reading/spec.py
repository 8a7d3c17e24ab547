"""What a reader is told, and where in an epoch it is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from features.errors import InputError

MIB = 2**20
STREAM_BELOW_BYTES = 2 * MIB
"""Mean bytes of a window under which one request per window would cost more than its bytes."""

STATE_FORMAT = 1


@dataclass(frozen=True, slots=True)
class ReadSpec:
    """How windows are ordered, batched and fetched.

    What decides the order (all but ``read_ahead_bytes`` and ``concurrency``) is part of a
    state: a reader told otherwise refuses to resume from it.
    """

    batch_rows: int = 4096
    """Rows (tokens) of a step on one rank, at most; a longer window goes alone."""
    padded: bool = False
    """Count a step's rows as if every window were as long as its longest, and put windows of similar
    length into one step: for batches that are padded."""
    seed: int = 0
    order: Literal["auto", "random", "stream"] = "auto"
    """``random``: any window next, a request for each array of each. ``stream``: large parts of
    fragments through a shuffle buffer. ``auto``: stream when windows are under 2 MiB on average."""
    lanes: int = 1
    """Independent streams of a rank, taken in turns; as many as loader processes, so that none
    reads what another one needs. The order depends on it, not on how many processes there are."""
    part_bytes: int = 32 * MIB
    """Most bytes of a fragment, both arrays together, that are read at once."""
    gap_bytes: int = MIB
    """Unwanted bytes that are read along to save a request."""
    buffer_bytes: int = 512 * MIB
    """Shuffle buffer of a rank, divided by its lanes: how far a window moves from its fragment's place."""
    read_ahead_bytes: int = 256 * MIB
    """Bytes that may be under way or waiting beside the shuffle buffer."""
    concurrency: int | None = None
    """Requests at once; None: 4 on a local folder, 32 elsewhere. 0: no threads, each step is read
    when it is asked for: the least work per byte, for files that are in memory anyway."""

    def __post_init__(self) -> None:
        for name in ("batch_rows", "lanes", "part_bytes", "buffer_bytes", "read_ahead_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.gap_bytes < 0 or self.seed < 0:
            raise ValueError(f"gap_bytes and seed are not negative, got {self.gap_bytes} and {self.seed}")
        if self.concurrency is not None and self.concurrency < 0:
            raise ValueError(f"concurrency is not negative, got {self.concurrency}")


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """Before step ``step`` of an epoch: all earlier steps were used. The same on every rank."""

    epoch: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.step < 0:
            raise ValueError(f"a position has no negative part, got epoch {self.epoch}, step {self.step}")


def encode_state(position: Position, identity: Mapping[str, Any]) -> dict[str, Any]:
    """A position as a JSON value, with what has to be equal for it to mean the same windows."""
    return {"format": STATE_FORMAT, "epoch": position.epoch, "step": position.step, "reads": dict(identity)}


def decode_state(state: Mapping[str, Any], identity: Mapping[str, Any]) -> Position:
    """Read :func:`encode_state`.

    Raises:
        InputError: it is no state, or is of another selection, spec or number of ranks.
    """
    try:
        form, reads = state["format"], dict(state["reads"])
        position = Position(int(state["epoch"]), int(state["step"]))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"this is no reader state ({error!r}); pass what a step gave as its state"
        ) from error
    if form != STATE_FORMAT:
        raise InputError(
            f"this reader state has format {form}, this program reads {STATE_FORMAT}. Start the epoch anew."
        )
    differing = sorted(name for name in {*reads, *identity} if reads.get(name) != identity.get(name))
    if differing:
        found = ", ".join(f"{name} {reads.get(name)!r} (now {identity.get(name)!r})" for name in differing)
        raise InputError(
            f"cannot resume at epoch {position.epoch}, step {position.step}: the state was made with {found}. "
            f"Resume with the same settings, or start from the beginning of an epoch."
        )
    return position
