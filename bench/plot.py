"""Figures from a result file: speedup curves of an operation or of two streams, or bars of a
model's tokens a second.

    python bench/plot.py bench/results/<gpu>/norm_linear.json [-o FIGURE.svg]

Writes an SVG and, beside it, a PNG; without ``-o`` into bench/figures/<gpu>/. The same results
give the same SVG, byte for byte, with one version of matplotlib.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flashnorm_triton import results
from flashnorm_triton.bench import report

ROOT = Path(__file__).resolve().parents[1]
# A README column is about 900 pixels wide; the background is solid so that it reads on dark too.
WIDTH_IN, DPI = 9.0, 200
INK, FAINT = "#1f2328", "#57606a"
STYLE = {
    "svg.hashsalt": "flashnorm_triton",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
}
OURS, BOUND, LOSS, STOCK = "#0b6bcb", FAINT, "#c4320a", "#9aa4af"


def caption(header: Mapping[str, Any]) -> str:
    """Device, versions and date of the results, as one line."""
    return (
        f"{header['gpu']} · torch {header['torch']} · Triton {header['triton']} · "
        f"transformers {header['transformers']} · {header['date'][:10]} · "
        f"kernels {header['kernel_hash'][:8]}"
    )


def _panel(ax: Axes, records: Sequence[Mapping[str, Any]]) -> None:
    cells = sorted(records, key=lambda record: record["m"])
    m = [record["m"] for record in cells]
    speedup = [record["speedup"] for record in cells]
    low = [record["speedup_q20"] for record in cells]
    high = [record["speedup_q80"] for record in cells]
    ax.axhline(1, color=INK, linewidth=0.8)
    bound = [(r["m"], r["bound"]) for r in cells if "bound" in r]
    if bound:
        ax.plot(*zip(*bound, strict=True), "--", color=BOUND, linewidth=1.1)
    ax.fill_between(m, low, high, color=OURS, alpha=0.25, linewidth=0)
    ax.plot(m, speedup, "-o", color=OURS, linewidth=1.6, markersize=3.6)
    lost = [(r["m"], r["speedup"]) for r in cells if r["speedup"] < 1]
    if lost:
        ax.plot(*zip(*lost, strict=True), "o", color=LOSS, markersize=4.6, zorder=5)
    broken = [(r["m"], r["speedup"]) for r in cells if not r["contract_ok"]]
    if broken:
        ax.plot(*zip(*broken, strict=True), "x", color=LOSS, markersize=9, zorder=6)
    ax.set_xscale("log", base=2)
    ticks = m if len(m) < 5 else m[::2]
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.minorticks_off()
    ax.grid(axis="y", color="#d8dee4", linewidth=0.6)
    ax.set_axisbelow(True)
    first = cells[0]
    ax.set_title(f"{first['k']} → {first['n']}   {first['case']}", fontsize=9, loc="left")


def speedup_figure(header: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Figure:
    """One panel a shape: best unfused / ours against the number of tokens.

    Raises ``ResultsError`` when no record holds a speedup.
    """
    rated = [record for record in report.measured(records) if "speedup" in record]
    if not rated:
        raise results.ResultsError("no record has a speedup: every cell or baseline failed")
    panels: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for record in rated:
        panels.setdefault((record["k"], record["n"]), []).append(record)
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(WIDTH_IN, 2.35 * rows + 1.15),
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    flat = axes.ravel()
    for ax, cells in zip(flat, panels.values(), strict=False):
        _panel(ax, cells)
    for ax in flat[len(panels) :]:
        ax.set_visible(False)
    shown = list(panels.values())
    for number, row in enumerate(axes):
        row[0].set_ylabel("speedup")
        values = [
            record[key]
            for cells in shown[number * columns : (number + 1) * columns]
            for record in cells
            for key in ("speedup_q20", "speedup_q80", "bound")
            if key in record
        ]
        row[0].set_ylim(min(0.9, min(values) - 0.04), max(1.1, max(values) + 0.04))
    for ax in axes[-1]:
        ax.set_xlabel("tokens (rows of x)")
    untuned = ", tables hidden" if header.get("tables") == "off" else ""
    figure.suptitle(
        f"norm_linear{untuned}: fastest unfused way / fused operation  (above 1 is faster)",
        fontsize=11,
        x=0.01,
        ha="left",
    )
    legend = figure.legend(
        handles=_legend(rated),
        loc="outside lower left",
        ncols=5,
        frameon=False,
        title=caption(header),
        title_fontsize=7.5,
        alignment="left",
    )
    legend.get_title().set_color(FAINT)
    return figure


def _legend(rated: Sequence[Mapping[str, Any]]) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Line2D([], [], color=OURS, marker="o", markersize=3.6, label=f"fused, {rated[0]['dtype']}"),
        Patch(color=OURS, alpha=0.25, label="20–80 % of rounds"),
        Line2D([], [], color=BOUND, linestyle="--", label="if the norm were free"),
    ]
    if any(record["speedup"] < 1 for record in rated):
        handles.append(Line2D([], [], color=LOSS, marker="o", linestyle="", label="slower"))
    if not all(record["contract_ok"] for record in rated):
        handles.append(
            Line2D([], [], color=LOSS, marker="x", linestyle="", label="breaks the contract")
        )
    return handles


def generate_figure(header: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Figure:
    """Bars of tokens a second, stock beside patched, one pair a mode.

    A variant that failed or disagreed has no bar, and says so. Raises ``ResultsError`` when there
    is nothing to draw.
    """
    modes = list(dict.fromkeys(record["mode"] for record in records))
    found = {(r["mode"], r["variant"]): r for r in records}
    good = report.measured(records)
    if not good:
        raise results.ResultsError("no record has a speed: every model failed or disagreed")
    top = max(record["tokens_per_s"] for record in good)
    figure, ax = plt.subplots(figsize=(WIDTH_IN, 0.95 * len(modes) + 1.5), layout="constrained")
    for place, mode in enumerate(modes):
        for offset, (variant, color) in enumerate((("stock", STOCK), ("patched", OURS))):
            record = found.get((mode, variant))
            if record is None:
                continue
            y = place + (offset - 0.5) * 0.38
            if record.get("error"):
                ax.text(0, y, f" {variant}: not reported", color=LOSS, va="center", fontsize=8.5)
                continue
            speed = record["tokens_per_s"]
            ax.barh(y, speed, 0.34, color=color)
            text = f"{variant} {speed:.0f}"
            if record.get("speedup"):
                text += f"  ({record['speedup']:.2f}x)"
            if record.get("launches"):
                text += f", {record['launches']} kernels a step"
            ax.text(speed + top * 0.01, y, text, va="center", fontsize=8.5)
    ax.set_yticks(range(len(modes)), modes)
    ax.set_ylim(len(modes) - 0.5, -0.5)
    ax.set_xlim(0, top * 1.45)
    ax.set_xlabel("tokens a second, batch 1")
    ax.grid(axis="x", color="#d8dee4", linewidth=0.6)
    ax.set_axisbelow(True)
    figure.suptitle(
        f"generate, {good[0]['model']} shape, random weights, bf16", fontsize=11, x=0.01, ha="left"
    )
    figure.supxlabel(caption(header), fontsize=7.5, color=FAINT, x=0.99, ha="right")
    return figure


def contenders_figure(header: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Figure:
    """Bars of GPU milliseconds, a panel a model and batch size: stock and patched in every mode.

    What failed or gave other logits has no bar, and says so. Raises ``ResultsError`` when nothing
    was measured.
    """
    if not report.measured(records):
        raise results.ResultsError("no record has a time: every contender failed or disagreed")
    panels: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for record in records:
        panels.setdefault((record["model"], record["batch"]), []).append(record)
    heights = [len(panel) for panel in panels.values()]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(WIDTH_IN, 0.27 * sum(heights) + 0.45 * len(panels) + 0.8),
        squeeze=False, layout="constrained", height_ratios=heights,
    )  # fmt: skip
    for ax, ((model, batch), panel) in zip(axes.ravel(), panels.items(), strict=True):
        most = max((r["ms"] for r in report.measured(panel)), default=1.0)
        for y, record in enumerate(panel):
            if record.get("error"):
                ax.text(0, y, " not reported", color=LOSS, va="center", fontsize=8)
                continue
            stock = record["variant"] == "stock"
            ax.barh(y, record["ms"], 0.7, color=STOCK if stock else OURS)
            text = f" {record['ms']:.3g} ms"
            if record["launches"]:
                text += f", {record['launches']} kernels"
            ratios = [f"{ratio:.2f}x {mode}" for mode, ratio in record["speedups"].items()]
            ax.text(record["ms"], y, "   ".join([text, *ratios]), va="center", fontsize=8)
        ax.set_yticks(range(len(panel)), [f"{r['variant']}  {r['mode']}" for r in panel])
        ax.set_ylim(len(panel) - 0.4, -0.6)
        ax.set_xlim(0, 1.75 * most)
        ax.set_title(f"{model}, batch {batch}", fontsize=9, loc="left")
    axes[-1][0].set_xlabel("milliseconds of GPU time")
    figure.supxlabel(caption(header), fontsize=7.5, color=FAINT, x=0.99, ha="right")
    return figure


# What two streams are compared with, and how its line looks
_RIVALS = {
    "sequential": ("the same work in one stream", OURS),
    "stock": ("stock modules", STOCK),
    "unfused": ("one-launch norm, then linear", INK),
    "chosen": ("the plan in use", LOSS),
}


def overlap_figure(header: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Figure:
    """One panel a shape, dtype and epilogue: what overlap gains over every other way, by tokens.

    Raises ``ResultsError`` when nothing was measured.
    """
    good = report.measured(records)
    if not good:
        raise results.ResultsError("no record has a time: every cell failed")
    panels: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for r in good:
        panels.setdefault((r["dtype"], r["epilogue"], r["k"], r["n"]), []).append(r)
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(WIDTH_IN, 2.1 * rows + 1.1), squeeze=False, layout="constrained"
    )
    for ax, ((dtype, epilogue, k, n), cells) in zip(axes.ravel(), panels.items(), strict=False):
        cells = sorted(cells, key=lambda r: r["m"])
        ax.axhline(1, color=INK, linewidth=0.8)
        for name, (label, color) in _RIVALS.items():
            points = [(r["m"], r["over"][name]) for r in cells if name in r["over"]]
            if points:
                ax.plot(
                    *zip(*points, strict=True), "-o", color=color, label=label, markersize=3,
                    linewidth=1.4,
                )  # fmt: skip
        ax.set_xscale("log", base=2)
        ticks = [r["m"] for r in cells][:: 1 if len(cells) < 5 else 2]
        ax.set_xticks(ticks, [str(tick) for tick in ticks])
        ax.minorticks_off()
        ax.grid(axis="y", color="#d8dee4", linewidth=0.6)
        ax.set_axisbelow(True)
        ax.set_title(f"{k} → {n}   {dtype} {epilogue}".rstrip(), fontsize=9, loc="left")
        ax.set_ylabel("time / overlap's")
    for ax in axes.ravel()[len(panels) :]:
        ax.set_visible(False)
    for ax in axes[-1]:
        ax.set_xlabel("tokens (rows of x)")
    figure.suptitle(
        "matmul beside the statistics, on two streams  (above 1 overlap is faster)",
        fontsize=11, x=0.01, ha="left",
    )  # fmt: skip
    handles, labels = axes[0][0].get_legend_handles_labels()
    legend = figure.legend(
        handles, labels, loc="outside lower left", ncols=4, frameon=False, title=caption(header),
        title_fontsize=7.5, alignment="left",
    )  # fmt: skip
    legend.get_title().set_color(FAINT)
    return figure


def draw(loaded: results.Results) -> Figure:
    """The figure that fits the records."""
    kinds = {
        "over": overlap_figure,
        "op": speedup_figure,
        "tokens": contenders_figure,
        "mode": generate_figure,
    }
    kind = next((kinds[k] for k in kinds if any(k in r for r in loaded.records)), None)
    if kind is None:
        raise results.ResultsError("there is no figure for records of this kind, or of none")
    with matplotlib.rc_context(STYLE):
        return kind(loaded.header, loaded.records)


def write(figure: Figure, path: Path) -> tuple[Path, Path]:
    """Write ``path`` as SVG and PNG (whatever its suffix); the two paths."""
    path.parent.mkdir(parents=True, exist_ok=True)
    svg, png = path.with_suffix(".svg"), path.with_suffix(".png")
    with matplotlib.rc_context(STYLE):
        figure.savefig(svg, metadata={"Date": None, "Creator": None})
        figure.savefig(png, dpi=DPI, metadata={"Software": None})
    plt.close(figure)
    return svg, png


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="a file of bench/results")
    parser.add_argument("-o", "--out", type=Path, help="the figure's path (.svg and .png)")
    args = parser.parse_args(argv)
    try:
        loaded = results.load(args.results)
        folder = ROOT / "bench" / "figures" / results.gpu_slug(loaded.header["gpu"])
        path = args.out or folder / args.results.with_suffix(".svg").name
        svg, png = write(draw(loaded), path)
    except results.ResultsError as error:
        print(f"plot: {error}", file=sys.stderr)
        return 2
    print(f"written: {svg}, {png}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
