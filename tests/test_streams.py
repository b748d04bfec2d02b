"""The fork and join of overlap, on a made-up CUDA: the order that events give, and what errors do.

What only a GPU can show is in tests/test_overlap.py.
"""

from __future__ import annotations

import threading

import pytest
import torch
from fake_streams import FakeCuda

from flashnorm_triton import streams
from flashnorm_triton.launch import Geometry
from flashnorm_triton.launch import overlap as family
from flashnorm_triton.plans import OVERLAP, Problem


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(streams, "cuda", fake)
    monkeypatch.setattr(streams, "_thread", threading.local())
    return fake


def forked(cuda: FakeCuda, tag: str = "") -> None:
    """One call: x is written, the two halves, the scale."""
    cuda.work(f"x{tag}")
    join = streams.join_on(0)
    with join:
        with join.beside():
            cuda.work(f"statistics{tag}")
        cuda.work(f"product{tag}")
    cuda.work(f"scale{tag}")


def test_the_scale_waits_for_both_and_neither_for_the_other(cuda):
    forked(cuda)
    x, statistics, product, scale = map(cuda.place, ("x", "statistics", "product", "scale"))
    assert cuda.log[statistics][0] is not cuda.log[product][0]
    assert cuda.before(x, statistics) and cuda.before(x, product)
    assert cuda.before(statistics, scale) and cuda.before(product, scale)
    assert not cuda.before(statistics, product) and not cuda.before(product, statistics)


def test_an_event_is_recorded_after_each_and_waited_for(cuda):
    """Explicitly for both: also where the order of the current stream would do."""
    forked(cuda)
    scale = cuda.place("scale")
    waits = [detail for stream, what, detail in cuda.log[:scale] if what == "wait"][-2:]
    for name, event in zip(("statistics", "product"), waits, strict=True):
        record = max(i for i, entry in enumerate(cuda.log) if entry[1:] == ("record", event))
        assert cuda.log[record][0] is cuda.log[cuda.place(name)][0]
        assert cuda.place(name) < record < scale
    assert all(entry[0] is cuda.default for entry in cuda.log[scale - 2 : scale])


def test_the_next_call_is_behind_this_one(cuda):
    """Memory that a call gives back is written by the next one, on either stream."""
    forked(cuda, "1")
    forked(cuda, "2")
    assert cuda.before(cuda.place("scale1"), cuda.place("statistics2"))
    assert cuda.before(cuda.place("statistics1"), cuda.place("product2"))


def test_two_streams_of_one_thread(cuda):
    """They share the side stream; what each allocates is its own, and each waits for its own."""
    other = cuda.ring[7]
    forked(cuda, "1")
    cuda.current = other
    forked(cuda, "2")
    assert cuda.current is other
    assert cuda.before(cuda.place("statistics2"), cuda.place("scale2"))
    assert cuda.before(cuda.place("x2"), cuda.place("statistics2"))
    assert not cuda.before(cuda.place("scale1"), cuda.place("scale2"))


@pytest.mark.parametrize("where", ["fork", "statistics", "product"])
def test_an_error_leaves_the_current_stream_and_the_join(cuda, monkeypatch, where):
    """The memory of what was launched is given back: the current stream must be behind it."""
    join = streams.join_on(0)
    if where == "fork":
        monkeypatch.setattr(streams.Join, "start", lambda self: 1 / 0)
    before = cuda.current
    with pytest.raises(ZeroDivisionError), join:
        with join.beside():
            cuda.work("statistics")
            if where == "statistics":
                raise ZeroDivisionError
        assert cuda.current is before
        cuda.work("product")
        raise ZeroDivisionError
    assert cuda.current is before
    if where != "fork":
        later = cuda.work("whatever takes the memory next")
        assert cuda.before(cuda.place("statistics"), later)


def test_a_thread_has_its_own_side_stream_and_a_device_too(cuda):
    mine, other_device = streams.join_on(0), streams.join_on(1)
    assert streams.join_on(0) is mine and other_device is not mine
    theirs = []
    thread = threading.Thread(target=lambda: theirs.append(streams.join_on(0)))
    thread.start()
    thread.join()
    sides = {mine.side, other_device.side, theirs[0].side}
    events = {j.forked for j in (mine, other_device, theirs[0])}
    assert len(sides) == len(events) == 3


def test_a_side_stream_that_another_thread_captures_is_left(cuda):
    """torch's streams come in a ring: eager work must not end up in someone's graph."""
    join = streams.join_on(0)
    join.side.capturing = True
    taken = join.side
    forked(cuda)
    assert join.side is not taken and not any(entry[0] is taken for entry in cuda.log)
    for stream in cuda.ring:
        stream.capturing = True
    forked(cuda, " again")
    assert cuda.log[cuda.place("statistics again")][0] is cuda.default


def test_a_capture_keeps_its_side_stream(cuda):
    """Forked once, it is part of the capture, and stays so for the next call."""
    join = streams.join_on(0)
    cuda.default.capturing = True
    forked(cuda, "1")
    join.side.capturing = True
    side = join.side
    forked(cuda, "2")
    assert join.side is side


def test_the_cpu_has_nothing_beside():
    join = streams.join_on(-1)
    with join, join.beside():
        pass


def test_what_the_side_stream_touches_is_allocated_before_the_fork(cuda, monkeypatch):
    """On the current stream: its memory is then handed on in that stream's order alone."""
    problem = Problem("float32", 3, 8, 16, centred=True)
    overlap = family.Overlap(OVERLAP, problem, 16)

    def allocates(shape, dtype, device):
        def empty(x):
            cuda.work("allocate")
            return torch.empty(shape, dtype=dtype)

        return empty

    def launch(kernel, grid, device, *args):
        cuda.work("scale" if len(args) == 7 else "statistics")

    def mm(x, w):
        cuda.work("product")
        return x @ w

    geometry = Geometry(3, 16, (3,), 0)
    monkeypatch.setattr(family, "empty_of", allocates)
    monkeypatch.setattr(family, "output_of", lambda *a: lambda x: torch.empty(3, 8))
    run = overlap.bind(geometry, 1e-6)
    monkeypatch.setattr(family.torch, "mm", mm)
    monkeypatch.setattr(family.Kernel, "__call__", launch)
    x, w = torch.randn(3, 16), torch.randn(8, 16)
    run(x, w, None, None, torch.randn(8), None)
    names = [detail for _, what, detail in cuda.log if what == "work"]
    assert names.index("statistics") < names.index("product") < names.index("scale")
    allocated = [i for i, entry in enumerate(cuda.log) if entry[2] == "allocate"]
    fork = next(i for i, entry in enumerate(cuda.log) if entry[1] == "record")
    assert allocated and all(cuda.log[i][0] is cuda.default for i in allocated)
    assert max(i for i in allocated if i < cuda.place("statistics")) < fork
    assert not [i for i in allocated if fork < i < cuda.place("product")]
    assert cuda.before(cuda.place("statistics"), cuda.place("scale"))
