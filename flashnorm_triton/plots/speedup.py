"""Speedup against tokens: the fastest unfused way over the fused operation, a panel a shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from flashnorm_triton.plots import style
from flashnorm_triton.plots.sources import Source, labels
from flashnorm_triton.results import ResultsError

_MOST_COLUMNS = 3
Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class _Curve:
    """One line of every panel: a source's records of one dtype."""

    label: str
    color: str
    marker: str
    records: Records


def figure(sources: Sequence[Source]) -> Figure:
    """One panel a shape, the shapes of a model in one column and on one scale; a curve for every
    source and dtype, with the 20–80 % band of its rounds, its losses in red and, dashed, what a
    norm that costs nothing would give.

    Raises ``ResultsError`` when no record holds a speedup.
    """
    curves = _curves(sources)
    if not curves:
        raise ResultsError("no record has a speedup: every cell or baseline failed")
    rated = [record for curve in curves for record in curve.records]
    cases = {(record["k"], record["n"]): record["case"] for record in reversed(rated)}
    shapes = list(dict.fromkeys((record["k"], record["n"]) for record in rated))
    rows = _arranged(shapes, cases)
    made, axes = style.new(2.25 * len(rows) + 1.15, len(rows), len(rows[0]))
    for line, places in zip(axes, rows, strict=True):
        for ax, shape in zip(line, places, strict=True):
            if shape is None:
                ax.set_visible(False)
                continue
            _panel(ax, shape, cases[shape], curves)
            same = [s for s in shapes if _model(cases[s]) == _model(cases[shape])]
            ax.set_ylim(_limits([r for r in rated if (r["k"], r["n"]) in same]))
        line[0].set_ylabel("speedup")
    for column in range(len(rows[0])):
        lowest = [ax for ax in axes[:, column] if ax.get_visible()][-1]
        lowest.set_xlabel("tokens (rows of x)")
    untuned = ", tables hidden" if all(s.header.get("tables") == "off" for s in sources) else ""
    style.title(made, f"norm_linear{untuned}: fastest unfused way / fused  (above 1 is faster)")
    style.foot(made, sources, _legend(curves, rated), columns=4)
    return made


def _curves(sources: Sequence[Source]) -> list[_Curve]:
    found: list[tuple[str, str, Records]] = []
    told = labels(sources)
    for source, label in zip(sources, told, strict=True):
        if source.header.get("tables") == "off" and len(sources) > 1:
            label += ", tables hidden"
        rated = [r for r in source.measured if r.get("speedup") is not None]
        for dtype in dict.fromkeys(record["dtype"] for record in rated):
            found.append((label, dtype, [r for r in rated if r["dtype"] == dtype]))
    alone = len(sources) == 1
    return [
        _Curve(
            f"fused, {dtype}" if alone else f"{label}, {dtype}",
            style.SERIES[number % len(style.SERIES)],
            style.MARKERS[number % len(style.MARKERS)],
            records,
        )
        for number, (label, dtype, records) in enumerate(found)
    ]


def _model(case: str) -> str:
    return case.rpartition(".")[0] or case


def _arranged(
    shapes: Sequence[tuple[int, int]], cases: Mapping[tuple[int, int], str]
) -> list[list[tuple[int, int] | None]]:
    """The shapes in rows: a column a model where all have equally many, else in reading order."""
    models: dict[str, list[tuple[int, int]]] = {}
    for shape in shapes:
        models.setdefault(_model(cases[shape]), []).append(shape)
    most = max(len(group) for group in models.values())
    even = all(len(group) == most for group in models.values())
    if even and most > 1 and len(models) <= _MOST_COLUMNS:
        return [[group[row] for group in models.values()] for row in range(most)]
    columns = min(_MOST_COLUMNS, len(shapes))
    padded = [*shapes, *[None] * (-len(shapes) % columns)]
    return [padded[start : start + columns] for start in range(0, len(padded), columns)]


def _limits(records: Records) -> tuple[float, float]:
    keys = ("speedup", "speedup_q20", "speedup_q80", "bound")
    values = [record[key] for record in records for key in keys if key in record]
    room = 0.05 * (max(values) - min(values)) + 0.01
    return min(0.95, min(values) - room), max(1.1, max(values) + room)


def _panel(ax: Axes, shape: tuple[int, int], case: str, curves: Sequence[_Curve]) -> None:
    style.level(ax)
    tokens: list[int] = []
    for curve in curves:
        cells = sorted(
            (r for r in curve.records if (r["k"], r["n"]) == shape), key=lambda r: r["m"]
        )
        if not cells:
            continue
        m = [record["m"] for record in cells]
        tokens += m
        bound = [(r["m"], r["bound"]) for r in cells if "bound" in r]
        if bound:
            ax.plot(
                *zip(*bound, strict=True), "--", linewidth=1.1,
                color=style.FAINT if len(curves) == 1 else curve.color,
                alpha=1 if len(curves) == 1 else 0.6,
            )  # fmt: skip
        low = [r.get("speedup_q20", r["speedup"]) for r in cells]
        high = [r.get("speedup_q80", r["speedup"]) for r in cells]
        ax.fill_between(m, low, high, color=curve.color, alpha=0.25, linewidth=0)
        ax.plot(
            m, [r["speedup"] for r in cells], linestyle="-", marker=curve.marker,
            color=curve.color, linewidth=1.6, markersize=3.6,
        )  # fmt: skip
        lost = [(r["m"], r["speedup"]) for r in cells if r["speedup"] < 1]
        if lost:
            ax.plot(
                *zip(*lost, strict=True), linestyle="", marker=curve.marker, color=style.LOSS,
                markersize=4.6, zorder=5,
            )  # fmt: skip
        broken = [(r["m"], r["speedup"]) for r in cells if not r.get("contract_ok", True)]
        if broken:
            ax.plot(*zip(*broken, strict=True), "x", color=style.LOSS, markersize=9, zorder=6)
    style.tokens_axis(ax, tokens, label=False)
    ax.set_title(f"{shape[0]} → {shape[1]}   {case}")


def _legend(curves: Sequence[_Curve], rated: Records) -> list[Any]:
    handles: list[Any] = [
        Line2D([], [], color=c.color, marker=c.marker, markersize=3.6, label=c.label)
        for c in curves
    ]
    handles += [
        Patch(color=style.FAINT, alpha=0.25, label="20–80 % of rounds"),
        Line2D([], [], color=style.FAINT, linestyle="--", label="if the norm were free"),
    ]
    if any(record["speedup"] < 1 for record in rated):
        handles.append(
            Line2D([], [], color=style.LOSS, marker="o", linestyle="", label="slower (below 1)")
        )
    if not all(record.get("contract_ok", True) for record in rated):
        handles.append(
            Line2D([], [], color=style.LOSS, marker="x", linestyle="", label="breaks the contract")
        )
    return handles
