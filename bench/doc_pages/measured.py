"""docs/measured.md: what ships, and the tables of the tries."""

from __future__ import annotations

import math
from statistics import geometric_mean

from bench.doc_pages.sources import ROOT, Source, table

PAGE = ROOT / "docs" / "measured.md"


def ships(operation: Source, fp16: Source, untuned: Source, host: Source, patching: Source) -> str:
    """The kernels that ship: where they stand, and what a call and a patch cost the host."""
    cells = operation.measured
    bare = sum(cell["vs_gemm"] <= 1 for cell in cells)
    worst = math.floor(100 * min(cell["speedup"] for cell in untuned.measured)) / 100
    lines = [
        f"- Of {len(cells)} cells {bare} take no longer than the bare matmul "
        f"({operation.cite(PAGE)}).",
        f"- In float16: {_means(fp16)} ({fp16.cite(PAGE)}).",
        f"- Without a table of the GPU no cell is below {worst:.2f}x ({untuned.cite(PAGE)}).",
    ]
    rows = [
        (
            f"{call['m']:,}",
            call["plan"]["form"],
            *(f"{call['host_us'][name]:.1f}" for name in ("norm_linear", "F.linear", "stock")),
        )
        for call in host.measured
    ]
    k, n = host.measured[0]["k"], host.measured[0]["n"]
    lines.append(f"- Host time of an eager call, {k}→{n}, µs ({host.cite(PAGE)}):\n")
    lines.append(table(("rows", "form", "`norm_linear`", "`F.linear`", "stock modules"), rows))
    told = [
        f"`{run['variant']}` {run['patch_s']:.1f} s and {run['peak_gb'] - run['weights_gb']:.2f} GB"
        for run in patching.measured
    ]
    size = patching.measured[0]["patching"]
    lines.append(
        f"\n- Patching the shape of {size}: time, and memory at the peak beside the weights: "
        f"{'; '.join(told)} ({patching.cite(PAGE)})."
    )
    return "\n".join(lines)


def _means(source: Source) -> str:
    """The geometric mean of the speedups at each row count, and the worst cell."""
    cells = source.measured
    rows = dict.fromkeys(cell["m"] for cell in cells)
    means = [
        f"{geometric_mean([c['speedup'] for c in cells if c['m'] == m]):.2f} at {m:,}" for m in rows
    ]
    layers = len({(cell["k"], cell["n"]) for cell in cells})
    worst = min(cell["speedup"] for cell in cells)
    return f"{', '.join(means)} rows, mean of {layers} layers, worst cell {worst:.2f}"


def soak(source: Source) -> str:
    """How often every kernel family was launched beside other work, and what moved."""
    families = source.measured
    run = [family for family in families if family["launches"]]
    total = sum(family["launches"] for family in run)
    moved = sum(family["mismatches"] for family in run)
    whole = sum(family["goal_met"] for family in run)
    return (
        f"The last run ({source.cite(PAGE)}) ended when its time was up: {len(run)} of "
        f"{len(families)} families with {total:,} launches in all, {whole} of them with the "
        f"{run[0]['goal_launches']:,} that are asked; results with other bits: "
        f"{moved or 'none'}."
    )
