"""Write windows as they come: bounded memory, uploads in the background, one fragment per size or deadline.

``append`` copies a window and returns; threads cut what was taken into fragments and commit
them with :func:`features.writer.write_fragment`. What to do when storage is slower than the
producer is the caller's choice: wait, or drop windows and count them.

Fragments close by size and by time, so a rerun may cut them elsewhere. That is safe: a
selection takes each window once, however many plans hold it. A job that must meet its own
earlier plans uses ``features.collect.collector``, which cuts by planned rows.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from features.commits import TokenRow
from features.errors import InputError, LakeContractError, StreamClosedError, TargetMismatchError
from features.lake import Lake
from features.schema import FragmentLayout, HeadId, TargetVersion
from features.stream_options import DEFAULT_STREAM, StreamOptions, StreamReport
from features.windows import Window, check_window
from features.writer import CommitResult, StepHook, plan_digest, write_fragment

log = logging.getLogger(__name__)

_POLL_S = 0.1
"""How soon a call that waits sees a stop that a signal handler asked for."""


_Key = tuple[TargetVersion, HeadId, FragmentLayout]


@dataclass(slots=True, eq=False)
class _Group:
    """A fragment in the making: windows of one version, head and layout."""

    key: _Key
    opened_at: float
    windows: dict[tuple[str, int], Window] = field(default_factory=dict)
    nbytes: int = 0


class StreamWriter:
    """A context manager; leaving it, also by an exception, commits what was taken.

    Safe to share between threads of one process; open it anew in a child. On SIGTERM either let
    the handler raise ``SystemExit`` so that the ``with`` block closes the writer, or call
    :meth:`stop` in the handler and :meth:`close` in the program's own flow; never ``close`` in
    the handler, which may have interrupted ``append`` halfway.
    """

    def __init__(
        self,
        lake: Lake,
        *,
        writer_id: str,
        sampling: Mapping[str, Any],
        options: StreamOptions = DEFAULT_STREAM,
        on_commit: Callable[[CommitResult], None] | None = None,
        on_step: StepHook | None = None,
    ) -> None:
        """Start the upload threads.

        ``sampling`` is the JSON form of how windows were chosen, part of each plan's name.
        ``on_commit`` is told of every fragment, on an upload thread.
        """
        self._lake, self._writer_id, self._sampling = lake, writer_id, dict(sampling)
        self._options, self._on_commit, self._on_step = options, on_commit, on_step
        self._changed = threading.Condition()
        self._open: dict[_Key, _Group] = {}
        self._ready: deque[_Group] = deque()
        self._running: list[_Group] = []
        self._failed: list[_Group] = []
        self._report = StreamReport()
        self._error: BaseException | None = None
        self._stopping = self._closed = False
        self._threads = [
            threading.Thread(target=self._upload, name=f"draftlake-upload-{number}", daemon=True)
            for number in range(options.num_uploads)
        ]
        for thread in self._threads:
            thread.start()

    def append(self, window: Window, *, head_id: HeadId) -> bool:
        """Take a window; its arrays may be reused by the caller at once. False: it was dropped.

        ``head_id`` says which head the features were computed with.

        Raises:
            LakeContractError: the window is malformed or contradicts the lake; the writer goes on.
            UnknownVersionError, VersionConflictError, TargetMismatchError: likewise.
            InputError: the window is larger than ``max_bytes``.
            StreamClosedError: the writer was stopped or closed.
            Exception: what an upload failed with since the last call, whatever it was. Nothing
                is taken any more; :attr:`uncommitted` gives the windows back.
        """
        self._check_running()
        size = window.aux.nbytes + window.final.nbytes
        self._check(window, head_id, size)
        with self._changed:
            self._check_running()  # again: another thread's close may have sealed everything meanwhile
            if not self._make_room(size):
                self._count(dropped=1, dropped_tokens=window.num_rows)
                return False
            self._take(_copied(window), (window.meta.version, head_id, window.layout), size)
        return True

    def flush(self, timeout_s: float | None = None) -> StreamReport:
        """Commit everything taken so far, and wait for it.

        Raises:
            TimeoutError: not everything was committed within ``timeout_s``; the uploads go on.
            Exception: what an upload failed with.
        """
        with self._changed:
            self._seal(*self._open.values())
            self._wait_for([*self._ready, *self._running], timeout_s)
        return self.report()

    def stop(self) -> None:
        """Take no more windows; for signal handlers: takes no lock, waits for nothing.

        A call of ``append`` that waits for room, and every later one, raises ``StreamClosedError``.
        """
        self._stopping = True

    @property
    def stopping(self) -> bool:
        """Whether :meth:`stop` or :meth:`close` was called."""
        return self._stopping

    def close(self, timeout_s: float | None = None) -> StreamReport:
        """Take no more windows, commit those taken, end the threads. Harmless when closed already.

        Raises:
            TimeoutError: not everything was committed within ``timeout_s``. Uploads go on while
                the process lives; :meth:`close` may be called again.
            Exception: what an upload failed with.
        """
        self._stopping = True
        with self._changed:
            self._seal(*self._open.values())
            try:
                self._wait_for([*self._ready, *self._running], timeout_s)
            finally:
                self._closed = self._error is not None or not (self._ready or self._running)
                self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout_s)
        return self.report()

    def report(self) -> StreamReport:
        """Counts so far."""
        with self._changed:
            waiting = sum(len(group.windows) for group in self._groups())
            held = sum(group.nbytes for group in self._groups())
            return replace(self._report, waiting=waiting, held_bytes=held)

    @property
    def failure(self) -> BaseException | None:
        """What an upload failed with; from then on nothing is taken."""
        return self._error

    @property
    def uncommitted(self) -> tuple[Window, ...]:
        """Windows taken and not known to be committed, in no particular order.

        After a failure they can be offered to another writer: what was committed after all is
        found in the lake and counted once.
        """
        with self._changed:
            return tuple(window for group in self._groups() for window in group.windows.values())

    def __enter__(self) -> "StreamWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception:
            # What the block failed with matters more; this one is kept in the log.
            log.exception("closing the stream writer failed, %d windows are lost", self.report().waiting)

    def _check_running(self) -> None:
        if self._error is not None:
            raise self._error
        if self._stopping:
            raise StreamClosedError(
                f"stream writer {self._writer_id!r} of {self._lake.url} was stopped and takes no more "
                f"windows. Open another one."
            )

    def _check(self, window: Window, head_id: HeadId, size: int) -> None:
        if size > self._options.max_bytes:
            raise InputError(
                f"window of sample {window.meta.sample_id!r} has {size:,} bytes of features, the stream writer "
                f"may hold {self._options.max_bytes:,}. Raise max_bytes, or cut shorter windows."
            )
        where = f"sample {window.meta.sample_id!r}"
        self._lake.check_version(window.meta.version, head_id, where=where)
        self._check_layout(window.layout, where)
        check_window(window, vocab_size=self._lake.target.vocab_size)

    def _check_layout(self, layout: FragmentLayout, where: str) -> None:
        target = self._lake.target
        if layout.hidden_size != target.hidden_size or not (
            0 <= layout.layer_ids[0] <= layout.layer_ids[-1] <= target.num_layers
        ):
            raise TargetMismatchError(
                f"{where} has layer ids {layout.layer_ids} of hidden size {layout.hidden_size}; target "
                f"{target.target_id!r} of {self._lake.url} has ids 0 to {target.num_layers} (blocks applied) and "
                f"hidden size {target.hidden_size}. Collect from that target."
            )

    def _make_room(self, size: int) -> bool:
        """Wait until ``size`` more bytes may be held; False when they may not and windows are dropped."""
        started = None
        while self._held() + size > self._options.max_bytes:
            # Open fragments that nobody uploads would never make room.
            if not self._ready and not self._running:
                self._seal(*self._open.values())
            if self._options.when_full == "drop":
                return False
            started = started or time.monotonic()
            self._changed.wait(_POLL_S)
            self._check_running()
        if started is not None:
            self._count(blocked_s=time.monotonic() - started)
        return True

    def _take(self, window: Window, key: _Key, size: int) -> None:
        group = self._open.get(key)
        if group is None:
            group = self._open[key] = _Group(key, opened_at=time.monotonic())
            self._changed.notify_all()  # a thread has to know the new deadline
        place = (window.meta.sample_id, window.meta.start)
        if place in group.windows:
            if not TokenRow.of(window).same_tokens(TokenRow.of(group.windows[place])):
                raise LakeContractError(
                    f"sample {place[0]!r} at position {place[1]} of {window.meta.version} was offered before with "
                    f"other tokens or masks; the first stays. A sample id names one rollout."
                )
            self._count(repeated=1)
            return
        group.windows[place] = window
        group.nbytes += size
        self._report = replace(self._report, most_held_bytes=max(self._report.most_held_bytes, self._held()))
        if group.nbytes >= self._options.flush_bytes:
            self._seal(group)

    def _seal(self, *groups: _Group) -> None:
        for group in groups:
            # In this order: a signal handler that raises in between must not lose the group. One
            # that raised in `_take` may have left an empty one.
            if group.windows and group not in self._ready:
                self._ready.append(group)
            del self._open[group.key]
        self._changed.notify_all()

    def _wait_for(self, groups: Sequence[_Group], timeout_s: float | None) -> None:
        """Wait until these fragments are committed, or one failed and nothing is on its way any more."""
        stop_at = None if timeout_s is None else time.monotonic() + timeout_s
        while self._running if self._error is not None else _any_of(groups, (*self._ready, *self._running)):
            left = _POLL_S if stop_at is None else min(_POLL_S, stop_at - time.monotonic())
            if left <= 0:
                raise TimeoutError(
                    f"{self.report().waiting} windows are not committed to {self._lake.url} after {timeout_s} s"
                )
            self._changed.wait(left)
        if self._error is not None:
            raise self._error

    def _upload(self) -> None:
        while (group := self._next()) is not None:
            result, error = None, None
            try:
                result = self._write(group)
                if self._on_commit is not None:
                    self._on_commit(result)
            except BaseException as caught:  # raised again by the caller's next call
                error = caught
                log.error("upload of %d windows to %s failed: %s", len(group.windows), self._lake.url, error)
            with self._changed:
                self._finish(group, result, error)

    def _finish(self, group: _Group, result: CommitResult | None, error: BaseException | None) -> None:
        self._running.remove(group)
        self._error = self._error or error
        if result is None:
            self._failed.append(group)
        elif result.outcome == "committed":
            self._count(windows=result.windows, tokens=result.tokens, nbytes=result.nbytes, fragments=1)
        else:
            self._count(duplicates=result.windows)
        self._changed.notify_all()

    def _next(self) -> _Group | None:
        """The next fragment to write; waits for one. None: there will be none."""
        with self._changed:
            while not self._closed and self._error is None:
                now = time.monotonic()
                late = [g for g in self._open.values() if g.opened_at + self._options.deadline_s <= now]
                if late:
                    self._seal(*late)
                if self._ready:
                    group = self._ready.popleft()
                    self._running.append(group)
                    return group
                first = min((group.opened_at for group in self._open.values()), default=None)
                self._changed.wait(None if first is None else first + self._options.deadline_s - now)
            return None

    def _write(self, group: _Group) -> CommitResult:
        version, head_id, layout = group.key
        windows = list(group.windows.values())
        sources = [f"{w.meta.sample_id}@{w.meta.start}+{w.num_rows}" for w in windows]
        plan_id = plan_digest(self._lake.target.target_id, version, sources, self._sampling, layout)
        return write_fragment(
            self._lake, version=version, head_id=head_id, plan_id=plan_id, windows=windows,
            writer_id=self._writer_id, on_step=self._on_step, codec=self._options.aux_codec,
        )  # fmt: skip

    def _groups(self) -> list[_Group]:
        return [*self._failed, *self._running, *self._ready, *self._open.values()]

    def _held(self) -> int:
        return sum(group.nbytes for group in self._groups())

    def _count(self, **added: float) -> None:
        counts = {name: getattr(self._report, name) + value for name, value in added.items()}
        self._report = replace(self._report, **counts)


def _any_of(groups: Sequence[_Group], among: Sequence[_Group]) -> bool:
    return any(group in among for group in groups)


def _copied(window: Window) -> Window:
    # Checksums are taken when the fragment is written: a buffer reused before that would be
    # committed as good. A copy also lets go of the larger array that a window is a view of.
    names = ("token_ids", "sampled_mask", "loss_mask", "logprobs", "aux", "final")
    arrays = {name: getattr(window, name) for name in names}
    return replace(window, **{name: a.copy() for name, a in arrays.items() if a is not None})
