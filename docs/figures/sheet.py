"""Boxes, arrows and notes on a white sheet: what the diagrams of docs/ are drawn with.

Lengths are in units of a tenth of an inch; the background is solid, so that a dark page shows the
same picture as a light one.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK, FAINT = "#1f2328", "#57606a"
# kind of box -> (fill, edge, line style)
KINDS = {
    "launch": ("#dbeafe", "#0b6bcb", "-"),  # a kernel
    "weights": ("#fef3c7", "#a16207", "-"),
    "tensor": ("#f6f8fa", "#57606a", "-"),
    "module": ("#ffffff", "#57606a", "-"),
    "idle": ("#ffffff", "#9aa4af", "--"),  # there, and no launch
}
UNIT = 0.1
SIZE = 8.5


class Sheet:
    """One diagram, ``width`` by ``height`` units."""

    def __init__(self, width: float, height: float) -> None:
        self.figure = plt.figure(figsize=(width * UNIT, height * UNIT), facecolor="white")
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_xlim(0, width)
        self.axes.set_ylim(height, 0)  # downwards, as one reads
        self.axes.axis("off")

    def box(
        self, x: float, y: float, width: float, height: float, text: str, kind: str = "launch",
        size: float = SIZE,
    ) -> None:  # fmt: skip
        """A box with its upper left corner at (x, y), and its text in the middle."""
        fill, edge, line = KINDS[kind]
        patch = FancyBboxPatch(
            (x + 0.6, y + 0.6), width - 1.2, height - 1.2, boxstyle="round,pad=0.6",
            facecolor=fill, edgecolor=edge, linestyle=line, linewidth=1.1,
        )  # fmt: skip
        self.axes.add_patch(patch)
        color = FAINT if kind == "idle" else INK
        self.axes.text(
            x + width / 2, y + height / 2, text, ha="center", va="center", size=size, color=color,
            linespacing=1.35,
        )  # fmt: skip

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """A line through the points, with its head at the last."""
        for start, end in zip(points[:-2], points[1:-1], strict=True):
            self.axes.plot(*zip(start, end, strict=True), color=FAINT, linewidth=1.1)
        self.axes.add_patch(
            FancyArrowPatch(
                points[-2], points[-1], arrowstyle="-|>", mutation_scale=9, color=FAINT,
                linewidth=1.1, linestyle="--" if dashed else "-", shrinkA=0, shrinkB=0,
            )
        )  # fmt: skip

    def note(
        self, x: float, y: float, text: str, size: float = SIZE, bold: bool = False,
        align: str = "left", color: str = INK,
    ) -> None:  # fmt: skip
        """Text whose first line begins (ends, is centred) at x, with its middle at y."""
        weight = "bold" if bold else "normal"
        self.axes.text(
            x, y, text, size=size, ha=align, va="center", color=color, weight=weight,
            linespacing=1.4,
        )  # fmt: skip

    def rule(self, y: float) -> None:
        """A thin line across the sheet."""
        self.axes.axhline(y, color="#d8dee4", linewidth=0.8)

    def save(self, folder: Path, name: str, title: str) -> list[Path]:
        """NAME.svg and NAME.png in a folder, with ``title`` in them; always the same bytes."""
        paths = [folder / f"{name}.svg", folder / f"{name}.png"]
        with plt.rc_context({"svg.hashsalt": name}):
            self.figure.savefig(paths[0], metadata={"Date": None, "Title": title})
        self.figure.savefig(paths[1], dpi=200, metadata={"Software": None, "Title": title})
        self.close()
        return paths

    def close(self) -> None:
        """Let go of the figure's memory."""
        plt.close(self.figure)
