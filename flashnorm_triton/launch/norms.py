"""The row kernels ready to launch: the scale of every row, the stand-alone norm, its end."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashnorm_triton.compiled import Kernel
from flashnorm_triton.launch.common import Geometry, empty_of
from flashnorm_triton.plans import Problem


class RowStats:
    """The scale of every row, s (M,) fp32, and for a centred problem its mean beside it."""

    def __init__(self, problem: Problem) -> None:
        from flashnorm_triton.kernels.rows import row_rstd_kernel

        self.centred = problem.centred
        constants = {
            "K": problem.k, "BLOCK_K": _row_block(problem.k), "CENTRED": problem.centred,
        }  # fmt: skip
        self.kernel = Kernel(row_rstd_kernel, constants, num_warps=4)

    def bind(
        self, geometry: Geometry, eps: float
    ) -> Callable[[Tensor], tuple[Tensor, Tensor | None]]:
        scales, centred = empty_of((geometry.m,), torch.float32, geometry.device), self.centred
        into = self.into(geometry, eps)

        def run(x: Tensor) -> tuple[Tensor, Tensor | None]:
            s = scales(x)
            mean = scales(x) if centred else None
            into(x, s, mean)
            return s, mean

        return run

    def into(
        self, geometry: Geometry, eps: float
    ) -> Callable[[Tensor, Tensor, Tensor | None], None]:
        """The launch alone, into memory that the caller owns: into(x, s, mean)."""
        m, stride, _, device = geometry
        return self.kernel.bind((m, 1, 1), device, last=(stride, eps))


class RmsNorm:
    """The stand-alone norm, or residual + norm: y of x's shape and dtype, contiguous."""

    def __init__(
        self,
        k: int,
        has_gain: bool,
        dtype: torch.dtype,
        has_residual: bool = False,
        one_plus: bool = False,
    ) -> None:
        from flashnorm_triton.kernels.rows import rms_norm_kernel

        block_k = _row_block(k)
        self.k, self.dtype = k, dtype
        self.kernel = Kernel(
            rms_norm_kernel,
            {
                "K": k,
                "BLOCK_K": block_k,
                "HAS_GAIN": has_gain,
                "HAS_RESIDUAL": has_residual,
                "ONE_PLUS": one_plus,
            },
            num_warps=4 if block_k <= 2048 else 8,
        )

    def bind(self, geometry: Geometry, eps: float) -> Callable[..., Tensor]:
        """run(x, gain, residual=None) -> y."""
        m, stride, lead, device = geometry
        launch = self.kernel.bind((m, 1, 1), device, last=(stride, eps))
        output = empty_of((*lead, self.k), self.dtype, device)

        def run(x: Tensor, gain: Tensor | None, residual: Tensor | None = None) -> Tensor:
            y = output(x)
            launch(x, gain, residual, y)
            return y

        return run


class Finish:
    """What follows the library's matmul, z (M, N): the activation or gated pair, the residual."""

    def __init__(self, problem: Problem) -> None:
        from flashnorm_triton.kernels.rows import finish_kernel

        self.width, self.stride = problem.width, problem.n
        self.dtype = getattr(torch, problem.dtype)
        self.block = min(_row_block(problem.width), 1024)
        self.kernel = Kernel(
            finish_kernel,
            {
                "WIDTH": problem.width,
                "BLOCK": self.block,
                "ACTIVATION": problem.activation,
                "GATED": problem.gated,
                "HAS_RESIDUAL": problem.has_residual,
            },
            num_warps=4,
        )

    def bind(self, geometry: Geometry) -> Callable[[Tensor, Tensor | None], Tensor]:
        grid = (geometry.m, -(-self.width // self.block), 1)
        launch = self.kernel.bind(grid, geometry.device, last=(self.stride,))
        output = empty_of((*geometry.lead, self.width), self.dtype, geometry.device)

        def run(z: Tensor, residual: Tensor | None) -> Tensor:
            y = output(z)
            launch(z, residual, y)
            return y

        return run


def _row_block(k: int) -> int:
    return min(1 << max(k - 1, 15).bit_length(), 8192)
