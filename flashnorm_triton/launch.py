"""From a plan to a running kernel: arguments, grids and launches; one class a kernel family.

A family is one problem made ready. ``bind`` fixes what a call's shapes decide (rows, strides, grid,
output shape, eps) and returns ``run(x, weight, bias, gain) -> y``, which allocates y and launches:
everything that can be computed before the call has been.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashnorm_triton import workspace
from flashnorm_triton.compile_unit import TARGETS, CompileUnit
from flashnorm_triton.compiled import TRITON_DTYPE, Kernel, Tile
from flashnorm_triton.plans import Plan, Problem, other_plans, shipped_plans
from flashnorm_triton.runtime import device_facts, interpreting

Run = Callable[[Tensor, Tensor, "Tensor | None", "Tensor | None"], Tensor]


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


class Geometry(NamedTuple):
    """x as M rows of K elements: M, the row stride in elements, the leading shape, the device."""

    m: int
    stride: int
    lead: tuple[int, ...]
    device: int


class Gemv:
    """single_pass, form "gemv"."""

    targets = TARGETS

    def __init__(self, plan: Plan, problem: Problem, stride_wn: int) -> None:
        from flashnorm_triton.kernels.gemv import norm_gemv_kernel

        self.plan, self.n = plan, problem.n
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

    def bind(self, geometry: Geometry, eps: float) -> Run:
        m, stride, lead, device = geometry
        kernel, shape = self.kernel, (*lead, self.n)
        grid = (cdiv(self.n, self.plan.block_n), cdiv(m, self.plan.block_m), 1)

        def run(x: Tensor, w: Tensor, bias: Tensor | None, gain: Tensor | None) -> Tensor:
            y = x.new_empty(shape)
            kernel(grid, device, x, w, bias, gain, y, m, stride, eps)
            return y

        return run


class RowStats:
    """The scale of every row: s (M,) fp32."""

    def __init__(self, problem: Problem) -> None:
        from flashnorm_triton.kernels.rows import row_rstd_kernel

        constants = {"K": problem.k, "BLOCK_K": _row_block(problem.k)}
        self.kernel = Kernel(row_rstd_kernel, constants, num_warps=4)

    def bind(self, geometry: Geometry, eps: float) -> Callable[[Tensor], Tensor]:
        m, stride, _, device = geometry
        kernel, grid = self.kernel, (m, 1, 1)

        def run(x: Tensor) -> Tensor:
            s = torch.empty(m, dtype=torch.float32, device=x.device)
            kernel(grid, device, x, s, stride, eps)
            return s

        return run


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

    def bind(self, geometry: Geometry, eps: float) -> Callable[[Tensor, Tensor | None], Tensor]:
        m, stride, lead, device = geometry
        kernel, grid, shape = self.kernel, (m, 1, 1), (*lead, self.k)

        def run(x: Tensor, gain: Tensor | None) -> Tensor:
            y = x.new_empty(shape)
            kernel(grid, device, x, gain, y, stride, eps)
            return y

        return run


def _row_block(k: int) -> int:
    return min(1 << max(k - 1, 15).bit_length(), 8192)


class Unfused:
    """The norm kernel, then the library's matmul: the plan that nothing may be slower than."""

    def __init__(self, plan: Plan, problem: Problem, stride_wn: int) -> None:
        self.norm = RmsNorm(problem.k, problem.has_gain)

    def bind(self, geometry: Geometry, eps: float) -> Run:
        norm, linear = self.norm.bind(geometry, eps), torch.nn.functional.linear

        def run(x: Tensor, w: Tensor, bias: Tensor | None, gain: Tensor | None) -> Tensor:
            return linear(norm(x, gain), w, bias)

        return run


def _check_half(plan: Plan, problem: Problem) -> None:
    """The tensor cores multiply halves; the interpreter, for tests, anything."""
    if problem.dtype not in ("bfloat16", "float16") and not interpreting():
        raise ValueError(
            f"plan {plan.form!r} multiplies bfloat16 or float16 on the tensor cores, not "
            f"{problem.dtype}: use the gemv or library form"
        )


class Tiles:
    """Form "tiles": single_pass, or stats_then_gemm when the plan's squares are "given"."""

    targets = TARGETS

    def __init__(self, plan: Plan, problem: Problem, stride_wn: int) -> None:
        from flashnorm_triton.kernels.tiles import norm_tiles_kernel

        _check_half(plan, problem)
        if problem.has_gain and problem.dtype == "float16":
            raise ValueError(
                f"plan {plan.form!r} would hold x * gain in fp16 before the division, where it can "
                "overflow: fold the gain into the weight, or use another plan"
            )
        self.plan, self.n = plan, problem.n
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

    def bind(self, geometry: Geometry, eps: float) -> Run:
        m, stride, lead, device = geometry
        kernel, shape = self.kernel, (*lead, self.n)
        stats = self.stats.bind(geometry, eps) if self.stats else None
        grid = (cdiv(m, self.plan.block_m) * cdiv(self.n, self.plan.block_n), 1, 1)

        def run(x: Tensor, w: Tensor, bias: Tensor | None, gain: Tensor | None) -> Tensor:
            s = stats(x) if stats else None
            y = x.new_empty(shape)
            kernel(grid, device, x, x, w, bias, gain, s, y, m, stride, eps)
            return y

        return run


class _TmaFamily:
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
        _check_half(plan, problem)
        self.plan, self.problem = plan, problem
        self.n, self.k, self.stride_wn = problem.n, problem.k, stride_wn
        self.gluon = gluon

    def tile(self, rows: int, columns: int) -> Callable[[int, int, int], Any]:
        """A maker of descriptors with rows x columns blocks, for (size, size, row stride)."""
        layout = _shared_layout(rows, columns, self.problem.dtype) if self.gluon else None

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
                layout = f",{_shared_layout(rows, columns, self.problem.dtype)!r}"
            spelled[argument] = f"tensordesc<{{}}[{rows}, {columns}]{layout}>"
        return spelled


def _shared_layout(rows: int, columns: int, dtype: str) -> Any:
    """The shared-memory layout that the copy engine and wgmma agree on for a tile."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout.get_default_for([rows, columns], getattr(gl, dtype))


class ScaledGemm(_TmaFamily):
    """stats_then_gemm, form "scaled_gemm": needs TMA (Hopper and later)."""

    targets = ("sm90", "sm100")

    def __init__(self, plan: Plan, problem: Problem, stride_wn: int) -> None:
        from flashnorm_triton.kernels.scaled_gemm import scaled_gemm_kernel

        super().__init__(plan, problem, stride_wn, gluon=False)
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
            self.types(x_desc=(plan.block_m, plan.block_k), w_desc=(plan.block_n, plan.block_k)),
            num_warps=plan.num_warps,
        )

    def bind(self, geometry: Geometry, eps: float) -> Run:
        m, _, lead, device = geometry
        kernel, shape = self.kernel, (*lead, self.n)
        stats = self.stats.bind(geometry, eps)
        x_tile, w_tile = self.x_and_w(geometry)
        tiles = cdiv(m, self.plan.block_m) * cdiv(self.n, self.plan.block_n)
        grid = (min(tiles, 1 if interpreting() else device_facts(device).sm_count), 1, 1)

        def run(x: Tensor, w: Tensor, bias: Tensor | None, gain: Tensor | None) -> Tensor:
            s = stats(x)
            y = x.new_empty(shape)
            kernel(grid, device, x_tile(x), w_tile(w), bias, s, y, m)
            return y

        return run


class HopperSwap(_TmaFamily):
    """single_pass, form "hopper_swap": needs compute capability 9.0, TMA and Gluon."""

    targets = ("sm90",)

    def __init__(self, plan: Plan, problem: Problem, stride_wn: int) -> None:
        from flashnorm_triton.kernels.hopper_swap import norm_swap_kernel

        super().__init__(plan, problem, stride_wn, gluon=True)
        cap = {"maxnreg": plan.max_registers} if plan.max_registers else {}
        self.kernel = Kernel(
            norm_swap_kernel,
            {
                "N": problem.n,
                "K": problem.k,
                "STAGES": plan.num_stages,
                "HAS_BIAS": problem.has_bias,
                "IN_FLIGHT": plan.in_flight,
                "SPLIT": plan.split_k,
            },
            self.types(x_desc=(plan.block_m, plan.block_k), w_desc=(plan.block_n, plan.block_k)),
            num_warps=plan.num_warps,
            **cap,
        )

    def bind(self, geometry: Geometry, eps: float) -> Run:
        m, _, lead, device = geometry
        plan, kernel, shape = self.plan, self.kernel, (*lead, self.n)
        x_tile, w_tile = self.x_and_w(geometry)
        grid = (cdiv(self.n, plan.block_n), cdiv(m, plan.block_m), plan.split_k)
        tiles = grid[0] * grid[1]
        split = plan.split_k > 1
        part_values = tiles * plan.split_k * (plan.block_n + 1) * plan.block_m

        def run(x: Tensor, w: Tensor, bias: Tensor | None, gain: Tensor | None) -> Tensor:
            y = x.new_empty(shape)
            parts = counters = None
            if split:
                parts = workspace.parts(x, part_values)
                counters = workspace.counters(device, kernel.stream(device), tiles)
            kernel(grid, device, x_tile(x), w_tile(w), bias, y, parts, counters, m, eps)
            return y

        return run


class HopperRows(_TmaFamily):
    """Form "hopper_rows": single_pass, or stats_then_gemm when the plan's squares are "given".

    Needs what HopperSwap needs, and an output that TMA can write: N a multiple of 8.
    """

    targets = ("sm90",)

    def __init__(self, plan: Plan, problem: Problem, stride_wn: int) -> None:
        from flashnorm_triton.kernels.hopper_rows import norm_rows_kernel

        super().__init__(plan, problem, stride_wn, gluon=True)
        if problem.n % 8:
            raise ValueError(
                f"plan {plan.form!r} writes y by TMA and needs N a multiple of 8, not {problem.n}: "
                "use another plan"
            )
        self.stats = RowStats(problem) if plan.squares == "given" else None
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
            self.types(
                x_desc=(plan.block_m, plan.block_k),
                w_desc=(plan.block_n, plan.block_k),
                y_desc=(64, plan.block_n),
            ),
            num_warps=plan.num_warps,
        )

    def bind(self, geometry: Geometry, eps: float) -> Run:
        m, _, lead, device = geometry
        kernel, shape = self.kernel, (*lead, self.n)
        stats = self.stats.bind(geometry, eps) if self.stats else None
        x_tile, w_tile = self.x_and_w(geometry)
        y_tile = self.tile(64, self.plan.block_n)(m, self.n, self.n)
        tiles = cdiv(m, self.plan.block_m) * cdiv(self.n, self.plan.block_n)
        grid = (min(tiles, device_facts(device).sm_count), 1, 1)

        def run(x: Tensor, w: Tensor, bias: Tensor | None, gain: Tensor | None) -> Tensor:
            s = stats(x) if stats else None
            y = x.new_empty(shape)
            kernel(grid, device, x_tile(x), w_tile(w), y_tile(y), bias, s, m, eps)
            return y

        return run


FAMILIES: dict[str, Any] = {
    "gemv": Gemv,
    "tiles": Tiles,
    "scaled_gemm": ScaledGemm,
    "hopper_swap": HopperSwap,
    "hopper_rows": HopperRows,
    "library": Unfused,
}


def unit_name(plan: Plan, problem: Problem) -> str:
    """A readable name for one compiled configuration."""
    flags = ("-bias" if problem.has_bias else "") + ("-gain" if problem.has_gain else "")
    blocks = f"{plan.block_m}x{plan.block_n}x{plan.block_k}"
    own = f"-{plan.squares}" if plan.form in ("tiles", "hopper_rows") else ""
    tuned = f"w{plan.num_warps}s{plan.num_stages}"
    if plan.form == "hopper_swap":
        tuned += f"r{plan.max_registers}f{plan.in_flight}k{plan.split_k}"
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
