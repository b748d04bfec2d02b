"""docs/figures: drawn from the script as it stands, with nothing cut off and the plans' names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from matplotlib.text import Text

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs" / "figures"))

import draw

from flashnorm_triton import plans

FOLDER = draw.HERE


def texts(sheet: draw.Sheet) -> list[Text]:
    return [text for text in sheet.axes.texts if text.get_text()]


@pytest.mark.parametrize("name", draw.FIGURES)
def test_the_committed_figure_is_the_scripts(name: str) -> None:
    """After a change: python docs/figures/draw.py."""
    for suffix in ("svg", "png"):
        assert draw.edition().encode() in (FOLDER / f"{name}.{suffix}").read_bytes()


@pytest.mark.parametrize("name", draw.FIGURES)
def test_nothing_is_cut_off(name: str) -> None:
    sheet = draw.FIGURES[name]()
    renderer = sheet.figure.canvas.get_renderer()
    page = sheet.figure.bbox
    for text in texts(sheet):
        box = text.get_window_extent(renderer)
        inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= page.x1 and box.y1 <= page.y1
        assert inside, text.get_text()
    sheet.close()


def test_strategies_are_those_of_the_plans() -> None:
    sheet = draw.FIGURES["strategies"]()
    told = {text.get_text() for text in texts(sheet)}
    assert set(plans.STRATEGIES) - {"torch"} <= told
    sheet.close()


def test_no_other_figures_lie_about() -> None:
    names = {path.stem for path in FOLDER.iterdir() if path.suffix in (".svg", ".png")}
    assert names == set(draw.FIGURES)
