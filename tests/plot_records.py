"""Made-up records to draw, and reading a figure back. Random numbers, no results of any GPU."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from flashnorm_triton import results
from flashnorm_triton.plots import drawing, sources

HEAD = {
    "schema": 1,
    "gpu": "NVIDIA Made Up",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "transformers": "5.17.0",
    "driver": "580.1",
    "kernel_hash": results.kernel_hash(),
    "date": "2026-01-02T03:04:05Z",
    "copy_tb_s": 4.0,
    "matmul_tflops": 800.0,
}
OLD = {**HEAD, "kernel_hash": "0123456789" * 4}
OTHER_GPU = {**HEAD, "gpu": "AMD Thought Up"}
SHAPES = (
    ("small.qkv", 576, 960),
    ("small.gate_up", 576, 3072),
    ("large.qkv", 2048, 3072),
    ("large.gate_up", 2048, 16384),
)
TOKENS = (1, 4, 16, 256, 4096)
SPEEDUPS = dict(zip(TOKENS, (1.6, 1.25, 1.1, 0.92, 1.01), strict=True))


def cell(shape: tuple[str, int, int], m: int, speedup: float, **changes: Any) -> dict[str, Any]:
    """A timed operation."""
    case, k, n = shape
    us = random.uniform(4.0, 6.0) * (1 + m / 64)
    bare = us * random.uniform(0.8, 0.9)
    record = {
        "case": case,
        "op": "norm_linear",
        "dtype": "bfloat16",
        "m": m,
        "n": n,
        "k": k,
        "plan": {"strategy": "single_pass", "form": "gemv"},
        "us": us,
        "us_q20": us - 0.1,
        "us_q80": us + 0.1,
        "baselines_us": {"gemm_only": bare, "compiled": us * speedup, "stock": 3 * us * speedup},
        "best_unfused": "compiled",
        "floor_us": 3.0,
        "rel_err": 2e-3,
        "rel_err_stock": 2e-3,
        "contract_ok": True,
        "speedup": speedup,
        "speedup_q20": speedup - 0.03,
        "speedup_q80": speedup + 0.02,
        "bound": us * speedup / bare,
    }
    return {**record, **changes}


def cells(shapes: Sequence[tuple[str, int, int]] = SHAPES, **changes: Any) -> list[dict[str, Any]]:
    """Operations of every shape and row count, largest first; ``changes`` are those of M = 16."""
    return [
        cell(shape, m, speedup, **(changes if m == 16 else {}))
        for shape in shapes
        for m, speedup in reversed(SPEEDUPS.items())
    ]


def source(records: Sequence[Any], name: str = "made_up", head: dict[str, Any] = HEAD):
    """A source as it comes from a file; the records must have the documented form."""
    results.validate(head, records)
    return sources.of_results(results.Results(head, tuple(records)), Path(f"{name}.json"))


def drawn(*given: Any) -> dict[str, Figure]:
    """Every figure of sources of one kind."""
    return dict(drawing.figures(given))


def texts(figure: Figure) -> str:
    """All words of a figure."""
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def panels(figure: Figure) -> list[Any]:
    return [ax for ax in figure.axes if ax.get_visible()]


def points(ax: Any, color: str, marker: str = "o") -> dict[float, float]:
    """x -> y of the first line of that colour and marker."""
    for line in ax.get_lines():
        if to_hex(line.get_color()) == color and line.get_marker() == marker:
            return dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
    return {}
