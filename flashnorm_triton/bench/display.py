"""How ``flashnorm bench`` shows itself: bars on a terminal, lines elsewhere; all of it in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO, TypeVar

from flashnorm_triton.bench import report, summary

T = TypeVar("T")


class Lines(report.Screen):
    """Plain lines: what the benches say, and after each cell how many there are and how long the
    rest will take."""

    def __init__(
        self,
        log: TextIO,
        write: Callable[[str], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log, self._clock = log, clock
        self._write = write or (lambda text: print(text, flush=True))
        self._best = ""

    def stage(self, number: int, of: int, name: str) -> None:
        """The next bench begins."""
        self._best = ""
        self.note(f"[{number}/{of}] {name}")

    def note(self, text: str) -> None:
        """A line of the command itself."""
        print(text, file=self._log, flush=True)
        self._write(text)

    def line(self, text: str) -> None:
        self.note(text)

    def found(self, records: Sequence[Mapping[str, Any]]) -> None:
        self._best = summary.best(records)

    def track(self, items: Sequence[T], label: str) -> Iterator[T]:
        started = self._clock()
        for done, item in enumerate(items, 1):
            yield item
            left = (self._clock() - started) / done * (len(items) - done)
            best = f", best so far {self._best}" if self._best else ""
            self.note(f"{label} {done}/{len(items)}, about {left:.0f} s left{best}")

    def end(self) -> None:
        """Nothing comes after."""


class Bars(Lines):
    """A bar a bench with the time that is left and the best so far; the lines go to the log."""

    def __init__(self, log: TextIO, stages: Sequence[str]) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        super().__init__(log)
        self._bars = Progress(
            TextColumn("{task.description:<9}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[best]}", markup=False),
            console=Console(stderr=True),
            speed_estimate_period=600,
        )
        self._tasks = [self._bars.add_task(name, start=False, total=None, best="")
                       for name in stages]  # fmt: skip
        self._now = -1
        self._bars.start()

    def stage(self, number: int, of: int, name: str) -> None:
        self._settle()
        self._now = number - 1
        self._bars.start_task(self._tasks[self._now])
        print(f"[{number}/{of}] {name}", file=self._log, flush=True)

    def _settle(self) -> None:
        """The bar of what has ended is full, if it had nothing to count too."""
        if self._now >= 0 and self._bars.tasks[self._now].total is None:
            self._bars.update(self._tasks[self._now], total=1, completed=1)

    def note(self, text: str) -> None:
        print(text, file=self._log, flush=True)
        self._bars.console.print(text, markup=False, highlight=False)

    def line(self, text: str) -> None:
        print(text, file=self._log, flush=True)

    def found(self, records: Sequence[Mapping[str, Any]]) -> None:
        self._bars.update(self._tasks[self._now], best=summary.best(records))

    def track(self, items: Sequence[T], label: str) -> Iterator[T]:
        task = self._tasks[self._now]
        self._bars.update(task, total=(self._bars.tasks[self._now].total or 0) + len(items))
        for item in items:
            yield item
            self._bars.advance(task)

    def end(self) -> None:
        self._settle()
        self._bars.stop()


def for_output(log: TextIO, stages: Sequence[str]) -> Lines:
    """Bars where stderr is a terminal, lines elsewhere."""
    return Bars(log, stages) if sys.stderr.isatty() else Lines(log)
