"""A stored weight times its norm's gain, piece by piece: a wide product, one rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flashnorm_triton.checkpoints.safefile import FLOATS, Entry, to_bytes

# Elements multiplied at a time where a float32 copy is needed, which then stays in the cache.
_PIECE = 1 << 15
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


class Scratch:
    """A thread's own memory, used again for piece after piece."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, use: str, count: int, dtype: torch.dtype) -> Tensor:
        """``count`` elements that hold nothing of worth; the same memory for the same ``use``."""
        held = self._held.get((use, dtype))
        if held is None or held.numel() < count:
            held = self._held[use, dtype] = torch.empty(count, dtype=dtype)
        return held[:count]


class Product:
    """The product of one tensor, in pieces of whole rows, in any order and by several threads.

    A weight (..., K, inner...) is a list of rows of ``row_bytes``: of K values that meet the gain
    one by one when K is the last axis, else of ``inner`` values that share one entry of the gain.
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
        self.new_row_bytes = self._row * self._out.itemsize
        # By the first row of each part, so that sums do not depend on who came first.
        self._moved: dict[int, Tensor] = {}
        self._off: dict[int, tuple[float, float]] = {}

    def piece(self, chunk: memoryview, row: int, scratch: Scratch) -> memoryview:
        """The bytes of the product of the rows from ``row`` on; valid until ``scratch`` is used
        again."""
        x = torch.frombuffer(chunk, dtype=self._in).view(-1, self._row)
        result = scratch.take("result", x.numel(), self._out).view(-1, self._row)
        if self._direct:
            return to_bytes(torch.mul(x, self._factor(row, len(x)), out=result))
        step = max(1, _PIECE // self._row)
        for start in range(0, len(x), step):
            part, rounded = x[start : start + step], result[start : start + step]
            wide = scratch.take("wide", part.numel(), self._wide).view(-1, self._row)
            wide.copy_(part)
            self._multiply(wide, row + start)
            rounded.copy_(wide)
            if self._out == torch.float16:
                self._judge(wide, rounded, row + start)
        return to_bytes(result)

    def moved(self) -> Tensor:
        """W·β (N,) in float64, when all has gone by."""
        parts = [self._moved[row] for row in sorted(self._moved)]
        return torch.cat(parts) if self._along_row else torch.stack(parts).sum(0)

    def check(self) -> None:
        """Raise ValueError when float16 could not hold the product (overflow, subnormals)."""
        missed = sum(one for one, _ in self._off.values())
        total = sum(one for _, one in self._off.values())
        error = (missed / total) ** 0.5 if total else 0.0
        if not error <= _HALF_ERROR:
            raise ValueError(
                f"float16 cannot hold {self._name} once its norm's gain is folded in (relative "
                f"error {error:.1e}): fold to another dtype, --dtype bfloat16 or float32"
            )

    def _multiply(self, wide: Tensor, row: int) -> None:
        if self._gain is None:
            return
        if self._beta is not None:
            if self._along_row:
                self._moved[row] = wide.double() @ self._beta
            else:
                self._moved[row] = self._beta[self._index(row, len(wide))] @ wide.double()
        wide.mul_(self._factor(row, len(wide)))

    def _factor(self, row: int, count: int) -> Tensor:
        return self._gain if self._along_row else self._gain[self._index(row, count), None]

    def _index(self, row: int, count: int) -> Tensor:
        return torch.arange(row, row + count) % len(self._gain)

    def _judge(self, wide: Tensor, rounded: Tensor, row: int) -> None:
        off = rounded.to(self._wide).sub_(wide)
        missed, total = (
            float(torch.linalg.vector_norm(one, dtype=torch.float64)) ** 2 for one in (off, wide)
        )
        self._off[row] = (missed, total)
