"""Planned rows of replayed sequences: which of them an engine step computes, and taking them out.

Imports torch, not vLLM: :class:`StepPlanner` reads the scheduler's output by attribute and runs
in the scheduler, :class:`RowStore` runs in the worker. Rows are taken in the very step that
computes them, so that no cache block has to outlive its request, and every row is marked NaN
before it is computed: a row that a step did not write can never be taken for one that it did.
"""

# Shape legend: R = planned rows of a sequence, n = layer ids that the engine extracts, H = hidden size.

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from features.collect.sampling import WindowSpan

log = logging.getLogger(__name__)

PARAMETER = "draftlake"
"""Key of a request's ``kv_transfer_params`` that holds its ticket and plan."""
_COPY_CHUNK = 4096
"""Rows that a single device-to-host copy moves at most."""


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """What a replayed request asks the connector to take."""

    ticket: str
    """Name under which the rows are fetched; unique among the sequences in flight."""
    num_tokens: int
    spans: tuple[WindowSpan, ...]

    def as_parameter(self) -> dict[str, Any]:
        """The value of ``kv_transfer_params``."""
        spans = [[span.start, span.stop] for span in self.spans]
        return {PARAMETER: {"ticket": self.ticket, "num_tokens": self.num_tokens, "spans": spans}}

    @classmethod
    def from_parameter(cls, parameters: Mapping[str, Any] | None) -> "ReplayRequest | None":
        """The plan in a request's ``kv_transfer_params``; None for a request that is no replay.

        A plan that cannot be read is none too: an error here would end the engine, whereas the
        driver refuses a sequence of which it finds no rows.
        """
        given = (parameters or {}).get(PARAMETER)
        if given is None:
            return None
        try:
            spans = tuple(WindowSpan(int(start), int(stop)) for start, stop in given["spans"])
            request = cls(str(given["ticket"]), int(given["num_tokens"]), spans)
        except (KeyError, TypeError, ValueError) as error:
            log.warning("a request's replay plan cannot be read (%r): its rows are not taken", error)
            return None
        if not all(0 <= span.start < span.stop <= request.num_tokens for span in spans):
            log.warning("replay plan of %s reaches beyond its %d tokens", request.ticket, request.num_tokens)
            return None
        return request


@dataclass(frozen=True, slots=True)
class StepShare:
    """What one engine step computes of one replayed sequence."""

    request: ReplayRequest
    start: int
    """First position computed in this step."""
    stop: int
    rows: tuple[int, ...]
    """Planned rows among them, by index into the sequence's planned rows."""
    slots: tuple[int, ...]
    """Cache slot of each of ``rows``: block id times block size plus offset."""


@dataclass(slots=True)
class _Tracked:
    request: ReplayRequest
    blocks: list[int]


class StepPlanner:
    """Follows the replayed requests through the scheduler: chunked, preempted and resumed ones.

    Args:
        group: index of the cache group that holds the extracted states.
        block_size: positions per block of that group.
    """

    def __init__(self, *, group: int, block_size: int) -> None:
        self._group, self._block_size = group, block_size
        self._tracked: dict[str, _Tracked] = {}

    def shares(self, step: Any) -> list[StepShare]:
        """The shares of a vLLM ``SchedulerOutput``, one per replayed request in it."""
        for finished in step.finished_req_ids:
            self._tracked.pop(finished, None)
        begun = [self._begin(request) for request in step.scheduled_new_reqs]
        went_on = self._continue(step.scheduled_cached_reqs)
        return [
            self._share(self._tracked[name], first, step.num_scheduled_tokens[name])
            for name, first in (*begun, *went_on)
            if name in self._tracked
        ]

    def _begin(self, new: Any) -> tuple[str, int]:
        extra = getattr(new.sampling_params, "extra_args", None) or {}
        request = ReplayRequest.from_parameter(extra.get("kv_transfer_params"))
        if request is not None:
            self._tracked[new.req_id] = _Tracked(request, list(new.block_ids[self._group]))
        return new.req_id, int(new.num_computed_tokens)

    def _continue(self, cached: Any) -> list[tuple[str, int]]:
        went_on: list[tuple[str, int]] = []
        for index, name in enumerate(cached.req_ids):
            tracked, blocks = self._tracked.get(name), cached.new_block_ids[index]
            if tracked is not None and blocks is not None:
                # A resumed request gets its whole table anew, the others what was added to it.
                kept = [] if name in cached.resumed_req_ids else tracked.blocks
                tracked.blocks = [*kept, *blocks[self._group]]
            went_on.append((name, int(cached.num_computed_tokens[index])))
        return went_on

    def _share(self, tracked: _Tracked, first: int, count: int) -> StepShare:
        request = tracked.request
        start, stop = min(first, request.num_tokens), min(first + count, request.num_tokens)
        rows: list[int] = []
        slots: list[int] = []
        before = 0
        for span in request.spans:
            for position in range(max(span.start, start), min(span.stop, stop)):
                block, offset = divmod(position, self._block_size)
                rows.append(before + position - span.start)
                slots.append(tracked.blocks[block] * self._block_size + offset)
            before += span.num_rows
        return StepShare(request, start, stop, tuple(rows), tuple(slots))


@dataclass(frozen=True, slots=True)
class _Piece:
    rows: Tensor
    states: Tensor
    ready: Any | None
    """Event after which the copy to the host is complete; None where copies are immediate."""


@dataclass(slots=True)
class Capture:
    """The planned rows of one sequence, as far as the engine computed them."""

    request: ReplayRequest
    computed: list[tuple[int, int]] = field(default_factory=list)
    """Half-open position ranges in the order they were computed."""
    pieces: list[_Piece] = field(default_factory=list)

    def joined(self) -> tuple[Tensor | None, str]:
        """The rows ``[R, n, H]`` in the engine's dtype on the host, or None and what is wrong with them."""
        fault = self._range_fault()
        if fault:
            return None, fault
        total = sum(span.num_rows for span in self.request.spans)
        rows = torch.full(
            (total, *self.pieces[0].states.shape[1:]), torch.nan, dtype=self.pieces[0].states.dtype
        )
        for piece in self.pieces:
            if piece.ready is not None:
                piece.ready.synchronize()
            rows[piece.rows] = piece.states
        unwritten = torch.isnan(rows).flatten(1).all(dim=1).nonzero().flatten()
        if len(unwritten):
            return None, (
                f"{len(unwritten)} of {total} planned rows were computed but their states never stored by the "
                f"engine, the first planned row is {int(unwritten[0])}"
            )
        return rows, ""

    def _range_fault(self) -> str:
        """Why the computed ranges do not cover the sequence from its first token to its last."""
        reached = 0
        for start, stop in sorted(self.computed):
            if start > reached:
                break
            reached = max(reached, stop)
        if reached >= self.request.num_tokens and self.pieces:
            return ""
        found = ", ".join(f"[{start}, {stop})" for start, stop in self.computed) or "nothing"
        return (
            f"expected states of positions [0, {self.request.num_tokens}), the engine computed {found}: "
            "a cached prefix or an aborted request"
        )


class RowStore:
    """Takes planned rows out of the engine's cache and keeps them on the host until they are fetched.

    Args:
        gather: ``gather(cache, slots [R]) -> [R, n, H]``.
        spoil: ``spoil(cache, slots [R])`` writes NaN there.
    """

    def __init__(
        self, gather: Callable[[Tensor, Tensor], Tensor], spoil: Callable[[Tensor, Tensor], None]
    ) -> None:
        self._gather, self._spoil = gather, spoil
        self._captures: dict[str, Capture] = {}

    def mark(self, cache: Tensor, shares: Iterable[StepShare]) -> None:
        """Before the states of a step are stored: make every row that it must write unmistakable."""
        slots = [slot for share in shares for slot in share.slots]
        if slots:
            self._spoil(cache, torch.tensor(slots, dtype=torch.long).to(cache.device))

    def take(self, cache: Tensor, shares: Sequence[StepShare]) -> None:
        """After a step: copy the planned rows to the host, without waiting for the device."""
        for share in shares:
            capture = self._captures.get(share.request.ticket)
            if capture is None or share.start == 0:  # computed again from the start after a preemption
                capture = self._captures[share.request.ticket] = Capture(share.request)
            if share.stop > share.start:
                capture.computed.append((share.start, share.stop))
            for at in range(0, len(share.rows), _COPY_CHUNK):
                part = slice(at, at + _COPY_CHUNK)
                slots = torch.tensor(share.slots[part], dtype=torch.long).to(cache.device)
                states, ready = _to_host(self._gather(cache, slots))
                capture.pieces.append(_Piece(torch.tensor(share.rows[part], dtype=torch.long), states, ready))

    def fetch(self, ticket: str) -> tuple[Tensor | None, str]:
        """Hand over one sequence's rows ``[R, n, H]``, or None and the reason; they are forgotten here."""
        capture = self._captures.pop(ticket, None)
        return (None, "the engine never ran this sequence") if capture is None else capture.joined()

    def clear(self) -> None:
        """Forget everything that was not fetched."""
        self._captures.clear()


def _to_host(states: Tensor) -> tuple[Tensor, Any | None]:
    if not states.is_cuda:
        return states.clone(), None
    host = torch.empty(states.shape, dtype=states.dtype, pin_memory=True)
    host.copy_(states, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return host, ready
