"""Counters of split-K launches: never shared by two that may run at once, zero when first taken.

Whether two launches meet on a GPU is chance; which memory they are given is not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flashnorm_triton import workspace

COUNT = 40


class Machine:
    """CUDA as far as counters ask for it: what is captured, what is waited for, in order."""

    def __init__(self) -> None:
        self.capturing = False
        self.events: list[str] = []

    def current_stream(self, device: int) -> Machine:
        return self

    def synchronize(self) -> None:
        self.events.append("waited")

    def zeros(self, count: int, *, dtype: torch.dtype, device: str) -> Tensor:
        self.events.append("filled")
        return torch.full((count,), 0, dtype=dtype)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()
    monkeypatch.setattr(workspace, "_blocks", {})
    monkeypatch.setattr(workspace, "_of_stream", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", made.current_stream)
    monkeypatch.setattr(workspace.torch, "zeros", made.zeros)
    yield made


def places(counters: Tensor, count: int = COUNT) -> set[int]:
    """The addresses that a launch of ``count`` tiles counts in."""
    return set(range(counters.data_ptr(), counters.data_ptr() + 4 * count, 4))


def assert_apart(taken: list[Tensor]) -> None:
    everything: set[int] = set()
    for counters in taken:
        assert len(counters) >= COUNT and counters.data_ptr() % 16 == 0
        mine = places(counters)
        assert not mine & everything, "two launches count in the same place"
        everything |= mine


def test_a_stream_keeps_its_counters_and_shares_them_with_none(machine: Machine) -> None:
    first = {(d, s): workspace.counters(d, s, COUNT) for d in (0, 1) for s in (0, 7, 9)}
    assert_apart(list(first.values()))
    for (device, stream), counters in first.items():
        again = workspace.counters(device, stream, COUNT)
        assert again.data_ptr() == counters.data_ptr() and not again.any()


def test_every_captured_launch_has_its_own(machine: Machine) -> None:
    """Graphs captured on one stream may be replayed at once, beside launches on that stream."""
    before = workspace.counters(0, 5, COUNT)
    machine.capturing = True
    captured = [workspace.counters(0, 5, COUNT) for _ in range(3)]
    machine.capturing = False
    assert_apart([before, *captured, workspace.counters(0, 6, COUNT)])
    assert workspace.counters(0, 5, COUNT).data_ptr() == before.data_ptr()


def test_a_block_first_made_in_a_capture_is_not_used_outside(machine: Machine) -> None:
    """The graph zeroes it at every replay: nobody else may count there."""
    machine.capturing = True
    inside = workspace.counters(0, 5, COUNT)
    machine.capturing = False
    outside = workspace.counters(0, 5, COUNT)
    assert outside.untyped_storage().data_ptr() != inside.untyped_storage().data_ptr()


def test_a_block_is_zero_before_another_stream_can_take_of_it(machine: Machine) -> None:
    workspace.counters(0, 5, COUNT)
    assert machine.events == ["filled", "waited"]
    workspace.counters(0, 6, COUNT)
    assert machine.events == ["filled", "waited"]


def test_threads_that_come_at_once_get_counters_of_their_own(machine: Machine, monkeypatch) -> None:
    class Slow(dict):
        def get(self, *arguments: Any) -> Any:
            found = super().get(*arguments)
            time.sleep(0.01)  # room for another thread
            return found

    monkeypatch.setattr(workspace, "_blocks", Slow())
    start, taken = threading.Barrier(4), [workspace.counters(0, 9, COUNT)]

    def work(stream: int) -> None:
        start.wait()
        taken.append(workspace.counters(0, stream, COUNT))

    threads = [threading.Thread(target=work, args=(stream,)) for stream in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 5
    assert_apart(taken)


def test_a_full_block_is_followed_by_another(machine: Machine, monkeypatch: Any) -> None:
    monkeypatch.setattr(workspace, "_BLOCK", 2 * workspace.MOST_SPLIT_TILES + 16)
    assert_apart([workspace.counters(0, stream, COUNT) for stream in range(5)])
    assert machine.events.count("filled") == 3


def test_more_tiles_than_there_are_counters_are_refused(machine: Machine) -> None:
    with pytest.raises(ValueError, match="4097 split-K tiles; at most 4096"):
        workspace.counters(0, 5, workspace.MOST_SPLIT_TILES + 1)
