"""The strategy ``overlap``: the library's product of the raw x beside the statistics of x."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from flashnorm_triton import streams
from flashnorm_triton.compile_unit import CompileUnit
from flashnorm_triton.compiled import Kernel
from flashnorm_triton.launch.common import (
    Geometry,
    Run,
    cdiv,
    empty_of,
    epilogue_constants,
    output_of,
)
from flashnorm_triton.launch.norms import RowStats
from flashnorm_triton.plans import Plan, Problem

_FAR = 1 << 31  # elements from the first row to the last that the library can count for sure
Statistics = tuple[Tensor, Tensor | None]
"""s (M,) in fp32, and the mean beside it or None."""


class Overlap:
    """Form "two_streams": product and statistics side by side, joined by events, then the scale.

    The library keeps the product of halves in fp32, so that y is rounded once, and no unnormalised
    value is ever stored in a half.
    """

    def __init__(self, plan: Plan, problem: Problem, stride_wn: int) -> None:
        if problem.has_gain:
            raise ValueError(
                f"plan {plan.form!r} multiplies the raw x and cannot apply a gain: fold it into "
                "the weight, or use another plan"
            )
        self.problem = problem
        self.stats, self.scale = RowStats(problem), ScaleRows(problem)

    def bind(self, geometry: Geometry, eps: float) -> Run:
        rows = (geometry.m, self.problem.k)
        buffers, device = self.buffers(geometry), geometry.device
        output, product = self.scale.output(geometry), product_of(self.problem, device)
        stats, scale = self.stats.into(geometry, eps), self.scale.bind(geometry)
        join_on, far = streams.join_on, geometry.stride * geometry.m >= _FAR

        def run(
            x: Tensor,
            w: Tensor,
            bias: Tensor | None,
            gain: Tensor | None,
            row_sums: Tensor | None = None,
            residual: Tensor | None = None,
        ) -> Tensor:
            # All that the side stream touches is allocated before the fork.
            s, mean = buffers(x)
            join = join_on(device)
            with join:
                with join.beside():
                    stats(x, s, mean)
                near = x.contiguous() if far else x
                z = product(near if near.dim() == 2 else near.view(rows), w)
            return scale(z, s, mean, bias, row_sums, residual, output(x))

        return run

    def buffers(self, geometry: Geometry) -> Callable[[Tensor], Statistics]:
        """What allocates the statistics of a call."""
        scales = empty_of((geometry.m,), torch.float32, geometry.device)
        centred = self.problem.centred

        def fresh(x: Tensor) -> Statistics:
            return scales(x), scales(x) if centred else None

        return fresh

    def alone(self, geometry: Geometry, eps: float) -> Run:
        """``bind``'s kernels without the product of the library, and without a second stream."""
        stats, scale = self.stats.bind(geometry, eps), self.scale.bind(geometry)
        output, columns = self.scale.output(geometry), self.problem.n

        def run(
            x: Tensor,
            w: Tensor,
            bias: Tensor | None,
            gain: Tensor | None,
            row_sums: Tensor | None = None,
            residual: Tensor | None = None,
        ) -> Tensor:
            s, mean = stats(x)
            z = torch.empty(geometry.m, columns, dtype=torch.float32, device=x.device)
            return scale(z, s, mean, bias, row_sums, residual, output(x))

        return run


def product_of(problem: Problem, device: int) -> Callable[[Tensor, Tensor], Tensor]:
    """x (M, K), w (N, K) -> x @ w.T (M, N) by the library, in fp32."""
    if problem.dtype == "float32":
        return lambda x, w: torch.mm(x, w.t())
    if device < 0:  # torch has no such product on the CPU; the interpreter's tests have small ones
        return lambda x, w: torch.mm(x.float(), w.t().float())
    return lambda x, w: torch.mm(x, w.t(), out_dtype=torch.float32)


class ScaleRows:
    """What follows the product z (M, N): the scale of the rows, the epilogue, the one rounding."""

    def __init__(self, problem: Problem) -> None:
        from flashnorm_triton.kernels.scale_rows import scale_rows_kernel

        self.problem = problem
        self.block = min(1 << max(problem.width - 1, 15).bit_length(), 1024)
        self.kernel = Kernel(
            scale_rows_kernel,
            {"WIDTH": problem.width, "BLOCK": self.block, **epilogue_constants(problem)},
            num_warps=4,
        )

    def output(self, geometry: Geometry) -> Callable[[Tensor], Tensor]:
        """What allocates y, given x."""
        return output_of((*geometry.lead, self.problem.width), self.problem, geometry)

    def bind(self, geometry: Geometry) -> Callable[..., Tensor]:
        """scale(z, s, mean, bias, row_sums, residual, y) -> y."""
        grid = (geometry.m, cdiv(self.problem.width, self.block), 1)
        launch = self.kernel.bind(grid, geometry.device)

        def scale(
            z: Tensor,
            s: Tensor,
            mean: Tensor | None,
            bias: Tensor | None,
            row_sums: Tensor | None,
            residual: Tensor | None,
            y: Tensor,
        ) -> Tensor:
            launch(z, s, mean, row_sums, bias, residual, y)
            return y

        return scale

    def unit(self, name: str) -> CompileUnit:
        """The kernel described for a compile without a GPU."""
        unit = self.kernel.unit(name, self.problem.dtype)
        return replace(unit, signature={**unit.signature, "z_ptr": "*fp32"})
