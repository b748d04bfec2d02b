"""What the norms take of a decode step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from flashnorm_triton.plots import style
from flashnorm_triton.plots.bars import VARIANTS
from flashnorm_triton.plots.sources import Source, labels
from flashnorm_triton.results import ResultsError

Record = Mapping[str, Any]


def figure(sources: Sequence[Source]) -> Figure:
    """A panel a source, model, batch and dtype; a bar a variant, mode and quantization: the share
    of the kernels' time that is spent in norms, beside how many norms a step has and how many
    launches they are; where the gaps between launches were timed too, a mark for the share of
    the whole step.

    A contender that was not measured has no bar, and says so. Raises ``ResultsError`` when no share
    was measured.
    """
    panels: dict[tuple[str, ...], list[Record]] = {}
    for source, label in zip(sources, labels(sources), strict=True):
        for r in source.records:
            key = (label, r["model"], str(r["batch"]), r["dtype"])
            panels.setdefault(key, []).append(r)
    rated = [r for rows in panels.values() for r in rows if _share(r) is not None]
    if not rated:
        raise ResultsError("no record has the norms' share of a step")
    heights = [len(rows) for rows in panels.values()]
    made, axes = style.new(
        0.27 * sum(heights) + 0.5 * len(panels) + 1.15, len(panels), 1, sharex=True,
        height_ratios=[height + 0.6 for height in heights],
    )  # fmt: skip
    most = 100 * max(max(r["norm_share"], r.get("norm_wall_share") or 0) for r in rated)
    for ax, ((label, model, batch, dtype), rows) in zip(axes.ravel(), panels.items(), strict=True):
        for y, r in enumerate(rows):
            _bar(ax, y, r, most)
        ax.set_yticks(range(len(rows)), [_name(r) for r in rows])
        ax.tick_params(axis="y", length=0)
        ax.set_ylim(len(rows) - 0.4, -0.6)
        ax.set_xlim(0, 2.4 * most)
        told = [model, dtype, f"batch {batch}", label if len(sources) > 1 else ""]
        ax.set_title(", ".join(part for part in told if part))
        ax.grid(axis="x", color=style.GRID, linewidth=0.6)
    axes[-1, 0].set_xlabel("norms, % of the kernels' time of a step")
    style.title(made, "what the norms take of a decode step")
    there = {r["variant"] for r in rated}
    handles: list[Any] = [
        Patch(color=color, label=label)
        for name, (label, color) in VARIANTS.items()
        if name in there
    ]
    if any(r.get("norm_wall_share") is not None for r in rated):
        handles.append(
            Line2D([], [], linestyle="", marker="D", markersize=4, color=style.INK,
                   label="% of the whole step, launch gaps included")
        )  # fmt: skip
    style.foot(made, sources, handles)
    return made


def _bar(ax: Axes, y: int, record: Record, most: float) -> None:
    share = _share(record)
    if share is None:
        why = str(record.get("error") or "no kernel time").splitlines()[0]
        ax.text(0, y, f" not reported: {why[:70]}", color=style.LOSS, va="center",
                fontsize=style.SMALL)  # fmt: skip
        return
    color = VARIANTS.get(record["variant"], ("", style.OURS))[1]
    ax.barh(y, 100 * share, 0.7, color=color)
    wall = record.get("norm_wall_share")
    if wall is not None:
        ax.plot(100 * wall, y, "D", markersize=4, color=style.INK, zorder=4)
    launches = record.get("norm_launches")
    told = f"{100 * share:.1f} %   {record['norms']} norms"
    if launches is not None:
        told += f" in {launches} launches" if launches else ", no launch of their own"
    told += f", {1e3 * record['norm_ms']:.0f} µs of {record['ms']:.2f} ms"
    right = 100 * max(share, wall or 0) + 0.03 * most
    ax.text(right, y, told, va="center", fontsize=style.SMALL, bbox=style.PLATE)


def _share(record: Record) -> float | None:
    return None if record.get("error") else record.get("norm_share")


def _name(record: Record) -> str:
    quantization = record.get("quantization", "none")
    parts = (record["variant"], record["mode"], "" if quantization == "none" else quantization)
    return "  ".join(part for part in parts if part)
