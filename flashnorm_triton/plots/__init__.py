"""Pictures of result files: ``flashnorm plot``, and ``draw`` for scripts and notebooks.

``sources`` reads the files, ``drawing`` picks the figures that fit them, ``style`` is how all of
them look and are saved; every other file is one family of figures, a function of the sources that
returns a matplotlib ``Figure``. Nothing here needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = ["draw"]


def draw(
    paths: Iterable[str | Path] = (),
    out: str | Path = "flashnorm_figures",
    *,
    say: Callable[[str], None] | None = None,
) -> list[Path]:
    """Draw every figure that result files hold into the folder ``out``, each as SVG and PNG.

    ``paths`` are result files, tuned tables (``configs/*.json``, the user's own) or folders of
    them; of nothing, or the word ``shipped``, it draws the results that come with the package.
    Files of one kind overlay: those of one name from several folders, or all that are named one by
    one. Returns the written paths, SVG before PNG. ``say`` gets a line for everything that was
    passed over or is older than the kernels.

    Raises ``flashnorm_triton.results.ResultsError`` when a path is missing, is not a result file,
    or nothing can be drawn; OSError when ``out`` cannot be written.
    """
    from flashnorm_triton.plots import drawing

    return drawing.draw(paths, Path(out), say or (lambda line: None))
