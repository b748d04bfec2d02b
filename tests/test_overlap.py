"""The strategy overlap: what it refuses anywhere, and on a GPU what its fork and join must hold.

The order of its events is in tests/test_streams.py, its kernel with all others in
tests/test_kernels.py and tests/test_epilogue.py.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from numerics import (
    Case,
    assert_contract,
    assert_right,
    errors,
    make_case,
    poisoned,
    reference,
    stock,
)
from planted_faults import fresh, healthy, planted
from torch import Tensor

from flashnorm_triton import limits, ops, plans, streams
from flashnorm_triton.launch import overlap
from flashnorm_triton.launch.common import Geometry
from flashnorm_triton.plans import OVERLAP, Device, Problem
from flashnorm_triton.tuning import space, tuner

H200 = Device("cuda", capability=90, sm_count=132, gluon=True)
AMD = Device("hip", sm_count=304)
CUDA = torch.device("cuda")
gpu = pytest.mark.gpu


# Anywhere


def test_where_it_fits():
    problems = {d: Problem(d, 512, 960, 576, tma=False) for d in ("bfloat16", "float16", "float32")}
    for dtype, problem in problems.items():
        assert limits.unfit(OVERLAP, problem, H200) is None
        gained = limits.unfit(OVERLAP, replace(problem, has_gain=True), H200)
        assert "gain" in gained
        assert "GPU" in limits.unfit(OVERLAP, problem, Device("cpu"))
        on_amd = limits.unfit(OVERLAP, problem, AMD)
        assert on_amd is None if dtype == "float32" else "no fp32 product" in on_amd
    bare = replace(problems["bfloat16"], normed=False)
    assert "bare" in limits.unfit(OVERLAP, bare, H200)
    for dtype, problem in problems.items():  # LayerNorm
        obstacle = limits.unfit(OVERLAP, replace(problem, centred=True), H200)
        assert obstacle is None if dtype != "float32" else "off centre" in obstacle


@pytest.mark.parametrize(("stride", "copies"), [(72, False), (2**30 + 8, True), (2**31, True)])
def test_rows_too_far_apart_for_the_library_are_copied(stride, copies, monkeypatch):
    """More than 2^31 elements from the first row to the last; the stride is only said here."""
    pytest.importorskip("triton")
    real, given = overlap.product_of, []

    def watched(problem: Problem, device: int) -> Callable[[Tensor, Tensor], Tensor]:
        product = real(problem, device)
        return lambda x, w: given.append(x.is_contiguous()) or product(x, w)

    monkeypatch.setattr(overlap, "product_of", watched)
    x, w = torch.randn(5, 72)[:, :64], torch.randn(24, 64)
    monkeypatch.setattr(overlap.RowStats, "into", lambda *_: lambda x, s, mean: s.fill_(1.0))
    family = overlap.Overlap(OVERLAP, Problem("float32", 5, 24, 64), 64)
    y = family.bind(Geometry(5, stride, (5,), -1), 1e-6)(x, w, None, None)
    assert given == [copies] and torch.allclose(y, x @ w.T, atol=1e-4)
    # So many rows that lie close are far from first to last as well: the library takes a matrix.
    run = family.bind(Geometry(5, stride, (5, 1), -1), 1e-6)
    assert torch.equal(run(x.reshape(5, 1, 64), w, None, None), y[:, None])


def test_it_is_a_candidate_and_has_a_name():
    for dtype in ("bfloat16", "float16"):
        assert OVERLAP in space.candidates(Problem(dtype, 512, 6144, 4096), H200)
        assert OVERLAP not in space.candidates(Problem(dtype, 1, 6144, 4096), H200)
    assert tuner.plan_text(OVERLAP) == "overlap"


def test_a_product_rounded_to_bfloat16_would_break_the_contract():
    """Why it stays in fp32: the largest error against float64, over stock's, with either."""
    case = make_case(256, 192, 576, torch.bfloat16, x=torch.randn(256, 576).bfloat16())
    wanted, usual = reference(*case), errors(stock(*case), reference(*case))[1]
    s = torch.rsqrt(case.x.float().square().mean(-1, keepdim=True) + case.eps)
    raw = case.x.float() @ case.weight.float().T
    once, twice = (errors((z * s).bfloat16(), wanted)[1] for z in (raw, raw.bfloat16().float()))
    assert once <= usual and twice > 1.25 * usual


def test_values_in_float16_whose_product_overflows_it(device):
    """6e4 in every place: the raw product passes 65504 at once, the result is of order one."""
    pytest.importorskip("triton")
    x = 6e4 * torch.sign(torch.randn(4, 64, device=device))
    case = make_case(4, 24, 64, torch.float16, device, x=x.half())
    assert (case.x.float() @ case.weight.float().T).abs().max() > 65504
    y = ops.norm_linear(*case, plan=OVERLAP)
    assert y.isfinite().all()
    assert_right(y, case)


# On a GPU


def contract_case(m: int, dtype: torch.dtype = torch.bfloat16) -> Case:
    return make_case(m, 968, 584, dtype, CUDA, bias=True)


@contextlib.contextmanager
def late(side: bool, cycles: int = 400_000) -> Iterator[None]:
    """The side stream (or the stream that goes on after the join) starts some 0.2 ms late."""
    name = "start" if side else "wait"
    real = getattr(streams.Join, name)

    def slow(self: streams.Join, *args: torch.cuda.Stream) -> None:
        real(self, *args)
        with torch.cuda.stream(self.side if side else args[0]):
            torch.cuda._sleep(cycles)

    setattr(streams.Join, name, slow)
    try:
        yield
    finally:
        setattr(streams.Join, name, real)


def off(y: Tensor, case: Case) -> float:
    return errors(y, reference(*case))[0]


@gpu
@pytest.mark.parametrize("m", [1, 7, 130, 513, 4096])
def test_contract_on_poisoned_memory(m):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        rows = -(-256 // m) * m
        case = contract_case(rows, dtype)
        with poisoned():
            parts = [ops.norm_linear(part, *case[1:], plan=OVERLAP) for part in case.x.split(m)]
        assert_contract(torch.cat(parts), case)


@gpu
def test_with_everything_after_it():
    """LayerNorm, a gated pair, bias and residual, in the one kernel after the join."""
    x = torch.randn(300, 584, device=CUDA).bfloat16() + 3
    weight = (torch.randn(512, 584, device=CUDA) / 24).bfloat16()
    bias, residual = (torch.randn(*s, device=CUDA).bfloat16() for s in ((512,), (300, 256)))
    more = {"row_sums": weight.double().sum(1).float(), "activation": "silu", "gated": True}
    with poisoned():
        y = ops.norm_linear(x, weight, 1e-5, bias, residual=residual, plan=OVERLAP, **more)
    wide = torch.nn.functional.layer_norm(x.double(), (584,), eps=1e-5)
    gate, up = (wide @ weight.double().T + bias.double()).chunk(2, -1)
    wanted = torch.nn.functional.silu(gate) * up + residual.double()
    assert errors(y, wanted)[0] < 0.006


@gpu
def test_a_late_side_stream_is_waited_for():
    """And one that is not waited for shows: the control of this test."""
    case = contract_case(256)
    ops.norm_linear(*case, plan=OVERLAP)
    with late(side=True):
        with poisoned():
            y = ops.norm_linear(*case, plan=OVERLAP)
        assert_contract(y, case)
        with planted("no_wait", force=False):
            ops.norm_linear(*case, plan=OVERLAP)
            with poisoned():
                faulty = ops.norm_linear(*case, plan=OVERLAP)
            torch.cuda.synchronize()
            assert not off(faulty, case) < 0.01


@gpu
def test_an_x_that_is_written_late_is_waited_for():
    case = contract_case(256)

    def written_late() -> Tensor:
        x = torch.full_like(case.x, torch.nan)
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000)
        x.copy_(case.x)
        return ops.norm_linear(x, *case[1:], plan=OVERLAP)

    assert_contract(written_late(), case)
    with planted("no_fork", force=False):
        ops.norm_linear(*case, plan=OVERLAP)
        faulty = written_late()
        torch.cuda.synchronize()
        assert not off(faulty, case) < 0.01


@gpu
def test_memory_given_back_before_the_join_is_not_reused(monkeypatch):
    """Storms of allocations between fork and join, and the moment the call returns."""
    case = contract_case(512)
    want = ops.norm_linear(*case, plan=OVERLAP)
    real = overlap.product_of

    def storm() -> None:
        for size in (512, 512, 512 * 584, 512 * 968, 512):
            for dtype in (torch.float32, torch.bfloat16):
                torch.full((size,), torch.nan, dtype=dtype, device=CUDA)

    def stormy(*args):
        product = real(*args)

        def run(x: Tensor, w: Tensor) -> Tensor:
            storm()
            z = product(x, w)
            storm()
            return z

        return run

    monkeypatch.setattr(overlap, "product_of", stormy)
    with fresh():  # nothing that was bound before is used
        for side in (True, False):
            with late(side):
                for _ in range(20):
                    x = case.x.clone()
                    y = ops.norm_linear(x, *case[1:], plan=OVERLAP)
                    del x
                    storm()
                    assert torch.equal(y, want)


@gpu
def test_graph_replay_with_changed_inputs():
    """Captured by a thread that never forked before: its side stream is made in the capture."""
    cases = [contract_case(256) for _ in range(4)]
    cases = [case._replace(weight=cases[0].weight, bias=cases[0].bias) for case in cases]
    wanted = [ops.norm_linear(*case, plan=OVERLAP) for case in cases]
    static, graph, found = cases[0].x.clone(), torch.cuda.CUDAGraph(), []
    torch.cuda.synchronize()

    def capture() -> None:
        torch.ones(1, device=CUDA)  # a context for the thread, then the library's handle
        torch.mm(static, static.t())
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph):
                for _ in range(2):
                    found.append(ops.norm_linear(static, *cases[0][1:], plan=OVERLAP))
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=capture)
    thread.start()
    thread.join()
    assert all(isinstance(y, Tensor) for y in found), found
    for case, want in zip(cases, wanted, strict=True):
        static.copy_(case.x)
        for y in found:
            y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(ops.norm_linear(*case, plan=OVERLAP), want)  # eager, between replays
        graph.replay()
        assert all(torch.equal(y, want) for y in found)


@gpu
def test_eager_work_beside_a_capture():
    """Two threads, one capturing: neither's side stream ends up in the other's graph."""
    case = contract_case(256)
    want = ops.norm_linear(*case, plan=OVERLAP)
    torch.cuda.synchronize()
    graph, stop, wrong = torch.cuda.CUDAGraph(), threading.Event(), []

    def eager() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                y = ops.norm_linear(*case, plan=OVERLAP)
                if not torch.equal(y, want):
                    wrong.append("eager")

    def quiet() -> None:  # no synchronisation, which a capture of another thread may forbid
        side = torch.cuda.Stream()
        try:
            with torch.cuda.stream(side):
                outs = [ops.norm_linear(*case, plan=OVERLAP) for _ in range(50)]
        except Exception as error:
            outs = []
            wrong.append(repr(error))
        begun.set()
        held.wait()
        side.synchronize()
        wrong.extend("beside" for y in outs if not torch.equal(y, want))

    begun, held = threading.Event(), threading.Event()
    worker = threading.Thread(target=quiet)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        worker.start()
        outs = [ops.norm_linear(*case, plan=OVERLAP) for _ in range(10)]
        begun.wait()
    held.set()
    worker.join()
    threads = [threading.Thread(target=eager) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        for y in outs:
            y.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        wrong += ["graph" for y in outs if not torch.equal(y, want)]
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


@gpu
@pytest.mark.parametrize("where", ["default", "user", "high"])
def test_streams_of_the_caller(where):
    """The default stream, one of the ring, and the very stream that is its own side stream."""
    case = contract_case(256)
    want = ops.norm_linear(*case, plan=OVERLAP)
    side = streams.join_on(torch.cuda.current_device()).side
    stream = {"default": torch.cuda.default_stream(), "user": torch.cuda.Stream(), "high": side}
    torch.cuda.synchronize()
    with torch.cuda.stream(stream[where]):
        x = torch.full_like(case.x, torch.nan)
        torch.cuda._sleep(2_000_000)
        x.copy_(case.x)
        y = ops.norm_linear(x, *case[1:], plan=OVERLAP)
        assert torch.cuda.current_stream() == stream[where]
    stream[where].synchronize()
    assert torch.equal(y, want)


@gpu
def test_an_error_between_fork_and_join(monkeypatch):
    case = contract_case(256)
    want = ops.norm_linear(*case, plan=OVERLAP)
    before = torch.cuda.current_stream()
    real = overlap.product_of
    monkeypatch.setattr(overlap, "product_of", lambda *a: lambda x, w: 1 / 0)
    with fresh(), late(side=True):
        with pytest.raises(ZeroDivisionError):
            ops.norm_linear(*case, plan=OVERLAP)
        assert torch.cuda.current_stream() == before
        # What takes the memory of the statistics next is behind them.
        again = torch.full((256,), 7.0, device=CUDA)
        assert torch.equal(again, torch.full_like(again, 7.0))
    monkeypatch.setattr(overlap, "product_of", real)
    with fresh():
        assert torch.equal(ops.norm_linear(*case, plan=OVERLAP), want)


@gpu
def test_same_bits_in_eight_threads_under_load():
    """Each thread on a stream of its own, with an x written just before, beside a busy stream."""
    cases = [contract_case(256) for _ in range(8)]
    wanted = [ops.norm_linear(*case, plan=OVERLAP) for case in cases]
    load = torch.randn(4096, 4096, device=CUDA, dtype=torch.bfloat16)
    busy, product, failed = torch.cuda.Stream(), torch.empty_like(load), []
    torch.cuda.synchronize()

    def work(index: int) -> None:
        case, want = cases[index], wanted[index]
        count = torch.zeros((), dtype=torch.int64, device=CUDA)
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(100):
                y = ops.norm_linear(case.x.clone(), *case[1:], plan=OVERLAP)
                count += (y.view(torch.int16) != want.view(torch.int16)).any()
        stream.synchronize()
        if int(count):
            failed.append((index, int(count)))

    with torch.cuda.stream(busy):
        for _ in range(200):
            torch.mm(load, load, out=product)
    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not failed


@gpu
def test_compiled():
    """Through the registered operation, in a graph of torch's compiler."""
    case = contract_case(256)
    want = ops.norm_linear(*case, plan=OVERLAP)
    torch._dynamo.reset()
    with torch.no_grad(), healthy("no_wait"):
        call = torch.compile(
            lambda x: ops.norm_linear(x, *case[1:]), mode="reduce-overhead", fullgraph=True
        )
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(call(case.x.clone()), want)
    assert plans.choose(Problem("bfloat16", 256, 968, 584), H200) != OVERLAP


@gpu
def test_another_gpu():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.cuda.set_device(0)
    here = contract_case(256)
    there = Case(*(t.to("cuda:1") if isinstance(t, Tensor) else t for t in here))
    want = ops.norm_linear(*here, plan=OVERLAP)
    for _ in range(20):
        found = [ops.norm_linear(*case, plan=OVERLAP) for case in (here, there)]
        assert torch.cuda.current_device() == 0 and found[1].device.index == 1
        assert all(torch.equal(y.to("cuda:0"), want) for y in found)
