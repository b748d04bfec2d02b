"""What a decode step spends its time on, and how much of it in norms.

Question, as in the paper's table of the decode step (FlashNorm, arXiv 2407.09577: 33 norms, 24.6 %
of an eager bf16 step of Llama-3.2-1B on an A100): stock, with ``patch(level="norm")`` and with
blocks; eager, in a CUDA graph and compiled; with bf16 weights and with weights alone in int8 and
int4, by whichever library the machine has. Launches come from the profiler's records and are
grouped by what launched them (launch_groups.py); times of a step from interleaved runs without it.

    python -m flashnorm_triton.bench.profile [--models llama-3.2-1b] [--modes eager graph compiled]
        [--quantization none int8 int4] [--quick] [--budget S] [--out FILE]

``norms`` counts the model's modules, ``norms_launched`` those that were seen to run. ``norm_share``
is the share of the kernels' time; ``norm_wall_share``, in eager mode, the paper's measure: events
around each norm, launch gaps included. What cannot be measured here (a library that is absent, a
variant that does not apply) is a record with the reason. Written after every group of contenders.
Exit: 0 when all else is measured, 1 when something failed or the budget ended it, 2 for bad
arguments or no GPU. ``--device cpu --models tiny`` tries the script.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flashnorm_triton.bench import (
    decode,
    ladder_cases,
    ladder_options,
    quantizing,
    report,
    resuming,
    running,
)
from flashnorm_triton.bench.contenders import Contender, Group, speedup
from flashnorm_triton.tuning import measure

MODES = ("eager", "graph", "compiled")
VARIANTS = ("stock", "norm", "block")
NO_BLOCKS = "a block's linears are its own kernels', which take no quantized weights"
EXPECTED = (NO_BLOCKS, "Unavailable: ")
"""How the reasons begin that are the machine's or the model's, and no failures."""


def contenders_of(args: argparse.Namespace, model: str, quantization: str) -> list[Contender]:
    """What is compared with one another: stock first."""
    modes = [mode for mode in args.modes if args.device == "cuda" or mode != "graph"]
    return [
        Contender(
            model,
            variant,
            mode,
            args.batch,
            args.context,
            dtype=ladder_options.dtype_of(args),
            quantization=quantization,
        )
        for variant in args.variants
        for mode in modes
        if variant != "block" or quantization == "none"
    ]


def identity(what: Contender) -> dict[str, Any]:
    """What a record has, measured or not."""
    return {**decode.identity(what), "quantization": what.quantization}


def without_blocks(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The records of blocks of quantized weights, which there are none of."""
    return [
        {**identity(what), "quantization": kind, "error": NO_BLOCKS}
        for model in args.models
        for kind in args.quantization
        for what in contenders_of(args, model, "none")
        if what.level == "block" and kind != "none"
    ]


def batches(
    args: argparse.Namespace, model: str, kept: resuming.Kept
) -> list[list[list[Contender]]]:
    """What is there at the same time: all that memory holds; and in it, what is compared: the
    variants of one quantization, with stock. Without what the file has already."""
    groups = [contenders_of(args, model, kind) for kind in args.quantization]
    groups = [some for some in groups if not all(kept.has(**identity(what)) for what in some)]
    everyone = [what for group in groups for what in group]
    if len(ladder_cases.waves(everyone, args.device)) <= 1:
        return [groups] if groups else []
    return [
        [[what for what in wave if what in group]]
        for group in groups
        for wave in ladder_cases.waves(group, args.device)
    ]


_CELL = ("model", "mode", "variant", "quantization", "batch", "tokens", "dtype")


def _told(kept: resuming.Kept, record: Mapping[str, Any]) -> bool:
    return any(all(r.get(n) == record[n] for n in _CELL) for r in kept.records)


def measure_group(
    live: Any, group: Sequence[Contender], args: argparse.Namespace, log: report.Log
) -> list[dict[str, Any]]:
    """The records of contenders that are timed in turn, each mode beside its own kind."""
    times: dict[Contender, list[float]] = {}
    for mode in dict.fromkeys(what.mode for what in group):
        own = [what for what in group if what.mode == mode]
        ended = log.seconds + args.seconds
        times |= live.times(own, args.rounds, 20, lambda ended=ended: log.seconds > ended)
    profiles = {what: live.ask(what, "profile") for what in live.running(group)}
    records = []
    for what in group:
        record = identity(what)
        if what in live.errors or not times.get(what) or profiles.get(what) is None:
            record["error"] = live.errors.get(what, "no answer")
        else:
            taken = times[what]
            record |= {
                "ms": statistics.median(taken),
                "ms_q20": measure.quantile(taken, 0.2),
                "ms_q80": measure.quantile(taken, 0.8),
                "rounds": len(taken),
                **profiles[what],
            }
            stock = [one for one in group if one.level == "stock" and one.mode == what.mode]
            if stock and times.get(stock[0]):
                record["speedup"] = speedup(times, stock[0], what)
        records.append(record)
    return records


def describe(record: Mapping[str, Any]) -> str:
    """One line of a record."""
    kind = f"{record['variant']} {record['mode']} {record['quantization']}"
    if record.get("error"):
        return f"{kind}: {record['error']}"
    wall = record.get("norm_wall_share")
    return (
        f"{kind}: {record['ms']:.3f} ms, {record['launches']} launches, norms {record['norms']} "
        f"({record['norms_launched']} seen, {record['norm_launches']} launches, "
        f"{_percent(record['norm_share'])} of the kernels' time"
        + (f", {wall:.1%} of the step's)" if wall is not None else ")")
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """A line a record: time, launches, and the share of each group of the kernels' time."""
    names = list(dict.fromkeys(g["group"] for r in report.measured(records) for g in r["groups"]))
    lines = ["", f"{'':>28}{'ms':>9}{'launches':>9}" + "".join(f"{name:>11}" for name in names)]
    for r in records:
        kind = f"{r['variant']} {r['mode']} {r['quantization']}"
        if r.get("error"):
            lines.append(f"{kind:>28}  {r['error']}")
            continue
        busy = sum(group["us"] for group in r["groups"]) or 1.0
        share = {group["group"]: group["us"] / busy for group in r["groups"]}
        cells = "".join(f"{_percent(share.get(name)):>11}" for name in names)
        lines.append(f"{kind:>28}{r['ms']:>9.3f}{r['launches']:>9}{cells}")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    log = report.Log()
    head = running.header(args.device)
    torch.cuda.empty_cache()
    path = running.result_file(args.out, head["gpu"], "profile.json")
    settings = {name: getattr(args, name) for name in ("rounds", "seconds", "device")}
    kept = resuming.begin(path, head, settings, resume=args.resume, log=log)
    stopped = None
    todo = [batch for model in args.models for batch in batches(args, model, kept)]
    for batch in report.progress(todo, "profile"):
        if ladder_options.spent(args, log.seconds):
            stopped = f"stopped at the budget of {args.budget:.0f} s before {batch[0][0].name}"
            break
        everyone = list(dict.fromkeys(what for group in batch for what in group))
        with Group(everyone, args.device, patience=args.patience, log=log) as live:
            for group in batch:
                # What is compared is measured as a whole: all of it is of the same minutes.
                found = measure_group(live, group, args, log)
                for record in found:
                    kept.forget(**{name: record[name] for name in _CELL})
                kept.save(found)
                for record in found:
                    log(describe(record))
    if stopped is None:
        kept.save([r for r in without_blocks(args) if not _told(kept, r)])
    report.say(table(kept.records))
    failed = [r for r in kept.records if r.get("error") and not r["error"].startswith(EXPECTED)]
    return running.ended(log, path, failed=bool(failed), stopped=stopped)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = running.parser(__doc__, trial=True, resume=True)
    ladder_options.add_common(parser)
    ladder_options.add_models(parser)
    parser.add_argument("--modes", nargs="+", choices=MODES)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--quantization", nargs="+", choices=quantizing.KINDS)
    args = parser.parse_args(argv)
    args.modes = args.modes or (["eager", "graph"] if args.quick else list(MODES))
    args.quantization = args.quantization or (["none"] if args.quick else list(quantizing.KINDS))
    ladder_options.check_common(parser, args)
    return args


def main(argv: Sequence[str]) -> int:
    return ladder_options.started("profile", parse(argv), run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
