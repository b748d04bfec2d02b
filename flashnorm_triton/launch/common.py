"""What the kernel families share: the shape of a call, and operands as TMA descriptors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashnorm_triton import runtime
from flashnorm_triton.compiled import Tile
from flashnorm_triton.plans import Plan, Problem

Run = Callable[..., Tensor]
"""run(x, weight, bias, gain, row_sums=None, residual=None) -> y, which it allocates."""


def epilogue_constants(problem: Problem) -> dict[str, Any]:
    """The compile-time arguments of the epilogue's steps (kernels/epilogue.py), bias included."""
    return {
        "HAS_BIAS": problem.has_bias,
        "CENTRED": problem.centred,
        "ACTIVATION": problem.activation,
        "GATED": problem.gated,
        "HAS_RESIDUAL": problem.has_residual,
    }


def output_of(
    shape: tuple[int, ...], problem: Problem, geometry: Geometry
) -> Callable[[Tensor], Tensor]:
    """What allocates the contiguous result of a call, given its x, on the current device."""
    return empty_of(shape, getattr(torch, problem.dtype), geometry.device)


def empty_of(shape: tuple[int, ...], dtype: torch.dtype, device: int) -> Callable[[Tensor], Tensor]:
    """What allocates a contiguous tensor beside another, on the current device, number ``device``.

    ``new_empty`` goes through torch's dispatcher, which takes half as long as a launch; compiled
    graphs allocate without it, by the function used here where torch has it. Neither fills memory
    unless torch was asked to, which only the dispatcher honours.
    """
    allocate = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    allocate = getattr(allocate, "_empty_strided_cuda", None)
    if allocate is None or device < 0 or not torch.cuda.is_available():
        return lambda x: x.new_empty(shape, dtype=dtype)
    filled = torch._C._get_deterministic_algorithms
    strides = torch.empty(shape, device="meta").stride()

    def empty(x: Tensor) -> Tensor:
        return x.new_empty(shape, dtype=dtype) if filled() else allocate(shape, strides, dtype)

    return empty


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


class Geometry(NamedTuple):
    """x as M rows of K elements: M, the row stride in elements, the leading shape, the device."""

    m: int
    stride: int
    lead: tuple[int, ...]
    device: int


def check_half(plan: Plan, problem: Problem) -> None:
    """The tensor cores multiply halves; the interpreter, for tests, anything."""
    if problem.dtype not in ("bfloat16", "float16") and not runtime.interpreting():
        raise ValueError(
            f"plan {plan.form!r} multiplies bfloat16 or float16 on the tensor cores, not "
            f"{problem.dtype}: use the gemv or library form"
        )


class TmaFamily:
    """What the kernels fed by the copy engine share: x and weight as descriptors."""

    def __init__(self, plan: Plan, problem: Problem, stride_wn: int, gluon: bool) -> None:
        if problem.has_gain:
            raise ValueError(
                f"plan {plan.form!r} reads x by TMA straight into the matrix instruction and "
                "cannot apply a gain: fold it into the weight, or use another plan"
            )
        if not problem.tma:
            raise ValueError(
                f"plan {plan.form!r} needs x and weight with 16-byte aligned base and row stride "
                f"(K = {problem.k} in {problem.dtype}): use another plan"
            )
        check_half(plan, problem)
        self.plan, self.problem = plan, problem
        self.n, self.k, self.stride_wn = problem.n, problem.k, stride_wn
        self.gluon = gluon

    def tile(self, rows: int, columns: int) -> Callable[[int, int, int], Any]:
        """A maker of descriptors with rows x columns blocks, for (size, size, row stride)."""
        layout = shared_layout(rows, columns, self.problem.dtype) if self.gluon else None

        def make(size: int, width: int, stride: int) -> Callable[[Tensor], Tile]:
            shape, strides = [size, width], [stride, 1]
            return lambda tensor: Tile(tensor, shape, strides, [rows, columns], layout)

        return make

    def x_and_w(self, geometry: Geometry) -> tuple[Callable[[Tensor], Tile], ...]:
        plan = self.plan
        x_tile = self.tile(plan.block_m, plan.block_k)(geometry.m, self.k, geometry.stride)
        w_tile = self.tile(plan.block_n, plan.block_k)(self.n, self.k, self.stride_wn)
        return x_tile, w_tile

    def types(self, **blocks: tuple[int, int]) -> dict[str, str]:
        """The descriptor arguments as Triton spells their types, for a compile without tensors."""
        spelled = {}
        for argument, (rows, columns) in blocks.items():
            layout = ""
            if self.gluon:
                layout = f",{shared_layout(rows, columns, self.problem.dtype)!r}"
            spelled[argument] = f"tensordesc<{{}}[{rows}, {columns}]{layout}>"
        return spelled


def shared_layout(rows: int, columns: int, dtype: str) -> Any:
    """The shared-memory layout that the copy engine and wgmma agree on for a tile."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout.get_default_for([rows, columns], getattr(gl, dtype))
