"""The paper's cells beside ours: the share of the time that fusing saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flashnorm_triton.plots import style
from flashnorm_triton.plots.sources import Source, labels
from flashnorm_triton.results import ResultsError

Record = Mapping[str, Any]
_COLUMNS = 2


def figure(sources: Sequence[Source]) -> Figure:
    """A panel a table of the paper (and source), a line a cell: the share of the unfused time that
    the paper's fused way saves on its GPU (hollow), and that ours saves here (filled); the small
    bar is ours against the fastest of all our baselines. Left of zero, and red, is a loss.

    The two are taken in ways of their own and on other GPUs: they stand beside each other, and are
    no ratio of one another. Raises ``ResultsError`` when no cell was measured.
    """
    panels: dict[tuple[str, str, str], list[Record]] = {}
    for source, label in zip(sources, labels(sources), strict=True):
        for r in source.records:
            panels.setdefault((label, r["table"], r["gpu_paper"]), []).append(r)
    panels = {k: rows for k, rows in panels.items() if any(_ours(r) is not None for r in rows)}
    if not panels:
        raise ResultsError("no cell of the paper's tables was measured")
    columns = min(_COLUMNS, len(panels))
    keys = sorted(panels, key=lambda key: -len(panels[key]))
    lines = [keys[start : start + columns] for start in range(0, len(keys), columns)]
    heights = [max(len(panels[key]) for key in line) + 2.2 for line in lines]
    made, axes = style.new(
        0.185 * sum(heights) + 1.3, len(lines), columns, height_ratios=heights, sharex=True
    )
    for row, line in zip(axes, lines, strict=True):
        for ax in row[len(line) :]:
            ax.set_visible(False)
        for ax, key in zip(row, line, strict=False):
            _panel(ax, panels[key])
            told = f"paper's table {key[1]}, {key[2]}: {_counted(panels[key])}"
            ax.set_title(told + (f"   {key[0]}" if len(sources) > 1 else ""), fontsize=8.5)
    for column in range(columns):
        lowest = [ax for ax in axes[:, column] if ax.get_visible()][-1]
        lowest.set_xlabel("% of the unfused time saved")
        lowest.tick_params(labelbottom=True)
    style.title(made, "the paper's cells, and the same shapes here")
    ours = dict.fromkeys(s.gpu for s in sources)
    style.foot(made, sources, _legend(", ".join(ours), panels.values()), columns=4)
    return made


def _ours(record: Record) -> float | None:
    return None if record.get("error") else record.get("reduction")


def _counted(rows: Sequence[Record]) -> str:
    judged = [r["won"] for r in rows if not r.get("error") and r.get("won") is not None]
    return f"{sum(judged)} of {len(judged)} won"


def _panel(ax: Axes, rows: Sequence[Record]) -> None:
    ax.axvline(0, color=style.INK, linewidth=0.8)
    for y, r in enumerate(rows):
        paper, ours = 100 * r["paper_reduction"], _ours(r)
        ax.plot(paper, y, "o", markersize=5, markerfacecolor="white", markeredgecolor=style.FAINT)
        if ours is None:
            ax.text(
                paper,
                y,
                "  not measured here",
                color=style.LOSS,
                va="center",
                fontsize=style.TINY,
                bbox=style.PLATE,
            )
            continue
        color = style.LOSS if ours < 0 else style.OURS
        ax.plot([paper, 100 * ours], [y, y], color=style.GRID, linewidth=1.2, zorder=1)
        ax.plot(100 * ours, y, "o", markersize=5, color=color, zorder=3)
        best = r.get("best_reduction")
        if best is not None:
            lost = style.LOSS if r.get("won") is False else style.OURS
            ax.plot(100 * best, y, "|", markersize=8, markeredgewidth=2, color=lost, zorder=4)
    ax.set_yticks(range(len(rows)), [f"{r['k']}→{r['n']}  M={r['m']}" for r in rows],
                  fontsize=style.TINY)  # fmt: skip
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.grid(axis="x", color=style.GRID, linewidth=0.6)


def _legend(gpu: str, panels: Any) -> list[Line2D]:
    def dot(**look: Any) -> Line2D:
        return Line2D([], [], linestyle="", **look)

    handles = [
        dot(marker="o", markersize=5, markerfacecolor="white", markeredgecolor=style.FAINT,
            label="the paper, its GPU"),
        dot(marker="o", markersize=5, color=style.OURS, label=f"here, {gpu}"),
        dot(marker="|", markersize=8, markeredgewidth=2, color=style.OURS,
            label="here, against the fastest baseline"),
    ]  # fmt: skip
    if any(r.get("won") is False or (_ours(r) or 0) < 0 for rows in panels for r in rows):
        handles.append(dot(marker="o", markersize=5, color=style.LOSS, label="slower than unfused"))
    return handles
