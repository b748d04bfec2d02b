"""Faults planted on purpose: what each check of this project is seen to find, or to miss.

``with planted("no_wait"): ...`` makes one fault real. Every ``norm_linear`` that the fault's plan
can serve then takes that plan; plans that were kept are forgotten before and after. The package has
no switch for any of this: a fault replaces a method or a function at a seam (the fork and join of
``flashnorm_triton.streams``, the buffers of ``launch.overlap``, ``workspace``), or is a kernel's
own source without one line. ``with healthy(name)`` is the same plan without the fault: its control.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashnorm_triton import dispatch, launch, limits, plans, reference, runtime, streams, workspace
from flashnorm_triton.launch.overlap import Overlap
from flashnorm_triton.plans import Device, Plan, Problem

SPLIT = Plan("single_pass", "hopper_swap", 16, 64, 128, 4, 3, max_registers=128, split_k=3)
RACING = Plan("single_pass", "tiles", 64, 64, 128, num_warps=4, num_stages=3)
RESET = "            gl.store(counter_ptr + tile, 0)\n"
_INTERPRETED = Device("cuda", 90)


@dataclass(frozen=True)
class Fault:
    """``where`` it can be planted: "any" (plain torch), "interpreter", "gpu", "hopper".

    ``plan``: the plan that has it. ``instruments``: those that are expected to see it.
    """

    name: str
    description: str
    where: str
    plan: Plan
    instruments: tuple[str, ...]
    plant: Callable[[], AbstractContextManager[Any]]
    healthy: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    healthy_plan: Plan | None = None


@contextlib.contextmanager
def planted(name: str, force: bool = True) -> Iterator[Fault]:
    """The fault is real within the block. Without ``force`` only calls that name its plan have it.

    Raises KeyError for a name that is not in ``FAULTS``.
    """
    fault = FAULTS[name]
    with fresh(), ExitStack() as stack:
        stack.enter_context(fault.plant())
        if force:
            stack.enter_context(_served_by(fault.plan))
        yield fault


@contextlib.contextmanager
def healthy(name: str) -> Iterator[Fault]:
    """As ``planted``, without the fault: what an instrument must not complain about."""
    fault = FAULTS[name]
    with fresh(), fault.healthy(), _served_by(fault.healthy_plan or fault.plan):
        yield fault


@contextlib.contextmanager
def fresh() -> Iterator[None]:
    """Nothing that was kept before the block is used in it, nor the other way round."""
    try:
        _forget()
        yield
    finally:
        _forget()


def _forget() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dispatch.forget_plans()
    dispatch._families.clear()
    workspace._of_stream.clear()


@contextlib.contextmanager
def _put(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def serves(plan: Plan, problem: Problem, on_gpu: bool) -> bool:
    """Whether the plan, faulty or not, can run a problem here."""
    if plan == plans.TORCH:
        return problem.normed
    facts = runtime.device_facts(torch.cuda.current_device()) if on_gpu else _INTERPRETED
    if plan.form == "tiles":  # the racing form has no masks, and nothing after the product
        plain = not (problem.has_bias or problem.has_gain or problem.epilogue)
        sizes = problem.m % 64 == problem.n % 64 == problem.k % 128 == 0
        return plain and sizes and problem.dtype == "bfloat16"
    return limits.unfit(plan, problem, facts) is None


@contextlib.contextmanager
def _served_by(plan: Plan) -> Iterator[None]:
    """Calls without a plan are served by this one where it can run them."""
    stock = dispatch._candidates

    def candidates(call: dispatch.Call) -> Iterator[Plan]:
        x = call.x
        runs = x.numel() and call.weight.shape[0] and (x.is_cuda or runtime.interpreting())
        if plan == plans.TORCH or runs:
            problem = call.problem(dispatch._matrix(x))
            if serves(plan, problem, x.is_cuda):
                yield plan
        yield from stock(call)

    with _put(dispatch, "_candidates", candidates):
        yield


# (a) One wait of the join is missing.


def _no_wait() -> AbstractContextManager[Any]:
    def wait(self: streams.Join, here: Any) -> None:
        here.wait_event(self.here_done)

    return _put(streams.Join, "wait", wait)


def _no_fork() -> AbstractContextManager[Any]:
    return _put(streams.Join, "start", lambda self: None)


# (b) The scale of the call before.


class _LastStatistics:
    """A double buffer read at the wrong end: the scale gets what the call before wrote."""

    def __init__(self, scale: Any) -> None:
        self._scale = scale
        self.site: int | None = None
        self._kept: dict[tuple[Any, ...], tuple[Tensor, Tensor | None]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scale, name)

    def bind(self, geometry: launch.Geometry) -> Callable[..., Tensor]:
        real = self._scale.bind(geometry)

        def scale(z: Tensor, s: Tensor, mean: Tensor | None, *others: Any) -> Tensor:
            key = (self.site, geometry.m)
            other = self._kept.get(key)
            if other is None:
                self._kept[key] = s.clone(), None if mean is None else mean.clone()
                return real(z, s, mean, *others)
            y = real(z, *other, *others)
            for old, new in zip(other, (s, mean), strict=True):
                if old is not None:
                    old.copy_(new)
            return y

        return scale


class _Swapped(Overlap):
    """Overlap whose statistics land in one of two buffers while the scale reads the other."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.scale = _LastStatistics(self.scale)

    def bind(self, geometry: launch.Geometry, eps: float) -> launch.Run:
        run, scale = super().bind(geometry, eps), self.scale

        def at_site(x: Tensor, w: Tensor, *others: Any) -> Tensor:
            scale.site = w.data_ptr()  # each layer has its own pair of buffers
            return run(x, w, *others)

        return at_site


def _in_family(form: str, family: type) -> AbstractContextManager[Any]:
    @contextlib.contextmanager
    def swapped() -> Iterator[None]:
        before = launch.FAMILIES[form]
        launch.FAMILIES[form] = family
        try:
            yield
        finally:
            launch.FAMILIES[form] = before

    return swapped()


def _stale_scale() -> AbstractContextManager[Any]:
    kept: dict[int, Tensor] = {}

    def norm_linear(
        x: Tensor,
        weight: Tensor,
        eps: float,
        bias: Tensor | None = None,
        gain: Tensor | None = None,
        *,
        centred: bool = False,
        residual: Tensor | None = None,
        activation: str | None = None,
        gated: bool = False,
    ) -> Tensor:
        wide = reference._centre(x) if centred else x
        s = reference.scale_of(wide, eps)
        before = kept.get(weight.data_ptr(), s)
        kept[weight.data_ptr()] = s.clone()
        if before.shape != s.shape:  # from a prompt to a step: the last row's
            before = before.reshape(-1)[-1].expand_as(s)
        normed = wide * before
        normed = (normed if gain is None else normed * gain).to(x.dtype)
        z = torch.nn.functional.linear(normed, weight, bias)
        return reference.finish(z, residual, activation, gated).to(x.dtype)

    return _put(reference, "norm_linear", norm_linear)


# (c) Memory that two streams use at once.


class _SharedStatistics(Overlap):
    """Overlap with one buffer for the statistics, whichever stream it runs on."""

    def buffers(self, geometry: launch.Geometry) -> Callable[[Tensor], Any]:
        fresh, kept = super().buffers(geometry), []

        def shared(x: Tensor) -> Any:
            if not kept:
                kept.append(fresh(x))
            return kept[0]

        return shared


@contextlib.contextmanager
def _shared_workspace() -> Iterator[None]:
    parts: dict[torch.device, Tensor] = {}
    counters: dict[int, Tensor] = {}

    def shared_parts(like: Tensor, count: int) -> Tensor:
        kept = parts.get(like.device)
        if kept is None or kept.numel() < count:
            kept = parts[like.device] = torch.empty(
                max(count, 1 << 24), dtype=torch.float32, device=like.device
            )
        return kept

    def shared_counters(device: int, stream: int, count: int) -> Tensor:
        if device not in counters:
            counters[device] = torch.zeros(1 << 12, dtype=torch.int32, device=f"cuda:{device}")
            torch.cuda.synchronize()
        return counters[device]

    with _put(workspace, "parts", shared_parts), _put(workspace, "counters", shared_counters):
        yield


# (d), (e) A kernel without one line, and the form that has a slot too few.


def without(module: str, line: str) -> str:
    """The source of a module of the package without ``line``, which must be in it once."""
    path = Path(launch.__file__).resolve().parents[1] / f"{module}.py"
    source = path.read_text(encoding="utf-8")
    if source.count(line) != 1:
        raise AssertionError(f"{path.name} has {line.strip()!r} {source.count(line)} times, not 1")
    return source.replace(line, "")


@contextlib.contextmanager
def _no_counter_reset() -> Iterator[None]:
    shipped = importlib.import_module("flashnorm_triton.kernels.hopper_swap")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hopper_swap_without_reset.py"
        path.write_text(without("kernels/hopper_swap", RESET), encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        faulty = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = faulty  # Triton looks a kernel's globals up by its module
        try:
            spec.loader.exec_module(faulty)
            with _put(shipped, "norm_swap_kernel", faulty.norm_swap_kernel):
                yield
        finally:
            del sys.modules[path.stem]


def _racing() -> AbstractContextManager[Any]:
    from racing_family import Racing

    return _in_family("tiles", Racing)


TAME = Plan("single_pass", "tiles", 64, 64, 128, num_warps=4, num_stages=1)
_LOADED = ("bits", "float64")
FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(
            "no_wait",
            "overlap: the scale does not wait for the event after the statistics",
            "gpu",
            plans.OVERLAP,
            ("graph", "delay", *_LOADED),
            _no_wait,
        ),
        Fault(
            "no_fork",
            "overlap: the statistics do not wait for what wrote x",
            "gpu",
            plans.OVERLAP,
            ("graph", "delay", *_LOADED, "lag"),
            _no_fork,
        ),
        Fault(
            "swapped_buffers",
            "overlap: the statistics go to one of two buffers, the scale reads the other",
            "interpreter",
            plans.OVERLAP,
            ("float64", "lag"),
            lambda: _in_family("two_streams", _Swapped),
        ),
        Fault(
            "stale_scale",
            "plain torch: a layer scales by s of its call before",
            "any",
            plans.TORCH,
            ("float64", "lag"),
            _stale_scale,
        ),
        Fault(
            "shared_statistics",
            "overlap: one buffer for the statistics of all streams",
            "gpu",
            plans.OVERLAP,
            ("delay", *_LOADED),
            lambda: _in_family("two_streams", _SharedStatistics),
        ),
        Fault(
            "shared_workspace",
            "split-K: one set of parts and counters for all streams",
            "hopper",
            SPLIT,
            _LOADED,
            _shared_workspace,
        ),
        Fault(
            "no_counter_reset",
            "split-K: the kernel without the line that resets its counter",
            "hopper",
            SPLIT,
            ("float64", "bits"),
            _no_counter_reset,
        ),
        Fault(
            "dropped_slot",
            "tiles: the buffer of x has a slot fewer than that of the weights",
            "hopper",
            RACING,
            ("lint", *_LOADED),
            _racing,
            _racing,
            TAME,
        ),
    )
}
