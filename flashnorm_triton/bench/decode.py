"""One decode step of whole models, stock and patched, at the same shapes and in every mode.

Question: how much GPU time does a step take, with a static cache of 512 places? Stock transformers
is compiled with "reduce-overhead", and with "max-autotune-no-cudagraphs" and captured in a CUDA
graph; the patched model, at each level of ``patch``, is run in both ways too, and captured without
a compiler ("graph"). Random weights; every contender in a process of its own, timed in turn.

    python -m flashnorm_triton.bench.decode [--models llama-3.2-1b ...] [--batches 1 8] [--out …]

What is worth most comes first, and the file is written after every cell. ``--warm`` only compiles,
which fills the compilers' caches; a run with ``--cached`` after it makes nobody wait for anybody.
A contender whose logits are not those of the stock model gets an ``error`` and no time. Exit: 0
when all is measured, 1 when anything failed, 2 for bad arguments or no GPU. ``--device cpu --models
tiny`` tries the script; such a file says that it is no benchmark and may not go into bench/results.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from flashnorm_triton.bench import contenders, decoders, report, resuming, running
from flashnorm_triton.bench.contenders import Contender, Group
from flashnorm_triton.tuning import measure

LEVELS = ("norm", "block")
NORM_TOO = ("llama-3.2-1b", 1)
# (model, batch) cells that fit a GPU at the same time, in the order of what they are worth.
WAVES: tuple[tuple[tuple[str, int], ...], ...] = (
    (("llama-3.2-1b", 1), ("llama-3.1-8b", 1)),
    (("llama-3.2-1b", 8), ("llama-3.2-1b", 16), ("llama-3.2-1b", 32), ("qwen3-4b", 1),
     ("gemma-3-1b", 1)),
    (("mistral-7b", 1), ("llama-3.1-8b", 16)),
    (("llama-3.1-8b", 8), ("llama-3.1-8b", 32)),
    (("tiny", 1), ("tiny", 2)),
)  # fmt: skip
IN_WAVES = {model for wave in WAVES for model, _ in wave}
# Logits of two ways to round the same step, both in bf16: relative Frobenius distance.
MOST_APART = 0.05
DEFAULTS = {
    "decode": {
        "baselines": ("reduce-overhead", "max-autotune"),
        "modes": ("reduce-overhead", "max-autotune", "graph"),
        "tokens": 512,
    },
    "prefill": {
        "baselines": ("eager", "compiled"),
        "modes": ("eager", "compiled"),
        "tokens": 4096,
    },
}


def cell(model: str, batch: int, args: argparse.Namespace) -> list[Contender]:
    """The contenders of a model at a batch size.

    max-autotune, which takes a minute to compile, and the level below the best are for batch 1
    alone; the latter for the first model alone.
    """
    levels = args.levels
    if levels is LEVELS:
        levels = [level for level in levels if level != "norm" or (model, batch) == NORM_TOO]
    pairs = [("stock", mode) for mode in args.baselines]
    pairs += [(level, mode) for mode in args.modes for level in levels]
    return [
        Contender(model, level, mode, batch, args.tokens, args.task, running.DTYPES[args.dtype])
        for level, mode in pairs
        if mode != "max-autotune" or (batch in args.autotuned and level != "norm")
    ]


def waves(args: argparse.Namespace) -> Iterator[list[list[Contender]]]:
    """Cells that are there at the same time."""
    for wave in WAVES:
        cells = [
            cell(model, batch, args)
            for model, batch in wave
            if model in args.models and batch in args.batches
        ]
        if cells:
            yield cells
    for model in args.models:
        if model not in IN_WAVES:
            yield from ([cell(model, batch, args)] for batch in args.batches)


def identity(what: Contender) -> dict[str, Any]:
    """The fields that the contender's record has, measured or not."""
    return {
        "model": decoders.label(what.model), "mode": what.mode, "variant": what.level,
        "batch": what.batch, "tokens": what.tokens, "dtype": what.dtype,
    }  # fmt: skip


def measure_cell(
    running: Group,
    group: Sequence[Contender],
    args: argparse.Namespace,
    copy_tb_s: float,
    log: report.Log,
) -> list[dict[str, Any]]:
    """The records of contenders that are timed in turn."""
    logits = {what: running.ask(what, "logits") for what in running.running(group)}
    ended = log.seconds + args.seconds
    times = running.times(group, args.rounds, args.steps, lambda: log.seconds > ended)
    facts = {what: running.ask(what, "facts") for what in running.running(group)}
    errors = {what: why for what, why in running.errors.items() if what in group}
    stock = [what for what in group if what.level == "stock"]
    for what in group:
        apart = _apart(logits, what, stock)
        if what not in errors and apart is not None and not apart <= MOST_APART:
            errors[what] = f"its logits are {apart:.3g} from the stock model's"
    records = []
    for what in group:
        record: dict[str, Any] = identity(what)
        if what in errors:
            records.append({**record, "error": errors[what]})
            log(f"{what.name}: {errors[what]}")
            continue
        record |= _speed(times[what], what, facts[what], copy_tb_s)
        record["apart"] = _apart(logits, what, stock)
        rated = [one for one in stock if one not in errors] if what.level != "stock" else []
        record["speedups"] = {one.mode: contenders.speedup(times, one, what) for one in rated}
        records.append(record)
        log(describe(record))
    return records


def _apart(
    logits: dict[Contender, tuple[torch.Tensor, ...]], what: Contender, stock: Sequence[Contender]
) -> float | None:
    """How far logits, or what is written into the cache, are from those of the first stock
    contender that has some."""
    norm = torch.linalg.vector_norm
    for one in stock:
        if one is not what and logits.get(one) is not None and logits.get(what) is not None:
            pairs = zip(logits[what], logits[one], strict=True)
            return max(float(norm(mine - right) / norm(right)) for mine, right in pairs)
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


def waves_left(args: argparse.Namespace, kept: resuming.Kept) -> list[list[list[Contender]]]:
    """The waves without the cells of which the file has every contender; of the others it is to
    forget what it has, for a cell is timed as a whole."""
    left = []
    for wave in waves(args):
        cells = [group for group in wave if not all(kept.has(**identity(w)) for w in group)]
        for what in (what for group in cells for what in group):
            kept.forget(**identity(what))
        left.append(cells)
    return [cells for cells in left if cells]


def run(args: argparse.Namespace) -> int:
    log = report.Log()
    head = running.header(args.device)
    path = running.result_file(args.out, head["gpu"], f"{args.task}.json")
    torch.cuda.empty_cache()
    settings = {"rounds": args.rounds, "steps": args.steps, "seconds": args.seconds}
    kept = resuming.begin(path, head, settings, resume=args.resume, log=log)
    failed, stopped = 0, None
    for cells in report.progress(waves_left(args, kept), args.task):
        everyone = [what for group in cells for what in group]
        if args.budget and log.seconds > args.budget:
            stopped = f"stopped at the budget of {args.budget:.0f} s before {everyone[0].model}"
            break
        with Group(
            everyone, args.device, patience=args.patience, cached=args.cached, log=log
        ) as live:
            if args.warm:
                failed += len(live.errors)
                continue
            for group in cells:
                kept.save(measure_cell(live, group, args, kept.head["copy_tb_s"], log))
    if args.warm:
        return int(failed > 0 or stopped is not None)
    all_measured = len(report.measured(kept.records)) == len(kept.records)
    return running.ended(log, path, failed=not all_measured, stopped=stopped)


def parse(argv: Sequence[str], task: str) -> argparse.Namespace:
    parser = running.parser(__doc__, trial=True, resume=True)
    defaults = DEFAULTS[task]
    named = [name for name in decoders.NAMES if name != "tiny"]
    few = named if task == "decode" else named[:1]
    parser.add_argument(
        "--models", nargs="+", type=running.word(decoders.known), default=few,
        help=f"{', '.join(decoders.NAMES)}, a folder with a config.json, or a hub id",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=running.DTYPES, default="bf16")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 16, 32])
    parser.add_argument(
        "--autotuned", nargs="*", type=int, default=[1],
        help="batches for which max-autotune is compiled, one after the other (1)",
    )  # fmt: skip
    parser.add_argument("--levels", nargs="*", default=LEVELS, help="of patch: norm block auto")
    for name, what in (("baselines", "stock"), ("modes", "patched")):
        parser.add_argument(
            f"--{name}", nargs="+", choices=contenders.MODES, default=defaults[name],
            help=f"how the {what} model is run",
        )  # fmt: skip
    parser.add_argument("--warm", action="store_true", help="compile only")
    parser.add_argument("--cached", action="store_true", help="--warm has been run before")
    parser.add_argument("--tokens", type=int, default=defaults["tokens"], help="cache, or prompt")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20 if task == "decode" else 2)
    parser.add_argument("--seconds", type=float, default=20, help="of timing, a cell (20)")
    parser.add_argument(
        "--patience", type=float, default=300, help="seconds to wait for a wave of contenders (300)"
    )
    parser.add_argument("--budget", type=float, help="seconds after which no wave is started")
    args = parser.parse_args(argv)
    args.task = task
    for name in ("rounds", "steps", "tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: at least 1")
    if args.task == "prefill" and "--batches" not in argv:
        args.batches = [1]
    if not any(True for _ in waves(args)):
        parser.error(f"--models {args.models} --batches {args.batches}: no cell is left")
    if task == "decode" and args.tokens < 8:
        parser.error(f"--tokens {args.tokens}: at least 8, an eighth of which is written")
    running.check_trial(parser, args)
    return args


def main(argv: Sequence[str], task: str = "decode") -> int:
    args = parse(argv, task)
    return running.on_gpu(
        task, lambda: run(args), device=args.device, hint="or try it with --device cpu"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
