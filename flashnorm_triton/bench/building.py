"""Plans compiled before they are timed, on all cores; and which of them may not be launched."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from dataclasses import replace

import torch

from flashnorm_triton import runtime
from flashnorm_triton.plans import WITHOUT_BLOCKS, Plan, Problem
from flashnorm_triton.tuning.build import Job, Pool, Target

PATIENCE_S = 120.0
_JOBS = max(1, min(12, len(os.sched_getaffinity(0)) - 2))

Refused = dict[tuple[Plan, Problem], str]
"""Why a plan may not be launched for a problem, whatever its number of rows (m = 0)."""


def key(plan: Plan, problem: Problem) -> tuple[Plan, Problem]:
    """What a compiled plan is known by."""
    return plan, replace(problem, m=0)


def compile_plans(
    wanted: Iterable[tuple[Plan, Problem]], log: Callable[[str], None], jobs: int = _JOBS
) -> Refused:
    """Compile plans for the current GPU into Triton's cache, in processes without one; those that
    cannot be compiled, or that the lint of buffers refuses, and why."""
    from triton.runtime import driver

    device = runtime.device_facts(torch.cuda.current_device())
    found = driver.active.get_current_target()
    target = Target(found.backend, found.arch, found.warp_size)
    pool = Pool(jobs)
    try:
        futures = {
            key(plan, problem): pool.submit(Job(plan, problem, device, target))
            for plan, problem in wanted
            if plan.form not in WITHOUT_BLOCKS
        }
        wait(futures.values(), timeout=PATIENCE_S)
        refused: Refused = {}
        for which, future in futures.items():
            if not future.done():
                refused[which] = f"it was not compiled after {PATIENCE_S:.0f} s"
                continue
            built = future.result()
            if built.error is not None or built.findings:
                refused[which] = built.error or f"the lint refuses it: {built.findings[0]}"
    finally:
        pool.close()
    log(f"{len(futures)} plans compiled by {jobs} processes, {len(refused)} refused")
    return refused
