"""Compiling candidates ahead of their timing, in worker processes, without a GPU.

A worker runs the very launch code of a plan (flashnorm_triton.launch) on CPU tensors of the right
sizes, with the launch itself left out: every kernel of the plan is compiled for the GPU's target
with the same arguments as a real launch would give, so its entry in Triton's disk cache is the one
that the tuning process finds. What comes back is what is worth knowing before a launch: the shared
memory it takes, and what the buffer-depth lint says of it.

A worker reads jobs from its standard input and answers on its standard output. A compiler that
takes its process down costs one job; the worker is started anew.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from flashnorm_triton.plans import Device, Plan, Problem

JOB_SECONDS = 180.0
# Not "-m": what the worker sends must be of this module, not of its __main__.
WORKER = [sys.executable, "-c", "from flashnorm_triton.tuning.build import main; main()"]


@dataclass(frozen=True)
class Target:
    """A compile target as Triton names it: ("cuda", 90, 32) or ("hip", "gfx942", 64)."""

    backend: str
    arch: int | str
    warp_size: int


@dataclass(frozen=True)
class Job:
    """One plan to compile for one problem. ``problem.m`` only sizes the example."""

    plan: Plan
    problem: Problem
    device: Device
    target: Target


@dataclass(frozen=True)
class Built:
    """What a compile gave: ``error`` says why there is nothing to launch; ``findings`` are the
    lint's, of every kernel of the plan; ``shared_bytes`` is the largest block's."""

    error: str | None = None
    findings: tuple[str, ...] = ()
    shared_bytes: int = 0
    seconds: float = 0.0


Make = Callable[[Any, tuple[int, int, int], tuple[Any, ...]], Any]
"""What a compile makes of a ``Kernel``, a grid and arguments."""


class _NoGpu:
    """Stands in for Triton's driver: it knows what to compile for, and can launch nothing."""

    def __init__(self, target: Target) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget(target.backend, target.arch, target.warp_size)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def _warmed(kernel: Any, grid: tuple[int, int, int], args: tuple[Any, ...]) -> Any:
    """Triton's compiled kernel for a launch."""
    made = kernel.fn.warmup(*args, grid=grid, **kernel.constants, **kernel.options)
    return made.result() if hasattr(made, "result") else made


@contextlib.contextmanager
def _launches_collected(device: Device, target: Target, make: Make) -> Iterator[list[Any]]:
    """Within the block, launching a ``Kernel`` makes of it what ``make`` does, and collects it."""
    import torch
    from triton.runtime import driver

    from flashnorm_triton import launch, runtime, workspace
    from flashnorm_triton.compiled import Tile

    collected: list[Any] = []

    def compile_only(kernel: Any, grid: tuple[int, int, int], index: int, *args: Any) -> None:
        args = tuple(arg.real() if isinstance(arg, Tile) else arg for arg in args)
        collected.append(make(kernel, grid, args))

    def on_cpu(index: int, stream: int, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32)

    with contextlib.ExitStack() as stack:
        replace_all = (
            (launch.Kernel, "__call__", compile_only),
            (runtime, "device_facts", lambda index: device),
            (workspace, "counters", on_cpu),
            (driver, "_active", _NoGpu(target)),
        )
        for owner, name, stand_in in replace_all:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, stand_in)
        yield collected


def compile_plan(job: Job, make: Make = _warmed) -> list[Any]:
    """Triton's compiled kernels of a plan, or what else ``make`` makes, in the launches' order.

    Raises what the compiler or the plan's own checks raise. To be run in a process of its own.
    """
    import torch

    from flashnorm_triton import launch

    problem, dtype = job.problem, getattr(torch, job.problem.dtype)
    # Never written, so the pages of these are never taken.
    x, w = (torch.empty(rows, problem.k, dtype=dtype) for rows in (problem.m, problem.n))
    bias = torch.empty(problem.n, dtype=dtype) if problem.has_bias else None
    gain = torch.empty(problem.k, dtype=dtype) if problem.has_gain else None
    geometry = launch.Geometry(problem.m, problem.k, (problem.m,), 0)
    with _launches_collected(job.device, job.target, make) as collected:
        family = launch.FAMILIES[job.plan.form](job.plan, problem, problem.k)
        if job.plan.form == "library":
            if problem.normed:
                family.norm.bind(geometry, 1e-6)(x, gain)
            if family.finish is not None:
                z = x.new_empty(problem.m, problem.n)
                family.finish.bind(geometry)(z, _more(problem, x)[1])
        else:
            # On a CPU the library would take its time with sizes like these.
            bind = getattr(family, "alone", family.bind)
            bind(geometry, 1e-6)(x, w, bias, gain, *_more(problem, x))
    return collected


def _more(problem: Problem, x: Any) -> tuple[Any, ...]:
    """The row sums and the residual that a launch with an epilogue takes after the others."""
    if not problem.epilogue:
        return ()
    sums = x.new_empty(problem.n).float() if problem.centred else None
    residual = x.new_empty(problem.m, problem.width) if problem.has_residual else None
    return sums, residual


def build(job: Job) -> Built:
    """Compile and lint one plan; a failure is an answer, not an exception."""
    from flashnorm_triton.tuning import lint

    started = time.perf_counter()
    try:
        kernels = compile_plan(job)
        findings = [
            f"{kernel.name}: {finding}"
            for kernel in kernels
            if "ttgir" in kernel.asm
            for finding in lint.check(kernel.asm["ttgir"], kernel.asm.get("ptx"))
        ]
        shared = max((kernel.metadata.shared for kernel in kernels), default=0)
    except Exception as error:  # Triton's errors share no base class
        return Built(f"{type(error).__name__}: {error}", seconds=time.perf_counter() - started)
    return Built(None, tuple(findings), shared, time.perf_counter() - started)


def _send(stream: BinaryIO, thing: Any) -> None:
    pickle.dump(thing, stream)
    stream.flush()


def main() -> None:
    """A worker: answer jobs until the input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a compiler prints must not run into the answers
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        _send(answers, build(job))


class Pool:
    """``jobs`` workers that compile in the background; ``close`` ends them.

    A worker that dies or takes longer than ``JOB_SECONDS`` fails its job alone.
    """

    def __init__(self, jobs: int, command: list[str] | None = None) -> None:
        self._command = command or WORKER
        self._queue: queue.Queue[tuple[Job, Future] | None] = queue.Queue()
        self._known: dict[Job, Future] = {}
        self._working: set[_Worker] = set()
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(jobs)]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> Future:
        """The future ``Built`` of a job; the same job, for any number of rows, is built once."""
        same = replace(job, problem=replace(job.problem, m=0))
        if same not in self._known:
            self._known[same] = Future()
            self._queue.put((job, self._known[same]))
        return self._known[same]

    def close(self) -> None:
        """Drop what is not done and end the workers."""
        with contextlib.suppress(queue.Empty):
            while True:
                waiting = self._queue.get_nowait()
                if waiting is not None:
                    waiting[1].cancel()
        for _ in self._threads:
            self._queue.put(None)
        for worker in tuple(self._working):
            worker.kill()
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        worker: _Worker | None = None
        while (work := self._queue.get()) is not None:
            job, future = work
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if worker is None:
                    worker = _Worker(self._command)
                    self._working.add(worker)
                answer = worker.ask(job)
            except Exception as error:
                answer = Built(f"the compiler's process failed: {error}")
            if worker is not None and worker.ended:
                worker = self._end(worker)
            future.set_result(answer)
        if worker is not None:
            self._end(worker)

    def _end(self, worker: _Worker) -> None:
        self._working.discard(worker)
        worker.end()


class _Worker:
    """One worker process and the pipes to it."""

    def __init__(self, command: list[str]) -> None:
        from triton import knobs

        package = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        # No GPU is wanted, and the interpreter would leave nothing to compile.
        environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
        environment.pop("TRITON_INTERPRET", None)
        # What this process was told of Triton's cache, and of what a compile's key depends on, by
        # assignment rather than by its environment (torch's compiler does), a worker must know too.
        environment["TRITON_CACHE_DIR"] = str(knobs.cache.dir)
        if libdevice := knobs.nvidia.libdevice_path:
            environment["TRITON_LIBDEVICE_PATH"] = str(libdevice)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed in end)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment,
            start_new_session=True,  # an interrupt at the keyboard is the tuner's to handle
        )

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, job: Job) -> Built:
        watchdog = threading.Timer(JOB_SECONDS, self._process.kill)
        watchdog.start()
        try:
            _send(self._process.stdin, job)
            return pickle.load(self._process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            self.kill()
            code = self._process.wait()
            return Built(f"the compiler crashed its process (exit status {code}){self._last()}")
        finally:
            watchdog.cancel()

    def _last(self) -> str:
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - 400))
        text = self._stderr.read().decode(errors="replace").strip()
        return f": …{text}" if text else ""

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        self.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            with contextlib.suppress(OSError):
                stream.close()
