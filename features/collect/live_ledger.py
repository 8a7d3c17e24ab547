"""The counts and the memory budget that a live collector's threads share."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from features.collect.live_options import LiveOptions, LiveReport
from features.collect.proofs import AgreementTally
from features.stream_options import StreamReport


class Ledger:
    """Every method takes the lock; ``changed`` wakes whoever waits for room or for work."""

    def __init__(self, options: LiveOptions) -> None:
        self._options = options
        self.changed = threading.Condition(threading.RLock())
        self.tally = AgreementTally()
        """Touched by the background thread, read under the lock."""
        self._counts: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._refused: Counter[str] = Counter()
        self._refused_windows: Counter[str] = Counter()
        self._pending_windows = self._pending_bytes = self._most_held = 0
        self._closed_writers = StreamReport()
        self._writer: Callable[[], StreamReport] = StreamReport
        self._last_error: str | None = None

    def count(self, **added: int) -> None:
        """Add to counts of :class:`LiveReport` by name."""
        with self.changed:
            self._counts.update(added)

    def spend(self, **seconds: float) -> None:
        """Add to its times."""
        with self.changed:
            for name, added in seconds.items():
                self._seconds[name] += added

    def refuse_sequence(self, reason: str) -> None:
        """A sequence that is not planned."""
        with self.changed:
            self._refused[reason] += 1

    def reserve(self, windows: int, nbytes: int) -> bool:
        """Take room for planned windows, or wait for it as the options say; False: there is none."""
        options, started = self._options, time.monotonic()
        limit_s = None if options.budget_ms_per_step is None else options.budget_ms_per_step / 1000
        with self.changed:
            while self.held() + nbytes > options.max_bytes:
                waited = time.monotonic() - started
                over = nbytes > options.max_bytes or (limit_s is not None and waited >= limit_s)
                if options.when_full == "drop" or over:
                    self._seconds["blocked_s"] += waited
                    return False
                # Uploads make room without a word to this lock: look again soon.
                left = 0.02 if limit_s is None else min(0.02, limit_s - waited)
                self.changed.wait(left)
            if (waited := time.monotonic() - started) > 1e-3:
                self._seconds["blocked_s"] += waited
            self.pend(windows, nbytes)
            return True

    def pend(self, windows: int, nbytes: int) -> None:
        """These are held outside the writer: planned, or given back by one that failed."""
        with self.changed:
            self._pending_windows += windows
            self._pending_bytes += nbytes
            self._most_held = max(self._most_held, self.held())

    def release(self, windows: int, nbytes: int) -> None:
        """These are pending no longer."""
        with self.changed:
            self._pending_windows -= windows
            self._pending_bytes -= nbytes
            self.changed.notify_all()

    def refuse_windows(self, reason: str, windows: int, nbytes: int) -> None:
        """These pending windows are not stored, and why."""
        with self.changed:
            self._refused_windows[reason] += windows
            self.release(windows, nbytes)

    def held(self) -> int:
        """Feature bytes in host memory, by reservation."""
        with self.changed:
            return self._pending_bytes + self._writer().held_bytes

    def use_writer(self, report: Callable[[], StreamReport]) -> None:
        """From here on ``report`` tells what the stream writer did."""
        with self.changed:
            self._writer = report

    def close_writer(self, final: StreamReport) -> None:
        """The writer is gone; ``final`` is what it did, its waiting windows apart."""
        names = ("windows", "tokens", "nbytes", "fragments", "duplicates", "repeated")
        with self.changed:
            done = self._closed_writers
            totals = {name: getattr(done, name) + getattr(final, name) for name in names}
            self._closed_writers = replace(done, **totals)
            self._writer = StreamReport
            self.changed.notify_all()

    def failed(self, error: BaseException) -> None:
        """The store, or a version, failed with this."""
        with self.changed:
            self._counts["store_failures"] += 1
            self._last_error = f"{type(error).__name__}: {error}"

    def report(self) -> LiveReport:
        """Everything so far."""
        with self.changed:
            done, writer = self._closed_writers, self._writer()
            both = {
                n: getattr(done, n) + getattr(writer, n) for n in ("windows", "tokens", "nbytes", "fragments")
            }
            seconds: dict[str, Any] = dict(self._seconds)
            duplicates = done.duplicates + done.repeated + writer.duplicates + writer.repeated
            return LiveReport(
                refused=dict(self._refused), refused_windows=dict(self._refused_windows),
                waiting=self._pending_windows + writer.waiting, held_bytes=self.held(),
                most_held_bytes=max(self._most_held, self.held()), last_error=self._last_error,
                duplicates=duplicates, agreement=self.tally.summary(), **both, **self._counts,
                **seconds,
            )  # fmt: skip
