"""docs/overlap.md: where two streams pay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.doc_pages.sources import measured

ROWS = (1, 16, 64, 256, 512, 1024, 4096, 8192)
_WAYS = (
    ("gemm_only", "matmul alone"), ("unfused", "norm, matmul"), ("stock", "stock"),
    ("sequential", "one stream"),
)  # fmt: skip


def overlap_tables(records: Sequence[Mapping[str, Any]]) -> str:
    """One table a shape, dtype and epilogue, then where it pays, in words."""
    good = measured(records)
    lines: list[str] = []
    for kind in dict.fromkeys((r["k"], r["n"], r["dtype"], r["epilogue"]) for r in good):
        k, n, dtype, epilogue = kind
        mine = [r for r in good if (r["k"], r["n"], r["dtype"], r["epilogue"]) == kind]
        names = [label for _, label in _WAYS]
        head = ["tokens", *names, "**two streams**", "less than one stream", "less than stock"]
        lines += [f"{k}→{n}, {dtype}{', LayerNorm + bias + GELU' if epilogue else ''}:", ""]
        lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
        for r in mine:
            if r["m"] in ROWS:
                us = [f"{r['baselines_us'][name]:.1f}" for name, _ in _WAYS]
                less = [f"{100 * r['reduction'][name]:.0f} %" for name in ("sequential", "stock")]
                row = [str(r["m"]), *us, f"**{r['us']:.1f}**", *less]
                lines.append("| " + " | ".join(row) + " |")
        lines.append("")
    return "\n".join([*lines, *_words(good)])


def _words(good: Sequence[Mapping[str, Any]]) -> list[str]:
    pays = [r for r in good if r["speedup_q20"] > 1]
    loses = [r for r in good if r["speedup_q80"] < 1]
    ahead = [r for r in good if r["over"]["chosen"] > 1.02]
    cells = ", ".join(_cell(r, r["over"]["chosen"]) for r in ahead) or "none"
    won = ", ".join(_cell(r, r["speedup"]) for r in pays) or "none"
    host = [r["host_us"] for r in good if r.get("host_us")]
    lines = [
        f"Of {len(good)} cells two streams beat every way without a fused kernel in {len(pays)} "
        f"and lose to the best of those in {len(loses)}. They pay at {won}.",
        "",
        f"Against the plan in use they are ahead by more than 2 % at: {cells}.",
    ]
    if host:
        most = max(each["overlap"] - each["unfused"] for each in host)
        lines += [
            "",
            f"A fork and a join cost the host up to {most:.0f} µs a call more than the unfused "
            "pair, in eager use; in a captured graph nothing.",
        ]
    return lines


def _cell(r: Mapping[str, Any], gain: float) -> str:
    after = " LayerNorm + GELU" if r["epilogue"] else ""
    return f"{r['k']}→{r['n']} {r['dtype']}{after} M = {r['m']} ({gain:.2f}x)"
