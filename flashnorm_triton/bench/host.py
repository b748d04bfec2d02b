"""What one call costs the host in eager use: norm_linear beside what it replaces.

Question: how many microseconds of CPU time does a call of ``norm_linear`` take (cached plan, output
and launch), against ``F.linear`` alone and against stock norm, then linear? Eager decoding is bound
by this. Small inputs, so that the GPU keeps up and no launch waits for a full queue; the bursts of
all callables of all row counts alternate, for a CPU's clock moves by a third within seconds, and a
figure is the median over bursts. Where the plan is the unfused pair, its second launch is F.linear
itself, and the goal is for what is beside that.

    python -m flashnorm_triton.bench.host [--out FILE] [--tokens ...] [--repeats R]

Exit: 0 when every cell is within the goal, 1 when one is not or failed, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from flashnorm_triton import ops, results, runtime
from flashnorm_triton.bench import report, running
from flashnorm_triton.bench.cases import DTYPE, EPS, Stock
from flashnorm_triton.bench.norm_linear import plan_of
from flashnorm_triton.bench.shapes import SHAPES, Shape, parse_tokens
from flashnorm_triton.tuning import measure

GOAL_US = 12.0
# Their plans differ: one row, some rows, many rows. All of them take the GPU a few microseconds.
TOKENS = (1, 4, 16, 64, 128, 512, 2048)
SHAPE = SHAPES[0]
CALLS = 200
OURS = "norm_linear"
Key = TypeVar("Key")


def inputs(m: int, k: int) -> Tensor:
    """Random x (m, k) on the GPU."""
    return torch.randn(m, k, dtype=DTYPE, device="cuda")


def callables(x: Tensor, shape: Shape) -> dict[str, Callable[[], object]]:
    """Ours first. ``x`` is (M, K); weights and gains are random, on x's device."""
    linear, rms_norm = torch.nn.functional.linear, torch.nn.functional.rms_norm
    weight = torch.randn(shape.n, shape.k, dtype=x.dtype, device=x.device) * shape.k**-0.5
    gain = (1 + 0.5 * torch.randn(shape.k, device=x.device)).to(x.dtype)
    stock = Stock(gain, weight)
    return {
        OURS: lambda: ops.norm_linear(x, weight, EPS),
        "F.linear": lambda: linear(x, weight),
        "rms_norm+linear": lambda: linear(rms_norm(x, (shape.k,), gain, EPS), weight),
        "stock": lambda: stock(x),
        "torch.ops": lambda: torch.ops.flashnorm.norm_linear(x, weight, EPS, None, None),
    }


def bursts(
    calls: Mapping[Key, Callable[[], object]],
    *,
    repeats: int,
    each: int = CALLS,
    synchronize: Callable[[], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Key, measure.Timing]:
    """Host microseconds a call: ``repeats`` rounds in which every callable has one burst.

    The synchronisation between bursts is not counted; the first round is a warm-up and is dropped.
    """
    synchronize = synchronize or torch.cuda.synchronize
    taken: dict[Key, list[float]] = {name: [] for name in calls}
    for number in range(repeats + 1):
        for name, call in calls.items():
            synchronize()
            started = clock()
            for _ in range(each):
                call()
            spent = clock() - started
            if number:
                taken[name].append(spent / each * 1e6)
    synchronize()
    return {name: measure.timing(values) for name, values in taken.items()}


def record_of(
    shape: Shape, m: int, plan: Mapping[str, object], timings: Mapping[str, measure.Timing]
) -> dict[str, Any]:
    """One record: medians by name, ours with its quantiles, and whether it meets the goal.

    ``goal_us`` is for ``host_us_own``: ours, less F.linear where the plan calls that.
    """
    ours = timings[OURS]
    own = ours.us - (timings["F.linear"].us if plan["form"] == "library" else 0.0)
    return {
        "call": OURS,
        "dtype": str(DTYPE).removeprefix("torch."),
        "m": m,
        "n": shape.n,
        "k": shape.k,
        "plan": dict(plan),
        "host_us": {name: timing.us for name, timing in timings.items()},
        "host_us_q20": ours.us_q20,
        "host_us_q80": ours.us_q80,
        "host_us_own": own,
        "goal_us": GOAL_US,
        "goal_met": own <= GOAL_US,
    }


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Microseconds of every callable by row count, and the goal's verdict."""
    good = report.measured(records)
    names = list(dict.fromkeys(name for record in good for name in record["host_us"]))
    lines = ["", f"{'M':>6}  {'plan':<28}" + "".join(f"{name:>17}" for name in names)]
    for record in good:
        plan = f"{record['plan']['strategy']}/{record['plan']['form']}"
        row = "".join(f"{record['host_us'].get(name, float('nan')):>17.2f}" for name in names)
        lines.append(f"{record['m']:>6}  {plan:<28}{row}")
    lines += [f"M={record['m']}: {record['error']}" for record in records if record.get("error")]
    met = sum(record["goal_met"] for record in good)
    lines.append(f"within {GOAL_US:.0f} µs a call: {met} of {len(records)} cells")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    log = report.Log()
    torch.manual_seed(0)
    head = running.header()
    path = running.result_file(args.out, head["gpu"], "host.json")
    facts = runtime.device_facts(torch.cuda.current_device())
    cells: dict[int, dict[str, Callable[[], object]]] = {}
    failed: dict[int, str] = {}
    for m in args.tokens:
        try:
            made = callables(inputs(m, SHAPE.k), SHAPE)
            for call in made.values():
                call()
            cells[m] = made
        except Exception as error:
            failed[m] = f"{type(error).__name__}: {error}"[:2000]
            log(f"M={m}: {failed[m]}")
    calls = {(m, name): call for m, made in cells.items() for name, call in made.items()}
    timings = bursts(calls, repeats=args.repeats, each=CALLS)
    records = []
    for m in args.tokens:
        if m in failed:
            record = {"call": OURS, "dtype": "bfloat16", "m": m, "n": SHAPE.n, "k": SHAPE.k}
            record["error"] = failed[m]
        else:
            of_m = {name: timings[m, name] for name in cells[m]}
            record = record_of(SHAPE, m, plan_of(SHAPE, m, facts), of_m)
            log(f"M={m}: " + ", ".join(f"{k} {v:.2f} µs" for k, v in record["host_us"].items()))
        records.append(record)
    results.save(path, head, records)
    report.say(table(records))
    return running.ended(log, path, failed=not all(record.get("goal_met") for record in records))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = running.parser(__doc__)
    parser.add_argument(
        "--tokens", nargs="+", default=[str(m) for m in TOKENS], help="row counts M"
    )
    parser.add_argument("--repeats", type=int, default=15, help="bursts a callable (15)")
    args = parser.parse_args(argv)
    try:
        args.tokens = parse_tokens(args.tokens)
    except ValueError as error:
        parser.error(str(error))
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: at least 1")
    return args


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    return running.on_gpu("host", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
