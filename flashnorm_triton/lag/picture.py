"""The picture of a run: each step's distance to t and to t-1, and every watched place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from flashnorm_triton.lag.judging import SiteSteps
from flashnorm_triton.lag.report import LagReport, Place
from flashnorm_triton.plots import style

AT_T, AT_BEFORE, ALARM = style.OURS, style.OTHER, style.LOSS
# More steps than this are drawn by the extremes of a few: none falls between two pixels.
_POINTS, _COLUMNS = 1200, 400


def draw(report: LagReport, path: Path) -> tuple[Path, Path]:
    """Write ``path`` as PNG and SVG (whatever its suffix); returns the two paths, PNG first.

    Raises OSError when they cannot be written.
    """
    rows = [place for place in report.places if place.site is not None and place.judged]
    low = 0.15 * len(rows) + 1.0 if rows else 1.6
    with style.use():
        figure, axes = style.new(3.4 + low, 2, height_ratios=(3.0, low), sharex=True)
        top, bottom = axes.ravel()
        style.title(figure, _title(report))
        _draw_distances(top, report)
        figure.legend(
            *top.get_legend_handles_labels(), loc="outside lower left", ncols=5, fontsize=8
        )
        if rows:
            _draw_places(figure, bottom, report, rows)
        else:
            _draw_divergence(bottom, report)
        bottom.set_xlabel("generated token (step)")
    svg, png = style.save(figure, path)
    return png, svg


def _title(report: LagReport) -> str:
    verdict = "clean"
    if report.lag is not None:
        verdict = f"lag at step {report.lag.step}"
    elif report.departure is not None:
        verdict = f"beyond rounding at step {report.departure.step}"
    return (
        f"{report.model}, {report.dtype}, {report.mode}, {report.tokens:,} tokens: "
        f"patched against stock, step by step: {verdict}"
    )


def _extremes(values: np.ndarray, pick: Any, most: int = _POINTS) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) with at most ``most`` bins, each drawn as ``pick`` (np.max, ...) of it."""
    width = -(-len(values) // most)
    starts = np.arange(0, len(values), width)
    picked = [pick(values[start : start + width]) for start in starts]
    return starts, np.array(picked)


def _draw_distances(axes: Any, report: LagReport) -> None:
    steps = report.steps
    # The worst row is what counts: the largest distance to t, the smallest to t-1.
    lines = (
        (steps.at_before.min(1), np.min, AT_BEFORE, "patched to stock at t−1"),
        (steps.noise.max(1), np.max, style.STOCK, f"stock in {report.dtype} to it (rounding)"),
        (steps.at_t.max(1), np.max, AT_T, "patched to stock at t"),
    )
    for values, pick, colour, label in lines:
        x, y = _extremes(np.where(values > 0, values, np.nan), pick)
        axes.plot(x, y, color=colour, linewidth=1.0, label=label)
    axes.axhline(
        report.limit, color=style.INK, linewidth=0.9, linestyle="--", label="limit of rounding"
    )
    off = np.flatnonzero((steps.at_t > report.limit).any(1) | ~np.isfinite(steps.at_t).all(1))
    if len(off):
        height = np.nan_to_num(steps.at_t[off].max(1), nan=2.0, posinf=2.0)
        axes.plot(off, height, ".", color=ALARM, markersize=4, label="beyond it", zorder=4)
    first = report.lag or report.departure
    if first is not None:
        axes.axvline(first.step, color=ALARM, linewidth=1.0)
        where = "logits" if first.site is None else f"{first.site} ({first.side})"
        late = first.step > 0.6 * len(steps.at_t)
        axes.annotate(
            f"step {first.step}: {first.kind}\n{where}",
            (first.step, 1.0), xycoords=("data", "axes fraction"),
            xytext=(-5 if late else 5, -3), textcoords="offset points",
            ha="right" if late else "left", va="top", color=ALARM, fontsize=8.5,
        )  # fmt: skip
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (8 if first is not None else 1.5))
    axes.grid(axis="y", color=style.GRID, linewidth=0.6)
    axes.set_ylabel("distance of logits, relative")


def _draw_divergence(axes: Any, report: LagReport) -> None:
    for values, colour, label in (
        (report.steps.kl_noise, style.STOCK, "stock"),
        (report.steps.kl, AT_T, "patched"),
    ):
        x, y = _extremes(np.maximum(values.max(1), 1e-12), np.max)
        axes.plot(x, y, color=colour, linewidth=0.9, label=label)
    axes.set_yscale("log")
    axes.set_ylabel("KL from the\nreference, nats")
    axes.grid(axis="y", color=style.GRID, linewidth=0.6)
    axes.legend(loc="lower left", fontsize=8, ncols=2)


def _ratio(place: Place, figures: SiteSteps) -> np.ndarray:
    """How far a place is beyond what rounding explains, by step: 1 is the limit."""
    values = figures.input_at_t if place.side == "input" else figures.output_at_t
    filled = np.nan_to_num(values, nan=np.inf).max(1) / place.limit
    return np.where(np.isnan(figures.input_moved).all(1), np.nan, filled)


def _draw_places(figure: Any, axes: Any, report: LagReport, rows: list[Place]) -> None:
    from matplotlib.colors import TwoSlopeNorm

    image = []
    for place in rows:
        starts, ratio = _extremes(_ratio(place, report.sites[place.site]), np.fmax.reduce, _COLUMNS)
        image.append(np.clip(np.log10(np.maximum(ratio, 1e-9)), -2, 2))
    width = (starts[1] - starts[0]) if len(starts) > 1 else 1
    shown = axes.imshow(
        np.array(image), aspect="auto", interpolation="nearest", cmap="RdBu_r",
        norm=TwoSlopeNorm(0, -2, 2),
        extent=(-0.5, len(starts) * width - 0.5, len(rows) - 0.5, -0.5),
    )  # fmt: skip
    names = [f"{_short(place)} {'→' if place.side == 'output' else '·'}" for place in rows]
    every = -(-len(rows) // 40)
    axes.set_yticks(range(0, len(rows), every), names[::every], fontsize=6.5)
    axes.tick_params(axis="y", length=0)
    bar = figure.colorbar(shown, ax=axes, pad=0.01, ticks=(-2, -1, 0, 1, 2))
    bar.ax.set_yticklabels(("1/100", "1/10", "limit", "10x", "100x"), fontsize=7)
    axes.set_title("each site's input (·) and output (→), over its limit", fontsize=9, loc="left")


def _short(place: Place) -> str:
    name = place.site.rsplit(".", 1)[-1]
    return name if place.layer is None else f"{place.layer} {name}"
