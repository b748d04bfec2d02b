"""The families in Gluon for Hopper: swapped tiles for some rows, row tiles for many."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashnorm_triton import limits, runtime, workspace
from flashnorm_triton.compiled import Kernel
from flashnorm_triton.launch.common import Geometry, Run, TmaFamily, cdiv, output_of
from flashnorm_triton.launch.norms import RowStats
from flashnorm_triton.plans import Plan, Problem


class _Hopper(TmaFamily):
    """What both share: the epilogue's constants and the launch options."""

    targets = ("sm90",)

    def __init__(self, plan: Plan, problem: Problem, stride_wn: int) -> None:
        super().__init__(plan, problem, stride_wn, gluon=True)
        if obstacle := limits.unserved(plan, problem):
            raise ValueError(f"{obstacle}: use another plan")
        self.width = problem.width

    def epilogue(self) -> dict[str, Any]:
        problem = self.problem
        return {
            "HAS_BIAS": problem.has_bias,
            "CENTRED": problem.centred,
            "ACTIVATION": problem.activation,
            "HAS_RESIDUAL": problem.has_residual,
        }

    def options(self) -> dict[str, int]:
        cap = {"maxnreg": self.plan.max_registers} if self.plan.max_registers else {}
        return {"num_warps": self.plan.num_warps, **cap}


class HopperSwap(_Hopper):
    """single_pass, form "hopper_swap": needs compute capability 9.0, TMA and Gluon."""

    def __init__(self, plan: Plan, problem: Problem, stride_wn: int) -> None:
        from flashnorm_triton.kernels.hopper_swap import norm_swap_kernel

        super().__init__(plan, problem, stride_wn)
        self.kernel = Kernel(
            norm_swap_kernel,
            {
                "N": problem.width,
                "K": problem.k,
                "STAGES": plan.num_stages,
                **self.epilogue(),
                "GATED": problem.gated,
                "IN_FLIGHT": plan.in_flight,
                "SPLIT": plan.split_k,
                "NORMED": problem.normed,
                "SCALE": problem.scale,
            },
            self.types(x_desc=(plan.block_m, plan.block_k), w_desc=(plan.block_n, plan.block_k)),
            **self.options(),
        )

    def bind(self, geometry: Geometry, eps: float) -> Run:
        m, _, lead, device = geometry
        plan, kernel = self.plan, self.kernel
        output = output_of((*lead, self.width), self.problem, geometry)
        grid = (cdiv(self.width, plan.block_n), cdiv(m, plan.block_m), plan.split_k)
        launch = kernel.bind(grid, device, self.x_and_w(geometry), (m, eps))
        tiles = grid[0] * grid[1]
        split = plan.split_k > 1
        part_values = tiles * plan.split_k * (plan.block_n + 1) * plan.block_m

        def run(
            x: Tensor,
            w: Tensor,
            bias: Tensor | None,
            gain: Tensor | None,
            row_sums: Tensor | None = None,
            residual: Tensor | None = None,
        ) -> Tensor:
            y = output(x)
            parts = counters = None
            if split:
                parts = workspace.parts(x, part_values)
                counters = workspace.counters(device, kernel.stream(device), tiles)
            launch(x, w, bias, row_sums, residual, y, parts, counters)
            return y

        return run


class HopperRows(_Hopper):
    """Form "hopper_rows": single_pass, or stats_then_gemm when the plan's squares are "given".

    Needs what HopperSwap needs, and an output that TMA can write: its width a multiple of 8.
    """

    def __init__(self, plan: Plan, problem: Problem, stride_wn: int) -> None:
        from flashnorm_triton.kernels.hopper_rows import norm_rows_kernel

        super().__init__(plan, problem, stride_wn)
        if problem.width % 8:
            raise ValueError(
                f"plan {plan.form!r} writes y by TMA and needs N a multiple of 8, not "
                f"{problem.width}: use another plan"
            )
        given = problem.normed and plan.squares == "given"
        self.stats = RowStats(problem) if given else None
        wide = limits.two_halves(plan)
        # Columns of one accumulator.
        self.columns = plan.block_n // 2 if wide else plan.block_n
        self.kernel = Kernel(
            norm_rows_kernel,
            {
                "N": problem.width,
                "K": problem.k,
                "STAGES": plan.num_stages,
                "GROUP_M": plan.group_m,
                "SQUARES": plan.squares if problem.normed else "none",
                **self.epilogue(),
                "SECOND": "wide" if wide else "gated" if problem.gated else "",
                "SCALE": problem.scale,
            },
            self.types(
                x_desc=(plan.block_m, plan.block_k),
                w_desc=(self.columns, plan.block_k),
                y_desc=(64, self.columns),
            ),
            **self.options(),
        )

    def bind(self, geometry: Geometry, eps: float) -> Run:
        m, _, lead, device = geometry
        plan = self.plan
        output = output_of((*lead, self.width), self.problem, geometry)
        stats = self.stats.bind(geometry, eps) if self.stats else None
        x_tile = self.tile(plan.block_m, plan.block_k)(m, self.k, geometry.stride)
        w_tile = self.tile(self.columns, plan.block_k)(self.n, self.k, self.stride_wn)
        y_tile = self.tile(64, self.columns)(m, self.width, self.width)
        tiles = cdiv(m, plan.block_m) * cdiv(self.width, plan.block_n)
        grid = (min(tiles, runtime.device_facts(device).sm_count), 1, 1)
        launch = self.kernel.bind(grid, device, (x_tile, w_tile, y_tile), (m, eps))

        def run(
            x: Tensor,
            w: Tensor,
            bias: Tensor | None,
            gain: Tensor | None,
            row_sums: Tensor | None = None,
            residual: Tensor | None = None,
        ) -> Tensor:
            s, mean = stats(x) if stats else (None, None)
            y = output(x)
            launch(x, w, y, bias, row_sums, residual, s, mean)
            return y

        return run
