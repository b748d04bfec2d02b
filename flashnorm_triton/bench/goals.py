"""The speed that norm_linear is to reach on an H200, by row count, and whether a run reached it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashnorm_triton.bench.report import geomean, measured


@dataclass(frozen=True)
class Goal:
    """Of all cells with these row counts: the least geometric mean and the least single speedup
    (fastest unfused way / ours), and the most that ours may take of the bare matmul's time, as a
    geometric mean; None where there is no such goal."""

    label: str
    tokens: tuple[int, ...]
    least_mean: float | None
    least_cell: float
    most_of_gemm: float | None = None


TUNED = (
    Goal("1", (1,), 1.48, 1.04, 0.90),
    Goal("2-16", (2, 4, 8, 16), 1.20, 1.00),
    Goal("32-64", (32, 64), 1.13, 1.00),
    Goal("128-512", (128, 256, 512), 1.02, 0.98),
    Goal("1024-8192", (1024, 2048, 4096, 8192), 1.03, 0.98),
)
UNTUNED = tuple(Goal(goal.label, goal.tokens, None, 0.90) for goal in TUNED)


def judge(records: Sequence[Mapping[str, Any]], goals: Sequence[Goal]) -> list[dict[str, Any]]:
    """One row a goal that has cells: what was reached, what was asked, and whether it is met.

    A cell without a speedup (it failed) fails its goal.
    """
    rows = []
    for goal in goals:
        cells = [record for record in records if record["m"] in goal.tokens]
        if not cells:
            continue
        rated = [record for record in measured(cells) if record.get("speedup") is not None]
        row: dict[str, Any] = {"m": goal.label, "cells": len(cells)}
        met = len(rated) == len(cells)
        if rated:
            worst = min(rated, key=lambda record: record["speedup"])
            mean = geomean([record["speedup"] for record in rated])
            row |= {"mean": mean, "worst": worst["speedup"]}
            row["worst_case"] = f"{worst['case']} M={worst['m']}"
            met &= worst["speedup"] >= goal.least_cell
            met &= goal.least_mean is None or mean >= goal.least_mean
            compared = [record["vs_gemm"] for record in rated if record.get("vs_gemm") is not None]
            if compared:
                row |= {
                    "of_gemm": geomean(compared),
                    "cells_over_gemm": sum(r > 1 for r in compared),
                }
            if goal.most_of_gemm is not None:
                met &= bool(compared) and row["of_gemm"] <= goal.most_of_gemm
        asked = {"least_mean": goal.least_mean, "least_cell": goal.least_cell}
        rows.append({**row, **asked, "most_of_gemm": goal.most_of_gemm, "met": met})
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of ``judge``, reached beside asked."""
    lines = ["", f"{'M':>10} {'geomean':>14} {'worst cell':>14} {'of bare matmul':>15}  goal"]
    for row in rows:
        words = [
            _beside(row.get("mean"), row["least_mean"], "≥"),
            _beside(row.get("worst"), row["least_cell"], "≥"),
            _beside(row.get("of_gemm"), row["most_of_gemm"], "≤"),
        ]
        told = "met" if row["met"] else f"MISSED ({row.get('worst_case', 'nothing measured')})"
        if row.get("cells_over_gemm"):
            told += f"; {row['cells_over_gemm']} of {row['cells']} cells over the bare matmul"
        lines.append(f"{row['m']:>10} {words[0]:>14} {words[1]:>14} {words[2]:>15}  {told}")
    lines.append(f"goals met: {sum(row['met'] for row in rows)} of {len(rows)}")
    return "\n".join(lines)


def _beside(got: float | None, asked: float | None, sign: str) -> str:
    text = "-" if got is None else f"{got:.3f}"
    return text if asked is None else f"{text} {sign} {asked:.2f}"
