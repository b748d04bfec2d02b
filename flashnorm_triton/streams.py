"""Two streams that work side by side within one operation, and meet again before it returns.

FlashNorm's matmul of the raw x and the statistics of x need nothing of each other. What joins them
is events: one that the side stream waits for before it starts (x, and the memory it writes to, may
still be in use), one recorded after the work of either stream, and waits for both of them. Nothing
rests on a device's default stream, or on a host that happens to be slow.

All memory is allocated on the caller's stream, before the fork, and the join is enqueued even when
an error ends the work in between. So the caller's stream is behind everything that the side stream
reads or writes when the operation returns, and the allocator may hand the memory on as usual: what
``record_stream`` would keep back is already free to be used again there. Under a graph capture the
same events make the side stream a branch of the graph.

A thread has its own side stream and events for every device. An event can be recorded again at
once: a wait refers to the record that was there when it was enqueued.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from torch import cuda

# torch hands out streams from a ring of so many: one of a ring may be another thread's as well.
_RING = 32
# The statistics are short, and the scale waits for them: their blocks go first.
_PRIORITY = -1
_thread = threading.local()


class Join:
    """A fork of the current stream of a CUDA device, which must be current, and its join.

    ``with join: with join.beside(): <side stream's work>; <work of the current stream>``. Within
    ``beside`` launches go to the side stream; after the outer block the current stream waits for
    the events recorded after either's work.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self.side = cuda.Stream(device, priority=_PRIORITY)
        self.forked, self.beside_done, self.here_done = (cuda.Event() for _ in range(3))
        self.here: Any = None
        self.captured = False
        self._beside = _Beside(self)

    def __enter__(self) -> Join:
        self.here = cuda.current_stream(self.device)
        self.captured = cuda.is_current_stream_capturing()
        self.forked.record(self.here)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        here, self.here = self.here, None
        # Here, and not where the side work ends: an error may have kept it from getting there.
        self.beside_done.record(self.side)
        self.here_done.record(here)
        self.wait(here)

    def beside(self) -> _Beside:
        """A block whose launches go to the side stream; the current stream is put back after it."""
        return self._beside

    def start(self) -> None:
        """The side stream waits for what came before the fork."""
        self.side.wait_event(self.forked)

    def wait(self, here: Any) -> None:
        """The stream that goes on waits for both."""
        here.wait_event(self.beside_done)
        here.wait_event(self.here_done)

    def take_side(self) -> None:
        """Make the side stream the current one: another, if someone else is capturing this one."""
        cuda.set_stream(self.side)
        for _ in range(_RING):
            if self.captured or not cuda.is_current_stream_capturing():
                return
            self.side = cuda.Stream(self.device, priority=_PRIORITY)
            cuda.set_stream(self.side)
        self.side = self.here  # one after the other: right everywhere
        cuda.set_stream(self.side)


class _Beside:
    """Makes the side stream of a join the current one for a while."""

    def __init__(self, join: Join) -> None:
        self.join = join

    def __enter__(self) -> None:
        try:
            self.join.take_side()
            self.join.start()
        except BaseException:
            cuda.set_stream(self.join.here)
            raise

    def __exit__(self, *error: object) -> None:
        cuda.set_stream(self.join.here)


class Serial:
    """Where there is no device to share: one after the other, on the CPU."""

    def __enter__(self) -> Serial:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def beside(self) -> Serial:
        """This, for there is nothing beside."""
        return self


_SERIAL = Serial()


def join_on(device: int) -> Join | Serial:
    """This thread's join for a CUDA device; ``Serial`` for the CPU (device -1)."""
    if device < 0:
        return _SERIAL
    joins = _thread.__dict__
    join = joins.get(device)
    if join is None:
        join = joins[device] = Join(device)
    return join
