"""How every benchmark begins and ends: its options, its file, its header, its need of a GPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from flashnorm_triton import results
from flashnorm_triton.bench.report import Log
from flashnorm_triton.tuning import measure

T = TypeVar("T")
FOLDER = Path("flashnorm-results")
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
NO_BENCHMARK = "no GPU (a trial of the script, no benchmark)"


def parser(
    description: str | None, *, trial: bool = False, resume: bool = False, folder: Path = FOLDER
) -> argparse.ArgumentParser:
    """A parser with ``--out``; ``trial``: with ``--device cpu`` too, which tries the script;
    ``resume``: with ``--resume`` too (see resuming.py)."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--out", type=Path, help=f"result file (.json), or its folder (default: {folder}/<gpu>/)"
    )
    if resume:
        made.add_argument(
            "--resume", action="store_true",
            help="keep what the file has, where GPU, versions and settings are the same",
        )  # fmt: skip
    if trial:
        made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return made


def word(parse: Callable[[str], T]) -> Callable[[str], T]:
    """``parse`` as an argument's ``type``: argparse shows the reason of its ValueError."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def check_trial(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """A run without a GPU says where it writes, and does not write among a GPU's results."""
    if args.device == "cuda":
        return
    if args.out is None:
        parser.error("--device cpu is a trial of the script: say where to write with --out")
    shipped = results.shipped_folder()
    if shipped is not None and shipped.resolve() in args.out.resolve().parents:
        parser.error(f"--out {args.out}: a trial without a GPU does not go into {shipped}")


def header(device: str = "cuda") -> dict[str, Any]:
    """The header of this machine's results, its copy and matmul rates measured now."""
    if device == "cuda":
        return results.header(copy_tb_s=measure.copy_tb_s(), matmul_tflops=measure.matmul_tflops())
    return results.header(copy_tb_s=0.0, matmul_tflops=0.0, gpu=NO_BENCHMARK)


def result_file(out: Path | None, gpu: str, name: str, *, folder: Path = FOLDER) -> Path:
    """``out`` where it is a file (.json), else ``name`` in it; by default in ``folder``/<gpu>."""
    if out is not None and out.suffix == ".json":
        return out
    return (folder / results.gpu_slug(gpu) if out is None else out) / name


def on_gpu(
    name: str, run: Callable[[], int], *, device: str = "cuda", hint: str | None = None
) -> int:
    """The exit code of ``run``, called without gradients; 2, and why on stderr, where it needs a
    GPU and there is none. ``hint``: what can be done without one."""
    if device == "cuda":
        try:
            measure.require_gpu()
        except measure.NoGpuError as error:
            print(f"{name}: {error}{f'; {hint}' if hint else ''}", file=sys.stderr)
            return 2
    with torch.no_grad():
        return run()


def ended(log: Log, path: Path, *, failed: bool, stopped: str | None = None) -> int:
    """The last lines of a run and its exit code: 1 where something failed, or it stopped early."""
    if stopped:
        log(stopped)
    log(f"written: {path}")
    return int(failed or stopped is not None)
