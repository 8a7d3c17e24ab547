"""What long work shows while it runs. Everything goes to stderr; stdout belongs to results."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichBars

Advance = Callable[[int], None]
"""Tells a bar how many more units are done."""


class Progress(Protocol):
    """What a pipeline may show."""

    def say(self, message: str) -> None:
        """One line of news."""
        ...

    def bar(self, label: str, total: int) -> AbstractContextManager[Advance]:
        """A bar over ``total`` units while the context is open."""
        ...


@dataclass(frozen=True, slots=True)
class Silent:
    """Shows nothing: for tests and for libraries that call us."""

    def say(self, message: str) -> None:
        del message

    def bar(self, label: str, total: int) -> AbstractContextManager[Advance]:
        del label, total
        return nullcontext(lambda _done: None)


SILENT = Silent()


@dataclass(frozen=True, slots=True)
class OnConsole:
    """Lines and rich bars on stderr."""

    console: Console = field(default_factory=lambda: Console(stderr=True))

    def say(self, message: str) -> None:
        self.console.print(message, highlight=False, markup=False)

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Advance]:
        if not self.console.is_terminal:
            self.say(f"{label} ({total})")
            yield lambda _done: None
            return
        columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with RichBars(*columns, console=self.console, transient=True) as bars:
            task = bars.add_task(label, total=total)
            yield lambda done: bars.advance(task, done)
