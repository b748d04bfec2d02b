"""From a plan to a running kernel: arguments, grids and launches; one class a kernel family.

An instance is one problem made ready. Calling it with (rows, weight, eps, bias, gain) allocates the
output and launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashnorm_triton.compile_unit import TARGETS, CompileUnit
from flashnorm_triton.compiled import TRITON_DTYPE, Kernel
from flashnorm_triton.plans import Plan, Problem, other_plans, shipped_plans
from flashnorm_triton.runtime import device_facts, interpreting


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


class Rows(NamedTuple):
    """x seen as a matrix: the tensor, its rows M, their stride in elements, its leading shape."""

    x: Tensor
    m: int
    stride: int
    lead: tuple[int, ...]


class Gemv:
    """single_pass, form "gemv"."""

    targets = TARGETS

    def __init__(self, plan: Plan, problem: Problem, stride_wn: int) -> None:
        from flashnorm_triton.kernels.gemv import norm_gemv_kernel

        self.plan = plan
        self.blocks_n = cdiv(problem.n, plan.block_n)
        self.kernel = Kernel(
            norm_gemv_kernel,
            {
                "N": problem.n,
                "K": problem.k,
                "STRIDE_WN": stride_wn,
                "ROWS": plan.block_m,
                "BLOCK_N": plan.block_n,
                "BLOCK_K": plan.block_k,
                "HAS_BIAS": problem.has_bias,
                "HAS_GAIN": problem.has_gain,
                "STAGES": plan.num_stages,
            },
            num_warps=plan.num_warps,
        )

    def __call__(
        self, rows: Rows, w: Tensor, eps: float, bias: Tensor | None, gain: Tensor | None
    ) -> Tensor:
        grid = (self.blocks_n, cdiv(rows.m, self.plan.block_m), 1)
        x, m, stride, lead = rows
        y = x.new_empty((*lead, w.shape[0]))
        self.kernel(grid, x.get_device(), x, w, bias, gain, y, m, stride, eps)
        return y


class RowStats:
    """The scale of every row: s (M,) fp32."""

    def __init__(self, problem: Problem) -> None:
        from flashnorm_triton.kernels.rows import row_rstd_kernel

        self.kernel = Kernel(
            row_rstd_kernel, {"K": problem.k, "BLOCK_K": _row_block(problem.k)}, num_warps=4
        )

    def __call__(self, rows: Rows, eps: float) -> Tensor:
        s = torch.empty(rows.m, dtype=torch.float32, device=rows.x.device)
        self.kernel((rows.m, 1, 1), rows.x.get_device(), rows.x, s, rows.stride, eps)
        return s


class RmsNorm:
    """The stand-alone norm: y of x's shape and dtype, contiguous."""

    def __init__(self, k: int, has_gain: bool) -> None:
        from flashnorm_triton.kernels.rows import rms_norm_kernel

        block_k = _row_block(k)
        self.k = k
        self.kernel = Kernel(
            rms_norm_kernel,
            {"K": k, "BLOCK_K": block_k, "HAS_GAIN": has_gain},
            num_warps=4 if block_k <= 2048 else 8,
        )

    def __call__(self, rows: Rows, eps: float, gain: Tensor | None) -> Tensor:
        x, m, stride, lead = rows
        y = x.new_empty((*lead, self.k))
        self.kernel((m, 1, 1), x.get_device(), x, gain, y, stride, eps)
        return y


def _row_block(k: int) -> int:
    return min(1 << max(k - 1, 15).bit_length(), 8192)


class Tiles:
    """Form "tiles": single_pass, or stats_then_gemm when the plan's squares are "given"."""

    targets = TARGETS

    def __init__(self, plan: Plan, problem: Problem, stride_wn: int) -> None:
        from flashnorm_triton.kernels.tiles import norm_tiles_kernel

        self.plan = plan
        self.blocks_n = cdiv(problem.n, plan.block_n)
        self.stats = RowStats(problem) if plan.squares == "given" else None
        self.kernel = Kernel(
            norm_tiles_kernel,
            {
                "N": problem.n,
                "K": problem.k,
                "STRIDE_WN": stride_wn,
                "BLOCK_M": plan.block_m,
                "BLOCK_N": plan.block_n,
                "BLOCK_K": plan.block_k,
                "GROUP_M": plan.group_m,
                "SQUARES": plan.squares,
                "HAS_BIAS": problem.has_bias,
                "HAS_GAIN": problem.has_gain,
                "STAGES": plan.num_stages,
                "UPCAST": interpreting() and problem.dtype == "bfloat16",
            },
            num_warps=plan.num_warps,
        )

    def __call__(
        self, rows: Rows, w: Tensor, eps: float, bias: Tensor | None, gain: Tensor | None
    ) -> Tensor:
        s = self.stats(rows, eps) if self.stats else None
        x, m, stride, lead = rows
        y = x.new_empty((*lead, w.shape[0]))
        grid = (cdiv(m, self.plan.block_m) * self.blocks_n, 1, 1)
        self.kernel(grid, x.get_device(), x, x, w, bias, gain, s, y, m, stride, eps)
        return y


def _check_descriptors(plan: Plan, problem: Problem) -> None:
    """Raise ValueError unless the copy engine can feed this plan's kernel."""
    if problem.has_gain:
        raise ValueError(
            f"plan {plan.form!r} reads x by TMA straight into the matrix instruction and cannot "
            "apply a gain: fold it into the weight, or use another plan"
        )
    if not problem.tma:
        raise ValueError(
            f"plan {plan.form!r} needs x and weight with 16-byte aligned base and row stride "
            f"(K = {problem.k} in {problem.dtype}): use another plan"
        )


class ScaledGemm:
    """stats_then_gemm, form "scaled_gemm": needs TMA (Hopper and later)."""

    targets = ("sm90", "sm100")

    def __init__(self, plan: Plan, problem: Problem, stride_wn: int) -> None:
        from flashnorm_triton.kernels.scaled_gemm import scaled_gemm_kernel

        _check_descriptors(plan, problem)
        self.plan, self.problem, self.stride_wn = plan, problem, stride_wn
        self.blocks_n = cdiv(problem.n, plan.block_n)
        self.stats = RowStats(problem)
        self.kernel = Kernel(
            scaled_gemm_kernel,
            {
                "N": problem.n,
                "K": problem.k,
                "BLOCK_M": plan.block_m,
                "BLOCK_N": plan.block_n,
                "BLOCK_K": plan.block_k,
                "GROUP_M": plan.group_m,
                "HAS_BIAS": problem.has_bias,
                "STAGES": plan.num_stages,
            },
            {
                "x_desc": f"tensordesc<{{}}[{plan.block_m}, {plan.block_k}]>",
                "w_desc": f"tensordesc<{{}}[{plan.block_n}, {plan.block_k}]>",
            },
            num_warps=plan.num_warps,
        )

    def __call__(
        self, rows: Rows, w: Tensor, eps: float, bias: Tensor | None, gain: Tensor | None
    ) -> Tensor:
        from triton.tools.tensor_descriptor import TensorDescriptor

        x, m, stride, lead = rows
        y = x.new_empty((*lead, w.shape[0]))
        plan, problem = self.plan, self.problem
        s = self.stats(rows, eps)
        x_desc = TensorDescriptor(x, [m, problem.k], [stride, 1], [plan.block_m, plan.block_k])
        w_desc = TensorDescriptor(
            w, [problem.n, problem.k], [self.stride_wn, 1], [plan.block_n, plan.block_k]
        )
        sms = 1 if interpreting() else device_facts(x.get_device()).sm_count
        grid = (min(cdiv(m, plan.block_m) * self.blocks_n, sms), 1, 1)
        self.kernel(grid, x.get_device(), x_desc, w_desc, bias, s, y, m)
        return y


class _GluonFamily:
    """What the Gluon kernels share: x and weight as TMA descriptors with an explicit layout."""

    targets = ("sm90",)

    def __init__(self, plan: Plan, problem: Problem, stride_wn: int) -> None:
        _check_descriptors(plan, problem)
        self.plan, self.problem, self.stride_wn = plan, problem, stride_wn
        self.blocks_n = cdiv(problem.n, plan.block_n)
        self.x_layout = shared_layout(plan.block_m, plan.block_k, problem.dtype)
        self.w_layout = shared_layout(plan.block_n, plan.block_k, problem.dtype)
        self.descriptor_types = {
            "x_desc": f"tensordesc<{{}}[{plan.block_m}, {plan.block_k}],{self.x_layout!r}>",
            "w_desc": f"tensordesc<{{}}[{plan.block_n}, {plan.block_k}],{self.w_layout!r}>",
        }

    def descriptors(self, rows: Rows, w: Tensor) -> tuple[Any, Any]:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        n, k = self.problem.n, self.problem.k
        x_block = [self.plan.block_m, self.plan.block_k]
        w_block = [self.plan.block_n, self.plan.block_k]
        return (
            TensorDescriptor(rows.x, [rows.m, k], [rows.stride, 1], x_block, self.x_layout),
            TensorDescriptor(w, [n, k], [self.stride_wn, 1], w_block, self.w_layout),
        )


class HopperSwap(_GluonFamily):
    """single_pass, form "hopper_swap": needs compute capability 9.0, TMA and Gluon."""

    def __init__(self, plan: Plan, problem: Problem, stride_wn: int) -> None:
        from flashnorm_triton.kernels.hopper_swap import norm_swap_kernel

        super().__init__(plan, problem, stride_wn)
        cap = {"maxnreg": plan.max_registers} if plan.max_registers else {}
        self.kernel = Kernel(
            norm_swap_kernel,
            {
                "N": problem.n,
                "K": problem.k,
                "STAGES": plan.num_stages,
                "HAS_BIAS": problem.has_bias,
                "IN_FLIGHT": plan.in_flight,
            },
            self.descriptor_types,
            num_warps=plan.num_warps,
            **cap,
        )

    def __call__(
        self, rows: Rows, w: Tensor, eps: float, bias: Tensor | None, gain: Tensor | None
    ) -> Tensor:
        x, m, _, lead = rows
        y = x.new_empty((*lead, w.shape[0]))
        grid = (self.blocks_n, cdiv(m, self.plan.block_m), 1)
        self.kernel(grid, x.get_device(), *self.descriptors(rows, w), bias, y, m, eps)
        return y


class HopperRows(_GluonFamily):
    """Form "hopper_rows": single_pass, or stats_then_gemm when the plan's squares are "given".

    Needs what HopperSwap needs, and an output that TMA can write: N a multiple of 8.
    """

    def __init__(self, plan: Plan, problem: Problem, stride_wn: int) -> None:
        from flashnorm_triton.kernels.hopper_rows import norm_rows_kernel

        super().__init__(plan, problem, stride_wn)
        if problem.n % 8:
            raise ValueError(
                f"plan {plan.form!r} writes y by TMA and needs N a multiple of 8, not {problem.n}: "
                "use another plan"
            )
        self.stats = RowStats(problem) if plan.squares == "given" else None
        self.y_layout = shared_layout(64, plan.block_n, problem.dtype)
        y_type = f"tensordesc<{{}}[64, {plan.block_n}],{self.y_layout!r}>"
        self.kernel = Kernel(
            norm_rows_kernel,
            {
                "N": problem.n,
                "K": problem.k,
                "STAGES": plan.num_stages,
                "GROUP_M": plan.group_m,
                "SQUARES": plan.squares,
                "HAS_BIAS": problem.has_bias,
            },
            {**self.descriptor_types, "y_desc": y_type},
            num_warps=plan.num_warps,
        )

    def __call__(
        self, rows: Rows, w: Tensor, eps: float, bias: Tensor | None, gain: Tensor | None
    ) -> Tensor:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        x, m, _, lead = rows
        n = self.problem.n
        y = x.new_empty((*lead, n))
        s = self.stats(rows, eps) if self.stats else None
        y_desc = TensorDescriptor(y, [m, n], [n, 1], [64, self.plan.block_n], self.y_layout)
        tiles = cdiv(m, self.plan.block_m) * self.blocks_n
        grid = (min(tiles, device_facts(x.get_device()).sm_count), 1, 1)
        self.kernel(grid, x.get_device(), *self.descriptors(rows, w), y_desc, bias, s, m, eps)
        return y


def shared_layout(rows: int, cols: int, dtype: str) -> Any:
    """The shared-memory layout that the copy engine and wgmma agree on for a rows x cols tile."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout.get_default_for([rows, cols], getattr(gl, dtype))


class Unfused:
    """The norm kernel, then the library's matmul: the plan that nothing may be slower than."""

    def __init__(self, plan: Plan, problem: Problem, stride_wn: int) -> None:
        self.norm = RmsNorm(problem.k, problem.has_gain)

    def __call__(
        self, rows: Rows, w: Tensor, eps: float, bias: Tensor | None, gain: Tensor | None
    ) -> Tensor:
        normed = self.norm(rows, eps, gain)
        return torch.nn.functional.linear(normed, w, bias)


def unit_name(plan: Plan, problem: Problem) -> str:
    """A readable name for one compiled configuration."""
    flags = ("-bias" if problem.has_bias else "") + ("-gain" if problem.has_gain else "")
    blocks = f"{plan.block_m}x{plan.block_n}x{plan.block_k}"
    own = f"-{plan.squares}" if plan.form in ("tiles", "hopper_rows") else ""
    tuned = f"w{plan.num_warps}s{plan.num_stages}"
    if plan.form == "hopper_swap":
        tuned += f"r{plan.max_registers}f{plan.in_flight}"
    return f"{plan.form}{own}-{blocks}-{tuned}-{problem.dtype}-{problem.k}to{problem.n}{flags}"


def compile_units() -> Iterator[CompileUnit]:
    """Every kernel that can be launched, in every configuration of the shipped plans."""
    for k, has_gain in ((576, False), (4096, True), (16384, False)):
        for dtype in TRITON_DTYPE:
            yield RmsNorm(k, has_gain).kernel.unit(f"rms_norm-{dtype}-{k}", dtype)
    stats = Problem("bfloat16", 4096, 4096, 4096)
    yield RowStats(stats).kernel.unit("row_rstd-bfloat16-4096", "bfloat16")
    others = [
        (Problem(d, 512, 3072, 2048), p) for p in other_plans() for d in ("bfloat16", "float16")
    ]
    for problem, plan in [*shipped_plans(), *others]:
        family = FAMILIES[plan.form](plan, problem, problem.k)
        if not isinstance(family, Unfused):
            name = unit_name(plan, problem)
            yield family.kernel.unit(name, problem.dtype, family.targets)


FAMILIES: dict[str, Any] = {
    "gemv": Gemv,
    "tiles": Tiles,
    "scaled_gemm": ScaledGemm,
    "hopper_swap": HopperSwap,
    "hopper_rows": HopperRows,
    "library": Unfused,
}
