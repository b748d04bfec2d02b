"""The GPU side of tuning: buffers, candidates ready to launch, and work that disturbs them.

One ``Rig`` a tuning run, one ``Bench`` a cell. Weights and inputs are views of two buffers that all
cells share; a bench has as many sets of them as it takes to pass the L2 cache 2.5 times, so that a
replay finds cold weights, as a layer of a model does.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from flashnorm_triton import block_ops
from flashnorm_triton.limits import ELEMENT_BYTES
from flashnorm_triton.ops import norm_linear
from flashnorm_triton.plans import Device, Plan, Problem
from flashnorm_triton.runtime import device_facts
from flashnorm_triton.tables import Gpu
from flashnorm_triton.tuning import validate
from flashnorm_triton.tuning.build import Target
from flashnorm_triton.tuning.measure import Backend, CudaBackend, require_gpu

EPS = 1e-6
_MOST_SETS = 256
_USUAL_CACHE = 64 << 20
_CHECK_US = 20_000.0  # about what the repeated launches of one candidate may take
_FEWEST_LAUNCHES = 4


class Session(Protocol):
    """What the tuner needs of one cell."""

    rotations: int

    def verify(self, plan: Plan, launches: int) -> validate.Verdict: ...

    def call(self, plan: Plan) -> Callable[[int], object]: ...


class Machine(Protocol):
    """What the tuner needs of a GPU; tests bring one without."""

    gpu: Gpu
    device: Device
    target: Target
    backend: Backend
    rebuilt: int

    def open(self, problem: Problem) -> Session: ...

    def alive(self) -> bool: ...


def floor_us(problem: Problem) -> float:
    """A rough least time of a problem in microseconds: 4 TB/s or 700 TFLOP/s, and a launch."""
    m, n, k = problem.m, problem.n, problem.k
    moved = (n * k + m * k + m * n) * ELEMENT_BYTES[problem.dtype]
    return max(moved / 4e6, 2 * m * n * k / 7e8) + 2.0


def make_room() -> None:
    """Give back what ended graphs held, where memory is short: it stays in pools of their own until
    it is asked for, and a capture cannot ask."""
    free, total = torch.cuda.mem_get_info()
    if free < total // 2:
        torch.cuda.empty_cache()


class Rig:
    """The current CUDA device, made ready for tuning.

    ``rebuilt`` counts kernels that were compiled in this process because they were not in Triton's
    cache. Raises NoGpuError where torch sees no GPU.
    """

    place = "cuda"

    def __init__(self) -> None:
        require_gpu()
        index = torch.cuda.current_device()
        self.device = device_facts(index)
        name = torch.cuda.get_device_name(index)
        self.gpu = Gpu(name, self.device.sm_count, self.device.capability)
        properties = torch.cuda.get_device_properties(index)
        self.uuid = str(getattr(properties, "uuid", index))
        self.cache_bytes = getattr(properties, "L2_cache_size", 0) or _USUAL_CACHE
        self.backend = CudaBackend()
        self.rebuilt = 0
        self.load = Load()
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._watch_compiler()

    @property
    def target(self) -> Target:
        from triton.runtime import driver

        found = driver.active.get_current_target()
        return Target(found.backend, found.arch, found.warp_size)

    def open(self, problem: Problem) -> Bench:
        """A bench for one problem; the one before it is not to be used any more."""
        make_room()
        return Bench(self, problem)

    def alive(self) -> bool:
        """Whether the device still answers: an illegal access ends every later call."""
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    def sets(self, role: str, dtype: str, shape: tuple[int, int], count: int) -> list[Tensor]:
        """``count`` matrices of random values that do not overlap, 256-byte aligned."""
        stride = -(-shape[0] * shape[1] // 128) * 128
        buffer = self._buffers.get((role, dtype))
        if buffer is None or buffer.numel() < stride * count:
            self._buffers.pop((role, dtype), None)
            buffer = torch.empty(stride * count, dtype=getattr(torch, dtype), device=self.place)
            buffer.normal_(0.0, 1.0 if role == "x" else 0.02)
            self._buffers[role, dtype] = buffer
        return [
            buffer[i * stride : i * stride + shape[0] * shape[1]].view(shape) for i in range(count)
        ]

    def _watch_compiler(self) -> None:
        from triton import knobs

        def listen(*, cache_hit: bool, **_: Any) -> None:
            self.rebuilt += not cache_hit

        self._listener = knobs.compilation.listener
        knobs.compilation.listener = listen

    def close(self) -> None:
        """Give the memory back."""
        from triton import knobs

        knobs.compilation.listener = self._listener
        self._buffers.clear()
        with contextlib.suppress(RuntimeError):  # a lost context has nothing to give
            torch.cuda.empty_cache()


def run_of(case: validate.Case, plan: Plan) -> validate.Run:
    """A plan on the parts of a case."""
    weight, bias, gain, more = case.weight, case.bias, case.gain, case.epilogue
    if not case.normed:
        return lambda part: block_ops.linear(part, weight, bias, plan=plan, **more)
    return lambda part: norm_linear(part, weight, case.eps, bias, gain, plan=plan, **more)


class Bench:
    """One cell on the GPU: its buffers, its case, its candidates."""

    def __init__(self, rig: Rig, problem: Problem) -> None:
        self.rig, self.problem = rig, problem
        size = ELEMENT_BYTES[problem.dtype]
        set_bytes = (problem.n + problem.m) * problem.k * size
        self.rotations = max(1, min(math.ceil(2.5 * rig.cache_bytes / set_bytes), _MOST_SETS))
        n, m, k, dtype = problem.n, problem.m, problem.k, problem.dtype
        self.weights = rig.sets("weight", dtype, (n, k), self.rotations)
        self.inputs = rig.sets("x", dtype, (m, k), self.rotations)
        first = self.weights[0]
        self.bias = first.new_zeros(n) if problem.has_bias else None
        self.gain = first.new_ones(k) if problem.has_gain else None
        # As folded into the weights: columns of different size.
        gains = 0.5 + torch.rand(k, device=first.device)
        self.case = validate.make_case(problem, (first * gains).to(first.dtype), EPS)

    def verify(self, plan: Plan, launches: int) -> validate.Verdict:
        """Check a candidate's values and bits (tuning/validate.py)."""
        case, us = self.case, floor_us(self.problem)
        run = run_of(case, plan)
        launches = max(_FEWEST_LAUNCHES, min(launches, int(_CHECK_US / us)))
        repeats = max(1, round(us / Load.us))
        return validate.check(case, run, launches, lambda: self.rig.load(repeats))

    def call(self, plan: Plan) -> Callable[[int], Tensor]:
        """What is timed: the plan on set ``i`` of the buffers."""
        inputs, weights, bias, gain = self.inputs, self.weights, self.bias, self.gain
        more = self.case.epilogue
        if not self.problem.normed:
            linear = block_ops.linear
            return lambda i: linear(inputs[i], weights[i], bias, plan=plan, **more)
        return lambda i: norm_linear(inputs[i], weights[i], EPS, bias, gain, plan=plan, **more)


class Load:
    """Copies and matmuls by turns on a stream of its own: they come and go between launches.

    ``us``: about how long one of them takes on the fastest GPU, in microseconds.
    """

    us = 25.0

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.a = torch.randn(2048, 2048, dtype=torch.bfloat16, device="cuda")
        self.product = torch.empty_like(self.a)
        self.source = torch.zeros(16 << 20, dtype=torch.float32, device="cuda")
        self.copy = torch.empty_like(self.source)
        self.turn = 0

    def __call__(self, repeats: int) -> None:
        with torch.cuda.stream(self.stream):
            for _ in range(repeats):
                self.turn += 1
                if self.turn % 2:
                    torch.mm(self.a, self.a, out=self.product)
                else:
                    self.copy.copy_(self.source)
