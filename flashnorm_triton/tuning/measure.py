"""Interleaved timing of several callables by CUDA-graph replay.

Three habits keep the figures honest:

* **Interleaving.** The clock of a GPU moves by 15 % within seconds, so every round replays every
  candidate once, in an order that rotates, and a comparison is the median of per-round ratios.
* **Rotation.** Call ``i`` of a candidate works on buffer set ``i % rotations``. The caller makes
  enough sets that one trip through them is more than twice the L2 cache (``copies_past_cache``).
* **A full queue.** A round is submitted without a synchronisation, behind one untimed replay, so
  the host's launch time stays out of the interval between two events.

The module imports on a machine without a GPU; ``CudaBackend`` then says what is missing.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

REPLAY_US = 200.0
MIN_ROUNDS = 15
_COPY_BYTES = 1 << 30
_MATMUL_SIDE = 8192


class NoGpuError(RuntimeError):
    """Timing was asked for on a machine where torch sees no CUDA device."""


class CaptureError(RuntimeError):
    """A candidate could not be warmed up or captured in a CUDA graph."""


@dataclass(frozen=True)
class Timing:
    """Microseconds a call over rounds: median, 20 % and 80 % quantiles, and every round."""

    us: float
    us_q20: float
    us_q80: float
    rounds: tuple[float, ...]


@dataclass(frozen=True)
class Ratio:
    """A ratio of two candidates: median, 20 % and 80 % quantiles of the per-round ratios."""

    median: float
    q20: float
    q80: float


@dataclass(frozen=True)
class Replay:
    """A captured candidate: what the backend replays and how many calls one replay holds."""

    handle: Any
    calls: int


@dataclass(frozen=True)
class Launches:
    """GPU kernels that ran, host calls that launched them (a graph replay is one call), and the
    kernels' summed run time in microseconds."""

    kernels: int
    host_calls: int
    busy_us: float = 0.0


class Backend(Protocol):
    """What the statistics need from a device; tests inject one with a made-up clock."""

    def capture(self, fn: Callable[[int], object], calls: int, rotations: int) -> Any: ...

    def time_ms(self, handles: Sequence[Any]) -> list[float]: ...


def quantile(values: Sequence[float], q: float) -> float:
    """The ``q`` quantile (0 ≤ q ≤ 1) of ``values``, linear between neighbours."""
    if not values:
        raise ValueError("quantile of an empty sequence: time at least one round")
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def timing(rounds_us: Sequence[float]) -> Timing:
    """Summarise microseconds a call, one value a round."""
    return Timing(
        us=quantile(rounds_us, 0.5),
        us_q20=quantile(rounds_us, 0.2),
        us_q80=quantile(rounds_us, 0.8),
        rounds=tuple(rounds_us),
    )


def ratio(numerator: Timing, denominator: Timing) -> Ratio:
    """Per-round ``numerator / denominator``; both must come from the same interleaved run."""
    if len(numerator.rounds) != len(denominator.rounds):
        raise ValueError(
            f"{len(numerator.rounds)} and {len(denominator.rounds)} rounds cannot be paired: "
            "take both timings from one interleaved run"
        )
    each = [a / b for a, b in zip(numerator.rounds, denominator.rounds, strict=True)]
    return Ratio(median=quantile(each, 0.5), q20=quantile(each, 0.2), q80=quantile(each, 0.8))


def copies_past_cache(bytes_per_call: int, *, cache_bytes: int, memory_bytes: int) -> int:
    """How many buffer sets to rotate so that they total more than 2.5 times the cache.

    ``bytes_per_call`` counts the weights and inputs of one set; at least two sets are used and
    no more than ``memory_bytes`` holds (but never fewer than one).
    """
    if bytes_per_call <= 0:
        raise ValueError(f"bytes_per_call must be positive, not {bytes_per_call}")
    wanted = max(2, math.ceil(2.5 * cache_bytes / bytes_per_call))
    return max(1, min(wanted, memory_bytes // bytes_per_call))


def prepare(
    name: str,
    fn: Callable[[int], object],
    *,
    rotations: int,
    backend: Backend,
    replay_us: float = REPLAY_US,
) -> Replay:
    """Warm up and capture one candidate: whole trips through the rotation, ≥ ``replay_us`` long.

    Raises ``CaptureError`` (naming the candidate, chaining the cause) when ``fn`` fails, so that
    one broken baseline can be recorded while the others are timed.
    """
    if rotations < 1:
        raise ValueError(f"rotations must be at least 1, not {rotations}")
    try:
        handle = backend.capture(fn, rotations, rotations)
        once_us = math.inf
        for _ in range(3):
            once_us = min(once_us, backend.time_ms([handle])[0] * 1e3)
            if once_us >= 2 * replay_us:  # long enough, whatever a cold start took of it
                break
        trips = max(1, math.ceil(replay_us / max(once_us, 1e-3)))
        if trips > 1:
            handle = backend.capture(fn, rotations * trips, rotations)
    except NoGpuError:
        raise
    except Exception as error:
        # What fails inside a capture also fails its end, which then hides the reason.
        chain = [error, *([error.__context__] if error.__context__ else [])]
        reasons = "; while handling ".join(f"{type(e).__name__}: {e}" for e in chain)
        raise CaptureError(f"candidate {name!r} could not be captured: {reasons}") from error
    return Replay(handle=handle, calls=rotations * trips)


def interleave(
    replays: Mapping[str, Replay],
    *,
    rounds: int = 21,
    min_rounds: int = MIN_ROUNDS,
    budget_s: float | None = None,
    backend: Backend,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Timing]:
    """Time captured candidates round by round.

    Each round replays every candidate once. The starting candidate moves on by one every second
    round and odd rounds run backwards, so that no candidate always follows the same neighbour.
    After ``min_rounds`` the run ends early once ``budget_s`` seconds are spent. The first round is
    a warm-up and is dropped.
    """
    if not replays:
        raise ValueError("no candidates to time: pass at least one")
    if rounds < 1 or min_rounds < 1:
        raise ValueError(f"rounds ({rounds}) and min_rounds ({min_rounds}) must be at least 1")
    names = list(replays)
    taken: dict[str, list[float]] = {name: [] for name in names}
    started = clock()
    for number in range(rounds + 1):
        done = number - 1
        if done >= min_rounds and budget_s is not None and clock() - started > budget_s:
            break
        first = (number // 2) % len(names)
        order = names[first:] + names[:first]
        if number % 2:
            order.reverse()
        times = backend.time_ms([replays[name].handle for name in order])
        if number == 0:
            continue
        for name, ms in zip(order, times, strict=True):
            taken[name].append(ms * 1e3 / replays[name].calls)
    return {name: timing(values) for name, values in taken.items()}


def interleaved(
    candidates: Mapping[str, Callable[[int], object]],
    *,
    rotations: int,
    rounds: int = 21,
    min_rounds: int = MIN_ROUNDS,
    budget_s: float | None = None,
    replay_us: float = REPLAY_US,
    backend: Backend | None = None,
) -> dict[str, Timing]:
    """Capture every candidate and time them interleaved; microseconds a call.

    A candidate is called with the rotation index ``i`` (0 ≤ i < rotations) and must work on
    buffer set ``i``. Raises ``NoGpuError`` without a CUDA device, ``CaptureError`` when a
    candidate fails (use ``prepare`` and ``interleave`` to go on without it).
    """
    backend = backend if backend is not None else CudaBackend()
    replays = {
        name: prepare(name, fn, rotations=rotations, backend=backend, replay_us=replay_us)
        for name, fn in candidates.items()
    }
    return interleave(
        replays, rounds=rounds, min_rounds=min_rounds, budget_s=budget_s, backend=backend
    )


def require_gpu() -> None:
    """Raise ``NoGpuError`` unless torch sees a CUDA device."""
    if not torch.cuda.is_available():
        raise NoGpuError(
            "timing needs a GPU: torch.cuda.is_available() is False on this machine "
            f"(torch {torch.__version__}); run it where a CUDA build of torch sees a device"
        )


class CudaBackend:
    """CUDA graphs and events on the current device."""

    def __init__(self) -> None:
        require_gpu()
        # One stream for warm-up and capture: an operation may keep a workspace per stream.
        self._stream = torch.cuda.Stream()

    def capture(self, fn: Callable[[int], object], calls: int, rotations: int) -> Any:
        """Run ``fn`` a few times (compilation, handles), then capture ``calls`` calls of it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for i in range(min(2, rotations)):
                fn(i)
            torch.cuda.synchronize()
            # capture_begin rather than torch.cuda.graph(): that one empties the allocator's
            # cache (and, before torch 2.9, collects garbage) at each of hundreds of captures.
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for i in range(calls):
                    fn(i % rotations)
            finally:
                graph.capture_end()
        graph.replay()
        torch.cuda.synchronize()
        return graph

    def time_ms(self, handles: Sequence[Any]) -> list[float]:
        """Replay each graph once, back to back; milliseconds of each."""
        marks = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in handles
        ]
        handles[-1].replay()  # untimed: the GPU is busy while the host submits the round
        for handle, (start, stop) in zip(handles, marks, strict=True):
            start.record()
            handle.replay()
            stop.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in marks]


def host_us(
    fn: Callable[[], object],
    *,
    calls: int = 200,
    repeats: int = 7,
    synchronize: Callable[[], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Host microseconds a call in eager use: median over bursts of un-synchronised calls.

    The synchronisation after a burst is not counted. It is the host's cost only while the GPU
    keeps up (small inputs): launches that wait for a full queue count as host time.
    """
    if synchronize is None:
        require_gpu()
        synchronize = torch.cuda.synchronize
    bursts = []
    for burst in range(repeats + 1):
        synchronize()
        started = clock()
        for _ in range(calls):
            fn()
        spent = clock() - started
        synchronize()
        if burst:  # the first burst is the warm-up
            bursts.append(spent / calls * 1e6)
    return statistics.median(bursts)


def _median_ms(run: Callable[[], object], repeats: int) -> float:
    run()
    marks = []
    for _ in range(repeats):
        start = torch.cuda.Event(enable_timing=True)
        stop = torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        marks.append((start, stop))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in marks)


def copy_tb_s(nbytes: int = 2 * _COPY_BYTES, repeats: int = 15) -> float:
    """Measured device-to-device copy rate in TB/s, bytes read plus bytes written."""
    require_gpu()
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * nbytes / (_median_ms(lambda: target.copy_(source), repeats) * 1e-3) / 1e12


def matmul_tflops(side: int = _MATMUL_SIDE, repeats: int = 15) -> float:
    """Measured rate of a square bf16 matmul on random data in TFLOP/s."""
    require_gpu()
    a = torch.randn(side, side, dtype=torch.bfloat16, device="cuda")
    b = torch.randn(side, side, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(a)
    ms = _median_ms(lambda: torch.mm(a, b, out=out), repeats)
    return 2 * side**3 / (ms * 1e-3) / 1e12


def count_launches(fn: Callable[[], object], *, warmup: int = 2) -> Launches:
    """Count the GPU kernels one call of ``fn`` runs, and the host calls that launch them."""
    require_gpu()
    from torch.profiler import ProfilerActivity, profile

    for _ in range(warmup):
        fn()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        fn()
        torch.cuda.synchronize()
    return tally(profiler.events())


def tally(events: Sequence[Any]) -> Launches:
    """Count kernels and launching host calls in a torch profiler's event list."""
    kernels = host_calls = 0
    busy_us = 0.0
    for event in events:
        if getattr(event, "is_user_annotation", False):
            continue
        if event.device_type == torch.autograd.DeviceType.CUDA:
            if not event.name.startswith(("Memcpy", "Memset")):
                kernels += 1
                busy_us += event.time_range.elapsed_us()
        else:
            host_calls += event.name.startswith(
                ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cuGraphLaunch")
            )
    return Launches(kernels=kernels, host_calls=host_calls, busy_us=busy_us)
