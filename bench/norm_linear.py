"""norm_linear against everything it could be replaced by, at every shape and row count.

Question: on this GPU, how much faster than the best unfused way is the dispatched operation, how
far is it from the bare matmul (the bound of a free norm), and is it as accurate as the stock
module? Every cell is one interleaved run of CUDA-graph replays (``tuning/measure.py``).

    python bench/norm_linear.py [--out FILE] [--shapes ...] [--tokens ...] [--rounds R] [--quick]

Results are written after every cell. Exit: 0 when the numerics contract holds in every cell, 1
when it does not or a cell failed, 2 for bad arguments or no GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from bench import accuracy, report
from bench.shapes import QUICK_TOKENS, SHAPES, TOKENS, Shape, parse_shapes, parse_tokens
from flashnorm_triton import algebra, ops, plans, results, runtime, tables
from flashnorm_triton.tuning import measure

ROOT = Path(__file__).resolve().parents[1]
EPS = 1e-5
DTYPE = torch.bfloat16
# One compile is seconds, so the compiled baseline is measured at these row counts only.
COMPILED_TOKENS = (1, 16, 256, 4096)
UNFUSED = ("stock", "rms_norm+linear", "triton_norm+linear", "compiled")
WARM_TIMEOUT_S = 120
CELL_BUDGET_S = 2.0


class Stock(nn.Module):
    """transformers' LlamaRMSNorm, then ``nn.Linear``: what a patched model replaces."""

    def __init__(self, gain: Tensor, weight: Tensor) -> None:
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        super().__init__()
        n, k = weight.shape
        with torch.device("meta"):
            self.norm = LlamaRMSNorm(k, eps=EPS)
            self.linear = nn.Linear(k, n, bias=False)
        self.norm.weight = nn.Parameter(gain, requires_grad=False)
        self.linear.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class Case:
    """The weights of one shape: as many copies as one row needs to get past the L2 cache."""

    def __init__(
        self, shape: Shape, *, cache_bytes: int, memory_bytes: int, device: str = "cuda"
    ) -> None:
        self.shape = shape
        self.device = torch.device(device)
        self._cache, self._memory = cache_bytes, memory_bytes
        copies = self.copies(1)
        n, k = shape.n, shape.k
        self.gains = [(1 + 0.5 * torch.randn(k, device=device)).to(DTYPE) for _ in range(copies)]
        self.weights = [
            (torch.randn(n, k, device=device) * k**-0.5).to(DTYPE) for _ in range(copies)
        ]
        self.folded = [
            algebra.fold(w, g.float()) for w, g in zip(self.weights, self.gains, strict=True)
        ]
        self.stock = [Stock(g, w) for g, w in zip(self.gains, self.weights, strict=True)]
        self.weight64 = self.weights[0].double()

    def copies(self, m: int) -> int:
        bytes_per_call = 2 * self.shape.k * (self.shape.n + m)
        return measure.copies_past_cache(
            bytes_per_call, cache_bytes=self._cache, memory_bytes=self._memory
        )

    def candidates(self, x: Sequence[Tensor], *, compiled: bool) -> dict[str, Callable]:
        """Ours first; every callable takes the rotation index."""
        linear, rms_norm = nn.functional.linear, nn.functional.rms_norm
        gains, weights, folded, stock = self.gains, self.weights, self.folded, self.stock
        k = self.shape.k
        found: dict[str, Callable[[int], Tensor]] = {
            "ours": lambda i: ops.norm_linear(x[i], folded[i], EPS),
            "ours again": lambda i: ops.norm_linear(x[i], folded[i], EPS),
            "gemm_only": lambda i: linear(x[i], weights[i]),
            "triton_norm+linear": lambda i: linear(ops.rms_norm(x[i], EPS, gains[i]), weights[i]),
            "rms_norm+linear": lambda i: linear(rms_norm(x[i], (k,), gains[i], EPS), weights[i]),
            "stock": lambda i: stock[i](x[i]),
        }
        if compiled:
            torch._dynamo.reset()  # or a shape too many makes it fall back to eager
            call = torch.compile(self._functional, dynamic=False)
            found["compiled"] = lambda i: call(x[i], gains[i], weights[i])
        return found

    def _functional(self, x: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
        parameters = {"norm.weight": gain, "linear.weight": weight}
        return torch.func.functional_call(self.stock[0], parameters, (x,))


def plan_of(shape: Shape, m: int, device: plans.Device) -> dict[str, object]:
    """The plan that the operation chooses for this cell on ``device``."""
    problem = plans.Problem(str(DTYPE).removeprefix("torch."), m, shape.n, shape.k)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return tables.lookup(problem, device, name).as_dict()


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


def identity(shape: Shape, m: int) -> dict[str, Any]:
    """The fields that every record has, measured or not."""
    dtype = str(DTYPE).removeprefix("torch.")
    return {
        "case": shape.case,
        "op": "norm_linear",
        "dtype": dtype,
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
) -> dict[str, Any]:
    """One record. A baseline that fails is named in ``failed``; ours failing raises."""
    shape = case.shape
    record = {**identity(shape, m), "plan": plan_of(shape, m, facts)}
    verdict = accuracy.check(
        lambda rows: ops.norm_linear(rows, case.folded[0], EPS),
        case.stock[0],
        gain=case.gains[0],
        weight64=case.weight64,
        eps=EPS,
        m=m,
        dtype=DTYPE,
    )
    copies = case.copies(m)
    x = [torch.randn(m, shape.k, dtype=DTYPE, device=case.device) for _ in range(copies)]
    candidates = case.candidates(x, compiled=compiled)
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
    shapes: Sequence[Shape],
    tokens: Sequence[int],
    *,
    make_case: Callable[[Shape], Case],
    cell: Callable[[Case, int], dict[str, Any]],
    save: Callable[[list[dict[str, Any]]], None],
    budget_s: float,
    log: report.Log,
) -> tuple[list[dict[str, Any]], bool]:
    """Measure every cell, saving after each; the records and whether the budget sufficed.

    A cell that raises becomes a record with its ``error``, and the sweep goes on.
    """
    records: list[dict[str, Any]] = []
    for shape in report.progress(shapes, "norm_linear"):
        case = None
        for m in tokens:
            if log.seconds > budget_s:
                return records, False
            try:
                case = case or make_case(shape)
                record = cell(case, m)
            except Exception as error:
                record = {**identity(shape, m), "error": f"{type(error).__name__}: {error}"[:2000]}
            records.append(record)
            save(records)
            log(describe(record))
    return records, True


def warm(shapes: Sequence[Shape], tokens: Sequence[int], part: int, parts: int) -> None:
    """Compile every ``parts``-th cell's kernels, so that Triton's disk cache holds them."""
    for shape in shapes:
        weight = torch.randn(shape.n, shape.k, dtype=DTYPE, device="cuda")
        gain = torch.randn(shape.k, dtype=DTYPE, device="cuda")
        for m in tokens[part::parts]:
            x = torch.randn(m, shape.k, dtype=DTYPE, device="cuda")
            ops.norm_linear(x, weight, EPS)
            ops.rms_norm(x, EPS, gain)
    torch.cuda.synchronize()


def warm_in_parallel(argv: Sequence[str], parts: int, log: report.Log) -> None:
    """Run ``warm`` in ``parts`` processes. It only saves time: what fails shows in its cell."""
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, *argv, "--warm", f"{part}/{parts}"],
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


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    log = report.Log()
    if args.jobs > 1:
        warm_in_parallel(argv, args.jobs, log)
    torch.manual_seed(args.seed)
    backend = measure.CudaBackend()
    head = results.header(copy_tb_s=measure.copy_tb_s(), matmul_tflops=measure.matmul_tflops())
    log(f"{head['gpu']}: copy {head['copy_tb_s']:.2f} TB/s, {head['matmul_tflops']:.0f} TFLOP/s")
    path = args.out or (
        ROOT / "bench" / "results" / results.gpu_slug(head["gpu"]) / "norm_linear.json"
    )
    device = torch.cuda.current_device()
    facts = runtime.device_facts(device)
    properties = torch.cuda.get_device_properties(device)

    def make_case(shape: Shape) -> Case:
        return Case(
            shape,
            cache_bytes=properties.L2_cache_size,
            memory_bytes=properties.total_memory // 4,
        )

    def cell(case: Case, m: int) -> dict[str, Any]:
        return measure_cell(
            case,
            m,
            backend=backend,
            rounds=args.rounds,
            compiled=args.compiled and m in COMPILED_TOKENS,
            head=head,
            facts=facts,
        )

    records, complete = sweep(
        args.shapes,
        args.tokens,
        make_case=make_case,
        cell=cell,
        save=lambda records: results.save(path, head, records),
        budget_s=args.budget,
        log=log,
    )
    print(report.operation_table(records), flush=True)
    if not complete:
        log(f"stopped at the budget of {args.budget:.0f} s with {len(records)} cells measured")
    log(f"written: {path}")
    return 1 if not complete or report.contract_failures(records) else 0


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="result file (default: bench/results/<gpu>/)")
    parser.add_argument("--shapes", nargs="+", help="names of bench/shapes.py, or KxN")
    parser.add_argument("--tokens", nargs="+", help="row counts M")
    parser.add_argument("--rounds", type=int, help="timed rounds a cell (default 21)")
    parser.add_argument("--quick", action="store_true", help="few row counts, nothing compiled")
    parser.add_argument("--no-compiled", dest="compiled", action="store_false")
    parser.add_argument("--jobs", type=int, default=6, help="processes that compile kernels first")
    parser.add_argument("--budget", type=float, default=480, help="seconds, then stop (480)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    try:
        args.shapes = parse_shapes(args.shapes) if args.shapes else SHAPES
        default = QUICK_TOKENS if args.quick else TOKENS
        args.tokens = parse_tokens(args.tokens) if args.tokens else default
    except ValueError as error:
        parser.error(str(error))
    if args.quick:
        args.compiled = False
    if args.rounds is None:
        args.rounds = measure.MIN_ROUNDS if args.quick else 21
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1")
    return args


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    # A plan that gave way would be timed under the name of the plan that was chosen.
    warnings.filterwarnings("error", message="flashnorm_triton", category=RuntimeWarning)
    try:
        measure.require_gpu()
    except measure.NoGpuError as error:
        print(f"norm_linear: {error}", file=sys.stderr)
        return 2
    with torch.no_grad():
        if args.warm:
            part, parts = args.warm.split("/")
            warm(args.shapes, args.tokens, int(part), int(parts))
            return 0
        return run(args, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
