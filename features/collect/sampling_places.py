"""Where windows lie in a sequence: pure functions of its masks and one uniform draw.

Row i of a sequence predicts token i + 1, so the response's rows begin with the one before the
first sampled token. Placements:

- ``around_response``: one window; it starts between half a window before the first sampled
  token and the last one, so that it holds tokens worth learning and some of the prompt.
- ``front``: one window from the response's first row on.
- ``uniform``: one window, any start from which it predicts a sampled token is as likely.
- ``response_only``: one window inside the response's rows, no row of the prompt before them.
- ``strided``: a window every ``stride`` rows of the response, the first at a random phase;
  what the phase leaves at the front becomes a shorter window.

A sequence (or response) shorter than a window is kept whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Placement = Literal["around_response", "front", "uniform", "strided", "response_only"]
PLACEMENTS: tuple[str, ...] = get_args(Placement)


@dataclass(frozen=True, slots=True, order=True)
class WindowSpan:
    """Rows ``[start, stop)`` of a sequence, by absolute position."""

    start: int
    stop: int
    context: int = 0
    """So many leading rows are there to be seen, not learned: neither they nor the tokens that they
    predict are marked as sampled, or counted by the loss, in the window."""

    @property
    def num_rows(self) -> int:
        """Rows of the window, context included."""
        return self.stop - self.start


def place_windows(
    sampled_mask: Sequence[bool],
    prompt_length: int,
    draw: float,
    *,
    placement: Placement,
    max_rows: int,
    context_rows: int,
    stride: int,
) -> tuple[WindowSpan, ...]:
    """Spans of at most ``max_rows`` rows plus context, ascending; ``draw`` is uniform in [0, 1)."""
    length = len(sampled_mask)
    sampled = [i for i, s in enumerate(sampled_mask) if s] or [prompt_length]
    first, stop = max(0, sampled[0] - 1), min(length, sampled[-1] + 1)  # the response's rows
    match placement:
        case "around_response" | "uniform":
            if length <= max_rows:
                return (WindowSpan(0, length),)
            latest = min(length - max_rows, max(0, sampled[-1] - 1))
            reach = max_rows // 2 if placement == "around_response" else max_rows
            earliest = min(latest, max(0, sampled[0] - reach))
            starts = [earliest + int(draw * (latest - earliest + 1))]
            stop = length
        case "front":
            starts = [first]
        case "response_only":
            starts = [first + int(draw * (max(0, stop - first - max_rows) + 1))]
        case "strided":
            phase = int(draw * stride) if stop - first > max_rows else 0
            # A window of the last row alone would predict nothing that was sampled.
            starts = list(range(first + phase, max(stop - 1, first + 1), stride))
            if phase:
                head = WindowSpan(first, min(first + phase, first + max_rows))
                rest = (_span(start, stop, max_rows, context_rows) for start in starts)
                return (_with_context(head, context_rows), *rest)
    return tuple(_span(start, stop, max_rows, context_rows) for start in starts)


def _span(start: int, stop: int, max_rows: int, context_rows: int) -> WindowSpan:
    return _with_context(WindowSpan(start, min(start + max_rows, stop)), context_rows)


def _with_context(span: WindowSpan, context_rows: int) -> WindowSpan:
    context = min(context_rows, span.start)
    return WindowSpan(span.start - context, span.stop, context)
