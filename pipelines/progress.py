"""What long work shows while it runs. Everything goes to stderr; stdout belongs to results."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichBars
from rich.text import Text

Advance = Callable[[int], None]
"""Tells a bar how many more units are done."""


class Progress(Protocol):
    """What a pipeline may show."""

    def say(self, message: str) -> None:
        """One line of news."""
        ...

    def bar(self, label: str, total: int, *, unit: str = "") -> AbstractContextManager[Advance]:
        """A bar over ``total`` units while the context is open; with ``unit`` also how many per second."""
        ...


@dataclass(frozen=True, slots=True)
class Silent:
    """Shows nothing: for tests and for libraries that call us."""

    def say(self, message: str) -> None:
        del message

    def bar(self, label: str, total: int, *, unit: str = "") -> AbstractContextManager[Advance]:
        del label, total, unit
        return nullcontext(lambda _done: None)


SILENT = Silent()


@dataclass(frozen=True, slots=True)
class OnConsole:
    """Lines and rich bars on stderr."""

    console: Console = field(default_factory=lambda: Console(stderr=True))

    def say(self, message: str) -> None:
        self.console.print(message, highlight=False, markup=False)

    @contextmanager
    def bar(self, label: str, total: int, *, unit: str = "") -> Iterator[Advance]:
        if not self.console.is_terminal:
            yield from self._lines(label, total, unit)
            return
        columns: list[ProgressColumn] = [
            TextColumn("  {task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
        ]
        columns += [_Speed(unit)] if unit else []
        columns += [TimeElapsedColumn()]
        with RichBars(*columns, console=self.console, transient=True) as bars:
            task = bars.add_task(label, total=total)
            yield lambda done: bars.advance(task, done)

    def _lines(self, label: str, total: int, unit: str) -> Iterator[Advance]:
        """For a log: a line at the start, and with a unit one at the end."""
        self.say(f"{label} ({total:,} {unit})" if unit else f"{label} ({total})")
        done, started = 0, time.monotonic()

        def advance(units: int) -> None:
            nonlocal done
            done += units

        yield advance
        if unit:
            self.say(f"{label}: {done:,} {unit}, {done / (time.monotonic() - started):,.0f} {unit}/s")


class _Speed(ProgressColumn):
    """Units per second, over the last steps."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:,.0f} {self._unit}/s")
