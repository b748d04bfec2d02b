"""The statistics of interleaved timing, on a device made of arithmetic (and on a GPU if any)."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from flashnorm_triton.tuning import measure

CUDA = torch.autograd.DeviceType.CUDA
CPU = torch.autograd.DeviceType.CPU


class FakeDevice:
    """Each captured call costs ``cost[name]`` µs, times a clock that drifts with every replay."""

    def __init__(self, drift: float = 0.0) -> None:
        self.drift = drift
        self.replayed: list[str] = []
        self.visited: dict[str, list[int]] = {}

    def capture(self, fn, calls, rotations):
        indices = [i % rotations for i in range(calls)]
        names_and_costs = [fn(i) for i in indices]
        name = names_and_costs[0][0]
        self.visited[name] = indices
        return name, sum(cost for _, cost in names_and_costs)

    def time_ms(self, handles):
        times = []
        for name, us in handles:
            self.replayed.append(name)
            times.append(us * (1 + self.drift * len(self.replayed)) / 1e3)
        return times


def candidate(name: str, us: float):
    return lambda i: (name, us)


def test_quantiles_interpolate_between_neighbours():
    assert measure.quantile([9.0, 1.0, 4.0, 2.0], 0.5) == 3.0
    assert measure.quantile([10.0, 20.0, 30.0], 0.2) == pytest.approx(14.0)
    assert measure.quantile([7.0], 0.8) == 7.0
    with pytest.raises(ValueError, match="empty"):
        measure.quantile([], 0.5)


def test_timing_is_microseconds_a_call():
    device = FakeDevice()
    got = measure.interleaved(
        {"slow": candidate("slow", 8.0), "quick": candidate("quick", 2.0)},
        rotations=5,
        rounds=15,
        backend=device,
    )
    assert got["slow"].us == pytest.approx(8.0) and got["quick"].us == pytest.approx(2.0)
    assert len(got["slow"].rounds) == 15
    assert got["slow"].us_q20 <= got["slow"].us <= got["slow"].us_q80


def test_a_drifting_clock_does_not_move_the_ratio():
    """Over the run the clock loses more than half its speed; per-round ratios stay at 1.25."""
    device = FakeDevice(drift=0.01)
    names = {"a": 10.0, "b": 12.5, "c": 10.0, "d": 10.0}
    got = measure.interleaved(
        {name: candidate(name, us) for name, us in names.items()},
        rotations=2,
        rounds=40,
        backend=device,
    )
    assert got["a"].rounds[-1] > 1.5 * got["a"].rounds[0]
    assert measure.ratio(got["b"], got["a"]).median == pytest.approx(1.25, rel=0.01)
    assert measure.ratio(got["c"], got["d"]).median == pytest.approx(1.0, abs=0.01)


def test_ratio_is_the_median_of_rounds_and_not_the_ratio_of_medians():
    a = measure.timing([1.0, 20.0, 3.0])
    b = measure.timing([1.0, 10.0, 4.0])
    assert measure.ratio(a, b).median == 1.0
    assert a.us / b.us == 0.75
    with pytest.raises(ValueError, match="one interleaved run"):
        measure.ratio(a, measure.timing([1.0]))


def test_every_candidate_leads_and_follows_every_other():
    device = FakeDevice()
    names = ["a", "b", "c", "d"]
    replays = {
        name: measure.prepare(name, candidate(name, 200.0), rotations=1, backend=device)
        for name in names
    }
    device.replayed.clear()
    measure.interleave(replays, rounds=15, backend=device)
    rounds = [device.replayed[i : i + 4] for i in range(0, 64, 4)]
    assert all(sorted(order) == names for order in rounds)
    assert Counter(order[0] for order in rounds) == dict.fromkeys(names, 4)
    followers = {pair for order in rounds for pair in zip(order, order[1:], strict=False)}
    assert {("a", "b"), ("b", "a"), ("d", "a"), ("a", "d")} <= followers


def test_a_replay_is_whole_trips_through_the_rotation_and_long_enough():
    device = FakeDevice()
    replay = measure.prepare(
        "x", candidate("x", 4.0), rotations=13, backend=device, replay_us=150.0
    )
    assert replay.calls == 39  # 13 calls are 52 µs; three trips are the first past 150 µs
    assert Counter(device.visited["x"]) == dict.fromkeys(range(13), 3)
    device.replayed.clear()
    long = measure.prepare("y", candidate("y", 500.0), rotations=2, backend=device)
    assert long.calls == 2 and device.replayed == ["y"]  # one replay told enough


def test_the_budget_ends_a_run_only_after_the_least_rounds():
    device = FakeDevice()
    replays = {"x": measure.prepare("x", candidate("x", 200.0), rotations=1, backend=device)}
    seconds = iter(range(1000))
    got = measure.interleave(
        replays,
        rounds=200,
        min_rounds=15,
        budget_s=3.0,
        backend=device,
        clock=lambda: next(seconds),
    )
    assert 15 <= len(got["x"].rounds) < 25


def test_a_failing_candidate_is_named_with_its_cause():
    def broken(i):
        raise ArithmeticError("no such tile")

    with pytest.raises(measure.CaptureError, match="'tiles'.*ArithmeticError: no such tile"):
        measure.prepare("tiles", broken, rotations=2, backend=FakeDevice())


def test_a_failure_hidden_by_the_end_of_the_capture_is_named_too():
    class Device(FakeDevice):
        def capture(self, fn, calls, rotations):
            try:
                fn(0)
            finally:
                raise RuntimeError("capture invalidated")

    def broken(i):
        raise ArithmeticError("no such tile")

    with pytest.raises(measure.CaptureError, match="invalidated; .*ArithmeticError: no such tile"):
        measure.prepare("tiles", broken, rotations=2, backend=Device())


def test_copies_total_more_than_twice_the_cache_within_memory():
    cache, memory = 60_000_000, 100_000_000_000
    for bytes_per_call in (1_105_920, 12_582_912, 50_331_648):
        copies = measure.copies_past_cache(bytes_per_call, cache_bytes=cache, memory_bytes=memory)
        assert copies * bytes_per_call > 2 * cache
    assert measure.copies_past_cache(234_881_024, cache_bytes=cache, memory_bytes=memory) == 2
    assert measure.copies_past_cache(10**9, cache_bytes=cache, memory_bytes=10**9) == 1
    with pytest.raises(ValueError, match="-1"):
        measure.copies_past_cache(-1, cache_bytes=cache, memory_bytes=memory)


def test_host_time_leaves_out_the_synchronisation_and_the_first_burst():
    now = 0.0
    burst = 0

    def clock():
        return now

    def synchronize():
        nonlocal now
        now += 1.0

    def call():
        nonlocal now, burst
        burst += 1
        now += 1e-3 if burst <= 10 else 20e-6

    got = measure.host_us(call, calls=10, repeats=1, synchronize=synchronize, clock=clock)
    assert got == pytest.approx(20.0, rel=1e-3)


def test_tally_counts_kernels_and_the_calls_that_launch_them():
    def event(name, device, annotation=False):
        span = SimpleNamespace(elapsed_us=lambda: 2.5)
        return SimpleNamespace(
            name=name, device_type=device, is_user_annotation=annotation, time_range=span
        )

    events = [
        event("aten::mm", CPU),
        event("cudaLaunchKernelExC", CPU),
        event("cuLaunchKernelEx", CPU),
        event("cudaGraphLaunch", CPU),
        event("cudaDeviceSynchronize", CPU),
        event("sm90_gemm", CUDA),
        event("_rms_norm_rows", CUDA),
        event("Memset (Device)", CUDA),
        event("Memcpy DtoD (Device -> Device)", CUDA),
        event("## Call CompiledFxGraph", CUDA, annotation=True),
    ]
    assert measure.tally(events) == measure.Launches(kernels=2, host_calls=3, busy_us=5.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize(
    "call",
    [
        lambda: measure.interleaved({"x": lambda i: None}, rotations=1),
        measure.copy_tb_s,
        measure.matmul_tflops,
        lambda: measure.host_us(lambda: None),
        lambda: measure.count_launches(lambda: None),
    ],
)
def test_without_a_gpu_the_error_says_so(call):
    with pytest.raises(measure.NoGpuError, match="needs a GPU"):
        call()


@pytest.mark.parametrize("rotations", [0, -3])
def test_rotations_must_be_positive(rotations):
    with pytest.raises(ValueError, match=str(rotations)):
        measure.prepare("x", candidate("x", 1.0), rotations=rotations, backend=FakeDevice())


@pytest.mark.gpu
def test_on_a_gpu_twice_the_work_takes_about_twice_the_time():
    x = torch.randn(2, 1 << 26, device="cuda")
    got = measure.interleaved(
        {
            "half": lambda i: torch.exp(x[i, : 1 << 25]),
            "whole": lambda i: torch.exp(x[i]),
            "whole again": lambda i: torch.exp(x[i]),
        },
        rotations=2,
        rounds=15,
    )
    assert 1.6 < measure.ratio(got["whole"], got["half"]).median < 2.4
    assert 0.9 < measure.ratio(got["whole"], got["whole again"]).median < 1.1


@pytest.mark.gpu
def test_on_a_gpu_a_failing_capture_leaves_the_device_usable():
    with pytest.raises(measure.CaptureError, match="'syncs'"):
        measure.interleaved(
            {"syncs": lambda i: torch.ones(2, device="cuda").cumsum(0)[1].item()}, rotations=1
        )
    got = measure.interleaved({"exp": lambda i: torch.ones(8, device="cuda").exp()}, rotations=1)
    assert got["exp"].us > 0


@pytest.mark.gpu
def test_on_a_gpu_launches_are_counted():
    x = torch.randn(64, 64, device="cuda")
    found = measure.count_launches(lambda: x.exp().sin())
    assert (found.kernels, found.host_calls) == (2, 2) and found.busy_us > 0
