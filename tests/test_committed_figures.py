"""bench/figures shows the committed results: drawn again they are the same, byte for byte."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import matplotlib
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import draw_figures  # noqa: E402
from flashnorm_triton.plots import drawing, style  # noqa: E402

GPU = "nvidia_h200"
FOLDER = ROOT / "bench" / "figures" / GPU
# A lag run draws its figure while it has the steps of the models.
BY_THEIR_RUN = {"lag"}
AGAIN = "the results, the kernels or the figures' code changed: run python bench/draw_figures.py"
SOURCES = {source.name: source for source in draw_figures.drawable(GPU)}


def told(svg: str, element: str) -> str:
    found = re.search(rf"<dc:{element}>\s*(?:<cc:Agent>\s*<dc:title>)?([^<]*)<", svg)
    return found[1].strip() if found else ""


@pytest.mark.parametrize("name", SOURCES)
def test_the_figures_of_a_result_file_are_those_drawn_from_it(name):
    source = SOURCES[name]
    origin = drawing.origin([source])
    # The files' own statement of what they were drawn from holds with any matplotlib.
    for name, figure in drawing.figures([source]):
        svg = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
        assert told(svg, "source") == origin, AGAIN
        with Image.open(FOLDER / f"{name}.png") as png:
            assert png.text["Source"] == origin, AGAIN
            assert png.width == style.WIDTH_IN * style.DPI
        if told(svg, "creator") == f"matplotlib {matplotlib.__version__}":
            assert svg == style.as_svg(figure, origin), f"{name}.svg: {AGAIN}"


def test_every_result_has_its_figures_and_no_figure_is_left_over():
    expected = {
        source.name + suffix
        for source in SOURCES.values()
        for suffix, _ in drawing.FAMILIES[source.kind]
    }
    assert {path.stem for path in FOLDER.glob("*.svg")} == expected | BY_THEIR_RUN
    assert {path.stem for path in FOLDER.glob("*.png")} == expected | BY_THEIR_RUN
    assert max(path.stat().st_size for path in FOLDER.glob("*.png")) < 300_000
