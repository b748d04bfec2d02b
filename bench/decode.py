"""One decode step of whole models, stock and patched, at the same shapes and in every mode.

Question: how much GPU time does a step take, with a static cache of 512 places? Stock transformers
is compiled with "reduce-overhead", and with "max-autotune-no-cudagraphs" and captured in a CUDA
graph; the patched model, at each level of ``patch``, is run in both ways too, and captured without
a compiler ("graph"). Random weights; every contender in a process of its own, timed in turn.

    python bench/decode.py [--models llama-3.2-1b llama-3.1-8b] [--batches 1 8 16 32] [--out FILE]

A contender whose logits are not those of the stock model gets an ``error`` and no time. Exit: 0
when all is measured, 1 when anything failed, 2 for bad arguments or no GPU. ``--device cpu --models
tiny`` tries the script; such a file says that it is no benchmark and may not go into bench/results.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench import contenders, decoders, report
from bench.contenders import Contender, Group
from flashnorm_triton import results
from flashnorm_triton.tuning import measure

ROOT = Path(__file__).resolve().parents[1]
NO_BENCHMARK = "no GPU (a trial of the script, no benchmark)"
LEVELS = ("norm", "block")
# Logits of two ways to round the same step, both in bf16: relative Frobenius distance.
MOST_APART = 0.05
DEFAULTS = {
    "decode": {"modes": ("reduce-overhead", "max-autotune", "graph"), "tokens": 512},
    "prefill": {"modes": ("eager", "max-autotune"), "tokens": 4096},
}


def groups(args: argparse.Namespace) -> Iterator[list[Contender]]:
    """Contenders that are compared with one another: those of a model, and of all its batches
    unless ``--apart`` leaves the memory to one batch at a time."""
    for model in args.models:
        by_batch = []
        for batch in args.batches:
            found = []
            for mode in args.modes:
                if mode == "max-autotune" and batch not in args.autotuned:
                    continue
                for level in ("stock", *args.levels):
                    found.append(Contender(model, level, mode, batch, args.tokens, args.task))
            by_batch.append(found)
        if args.apart:
            yield from by_batch
        else:
            yield [what for found in by_batch for what in found]


def measure_group(
    group: Sequence[Contender], args: argparse.Namespace, copy_tb_s: float, log: report.Log
) -> list[dict[str, Any]]:
    """The records of contenders that are timed in turn."""
    with Group(group, args.device) as running:
        log(f"{len(running.running)} of {len(group)} contenders of {group[0].model} are ready")
        logits = {what: running.ask(what, "logits") for what in running.running}
        ended = log.seconds + args.seconds
        times = running.times(args.rounds, args.steps, lambda: log.seconds > ended)
        facts = {what: running.ask(what, "facts") for what in running.running}
        errors = dict(running.errors)
    records = []
    for what in group:
        record: dict[str, Any] = {
            "model": what.model, "mode": what.mode, "variant": what.level, "batch": what.batch,
            "tokens": what.tokens, "dtype": "bfloat16",
        }  # fmt: skip
        stock = [one for one in group if (one.batch, one.level) == (what.batch, "stock")]
        if what not in errors:
            apart = _apart(logits, what, stock)
            record["apart"] = apart
            if apart is not None and not apart <= MOST_APART:
                errors[what] = f"its logits are {apart:.3g} from the stock model's"
        if what in errors:
            records.append({**record, "error": errors[what]})
            log(f"{what.name}: {errors[what]}")
            continue
        records.append(record | _speed(times[what], what, facts[what], copy_tb_s))
        against = {}
        for one in stock:
            if what.level != "stock" and one in times and one not in errors:
                against[one.mode] = contenders.speedups(times, one, what)
        records[-1]["speedups"] = against
        log(describe(records[-1]))
    return records


def _apart(
    logits: dict[Contender, torch.Tensor], what: Contender, stock: Sequence[Contender]
) -> float | None:
    """How far logits are from those of the first stock contender that has some."""
    for one in stock:
        if one is not what and logits.get(one) is not None and logits.get(what) is not None:
            off = torch.linalg.vector_norm(logits[what].double() - logits[one].double())
            return float(off / torch.linalg.vector_norm(logits[one].double()))
    return None


def _speed(
    times: Sequence[float], what: Contender, facts: dict[str, Any], copy_tb_s: float
) -> dict[str, Any]:
    ms = statistics.median(times)
    tokens = what.batch * (1 if what.task == "decode" else what.tokens)
    floor_ms = facts["bytes"] / (copy_tb_s * 1e9) if copy_tb_s and what.task == "decode" else None
    return {
        "ms": ms,
        "ms_q20": measure.quantile(times, 0.2),
        "ms_q80": measure.quantile(times, 0.8),
        "tokens_per_s": tokens / ms * 1e3,
        "floor_ms": floor_ms,
        "fraction_of_bandwidth": floor_ms / ms if floor_ms else None,
        "launches": facts["launches"],
        "host_calls": facts["host_calls"],
        "busy_ms": facts.get("busy_ms"),
        "rounds": len(times),
    }


def describe(record: dict[str, Any]) -> str:
    """One line of a measured record."""
    name = f"{record['model']:>13} {record['batch']:>3} {record['variant']:>6} {record['mode']:>15}"
    text = f"{name} {record['ms']:8.3f} ms"
    if record["launches"] is not None:
        text += f" {record['launches']:>4} kernels"
    if record["fraction_of_bandwidth"] is not None:
        text += f" {record['fraction_of_bandwidth']:.2f} of copy"
    for mode, ratio in record["speedups"].items():
        text += f"  {ratio:.2f}x {mode}"
    return text


def run(args: argparse.Namespace) -> int:
    log = report.Log()
    name = f"{args.task}.json"
    if args.device == "cuda":
        head = results.header(copy_tb_s=measure.copy_tb_s(), matmul_tflops=measure.matmul_tflops())
        slug = results.gpu_slug(head["gpu"])
        path = args.out or ROOT / "bench" / "results" / slug / name
        torch.cuda.empty_cache()
    else:
        head = results.header(copy_tb_s=0.0, matmul_tflops=0.0, gpu=NO_BENCHMARK)
        path = args.out
    records: list[dict[str, Any]] = []
    for group in groups(args):
        records += measure_group(group, args, head["copy_tb_s"], log)
        results.save(path, head, records)
    print("\n".join(describe(r) for r in report.measured(records)), flush=True)
    log(f"written: {path}")
    return 1 if len(report.measured(records)) < len(records) else 0


def parse(argv: Sequence[str], task: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = DEFAULTS[task]
    few = ("llama-3.2-1b", "llama-3.1-8b") if task == "decode" else ("llama-3.2-1b",)
    parser.add_argument("--models", nargs="+", choices=decoders.NAMES, default=few)
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument(
        "--autotuned", nargs="*", type=int, default=[1],
        help="batches for which max-autotune is compiled, one after the other (1)",
    )  # fmt: skip
    parser.add_argument("--levels", nargs="*", default=LEVELS, help="of patch: norm block auto")
    parser.add_argument(
        "--modes", nargs="+", choices=contenders.MODES, default=defaults["modes"],
        help="how stock and patched are run",
    )  # fmt: skip
    parser.add_argument("--tokens", type=int, default=defaults["tokens"], help="cache, or prompt")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20 if task == "decode" else 2)
    parser.add_argument("--seconds", type=float, default=20, help="of timing, a group (20)")
    parser.add_argument("--apart", action="store_true", help="one batch at a time: less memory")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="result file (default: bench/results/<gpu>/)")
    args = parser.parse_args(argv)
    args.task = task
    for name in ("rounds", "steps", "tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: at least 1")
    if min(args.batches) < 1:
        parser.error(f"--batches {min(args.batches)}: at least 1")
    if task == "decode" and args.tokens < 8:
        parser.error(f"--tokens {args.tokens}: at least 8, an eighth of which is written")
    if args.device == "cpu":
        if args.out is None:
            parser.error("--device cpu is a trial of the script: say where to write with --out")
        if (ROOT / "bench" / "results").resolve() in args.out.resolve().parents:
            parser.error(f"--out {args.out}: a trial without a GPU does not go into bench/results")
    return args


def main(argv: Sequence[str], task: str = "decode") -> int:
    args = parse(argv, task)
    if args.device == "cuda":
        try:
            measure.require_gpu()
        except measure.NoGpuError as error:
            print(f"{task}: {error}; or try it with --device cpu", file=sys.stderr)
            return 2
    with torch.no_grad():
        return run(args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
