"""What the benches of whole models and of the paper's cells have in common on the command line."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable

from flashnorm_triton.bench import decoders, running
from flashnorm_triton.tuning import measure

HINT = "or try it with --device cpu"
_COUNTS = ("rounds", "batch", "new", "context")


def add_common(parser: argparse.ArgumentParser) -> None:
    """The options of every one of them, beside those of ``running.parser``."""
    parser.add_argument("--budget", type=float, help="seconds after which no cell is begun")
    parser.add_argument("--quick", action="store_true", help="fewer cells and rounds")
    parser.add_argument("--rounds", type=int, help="timed rounds a cell (21; quick 15)")
    parser.add_argument("--seed", type=int, default=0)


def add_models(parser: argparse.ArgumentParser) -> None:
    """The options of those that run whole models."""
    parser.add_argument(
        "--models", nargs="+", type=running.word(decoders.known), default=["llama-3.2-1b"],
        help="named shapes, demo, folders with a config.json, hub ids (llama-3.2-1b)",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=running.DTYPES, default="bf16")
    parser.add_argument("--context", type=int, default=512, help="places of the cache (512)")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a decode step (1)")
    parser.add_argument("--seconds", type=float, default=10, help="of timing, a cell (10)")
    parser.add_argument(
        "--patience", type=float, default=120, help="seconds to wait for models to be ready (120)"
    )


def check_common(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program with a message where a number is none, or a trial would be a result."""
    if args.rounds is None:
        args.rounds = measure.MIN_ROUNDS if args.quick else 21
    for name in _COUNTS:
        value = getattr(args, name, None)
        if value is not None and value < 1:
            parser.error(f"--{name} {value}: at least 1")
    for m in getattr(args, "tokens", None) or ():
        if m < 1:
            parser.error(f"--tokens {m}: at least 1")
    if getattr(args, "context", 16) < 16:
        parser.error(f"--context {args.context}: at least 16 places, an eighth of which is written")
    if args.budget is not None and args.budget <= 0:
        parser.error(f"--budget {args.budget:g}: seconds, more than 0")
    if hasattr(args, "device"):
        running.check_trial(parser, args)


def started(name: str, args: argparse.Namespace, run: Callable[[argparse.Namespace], int]) -> int:
    """The exit code of ``run``, where there is what it needs; 2 and a message elsewhere."""
    device = getattr(args, "device", "cuda")

    def strictly() -> int:
        with warnings.catch_warnings():
            # A plan that gave way would be timed under the name of the plan that was chosen.
            warnings.filterwarnings("error", message="flashnorm_triton", category=RuntimeWarning)
            return run(args)

    return running.on_gpu(name, strictly, device=device, hint=HINT if "device" in args else None)


def spent(args: argparse.Namespace, seconds: float) -> bool:
    """Whether the budget is, so that no further cell is begun."""
    return args.budget is not None and seconds > args.budget


def dtype_of(args: argparse.Namespace) -> str:
    """torch's short name of ``--dtype``."""
    return running.DTYPES[args.dtype]


def told(error: Exception) -> str:
    """What a record says of what failed."""
    return f"{type(error).__name__}: {error}"[:1500]
