"""How a tuning run shows itself: a bar on a terminal, one line a cell elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Protocol


class Progress(Protocol):
    """What the tuner tells. ``cost`` is in seconds as expected, so that the rest can be told."""

    def begin(self, cost: float, cells: int) -> None: ...

    def best(self, text: str) -> None: ...

    def cell(self, cost: float, text: str) -> None: ...

    def note(self, text: str) -> None: ...

    def end(self) -> None: ...


class Quiet:
    """Says nothing."""

    def begin(self, cost: float, cells: int) -> None: ...

    def best(self, text: str) -> None: ...

    def cell(self, cost: float, text: str) -> None: ...

    def note(self, text: str) -> None: ...

    def end(self) -> None: ...


class Lines:
    """One line a finished cell, with the time that is left: for logs."""

    def __init__(
        self,
        write: Callable[[str], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write or (lambda line: print(line, flush=True))
        self._clock = clock
        self._cost = self._spent = 0.0
        self._cells = self._done = 0

    def begin(self, cost: float, cells: int) -> None:
        self._cost, self._cells, self._started = cost, cells, self._clock()

    def best(self, text: str) -> None: ...

    def cell(self, cost: float, text: str) -> None:
        self._spent += cost
        self._done += 1
        passed = self._clock() - self._started
        left = passed * (self._cost - self._spent) / self._spent if self._spent else 0.0
        self._write(f"{self._done:>4}/{self._cells} {max(left, 0.0):4.0f} s left  {text}")

    def note(self, text: str) -> None:
        self._write(text)

    def end(self) -> None: ...


class Bar:
    """A bar with the remaining time and the best plan so far, under the finished cells' lines."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            BarColumn(),
            TextColumn("{task.fields[cells]} cells"),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=Console(),
            speed_estimate_period=600,
        )

    def begin(self, cost: float, cells: int) -> None:
        self._cells, self._done = cells, 0
        self._bar.start()
        self._task = self._bar.add_task("starting the compilers", total=cost, cells=f"0/{cells}")

    def best(self, text: str) -> None:
        self._bar.update(self._task, description=text)

    def cell(self, cost: float, text: str) -> None:
        self._done += 1
        self._bar.update(self._task, advance=cost, cells=f"{self._done}/{self._cells}")
        self.note(text)

    def note(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def end(self) -> None:
        self._bar.stop()


def for_output() -> Progress:
    """A bar on a terminal where rich is installed, lines elsewhere."""
    if sys.stdout.isatty():
        try:
            return Bar()
        except ImportError:
            pass
    return Lines()
