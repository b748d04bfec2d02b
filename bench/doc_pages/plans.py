"""docs/strategies.md and docs/tuning.md: which form is the fastest where, and what ships."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from statistics import geometric_mean

from bench.doc_pages.sources import OLDER, ROOT, Source, table
from flashnorm_triton import results

STRATEGIES = ROOT / "docs" / "strategies.md"
CONFIGS = ROOT / "flashnorm_triton" / "configs"


def winners(source: Source) -> str:
    """The form of the plan in use, layer by row count, with its speedup."""
    cells = {(cell["k"], cell["n"], cell["m"]): cell for cell in source.measured}
    layers = list(dict.fromkeys((k, n) for k, n, _ in cells))
    counts = list(dict.fromkeys(m for *_, m in cells))
    rows = [
        (f"{m:,}", *(_told(cells[k, n, m]) if (k, n, m) in cells else "" for k, n in layers))
        for m in counts
    ]
    head = ("rows", *(f"{k}→{n}" for k, n in layers))
    note = "The form in use, and the fastest unfused way over it"
    return f"{note} ({source.cite(STRATEGIES)}).\n\n{table(head, rows)}"


def _told(cell: dict) -> str:
    plan = cell["plan"]
    given = " (s given)" if plan["strategy"] == "stats_then_gemm" else ""
    name = "unfused" if plan["form"] == "library" else plan["form"]
    return f"{name}{given} {cell['speedup']:.2f}"


def shipped() -> str:
    """The shipped tables, one line each."""
    return "\n".join(_table_line(path) for path in sorted(CONFIGS.glob("*.json")))


def _table_line(path: Path) -> str:
    data = json.loads(path.read_text(encoding="utf-8"))
    entries, runs = data["entries"], data["runs"]
    here = results.kernel_hash()
    stale = sum(runs[entry["run"]]["kernel_hash"] != here for entry in entries)
    age = f"; {stale:,} of them are {OLDER}" if stale else ""
    kinds = Counter(
        (entry["plan"]["strategy"], entry["plan"]["form"]) for entry in entries
    ).most_common()
    told = ", ".join(f"{count:,} {strategy}/{form}" for (strategy, form), count in kinds)
    layers = len({(entry["k"], entry["n"]) for entry in entries})
    gain = geometric_mean(entry["baseline_us"] / entry["us"] for entry in entries)
    return (
        f"Shipped for the {data['gpu']} ([{path.name}](../flashnorm_triton/configs/{path.name})): "
        f"{len(entries):,} cells of {layers} layers{age}. In use there: {told}. Over all cells the "
        f"unfused pair took {gain:.2f} times as long (geometric mean)."
    )
