"""The families in Gluon for Hopper: swapped tiles for some rows, row tiles for many."""

from __future__ import annotations

from torch import Tensor

from flashnorm_triton import runtime, workspace
from flashnorm_triton.compiled import Kernel
from flashnorm_triton.launch.common import Geometry, Run, TmaFamily, cdiv
from flashnorm_triton.launch.norms import RowStats
from flashnorm_triton.plans import Plan, Problem


class HopperSwap(TmaFamily):
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


class HopperRows(TmaFamily):
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
        grid = (min(tiles, runtime.device_facts(device).sm_count), 1, 1)

        def run(x: Tensor, w: Tensor, bias: Tensor | None, gain: Tensor | None) -> Tensor:
            s = stats(x) if stats else None
            y = x.new_empty(shape)
            kernel(grid, device, x_tile(x), w_tile(w), y_tile(y), bias, s, m, eps)
            return y

        return run
