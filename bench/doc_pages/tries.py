"""docs/measured.md: the tables of what was tried, from the files of one day's sweeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from statistics import geometric_mean
from typing import Any

from bench.doc_pages.sources import Source, table

# what the page calls it, the sweep, the variant (or several, by *: the best of them)
Row = tuple[str, int, str]
BARE = "bare library matmul"
FEW_ROWS: tuple[Row, ...] = (
    ("GEMV, copies pipelined through shared memory", 2, "gemv pipelined"),
    ("GEMV, K loop unrolled, loads straight to registers", 2, "gemv direct"),
    ("portable tiles (16 rows, one load of x feeds product and squares)", 1, "tiles shared"),
)
SWAP: tuple[Row, ...] = (
    ("wait for each instruction, then free its slot", 3, "swap in_flight 0"),
    ("keep one instruction in flight, free the slot before", 3, "swap in_flight 1"),
)
MANY_ROWS: tuple[Row, ...] = (
    ("row tiles, squares in the same pass", 3, "rows own"),
    ("row tiles, s from a statistics launch", 3, "rows given"),
    ("plain Triton persistent TMA GEMM (128×256 tiles), s from a statistics launch", 3,
     "scaled_gemm"),
)  # fmt: skip
MORE: tuple[Row, ...] = (
    ("K split in 2, parts in fp32, fixed-order sum", 5, "rows split_k 2"),
    ("K split in 4", 5, "rows split_k 4"),
    ("stream-K", 5, "rows stream_k"),
    ("stream-K, in the last rounds alone", 5, "rows stream_k, last rounds only"),
    ("squares by column 0 of the tiles, s through a flag", 5, "rows, squares by column 0"),
    ("squares by four warps of their own", 5, "rows, squares by separate warps"),
    ("squares by the producer's warps", 5, "rows, squares by the producer's warps"),
    ("plain Triton TMA GEMM, clusters of two programs, s given", 5, "scaled_gemm num_ctas 2"),
    ("row tiles, own squares (the shipped plan of the last two columns)", 5, "rows own"),
    ("row tiles, s given", 5, "rows given"),
    (BARE, 5, BARE),
)
_MORE_SHAPES = ((2048, 3072), (4096, 6144))


def _unfused(record: Mapping[str, Any]) -> float:
    return min(record["unfused_us"], record["torch_norm_us"])


def _mean(source: Source, row: Row, m: int, shapes: Sequence[tuple[int, int]]) -> tuple[float, int]:
    """The geometric mean of best unfused / the variant, and of how many cells; (0, 0) of none."""
    _, sweep, variant = row
    found = []
    for record in source.records:
        here = record["sweep"] == sweep and record["m"] == m
        if here and (not shapes or (record["k"], record["n"]) in shapes):
            times = [us for name, us in record["best_us"].items() if fnmatchcase(name, variant)]
            times = [record["gemm_us"]] if variant == BARE else times
            found += [_unfused(record) / min(times)] if times else []
    return (geometric_mean(found), len(found)) if found else (0.0, 0)


def means(
    rows: Sequence[Row], tokens: Sequence[int], shapes: Sequence[tuple[int, int]] = (),
    head: str = "variant",
) -> Callable[[Source], str]:  # fmt: skip
    """What makes a table of variants by row counts; the best of a column is bold if it wins."""

    def render(source: Source) -> str:
        cells = [[_mean(source, row, m, shapes) for m in tokens] for row in rows]
        variants = [i for i, row in enumerate(rows) if row[2] != BARE]
        best = [max(cells[i][j][0] for i in variants) for j in range(len(tokens))]
        most = max(count for line in cells for _, count in line)
        made = []
        for row, line in zip(rows, cells, strict=True):
            told = [row[0]]
            for (value, count), top in zip(line, best, strict=True):
                text = f"{value:.2f}" if count else ""
                text = f"**{text}**" if value == top > 1.005 and row[2] != BARE else text
                told.append(f"{text} (one cell)" if count == 1 < most else text)
            made.append(told)
        return table((head, *(f"M={m}" for m in tokens)), made)

    return render


few_rows = means(FEW_ROWS, (1, 2, 4, 8))
swap = means(SWAP, (16, 64, 128, 256, 512))
split_k = means(
    [("1", 4, "swap in_flight *"), *((f"{n}", 4, f"swap split_k {n}") for n in (2, 3, 4, 6))],
    (4, 16, 32, 64, 128),
    head="programs that share K",
)
many_rows = means(MANY_ROWS, (256, 512, 1024, 2048, 4096, 8192))
more = means(MORE, (128, 256, 512, 1024, 4096, 8192), _MORE_SHAPES)


def gemv_forms(source: Source) -> str:
    """µs of several rows in a GEMV: the new form, the shipped plan of before, the unfused pair."""
    cells = {(r["k"], r["n"], r["m"]): r["us"] for r in source.records if r["kind"] == "plain"}
    tokens = (2, 4, 8)
    rows = []
    for k, n in dict.fromkeys((k, n) for k, n, _ in cells):
        told = [f"{k}→{n}"]
        for m in tokens:
            us = cells[k, n, m]
            new = min(value for name, value in us.items() if name.startswith("rows"))
            old, unfused = us["table"], us["unfused"]
            parts = [f"{value:.{2 if value < 10 else 1}f}" for value in (new, old, unfused)]
            least = parts.index(min(parts, key=float))
            parts[least] = f"**{parts[least]}**"
            told.append(" / ".join(parts))
        rows.append(told)
    return table(("", *(f"M={m}" for m in tokens)), rows)


def gated_gemv(source: Source) -> str:
    """µs of a gated pair in the GEMV, and of the other ways to it."""
    rows = []
    for r in source.records:
        if r["kind"].startswith("gated"):
            gated = min(us for name, us in r["us"].items() if name.startswith("gated"))
            us = (gated, r["us"]["plain"], r["us"]["fused+torch"], r["us"]["unfused"])
            rows.append((f"{r['k']}→{r['n']}", f"{r['m']}", *(f"{value:.1f}" for value in us)))
    return table(("", "M", "gated", "plain GEMV", "fused, then torch", "unfused"), rows)


def epilogues(source: Source) -> str:
    """The faster chain of launches over the best plan with the epilogue in it."""
    names = {"silu+gated": "gated", "bias, centred+gelu": "LayerNorm + GELU"}
    cells: dict[tuple[str, int, int], dict[int, float]] = {}
    for r in source.records:
        chains = (r["unfused_us"], r.get("fused_norm_then_activation_us", r["unfused_us"]))
        best = min(plan["us"] for plan in r["plans"])
        cells.setdefault((r["epilogue"], r["k"], r["n"]), {})[r["m"]] = min(chains) / best
    tokens = list(dict.fromkeys(m for line in cells.values() for m in line))
    rows = [
        (f"{names[epilogue]}, {k}→{n}", *(f"{line[m]:.2f}" for m in tokens))
        for (epilogue, k, n), line in cells.items()
    ]
    return table(("", *(f"M={m}" for m in tokens)), rows)


_WAYS = ("norm_only", "router_apart", "deferred", "deferred_gate")
_BLOCKS = {"qwen3-30b-a3b": "Qwen3-30B-A3B", "mixtral-8x7b": "Mixtral-8x7B"}


def experts(source: Source) -> str:
    """µs of a mixture of experts in graphs, and what each way saves."""
    graph = [r for r in source.records if r.get("mode") == "graph"]
    eager = [r for r in source.records if r.get("mode") == "eager"]
    tokens = sorted({r["m"] for r in graph})
    rows = []
    for block, name in _BLOCKS.items():
        for loop in ("grouped_mm", "batched_mm"):
            at = {r["m"]: r["us"] for r in graph if (r["block"], r["experts"]) == (block, loop)}
            told = [_experts_cell(at[m]) if m in at else "" for m in tokens]
            rows.append((f"{name}, {loop}", *told))
    saved = {way: _saving(graph, way, "stock") for way in _WAYS}
    worst = max(
        r["us"][way] / r["us"]["norm_only"] - 1
        for r in graph
        for way in ("deferred", "deferred_gate")
    )
    ranks = [r["us"]["stock"] / r["us"]["norm_only"] for r in eager]
    apart = [r["us"]["router_apart"] / r["us"]["norm_only"] for r in graph]
    lines = [
        table(("experts", *(f"M={m:,}" for m in tokens)), rows),
        "",
        f"Of the block's time (geometric mean of {len(graph)} cells) one norm launch saves "
        f"{saved['norm_only']}, the router's norm apart {saved['router_apart']} "
        f"({min(apart):.2f} to {max(apart):.2f} times the time of one norm launch), "
        f"deferring s {saved['deferred']} and {saved['deferred_gate']} in its two forms, which "
        f"cost up to {100 * worst:.0f} % more than the norm launch. With the eager loop over "
        "experts, which waits for the host, one norm launch ranks from "
        f"{min(ranks):.2f} to {max(ranks):.2f} times as fast as stock, noise of the host included.",
        "",
        f"Error over stock's: {_errors(source.records)}.",
    ]
    return "\n".join(lines)


def _experts_cell(us: Mapping[str, float]) -> str:
    deferred = min(us["deferred"], us["deferred_gate"])
    return " / ".join(
        f"{value:.0f}" for value in (us["stock"], us["norm_only"], us["router_apart"], deferred)
    )


def _saving(records: Iterable[Mapping[str, Any]], way: str, base: str) -> str:
    ratio = geometric_mean([r["us"][way] / r["us"][base] for r in records])
    return f"{100 * (1 - ratio):.1f} %"


def _errors(records: Iterable[Mapping[str, Any]]) -> str:
    told = []
    for r in records:
        if "rel_err" in r and r["experts"] == "grouped_mm":
            ours = [
                f"{r['rel_err'][way] / r['rel_err']['stock']:.2f}"
                for way in ("norm_only", "deferred", "deferred_gate")
            ]
            told.append(f"{_BLOCKS[r['block']]} {ours[0]} (deferred: {ours[1]} and {ours[2]})")
    return "; ".join(told)
