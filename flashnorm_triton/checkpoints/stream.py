"""Rewriting shards: one pass over each, a few megabytes in memory, every byte hashed.

What is not changed is copied range by range. A weight meets its gain in a float32 product (float64
for float64) and one rounding. Biases that take W·β are written last, when all of their weights have
gone by, wherever those are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from flashnorm_triton.checkpoints.passing import Pass, Step, Team
from flashnorm_triton.checkpoints.product import Product, Scale
from flashnorm_triton.checkpoints.safefile import (
    FLOATS,
    Entry,
    Shard,
    make_header,
    read_tensor,
    to_bytes,
)


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
        self._digest, self._advance = digest, advance
        self._moving: dict[str, Product] = {}
        self._waiting: dict[str, tuple[Shard, Entry, Path, int, str]] = {}
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
        """Write the new form of every shard into ``folder``; their sources' hashes by file name.

        Raises ValueError when a product leaves the range of float16, or a source is changed while
        it is read; and what the first failure or interrupt raises, once all threads have stopped.
        """
        passes = {name: self._pass(shard, folder / name) for name, shard in shards.items()}
        return Team(self._digest, self._advance).run(passes)

    def finish(self) -> None:
        """Write the biases that W·β was added to: float64 sums, one rounding."""
        for name, (shard, entry, target, place, dtype) in self._waiting.items():
            moved = self._moving[name].moved()
            stored = read_tensor(shard, entry).reshape(-1).to(moved.dtype)
            values = (stored + moved).to(FLOATS[dtype])
            with target.open("r+b") as file:
                file.seek(place)
                file.write(to_bytes(values))

    def _pass(self, shard: Shard, target: Path) -> Pass:
        header, entries = self.layout(shard)
        new = {entry.name: entry for entry in entries}
        steps = [Step(0, len(shard.header))]
        for entry in shard.entries:
            place = new.get(entry.name)
            at = None if place is None else len(header) + place.start
            steps.append(self._step(shard, entry, place, at, target))
        for one in self._added:
            if one.name in new:
                old = next(entry for entry in shard.entries if entry.name == one.source)
                product = Product(old, new[one.name].dtype, one.scale)
                at = len(header) + new[one.name].start
                start = shard.data_start + old.start
                steps.append(Step(start, old.size, at, product, hashed=False))
        size = len(header) + (entries[-1].stop if entries else 0)
        return Pass(shard.path, target, header, size, steps)

    def _step(
        self, shard: Shard, entry: Entry, place: Entry | None, at: int | None, target: Path
    ) -> Step:
        start, edit = shard.data_start + entry.start, self._edits.get(entry.name)
        if place is None or at is None:
            return Step(start, entry.size)
        if isinstance(edit, Replace):
            content = to_bytes(edit.values.to(FLOATS[place.dtype]))
            return Step(start, entry.size, at, content=content)
        if entry.name in self._biases:  # written when W·β is known
            self._waiting[entry.name] = (shard, entry, target, at, place.dtype)
            return Step(start, entry.size)
        if edit is None and place.dtype == entry.dtype:
            return Step(start, entry.size, at)
        product = Product(entry, place.dtype, edit if isinstance(edit, Scale) else None)
        if isinstance(edit, Scale) and edit.bias is not None:
            self._moving[edit.bias] = product
        return Step(start, entry.size, at, product)
