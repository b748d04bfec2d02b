"""bench/cancel.py: what it measures, and that its committed result is of what it measures."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import cancel
from bench.doc_pages.sources import read


def test_errors_are_as_committed() -> None:
    """Rounding differs between processors, the kind of result does not."""
    embeddings = 1e-2
    found = cancel.errors("qwen3", embeddings, 0)
    (told,) = (
        each["rel_err"]
        for each in read(cancel.RESULTS).records
        if (each["model"], each["embeddings"]) == ("qwen3", embeddings)
    )
    assert set(found) == set(told)
    for way, value in found.items():
        assert told[way] / 3 < value < told[way] * 3, way


def test_the_result_holds_all_and_says_what_the_page_says() -> None:
    source = read(cancel.RESULTS)
    cells = {(each["model"], each["embeddings"]): each["rel_err"] for each in source.records}
    assert set(cells) == {(f, e) for f in cancel.FAMILIES for e in cancel.EMBEDDINGS}
    for (model, embeddings), found in cells.items():
        assert found["exact"] < 1.25 * found["stock"], (model, embeddings)
    assert cells["gemma4_text", 3e-4]["fast"] > 1e4 * cells["gemma4_text", 3e-4]["exact"]
