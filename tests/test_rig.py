"""The tuner's buffers and benches, on the CPU through the interpreter, and a whole run on a GPU."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from fake_machine import FakeCompiler

from flashnorm_triton import ops, plans, tables
from flashnorm_triton.plans import UNFUSED, Device, Plan, Problem
from flashnorm_triton.tables import Gpu
from flashnorm_triton.tuning import rig as rigs
from flashnorm_triton.tuning import run, validate
from flashnorm_triton.tuning.build import Target
from flashnorm_triton.tuning.rig import Rig, floor_us
from flashnorm_triton.tuning.tuner import Tuner

GEMV = Plan("single_pass", "gemv", 4, 16, 64, 4, 1)
PROBLEM = Problem("float16", 4, 48, 128)


@pytest.fixture
def rig(monkeypatch) -> Rig:
    """A rig whose buffers are on the CPU; kernels run there through the interpreter."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    made = object.__new__(Rig)
    made.place, made.cache_bytes, made.rebuilt = "cpu", 100_000, 0
    made.device, made.gpu = Device("cuda", 90, 132, gluon=True), Gpu("NVIDIA H200", 132, 90)
    made._buffers, made._listener = {}, None
    made.load = lambda repeats: None
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10, 100))
    monkeypatch.setattr(validate, "_LEAST_ROWS", 16)
    monkeypatch.setattr(validate, "_LEAST_OUTPUTS", 1)
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    made.emptied = emptied
    return made


def test_sets_pass_the_cache_and_do_not_overlap(rig):
    bench = rig.open(PROBLEM)
    set_bytes = (48 + 4) * 128 * 2
    assert (bench.rotations - 1) * set_bytes < 2.5 * rig.cache_bytes <= bench.rotations * set_bytes
    for tensors, shape in ((bench.weights, (48, 128)), (bench.inputs, (4, 128))):
        assert len(tensors) == bench.rotations
        places = sorted(t.data_ptr() for t in tensors)
        size = shape[0] * shape[1] * 2
        assert all(b - a >= size for a, b in zip(places, places[1:], strict=False))
        for tensor in tensors:
            assert tensor.shape == shape and tensor.is_contiguous()
            assert (tensor.data_ptr() - tensors[0].data_ptr()) % 256 == 0
            assert tensor.std() > 0.01


def test_buffers_are_shared_by_all_cells(rig):
    first = rig.open(PROBLEM).weights[0].data_ptr()
    assert rig.open(Problem("float16", 8, 48, 128)).weights[0].data_ptr() == first
    assert len(rig._buffers) == 2
    large = rig.open(Problem("float16", 4, 4096, 128))
    assert large.rotations == 1 and large.weights[0].shape == (4096, 128)
    assert rig.emptied  # little memory was free


@pytest.mark.parametrize("extras", [False, True])
def test_a_bench_verifies_and_runs_real_kernels(rig, extras):
    problem = Problem("float16", 4, 48, 128, has_bias=extras, has_gain=extras)
    bench = rig.open(problem)
    for plan in (GEMV, Plan("single_pass", "tiles", 16, 16, 64, squares="own")):
        if extras and plan.form == "tiles":
            continue  # fp16 tiles take no gain
        verdict = bench.verify(plan, launches=2)
        assert verdict.reason is None
        assert 0 < verdict.rel_err <= 1.25 * verdict.rel_err_stock
        call = bench.call(plan)
        last = bench.rotations - 1
        wanted = torch.nn.functional.rms_norm(bench.inputs[last].double(), (128,), eps=1e-6)
        wanted = wanted @ bench.weights[last].double().T
        torch.testing.assert_close(call(last).double(), wanted, rtol=5e-3, atol=5e-3)
    assert (bench.bias is not None, bench.gain is not None) == (extras, extras)


@pytest.mark.parametrize(
    "epilogue",
    [{"centred": True}, {"activation": "silu", "gated": True, "has_residual": True}],
    ids=["centred", "gated"],
)
def test_a_bench_verifies_epilogues_of_real_kernels(rig, epilogue):
    problem = Problem("float16", 4, 48, 128, has_bias=True, **epilogue)
    bench = rig.open(problem)
    assert bench.verify(GEMV, launches=2).reason is None
    y = bench.call(GEMV)(bench.rotations - 1)
    assert y.shape == (4, problem.width) and torch.isfinite(y).all()
    # The same kernel without what was asked for is found out.
    plain = dataclasses.replace(bench.case, epilogue={"gated": problem.gated})
    bench.case = plain
    assert "stock has" in bench.verify(GEMV, launches=2).reason


def test_a_wrong_kernel_does_not_pass_the_bench(rig, monkeypatch):
    bench = rig.open(PROBLEM)
    right = rigs.norm_linear
    monkeypatch.setattr(rigs, "norm_linear", lambda *a, **k: right(*a, **k) * 1.02)
    assert "stock has" in bench.verify(GEMV, launches=2).reason


def test_a_lost_context_is_seen_and_closing_it_is_quiet(rig, monkeypatch):
    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert rig.alive()
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    monkeypatch.setattr(torch.cuda, "empty_cache", lost)
    assert not rig.alive()
    rig.close()


def test_the_whole_loop_over_a_real_bench(rig, tmp_path):
    """Everything but the GPU's clock: real buffers, checks and kernels."""
    import time

    def capture(fn, calls, rotations):
        fn(0)
        return fn

    def time_ms(handles):
        times = []
        for fn in handles:
            started = time.perf_counter()
            fn(0)
            times.append((time.perf_counter() - started) * 1e3)
        return times

    rig.backend = SimpleNamespace(capture=capture, time_ms=time_ms)
    listed = (UNFUSED, GEMV)
    path = tmp_path / "t.json"

    class Fixed(Rig):
        target = Target("cuda", 90, 32)

    rig.__class__ = Fixed
    work = Tuner(rig, FakeCompiler(), path, candidates=lambda *_: listed)
    report = work.tune([PROBLEM])
    assert not report.failed and not report.rejected
    assert tables.key_of(PROBLEM) in tables.read(path).entries


def test_the_floor_grows_with_the_work():
    assert floor_us(Problem("bfloat16", 1, 28672, 4096)) > 55
    assert 2 < floor_us(Problem("bfloat16", 1, 960, 576)) < 3
    assert floor_us(Problem("bfloat16", 8192, 28672, 4096)) > 2500


@pytest.mark.gpu
def test_a_run_on_this_gpu(tmp_path, monkeypatch):
    """Three cells, end to end: every compile was a worker's, and the plans serve calls after it."""
    monkeypatch.setenv("FLASHNORM_CACHE_DIR", str(tmp_path))
    report = run.tune([(512, 768)], tokens=(1, 16, 256))
    assert not report.failed and report.unsaved is None and report.lost is None
    assert len(report.done) == 3
    assert report.rebuilt <= 1, "launches did not find what the workers compiled"
    for entry in report.done.values():
        assert entry.us <= 1.02 * entry.baseline_us
        assert entry.rel_err <= 1.25 * entry.rel_err_stock
    again = run.tune([(512, 768)], tokens=(1, 16, 256))
    assert again.skipped == 3 and not again.done
    name = torch.cuda.get_device_name()
    facts = rigs.device_facts(torch.cuda.current_device())
    for m in (1, 9, 200):
        problem = Problem("bfloat16", m, 768, 512)
        found = tables.choice(problem, facts, name)
        assert found.source == "user" and found.plan in (
            *(entry.plan for entry in report.done.values()),
            plans.choose(problem, facts),
        )
        x = torch.randn(m, 512, dtype=torch.bfloat16, device="cuda")
        weight = torch.randn(768, 512, dtype=torch.bfloat16, device="cuda")
        y = ops.norm_linear(x, weight, 1e-6)
        wanted = torch.nn.functional.rms_norm(x.double(), (512,), eps=1e-6) @ weight.double().T
        assert (y.double() - wanted).norm() / wanted.norm() < 4e-3
