"""Draw the figures of bench/figures anew from the committed results and tuned tables.

    python bench/draw_figures.py [GPU ...]

Those of every GPU that has a folder in bench/results with something to draw. The curves of other
dtypes and of hidden tables are left to ``flashnorm plot``: one set of figures an operation is what
README and docs show. tests/test_committed_figures.py holds the files to the results, byte by byte.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from matplotlib.figure import Figure

from flashnorm_triton import results, tables
from flashnorm_triton.plots import drawing, style
from flashnorm_triton.plots import sources as source_files
from flashnorm_triton.plots.sources import Source

ROOT = Path(__file__).resolve().parents[1]
RESULTS, FIGURES = ROOT / "bench" / "results", ROOT / "bench" / "figures"
LEFT_OUT = ("norm_linear_fp16", "norm_linear_untuned")


def drawable(gpu: str) -> list[Source]:
    """The result files of a GPU that have a figure here, and its shipped table."""
    found = []
    for path in sorted((RESULTS / gpu).glob("*.json")):
        try:
            source = source_files.read(path)
        except results.ResultsError:
            continue  # a record of tries or of a CPU, without the header
        if source.kind and source.name not in LEFT_OUT:
            found.append(source)
    table = tables.SHIPPED / f"{gpu}.json"
    return [*found, source_files.read(table)] if table.exists() else found


def figures(gpu: str) -> Iterator[tuple[str, Figure, str]]:
    """(name, figure, origin) of every figure of a GPU."""
    for source in drawable(gpu):
        for name, figure in drawing.figures([source]):
            yield name, figure, drawing.origin([source])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = sorted(path.name for path in RESULTS.iterdir() if path.is_dir())
    parser.add_argument("gpus", nargs="*", metavar="GPU", help=f"of {', '.join(known)}; else all")
    for gpu in parser.parse_args(argv).gpus or known:
        if gpu not in known:
            parser.error(f"no results of {gpu!r} in {RESULTS}: there are {', '.join(known)}")
        for name, figure, origin in figures(gpu):
            svg, _ = style.save(figure, FIGURES / gpu / f"{name}.svg", origin=origin)
            print(svg.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
