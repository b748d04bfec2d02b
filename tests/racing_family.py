"""The racing kernel form (tests/racing_kernel.py) as a family that a plan can name.

It takes the place of the form "tiles" in a process that calls ``register``: the tuner then meets it
as it would meet a kernel of the package, built by a worker, linted, launched through
``norm_linear(..., plan=RACING)``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from flashnorm_triton import launch
from flashnorm_triton.plans import Plan, Problem

RACING = Plan("single_pass", "tiles", 64, 64, 128, num_warps=4, num_stages=3)
# The same kernel without a pipeline: nothing is in flight, and it is right.
TAME = Plan("single_pass", "tiles", 64, 64, 128, num_warps=4, num_stages=1)

WORKER = [
    sys.executable,
    "-c",
    f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import racing_family; "
    "racing_family.register(); from flashnorm_triton.tuning.build import main; main()",
]


class Racing:
    """Needs M, N and K that are multiples of the blocks."""

    def __init__(self, plan: Plan, problem: Problem, stride_wn: int) -> None:
        from racing_kernel import racing_pointer_kernel

        self.plan, self.problem = plan, problem
        blocks = {"BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, "BLOCK_K": plan.block_k}
        self.kernel = launch.Kernel(
            racing_pointer_kernel, blocks, num_warps=plan.num_warps, num_stages=plan.num_stages
        )

    def bind(self, geometry: launch.Geometry, eps: float) -> launch.Run:
        n, k = self.problem.n, self.problem.k
        grid = (geometry.m // self.plan.block_m, n // self.plan.block_n, 1)

        def run(x: Any, w: Any, bias: Any, gain: Any) -> Any:
            y = x.new_empty((*geometry.lead, n))
            self.kernel(grid, geometry.device, x, w, y, n, k, eps)
            return y

        return run


def register() -> type:
    """Put the racing form in the place of the tiles; returns the family that was there."""
    stock, launch.FAMILIES["tiles"] = launch.FAMILIES["tiles"], Racing
    return stock
