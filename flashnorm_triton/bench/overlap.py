"""Where does it pay to run the matmul and the row statistics beside each other?

Question, as in the paper's table of its first implementation on a T4 (FlashNorm, arXiv 2407.09577):
for norm → linear of 576→960 and 4096→4096 and 1 to 8192 tokens, how long do matmul, statistics and
scale take one after the other, and how long with the first two on two streams? Beside them: the
stock modules, F.rms_norm and linear, the one-launch norm and linear, what ``norm_linear`` runs
here, and the matmul alone. bf16, fp32, and bf16 with LayerNorm, bias and GELU, where the scale's
launch does what else follows the linear.

    python -m flashnorm_triton.bench.overlap [--tokens ...] [--rounds R] [--budget S] [--out FILE]

Interleaved CUDA-graph replays, weights rotated past L2, medians. Exit: 0 when every cell was
measured and keeps the numerics contract, 1 otherwise, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashnorm_triton import algebra, launch, ops, runtime, tables
from flashnorm_triton.bench import accuracy, report, resuming, running
from flashnorm_triton.bench.cases import EPS, Stock
from flashnorm_triton.bench.norm_linear import floor_us
from flashnorm_triton.bench.shapes import TOKENS, Shape, parse_tokens
from flashnorm_triton.launch.overlap import Overlap, product_of
from flashnorm_triton.plans import OVERLAP, UNFUSED, Plan, Problem
from flashnorm_triton.tuning import measure, validate

SHAPES = (Shape("paper.576", 576, 960), Shape("paper.4096", 4096, 4096))
ACTIVATION = "gelu_tanh"
LEAST_FINISHED = 64  # tokens from which on the cells with LayerNorm and GELU are measured
HOST_TOKENS = (1, 512)
CELL_BUDGET_S = 0.35
# The ways that need no second stream and no fused kernel: what overlap has to beat.
OTHERS = ("sequential", "stock", "rms_norm+linear", "unfused")


@dataclass(frozen=True)
class Cell:
    """One row of the table: a shape, a dtype, the tokens; ``finished``: LayerNorm, bias, GELU."""

    shape: Shape
    dtype: str
    finished: bool
    m: int

    @property
    def problem(self) -> Problem:
        shape, more = self.shape, {}
        if self.finished:
            more = {"has_bias": True, "centred": True, "activation": ACTIVATION}
        return Problem(self.dtype, self.m, shape.n, shape.k, **more)

    @property
    def name(self) -> str:
        return " ".join([self.shape.label, self.dtype, self.problem.epilogue, f"M={self.m}"])


def cells(tokens: Sequence[int]) -> list[Cell]:
    """The table, in the order in which it is measured."""
    kinds = [("bfloat16", False), ("bfloat16", True), ("float32", False)]
    return [
        Cell(shape, dtype, finished, m)
        for dtype, finished in kinds
        for shape in SHAPES
        for m in tokens
        if not finished or m >= LEAST_FINISHED
    ]


def one_after_the_other(problem: Problem, device: int, eps: float = EPS) -> Callable[..., Tensor]:
    """Overlap's own work on one stream: matmul, then statistics and scale."""
    family = Overlap(OVERLAP, problem, problem.k)
    geometry = launch.Geometry(problem.m, problem.k, (problem.m,), device)
    stats, scale = family.stats.bind(geometry, eps), family.scale.bind(geometry)
    product, output = product_of(problem, device), family.scale.output(geometry)

    def run(x: Tensor, w: Tensor, bias: Tensor | None, row_sums: Tensor | None) -> Tensor:
        z = product(x, w)
        return scale(z, *stats(x), bias, row_sums, None, output(x))

    return run


def candidates(
    cell: Cell, x: Sequence[Tensor], weights: Sequence[Tensor], gains: Sequence[Tensor]
) -> dict[str, Callable[[int], Tensor]]:
    """Everything that is timed; each takes the rotation index."""
    functional, k = torch.nn.functional, cell.shape.k
    linear, rms_norm = functional.linear, functional.rms_norm
    sequential = one_after_the_other(cell.problem, x[0].get_device())
    bias = row_sums = None
    more: dict[str, Any] = {}
    if cell.finished:
        bias = torch.randn_like(weights[0][:, 0])
        row_sums = weights[0].double().sum(1).float()
        more = {"activation": ACTIVATION, "row_sums": row_sums}

        def stock(i: int) -> Tensor:
            normed = functional.layer_norm(x[i], (k,), gains[i], None, EPS)
            return functional.gelu(linear(normed, weights[i], bias), approximate="tanh")

        usual = {"stock": stock}
    else:
        modules = [Stock(gain, weight) for gain, weight in zip(gains, weights, strict=True)]
        usual = {
            "stock": lambda i: modules[i](x[i]),
            "rms_norm+linear": lambda i: linear(rms_norm(x[i], (k,), gains[i], EPS), weights[i]),
        }

    def planned(plan: Plan | None) -> Callable[[int], Tensor]:
        return lambda i: ops.norm_linear(x[i], weights[i], EPS, bias, plan=plan, **more)

    return {
        "overlap": planned(OVERLAP),
        "sequential": lambda i: sequential(x[i], weights[i], bias, row_sums),
        **usual,
        "unfused": planned(UNFUSED),
        "chosen": planned(None),
        "gemm_only": lambda i: linear(x[i], weights[i]),
    }


def compare(timings: Mapping[str, measure.Timing]) -> dict[str, Any]:
    """Fields of a record: overlap against everything else of its run."""
    ours = timings["overlap"]
    others = {n: t for n, t in timings.items() if n != "overlap"}
    ahead = {n: measure.ratio(t, ours) for n, t in others.items()}
    rival = min((n for n in OTHERS if n in others), key=lambda n: others[n].us)
    return {
        "plan": OVERLAP.as_dict(),
        "us": ours.us,
        "us_q20": ours.us_q20,
        "us_q80": ours.us_q80,
        "baselines_us": {n: t.us for n, t in others.items()},
        "over": {n: each.median for n, each in ahead.items()},
        "best_other": rival,
        "speedup": ahead[rival].median,
        "speedup_q20": ahead[rival].q20,
        "speedup_q80": ahead[rival].q80,
        "reduction": {n: 1 - 1 / ahead[n].median for n in ("sequential", "stock") if n in ahead},
        "rounds": len(ours.rounds),
    }


def identity(cell: Cell) -> dict[str, Any]:
    """The fields that every record has, measured or not."""
    shape = cell.shape
    return {
        "case": shape.case, "op": "norm_linear", "dtype": cell.dtype, "m": cell.m, "n": shape.n,
        "k": shape.k, "epilogue": cell.problem.epilogue,
    }  # fmt: skip


def check(cell: Cell, weight: Tensor, gain: Tensor) -> dict[str, Any]:
    """Overlap against float64 and the stock modules, as many rows a call."""
    if cell.finished:
        case = validate.make_case(cell.problem, weight, EPS)
        more = {"bias": case.bias, "plan": OVERLAP, **case.epilogue}
        found, _ = validate.check_values(
            case, lambda part: ops.norm_linear(part, weight, EPS, **more)
        )
        told = {"rel_err": found.rel_err, "rel_err_stock": found.rel_err_stock}
        ratio = found.rel_err / found.rel_err_stock
        return {
            **told, "err_ratio": ratio, "max_err_ratio": found.reason, "finite": ratio == ratio,
            "contract_ok": found.reason is None,
        }  # fmt: skip
    folded = algebra.fold(weight, gain.float())
    verdict = accuracy.check(
        lambda rows: ops.norm_linear(rows, folded, EPS, plan=OVERLAP),
        Stock(gain, weight),
        gain=gain,
        weight64=weight.double(),
        eps=EPS,
        m=cell.m,
        dtype=weight.dtype,
    )
    return verdict.fields()


def measure_cell(
    cell: Cell, *, backend: measure.Backend, rounds: int, head: Mapping[str, Any], cache: int
) -> dict[str, Any]:
    """One record; raises what a candidate raises."""
    shape, dtype = cell.shape, getattr(torch, cell.dtype)
    size = dtype.itemsize
    copies = measure.copies_past_cache(
        size * shape.k * (shape.n + cell.m), cache_bytes=cache, memory_bytes=1 << 35
    )
    weights = [
        (torch.randn(shape.n, shape.k, device="cuda") * shape.k**-0.5).to(dtype)
        for _ in range(copies)
    ]
    gains = [(1 + 0.5 * torch.randn(shape.k, device="cuda")).to(dtype) for _ in range(copies)]
    x = [torch.randn(cell.m, shape.k, device="cuda").to(dtype) for _ in range(copies)]
    timed = candidates(cell, x, weights, gains)
    replays = {
        name: measure.prepare(name, fn, rotations=copies, backend=backend)
        for name, fn in timed.items()
    }
    timings = measure.interleave(
        replays, rounds=rounds, min_rounds=5, budget_s=CELL_BUDGET_S, backend=backend
    )
    facts = runtime.device_facts(torch.cuda.current_device())
    chosen = tables.lookup(cell.problem, facts, head["gpu"])
    record = {**identity(cell), **compare(timings), **check(cell, weights[0], gains[0])}
    record["chosen"] = chosen.as_dict()
    record["floor_us"] = floor_us(shape, cell.m, head["copy_tb_s"], head["matmul_tflops"])
    record["rotations"] = copies
    if cell.m in HOST_TOKENS and cell.dtype == "bfloat16" and not cell.finished:
        record["host_us"] = {
            name: measure.host_us(lambda fn=timed[name]: fn(0), calls=100, repeats=5)
            for name in ("overlap", "unfused", "chosen", "stock")
        }
    return record


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """µs of every way, and overlap against them, a block a shape and dtype."""
    good = report.measured(records)
    names = ["overlap", *OTHERS, "chosen", "gemm_only"]
    lines: list[str] = []
    for kind in dict.fromkeys((r["k"], r["n"], r["dtype"], r["epilogue"]) for r in good):
        k, n, dtype, epilogue = kind
        lines += ["", f"{k}→{n} {dtype} {epilogue}, µs a call".replace(" ,", ",")]
        lines.append(f"{'M':>6}" + "".join(f"{name:>17}" for name in names) + "   vs seq.  vs best")
        for r in good:
            if (r["k"], r["n"], r["dtype"], r["epilogue"]) == kind:
                us = {"overlap": r["us"], **r["baselines_us"]}
                row = "".join(f"{us[n]:>17.2f}" if n in us else f"{'-':>17}" for n in names)
                lines.append(
                    f"{r['m']:>6}{row}{r['over']['sequential']:>10.2f}{r['speedup']:>9.2f}"
                )
    return "\n".join([*lines, "", verdict(good)])


def verdict(records: Sequence[Mapping[str, Any]]) -> str:
    """Where it pays and where it loses, in words."""
    pays = [r for r in records if r["speedup_q20"] > 1]
    loses = [r for r in records if r["speedup_q80"] < 1]
    lines = [
        f"faster than every way without a second stream in {len(pays)} of {len(records)} cells, "
        f"slower than the best of them in {len(loses)}"
    ]
    for kind in dict.fromkeys((r["k"], r["n"], r["dtype"], r["epilogue"]) for r in records):
        mine = [r for r in records if (r["k"], r["n"], r["dtype"], r["epilogue"]) == kind]
        name = f"{kind[0]}→{kind[1]} {kind[2]} {kind[3]}".strip()
        won = [str(r["m"]) for r in mine if r in pays]
        best = max(mine, key=lambda r: r["speedup"])
        over = report.geomean([r["over"]["sequential"] for r in mine])
        stock = report.geomean([r["over"]["stock"] for r in mine])
        lines.append(
            f"  {name}: pays at M = {', '.join(won) or 'none'}; best {best['speedup']:.2f}x at M = "
            f"{best['m']}; {over:.2f}x the sequence and {stock:.2f}x stock (geometric means)"
        )
    ahead = [r for r in records if r["over"]["chosen"] > 1.02]
    lines.append(f"  faster than the plan in use by 2 % in {len(ahead)} cells")
    lines += [f"    {r['k']}→{r['n']} {r['dtype']} {r['epilogue']} M={r['m']}: "
              f"{r['over']['chosen']:.2f}x" for r in ahead]  # fmt: skip
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    log = report.Log()
    torch.manual_seed(0)
    backend = measure.CudaBackend()
    head = running.header()
    path = running.result_file(args.out, head["gpu"], "overlap.json")
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    kept = resuming.begin(path, head, {"rounds": args.rounds}, resume=args.resume, log=log)
    todo = [cell for cell in cells(args.tokens) if not kept.has(**identity(cell))]
    for cell in report.progress(todo, "overlap"):
        if log.seconds > args.budget:
            break
        try:
            record = measure_cell(
                cell, backend=backend, rounds=args.rounds, head=kept.head, cache=cache
            )
            log(f"{cell.name}: {record['us']:.2f} µs, {record['speedup']:.2f}x")
        except Exception as error:
            record = {**identity(cell), "error": f"{type(error).__name__}: {error}"[:1000]}
            log(f"{cell.name}: {record['error']}")
        kept.save([record])
    records = kept.records
    report.say(table(records))
    failed = report.contract_failures(records)
    report.say("\n".join(failed) or "the numerics contract holds in every cell")
    stopped = None
    if len(kept.new) < len(todo):
        stopped = (
            f"stopped at the budget of {args.budget:.0f} s: {len(kept.new)} of {len(todo)} cells"
        )
    return running.ended(log, path, failed=bool(failed), stopped=stopped)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = running.parser(__doc__, resume=True)
    parser.add_argument("--tokens", nargs="+", default=[str(m) for m in TOKENS], help="rows M")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds a cell (15)")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds (60)")
    args = parser.parse_args(argv)
    try:
        args.tokens = parse_tokens(args.tokens)
    except ValueError as error:
        parser.error(str(error))
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1")
    return args


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    return running.on_gpu("overlap", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
