"""The Hopper kernels in configurations beside the shipped plans.

Every part of the epilogue, and the variants that only tuning picks.
"""

from __future__ import annotations

from collections.abc import Iterator

from flashnorm_triton.compile_unit import CompileUnit
from flashnorm_triton.launch import FAMILIES, unit_name
from flashnorm_triton.plans import Plan, Problem


def swap(*blocks: int, stages: int, **more: int) -> Plan:
    return Plan("single_pass", "hopper_swap", *blocks, 4, stages, **more)


def rows(squares: str, block_n: int, stages: int, block_m: int = 128) -> Plan:
    strategy = "stats_then_gemm" if squares == "given" else "single_pass"
    return Plan(strategy, "hopper_rows", block_m, block_n, 64, 4, stages, squares=squares)


def problem(dtype: str = "bfloat16", n: int = 2048, k: int = 1096, **epilogue: object) -> Problem:
    return Problem(dtype, 300, n, k, **epilogue)


ALL = {"has_bias": True, "centred": True, "has_residual": True}
CASES: tuple[tuple[Plan, Problem], ...] = (
    (rows("registers", 128, 5), problem()),
    (swap(64, 128, 128, stages=3), problem(has_residual=True)),
    (swap(32, 128, 64, stages=4), problem(activation="relu2")),
    (swap(16, 64, 256, stages=2, in_flight=1), problem(activation="silu", gated=True)),
    (swap(64, 64, 128, stages=4, in_flight=1), problem(activation="gelu_tanh", gated=True, **ALL)),
    (swap(64, 64, 128, stages=3), problem("float16", activation="gelu", **ALL)),
    (rows("registers", 256, 4), problem("float16", k=1088, activation="relu", **ALL)),
    (rows("registers", 128, 3), problem(activation="silu", gated=True, has_residual=True)),
    (rows("own", 128, 4), problem(activation="gelu_tanh", **ALL)),
    (rows("own", 64, 4), problem(activation="gelu", gated=True, **ALL)),
    (rows("given", 128, 3), problem(activation="silu", gated=True, has_bias=True)),
)


def name(plan: Plan, of: Problem) -> str:
    return unit_name(plan, of)


def compile_units() -> Iterator[CompileUnit]:
    for plan, of in CASES:
        family = FAMILIES[plan.form](plan, of, of.k)
        yield family.kernel.unit(name(plan, of), of.dtype, family.targets)
