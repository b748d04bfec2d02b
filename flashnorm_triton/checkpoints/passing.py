"""One pass over the shards, by several threads: each reads and hashes a piece, then writes it.

A file's hash wants its bytes in order, so the threads that work on one file take turns at reading
and hashing; multiplying and writing go on meanwhile, each thread with the piece that its core has
just read. As long as there are files that nobody works on, each thread takes one of its own.
"""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from flashnorm_triton.checkpoints.hashing import new_digest
from flashnorm_triton.checkpoints.product import Product, Scratch

CHUNK = 1 << 20  # bytes read at a time: they stay in the cache until they are written
# Bytes written at a time: above, the kernel looks for large pages, at several times the cost of the
# copy itself.
_WRITE = 1 << 18
_THREADS = 8


@dataclass(frozen=True)
class Step:
    """A range of the source file, and what is written for it from ``place`` on in the new file.

    ``place`` None: nothing. Otherwise ``content`` instead of it, its ``product``, or its bytes.
    A range that is read a second time is not ``hashed`` again.
    """

    start: int
    size: int
    place: int | None = None
    product: Product | None = None
    content: memoryview | None = None
    hashed: bool = True


class Pass:
    """One file on its way: ``steps`` in the order of the source, then what is read again.

    ``hash`` is the source's, when all of it has gone by.
    """

    def __init__(
        self, source: Path, target: Path, header: bytes, size: int, steps: Sequence[Step]
    ) -> None:
        self.source, self.target = source, target
        self.hash = ""
        self.members = 0
        self.over = False  # all has been taken; some may still be at work
        self._header, self._size, self._steps = header, size, steps
        self._turn = threading.Lock()

    def open(self, algorithm: str) -> None:
        """Begin: the new file has its header and all of its room."""
        self._before = os.stat(self.source)
        self._digest = new_digest(algorithm)
        self._left = self._pieces()
        with ExitStack() as files:  # closed if a disk is full at once
            self._in = files.enter_context(self.source.open("rb", buffering=0))
            self._out = files.enter_context(self.target.open("wb", buffering=0))
            reserve(self._out, self._size)
            write_all(self._out, self._header, 0)
            files.pop_all()

    def work(self, told: Callable[[int], None]) -> None:
        """Take pieces until none is left; ``told`` hears their bytes, and may raise."""
        buffer, scratch = bytearray(CHUNK), Scratch()
        while True:
            with self._turn:
                step, offset, size = next(self._left, (None, 0, 0))
                if step is None:
                    self.over = True
                    return
                if len(buffer) < size:
                    buffer = bytearray(size)
                view = memoryview(buffer)[:size]
                self._read(view, step.start + offset)
                if step.hashed:
                    self._digest.update(view)
            if step.hashed:
                told(size)
            self._write(step, offset, view, scratch)

    def close(self, whole: bool) -> None:
        """End; raises ValueError, where it is ``whole``, for a product that float16 cannot hold and
        for a source that was changed meanwhile."""
        self._in.close()
        self._out.close()
        if not whole:
            return
        for step in self._steps:
            if step.product is not None:
                step.product.check()
        before, after = self._before, os.stat(self.source)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise ValueError(f"{self.source.name} was changed while it was read: start again")
        self.hash = self._digest.hexdigest()

    def _pieces(self) -> Iterator[tuple[Step | None, int, int]]:
        for step in self._steps:
            unit = step.product.row_bytes if step.product is not None else 1
            most = max(CHUNK // unit, 1) * unit
            for offset in range(0, step.size, most):
                yield step, offset, min(most, step.size - offset)

    def _read(self, view: memoryview, start: int) -> None:
        filled = 0
        while filled < len(view):
            got = os.preadv(self._in.fileno(), [view[filled:]], start + filled)
            if not got:
                raise ValueError(f"{self.source.name} ends before its header says")
            filled += got

    def _write(self, step: Step, offset: int, view: memoryview, scratch: Scratch) -> None:
        if step.place is None:
            return
        if step.content is not None:
            if offset == 0:
                write_all(self._out, step.content, step.place)
        elif step.product is None:
            write_all(self._out, view, step.place + offset)
        else:
            row = offset // step.product.row_bytes
            product = step.product.piece(view, row, scratch)
            write_all(self._out, product, step.place + row * step.product.new_row_bytes)


class Team:
    """Threads that share out files among them.

    Args:
        algorithm: of the files' hashes.
        advance: told of the bytes read, from any thread.
    """

    def __init__(self, algorithm: str, advance: Callable[[int], object]) -> None:
        self._algorithm, self._advance = algorithm, advance
        self._choosing = threading.Condition()
        self._stopped = False
        self._at_work = 0

    def run(self, passes: Mapping[str, Pass]) -> dict[str, str]:
        """Do them all; the sources' hashes, by the names given.

        Raises what the first failure or interrupt raises, once all have stopped.
        """
        waiting, running = list(passes.values()), []
        count = min(_cores(), _THREADS, 2 * len(waiting))
        # One thread for each: torch's own would wait for each other longer than they work.
        threads = torch.get_num_threads()
        pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))
        try:
            futures = [pool.submit(self._member, waiting, running) for _ in range(count)]
            for future in as_completed(futures):
                future.result()
        except BaseException:
            self._stop()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            torch.set_num_threads(threads)  # what threads that start later take over
        return {name: one.hash for name, one in passes.items()}

    def _stop(self) -> None:
        """Wait until nobody works any more. The pool may not know all of its threads: an interrupt
        can come while it starts one."""
        with self._choosing:
            self._stopped = True
            self._choosing.wait_for(lambda: self._at_work == 0)

    def _member(self, waiting: list[Pass], running: list[Pass]) -> None:
        while (mine := self._join(waiting, running)) is not None:
            whole = False
            try:
                mine.work(self._told)
                whole = True
            finally:
                self._leave(mine, whole)

    def _join(self, waiting: list[Pass], running: list[Pass]) -> Pass | None:
        """A file to work on: one that nobody has begun, else the one with the fewest at work."""
        with self._choosing:
            if self._stopped:
                return None
            if waiting:
                mine = waiting.pop(0)
                mine.open(self._algorithm)
                running.append(mine)
            else:
                unfinished = [one for one in running if not one.over]
                if not unfinished:
                    return None
                mine = min(unfinished, key=lambda one: one.members)
            mine.members += 1
            self._at_work += 1
            return mine

    def _leave(self, mine: Pass, whole: bool) -> None:
        with self._choosing:
            mine.members -= 1
            mine.over |= not whole  # nobody joins what has failed: its files are about to be closed
            last = mine.members == 0
        try:
            if last:
                mine.close(whole)
        finally:
            with self._choosing:
                self._at_work -= 1
                self._choosing.notify_all()

    def _told(self, count: int) -> None:
        if self._stopped:
            raise InterruptedError("another shard failed")
        self._advance(count)


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def reserve(sink: io.RawIOBase, size: int) -> None:
    """Give a file its size, and have the disk set aside all of its blocks at once; raises OSError
    when it is full.

    A file system that cannot is left to find them block by block.
    """
    os.ftruncate(sink.fileno(), size)
    if size and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(sink.fileno(), 0, size)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise


def write_all(sink: io.RawIOBase, data: memoryview | bytes, place: int) -> None:
    """Write ``data`` to an unbuffered file from ``place`` on; raises OSError for a full disk."""
    view = memoryview(data)
    while view.nbytes:
        written = os.pwrite(sink.fileno(), view[:_WRITE], place)
        view, place = view[written:], place + written


def copy_hashed(path: Path, target: Path, advance: Callable[[int], object], name: str) -> str:
    """Copy a file, a piece at a time; its hash, of the algorithm ``name``."""
    digest, buffer, place = new_digest(name), memoryview(bytearray(CHUNK)), 0
    with path.open("rb", buffering=0) as source, target.open("wb", buffering=0) as sink:
        while count := source.readinto(buffer):
            digest.update(buffer[:count])
            write_all(sink, buffer[:count], place)
            place += count
            advance(count)
    return digest.hexdigest()
