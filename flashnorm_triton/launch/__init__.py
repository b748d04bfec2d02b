"""From a plan to a running kernel: arguments, grids and launches; one class a kernel family.

A family is one problem made ready. ``bind`` fixes what a call's shapes decide (rows, strides, grid,
output shape, eps) and returns ``run(x, weight, bias, gain) -> y``, which allocates y and launches:
everything that can be computed before the call has been.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from flashnorm_triton import bare_plans
from flashnorm_triton.block_reference import Layout
from flashnorm_triton.checks import ACTIVATIONS
from flashnorm_triton.compile_unit import CompileUnit
from flashnorm_triton.compiled import TRITON_DTYPE, Kernel
from flashnorm_triton.launch.common import Geometry, Run
from flashnorm_triton.launch.heads import Entry, HeadNorm
from flashnorm_triton.launch.hopper import HopperRows, HopperSwap
from flashnorm_triton.launch.norms import Finish, RmsNorm, RowStats
from flashnorm_triton.launch.overlap import Overlap, ScaleRows
from flashnorm_triton.launch.portable import Gemv, ScaledGemm, Tiles, Unfused
from flashnorm_triton.launch.rotary import RotaryHeads
from flashnorm_triton.plans import Plan, Problem, other_plans, shipped_plans

__all__ = [
    "FAMILIES", "Entry", "Finish", "Geometry", "HeadNorm", "Kernel", "RmsNorm", "RotaryHeads",
    "RowStats", "Run", "ScaleRows", "compile_units", "unit_name",
]  # fmt: skip

FAMILIES: dict[str, Any] = {
    "gemv": Gemv,
    "tiles": Tiles,
    "scaled_gemm": ScaledGemm,
    "hopper_swap": HopperSwap,
    "hopper_rows": HopperRows,
    "library": Unfused,
    "two_streams": Overlap,
}


def unit_name(plan: Plan, problem: Problem) -> str:
    """A readable name for one compiled configuration."""
    flags = ("-bias" if problem.has_bias else "") + ("-gain" if problem.has_gain else "")
    blocks = f"{plan.block_m}x{plan.block_n}x{plan.block_k}"
    flags += f"-{problem.epilogue}" if problem.epilogue else ""
    own = f"-{plan.squares}" if plan.form in ("tiles", "hopper_rows") else ""
    tuned = f"w{plan.num_warps}s{plan.num_stages}"
    if plan.form == "hopper_swap":
        tuned += f"r{plan.max_registers}f{plan.in_flight}k{plan.split_k}"
    return f"{plan.form}{own}-{blocks}-{tuned}-{problem.dtype}-{problem.k}to{problem.n}{flags}"


def compile_units() -> Iterator[CompileUnit]:
    """Every kernel that can be launched, in every configuration of the shipped plans."""
    for k, has_gain in ((576, False), (4096, True), (16384, False)):
        for dtype in TRITON_DTYPE:
            yield RmsNorm(k, has_gain, getattr(torch, dtype)).kernel.unit(
                f"rms_norm-{dtype}-{k}", dtype
            )
    stats = Problem("bfloat16", 4096, 4096, 4096)
    yield RowStats(stats).kernel.unit("row_rstd-bfloat16-4096", "bfloat16")
    centred = replace(stats, centred=True)
    yield RowStats(centred).kernel.unit("row_rstd-bfloat16-4096-centred", "bfloat16")
    for activation in ACTIVATIONS:
        ended = replace(stats, activation=activation, gated=True, has_residual=True)
        yield Finish(ended).kernel.unit(f"finish-{activation}-bfloat16-4096", "bfloat16")
    heads = [Entry(128 * n, 128 * n, 128, n // 8, 1e-6, True) for n in range(16)]
    heads += [Entry(2048, 2048, 1536, 2, 1e-6, True), Entry(3584, 3584, 512)]
    for dtype in TRITON_DTYPE:
        for k, gains in ((None, 0), (4096, 3)):
            named = [entry if gains else entry._replace(gain=-1) for entry in heads]
            family = HeadNorm(named[: None if k else 16], 4096, 4096, k, gains, torch.device("cpu"))
            yield family.unit(f"heads-{dtype}-{k or 'scaled'}", dtype)
    yield from _rotary_units()
    others = [
        (Problem(d, 512, 3072, 2048), p) for p in other_plans() for d in ("bfloat16", "float16")
    ]
    shipped = [*shipped_plans(), *bare_plans.shipped()]
    for problem, plan in [*shipped, *others, *_with_epilogues()]:
        # Several rows with a gain hold all the code of those without; the halves are alike in it.
        same = problem.dtype == "float16" or not (problem.has_gain or problem.epilogue)
        if plan.form == "gemv" and plan.block_m > 1 and same:
            continue
        family = FAMILIES[plan.form](plan, problem, problem.k)
        if isinstance(family, Overlap):
            yield family.scale.unit(unit_name(plan, problem))
        elif not isinstance(family, Unfused):
            name = unit_name(plan, problem)
            yield family.kernel.unit(name, problem.dtype, family.targets)


def _rotary_units() -> Iterator[CompileUnit]:
    """Attention's inputs in three layouts, and the end of a sandwich norm."""
    wide = Layout(16, 8, 80, 1e-6, True, True)
    for layout, rotary, tile in (
        (Layout(32, 8, 64), 64, 256), (Layout(4, 1, 256, 1e-6), 256, 1024), (wide, 40, 1024)
    ):  # fmt: skip
        normed, few = layout.eps is not None, tile == 256
        made = RotaryHeads(
            layout,
            rotary,
            q_gain=normed,
            k_gain=normed,
            shared=few,
            places="each" if few else "",
            tile=tile,
        )
        for dtype in TRITON_DTYPE:
            angles = dtype if few else "float32"
            yield made.unit(f"rotary-{dtype}-{layout.head_dim}-{rotary}", dtype, angles)
    for dtype in TRITON_DTYPE:
        made = RmsNorm(4096, True, getattr(torch, dtype), has_residual=True, one_plus=True)
        yield made.kernel.unit(f"add_rms_norm-{dtype}-4096", dtype)


def _with_epilogues() -> Iterator[tuple[Problem, Plan]]:
    """Every form in plain Triton with all that it can do after the product."""
    whole = Problem(
        "bfloat16", 64, 4096, 2048, True, centred=True, activation="gelu", gated=True,
        has_residual=True,
    )  # fmt: skip
    yield replace(whole, has_gain=True), Plan("single_pass", "gemv", 1, 4, 512, 2, 1)
    yield replace(whole, dtype="float32"), Plan("single_pass", "gemv", 4, 4, 1024, 4, 1)
    bare = Problem("bfloat16", 64, 4096, 2048, True, normed=False, has_residual=True, scale=0.5)
    yield bare, Plan("single_pass", "hopper_swap", 32, 64, 256, 4, 3)
    yield bare, Plan("stats_then_gemm", "hopper_rows", 128, 128, 64, 4, 5, squares="given")
    own = replace(whole, centred=False)
    for plan in other_plans():
        if plan.form == "tiles":
            yield (whole if plan.squares == "given" else own), plan
        elif plan.form == "scaled_gemm":
            yield replace(whole, gated=False), plan
        elif plan.form == "two_streams":
            yield whole, plan
