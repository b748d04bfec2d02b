"""Where an operation's time goes: the bare matmul, what an unfused norm adds, the fused one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from flashnorm_triton.plots import style
from flashnorm_triton.plots.sources import Source, labels
from flashnorm_triton.results import ResultsError

_COLUMNS = 2
_WIDE = 0.38


def figure(sources: Sequence[Source]) -> Figure:
    """A panel a shape, dtype and source; for each number of tokens two bars in units of the bare
    matmul's time: the fastest unfused way, split into the matmul and what the norm adds, and the
    fused operation, red where it is slower. Under each number: the bare matmul's microseconds.

    Raises ``ResultsError`` when no cell timed the bare matmul and an unfused way.
    """
    panels: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for source, label in zip(sources, labels(sources), strict=True):
        for r in source.measured:
            if "gemm_only" in r["baselines_us"] and r.get("best_unfused"):
                panels.setdefault((label, r["dtype"], r["case"], r["k"], r["n"]), []).append(r)
    if not panels:
        raise ResultsError("no cell timed both the bare matmul and an unfused way")
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    made, axes = style.new(2.0 * rows + 1.05, rows, columns)
    dtypes = {key[1] for key in panels}
    for ax, ((label, dtype, case, k, n), cells) in zip(axes.ravel(), panels.items(), strict=False):
        _panel(ax, sorted(cells, key=lambda r: r["m"]))
        told = [f"{k} → {n}   {case}"]
        told += [dtype] if len(dtypes) > 1 else []
        told += [label] if len(sources) > 1 else []
        ax.set_title("   ".join(told))
    for ax in axes.ravel()[len(panels) :]:
        ax.set_visible(False)
    for ax in axes[:, 0]:
        ax.set_ylabel("time / bare matmul")
    for column in range(columns):
        lowest = [ax for ax in axes[:, column] if ax.get_visible()][-1]
        lowest.set_xlabel("tokens (rows of x); below: the bare matmul, µs")
    only = f", {dtypes.pop()}" if len(dtypes) == 1 else ""
    style.title(made, f"norm and matmul, unfused beside fused{only}  (in bare matmuls)")
    style.foot(made, sources, _legend(panels.values()), columns=4)
    return made


def unfused_us(record: Mapping[str, Any]) -> float:
    """Microseconds of the fastest unfused way."""
    return record["baselines_us"][record["best_unfused"]]


def _panel(ax: Axes, cells: Sequence[Mapping[str, Any]]) -> None:
    for x, record in enumerate(cells):
        bare, unfused = record["baselines_us"]["gemm_only"], unfused_us(record)
        matmul, ours = min(1.0, unfused / bare), record["us"] / bare
        ax.bar(x - _WIDE / 2, matmul, _WIDE, color=style.STOCK)
        if unfused > bare:
            ax.bar(x - _WIDE / 2, unfused / bare - 1, _WIDE, bottom=1, color=style.NORM)
        color = style.LOSS if record["us"] > unfused else style.OURS
        ax.bar(x + _WIDE / 2, ours, _WIDE, color=color)
        low, high = record["us_q20"] / bare, record["us_q80"] / bare
        ax.plot([x + _WIDE / 2] * 2, [low, high], color=style.INK, linewidth=1.0)
    style.level(ax)
    marks = [f"{r['m']}\n{_brief(r['baselines_us']['gemm_only'])}" for r in cells]
    ax.set_xticks(range(len(cells)), marks, fontsize=6.8 if len(cells) > 8 else style.TINY)
    ax.tick_params(axis="x", length=0)
    ax.set_xlim(-0.6, len(cells) - 0.4)
    ax.grid(axis="y", color=style.GRID, linewidth=0.6)


def _brief(us: float) -> str:
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"


def _legend(panels: Any) -> list[Patch]:
    handles = [
        Patch(color=style.STOCK, label="bare matmul"),
        Patch(color=style.NORM, label="what the norm adds, fastest unfused way"),
        Patch(color=style.OURS, label="fused, with its 20–80 % band"),
    ]
    if any(r["us"] > unfused_us(r) for cells in panels for r in cells):
        handles.append(Patch(color=style.LOSS, label="fused is slower"))
    return handles
