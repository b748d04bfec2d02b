"""How every figure looks, its caption, and how it is saved."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from flashnorm_triton.plots.sources import Source

# A README column is about 900 pixels wide: 9 inches, and twice the pixels for fine screens. The
# ground is solid white, so that a figure reads on a dark page too.
WIDTH_IN, DPI = 9.0, 200
INK, FAINT, GRID = "#1f2328", "#57606a", "#d8dee4"
OURS, STOCK, LOSS, OTHER = "#0b6bcb", "#9aa4af", "#c4320a", "#c4622d"
NORM, LIGHT = "#e0a03c", "#f2f4f6"
# Curves of several GPUs or files; no red, which is kept for losses.
SERIES = (OURS, "#0f7b6c", "#8250df", "#9a6700", "#bf3989", INK)
MARKERS = ("o", "s", "^", "D", "v", "P")
SMALL, TINY = 8.0, 7.5
_COMMON = 96  # colours of a PNG that are kept because many pixels have them
# Words stand on white, so that no grid line runs through them.
PLATE = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
_RC = {
    "svg.hashsalt": "flashnorm_triton",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.axisbelow": True,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "legend.frameon": False,
}


@contextmanager
def use() -> Iterator[None]:
    """Within it, figures are made (and must be saved) in the style of the project."""
    with matplotlib.rc_context(_RC):
        yield


def new(height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure of README width and its axes as a 2-D array; ``height`` in inches."""
    figure = Figure(figsize=(WIDTH_IN, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def title(figure: Figure, text: str) -> None:
    """One line over the whole figure."""
    figure.suptitle(text, fontsize=11, x=0.01, ha="left")


def caption(source: Source) -> str:
    """Device, versions, date and kernels of a file as one line, and whether it is stale."""
    head = source.header
    line = (
        f"{head['gpu']} · torch {head['torch']} · Triton {head['triton']} · "
        f"transformers {head['transformers']} · {head['date'][:10]} · "
        f"kernels {head['kernel_hash'][:8]}"
    )
    return f"{line} · STALE: other kernels than this version's" if source.stale else line


def foot(
    figure: Figure, sources: Sequence[Source], handles: Sequence[Any] = (), *, columns: int = 5
) -> None:
    """The legend under a figure and the captions of its sources over it; a stale source is also
    named in red at the figure's top."""
    lines = list(dict.fromkeys(caption(source) for source in sources))
    legend = figure.legend(
        handles=list(handles), loc="outside lower left", ncols=columns, title="\n".join(lines),
        title_fontsize=TINY, fontsize=SMALL, alignment="left",
    )  # fmt: skip
    legend.get_title().set_color(FAINT)
    if any(source.stale for source in sources):
        figure.text(
            0.995, 0.995, "STALE: not this version's kernels", color=LOSS, ha="right", va="top",
            fontsize=TINY, weight="bold",
        )  # fmt: skip


def level(ax: Axes, at: float = 1.0) -> None:
    """The line of neither gain nor loss."""
    ax.axhline(at, color=INK, linewidth=0.8)


def tokens_axis(ax: Axes, tokens: Sequence[int], *, label: bool = True, most: int = 7) -> None:
    """A logarithmic axis of row counts, with at most ``most`` numbers on it."""
    ax.set_xscale("log", base=2)
    marked = sorted(set(tokens))
    marked = marked[:: -(-len(marked) // most)]
    ax.set_xticks(marked, [str(mark) for mark in marked])
    ax.minorticks_off()
    ax.grid(axis="y", color=GRID, linewidth=0.6)
    if label:
        ax.set_xlabel("tokens (rows of x)")


def save(figure: Figure, path: Path, *, origin: str = "") -> tuple[Path, Path]:
    """Write ``path`` as SVG and PNG (whatever its suffix); the two paths, SVG first.

    ``origin`` says what the figure was drawn from and is kept in both files. The same figure gives
    the same bytes with one version of matplotlib. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    svg, png = path.with_suffix(".svg"), path.with_suffix(".png")
    svg.write_text(as_svg(figure, origin), encoding="utf-8")
    save_png(figure, png, origin=origin)
    return svg, png


def as_svg(figure: Figure, origin: str = "") -> str:
    """The text of the SVG file."""
    made = io.StringIO()
    metadata = {"Date": None, "Creator": f"matplotlib {matplotlib.__version__}"}
    with use():
        figure.savefig(
            made, format="svg", metadata=metadata | ({"Source": origin} if origin else {})
        )
    return made.getvalue()


def save_png(figure: Figure, path: Path, *, dpi: int = DPI, origin: str = "") -> None:
    """Write a PNG of at most 256 colours: a third of the bytes, and no difference to see.

    Raises OSError.
    """
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    made = io.BytesIO()
    with use():
        figure.savefig(made, format="png", dpi=dpi)
    told = PngInfo()
    if origin:
        told.add_text("Source", origin)
    places, palette = _indexed(np.asarray(Image.open(made).convert("RGB")))
    small = Image.fromarray(places)
    small.putpalette(palette.tobytes())
    small.save(path, optimize=True, pnginfo=told, format="PNG")


def _indexed(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A picture (H, W, 3) of bytes as places (H, W) in a palette (at most 256, 3): the commonest
    colours as they are, then those that are farthest from all that are there."""
    packed = pixels.astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], dtype=np.uint32)
    found, inverse, counts = np.unique(packed, return_inverse=True, return_counts=True)
    colors = np.stack([found >> 16, found >> 8 & 255, found & 255], axis=1).astype(np.int32)
    kept = list(np.lexsort((found, -counts))[:_COMMON])
    apart = ((colors[:, None] - colors[kept]) ** 2).sum(2)
    nearest, distance = apart.argmin(1), apart.min(1)
    while len(kept) < min(256, len(colors)):
        kept.append(distance.argmax())
        new = ((colors - colors[kept[-1]]) ** 2).sum(1)
        nearest = np.where(new < distance, len(kept) - 1, nearest)
        distance = np.minimum(new, distance)
    places = nearest.astype(np.uint8)[inverse].reshape(pixels.shape[:2])
    return places, colors[kept].astype(np.uint8)
