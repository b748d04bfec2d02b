"""docs/overlap.md and docs/staleness.md: their tables are those of the committed result files."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from planted_faults import FAULTS

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import doc_tables, fault_instruments
from flashnorm_triton import results

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "bench" / "results" / "nvidia_h200"
STALENESS = (doc_tables.DOCS / "staleness.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", doc_tables.PAGES)
def test_the_tables_are_those_of_the_results(name: str):
    """After new results: python bench/doc_tables.py."""
    page = (doc_tables.DOCS / name).read_text(encoding="utf-8")
    assert doc_tables.rendered(name, page, FOLDER) == page


def test_every_fault_and_instrument_is_explained():
    for name in (*FAULTS, *fault_instruments.INSTRUMENTS, "lag"):
        assert f"| `{name}` | " in STALENESS or f"| {name} | " in STALENESS, name


def test_instruments_in_the_results_are_explained():
    path = FOLDER / "faults.json"
    if not path.exists():
        pytest.skip("no faults.json yet")
    for record in results.load(path).records:
        for key in ("fault", "instrument"):
            assert re.search(rf"^\| `?{record[key]}`? \| ", STALENESS, re.M), record[key]


def fault(name: str, instrument: str, caught: bool | None, detail: str = "so") -> dict:
    return {
        "fault": name, "instrument": instrument, "caught": caught, "launches": 7,
        "seconds": 1.0, "detail": detail, "false_alarm": False,
    }  # fmt: skip


def test_what_the_usual_checks_miss_is_told_in_their_numbers():
    records = [
        fault("no_wait", "unit", False, "error 1e-3"),
        fault("no_wait", "perplexity", False, "15.878, stock 15.879"),
        fault("no_wait", "lag", True),
        fault("no_wait", "racecheck", None),
        fault("no_fork", "unit", True),
        fault("no_fork", "perplexity", True),
        fault("dropped_slot", "unit", False),
    ]
    text = doc_tables.missed(records)
    assert text.splitlines() == [
        "- `no_wait`: unit: misses it (error 1e-3); perplexity: misses it (15.878, stock 15.879). "
        "Seen by lag."
    ]
    table = doc_tables.faults_table(records)
    assert "| fault | unit | perplexity | lag | racecheck |" in table
    assert "| `no_wait` | missed | missed | **seen** (7) | – |" in table


def test_runs_of_the_lag_detector():
    run = {
        "lag": "six", "mode": "graph", "watched": "sites", "tokens": 4096, "rows": 1, "clean": True,
        "found": None, "site_steps": 106470, "decidable": 1.0, "sites_decidable": 0.999,
        "worst": 0.654, "kl": 2.02e-4, "kl_stock": 2.37e-4, "seconds": 7.6,
    }  # fmt: skip
    text = doc_tables.lag_table([run, {**run, "found": "step 3", "worst": None, "kl": None}])
    first, second = text.splitlines()[2:]
    begin = "| six | graph | sites | 4,096 | 106,470 | none | "
    assert first == begin + "100.0 % | 99.9 % | 0.65 | 2.02 (2.37) | 8 |"
    assert "step 3" in second and "| – | – |" in second


def test_what_is_between_the_marks_is_replaced():
    page = "a\n<!-- overlap -->\nold\n<!-- /overlap -->\nb\n"
    assert doc_tables.put(page, "overlap", "new\n\n") == page.replace("old", "new")
    with pytest.raises(ValueError, match="no <!-- faults -->"):
        doc_tables.put(page, "faults", "x")


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
    text = doc_tables.overlap_tables([record(64, 10.0, host_us=host), record(256, 7.5, "x")])
    assert "| 64 | 5.0 | 9.0 | 20.0 | 12.5 | **10.0** | 20 % | 50 % |" in text
    assert "Of 2 cells two streams beat every way without a fused kernel in 1 and lose" in text
    assert "ahead by more than 2 % at: 576→960 bfloat16 LayerNorm + GELU M = 256 (1.07x)" in text
    assert "up to 15 µs a call more" in text
