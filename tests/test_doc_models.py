"""docs/measured.md: its parts on whole models, made of records as the benches write them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from plot_records import HEAD

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.doc_pages import models
from bench.doc_pages.sources import RESULTS, Source
from flashnorm_triton import results


def source(*records: dict[str, Any]) -> Source:
    """A file of these records, which must have the documented form."""
    results.validate(HEAD, records)
    return Source(RESULTS / "made_up" / "x.json", HEAD, records)


STEP = {"model": "m", "batch": 8, "tokens": 512, "dtype": "bfloat16"}


def test_steps() -> None:
    text = models.steps(
        source(
            {**STEP, "mode": "graph", "variant": "block", "ms": 0.919, "tokens_per_s": 8705.1,
             "launches": 1149, "fraction_of_bandwidth": 0.636,
             "speedups": {"graph": 2.417, "max-autotune": 0.9}},
            {**STEP, "mode": "reduce-overhead", "variant": "norm", "error": "no end"},
        )
    )  # fmt: skip
    assert "bfloat16, 512 tokens" in text
    assert "| stock graph / this | stock autotuned / this |" in text
    assert "| m | 8 | block, graph | 0.92 | 8,705 | 1,149 | 64 % | 2.42 | 0.90 |" in text
    assert "| m | 8 | norm, compiled | no end |  |  |  |  |  |" in text


def test_the_ladder() -> None:
    op = {"level": "op", "model": "m", "dtype": "bfloat16", "case": "m.qkv", "launches": 1}
    whole = {"level": "decode", "model": "m", "dtype": "bfloat16"}
    text = models.ablation(
        source(
            {**op, "rung": "stock", "m": 4096, "us": 9.0, "speedup": 1.0},
            {**op, "rung": "fused", "m": 4096, "us": 3.0, "speedup": 3.004},
            {**whole, "rung": "stock", "ms": 2.0, "launches": 812, "speedup": 1.0},
            {**whole, "rung": "fused", "error": "off"},
        )
    )
    assert "| rung | qkv, M=4,096 | decode |" in text
    assert "| `stock` | 1.00 | 1.00 (812 kernels) |" in text
    assert "| `fused` | 3.00 | – |" in text


def test_the_norms_share() -> None:
    kind = {**STEP, "mode": "eager", "variant": "stock", "quantization": "none"}
    text = models.profile(
        source(
            {**kind, "ms": 11.0, "launches": 679, "norms": 33, "norms_launched": 33,
             "norm_launches": 198, "norm_ms": 0.3, "norm_share": 0.123, "groups": [],
             "norm_wall_share": 0.246},
            {**kind, "quantization": "int4", "error": "Unavailable: no torchao"},
        )
    )  # fmt: skip
    assert (
        "| m | bfloat16 | stock, eager | 11.00 | 679 | 33 | 198 | 12.3 % "
        "(of the step, gaps included: 24.6 %) |" in text
    )
    assert "| m | int4 | stock, eager | Unavailable: no torchao |" in text


def test_wins_and_losses_of_the_papers_cells() -> None:
    cell = {
        "table": "10", "gpu_paper": "H100", "case": "c", "m": 4096, "k": 576, "n": 960,
        "paper_us": {"unfused": 5.0, "fused": 4.0, "other": 3.0}, "paper_reduction": 0.2,
        "paper_reductions": {"unfused": 0.2, "other": -0.333}, "paper_won": False,
    }  # fmt: skip
    mine = {"us": 2.0, "baselines_us": {"stock": 4.0}, "reduction": 0.5, "best_reduction": -0.012}
    text = models.paper(
        source(
            {**cell, **mine, "won": False},
            {**cell, "m": 1, **mine, "best_reduction": 0.3, "won": True},
            {**cell, "m": 8, "error": "too large"},
        )
    )
    assert "table 10 (H100): 0 of 3 there, 1 of 2 here" in text
    row = "| 10, H100 | 576→960 | 4,096 | +20.0 % | -33.3 % | +50.0 % | -1.2 % | **loses** |"
    assert row in text
    assert "| 8 | +20.0 % | -33.3 % | too large |" in text
