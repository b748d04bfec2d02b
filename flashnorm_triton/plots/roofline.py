"""Achieved TFLOP/s and TB/s of the operation against what the GPU was measured to reach."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flashnorm_triton.plots import style
from flashnorm_triton.plots.sources import Source, labels
from flashnorm_triton.results import ResultsError

Record = Mapping[str, Any]
# The header's matmul ceiling is of 16-bit numbers.
_BYTES = {"bfloat16": 2, "float16": 2}


def figure(sources: Sequence[Source]) -> Figure:
    """A row a source, two panels over arithmetic intensity (operations a byte that must move at
    least: x, weight and y once): TFLOP/s, and TB/s of those bytes. A curve a shape, its row counts
    growing from left to right; hollow, the fastest unfused way; red, where the fused one is slower.
    The roofs are the copy and the matmul rate that the run measured; a copy writes as much as it
    reads, so what hardly writes may be a little above. Cells of 16-bit dtypes only.

    Raises ``ResultsError`` when there is no such cell, or no ceiling was measured.
    """
    rows = [
        (label, source, _curves(source))
        for label, source in zip(labels(sources), sources, strict=True)
        if source.header["copy_tb_s"] > 0 and source.header["matmul_tflops"] > 0
    ]
    rows = [row for row in rows if row[2]]
    if not rows:
        raise ResultsError("no 16-bit cell with measured ceilings")
    shapes = {key[:3]: None for _, _, curves in rows for key in curves}
    colors = dict(zip(shapes, itertools.cycle(style.SERIES), strict=False))
    every = [r for _, _, curves in rows for cells in curves.values() for r in cells]
    reach = [intensity(r) for r in every]
    span = np.geomspace(0.7 * min(reach), 1.4 * max(reach), 200)
    made, axes = style.new(3.0 * len(rows) + 1.5, len(rows), 2)
    for (flops, moved), (label, source, curves) in zip(axes, rows, strict=True):
        copy, most = source.header["copy_tb_s"], source.header["matmul_tflops"]
        flops.plot(span, np.minimum(copy * span, most), color=style.INK, linewidth=1.2)
        moved.plot(span, np.minimum(copy, most / span), color=style.INK, linewidth=1.2)
        _name_roofs(flops, moved, span, copy, most)
        for (*shape, dtype), cells in curves.items():
            marker = style.MARKERS[list(_BYTES).index(dtype)]
            _curve(flops, cells, colors[tuple(shape)], marker, tflops)
            _curve(moved, cells, colors[tuple(shape)], marker, tb_s)
        _axes(flops, moved)
        if len(rows) > 1:
            flops.set_title(label)
    style.title(made, "norm_linear against what the GPU was measured to reach")
    handles = [
        Line2D([], [], color=color, marker="o", markersize=3.6, label=f"{k} → {n} {case}".strip())
        for (case, k, n), color in colors.items()
    ]
    style.foot(made, [source for _, source, _ in rows], [*handles, *_marks(every)], columns=3)
    return made


def _curves(source: Source) -> dict[tuple[Any, ...], list[Record]]:
    """(case, k, n, dtype) -> its cells by their row counts."""
    found: dict[tuple[Any, ...], list[Record]] = {}
    for r in sorted(source.measured, key=lambda r: r["m"]):
        if r["dtype"] in _BYTES:
            found.setdefault((r["case"], r["k"], r["n"], r["dtype"]), []).append(r)
    return dict(sorted(found.items(), key=lambda item: item[0][1:]))


def _axes(flops: Axes, moved: Axes) -> None:
    for ax, said in ((flops, "TFLOP/s"), (moved, "TB/s of the least bytes")):
        ax.set_xscale("log", base=10)
        ax.set_xlabel("arithmetic intensity, FLOP / byte")
        ax.set_ylabel(said)
        ax.xaxis.set_major_formatter("{x:g}")
        ax.grid(color=style.GRID, linewidth=0.6)
    flops.set_yscale("log", base=10)
    flops.yaxis.set_major_formatter("{x:g}")
    moved.set_ylim(0, 1.06 * moved.get_ylim()[1])


def least_bytes(record: Record) -> int:
    """Bytes of x, the weight and y, each moved once."""
    m, n, k = record["m"], record["n"], record["k"]
    return _BYTES[record["dtype"]] * (m * k + n * k + m * n)


def intensity(record: Record) -> float:
    """Operations of the matmul a byte."""
    return 2 * record["m"] * record["n"] * record["k"] / least_bytes(record)


def tflops(record: Record, us: float) -> float:
    """Of the matmul's operations in ``us`` microseconds."""
    return 2 * record["m"] * record["n"] * record["k"] / us / 1e6


def tb_s(record: Record, us: float) -> float:
    """Of ``least_bytes`` in ``us`` microseconds."""
    return least_bytes(record) / us / 1e6


def _curve(ax: Axes, cells: Sequence[Record], color: str, marker: str, rate: Any) -> None:
    x = [intensity(r) for r in cells]
    unfused = [
        (at, rate(r, r["baselines_us"][r["best_unfused"]]))
        for at, r in zip(x, cells, strict=True)
        if r.get("best_unfused")
    ]
    if unfused:
        ax.plot(
            *zip(*unfused, strict=True), linestyle="", marker=marker, markersize=4.2,
            markerfacecolor="white", markeredgecolor=color, markeredgewidth=0.8, zorder=2,
        )  # fmt: skip
    ours = [rate(r, r["us"]) for r in cells]
    ax.plot(x, ours, "-", marker=marker, color=color, markersize=3.2, linewidth=1.2, zorder=3)
    lost = [
        (at, y)
        for at, y, r in zip(x, ours, cells, strict=True)
        if r.get("speedup") is not None and r["speedup"] < 1
    ]
    if lost:
        ax.plot(
            *zip(*lost, strict=True), linestyle="", marker=marker, color=style.LOSS, markersize=3.8,
            zorder=4,
        )  # fmt: skip


def _name_roofs(flops: Axes, moved: Axes, span: Any, copy: float, most: float) -> None:
    small = {"fontsize": style.TINY, "color": style.INK}
    flops.annotate(
        f"matmul {most:.0f} TFLOP/s", (span[0], most), xytext=(0, -3), textcoords="offset points",
        va="top", **small,
    )  # fmt: skip
    moved.annotate(
        f"copy {copy:.2f} TB/s",
        (most / copy, copy),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        **small,
    )


def _marks(records: Sequence[Record]) -> list[Line2D]:
    handles = [
        Line2D([], [], linestyle="", marker="o", markersize=4.2, markerfacecolor="white",
               markeredgecolor=style.FAINT, label="fastest unfused way"),
        Line2D([], [], color=style.INK, linewidth=1.2, label="measured ceilings"),
    ]  # fmt: skip
    if any(r.get("speedup") is not None and r["speedup"] < 1 for r in records):
        handles.append(
            Line2D([], [], linestyle="", marker="o", color=style.LOSS, markersize=3.8,
                   label="fused is slower")
        )  # fmt: skip
    dtypes = {r["dtype"] for r in records}
    if len(dtypes) > 1:
        handles += [
            Line2D([], [], linestyle="", marker=marker, color=style.FAINT, label=dtype)
            for dtype, marker in zip(_BYTES, style.MARKERS, strict=False)
            if dtype in dtypes
        ]
    return handles
