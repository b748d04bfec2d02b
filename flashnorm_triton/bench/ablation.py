"""What each step of the technique gives, on one model: a ladder, every rung in the same run.

Question: of what a patched model gains, how much is due to folding, to one launch a norm, to
packing, to deferring the divide, to overlap, to the single pass, and to whole blocks? The rungs
(rungs.py) as one operation (norm → q, k, v and norm → gate, up), as a decode step in a CUDA graph,
and as eager ``generate``. All rungs of a cell are timed in turn; ``speedup`` is the median of the
rounds' ratios stock / rung. A rung is compared with float64 (operations: the numerics contract) or
with the stock model's logits before it is timed, and gets an ``error`` and no time if it is off.

    python -m flashnorm_triton.bench.ablation [--models llama-3.2-1b] [--levels op decode generate]
        [--tokens 1 16 256 4096] [--quick] [--budget S] [--out FILE]

Where a rung has several plans, those of its strategy that are likeliest are timed, and the best is
the rung; at the other levels it is the best of that same operation here. Written after every cell.
Exit: 0 when all is measured, 1 when anything failed or the budget ended it, 2 for bad arguments or
no GPU. ``--device cpu --models tiny`` tries the script; its file says that it is no benchmark.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flashnorm_triton import plans, runtime
from flashnorm_triton.bench import (
    building,
    decode,
    decoders,
    ladder_cases,
    ladder_options,
    report,
    resuming,
    rungs,
    running,
)
from flashnorm_triton.bench.contenders import Contender, Group
from flashnorm_triton.bench.generation import PROMPT
from flashnorm_triton.plans import Plan, Problem

LEVELS = ("op", "decode", "generate")
TOKENS = (1, 16, 256, 4096)
QUICK_TOKENS = (1, 256)
WHOLE = "a block is whole decoder layers: see the levels decode and generate"


@dataclass
class Run:
    """What the levels of a run share: settings, and the file with the records so far."""

    args: argparse.Namespace
    log: report.Log
    kept: resuming.Kept
    best: dict[tuple[str, Problem], Plan] = field(default_factory=dict)
    refused: building.Refused = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dtype = ladder_options.dtype_of(self.args)

    def add(self, records: Sequence[dict[str, Any]]) -> None:
        """Keep records, on disk too."""
        self.kept.save(records)
        for record in records:
            self.log(describe(record))

    def cases(self, model: str) -> list[ladder_cases.Case]:
        """The operations of a model."""
        return ladder_cases.cases(model, self.dtype)

    def plans_of(self, rung: str, problem: Problem) -> tuple[Plan, ...]:
        """The plans of a rung that may be launched on this GPU, the likeliest first."""
        device = runtime.device_facts(torch.cuda.current_device())
        listed = rungs.plans_of(rung, problem, device, self.kept.head["gpu"])
        return tuple(p for p in listed if building.key(p, problem) not in self.refused)

    def compile(self, models: Sequence[str]) -> None:
        """Compile what the rungs will run, in parallel; what may not be launched is left out."""
        rows = {*self.args.tokens, *rows_of(self.args)}
        wanted = [
            (plan, problem)
            for model in models
            for case in self.cases(model)
            for problem in map(case.problem, sorted(rows))
            for rung in rungs.STRATEGY
            for plan in self.plans_of(rung, problem)
        ]
        self.refused |= building.compile_plans(wanted, self.log)

    @property
    def spent(self) -> bool:
        """Whether no further cell may be begun."""
        return ladder_options.spent(self.args, self.log.seconds)


def op_level(run: Run, model: str) -> bool:
    """Measure every operation of a model at every row count; whether the budget sufficed."""
    args = run.args
    for case in run.cases(model):
        made = None
        for m in report.progress(args.tokens, f"ablation {case.name}"):
            found = {"level": "op", "case": case.name, "m": m, "dtype": case.dtype}
            if all(run.kept.has(rung=rung, **found) for rung in rungs.RUNGS[:-1]):
                continue
            if run.spent:
                return False
            run.kept.forget(**found)
            found |= {"model": decoders.label(model), "n": case.n, "k": case.k}
            try:
                made = made or ladder_cases.Weights(case, args.device)
                cell, best = ladder_cases.measure_cell(made, m, args, run.refused)
            except Exception as error:
                cell = {rung: {"error": ladder_options.told(error)} for rung in rungs.RUNGS}
                best = {}
            cell["block"] = {"error": WHOLE}
            run.best |= {(rung, case.problem(m)): plan for rung, plan in best.items()}
            run.add([{"rung": rung, **found, **cell[rung]} for rung in rungs.RUNGS])
    return True


def forced_plans(run: Run, model: str, rung: str) -> rungs.Forced:
    """The plan of every problem that a model on this rung meets: the best found at the level of
    operations, else the likeliest; none for the rungs that are no strategy.

    Raises ValueError where no kernel of the strategy serves a problem.
    """
    args = run.args
    if rung not in rungs.STRATEGY or args.device != "cuda":
        return ()
    chosen = []
    for case in run.cases(model):
        for problem in map(case.problem, rows_of(args)):
            plan = run.best.get((rung, problem)) or next(iter(run.plans_of(rung, problem)), None)
            if plan is None:
                raise ValueError(
                    f"no kernel of {rung} serves {problem.k}→{problem.n}, M = {problem.m}"
                )
            chosen.append((problem, plan))
    return tuple(chosen)


def rows_of(args: argparse.Namespace) -> list[int]:
    """The row counts, as the tables have them, that whole models meet: a step's, and those of the
    prompts before it, which run on the rung as well."""
    prompt = args.batch * (args.context - args.context // 8)
    return sorted({plans.bucket(m) for m in (args.batch, 1, PROMPT, prompt)})


def model_levels(run: Run, model: str, levels: Sequence[str]) -> bool:
    """Measure a whole model at these levels, in as few waves as memory allows, stock in each;
    whether the budget sufficed."""
    args = run.args
    everyone: list[Contender] = []
    # A level is measured as a whole, so that all of it is of the same minutes.
    levels = [level for level in levels if not _whole(run, model, level)]
    for level in levels:
        run.kept.forget(level=level, model=decoders.label(model))
    for rung in rungs.RUNGS:
        try:
            forced = forced_plans(run, model, rung)
        except ValueError as error:
            run.add([{**identity(args, model, lv, rung), "error": str(error)} for lv in levels])
            continue
        everyone += [contender(args, model, level, rung, forced) for level in levels]
    for number, wave in enumerate(ladder_cases.waves(everyone, args.device)):
        if run.spent:
            return False
        with Group(wave, args.device, patience=args.patience, log=run.log) as live:
            for level in levels:
                cell = [what for what in wave if what.task == level]
                settings = argparse.Namespace(
                    seconds=args.seconds,
                    rounds=args.rounds,
                    steps=20 if level == "decode" else args.new,
                )
                timed = decode.measure_cell(
                    live, cell, settings, run.kept.head["copy_tb_s"], run.log
                )
                records = [of_rung(level, one) for one in timed]
                # Stock is measured in every wave, and told once.
                run.add(records[1 if number else 0 :])
    return True


def _whole(run: Run, model: str, level: str) -> bool:
    """Whether every rung of a level is in the file already."""
    return all(run.kept.has(**identity(run.args, model, level, rung)) for rung in rungs.RUNGS)


def contender(
    args: argparse.Namespace, model: str, level: str, rung: str, forced: rungs.Forced = ()
) -> Contender:
    """A model on a rung, at a level of whole models."""
    dtype = ladder_options.dtype_of(args)
    if level == "generate":
        return Contender(model, rung, "eager", 1, args.new, level, dtype, plans=forced)
    mode = "graph" if args.device == "cuda" else "eager"
    return Contender(model, rung, mode, args.batch, args.context, level, dtype, plans=forced)


def identity(args: argparse.Namespace, model: str, level: str, rung: str) -> dict[str, Any]:
    """What a record of a whole model has, measured or not."""
    told = decode.identity(contender(args, model, level, rung))
    return {"rung": told.pop("variant"), "level": level, **told}


def of_rung(level: str, timed: Mapping[str, Any]) -> dict[str, Any]:
    """A record of the ladder from one of ``decode.measure_cell``."""
    told = ("model", "mode", "batch", "tokens", "dtype")
    record = {"rung": timed["variant"], "level": level, **{name: timed[name] for name in told}}
    if timed.get("error"):
        return {**record, "error": timed["error"]}
    kept = ("ms", "ms_q20", "ms_q80", "launches", "host_calls", "busy_ms", "apart", "rounds")
    record |= {name: timed.get(name) for name in kept}
    record["tokens_per_s"] = record["batch"] * 1e3 / record["ms"]
    stock = 1.0 if record["rung"] == "stock" else None
    return {**record, "speedup": next(iter(timed["speedups"].values()), stock)}


def describe(record: Mapping[str, Any]) -> str:
    """One line of a record."""
    where = f"{record.get('case', record['level'])} {record['rung']}"
    if "m" in record:
        where += f" M={record['m']}"
    if record.get("error"):
        return f"{where}: {record['error']}"
    time = f"{record['us']:.2f} µs" if "us" in record else f"{record['ms']:.3f} ms"
    ratio = "" if record["speedup"] is None else f", {record['speedup']:.2f}x stock"
    return f"{where}: {time}{ratio}, launches {record['launches']}"


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Speedups over stock, a rung a line and a cell a column, a block a model."""
    lines: list[str] = []
    for model in dict.fromkeys(record["model"] for record in records):
        own = [record for record in records if record["model"] == model]
        cells = list(dict.fromkeys(map(_cell, own)))
        found = {(_cell(r), r["rung"]): r.get("speedup") for r in report.measured(own)}
        lines += ["", f"{model}: stock / rung"]
        lines.append(f"{'':>11}" + "".join(f"{cell:>16}" for cell in cells))
        for rung in rungs.RUNGS:
            values = [found.get((cell, rung)) for cell in cells]
            row = "".join(f"{'-' if v is None else format(v, '.2f'):>16}" for v in values)
            lines.append(f"{rung:>11}{row}")
    return "\n".join(lines)


def _cell(record: Mapping[str, Any]) -> str:
    if record["level"] == "op":
        return f"{record['case'].rpartition('.')[2]} M={record['m']}"
    return record["level"]


def run(args: argparse.Namespace) -> int:
    log = report.Log()
    torch.manual_seed(args.seed)
    head = running.header(args.device)
    torch.cuda.empty_cache()
    path = running.result_file(args.out, head["gpu"], "ablation.json")
    shaping = ("rounds", "seconds", "context", "batch", "new", "device")
    settings = {name: getattr(args, name) for name in shaping}
    kept = resuming.begin(path, head, settings, resume=args.resume, log=log)
    state = Run(args, log, kept)
    if args.device == "cuda":
        state.compile(args.models)
    complete = True
    whole = [level for level in args.levels if level != "op"]
    for model in args.models:
        if complete and "op" in args.levels:
            complete = op_level(state, model)
        if complete and whole:
            complete = model_levels(state, model, whole)
    report.say(table(kept.records))
    failed = [r for r in kept.records if r.get("error") and r["error"] != WHOLE]
    stopped = f"stopped at the budget of {args.budget:.0f} s" if not complete else None
    return running.ended(log, path, failed=bool(failed), stopped=stopped)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = running.parser(__doc__, trial=True, resume=True)
    ladder_options.add_common(parser)
    ladder_options.add_models(parser)
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=LEVELS)
    parser.add_argument("--tokens", nargs="+", type=int, help="row counts of the operations")
    parser.add_argument("--new", type=int, default=32, help="tokens that generate makes (32)")
    args = parser.parse_args(argv)
    args.tokens = args.tokens or list(QUICK_TOKENS if args.quick else TOKENS)
    ladder_options.check_common(parser, args)
    if args.new < 4:
        parser.error(f"--new {args.new}: at least 4 tokens, to tell step t from t-1")
    return args


def main(argv: Sequence[str]) -> int:
    return ladder_options.started("ablation", parse(argv), run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
