"""A CUDA of lists for tests of streams and events: what was enqueued where, in which order.

``log`` holds (stream, what, detail) in the order of the host's calls. ``before(a, b)`` says whether
the streams' order, events and waits put entry a before entry b on any device: what a race is not.
"""

from __future__ import annotations

from typing import Any


class FakeCuda:
    """Stands in for ``torch.cuda`` in ``flashnorm_triton.streams``."""

    def __init__(self, ring: int = 32) -> None:
        self.log: list[tuple[Any, str, Any]] = []
        self.ring = [FakeStream(self, f"side{i}") for i in range(ring)]
        self.made = 0
        self.default = FakeStream(self, "here")
        self.current = self.default

    def Stream(self, device: int, priority: int = 0) -> FakeStream:
        self.made += 1
        return self.ring[(self.made - 1) % len(self.ring)]

    def Event(self) -> FakeEvent:
        return FakeEvent(self)

    def current_stream(self, device: int) -> FakeStream:
        return self.current

    def set_stream(self, stream: FakeStream) -> None:
        self.current = stream

    def is_current_stream_capturing(self) -> bool:
        return self.current.capturing

    def work(self, name: str) -> int:
        """Enqueue work on the current stream; its place in the log."""
        self.log.append((self.current, "work", name))
        return len(self.log) - 1

    def place(self, name: str) -> int:
        """Where the work of that name is in the log."""
        return next(i for i, entry in enumerate(self.log) if entry[1:] == ("work", name))

    def before(self, first: int, then: int) -> bool:
        """Whether entry ``first`` must be over when entry ``then`` begins."""
        known = {first}
        for place in range(first + 1, then + 1):
            stream, what, detail = self.log[place]
            after = any(self.log[i][0] is stream for i in known)
            if what == "wait":
                record = max(
                    (i for i in range(place) if self.log[i][1:] == ("record", detail)), default=-1
                )
                after = after or record in known
            if after:
                known.add(place)
        return then in known


class FakeStream:
    """``torch.cuda.Stream``, as far as a join uses it."""

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name, self.capturing = cuda, name, False

    def wait_event(self, event: FakeEvent) -> None:
        assert event.recorded, "a wait for an event that was never recorded waits for nothing"
        self.cuda.log.append((self, "wait", event))

    def __repr__(self) -> str:
        return self.name


class FakeEvent:
    """``torch.cuda.Event``: ``record`` without a stream would be on the current one."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.recorded = cuda, False

    def record(self, stream: FakeStream) -> None:
        self.recorded = True
        self.cuda.log.append((stream, "record", self))
