"""Rewriting shards: one pass over each, a few megabytes in memory, every byte hashed.

What is not changed is copied range by range. A weight meets its gain in a float32 product (float64
for float64) and one rounding. Biases that take W·β are written last, when all of their weights have
gone by, wherever those are stored.
"""

from __future__ import annotations

import errno
import io
import math
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flashnorm_triton.checkpoints.hashing import new_digest
from flashnorm_triton.checkpoints.reading import CHUNK, HashedReader
from flashnorm_triton.checkpoints.safefile import (
    FLOATS,
    Entry,
    Shard,
    make_header,
    to_bytes,
)

# Bytes written at a time: above, the kernel looks for large pages, at several times the cost of the
# copy itself.
_WRITE = 1 << 18
# Elements multiplied at a time where a float32 copy is needed, which then stays in the cache.
_PIECE = 1 << 15
_WORKERS = 4  # shards at a time
# A healthy float16 product is off by about 2e-4; beyond this, subnormal values were hit.
_HALF_ERROR = 5e-4


@dataclass(frozen=True)
class Scale:
    """Multiply a weight by ``gain`` (K,) along ``axis``; ``beta`` (K,) also yields W·β, which is
    added to the stored tensor ``bias``."""

    gain: Tensor
    axis: int
    beta: Tensor | None = None
    bias: str | None = None


@dataclass(frozen=True)
class Replace:
    """Write these values, in the tensor's own dtype."""

    values: Tensor


@dataclass(frozen=True)
class Drop:
    """Leave the tensor out."""


@dataclass(frozen=True)
class Added:
    """A tensor written beside ``source`` in the same file: its values, or their product."""

    name: str
    source: str
    scale: Scale | None


Edit = Scale | Replace | Drop


class Rewriter:
    """Writes the changed copy of a checkpoint's shards: :meth:`write_shards`, then :meth:`finish`.

    Args:
        edits: what becomes of each stored tensor; one that is not named is copied.
        added: tensors that the source has not.
        cast: stored dtypes (safetensors names) that are converted, and to what.
        advance: told of the bytes read.
        digest: the algorithm that the source is hashed with.
    """

    def __init__(
        self,
        edits: Mapping[str, Edit],
        added: tuple[Added, ...] = (),
        cast: Mapping[str, str] | None = None,
        advance: Callable[[int], object] = lambda count: None,
        digest: str = "sha256",
    ) -> None:
        self._edits, self._added = edits, added
        self._cast = dict(cast or {})
        self._digest = digest
        self._advance = advance
        self._apart = False
        self._stopped = threading.Event()
        self._moved: dict[str, Tensor] = {}
        self._waiting: dict[str, tuple[Path, int, str, Tensor]] = {}
        self._biases = {
            edit.bias for edit in edits.values() if isinstance(edit, Scale) and edit.bias
        }

    def layout(self, shard: Shard) -> tuple[bytes, tuple[Entry, ...]]:
        """Header and entries of the new file; the source's own bytes where nothing moves."""
        present = {entry.name for entry in shard.entries}
        kept = [e for e in shard.entries if not isinstance(self._edits.get(e.name), Drop)]
        tensors = [(e.name, self._cast.get(e.dtype, e.dtype), e.shape) for e in kept]
        for one in self._added:
            if one.source in present:
                old = next(e for e in shard.entries if e.name == one.source)
                tensors.append((one.name, self._cast.get(old.dtype, old.dtype), old.shape))
        if tensors == [(e.name, e.dtype, e.shape) for e in shard.entries]:
            return shard.header, shard.entries
        return make_header(tensors, shard.metadata)

    def write_shards(self, shards: Mapping[str, Shard], folder: Path) -> dict[str, str]:
        """:meth:`write` for every shard, several at a time; their sources' hashes by file name.

        Raises what the first failure or interrupt raises, once all have stopped.
        """
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        workers = min(_WORKERS, cores or 1, len(shards))
        self._apart = 2 * workers <= (cores or 1)  # a thread that hashes has a core of its own
        # One thread for each shard: torch's own would wait for each other longer than they work.
        threads = torch.get_num_threads()
        pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
        with pool:
            futures = {n: pool.submit(self.write, one, folder / n) for n, one in shards.items()}
            try:
                for future in as_completed(futures.values()):
                    future.result()
            except BaseException:
                self._stopped.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
            finally:
                torch.set_num_threads(threads)  # what threads that start later take over
        return {name: future.result() for name, future in futures.items()}

    def write(self, shard: Shard, target: Path) -> str:
        """Write the new form of ``shard`` to ``target``; returns the source file's hash.

        Raises ValueError when a product leaves the range of float16, or the source is changed
        while it is read.
        """
        before = os.stat(shard.path)
        header, entries = self.layout(shard)
        new = {entry.name: entry for entry in entries}
        digest = new_digest(self._digest)
        with ExitStack() as stack:
            source = stack.enter_context(shard.path.open("rb", buffering=0))
            sink = stack.enter_context(target.open("wb", buffering=0))
            hasher = stack.enter_context(ThreadPoolExecutor(1)) if self._apart else None
            reserve(sink, len(header) + (entries[-1].stop if entries else 0))
            reader = HashedReader(source, digest, hasher, self._told)
            reader.skip(len(shard.header))
            write_all(sink, header)
            for entry in shard.entries:
                self._tensor(reader, sink, entry, new.get(entry.name), target)
            reader.finish()
            for one in self._added:
                if one.name in new:
                    self._add(source, sink, shard, one, new[one.name])
        after = os.stat(shard.path)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise ValueError(f"{shard.path.name} was changed while it was read: start again")
        return digest.hexdigest()

    def finish(self) -> None:
        """Write the biases that W·β was added to: float64 sums, one rounding."""
        for name, (path, offset, dtype, stored) in self._waiting.items():
            moved = self._moved[name]
            values = (stored.to(moved.dtype) + moved).to(FLOATS[dtype])
            with path.open("r+b") as file:
                file.seek(offset)
                file.write(to_bytes(values))

    def _told(self, count: int) -> None:
        if self._stopped.is_set():
            raise InterruptedError("another shard failed")
        self._advance(count)

    def _tensor(
        self,
        reader: HashedReader,
        sink: io.RawIOBase,
        entry: Entry,
        place: Entry | None,
        target: Path,
    ) -> None:
        edit = self._edits.get(entry.name)
        if place is None:
            reader.skip(entry.size)
        elif isinstance(edit, Replace):
            reader.skip(entry.size)
            write_all(sink, to_bytes(edit.values.to(FLOATS[place.dtype])))
        elif entry.name in self._biases:
            data = bytearray()
            for chunk in reader.pieces(entry.size, 1):
                data += chunk
            stored = torch.frombuffer(data, dtype=FLOATS[entry.dtype])
            self._waiting[entry.name] = (target, sink.tell(), place.dtype, stored)
            write_all(sink, bytes(place.size))  # holds the place until W·β is known
        elif edit is not None or place.dtype != entry.dtype:
            product = Product(entry, place.dtype, edit)
            for chunk in reader.pieces(entry.size, product.row_bytes):
                write_all(sink, product(chunk))
            product.check()
            if isinstance(edit, Scale) and edit.bias is not None:
                self._moved[edit.bias] = product.moved()
        else:
            for chunk in reader.pieces(entry.size, 1):
                write_all(sink, chunk)

    def _add(
        self, source: io.RawIOBase, sink: io.RawIOBase, shard: Shard, one: Added, place: Entry
    ) -> None:
        old = next(entry for entry in shard.entries if entry.name == one.source)
        source.seek(shard.data_start + old.start)
        product = Product(old, place.dtype, one.scale)
        for chunk in HashedReader(source, None).pieces(old.size, product.row_bytes):
            write_all(sink, product(chunk))
        product.check()


class Product:
    """The product of one tensor, fed in file order in pieces of ``row_bytes`` times n.

    A weight (..., K, inner...) is a list of rows: of K values that meet the gain one by one when
    K is the last axis, else of ``inner`` values that share one entry of the gain.
    """

    def __init__(self, entry: Entry, dtype: str, scale: Scale | None) -> None:
        self._name = entry.name
        self._in, self._out = FLOATS[entry.dtype], FLOATS[dtype]
        self._wide = torch.promote_types(self._in, torch.float32)
        self._gain = self._beta = None
        self._along_row, self._row = True, 1
        self._direct = False
        if scale is not None:
            self._gain = scale.gain.to(self._wide)
            self._beta = None if scale.beta is None else scale.beta.double()
            inner = math.prod(entry.shape[scale.axis % len(entry.shape) + 1 :])
            self._along_row = inner == 1
            self._row = len(self._gain) if self._along_row else inner
            # torch multiplies bfloat16 by bfloat16 in float32 and rounds once: where the gain is
            # exact in the weight's dtype, that is the product itself, at a third of the time.
            narrow = self._gain.to(self._in)
            self._direct = (
                self._in == self._out != torch.float16
                and self._beta is None
                and torch.equal(narrow.to(self._wide), self._gain)
            )
            if self._direct:
                self._gain = narrow
        self.row_bytes = self._row * self._in.itemsize
        self._seen = 0  # rows so far
        self._missed = self._total = 0.0
        self._moved: list[Tensor] = []
        self._scratch = self._result = torch.empty(0)

    def __call__(self, chunk: memoryview) -> memoryview:
        """The bytes of the product; valid until the next call. Raises ValueError (float16)."""
        x = torch.frombuffer(chunk, dtype=self._in).view(-1, self._row)
        step = max(1, _PIECE // self._row)
        if self._result.numel() < x.numel():
            self._result = torch.empty(x.numel(), dtype=self._out)
        result = self._result[: x.numel()].view(-1, self._row)
        if self._direct:
            return to_bytes(torch.mul(x, self._factor(len(x)), out=result))
        if not self._scratch.numel():
            self._scratch = torch.empty(step, self._row, dtype=self._wide)
        for start in range(0, len(x), step):
            part = x[start : start + step]
            wide = self._scratch[: len(part)]
            wide.copy_(part)
            self._multiply(wide)
            rounded = result[start : start + step]
            rounded.copy_(wide)
            if self._out == torch.float16:
                self._judge(wide, rounded)
        return to_bytes(result)

    def moved(self) -> Tensor:
        """W·β (N,) in float64, when all has gone by."""
        return torch.cat(self._moved) if self._along_row else torch.stack(self._moved).sum(0)

    def _multiply(self, wide: Tensor) -> None:
        if self._gain is None:
            return
        if self._beta is not None:
            if self._along_row:
                self._moved.append(wide.double() @ self._beta)
            else:
                self._moved.append(self._beta[self._index(len(wide))] @ wide.double())
        wide.mul_(self._factor(len(wide)))

    def _factor(self, rows: int) -> Tensor:
        """What the next ``rows`` rows are multiplied with; counts them."""
        factor = self._gain if self._along_row else self._gain[self._index(rows), None]
        self._seen += rows
        return factor

    def _index(self, rows: int) -> Tensor:
        return torch.arange(self._seen, self._seen + rows) % len(self._gain)

    def _judge(self, wide: Tensor, rounded: Tensor) -> None:
        off = rounded.to(self._wide).sub_(wide)
        self._missed += float(torch.linalg.vector_norm(off, dtype=torch.float64)) ** 2
        self._total += float(torch.linalg.vector_norm(wide, dtype=torch.float64)) ** 2

    def check(self) -> None:
        """Raise ValueError when float16 could not hold the product (overflow, subnormals)."""
        error = (self._missed / self._total) ** 0.5 if self._total else 0.0
        if not error <= _HALF_ERROR:
            raise ValueError(
                f"float16 cannot hold {self._name} once its norm's gain is folded in (relative "
                f"error {error:.1e}): fold to another dtype, --dtype bfloat16 or float32"
            )


def copy_hashed(path: Path, target: Path, advance: Callable[[int], object], name: str) -> str:
    """Copy a file, a piece at a time; its hash, of the algorithm ``name``."""
    digest, buffer = new_digest(name), memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as source, target.open("wb", buffering=0) as sink:
        while count := source.readinto(buffer):
            digest.update(buffer[:count])
            write_all(sink, buffer[:count])
            advance(count)
    return digest.hexdigest()


def reserve(sink: io.RawIOBase, size: int) -> None:
    """Have the disk set aside all of a file's blocks at once; raises OSError when it is full.

    A file system that cannot is left to find them block by block.
    """
    if size and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(sink.fileno(), 0, size)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise


def write_all(sink: io.RawIOBase, data: memoryview | bytes) -> None:
    """Write all of ``data`` to an unbuffered file; raises OSError when the disk is full."""
    view = memoryview(data)
    while view.nbytes:
        view = view[sink.write(view[:_WRITE]) :]
