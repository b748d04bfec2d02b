"""Measured figures in docs/ say where they are from: a result file, or that none was kept."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# a number with a unit of a measurement, or a speedup
FIGURE = re.compile(
    r"\d[\d.,]*\s?(?:µs|ms|GB|MB|TFLOP/s|TB/s|tokens/s|%)|\b\d+\.\d+\s?x\b|\d s\b|\d\.\de-\d\d\b"
)
ORIGIN = re.compile(r"\]\([^)]*\.json\)|\]\(measured\.md|not\s+kept")
MADE = re.compile(r"<!-- (\w+) -->.*?<!-- /\1 -->", re.S)
# Sections whose figures are no measurements, with the reason.
OTHERS = {
    "README.md#Read on": "no figures",
    "docs/commands.md#flashnorm": "defaults of options",
    "docs/api.md": "docstrings: defaults, limits of the contract",
}


def sections(text: str) -> list[tuple[str, str]]:
    """(heading, text) of the parts of a page; the first has no heading."""
    parts = re.split(r"^#{2,} +(.*)$", text, flags=re.M)
    return [("", parts[0]), *zip(parts[1::2], parts[2::2], strict=True)]


def unexplained(name: str, text: str) -> list[str]:
    """The sections with figures of which nothing says where they are from."""
    found = []
    for heading, body in sections(text):
        written = MADE.sub("", re.sub(r"`[^`\n]*`", "", body))
        place = f"{name}#{heading}" if heading else name
        if name in OTHERS or place in OTHERS or ORIGIN.search(body):
            continue
        found += [f"{place}: {figure}" for figure in FIGURE.findall(written)]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_have_an_origin(page: Path) -> None:
    name = page.relative_to(ROOT).as_posix()
    assert unexplained(name, page.read_text(encoding="utf-8")) == []


def test_a_figure_without_an_origin_is_seen() -> None:
    text = (
        "# A page\n\n## One\n\nIt takes 3.2 µs.\n\n## Two\n\n12 % ([a.json](../a.json)).\n\n"
        "## Three\n\n1.31x in a try that was not kept.\n\n## Four\n\n`2.5 ms` and K = 576\n\n"
        "## Five\n\n<!-- x -->\n9.9 ms\n<!-- /x -->\n"
    )
    assert unexplained("docs/page.md", text) == ["docs/page.md#One: 3.2 µs"]
