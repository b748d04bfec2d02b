"""The plans that the tests run, with readable names, and what each form can take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import HAS_GPU

from flashnorm_triton import plans, runtime
from flashnorm_triton.plans import WITHOUT_BLOCKS, Plan, Problem

GLUON = ("hopper_swap", "hopper_rows")
DESCRIPTORS = (*GLUON, "scaled_gemm")
# Compiled, a GEMV that folds takes K steps of 16 bytes for every lane (limits.unfit).
SMALL = tuple(
    replace(plan, block_k=256 * plan.num_warps) if HAS_GPU and plan.form == "gemv" else plan
    for plan in plans.interpretable_plans()
)


def _swap(block_m: int, split_k: int, **more: int) -> tuple[Problem, Plan]:
    plan = Plan("single_pass", "hopper_swap", block_m, 64, 128, 4, 4, split_k=split_k, **more)
    return Problem("bfloat16", block_m, 1024, 2048, has_bias=True), plan


# Forms that the heuristic leaves to tuning. 16 steps of K among 3 programs: the last gets fewer.
UNSHIPPED = [(Problem("bfloat16", 256, 3072, 2048), plan) for plan in plans.other_plans()] + [
    _swap(16, split_k=2),
    _swap(32, split_k=3, in_flight=1),
    _swap(16, split_k=8),
]


def plan_name(plan: Plan) -> str:
    if plan.form in WITHOUT_BLOCKS:
        return plan.form
    squares = f"-{plan.squares}" if plan.form in ("tiles", "hopper_rows") else ""
    blocks = f"{plan.block_m}x{plan.block_n}x{plan.block_k}"
    more = f"-f{plan.in_flight}k{plan.split_k}" if plan.form == "hopper_swap" else ""
    return f"{plan.form}{squares}-{blocks}-w{plan.num_warps}s{plan.num_stages}{more}"


def takes_whole_pieces(plan: Plan) -> bool:
    """Whether rows must be whole pieces of 16 bytes: descriptors, and compiled folding GEMVs."""
    return plan.form in DESCRIPTORS or (HAS_GPU and plan.form == "gemv" and plan.block_m > 1)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def takes_gain(plan: Plan, dtype: torch.dtype) -> bool:
    """Descriptor forms and overlap multiply x as it is; fp16 tiles could overflow."""
    raw = (*DESCRIPTORS, "two_streams")
    return plan.form not in raw and not (plan.form == "tiles" and dtype == torch.float16)


def takes_dtype(plan: Plan, dtype: torch.dtype) -> bool:
    """The tensor cores multiply halves; the interpreter multiplies anything."""
    tensor_cores = plan.form == "tiles" or plan.form in DESCRIPTORS
    return dtype != torch.float32 or not tensor_cores or runtime.interpreting()


def every_plan() -> list[Any]:
    """Each plan with each dtype, bias and gain that it is shipped for, and the unshipped forms."""
    rows = []
    for problem, plan in [*plans.shipped_plans(), *UNSHIPPED]:
        gain = "-gain" if problem.has_gain else ""
        rows.append(pytest.param(problem, plan, id=f"{plan_name(plan)}-{problem.dtype}{gain}"))
    return rows


def distinct_plans(by_gain: bool = False) -> list[Any]:
    """Each plan once (with and without a gain: twice), with the first problem it is shipped for."""
    first: dict[tuple[Plan, bool], Any] = {}
    for param in every_plan():
        problem, plan = param.values
        first.setdefault((plan, by_gain and problem.has_gain), param)
    return list(first.values())


def one_of_each_form() -> list[Any]:
    """One plan of each form, of each way to the squares, and one with split-K."""
    first: dict[tuple[str, str, bool], Any] = {}
    for param in distinct_plans():
        plan = param.values[1]
        first.setdefault((plan.form, plan.squares, plan.split_k > 1), param)
    return list(first.values())


def skip_unless_it_runs_here(plan: Plan) -> None:
    facts = runtime.device_facts(torch.cuda.current_device())
    if plan.form in GLUON and not facts.gluon:
        pytest.skip(f"{plan.form} needs Gluon on compute capability 9.0, not {facts.capability}")
    if plan.form == "scaled_gemm" and facts.capability < 90:
        pytest.skip(f"scaled_gemm needs TMA, not compute capability {facts.capability}")
