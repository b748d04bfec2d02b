"""Reading a file once, piece by piece, every byte hashed on its way."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from flashnorm_triton.checkpoints.hashing import Digest

CHUNK = 1 << 20  # bytes read at a time: they stay in the cache until they are written
_BUFFERS = 3


class HashedReader:
    """Reads a file from where it stands.

    Args:
        source: an unbuffered file.
        digest: told of every byte; None: of nothing.
        hasher: a thread that does so meanwhile, where a core is free for it; None: this one does.
        advance: told of the bytes read.
    """

    def __init__(
        self,
        source: io.RawIOBase,
        digest: Digest | None,
        hasher: ThreadPoolExecutor | None = None,
        advance: Callable[[int], object] = lambda count: None,
    ) -> None:
        self._source, self._digest, self._hasher = source, digest, hasher
        self._advance = advance
        count = 1 if hasher is None else _BUFFERS
        self._buffers = [bytearray(CHUNK) for _ in range(count)]
        self._busy: list[Future[object] | None] = [None] * count
        self._turn = 0

    def pieces(self, size: int, unit: int) -> Iterator[memoryview]:
        """The next ``size`` bytes, in pieces of whole units; each is valid until the next.

        Raises ValueError when the file ends before.
        """
        step = max(CHUNK // unit, 1) * unit
        while size:
            count = min(step, size)
            self._turn = turn = (self._turn + 1) % len(self._buffers)
            self._wait(turn)
            if len(self._buffers[turn]) < count:
                self._buffers[turn] = bytearray(count)
            view = memoryview(self._buffers[turn])[:count]
            filled = 0
            while filled < count:
                got = self._source.readinto(view[filled:])
                if not got:
                    raise ValueError(f"{self._source.name} ends before its header says")
                filled += got
            if self._hasher is not None and self._digest is not None:
                self._busy[turn] = self._hasher.submit(self._digest.update, view)
            elif self._digest is not None:
                self._digest.update(view)
            size -= count
            self._advance(count)
            yield view

    def skip(self, size: int) -> None:
        """Read (and hash) bytes that nobody wants."""
        for _ in self.pieces(size, 1):
            pass

    def finish(self) -> None:
        """Wait until all that was read is hashed."""
        for turn in range(len(self._buffers)):
            self._wait(turn)

    def _wait(self, turn: int) -> None:
        future, self._busy[turn] = self._busy[turn], None
        if future is not None:
            future.result()
