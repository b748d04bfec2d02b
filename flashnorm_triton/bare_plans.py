"""Built-in plans of linear layers without a norm, whose epilogue adds the residual.

The library's matmul is as fast as anything here but for what follows it: another launch, or a copy
of the residual. So few rows of narrow layers, where that launch is a third of the time, are ours,
and many rows where tiles fill the device evenly. Measured on an NVIDIA H200 (docs/measured.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flashnorm_triton.plans import TORCH, UNFUSED, Device, Plan, Problem, bucket, cannot_run

_SHAPES = ((2048, 2048), (2048, 8192), (4096, 4096), (4096, 14336), (2560, 9728), (1152, 6912))
# Steps along K that one row's loads may be unrolled into.
_MOST_STEPS = 16


def choose(problem: Problem, device: Device) -> Plan:
    """The heuristic plan of a problem that is not normed."""
    if cannot_run(problem, device):
        return TORCH
    rows = bucket(problem.m)
    narrow = problem.n <= 16 * device.sm_count
    loads_whole = problem.tma and problem.k % 8 == 0 and device.backend == "cuda"
    if loads_whole and (rows <= 2 or (rows == 4 and narrow and problem.k % 1024 == 0)):
        return _gemv(rows, problem.k)
    half = problem.dtype in ("bfloat16", "float16")
    if not (half and device.gluon and problem.tma):
        return UNFUSED
    if rows <= 16:
        if not narrow:
            return _swap(16, 128, 6)
        # A tile of 64 features is a third of the multiprocessors here: short rows take smaller
        # tiles, long ones are shared.
        if problem.k >= 4096:
            return _swap(16, 256, 3, split_k=4)
        return Plan("stats_then_gemm", "tiles", 16, 16, 256, 4, 4, squares="given")
    if rows == 32 and narrow:
        return _swap(32, 128, 5, split_k=4)
    tiles = -(-rows // 128) * -(-problem.n // 256)
    full = tiles / (-(-tiles // device.sm_count) * device.sm_count)
    if rows >= 2048 and full >= 0.9 and problem.n % 8 == 0:
        return Plan("stats_then_gemm", "hopper_rows", 128, 256, 64, 4, 3, squares="given")
    return UNFUSED


def _gemv(rows: int, k: int) -> Plan:
    def plan(block_n: int, block_k: int, warps: int, stages: int = 1) -> Plan:
        return Plan("single_pass", "gemv", rows, block_n, block_k, warps, stages)

    if k % 1024 == 0 and k <= 1024 * _MOST_STEPS:
        if rows > 1 or k > 4096:
            return plan(4, 1024, 4)
        return plan(2, 2048, 8) if k == 4096 else plan(2, 1024, 4)
    if k <= 2048:
        return plan(2, 256, 1)
    # A step beyond the end takes masks, which make unrolled code long and slow to compile.
    whole = k % 512 == 0 and k <= 512 * _MOST_STEPS
    return plan(4, 512, 2) if whole else plan(8, 512, 2, 3)


def _swap(block_m: int, block_k: int, stages: int, split_k: int = 1) -> Plan:
    return Plan(
        "single_pass", "hopper_swap", block_m, 64, block_k, 4, stages, in_flight=1,
        split_k=split_k,
    )  # fmt: skip


def shipped() -> Iterator[tuple[Problem, Plan]]:
    """Every distinct plan above, each with a problem for it: what can be launched is checked."""
    device = Device("cuda", capability=90, sm_count=132, gluon=True)
    seen: set[tuple[Plan, str]] = set()
    for n, k in _SHAPES:
        for dtype in ("bfloat16", "float32"):
            for m in (2**power for power in range(14)):
                problem = Problem(dtype, m, n, k, normed=False, has_residual=True)
                plan = choose(problem, device)
                # One row in float32 holds what is different there.
                new = (plan, dtype) not in seen and (dtype == "bfloat16" or m == 1)
                if new and plan != UNFUSED:
                    seen.add((plan, dtype))
                    yield replace(problem, has_bias=True), plan
