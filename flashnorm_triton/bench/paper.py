"""The cells of the paper's tables, on this GPU, beside what the paper reports of its own.

Question: where the FlashNorm paper (arXiv 2407.09577) has a time for norm → linear, on a T4, an
A100 or an H100, how does ``norm_linear`` do at the same shape and row count, against the best way
without fusion? Everything of ours is timed from CUDA graphs, in turn: the stock modules,
``F.rms_norm``, this package's one-launch norm, Liger's and FlashInfer's where they are installed,
each with ``F.linear``. The paper's figures (paper_cells.json, with their source) were taken in ways
of its own, the H100's with its own kernel in a graph and the baselines not: its reductions and
these are told side by side, and are not ratios of one another.

    python -m flashnorm_triton.bench.paper [--tables 8 10] [--quick] [--budget S] [--out FILE]

A record a table and cell; a cell that several tables have is measured once. ``reduction`` is the
share of the time of ``F.rms_norm`` and linear that ours saves, as the paper's column is;
``won`` says whether ours beat every baseline of its run. Written after every cell. Exit: 0 when all
is measured and keeps the numerics contract, 1 otherwise, 2 for bad arguments or no GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flashnorm_triton import runtime, tables
from flashnorm_triton.bench import building, ladder_options, norm_linear, report, resuming, running
from flashnorm_triton.bench.cases import Case
from flashnorm_triton.bench.shapes import Shape
from flashnorm_triton.plans import Device, Plan, Problem
from flashnorm_triton.tuning import measure

DATA = Path(__file__).with_name("paper_cells.json")
SAME_KIND = "rms_norm+linear"
"""The baseline of the paper's reductions: the library's norm, then the library's matmul."""
PACKAGES = {"liger_norm+linear": "liger-kernel", "flashinfer_norm+linear": "flashinfer-python"}
QUICK_TABLES = ("10",)
Cell = tuple[int, int, int]


@functools.cache
def data() -> dict[str, Any]:
    """What was found of the paper: its tables, their source and how they were timed."""
    return json.loads(DATA.read_text(encoding="utf-8"))


def tables_of(names: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The operation tables by number, in the order of the file; ValueError for an unknown one."""
    known = {table["table"]: table for table in data()["tables"]}
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ValueError(f"no table {unknown[0]!r} of the paper: use {', '.join(known)}")
    return [table for name, table in known.items() if names is None or name in names]


def identity(table: Mapping[str, Any], row: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """What a record has, measured or not: the cell, and the paper's own figures of it."""
    paper_us = {"unfused": 1e3 * row["unfused_ms"], "fused": 1e3 * row["fused_ms"]}
    reductions = {"unfused": row["reduction_percent"] / 100}
    if "other_ms" in row:
        paper_us["other"] = 1e3 * row["other_ms"]
        reductions["other"] = row["other_reduction_percent"] / 100
    return {
        "table": table["table"],
        "label": table["label"],
        "gpu_paper": table["gpu"],
        "case": f"{row['model'].lower()} {row['k']}→{row['n']}",
        "m": row["m"],
        "k": row["k"],
        "n": row["n"],
        "dtype": dtype,
        "paper_us": paper_us,
        "paper_ways": {way: table[way] for way in ("unfused", "other", "fused") if way in table},
        "paper_reduction": reductions["unfused"],
        "paper_reductions": reductions,
        "paper_won": min(reductions.values()) > 0,
    }


def compared(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Ours beside the baselines of its run: ``reduction`` as the paper has it, ``best_reduction``
    against the fastest of them, and whether it ``won``."""
    baselines = {n: us for n, us in measured["baselines_us"].items() if n != "gemm_only"}
    kept = ("us", "us_q20", "us_q80", "plan", "rel_err", "rel_err_stock", "contract_ok",
            "err_ratio", "max_err_ratio", "finite", "floor_us", "rounds")  # fmt: skip
    best = 1 / measured["speedup"] if measured.get("speedup") else None
    same = baselines.get(SAME_KIND)
    return {
        **{name: measured[name] for name in kept if name in measured},
        "baselines_us": baselines,
        "gemm_us": measured["baselines_us"].get("gemm_only"),
        "reduction": None if same is None else 1 - measured["us"] / same,
        "best_unfused": measured.get("best_unfused"),
        "best_reduction": None if best is None else 1 - best,
        "won": None if best is None else best < 1,
        "failed": absences(measured),
    }


def absences(measured: Mapping[str, Any]) -> dict[str, str]:
    """Why each baseline that has no time has none."""
    failed = dict(measured.get("failed", {}))
    for name, package in PACKAGES.items():
        if name not in measured["baselines_us"] and name not in failed:
            failed[name] = f"{package} is not installed"
    return failed


def sweep(
    chosen: Sequence[Mapping[str, Any]],
    dtype: str,
    cell: Callable[[Cell], Mapping[str, Any]],
    *,
    save: Callable[[list[dict[str, Any]]], None],
    spent: Callable[[], bool],
    log: Callable[[str], None],
    has: Callable[[Mapping[str, Any]], bool] = lambda row: False,
) -> bool:
    """Measure each distinct cell once, and save its records, one for each table that has it;
    whether nothing ended it before. ``has``: whether a record is there already."""
    rows: dict[Cell, list[dict[str, Any]]] = {}
    for table in chosen:
        for row in table["rows"]:
            key = row["k"], row["n"], row["m"]
            rows.setdefault(key, []).append(identity(table, row, dtype))
    for key in report.progress([key for key in rows if not all(map(has, rows[key]))], "paper"):
        if spent():
            return False
        try:
            fields = compared(cell(key))
        except Exception as error:
            fields = {"error": ladder_options.told(error)}
        records = [{**row, **fields} for row in rows[key] if not has(row)]
        save(records)
        log(describe(records[0]))
    return True


def describe(record: Mapping[str, Any]) -> str:
    """One line of a cell."""
    cell = f"{record['k']}→{record['n']} M={record['m']}"
    if record.get("error"):
        return f"{cell}: {record['error']}"
    return (
        f"{cell}: {record['us']:.2f} µs, {record['reduction']:+.1%} of {SAME_KIND}, "
        f"{record['best_reduction']:+.1%} of {record['best_unfused']}"
    )


def table_text(records: Sequence[Mapping[str, Any]]) -> str:
    """Every table's cells, the paper's reduction and ours, and both sides' wins and losses."""
    lines: list[str] = []
    for name in (table["table"] for table in data()["tables"]):
        own = [record for record in records if record["table"] == name]
        if not own:
            continue
        lines += ["", f"table {name} ({own[0]['label']}, {own[0]['gpu_paper']}), time saved"]
        lines.append(f"{'cell':>18} {'paper':>8} {'paper, other':>13} {'ours':>8} {'vs best':>8}")
        for record in own:
            paper = record["paper_reductions"]
            lines.append(
                f"{record['k']}→{record['n']} M={record['m']}".rjust(18)
                + f" {paper['unfused']:>+8.1%} {_percent(paper.get('other')):>13} "
                + f"{_percent(record.get('reduction')):>8} "
                + f"{_percent(record.get('best_reduction')):>8}"
                + (f"  {record['error']}" if record.get("error") else "")
            )
        good = [record for record in own if record.get("won") is not None]
        lines.append(
            f"won: paper {sum(r['paper_won'] for r in own)} of {len(own)}, "
            f"here {sum(r['won'] for r in good)} of {len(good)}"
        )
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def ours(
    chosen: Sequence[Mapping[str, Any]], dtype: str, device: Device, gpu: str
) -> list[tuple[Plan, Problem]]:
    """The plan that the package runs at every cell."""
    cells = {(row["k"], row["n"], row["m"]) for table in chosen for row in table["rows"]}
    problems = [Problem(dtype, m, n, k) for k, n, m in sorted(cells)]
    return [(tables.lookup(problem, device, gpu), problem) for problem in problems]


def run(args: argparse.Namespace) -> int:
    log = report.Log()
    torch.manual_seed(args.seed)
    head = running.header()
    path = running.result_file(args.out, head["gpu"], "paper.json")
    head |= {"paper": data()["paper"], "paper_source": data()["source"]}
    settings = {name: getattr(args, name) for name in ("rounds", "dtype", "seed")}
    kept = resuming.begin(path, head, settings, resume=args.resume, log=log)
    backend = measure.CudaBackend()
    facts = runtime.device_facts(torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    cases: dict[tuple[int, int], Case] = {}

    def cell(key: Cell) -> Mapping[str, Any]:
        k, n, m = key
        if (k, n) not in cases:
            cases.clear()
            cases[k, n] = Case(
                Shape(f"{k}x{n}", k, n),
                cache_bytes=properties.L2_cache_size,
                memory_bytes=properties.total_memory // 4,
                dtype=getattr(torch, running.DTYPES[args.dtype]),
            )
        return norm_linear.measure_cell(
            cases[k, n], m, backend=backend, rounds=args.rounds, compiled=False, head=head,
            facts=facts,
        )  # fmt: skip

    dtype = running.DTYPES[args.dtype]
    chosen = tables_of(args.tables)
    building.compile_plans(ours(chosen, dtype, facts, head["gpu"]), log)
    complete = sweep(
        chosen,
        dtype,
        cell,
        save=kept.save,
        spent=lambda: ladder_options.spent(args, log.seconds),
        log=log,
        has=lambda row: kept.has(table=row["table"], k=row["k"], n=row["n"], m=row["m"]),
    )
    report.say(table_text(kept.records))
    broken = [r for r in kept.records if r.get("error") or not r["contract_ok"]]
    stopped = f"stopped at the budget of {args.budget:.0f} s" if not complete else None
    return running.ended(log, path, failed=bool(broken), stopped=stopped)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = running.parser(__doc__, resume=True)
    ladder_options.add_common(parser)
    parser.add_argument("--tables", nargs="+", help="by number: 2 3 8 9 10 (all; quick 10)")
    parser.add_argument(
        "--dtype", choices=running.DTYPES, default="fp16", help="as the paper's (fp16)"
    )
    args = parser.parse_args(argv)
    args.tables = args.tables or (list(QUICK_TABLES) if args.quick else None)
    try:
        tables_of(args.tables)
    except ValueError as error:
        parser.error(str(error))
    ladder_options.check_common(parser, args)
    return args


def main(argv: Sequence[str]) -> int:
    return ladder_options.started("paper", parse(argv), run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
