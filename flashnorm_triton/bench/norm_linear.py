"""norm_linear against everything it could be replaced by, at every shape and row count.

Question: on this GPU, how much faster than the best unfused way is the dispatched operation, how
far is it from the bare matmul (the bound of a free norm), and is it as accurate as the stock
module? Every cell is one interleaved run of CUDA-graph replays (``tuning/measure.py``).

    python -m flashnorm_triton.bench.norm_linear [--shapes ...] [--tokens ...] [--quick] [--out …]
    python -m flashnorm_triton.bench.norm_linear --untuned

bf16 in all cells, then a part of them in fp16 (a file of its own). ``--untuned`` hides the tables:
what the built-in plans alone give. Results are written after every cell, and last the goals, each
with what was reached. Exit: 0 when the numerics contract holds in every cell, 1 when it does not or
a cell failed, 2 for bad arguments or no GPU; a missed goal of speed is printed, and no error.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from flashnorm_triton import ops, plans, runtime, tables
from flashnorm_triton.bench import accuracy, goals, report, resuming, running
from flashnorm_triton.bench.cases import DTYPE, EPS, Case, warm
from flashnorm_triton.bench.shapes import (
    FP16_SHAPES,
    FP16_TOKENS,
    QUICK_TOKENS,
    SHAPES,
    TOKENS,
    Shape,
    parse_shapes,
    parse_tokens,
)
from flashnorm_triton.tuning import measure

MODULE = "flashnorm_triton.bench.norm_linear"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# One compile takes a second or more, so beyond these row counts the compiled baseline is measured
# only as far as the time allows.
COMPILED_TOKENS = (1, 16, 256, 4096)
UNFUSED = (
    "stock", "rms_norm+linear", "triton_norm+linear", "liger_norm+linear",
    "flashinfer_norm+linear", "compiled",
)  # fmt: skip
# What is timed where the question is not the best baseline, but ours.
LIGHT = ("ours", "gemm_only", "triton_norm+linear", "rms_norm+linear")
WARM_TIMEOUT_S = 60
CELL_BUDGET_S = 2.0
_JOBS = max(1, min(12, len(os.sched_getaffinity(0)) - 2))


def plan_of(
    shape: Shape, m: int, device: plans.Device, dtype: torch.dtype = DTYPE
) -> dict[str, object]:
    """The plan that the operation chooses for this cell on ``device``."""
    problem = plans.Problem(_name(dtype), m, shape.n, shape.k)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return tables.lookup(problem, device, name).as_dict()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def floor_us(shape: Shape, m: int, copy_tb_s: float, matmul_tflops: float) -> float:
    """The larger of least bytes over the copy rate and operations over the matmul rate, µs."""
    moved = 2 * (m * shape.k + shape.n * shape.k + m * shape.n)
    return max(moved / copy_tb_s, 2 * m * shape.n * shape.k / matmul_tflops) / 1e6


def compare(timings: dict[str, measure.Timing]) -> dict[str, Any]:
    """Ratios of one cell from its interleaved timings; ``ours`` must be among them."""
    ours = timings["ours"]
    fields: dict[str, Any] = {"us": ours.us, "us_q20": ours.us_q20, "us_q80": ours.us_q80}
    fields["baselines_us"] = {
        name: timing.us for name, timing in timings.items() if not name.startswith("ours")
    }
    unfused = [name for name in UNFUSED if name in timings]
    if unfused:
        best = min(unfused, key=lambda name: timings[name].us)
        speedup = measure.ratio(timings[best], ours)
        fields |= {
            "best_unfused": best,
            "speedup": speedup.median,
            "speedup_q20": speedup.q20,
            "speedup_q80": speedup.q80,
        }
        if "gemm_only" in timings:
            fields["bound"] = measure.ratio(timings[best], timings["gemm_only"]).median
    if "gemm_only" in timings:
        fields["vs_gemm"] = measure.ratio(ours, timings["gemm_only"]).median
    if "ours again" in timings:
        fields["repeat"] = measure.ratio(timings["ours again"], ours).median
    fields["rounds"] = len(ours.rounds)
    return fields


def identity(shape: Shape, m: int, dtype: torch.dtype = DTYPE) -> dict[str, Any]:
    """The fields that every record has, measured or not."""
    return {
        "case": shape.case,
        "op": "norm_linear",
        "dtype": _name(dtype),
        "m": m,
        "n": shape.n,
        "k": shape.k,
    }


def measure_cell(
    case: Case,
    m: int,
    *,
    backend: measure.Backend,
    rounds: int,
    compiled: bool,
    head: dict[str, Any],
    facts: plans.Device,
    light: bool = False,
) -> dict[str, Any]:
    """One record. A baseline that fails is named in ``failed``; ours failing raises.

    ``light``: only the baselines of ``LIGHT``.
    """
    shape, dtype = case.shape, case.dtype
    record = {**identity(shape, m, dtype), "plan": plan_of(shape, m, facts, dtype)}
    verdict = accuracy.check(
        lambda rows: ops.norm_linear(rows, case.folded[0], EPS),
        case.stock[0],
        gain=case.gains[0],
        weight64=case.weight64,
        eps=EPS,
        m=m,
        dtype=dtype,
    )
    copies = case.copies(m)
    x = [torch.randn(m, shape.k, dtype=dtype, device=case.device) for _ in range(copies)]
    candidates = case.candidates(x, compiled=compiled)
    if light:
        candidates = {name: candidates[name] for name in LIGHT}
    replays: dict[str, measure.Replay] = {}
    failed: dict[str, str] = {}
    for name, fn in candidates.items():
        try:
            replays[name] = measure.prepare(name, fn, rotations=copies, backend=backend)
        except measure.CaptureError as error:
            if name == "ours":
                raise
            failed[name] = str(error)[:500]
    timings = measure.interleave(replays, rounds=rounds, budget_s=CELL_BUDGET_S, backend=backend)
    record |= compare(timings)
    record["floor_us"] = floor_us(shape, m, head["copy_tb_s"], head["matmul_tflops"])
    record |= verdict.fields()
    record["rotations"] = copies
    if m == 1 and case.device.type == "cuda":
        record["host_us"] = {
            name: measure.host_us(lambda fn=candidates[name]: fn(0))
            for name in ("ours", "gemm_only", "triton_norm+linear", "stock")
            if name in replays
        }
    if failed:
        record["failed"] = failed
    return record


def sweep(
    cells: Sequence[tuple[Shape, int]],
    *,
    make_case: Callable[[Shape], Case],
    cell: Callable[[Case, int], dict[str, Any]],
    save: Callable[[dict[str, Any]], None],
    budget_s: float,
    log: report.Log,
    dtype: torch.dtype = DTYPE,
) -> bool:
    """Measure every cell and save its record; whether the budget sufficed.

    A cell that raises becomes a record with its ``error``, and the sweep goes on.
    """
    case, shape_of_case = None, None
    for shape, m in report.progress(cells, "norm_linear"):
        if log.seconds > budget_s:
            return False
        try:
            if shape != shape_of_case:
                case = None  # its memory goes before the next one's comes
                case, shape_of_case = make_case(shape), shape
            record = cell(case, m)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"[:2000]
            record = {**identity(shape, m, dtype), "error": why}
        save(record)
        log(describe(record))
    return True


def warm_in_parallel(argv: Sequence[str], parts: int, log: report.Log) -> None:
    """Run ``warm`` in ``parts`` processes. It only saves time: what fails shows in its cell."""
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", MODULE, *argv, "--warm", f"{part}/{parts}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for part in range(parts)
    ]
    deadline = log.seconds + WARM_TIMEOUT_S
    for worker in workers:
        try:
            _, complaint = worker.communicate(timeout=max(0.1, deadline - log.seconds))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.communicate()
            complaint = f"took more than {WARM_TIMEOUT_S} s"
        if worker.returncode:
            lines = (complaint or "").strip().splitlines()
            log(f"a warm-up process failed, going on without it: {lines[-1] if lines else '?'}")
    log(f"kernels compiled by {parts} processes")


def warm_a_part(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """What one of those processes does."""
    part, parts = (int(number) for number in args.warm.split("/"))
    for name in args.dtypes:
        cells = [(shape, m) for shape in args.cells[name][0] for m in args.cells[name][1]]
        warm(cells[part::parts], DTYPES[name], compiled=args.compiled and name == "bf16")
    return 0


def affordable(seconds: float, began: float, done: int, cells: int, budget_s: float) -> bool:
    """Whether the next of ``cells`` cells may take its time: the run, which ``began`` at that
    second and should end at ``budget_s``, is not behind its pace."""
    return seconds - began <= (budget_s - began) * (done + 1) / cells


def result_path(args: argparse.Namespace, gpu: str, dtype: str) -> Path:
    """Where the records of one dtype go: those of bf16, and of the first dtype of ``--out``, under
    the plain name."""
    name = "norm_linear_untuned.json" if args.untuned else "norm_linear.json"
    path = running.result_file(args.out, gpu, name)
    plain = args.dtypes[0] if path == args.out else "bf16"
    return path if dtype == plain else path.with_stem(f"{path.stem}_{dtype}")


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    log = report.Log()
    torch.manual_seed(args.seed)
    head = running.header()
    head["liger_kernel"] = _installed("liger-kernel")
    head["tables"] = os.environ.get("FLASHNORM_TABLES", "on")
    log(f"{head['gpu']}: copy {head['copy_tb_s']:.2f} TB/s, {head['matmul_tflops']:.0f} TFLOP/s")
    files = {name: begin(args, head, name, log) for name in args.dtypes}
    if args.jobs > 1 and any(cells_left(args, name, kept) for name, kept in files.items()):
        warm_in_parallel(argv, args.jobs, log)
    codes = [measure_dtype(args, name, kept, log) for name, kept in files.items()]
    return max(codes)


def begin(
    args: argparse.Namespace, head: dict[str, Any], name: str, log: report.Log
) -> resuming.Kept:
    """The file of one dtype, with what it has where ``--resume`` says so."""
    settings = {
        "rounds": args.rounds,
        "compiled": args.compiled,
        "tables": head["tables"],
        "light": args.untuned or name != "bf16",
    }
    path = result_path(args, head["gpu"], name)
    return resuming.begin(path, head, settings, resume=args.resume, log=log)


def cells_left(args: argparse.Namespace, name: str, kept: resuming.Kept) -> list[tuple[Shape, int]]:
    """The cells of one dtype that its file does not have."""
    shapes, tokens = args.cells[name]
    return [
        (shape, m)
        for shape in shapes
        for m in tokens
        if not kept.has(**identity(shape, m, DTYPES[name]))
    ]


def measure_dtype(args: argparse.Namespace, name: str, kept: resuming.Kept, log: report.Log) -> int:
    """Measure what is left of one dtype, print its tables; its exit code."""
    dtype, light = DTYPES[name], args.untuned or name != "bf16"
    todo = cells_left(args, name, kept)
    backend = measure.CudaBackend()
    facts = runtime.device_facts(torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    began = log.seconds

    def make_case(shape: Shape) -> Case:
        return Case(
            shape,
            cache_bytes=properties.L2_cache_size,
            memory_bytes=properties.total_memory // 4,
            dtype=dtype,
        )

    def cell(case: Case, m: int) -> dict[str, Any]:
        done = len(kept.new)
        paced = affordable(log.seconds, began, done, len(todo), args.compile_budget)
        return measure_cell(
            case,
            m,
            backend=backend,
            rounds=args.rounds,
            compiled=args.compiled and not light and (m in COMPILED_TOKENS or paced),
            head=kept.head,
            facts=facts,
            light=light,
        )

    def save(record: dict[str, Any]) -> None:
        judged = goals.judge([*kept.records, record], asked) if name == "bf16" else None
        kept.save([record], **({} if judged is None else {"goals": judged}))

    asked = goals.UNTUNED if args.untuned else goals.TUNED
    complete = sweep(
        todo, make_case=make_case, cell=cell, save=save, budget_s=args.budget, log=log, dtype=dtype
    )
    records = kept.records
    report.say(f"\n{name}" + report.operation_table(records))
    if name == "bf16":
        report.say(goals.table(goals.judge(records, asked)))
    stopped = None
    if not complete:
        stopped = f"stopped at the budget of {args.budget:.0f} s with {len(records)} cells measured"
    broken = bool(report.contract_failures(records))
    return running.ended(log, kept.path, failed=broken, stopped=stopped)


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def describe(record: dict[str, Any]) -> str:
    """One line of progress for a finished cell."""
    cell = f"{record['case']} M={record['m']}"
    if record.get("error"):
        return f"{cell}: {record['error']}"
    text = f"{cell}: {record['us']:.2f} µs"
    if "speedup" in record:
        text += f", {record['speedup']:.2f}x over {record['best_unfused']}"
    if "vs_gemm" in record:
        text += f", {record['vs_gemm']:.2f} of the bare matmul"
    text += f", error ratio {record['err_ratio']}, contract {record['contract_ok']}"
    return text + (f", failed: {', '.join(record['failed'])}" if "failed" in record else "")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = running.parser(__doc__, resume=True)
    parser.add_argument("--shapes", nargs="+", help="names of shapes.py, or KxN")
    parser.add_argument("--tokens", nargs="+", help="row counts M")
    parser.add_argument("--rounds", type=int, help="timed rounds a cell (default 21)")
    parser.add_argument("--quick", action="store_true", help="few row counts, nothing compiled")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, help="default: bf16, part of it fp16")
    parser.add_argument("--untuned", action="store_true", help="hide the tables (built-in plans)")
    parser.add_argument("--no-compiled", dest="compiled", action="store_false")
    parser.add_argument(
        "--compile-budget",
        type=float,
        default=130,
        metavar="S",
        help=(
            f"compile beyond M = {COMPILED_TOKENS} only while all cells fit this many seconds (130)"
        ),
    )
    parser.add_argument("--jobs", type=int, default=_JOBS, help="processes that compile first")
    parser.add_argument("--budget", type=float, default=480, help="seconds, then stop (480)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    try:
        shapes = parse_shapes(args.shapes) if args.shapes else None
        tokens = parse_tokens(args.tokens) if args.tokens else None
    except ValueError as error:
        parser.error(str(error))
    few = QUICK_TOKENS if args.quick else None
    all_cells = (shapes or SHAPES, tokens or few or TOKENS)
    some = (shapes or FP16_SHAPES, tokens or few or FP16_TOKENS)
    only_fp16 = args.dtype == ["fp16"]
    args.cells = {"bf16": all_cells, "fp16": all_cells if only_fp16 else some}
    args.dtypes = tuple(args.dtype or (("bf16",) if args.quick or args.untuned else DTYPES))
    args.compiled &= not (args.quick or args.untuned)
    if args.rounds is None:
        args.rounds = measure.MIN_ROUNDS if args.quick or args.untuned else 21
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1")
    return args


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    if args.untuned:
        os.environ["FLASHNORM_TABLES"] = "off"
        tables.forget()
    # Processes compile side by side already; pools of their own would only cost their start.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # A plan that gave way would be timed under the name of the plan that was chosen.
    warnings.filterwarnings("error", message="flashnorm_triton", category=RuntimeWarning)
    work = warm_a_part if args.warm else run
    return running.on_gpu("norm_linear", lambda: work(args, argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
