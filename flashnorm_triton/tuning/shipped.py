"""The buffer-depth lint over every kernel that the package can launch on Hopper, without a GPU.

    python -m flashnorm_triton.tuning.shipped [--quick] [--json FILE] [--jobs N] [--tables FOLDER]

walks the plans of all shipped tables (configs/*.json), of the built-in choice and of the forms
left to tuning, each with every epilogue that it serves; compiles each distinct kernel for sm_90 as
far as the TTGIR, which is what the lint reads (tuning/lint.py), and prints how many there are of
each form. Ends with status 1 when one has a finding or does not compile. What becomes of a kernel
is Triton's doing: run it on every version that is supported.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashnorm_triton import limits, plans, tables
from flashnorm_triton.plans import WITHOUT_BLOCKS, Device, Plan, Problem
from flashnorm_triton.tuning import lint
from flashnorm_triton.tuning.build import Job, Target, compile_plan

HOPPER = Device("cuda", 90, 132, gluon=True)
SM90 = Target("cuda", 90, 32)
CONFIGS = Path(plans.__file__).parent / "configs"
# A LayerNorm; a gated pair with all that can follow it; an activation; a residual alone; no norm.
EPILOGUES: tuple[dict[str, Any], ...] = (
    {},
    {"centred": True},
    {"activation": "silu", "gated": True, "has_residual": True},
    {"activation": "gelu_tanh"},
    {"has_residual": True},
    {"normed": False, "has_residual": True},
)


def entries(folder: Path = CONFIGS) -> Iterator[tuple[Problem, Plan]]:
    """Every plan of the tables in a folder, with the problem it is stored for.

    Raises tables.TableError for a table that cannot be read.
    """
    for path in sorted(folder.glob("*.json")):
        for key, entry in tables.read(path).entries.items():
            tma = key.k * limits.ELEMENT_BYTES[key.dtype] % 16 == 0
            yield Problem(key.dtype, key.m, key.n, key.k, False, key.has_gain, tma), entry.plan


def everything(folder: Path = CONFIGS) -> Iterator[tuple[Problem, Plan]]:
    """All shipped plans with problems, each with every epilogue."""
    others = [
        (Problem(dtype, 512, 3072, 2048), plan)
        for plan in plans.other_plans()
        for dtype in ("bfloat16", "float16")
    ]
    for problem, plan in [*entries(folder), *plans.shipped_plans(), *others]:
        for epilogue in EPILOGUES:
            yield replace(problem, has_bias=True, **epilogue), plan


def variants(pairs: Iterable[tuple[Problem, Plan]], quick: bool = False) -> list[Job]:
    """A job for each kernel that compiles to code of its own.

    That depends on the plan, the dtype, what is added to the product, and on whether the blocks
    divide N and K; on N and K themselves only by the numbers in the addresses. A GEMV has no matrix
    instruction: one a plan and dtype shows it. ``quick`` leaves out float16, which compiles as
    bfloat16 does, and takes one GEMV of each kind.
    """
    found: dict[tuple, Job] = {}
    for problem, plan in pairs:
        if plan.form in WITHOUT_BLOCKS or limits.unfit(plan, problem, HOPPER):
            continue
        half = quick and problem.dtype in ("bfloat16", "float16")
        key: tuple = plan, "half" if half else problem.dtype
        if plan.form == "gemv" and quick:
            key = plan.form, plan.block_m > 1, plan.num_stages > 1, problem.dtype == "float32"
        elif plan.form != "gemv":
            divided = problem.n % plan.block_n == 0, problem.k % plan.block_k == 0
            deep = problem.k > plan.block_k * plan.num_stages
            key += problem.has_gain, problem.epilogue, problem.tma, *divided, deep
        found.setdefault(key, Job(plan, problem, HOPPER, SM90))
    return list(found.values())


class _Enough(Exception):
    """The compile has come as far as the text that is wanted."""


def ttgir_of(job: Job) -> list[str]:
    """The TTGIR of a plan's kernels, in the order of their launches.

    Raises what the compiler or the plan's own checks raise.
    """
    from triton import knobs

    texts: list[str] = []

    def stop(module: Any, metadata: Any) -> None:
        texts.append(str(module))
        raise _Enough

    def stages_of(*given: Any) -> tuple[str, str] | None:
        if not given:  # Triton 3.7 asks what to add to the key of its cache
            return "ttgir alone", "ttgir alone"
        given[1]["llir"] = stop
        return None

    def make(kernel: Any, grid: tuple[int, int, int], args: tuple[Any, ...]) -> None:
        with contextlib.suppress(_Enough):
            made = kernel.fn.warmup(*args, grid=grid, **kernel.constants, **kernel.options)
            # Compiled whole before, and found in Triton's cache.
            made = made.result() if hasattr(made, "result") else made
            texts.append(made.asm["ttgir"])

    before = knobs.runtime.add_stages_inspection_hook
    knobs.runtime.add_stages_inspection_hook = stages_of
    try:
        compile_plan(job, make)
    finally:
        knobs.runtime.add_stages_inspection_hook = before
    return texts


def check(job: Job) -> dict[str, Any]:
    """One job's record: plan, problem, what the lint finds, or the error that kept it from it."""
    problem = job.problem
    row: dict[str, Any] = {
        "plan": job.plan.as_dict(),
        "problem": f"{problem.dtype} {problem.k}->{problem.n} {problem.epilogue}".strip(),
        "error": None,
        "kernels": 0,
        "findings": [],
    }
    try:
        texts = ttgir_of(job)
        row["kernels"] = len(texts)
        row["findings"] = [str(found) for text in texts for found in lint.check(text, None)]
    except Exception as error:  # Triton's errors share no base class
        row["error"] = f"{type(error).__name__}: {error}"[:500]
    return row


def check_all(jobs: Sequence[Job], processes: int | None = None) -> list[dict[str, Any]]:
    """The records of many jobs, in ``processes`` (default: the number of cores)."""
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes or os.cpu_count() or 1, mp_context=fork) as pool:
        return list(pool.map(check, jobs, chunksize=4))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of the module's docstring; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m flashnorm_triton.tuning.shipped")
    parser.add_argument("--quick", action="store_true", help="float16 only where bfloat16 is not")
    parser.add_argument("--json", type=Path, help="where to write the records")
    parser.add_argument("--jobs", type=int, help="processes (default: cores)")
    parser.add_argument("--tables", type=Path, default=CONFIGS, help="the folder of the tables")
    args = parser.parse_args(argv)
    import triton

    started = time.perf_counter()
    pairs = list(everything(args.tables))
    jobs = variants(pairs, args.quick)
    rows = check_all(jobs, args.jobs)
    kernels = Counter(job.plan.form for job in jobs)
    bad = [row for row in rows if row["error"] or row["findings"]]
    told = {
        "triton": triton.__version__,
        "plans": len({plan for _, plan in pairs}),
        "variants": len(jobs),
        "kernels": sum(row["kernels"] for row in rows),
        "refused": len(bad),
        "seconds": round(time.perf_counter() - started, 1),
    }
    if args.json:
        args.json.write_text(json.dumps({**told, "records": rows}, indent=1) + "\n")
    for row in bad:
        print(f"{row['plan']} {row['problem']}: {row['error'] or row['findings']}")
    forms = ", ".join(f"{form} {count}" for form, count in sorted(kernels.items()))
    print(
        f"Triton {told['triton']}, sm_90: {told['plans']} plans, {told['variants']} variants "
        f"({forms}), {told['kernels']} kernels in {told['seconds']:.0f} s: "
        f"{told['refused']} refused"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
