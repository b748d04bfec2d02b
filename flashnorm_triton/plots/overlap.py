"""What running the matmul beside the statistics gains over every other way, by tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flashnorm_triton.plots import style
from flashnorm_triton.plots.sources import Source, labels
from flashnorm_triton.results import ResultsError

# What two streams are compared with, and the colour of its line
RIVALS = {
    "sequential": ("the same work in one stream", style.OURS),
    "stock": ("stock modules", style.STOCK),
    "unfused": ("one-launch norm, then linear", style.INK),
    "chosen": ("the plan in use", style.SERIES[2]),
}
_LINES = ("-", "--", ":", "-.")


def figure(sources: Sequence[Source]) -> Figure:
    """One panel a shape, dtype and epilogue: each rival's time over that of overlap. Above 1,
    overlap is faster. Several sources differ in their lines.

    Raises ``ResultsError`` when nothing was measured.
    """
    panels: dict[tuple[Any, ...], list[tuple[int, Mapping[str, Any]]]] = {}
    for number, source in enumerate(sources):
        for r in source.measured:
            shape = (r["dtype"], r["epilogue"], r["k"], r["n"])
            panels.setdefault(shape, []).append((number, r))
    if not panels:
        raise ResultsError("no record has a time: every cell failed")
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    made, axes = style.new(2.1 * rows + 1.1, rows, columns)
    for ax, ((dtype, epilogue, k, n), cells) in zip(axes.ravel(), panels.items(), strict=False):
        style.level(ax)
        for number in range(len(sources)):
            mine = sorted((r for at, r in cells if at == number), key=lambda r: r["m"])
            for name, (label, color) in RIVALS.items():
                points = [(r["m"], r["over"][name]) for r in mine if name in r["over"]]
                if points:
                    ax.plot(
                        *zip(*points, strict=True), linestyle=_LINES[number % len(_LINES)],
                        marker="o", color=color, label=label, markersize=3, linewidth=1.4,
                    )  # fmt: skip
        style.tokens_axis(ax, [r["m"] for _, r in cells], label=False)
        ax.set_title(f"{k} → {n}   {dtype} {epilogue}".rstrip())
        ax.set_ylabel("time / overlap's")
    for ax in axes.ravel()[len(panels) :]:
        ax.set_visible(False)
    for ax in axes[-1]:
        ax.set_xlabel("tokens (rows of x)")
    style.title(made, "matmul beside the statistics, on two streams  (above 1 overlap is faster)")
    handles = [
        Line2D([], [], color=c, marker="o", markersize=3, label=n) for n, c in RIVALS.values()
    ]
    if len(sources) > 1:
        handles += [
            Line2D([], [], color=style.FAINT, linestyle=_LINES[number % len(_LINES)], label=label)
            for number, label in enumerate(labels(sources))
        ]
    style.foot(made, sources, handles, columns=4)
    return made
