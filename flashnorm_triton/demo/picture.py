"""The demo's picture: accuracy by position, speed, and the gains that were folded away."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from flashnorm_triton.plots import style

STOCK, PATCHED = style.STOCK, style.OURS
_DPI = 130


@dataclass(frozen=True)
class Panels:
    """What is drawn. ``errors``: name -> relative logit error by position (L,); ``rates``: name ->
    tokens/s of each round; ``launches``: name -> kernels a decode step, empty without a GPU;
    ``gains``: norm name -> its gains (K,)."""

    title: str
    errors: dict[str, Tensor]
    rates: dict[str, list[float]]
    launches: dict[str, int]
    gains: dict[str, Tensor]


def _smooth(values: np.ndarray, width: int = 32) -> np.ndarray:
    """Running mean that shrinks its window at the ends."""
    total = np.convolve(values, np.ones(width), mode="same")
    return total / np.convolve(np.ones_like(values), np.ones(width), mode="same")


def draw(panels: Panels, path: Path) -> None:
    """Write a PNG; raises OSError when ``path`` cannot be written."""
    with style.use():
        figure = Figure(figsize=(14, 4.6), layout="constrained")
        left, middle, right = figure.subplots(1, 3, width_ratios=(1.15, 0.75, 1.5))
        style.title(figure, panels.title)
        _draw_errors(left, panels.errors)
        _draw_rates(middle, panels.rates, panels.launches)
        _draw_gains(right, panels.gains)
    style.save_png(figure, path, dpi=_DPI)


def _draw_errors(axes, errors: dict[str, Tensor]) -> None:
    for (name, values), colour in zip(errors.items(), (STOCK, PATCHED), strict=True):
        smooth = _smooth(values.double().numpy())
        axes.plot(smooth, color=colour, label=name, linewidth=1.8, alpha=0.9)
    axes.set(
        title="Logit error against float64", xlabel="position in the text", ylabel="relative error"
    )
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right")


def _draw_rates(axes, rates: dict[str, list[float]], launches: dict[str, int]) -> None:
    for place, (name, values) in enumerate(rates.items()):
        middle = float(np.median(values))
        axes.bar(place, middle, width=0.62, color=(STOCK, PATCHED)[place])
        axes.plot([place] * len(values), values, "o", color=style.INK, alpha=0.45, markersize=4)
        note = f"\n{launches[name]} launches a step" if name in launches else ""
        axes.annotate(
            f"{middle:,.0f}{note}",
            (place, max(values)),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
        )
    axes.set_xticks(range(len(rates)), rates)
    axes.set_ylim(0, 1.22 * max(max(v) for v in rates.values()))
    axes.set(title="Eager generate, one text", ylabel="tokens a second")


def _draw_gains(axes, gains: dict[str, Tensor]) -> None:
    rng = np.random.default_rng(0)
    kinds = {
        "input_": ("attention", PATCHED),
        "post_": ("MLP", style.OTHER),
        "": ("final", style.SERIES[2]),
    }
    labelled = set()
    for place, (name, values) in enumerate(gains.items()):
        label, colour = next(kinds[part] for part in kinds if part in name)
        jitter = place + rng.uniform(-0.3, 0.3, len(values))
        axes.plot(
            jitter,
            values.float().numpy(),
            ".",
            color=colour,
            markersize=3.5,
            alpha=0.6,
            label=None if label in labelled else label,
        )
        labelled.add(label)
    axes.axhline(1, color=style.INK, linewidth=0.8, linestyle=":")
    short = [
        name.split(".")[2] + ("a" if "input" in name else "m") if "layers" in name else "final"
        for name in gains
    ]
    axes.set_xticks(range(len(gains)), short)
    axes.set(
        title="Trained gains of every norm",
        xlabel="layer (a: attention norm, m: MLP norm)",
        ylabel="gain",
    )
    axes.set_ylim(top=1.15 * axes.get_ylim()[1])
    axes.legend(loc="upper left", markerscale=3, ncols=3)
