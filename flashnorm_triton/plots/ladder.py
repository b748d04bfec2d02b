"""The technique taken apart: what each rung of the ladder, from stock to whole blocks, gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from flashnorm_triton.plots import style
from flashnorm_triton.plots.sources import Source, labels
from flashnorm_triton.results import ResultsError

Record = Mapping[str, Any]
NAMES = {
    "stock": "stock",
    "fold_only": "gains folded",
    "weightless": "weightless norm",
    "packed": "matmuls packed",
    "deferred": "deferred scale",
    "overlap": "two streams",
    "fused": "one pass",
    "block": "whole blocks",
}
_SHADES = ("#0b6bcb", "#0f7b6c", "#8250df", "#9a6700", "#bf3989", "#57606a")
_LEVELS = {"decode": "a decode step", "generate": "generate"}


def figure(sources: Sequence[Source]) -> Figure:
    """Above, a panel a case of the operation: the speedup over stock of each rung, a curve a number
    of tokens, with its 20–80 % band; below, a panel a whole model and level: its milliseconds a
    rung. Rungs that are slower than stock are red, those without a time say so.

    Raises ``ResultsError`` when no rung was measured.
    """
    cases: dict[tuple[Any, ...], list[Record]] = {}
    models: dict[tuple[Any, ...], list[Record]] = {}
    for source, label in zip(sources, labels(sources), strict=True):
        where = label if len(sources) > 1 else ""
        for r in source.records:
            if r["level"] == "op":
                cases.setdefault((where, r["case"], r["dtype"]), []).append(r)
            else:
                key = (where, r["model"], r["level"], r.get("batch"), r["dtype"])
                models.setdefault(key, []).append(r)
    cases = {key: rows for key, rows in cases.items() if any(_rated(r) for r in rows)}
    models = {key: rows for key, rows in models.items() if any("ms" in r for r in rows)}
    if not cases and not models:
        raise ResultsError("no rung of the ladder was measured")
    rungs = {r["rung"] for s in sources for r in s.records}
    ordered = [*(rung for rung in NAMES if rung in rungs), *sorted(rungs - set(NAMES))]
    columns = min(2, max(len(cases), 1))
    lines = -(-len(cases) // columns)
    heights = [2.35] * lines + [0.27 * len(rows) + 0.55 for rows in models.values()]
    made = Figure(figsize=(style.WIDTH_IN, sum(heights) + 1.15), layout="constrained")
    grid = made.add_gridspec(len(heights), columns, height_ratios=heights)
    for place, (key, rows) in enumerate(cases.items()):
        ax = made.add_subplot(grid[place // columns, place % columns])
        _operation(ax, ordered, rows)
        ax.set_title("   ".join(str(part) for part in key if part))
        if place % columns == 0:
            ax.set_ylabel("speedup over stock")
    for place, ((where, model, level, batch, dtype), rows) in enumerate(models.items()):
        ax = made.add_subplot(grid[lines + place, :])
        _whole(ax, ordered, rows)
        told = [_LEVELS.get(level, level), model, dtype, f"batch {batch}" if batch else "", where]
        ax.set_title(", ".join(part for part in told if part))
        unit = "a step" if level == "decode" else "a token" if level == "generate" else ""
        ax.set_xlabel(f"milliseconds {unit}".strip())
    style.title(made, "from stock to fused, rung by rung")
    style.foot(made, sources, _legend(cases.values(), bool(models)), columns=6)
    return made


def _rated(record: Record) -> bool:
    return not record.get("error") and record.get("speedup") is not None


def _tokens(rows: Sequence[Record]) -> list[int]:
    return sorted({r["m"] for r in rows if _rated(r)})


def band(record: Record) -> tuple[float, float]:
    """The 20–80 % band of a rung's speedup, from that of its time."""
    unit = "us" if "us" in record else "ms"
    low, high = (record.get(f"{unit}_{q}") for q in ("q20", "q80"))
    if not low or not high:
        return record["speedup"], record["speedup"]
    return record["speedup"] * record[unit] / high, record["speedup"] * record[unit] / low


def _operation(ax: Axes, rungs: Sequence[str], rows: Sequence[Record]) -> None:
    style.level(ax)
    names = [rung for rung in rungs if any(r["rung"] == rung and _rated(r) for r in rows)]
    for number, m in enumerate(_tokens(rows)):
        own = [r for r in rows if r.get("m") == m and _rated(r)]
        own.sort(key=lambda r: names.index(r["rung"]))
        x, y = [names.index(r["rung"]) for r in own], [r["speedup"] for r in own]
        color = _SHADES[number % len(_SHADES)]
        low, high = zip(*map(band, own), strict=True)
        ax.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
        ax.plot(
            x, y, "-", marker=style.MARKERS[number % 6], color=color, linewidth=1.4, markersize=4
        )
        lost = [(at, speedup) for at, speedup in zip(x, y, strict=True) if speedup < 1]
        if lost:
            ax.plot(*zip(*lost, strict=True), linestyle="", marker="o", color=style.LOSS,
                    markersize=4.6, zorder=5)  # fmt: skip
    ax.set_xticks(range(len(names)), [NAMES.get(n, n) for n in names], rotation=24, ha="right",
                  rotation_mode="anchor", fontsize=style.TINY)  # fmt: skip
    ax.grid(axis="y", color=style.GRID, linewidth=0.6)


def _whole(ax: Axes, rungs: Sequence[str], rows: Sequence[Record]) -> None:
    own = sorted(rows, key=lambda r: rungs.index(r["rung"]))
    most = max(r["ms"] for r in own if "ms" in r)
    for y, r in enumerate(own):
        if r.get("error") or "ms" not in r:
            why = str(r.get("error", "no time")).splitlines()[0][:70]
            ax.text(0, y, f" not reported: {why}", color=style.LOSS, va="center",
                    fontsize=style.SMALL)  # fmt: skip
            continue
        slower = r.get("speedup") is not None and r["speedup"] < 1
        color = style.STOCK if r["rung"] == "stock" else style.LOSS if slower else style.OURS
        ax.barh(y, r["ms"], 0.7, color=color)
        ax.plot(
            [r.get("ms_q20", r["ms"]), r.get("ms_q80", r["ms"])], [y, y], color=style.INK, lw=1.2
        )
        told = f" {r['ms']:.2f} ms"
        told += f", {r['launches']} launches" if r.get("launches") else ""
        told += f", {r['speedup']:.2f}x" if r.get("speedup") is not None else ""
        ax.text(
            min(max(r["ms"], r.get("ms_q80", 0)), 1.3 * most),
            y,
            told,
            va="center",
            fontsize=style.SMALL,
            bbox=style.PLATE,
        )
    ax.set_yticks(range(len(own)), [NAMES.get(r["rung"], r["rung"]) for r in own])
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(own) - 0.4, -0.6)
    ax.set_xlim(0, 1.7 * most)
    ax.grid(axis="x", color=style.GRID, linewidth=0.6)


def _legend(cases: Any, whole: bool) -> list[Any]:
    tokens = sorted({m for rows in cases for m in _tokens(rows)})
    handles: list[Any] = [
        Line2D([], [], color=_SHADES[n % len(_SHADES)], marker=style.MARKERS[n % 6], markersize=4,
               label=f"{m} tokens" if m > 1 else "1 token")
        for n, m in enumerate(tokens)
    ]  # fmt: skip
    if whole:
        handles.append(Patch(color=style.OURS, label="whole model"))
    handles.append(Patch(color=style.LOSS, label="slower than stock"))
    return handles
