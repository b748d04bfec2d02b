"""Which plan serves which cell, and what it gains: a map of row counts and shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from flashnorm_triton.plots import style
from flashnorm_triton.plots.sources import Source, labels
from flashnorm_triton.results import ResultsError

Record = Mapping[str, Any]
# strategy and form: (ground, writing, name)
PLANS = {
    ("single_pass", "gemv"): ("#0b6bcb", "white", "one pass, GEMV"),
    ("single_pass", "tiles"): ("#9cc9f5", style.INK, "one pass, portable tiles"),
    ("single_pass", "hopper_swap"): ("#0f7b6c", "white", "one pass, Hopper, few rows"),
    ("single_pass", "hopper_rows"): ("#8fd3c6", style.INK, "one pass, Hopper, many rows"),
    ("stats_then_gemm", "tiles"): ("#d8c7f7", style.INK, "statistics, then tiles"),
    ("stats_then_gemm", "hopper_rows"): ("#8250df", "white", "statistics, then Hopper matmul"),
    ("stats_then_gemm", "scaled_gemm"): ("#bf9bf2", style.INK, "statistics, then scaled matmul"),
    ("overlap", "two_streams"): ("#f2cc7a", style.INK, "statistics beside the matmul"),
    ("unfused", "library"): ("#d5dae0", style.INK, "unfused: norm, then library matmul"),
}
_OTHER = ("#57606a", "white", "another plan")
NEAR = 0.01
"""Without a band, speedups this near to 1 are a tie."""


def figure(sources: Sequence[Source]) -> Figure:
    """A panel a source, dtype and kind of problem: a row a shape, a column a number of tokens, a
    cell's colour its plan and its number the speedup over the unfused way (of a tuned table: the
    unfused pair that the tuner timed). ``=`` marks a tie, a red frame a loss.

    Raises ``ResultsError`` when no cell has a plan and a speedup.
    """
    panels: dict[tuple[str, str, str], list[Record]] = {}
    for source, label in zip(sources, labels(sources), strict=True):
        for r in source.measured:
            if r.get("plan") and r.get("speedup") is not None:
                panels.setdefault((label, r["dtype"], _problem(r)), []).append(r)
    if not panels:
        raise ResultsError("no cell has a plan and a speedup")
    heights = [len(_shapes(cells)) for cells in panels.values()]
    made, axes = style.new(
        0.23 * sum(heights) + 0.62 * len(panels) + 1.35, len(panels), 1,
        height_ratios=[height + 0.8 for height in heights],
    )  # fmt: skip
    for ax, ((label, dtype, problem), cells) in zip(axes.ravel(), panels.items(), strict=True):
        _panel(ax, cells)
        told = [dtype, problem, label if len(sources) > 1 else ""]
        ax.set_title("   ".join(part for part in told if part))
    axes[-1, 0].set_xlabel("tokens (rows of x)")
    style.title(made, "the plan of each cell, and its speedup over the unfused way")
    style.foot(made, sources, _legend(panels.values()), columns=3)
    return made


def outcome(record: Record) -> str:
    """One of "win", "tie" and "loss": a tie when the 20–80 % band holds 1; without a band, when the
    speedup is within ``NEAR`` of it or the plan is the unfused way itself."""
    speedup = record["speedup"]
    if "speedup_q20" in record and "speedup_q80" in record:
        tie = record["speedup_q20"] <= 1 <= record["speedup_q80"]
    else:
        tie = abs(speedup - 1) <= NEAR or record["plan"]["strategy"] == "unfused"
    return "tie" if tie else "win" if speedup > 1 else "loss"


def _problem(record: Record) -> str:
    gain = "gain in the kernel" if record.get("has_gain") else ""
    return ", ".join(part for part in (record.get("epilogue", ""), gain) if part)


def _shapes(cells: Sequence[Record]) -> list[tuple[int, int]]:
    return list(
        dict.fromkeys((r["k"], r["n"]) for r in sorted(cells, key=lambda r: (r["k"], r["n"])))
    )


def _look(record: Record) -> tuple[str, str, str]:
    return PLANS.get((record["plan"]["strategy"], record["plan"]["form"]), _OTHER)


def _panel(ax: Axes, cells: Sequence[Record]) -> None:
    shapes = _shapes(cells)
    tokens = sorted({r["m"] for r in cells})
    cases = {(r["k"], r["n"]): r["case"] for r in cells}
    for r in cells:
        x, y = tokens.index(r["m"]), shapes.index((r["k"], r["n"]))
        ground, ink, _ = _look(r)
        ax.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=ground, edgecolor="white", lw=1))
        result = outcome(r)
        if result == "loss":
            ax.add_patch(
                Rectangle((x - 0.45, y - 0.42), 0.9, 0.84, fill=False, edgecolor=style.LOSS, lw=2)
            )
        said = f"{r['speedup']:.2f}"
        if result == "tie":
            said = "=" if said == "1.00" else f"= {said}"
        ax.text(x, y, said, ha="center", va="center", fontsize=style.TINY, color=ink)
    ax.set_xlim(-0.5, len(tokens) - 0.5)
    ax.set_ylim(len(shapes) - 0.5, -0.5)
    ax.set_xticks(range(len(tokens)), [str(m) for m in tokens])
    ax.set_yticks(range(len(shapes)), [f"{cases[s]}  {s[0]}→{s[1]}".strip() for s in shapes])
    ax.tick_params(length=0, labelsize=style.SMALL)
    for side in ax.spines.values():
        side.set_visible(False)


def _legend(panels: Any) -> list[Any]:
    cells = [r for panel in panels for r in panel]
    looks = {_look(r) for r in cells}
    ordered = [look for look in (*PLANS.values(), _OTHER) if look in looks]
    handles: list[Any] = [Patch(color=ground, label=name) for ground, _, name in ordered]
    results = {outcome(r) for r in cells}
    if "tie" in results:
        banded = all("speedup_q20" in r for r in cells)
        why = "the 20–80 % band holds 1" if banded else "within 1 %, or unfused itself"
        handles.append(
            Line2D([], [], linestyle="", marker="$=$", color=style.INK, label=f"a tie: {why}")
        )
    if "loss" in results:
        handles.append(
            Patch(facecolor="white", edgecolor=style.LOSS, linewidth=2, label="slower than unfused")
        )
    return handles
