"""Every relative link and image of README, docs/ and the other pages leads somewhere."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path.relative_to(ROOT)
    for pattern in ("*.md", "docs/**/*.md", "bench/*.md", "flashnorm_triton/**/*.md")
    for path in ROOT.glob(pattern)
)
LINK = re.compile(r"(?<!\\)\[[^\]]*\]\(([^)\s]+)\)|src=\"([^\"]+)\"|href=\"([^\"]+)\"")
FENCED = re.compile(r"^```.*?^```$", re.S | re.M)


def links(text: str) -> list[str]:
    """Where the links and images of a page lead, without those in code."""
    text = re.sub(r"`[^`\n]*`", "", FENCED.sub("", text))
    return [next(filter(None, found)) for found in LINK.findall(text)]


def anchors(text: str) -> set[str]:
    """The anchors that a page's headings get: lower case, no marks, dashes for spaces."""
    heads = re.findall(r"^#+ +(.*)$", FENCED.sub("", text), re.M)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head).lower() for head in heads)
    return {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in plain}


def broken(page: Path, text: str) -> list[str]:
    """The relative links of a page at that path that lead nowhere."""
    found = []
    for link in links(text):
        if re.match(r"[a-z]+:", link):
            continue
        place, _, anchor = link.partition("#")
        target = page if not place else (page.parent / place)
        there = target.exists() and target.resolve().is_relative_to(ROOT)
        if not there or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(ROOT / page, (ROOT / page).read_text(encoding="utf-8")) == []


def test_a_broken_link_is_seen() -> None:
    page = ROOT / "docs" / "page.md"
    text = (
        "# A head: *here*\n[a](README.md) [b](nowhere.md) ![c](figures/none.png)\n"
        '<img src="no.svg"> [d](README.md#no-such-head) [e](../../outside.md)\n'
        "`[code](x.md)` [f](https://example.org/x.md) [g](README.md#documentation)\n"
        "```sh\n[h](in/code.md)\n```\n"
    )
    expected = ["nowhere.md", "figures/none.png", "no.svg", "README.md#no-such-head"]
    assert broken(page, text) == [*expected, "../../outside.md"]
    assert anchors(text) == {"a-head-here"}


def test_the_packages_page_has_no_relative_links(monkeypatch: pytest.MonkeyPatch) -> None:
    # setuptools cannot be imported after distutils, which another test may have been.
    stand_in = SimpleNamespace(setup=None, build_py=object)
    monkeypatch.setitem(sys.modules, "setuptools", stand_in)
    monkeypatch.setitem(sys.modules, "setuptools.command", stand_in)
    monkeypatch.setitem(sys.modules, "setuptools.command.build_py", stand_in)
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = script.long_description()
    assert links(text) and all(link.startswith("https://") for link in links(text))
    assert "Patching (`docs/patching.md`)" in text and "<!--" not in text and "![" not in text


@pytest.mark.parametrize("folder", ["docs", "bench/results/nvidia_h200"])
def test_every_page_is_reached(folder: str) -> None:
    """From README, over links: a page that none leads to is not read."""
    seen: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen or not page.exists():
            continue
        seen.add(page)
        if page.suffix == ".md":
            for link in links(page.read_text(encoding="utf-8")):
                if not re.match(r"[a-z]+:", link) and (place := link.partition("#")[0]):
                    waiting.append((page.parent / place).resolve())
    for path in (ROOT / folder).glob("*"):
        if path.suffix in (".md", ".json"):
            assert path in seen, path
