"""Progress of long work: a bar with rate and time left on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_PLAIN_EVERY_S = 10.0


class Bar:
    """One running piece of work. `advance` may be called from any thread."""

    def __init__(self, title: str, total: int, unit: str) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.done = 0
        self._started = self._last_line = time.monotonic()
        self._rich: Progress | None = None
        self._task = TaskID(0)

    def advance(self, amount: int = 1, note: str = "") -> None:
        """Count `amount` units as done; `note` says what is going on, for example the current bottleneck."""
        self.done += amount
        if self._rich is not None:
            self._rich.update(self._task, advance=amount, rate=self._rate(), note=note)
        elif time.monotonic() - self._last_line >= _PLAIN_EVERY_S:
            self._print_line(note)

    def _rate(self) -> str:
        seconds = max(time.monotonic() - self._started, 1e-9)
        return f"{self.done / seconds:.1f} {self.unit}/s"

    def _print_line(self, note: str) -> None:
        self._last_line = time.monotonic()
        seconds = self._last_line - self._started
        left = (
            f"{seconds / self.done * (self.total - self.done):.0f} s left" if self.done else "time left not known yet"
        )
        print(
            f"{self.title}: {self.done}/{self.total} {self.unit}, {self._rate()}, {left} {note}".rstrip(),
            file=sys.stderr,
            flush=True,
        )


@contextmanager
def progress(title: str, total: int, unit: str = "slides") -> Iterator[Bar]:
    """Show a bar for `total` units of work on standard error.

    Where standard error is no terminal, prints a line now and then, and one at the end.
    """
    bar = Bar(title, total, unit)
    console = Console(stderr=True)
    if not console.is_terminal:
        yield bar
        bar._print_line("")
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as rich:
        bar._rich = rich
        bar._task = rich.add_task(title, total=total, rate="", note="")
        yield bar
