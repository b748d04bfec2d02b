"""docs/overlap.md: its tables are those of the committed result files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from planted_faults import FAULTS

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import fault_instruments, overlap_docs

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "bench" / "results" / "nvidia_h200"
PAGE = overlap_docs.PAGE.read_text(encoding="utf-8")


def test_the_tables_are_those_of_the_results():
    """After new results: python bench/overlap_docs.py."""
    assert overlap_docs.rendered(PAGE, FOLDER) == PAGE


def test_every_fault_and_instrument_is_explained():
    for name in (*FAULTS, *fault_instruments.INSTRUMENTS):
        assert f"| `{name}` | " in PAGE or f"| {name} | " in PAGE, name


def test_what_is_between_the_marks_is_replaced():
    page = "a\n<!-- overlap -->\nold\n<!-- /overlap -->\nb\n"
    assert overlap_docs.put(page, "overlap", "new\n\n") == page.replace("old", "new")
    with pytest.raises(ValueError, match="no <!-- faults -->"):
        overlap_docs.put(page, "faults", "x")


def record(m: int, ours: float, epilogue: str = "", **more) -> dict:
    us = {"gemm_only": 5.0, "unfused": 9.0, "stock": 20.0, "sequential": 12.5, "chosen": 8.0}
    return {
        "k": 576, "n": 960, "dtype": "bfloat16", "epilogue": epilogue, "m": m, "us": ours,
        "baselines_us": us, "speedup": 9 / ours, "speedup_q20": 9 / ours, "speedup_q80": 9 / ours,
        "over": {name: value / ours for name, value in us.items()},
        "reduction": {name: 1 - ours / us[name] for name in ("sequential", "stock")}, **more,
    }  # fmt: skip


def test_words_and_rows():
    host = {"overlap": 40.0, "unfused": 25.0}
    text = overlap_docs.overlap_tables([record(64, 10.0, host_us=host), record(256, 7.5, "x")])
    assert "| 64 | 5.0 | 9.0 | 20.0 | 12.5 | **10.0** | 20 % | 50 % |" in text
    assert "Of 2 cells two streams beat every way without a fused kernel in 1 and lose" in text
    assert "ahead by more than 2 % at: 576→960 bfloat16 LayerNorm + GELU M = 256 (1.07x)" in text
    assert "up to 15 µs a call more" in text
