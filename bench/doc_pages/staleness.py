"""docs/staleness.md: which instrument saw which planted fault, and runs of the lag detector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.doc_pages.sources import measured

USUAL = ("unit", "perplexity")
_ORDER = (
    "unit", "perplexity", "bits", "float64", "delay", "graph", "lint", "lag", "racecheck",
    "memcheck", "initcheck", "synccheck",
)  # fmt: skip


def faults_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Fault by instrument."""
    from bench.faults import table

    places = {name: place for place, name in enumerate(_ORDER)}
    return table(sorted(records, key=lambda r: places.get(r["instrument"], len(places))))


def missed(records: Sequence[Mapping[str, Any]]) -> str:
    """What one launch and perplexity say of each fault that both pass, and who saw it."""
    cells = {(r["fault"], r["instrument"]): r for r in measured(records)}
    lines = []
    for fault in dict.fromkeys(name for name, _ in cells):
        usual = [cells.get((fault, instrument)) for instrument in USUAL]
        seen = [r for (name, _), r in cells.items() if name == fault and r["caught"]]
        if seen and any(r and r["caught"] is False for r in usual):
            passed = "; ".join(
                f"{r['instrument']}: {'misses it' if r['caught'] is False else 'sees it'} "
                f"({r['detail']})"
                for r in usual
                if r and r["caught"] is not None
            )
            others = [r["instrument"] for r in seen if r["instrument"] not in USUAL]
            lines.append(f"- `{fault}`: {passed}. Seen by {', '.join(others) or 'no other'}.")
    return "\n".join(lines)


def lag_table(records: Sequence[Mapping[str, Any]]) -> str:
    """One row a run of bench/lag.py."""
    head = (
        "model", "mode", "watched", "tokens", "steps × sites", "beyond rounding",
        "a lag would show, logits", "sites", "worst / limit", "KL, 1e-4 nats (stock)", "s",
    )  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for r in records:
        if r.get("error"):
            lines.append(f"| {r['lag']} | {r['mode']} | {r['watched']} | {r['error'][:80]} |")
            continue
        sites = r.get("sites_decidable")
        row = (
            r["lag"], r["mode"], r["watched"], f"{r['tokens']:,}", f"{r['site_steps']:,}",
            r["found"] or "none", f"{100 * r['decidable']:.1f} %",
            "" if sites is None else f"{100 * sites:.1f} %",
            "–" if r["worst"] is None else f"{r['worst']:.2f}",
            "–" if r["kl"] is None else f"{1e4 * r['kl']:.2f} ({1e4 * r['kl_stock']:.2f})",
            f"{r['seconds']:.0f}",
        )  # fmt: skip
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)
