"""The families in plain Triton, and the unfused pair."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashnorm_triton import reference, runtime
from flashnorm_triton.compile_unit import TARGETS
from flashnorm_triton.compiled import Kernel
from flashnorm_triton.launch.common import (
    Geometry,
    Run,
    TmaFamily,
    cdiv,
    check_half,
    epilogue_constants,
    output_of,
)
from flashnorm_triton.launch.norms import Finish, RmsNorm, RowStats
from flashnorm_triton.limits import ELEMENT_BYTES
from flashnorm_triton.plans import Plan, Problem


class Gemv:
    """single_pass, form "gemv"."""

    targets = TARGETS

    def __init__(self, plan: Plan, problem: Problem, stride_wn: int) -> None:
        from flashnorm_triton.kernels.gemv import norm_gemv_kernel

        self.plan, self.problem = plan, problem
        epilogue = epilogue_constants(problem)
        self.kernel = Kernel(
            norm_gemv_kernel,
            {
                "N": problem.n,
                "K": problem.k,
                "STRIDE_WN": stride_wn,
                "ROWS": plan.block_m,
                "BLOCK_N": plan.block_n,
                "BLOCK_K": plan.block_k,
                "HAS_BIAS": epilogue.pop("HAS_BIAS"),
                "HAS_GAIN": problem.has_gain,
                **epilogue,
                "STAGES": plan.num_stages,
                "VECTOR": 16 // ELEMENT_BYTES[problem.dtype],
                "ONE_ROW": plan.block_m == 1 and not problem.epilogue,
                "NORMED": problem.normed,
                "SCALE": problem.scale,
            },
            num_warps=plan.num_warps,
        )

    def bind(self, geometry: Geometry, eps: float) -> Run:
        m, stride, lead, device = geometry
        plan = self.plan
        output = output_of((*lead, self.problem.width), self.problem, geometry)
        grid = (cdiv(self.problem.n, plan.block_n), cdiv(m, plan.block_m), 1)
        launch = self.kernel.bind(grid, device, last=(m, stride, eps))

        def run(
            x: Tensor,
            w: Tensor,
            bias: Tensor | None,
            gain: Tensor | None,
            row_sums: Tensor | None = None,
            residual: Tensor | None = None,
        ) -> Tensor:
            y = output(x)
            launch(x, w, bias, gain, row_sums, residual, y)
            return y

        return run


class Unfused:
    """The norm kernel, then the library's matmul: the plan that nothing may be slower than.

    A LayerNorm is torch's, one launch too; what follows a bias is one more.
    """

    def __init__(self, plan: Plan, problem: Problem, stride_wn: int) -> None:
        dtype = getattr(torch, problem.dtype)
        self.norm = RmsNorm(problem.k, problem.has_gain, dtype) if problem.normed else None
        more = problem.activation or problem.gated or problem.has_residual
        self.finish = Finish(problem) if more else None
        self.problem = problem

    def bind(self, geometry: Geometry, eps: float) -> Run:
        if not self.problem.normed:
            return self._bare(geometry)
        norm, linear = self._norm(geometry, eps), torch.nn.functional.linear
        finish = self.finish.bind(geometry) if self.finish else None

        def run(
            x: Tensor,
            w: Tensor,
            bias: Tensor | None,
            gain: Tensor | None,
            row_sums: Tensor | None = None,
            residual: Tensor | None = None,
        ) -> Tensor:
            z = linear(norm(x, gain), w, bias)
            return z if finish is None else finish(z, residual)

        return run

    def _bare(self, geometry: Geometry) -> Run:
        """No norm: the library adds the residual, or what it cannot add is one more launch."""
        scale, shape = self.problem.scale, (*geometry.lead, self.problem.n)
        linear, addmm = torch.nn.functional.linear, torch.addmm

        def run(
            x: Tensor,
            w: Tensor,
            bias: Tensor | None,
            gain: Tensor | None,
            row_sums: Tensor | None = None,
            residual: Tensor | None = None,
        ) -> Tensor:
            if residual is not None and bias is None:
                rows = x.reshape(-1, x.shape[-1])
                return addmm(residual.view(len(rows), -1), rows, w.t(), alpha=scale).view(shape)
            z = linear(x, w, bias).view(shape)
            if residual is not None:
                return torch.add(residual, z, alpha=scale)
            return z if scale == 1.0 else z * scale

        return run

    def _norm(self, geometry: Geometry, eps: float) -> Callable[[Tensor, Tensor | None], Tensor]:
        if not self.problem.centred:
            return self.norm.bind(geometry, eps)
        size, shape = (self.problem.k,), (*geometry.lead, self.problem.k)
        layer_norm = torch.nn.functional.layer_norm

        def centred(x: Tensor, gain: Tensor | None) -> Tensor:
            x = x.view(shape)
            if gain is not None and gain.dtype != x.dtype:
                return reference.normalise(x, eps, gain, centred=True).to(x.dtype)
            return layer_norm(x, size, gain, None, eps)

        return centred


class Tiles:
    """Form "tiles": single_pass, or stats_then_gemm when the plan's squares are "given"."""

    targets = TARGETS

    def __init__(self, plan: Plan, problem: Problem, stride_wn: int) -> None:
        from flashnorm_triton.kernels.tiles import norm_tiles_kernel

        check_half(plan, problem)
        if problem.has_gain and problem.dtype == "float16":
            raise ValueError(
                f"plan {plan.form!r} would hold x * gain in fp16 before the division, where it can "
                "overflow: fold the gain into the weight, or use another plan"
            )
        self.plan, self.problem = plan, problem
        given = problem.normed and plan.squares == "given"
        self.stats = RowStats(problem) if given else None
        epilogue = epilogue_constants(problem)
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
                "SQUARES": plan.squares if problem.normed else "none",
                "HAS_BIAS": epilogue.pop("HAS_BIAS"),
                "HAS_GAIN": problem.has_gain,
                **epilogue,
                "STAGES": plan.num_stages,
                "UPCAST": runtime.interpreting() and problem.dtype == "bfloat16",
                "SCALE": problem.scale,
            },
            num_warps=plan.num_warps,
        )

    def bind(self, geometry: Geometry, eps: float) -> Run:
        m, stride, lead, device = geometry
        output = output_of((*lead, self.problem.width), self.problem, geometry)
        stats = self.stats.bind(geometry, eps) if self.stats else None
        tiles = cdiv(m, self.plan.block_m) * cdiv(self.problem.n, self.plan.block_n)
        launch = self.kernel.bind((tiles, 1, 1), device, last=(m, stride, eps))

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
            launch(x, x, w, bias, gain, s, mean, row_sums, residual, y)
            return y

        return run


class ScaledGemm(TmaFamily):
    """stats_then_gemm, form "scaled_gemm": needs TMA (Hopper and later)."""

    targets = ("sm90", "sm100")

    def __init__(self, plan: Plan, problem: Problem, stride_wn: int) -> None:
        from flashnorm_triton.kernels.scaled_gemm import scaled_gemm_kernel

        super().__init__(plan, problem, stride_wn, gluon=False)
        self.stats = RowStats(problem)
        epilogue = epilogue_constants(problem)
        del epilogue["GATED"]  # the kernel has none
        self.kernel = Kernel(
            scaled_gemm_kernel,
            {
                "N": problem.n,
                "K": problem.k,
                "BLOCK_M": plan.block_m,
                "BLOCK_N": plan.block_n,
                "BLOCK_K": plan.block_k,
                "GROUP_M": plan.group_m,
                **epilogue,
                "STAGES": plan.num_stages,
            },
            self.types(x_desc=(plan.block_m, plan.block_k), w_desc=(plan.block_n, plan.block_k)),
            num_warps=plan.num_warps,
        )

    def bind(self, geometry: Geometry, eps: float) -> Run:
        m, _, lead, device = geometry
        output = output_of((*lead, self.n), self.problem, geometry)
        stats = self.stats.bind(geometry, eps)
        tiles = cdiv(m, self.plan.block_m) * cdiv(self.n, self.plan.block_n)
        programs = 1 if runtime.interpreting() else runtime.device_facts(device).sm_count
        grid = (min(tiles, programs), 1, 1)
        launch = self.kernel.bind(grid, device, self.x_and_w(geometry), (m,))

        def run(
            x: Tensor,
            w: Tensor,
            bias: Tensor | None,
            gain: Tensor | None,
            row_sums: Tensor | None = None,
            residual: Tensor | None = None,
        ) -> Tensor:
            s, mean = stats(x)
            y = output(x)
            launch(x, w, bias, s, mean, row_sums, residual, y)
            return y

        return run
