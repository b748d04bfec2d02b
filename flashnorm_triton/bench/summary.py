"""The speedups of a result folder in a few lines: how many cells, the best, the worst, losses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashnorm_triton import results
from flashnorm_triton.bench import report


def speedup(record: Mapping[str, Any]) -> float | None:
    """How many times faster than what it replaces a record's subject is: for whole models, than the
    fastest stock one of the cell. None where the record compares nothing."""
    if record.get("error") or record.get("rung") == "stock":
        return None
    if record.get("speedups"):
        return min(record["speedups"].values())
    if isinstance(record.get("reduction"), float):
        return 1 / (1 - record["reduction"])
    value = record.get("speedup")
    return float(value) if value is not None else None


def cell(record: Mapping[str, Any]) -> str:
    """A record's cell in words."""
    name = record.get("case") or record.get("model") or record.get("lag") or "?"
    parts = [str(name)]
    parts += [f"{label}{record[key]}" for key, label in _PARTS if record.get(key) is not None]
    return " ".join(parts)


_PARTS = (("rung", ""), ("level", ""), ("variant", ""), ("mode", ""), ("m", "M="),
          ("batch", "batch "))  # fmt: skip


def best(records: Iterable[Mapping[str, Any]]) -> str:
    """The best cell so far as ``1.62x llama-3.2-1b.qkv M=1``; empty where nothing is compared."""
    rated = [(value, record) for record in records if (value := speedup(record)) is not None]
    if not rated:
        return ""
    value, record = max(rated, key=lambda pair: pair[0])
    return f"{value:.2f}x {cell(record)}"


def rows(paths: Sequence[Path]) -> list[tuple[str, ...]]:
    """One row a file: its name, cells, geometric mean, best, worst, losses, failures.

    A loss is a speedup under 0.995, which two figures after the point show as 0.99 or less.
    """
    found = []
    for path in paths:
        records = results.load(path).records
        rated = [(value, r) for r in records if (value := speedup(r)) is not None]
        failed = len(records) - len(report.measured(records))
        row = [path.stem, str(len(records))]
        if rated:
            values = [value for value, _ in rated]
            (top, high), (low, bottom) = (pick(rated, key=lambda p: p[0]) for pick in (max, min))
            row += [
                f"{report.geomean(values):.2f}x",
                f"{top:.2f}x {cell(high)}",
                f"{low:.2f}x {cell(bottom)}",
                f"{sum(value < 0.995 for value in values)} of {len(values)}",
            ]
        else:
            row += ["-", "-", "-", "-"]
        found.append((*row, str(failed)))
    return found


HEADINGS = ("file", "records", "mean", "best", "worst", "slower", "failed")


def table(paths: Sequence[Path]) -> str:
    """``rows`` as aligned text."""
    lines = [HEADINGS, *rows(paths)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
