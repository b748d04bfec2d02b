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


LADDER = ("stock", "fold_only", "weightless", "packed", "deferred", "overlap", "fused")


def rungs() -> list[dict[str, Any]]:
    """A ladder: the operation at two shapes and three row counts, and one model's decode step.

    ``fold_only`` is slower than stock everywhere; blocks are missing at the operation.
    """
    records: list[dict[str, Any]] = []
    for case, k, n in SHAPES[2:]:
        for m in (1, 16, 256):
            stock = random.uniform(10, 20)
            for number, rung in enumerate(LADDER):
                speedup = 0.9 if rung == "fold_only" else 1 + 0.2 * number + random.uniform(0, 0.1)
                us = stock / (1.0 if rung == "stock" else speedup)
                records.append(
                    {"rung": rung, "level": "op", "model": "large", "case": case, "m": m, "n": n,
                     "k": k, "dtype": "bfloat16", "us": us, "us_q20": 0.98 * us,
                     "us_q80": 1.05 * us, "launches": 9 - number, "speedup": stock / us,
                     "plan": None, "chosen": rung == "fused"}
                )  # fmt: skip
            records.append({**records[-1], "rung": "block", "error": "blocks are no operation"})
    for number, rung in enumerate((*LADDER, "block")):
        ms = 2.0 - 0.15 * number
        records.append(
            {"rung": rung, "level": "decode", "model": "large", "mode": "graph", "batch": 1,
             "tokens": 512, "dtype": "bfloat16", "ms": ms, "ms_q20": 0.99 * ms, "ms_q80": 1.02 * ms,
             "launches": 800 - 90 * number, "speedup": 2.0 / ms}
        )  # fmt: skip
    records[-2] = {key: records[-2][key] for key in ("rung", "level", "model", "mode", "batch",
                                                      "tokens", "dtype")}  # fmt: skip
    records[-2]["error"] = "not ready after 35 s"
    return records


def profile(variant: str, mode: str = "graph", quantization: str = "none") -> dict[str, Any]:
    """A profiled step; the patched ones launch no norm, and have more matmul time."""
    patched = variant != "stock"
    groups = [
        ("norm", 0 if patched else 198, 0.0 if patched else random.uniform(300, 400)),
        ("matmul", 97, random.uniform(800, 850) + 60 * patched),
        ("attention", 16, random.uniform(60, 80)),
        ("rotary", 16 if patched else 96, random.uniform(20, 30) if patched else 120.0),
        ("residual", 32, 60.0),
        ("other", 10, 15.0),
    ]
    rows = [{"group": g, "launches": count, "us": us} for g, count, us in groups if count]
    us = sum(row["us"] for row in rows)
    norm_us = 0.0 if patched else rows[0]["us"]
    return {
        "model": "large", "mode": mode, "variant": variant, "quantization": quantization,
        "batch": 1, "tokens": 512, "dtype": "bfloat16", "ms": us / 1e3 + 0.4,
        "launches": sum(row["launches"] for row in rows), "norms": 33,
        "norms_launched": None if patched else 33, "norm_launches": 0 if patched else 198,
        "norm_ms": norm_us / 1e3, "norm_share": norm_us / us, "groups": rows,
    }  # fmt: skip


def paper_cell(m: int, paper: float, ours: float | None, **changes: Any) -> dict[str, Any]:
    """A cell of the paper's table 8; the shares of time saved, the paper's and ours."""
    record = {
        "table": "8", "label": "tab:a", "gpu_paper": "NVIDIA A100", "case": "large 2048→2560",
        "m": m, "k": 2048, "n": 2560, "dtype": "float16",
        "paper_us": {"unfused": 40.0, "fused": 40.0 * (1 - paper)}, "paper_reduction": paper,
        "paper_won": paper > 0,
    }  # fmt: skip
    if ours is None:
        return {**record, "error": "out of memory", **changes}
    measured = {
        "us": 20 * (1 - ours), "baselines_us": {"rms_norm+linear": 20.0}, "reduction": ours,
        "best_reduction": ours - 0.05, "won": ours > 0.05,
    }  # fmt: skip
    return {**record, **measured, **changes}
