"""What the benchmark scripts print: progress while they run, and one compact table last."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
# The dispatched operation can always choose the unfused path, so below this it chose wrongly.
LEAST_SPEEDUP = 0.97


class Screen:
    """Where a benchmark shows itself: lines on stdout, and a bar on a terminal's stderr."""

    def line(self, text: str) -> None:
        print(text, flush=True)

    def track(self, items: Sequence[T], label: str) -> Iterator[T]:
        if sys.stderr.isatty() and importlib.util.find_spec("rich"):
            from rich.console import Console
            from rich.progress import track

            yield from track(items, description=label, console=Console(stderr=True))
        else:
            yield from items

    def found(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Told of all records so far whenever there are more."""


_screen = Screen()


@contextlib.contextmanager
def shown_on(screen: Screen) -> Iterator[None]:
    """Within the block everything that a benchmark shows goes to ``screen``."""
    global _screen
    before, _screen = _screen, screen
    try:
        yield
    finally:
        _screen = before


def say(text: str) -> None:
    """Show lines."""
    _screen.line(text)


def progress(items: Sequence[T], label: str) -> Iterator[T]:
    """Yield the items; how many are done is shown where the screen can."""
    yield from _screen.track(items, label)


def found(records: Sequence[Mapping[str, Any]]) -> None:
    """Show what is best in the records so far, where the screen can."""
    _screen.found(records)


class Log:
    """Flushed lines with the seconds since the start: a killed run shows how far it got."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def __call__(self, text: str) -> None:
        say(f"{self.seconds:6.1f}s  {text}")


def geomean(values: Sequence[float]) -> float:
    """Geometric mean; NaN of nothing."""
    if not values:
        return math.nan
    return math.exp(statistics.fmean(math.log(value) for value in values))


def measured(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The records that hold a timing."""
    return [record for record in records if not record.get("error")]


def contract_failures(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line a cell that broke the numerics contract, or could not be measured."""
    lines = []
    for record in records:
        cell = f"{record['case']} M={record['m']}"
        if record.get("error"):
            lines.append(f"{cell}: {record['error']}")
        elif not record["contract_ok"]:
            lines.append(
                f"{cell}: finite {record['finite']}, error ratio {record['err_ratio']}, "
                f"maximum ratio {record['max_err_ratio']} (limit 1.25)"
            )
    return lines


def _grid(records: Sequence[Mapping[str, Any]], key: str, form: str) -> list[str]:
    tokens = sorted({record["m"] for record in records})
    sizes = list(dict.fromkeys((record["k"], record["n"]) for record in records))
    cells = {(r["k"], r["n"], r["m"]): r.get(key) for r in measured(records)}
    lines = [f"{'M':>12}" + "".join(f"{m:>7}" for m in tokens)]
    for k, n in sizes:
        row = f"{f'{k}→{n}':>12}"
        for m in tokens:
            value = cells.get((k, n, m))
            row += f"{'-' if value is None else format(value, form):>7}"
        lines.append(row)
    means = []
    for m in tokens:
        found = [value for (_, _, at), value in cells.items() if at == m and value is not None]
        means.append(f"{format(geomean(found), '.2f') if found else '-':>7}")
    return [*lines, f"{'geomean':>12}" + "".join(means)]


def operation_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Speedup, ratio to the bare matmul and µs of every cell; means, worst cell, failures."""
    good = measured(records)
    lines = ["", "speedup = best unfused / ours", *_grid(records, "speedup", ".2f")]
    lines += ["", "ours / bare matmul", *_grid(records, "vs_gemm", ".2f")]
    lines += ["", "ours, µs a call", *_grid(records, "us", ".1f")[:-1], ""]
    rated = [record for record in good if record.get("speedup") is not None]
    if rated:
        worst = min(rated, key=lambda record: record["speedup"])
        below = [r for r in rated if r["speedup"] < LEAST_SPEEDUP]
        lines.append(
            f"worst cell: {worst['case']} M={worst['m']} {worst['speedup']:.3f}x "
            f"against {worst['best_unfused']}"
        )
        lines.append(f"cells under {LEAST_SPEEDUP}x: {len(below)} of {len(rated)}")
        lines += [f"  {r['case']} M={r['m']} {r['speedup']:.3f}x, plan {r['plan']}" for r in below]
        noise = [abs(r["repeat"] - 1) for r in rated if r.get("repeat") is not None]
        if noise:
            lines.append(f"the same operation timed twice differs by up to {max(noise):.1%}")
    broken = sorted({f"{name}: {why}" for r in good for name, why in r.get("failed", {}).items()})
    lines += [f"baseline failed: {line}" for line in broken]
    failures = contract_failures(records)
    lines.append(f"numerics contract: {len(failures)} failures in {len(records)} cells")
    return "\n".join([*lines, *(f"  {line}" for line in failures)])
