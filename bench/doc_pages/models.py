"""docs/measured.md: whole models, the ladder, the norms' share, the paper's cells beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.doc_pages.sources import ROOT, Source, table

PAGE = ROOT / "docs" / "measured.md"
_MODES = {"graph": "graph", "reduce-overhead": "compiled", "max-autotune": "autotuned"}


def steps(source: Source) -> str:
    """Every contender of decode.json or prefill.json: time, launches, and over stock's ways."""
    baselines = list(dict.fromkeys(name for r in source.measured for name in r["speedups"]))
    over = [f"stock {_MODES.get(name, name)} / this" for name in baselines]
    head = ("model", "batch", "", "ms", "tokens/s", "kernels", "of the copy rate", *over)
    rows = []
    for r in source.records:
        kind = f"{r['variant']}, {_MODES.get(r['mode'], r['mode'])}"
        first = (r["model"], f"{r['batch']}", kind)
        if r.get("error"):
            rows.append((*first, r["error"], *[""] * (len(head) - 4)))
            continue
        share = r["fraction_of_bandwidth"]
        rows.append(
            (
                *first, f"{r['ms']:.2f}", f"{r['tokens_per_s']:,.0f}", _count(r["launches"]),
                "" if share is None else f"{100 * share:.0f} %",
                *(_ratio(r["speedups"].get(name)) for name in baselines),
            )
        )  # fmt: skip
    tokens = source.records[0]["tokens"]
    dtypes = ", ".join(dict.fromkeys(r["dtype"] for r in source.records))
    told = f"{source.header['gpu']}, {dtypes}, {tokens:,} tokens ({source.cite(PAGE)})"
    return f"{told}:\n\n{table(head, rows)}"


def ablation(source: Source) -> str:
    """Rungs of the ladder down, cells across: stock / rung, and launches of whole models."""
    parts = []
    for model in dict.fromkeys(r["model"] for r in source.records):
        own = [r for r in source.records if r["model"] == model]
        parts.append(_ladder(model, own))
    return "\n\n".join([f"Stock / rung ({source.cite(PAGE)}).", *parts])


def _ladder(model: str, records: Sequence[Mapping[str, Any]]) -> str:
    cells = list(dict.fromkeys(map(_place, records)))
    found = {(_place(r), r["rung"]): r for r in records}
    rows = []
    for rung in dict.fromkeys(r["rung"] for r in records):
        told = (_rung(found.get((cell, rung))) for cell in cells)
        rows.append((f"`{rung}`", *told))
    return f"{model}:\n\n{table(('rung', *cells), rows)}"


def _place(record: Mapping[str, Any]) -> str:
    if record["level"] == "op":
        return f"{record['case'].rpartition('.')[2]}, M={record['m']:,}"
    return record["level"]


def _rung(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return ""
    if record.get("error"):
        return "–"
    launches = record.get("launches")
    after = f" ({launches} kernels)" if launches and record["level"] != "op" else ""
    return _ratio(record["speedup"]) + after


def profile(source: Source) -> str:
    """Decode steps by what they launch, and the norms' share of them."""
    head = ("model", "weights", "", "ms", "kernels", "norms", "their kernels", "share of the time")
    rows = []
    for r in source.records:
        weights = r["dtype"] if r["quantization"] == "none" else r["quantization"]
        first = (r["model"], weights, f"{r['variant']}, {_MODES.get(r['mode'], r['mode'])}")
        if r.get("error"):
            rows.append((*first, r["error"], "", "", "", ""))
            continue
        share = r["norm_share"]
        wall = r.get("norm_wall_share")
        told = "" if share is None else f"{100 * share:.1f} %"
        told += "" if wall is None else f" (of the step, gaps included: {100 * wall:.1f} %)"
        rows.append(
            (
                *first, f"{r['ms']:.2f}", _count(r["launches"]), _count(r["norms"]),
                _count(r["norm_launches"]), told,
            )
        )  # fmt: skip
    batch, tokens = source.records[0]["batch"], source.records[0]["tokens"]
    told = f"Batch {batch}, static cache of {tokens:,} places ({source.cite(PAGE)})"
    return f"{told}:\n\n{table(head, rows)}"


def paper(source: Source) -> str:
    """Each cell of the paper's tables: the share of time saved there and here; wins counted."""
    head = (
        "table, GPU there", "K→N", "M", "saved there", "against the other baseline", "saved here",
        "against the fastest here", "",
    )  # fmt: skip
    rows = []
    for r in source.records:
        there = r["paper_reductions"]
        first = (
            f"{r['table']}, {r['gpu_paper']}", f"{r['k']}→{r['n']}", f"{r['m']:,}",
            _saved(there["unfused"]), _saved(there.get("other")),
        )  # fmt: skip
        if r.get("error"):
            rows.append((*first, r["error"], "", ""))
            continue
        won = "" if r["won"] is None else "wins" if r["won"] else "**loses**"
        rows.append((*first, _saved(r["reduction"]), _saved(r.get("best_reduction")), won))
    counted = []
    for name in dict.fromkeys(r["table"] for r in source.records):
        own = [r for r in source.records if r["table"] == name]
        here = [r for r in own if not r.get("error") and r["won"] is not None]
        counted.append(
            f"table {name} ({own[0]['gpu_paper']}): {sum(r['paper_won'] for r in own)} of "
            f"{len(own)} there, {sum(r['won'] for r in here)} of {len(here)} here"
        )
    return (
        f"{source.header['gpu']} ({source.cite(PAGE)}). Wins over every baseline of their own run: "
        f"{'; '.join(counted)}.\n\n{table(head, rows)}"
    )


def _saved(share: float | None) -> str:
    return "" if share is None else f"{100 * share:+.1f} %"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
