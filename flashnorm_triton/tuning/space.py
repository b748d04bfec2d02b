"""The search space: which plans are worth compiling for a problem on a device.

Short lists rather than a grid. Each list holds the plans that were best or nearly best somewhere in
four interleaved sweeps of an NVIDIA H200 over 84 cells (tests/measured_plans.json), and relatives
that stand in where another shape's waves of tiles fall differently. In every measured cell the
"quick" space holds a plan within 2 % of the best of all that were tried
(tests/test_space.py prints by how much). "full" adds their neighbours. Split-K is listed for
linears without a norm alone, whose rows are long and features few. With a norm it lost by 11 to
180 % in each of the 30 cells in which the swapped tiles were measured with it, and by 5 to 110 % in
each of the 20 of the GEMV, which has none left.

A new kernel family is one more list here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace

from flashnorm_triton import limits
from flashnorm_triton.plans import (
    OVERLAP,
    UNFUSED,
    WITHOUT_BLOCKS,
    Device,
    Plan,
    Problem,
    bucket,
    choose,
)

EFFORTS = {"quick": 14, "full": 40}
"""Most candidates of one cell, the unfused pair and the heuristic's plan included."""

# Below, a fused kernel won everywhere (bench/results/nvidia_h200/overlap.json).
_OVERLAP_ROWS = 64
# Registers of a thread that accumulators may take: beyond it, they spill or run alone.
_MOST_ACCUMULATORS = 168
# A GEMV without stages is unrolled over K: this many copies of its body at most.
_MOST_UNROLLED = 16

# rows: (BLOCK_N, BLOCK_K, warps, stages)
_GEMV = {
    1: (
        (1, 1024, 1, 1), (2, 256, 1, 1), (2, 1024, 4, 1), (4, 1024, 8, 1), (4, 2048, 4, 1),
        (2, 2048, 8, 1), (2, 2048, 4, 1), (4, 512, 1, 3), (4, 256, 1, 3), (8, 512, 8, 1),
        (4, 2048, 8, 1), (4, 1024, 4, 1),
    ),
    2: (
        (2, 256, 1, 1), (4, 1024, 4, 1), (4, 256, 1, 1), (4, 512, 2, 1), (8, 512, 2, 1),
        (8, 512, 2, 3), (8, 1024, 4, 1),
    ),
    4: (
        (4, 1024, 4, 1), (2, 256, 1, 1), (4, 512, 2, 1), (8, 512, 2, 1), (8, 512, 2, 3),
        (4, 256, 1, 1),
    ),
    8: ((4, 1024, 4, 1), (4, 512, 2, 1), (2, 256, 1, 1)),
}  # fmt: skip
# The same for one row with an epilogue, which folds what a thread loads as several rows do.
_GEMV_FOLDED = (
    (4, 512, 2, 1), (4, 1024, 4, 1), (4, 2048, 8, 1), (8, 1024, 4, 1), (2, 256, 1, 1),
    (8, 512, 2, 3),
)  # fmt: skip
# Eight rows as two blocks of four.
_GEMV_HALVES = ((8, 1024, 4, 1), (8, 512, 2, 3))
# rows of a tile: (BLOCK_N, BLOCK_K, stages, register cap, instructions in flight)
_SWAP = {
    16: (
        (64, 256, 3, 0, 1), (64, 256, 3, 0, 0), (64, 256, 4, 0, 0), (64, 128, 6, 0, 1),
        (64, 128, 4, 128, 0), (64, 128, 3, 128, 0), (128, 64, 4, 128, 0), (128, 128, 3, 0, 0),
        (64, 128, 4, 0, 0),
    ),
    32: (
        (64, 128, 6, 0, 1), (64, 256, 3, 0, 0), (64, 128, 3, 128, 0), (64, 128, 4, 128, 0),
        (128, 128, 3, 0, 0),
    ),
    64: (
        (64, 128, 6, 0, 1), (64, 128, 3, 128, 1), (128, 128, 3, 0, 0), (128, 64, 4, 128, 1),
        (128, 64, 6, 0, 1), (64, 128, 3, 0, 0),
    ),
    128: ((128, 64, 6, 0, 1), (64, 64, 4, 128, 0)),
}  # fmt: skip
# The same for gated pairs, whose slots hold two weight tiles
_SWAP_PAIRS = {
    16: (
        (64, 128, 4, 0, 1), (64, 128, 3, 128, 0), (64, 128, 6, 0, 1), (64, 256, 2, 0, 0),
        (128, 64, 4, 0, 1), (64, 64, 4, 128, 0),
    ),
    32: ((64, 128, 4, 0, 1), (64, 128, 5, 0, 1), (64, 64, 4, 128, 0), (64, 256, 2, 0, 0)),
    64: ((64, 128, 4, 0, 1), (64, 64, 4, 128, 0), (128, 64, 4, 0, 1)),
    128: (),
}  # fmt: skip
# Best of the swapped tiles with another epilogue at 128 and 256 rows
_SWAP_FINISHED = ((64, 64, 4, 128, 0),)
# The same for linears without a norm, whose K is worth sharing where features are few:
# (BLOCK_N, BLOCK_K, stages, programs that share K)
_SWAP_BARE = {
    16: ((64, 128, 6, 1), (64, 256, 3, 4), (64, 128, 4, 4), (64, 256, 3, 2)),
    32: ((64, 128, 5, 4), (64, 128, 6, 1), (64, 128, 5, 2)),
}  # fmt: skip
# ... and portable tiles: (BLOCK_N, BLOCK_K, stages)
_TILES_BARE = ((16, 256, 4), (32, 256, 3), (16, 512, 3))
_GEMV_BARE = (
    (4, 1024, 4, 1), (2, 1024, 4, 1), (2, 2048, 8, 1), (4, 2048, 8, 1), (1, 2048, 8, 1),
    (1, 1024, 4, 1), (8, 512, 2, 3), (2, 512, 2, 1),
)  # fmt: skip
# (squares, BLOCK_N, stages)
_ROWS = (
    ("own", 256, 3), ("given", 128, 5), ("own", 128, 5), ("own", 128, 4), ("own", 64, 6),
    ("given", 256, 3), ("registers", 256, 4), ("given", 64, 6),
)  # fmt: skip
# The same for gated pairs, whose tiles are two accumulators of BLOCK_N columns
_PAIRS = (("given", 128, 3), ("registers", 128, 3), ("registers", 64, 5), ("own", 64, 4))
# (BLOCK_M, BLOCK_N, warps, stages) with BLOCK_K 64
_SCALED = ((128, 256, 8, 4), (128, 256, 8, 3), (128, 128, 8, 4), (64, 256, 4, 4), (64, 128, 4, 5))
# (BLOCK_N, BLOCK_K, stages) of portable tiles with few rows, and whole blocks with many
_FEW_ROW_TILES = ((32, 256, 3), (64, 128, 3), (32, 128, 4), (64, 64, 4), (128, 64, 4))
_TILES = ((64, 64, 64, 4, 4), (64, 128, 64, 4, 3), (128, 128, 64, 8, 3), (128, 128, 32, 4, 4))


def candidates(problem: Problem, device: Device, effort: str = "quick") -> tuple[Plan, ...]:
    """Plans to compile and time for a problem, at most ``EFFORTS[effort]`` of them.

    The heuristic's plan (the incumbent) comes first and the unfused pair is always there; the rest
    in the order in which they are worth trying. Every plan fits (``limits.unfit``). Raises
    ValueError for an effort that is not known.
    """
    if effort not in EFFORTS:
        raise ValueError(f"effort {effort!r} is unknown: use one of {', '.join(EFFORTS)}")
    found = dict.fromkeys((choose(problem, device), UNFUSED))
    listed = list(_listed(problem, device))
    more = [near for plan in listed for near in _neighbours(plan)] if effort == "full" else []
    for plan in (*listed, *more):
        if len(found) < EFFORTS[effort] and _sensible(plan, problem, device):
            found.setdefault(plan)
    return tuple(plan for plan in found if limits.unfit(plan, problem, device) is None)


def _listed(problem: Problem, device: Device) -> Iterable[Plan]:
    """The lists that concern a problem, one after the other, without regard to fit."""
    rows = bucket(problem.m)
    if not problem.normed:
        yield from _bare(rows)
    if rows >= _OVERLAP_ROWS:
        yield OVERLAP
    gemv = _GEMV_FOLDED if rows == 1 and problem.epilogue else _GEMV.get(rows, ())
    for n, k, warps, stages in gemv:
        yield Plan("single_pass", "gemv", rows, n, k, warps, stages)
    for n, k, warps, stages in _GEMV_HALVES if rows == 8 else ():
        yield Plan("single_pass", "gemv", 4, n, k, warps, stages)
    hopper = device.gluon and problem.tma and not problem.has_gain
    if hopper:
        yield from _hopper(problem, rows, device.sm_count)
    else:
        yield from _portable(rows, device)
    if rows >= 256:
        # Beside the row tiles, only the large shape of the plain Triton GEMM was ever best.
        for m, n, warps, stages in _SCALED[: 2 if hopper else None]:
            yield Plan("stats_then_gemm", "scaled_gemm", m, n, 64, warps, stages)


def _bare(rows: int) -> Iterable[Plan]:
    """What is worth trying for a linear without a norm beside what is for one with."""
    if rows <= 4:
        for n, k, warps, stages in _GEMV_BARE:
            yield Plan("single_pass", "gemv", rows, n, k, warps, stages)
    if 1 < rows <= 32:
        block_m = max(16, rows)
        for n, k, stages, split in _SWAP_BARE[block_m]:
            yield Plan(
                "single_pass", "hopper_swap", block_m, n, k, 4, stages, in_flight=1, split_k=split
            )
        for n, k, stages in _TILES_BARE:
            yield Plan("stats_then_gemm", "tiles", block_m, n, k, 4, stages, squares="given")


def _hopper(problem: Problem, rows: int, sm_count: int) -> Iterable[Plan]:
    blocks: list[int] = []
    if rows > 1:
        blocks = [16] if rows <= 16 else [rows // 2, rows] if rows <= 128 else [64, 128]
    for block_m in reversed(blocks):
        listed = (_SWAP_PAIRS if problem.gated else _SWAP)[block_m]
        if problem.epilogue and not problem.gated and block_m == 64:
            listed = (*_SWAP_FINISHED, *listed)
        for n, k, stages, cap, in_flight in listed:
            plan = Plan(
                "single_pass", "hopper_swap", block_m, n, k, 4, stages,
                max_registers=cap, in_flight=in_flight,
            )  # fmt: skip
            tiles = -(-rows // block_m) * -(-problem.width // n)
            # Two rounds of small tiles at most: each block of rows reads the weights again.
            if rows <= block_m or tiles <= 2 * sm_count:
                yield plan
    if rows >= 128:
        for squares, n, stages in _PAIRS if problem.gated else _ROWS:
            strategy = "stats_then_gemm" if squares == "given" else "single_pass"
            yield Plan(strategy, "hopper_rows", 128, n, 64, 4, stages, squares=squares)


def _portable(rows: int, device: Device) -> Iterable[Plan]:
    if 2 <= rows <= 64:
        block_m = max(16, rows)
        # One load may feed both only where the matrix instruction is synchronous: off Hopper, or
        # with few rows.
        squares = "own" if device.capability == 90 and rows > 16 else "shared"
        for n, k, stages in _FEW_ROW_TILES:
            yield Plan("single_pass", "tiles", block_m, n, k, 4, stages, squares=squares)
    if rows >= 32:
        for m, n, k, warps, stages in _TILES:
            if m <= max(rows, 64):
                yield Plan("stats_then_gemm", "tiles", m, n, k, warps, stages, squares="given")


def _neighbours(plan: Plan) -> Iterable[Plan]:
    """The plan with one parameter moved a step, where that is a plan at all."""
    if plan.form in WITHOUT_BLOCKS:
        return
    moves = [{"num_stages": plan.num_stages + 1}, {"num_stages": plan.num_stages - 1}]
    if plan.form == "hopper_swap":
        moves.append({"in_flight": 1 - plan.in_flight})
        moves.append({"max_registers": 128 - plan.max_registers})
    if plan.form in ("hopper_rows", "scaled_gemm", "tiles"):
        moves += [{"group_m": 16}, {"group_m": 4}]
    if plan.form == "gemv":
        moves += [{"block_n": 2 * plan.block_n}, {"num_warps": 2 * plan.num_warps}]
        moves += [{"block_n": plan.block_n // 2}] if plan.block_n > 1 else []
    for move in moves:
        with contextlib.suppress(ValueError):  # no plan: too few stages, say
            yield replace(plan, **move)


def _sensible(plan: Plan, problem: Problem, device: Device) -> bool:
    """Whether a plan is worth a compile: no accumulators that spill, no block beyond the matrix."""
    if plan.form in WITHOUT_BLOCKS:
        return limits.unfit(plan, problem, device) is None
    accumulators = limits.accumulators(plan, problem.gated)
    if accumulators > _MOST_ACCUMULATORS:
        return False
    if plan.max_registers:
        # The cap is there to let two blocks share a multiprocessor: both must fit its memory.
        needs = limits.shared_bytes(plan, problem.dtype, problem.gated)
        fits_twice = 2 * needs <= limits.shared_limit(device)
        if not fits_twice or accumulators > plan.max_registers * 3 // 4:
            return False
    if plan.block_k >= 2 * problem.k or plan.block_n >= 2 * max(problem.width, 16):
        return False
    steps = -(-problem.k // plan.block_k)
    if plan.form == "gemv" and plan.num_stages == 1 and steps > _MOST_UNROLLED:
        return False
    return limits.unfit(plan, problem, device) is None
