"""The launch behind a call: what is prepared once, what is kept, and what every launch asks anew.

A stand-in for Triton's driver takes the launches; the kernels themselves are tested elsewhere.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashnorm_triton import compiled, dispatch
from flashnorm_triton.compiled import Kernel, Tile


class CudaLauncher:
    """Triton 3.6's launcher: what it does with a call, and the part that launches.

    That part is, for a kernel with descriptors, a function around the one that takes them encoded.
    """

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True

    def __init__(self, tiles: int = 0) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.calls = 0
        launcher: Callable[..., None] = self._launch

        def inner(*arguments: Any) -> None:
            launcher(*(("encoded", a) if isinstance(a, Tile) else a for a in arguments))

        self.launch = inner if tiles else self._launch

    def _launch(self, *arguments: Any) -> None:
        self.launched.append(arguments)

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *arguments: Any) -> None:
        self.calls += 1
        flags = (self.launch_cooperative_grid, self.launch_pdl)
        self.launch(x, y, z, stream, function, *flags, None, None, *arguments)


BEFORE = (11, False, True, None, None, ("packed",), None, None, None)
"""What follows grid and stream: the function, the launcher's flags, no scratch, no hooks."""


class Machine:
    """A kernel on a GPU that is not there; its launcher keeps what Triton's C code would get."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tiles: int = 0, release=(3, 6)) -> None:
        triton = pytest.importorskip("triton")
        driver = pytest.importorskip("triton.backends.nvidia.driver")
        self.launcher, self.tiles = CudaLauncher(tiles), tiles
        self.encoded: list[tuple[Any, ...]] = []
        self.streams, self.fn_launches, self.warmups = [7], 0, 0
        self.contexts: list[str] = []
        self.hooks = SimpleNamespace(calls=[])
        active = SimpleNamespace(get_current_stream=lambda device: self.streams[-1])
        for owner, name, value in (
            (compiled, "interpreting", lambda: False),
            (compiled, "triton_release", lambda: release),
            (compiled, "_thread", threading.local()),
            (triton.runtime.driver, "_active", active),
            (triton.knobs.runtime, "launch_enter_hook", self.hooks),
            (driver, "make_tensordesc_arg", self._encode),
            (torch.cuda, "mem_get_info", self._context),
        ):
            monkeypatch.setattr(owner, name, value, raising=False)
        names = {f"{name}_desc": "tensordesc" for name in "xwy"[:tiles]}
        self.kernel = Kernel(self, {"K": 576}, names, num_warps=4)

    def _context(self) -> None:
        self.contexts.append(threading.current_thread().name)

    def _encode(self, arg: Tile, metadata: Any) -> list[Any]:
        self.encoded.append((metadata, arg.base.data_ptr(), *arg.shape, *arg.strides))
        return [("map", *self.encoded[-1]), *arg.shape, *arg.strides]

    def warmup(self, *args: Any, grid: tuple[int, int, int], **constants: Any) -> Any:
        self.warmups += 1
        metadata = SimpleNamespace(tensordesc_meta=["mx", "mw", "my"][: self.tiles])
        return SimpleNamespace(
            packed_metadata=("packed",), metadata=metadata, run=self.launcher, function=11
        )

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            self.fn_launches += 1

        return launch


def tile_of(rows: int, stride: int) -> Callable[[Any], Tile]:
    return lambda tensor: Tile(tensor, [rows, 8], [stride, 1], [4, 8], None)


@pytest.fixture(autouse=True)
def _no_descriptor_class(monkeypatch):
    """The compile is given Triton's own descriptors, which want a tensor of a GPU."""
    monkeypatch.setattr(Tile, "real", lambda tile: tile)


def test_a_compiled_kernel_is_published_only_when_complete(monkeypatch):
    """Another thread takes the direct path as soon as ``_run`` is set: all else must be there."""
    machine = Machine(monkeypatch)
    published: list[bool] = []

    class Compiled:
        packed_metadata, metadata, run = ("packed",), None, machine.launcher

        @property
        def function(self) -> int:
            published.append(machine.kernel._run is not None or machine.kernel.direct is not None)
            return 1

    monkeypatch.setattr(machine, "warmup", lambda *args, **kwargs: Compiled(), raising=False)
    machine.kernel((1, 1, 1), 0)
    assert published and not any(published)


@pytest.mark.parametrize(
    ("release", "scratch", "whole"), [((3, 6), 0, 0), ((3, 7), 0, 2), ((3, 6), 64, 2)], ids=str
)
def test_the_direct_launch_is_the_launchers_own(release, scratch, whole, monkeypatch):
    """Only in the release whose launcher is known, and only where no scratch is asked for."""
    machine = Machine(monkeypatch, release=release)
    machine.launcher.global_scratch_size = scratch
    machine.kernel((3, 2, 1), 0, "x", "y", 5)
    launch = machine.kernel.bind((3, 2, 1), 0, last=(5,))
    launch("x", "y")
    assert machine.launcher.calls == whole and machine.warmups == 1
    assert machine.launcher.launched == [(3, 2, 1, 7, *BEFORE, "x", "y", 5, 576)] * 2


@pytest.mark.parametrize("tiles", [0, 2, 3])
def test_every_launch_of_a_bound_kernel_gives_the_same_arguments(tiles, monkeypatch):
    """The first one, which compiles, too; each on the stream that is current then."""
    machine = Machine(monkeypatch, tiles)
    operands = [torch.zeros(64) for _ in range(4)]
    launch = machine.kernel.bind((3, 2, 1), 0, [tile_of(8, 8)] * tiles, (5, 1e-6))
    for stream in (7, 8, 9):
        machine.streams.append(stream)
        launch(*operands)
    assert machine.warmups == 1 and machine.launcher.calls == bool(tiles)
    whole, *direct = machine.launcher.launched
    rest = (*operands[tiles:], 5, 1e-6, 576)
    described = [
        part
        for operand, meta in zip(operands, ("mx", "mw", "my")[:tiles], strict=False)
        for part in (("map", meta, operand.data_ptr(), 8, 8, 8, 1), 8, 8, 8, 1)
    ]
    for stream, launched in zip((8, 9), direct, strict=True):
        assert same(launched, (3, 2, 1, stream, *BEFORE, *described, *rest))
    for launched, operand in zip(whole[13:], operands[:tiles], strict=False):
        assert launched[0] == "encoded" and launched[1].base is operand
    assert same(whole[:13] + whole[13 + tiles :], (3, 2, 1, 7, *BEFORE, *rest))


def same(these: tuple[Any, ...], those: tuple[Any, ...]) -> bool:
    """Equal, and the same objects where they are tensors."""
    return len(these) == len(those) and all(
        a is b if isinstance(a, Tensor) else a == b for a, b in zip(these, those, strict=True)
    )


@pytest.mark.parametrize("tiles", [0, 2, 3])
def test_a_launch_calls_no_python_but_the_drivers(tiles, monkeypatch):
    """Each Python call is a tenth of a microsecond of eager decoding, at every launch."""
    machine = Machine(monkeypatch, tiles)
    operands = [torch.zeros(64) for _ in range(4)]
    launch = machine.kernel.bind((3, 2, 1), 0, [tile_of(8, 8)] * tiles, (5,))
    for _ in range(2):
        launch(*operands)
    called: list[str] = []

    def watch(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    sys.setprofile(watch)
    try:
        launch(*operands)
    finally:
        sys.setprofile(None)
    assert called == ["launch", "<lambda>", "_launch"], "the stream's getter and the launcher"


def test_descriptors_are_kept_by_address_and_shape(monkeypatch):
    """Nothing is encoded again for memory that was described before; all else is."""
    machine = Machine(monkeypatch, 2)
    x, w = torch.zeros(80), torch.zeros(64)

    def bound(rows: int = 4, stride: int = 8) -> Callable[..., None]:
        launch = machine.kernel.bind((1, 1, 1), 0, [tile_of(rows, stride), tile_of(8, 8)])
        launch(x, w)  # the first of a shape goes the whole way
        return launch

    launch = bound()
    assert not machine.encoded
    for _ in range(3):
        launch(x, w)
    described = [("mx", x.data_ptr(), 4, 8, 8, 1), ("mw", w.data_ptr(), 8, 8, 8, 1)]
    assert machine.encoded == described
    launch(x[8:], w)
    assert machine.encoded[2:] == [("mx", x[8:].data_ptr(), 4, 8, 8, 1)]
    assert machine.launcher.launched[-1][13] == ("map", *machine.encoded[-1])
    bound(rows=3)(x, w)
    assert machine.encoded[3][:3] == ("mx", x.data_ptr(), 3)
    bound(stride=16)(x, w)
    assert machine.encoded[5] == ("mx", x.data_ptr(), 4, 8, 16, 1)


def test_kept_descriptors_hold_no_memory_and_are_bounded(monkeypatch):
    monkeypatch.setattr(compiled, "_MOST_ENCODED", 8)
    machine = Machine(monkeypatch, 2)
    launch = machine.kernel.bind((1, 1, 1), 0, [tile_of(4, 8), tile_of(8, 8)])
    x, w = torch.zeros(80), torch.zeros(640)
    launch(x, w)
    launch(x, w)
    machine.launcher.launched.clear()
    holders = [torch.zeros(64) for _ in range(40)]
    alive = [weakref.ref(holder) for holder in holders]
    cells = dict(zip(launch.__code__.co_freevars, launch.__closure__, strict=True))
    kept = cells["of_a"].cell_contents
    for holder in holders:
        launch(holder, w)
        assert len(kept) <= 8
    machine.launcher.launched.clear()
    del holders, holder
    assert not any(ref() is not None for ref in alive)


def test_a_profiler_is_told_of_launches(monkeypatch):
    machine = Machine(monkeypatch, 2)
    launch = machine.kernel.bind((1, 1, 1), 0, [tile_of(4, 8), tile_of(8, 8)])
    x, w = torch.zeros(80), torch.zeros(64)
    for _ in range(2):
        launch(x, w)
    machine.hooks.calls.append("profiler")
    launch(x, w)
    assert machine.fn_launches == 1
    machine.hooks.calls.clear()
    launch(x, w)
    assert machine.fn_launches == 1 and len(machine.launcher.launched) == 3


def test_a_new_thread_has_a_context_before_anything_is_encoded(monkeypatch):
    machine = Machine(monkeypatch, 2)
    launch = machine.kernel.bind((1, 1, 1), 0, [tile_of(4, 8), tile_of(8, 8)])
    x, w = torch.zeros(80), torch.zeros(64)
    for name in ("first", "second"):
        seen = len(machine.encoded)

        def work() -> None:
            for _ in range(3):
                launch(x[8:] if name == "second" else x, w)  # noqa: B023

        thread = threading.Thread(target=work, name=name)
        thread.start()
        thread.join()
        assert len(machine.encoded) == seen + (2 if name == "first" else 1)
    assert machine.contexts == ["first", "second"]


def test_threads_that_meet_at_the_first_launch(monkeypatch):
    machine = Machine(monkeypatch, 3)
    launch = machine.kernel.bind((1, 1, 1), 0, [tile_of(4, 8)] * 3)
    operands = [torch.zeros(64) for _ in range(4)]
    start, failed = threading.Barrier(8), []

    def work() -> None:
        start.wait()
        try:
            for _ in range(50):
                launch(*operands)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and len(machine.launcher.launched) == 400
    direct = [launched for launched in machine.launcher.launched if launched[13][0] == "map"]
    assert len(direct) >= 392 and all(same(launched, direct[0]) for launched in direct)


@pytest.mark.parametrize(("index", "entered"), [(-1, []), (0, []), (1, [1])])
def test_a_call_runs_on_its_own_device(index, entered, monkeypatch):
    """Where another device is current it is changed for the call; where not, nothing is asked."""
    seen: list[int] = []

    @contextlib.contextmanager
    def device(number: int):
        seen.append(number)
        yield

    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    monkeypatch.setattr(dispatch, "_ready", {})
    expected = dispatch.norm_linear(x, weight, 1e-6, None, None)
    normed = dispatch.rms_norm(x, 1e-6, None)
    monkeypatch.setattr(dispatch, "_current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", device)
    ready = {key: (run, index) for key, (run, _) in dispatch._ready.items()}
    monkeypatch.setattr(dispatch, "_ready", ready)
    assert torch.equal(dispatch.norm_linear(x, weight, 1e-6, None, None), expected)
    assert torch.equal(dispatch.rms_norm(x, 1e-6, None), normed)
    assert seen == entered * 2
