"""The norms of heads inside a packed projection, all in one launch, and in plain torch.

One row z (N,) of a packed projection holds the heads of several linears. Each head that a norm
reads is normalised here. When z is the product of unnormalised rows, z = x W*ᵀ, the eps of a head's
norm must become eps2·(mean(x^2) + eps1), row by row, for the norm before the projection to be
dropped exactly, and columns that no norm reads need the scale 1/sqrt(mean(x^2) + eps1) itself
(FlashNorm, arXiv 2407.09577v5, section 3.3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashnorm_triton import fallback
from flashnorm_triton.dispatch import on_device
from flashnorm_triton.launch.common import Geometry
from flashnorm_triton.launch.heads import GAINS, WIDEST, Entry, HeadNorm
from flashnorm_triton.ops import plain_eager

_HALVES_AND_FLOAT = (torch.bfloat16, torch.float16, torch.float32)
_READY_MOST = 512


@dataclass(frozen=True)
class Head:
    """``width`` columns of every head of a linear, and the indices of the norms that read them."""

    width: int
    norms: tuple[int, ...] = ()


@dataclass(frozen=True)
class Heads:
    """One linear's columns from ``start`` on: ``count`` times the same ``parts``.

    Where two norms read the same columns, ``parts`` is that one part.
    """

    start: int
    count: int
    parts: tuple[Head, ...]

    @property
    def columns(self) -> int:
        """Columns in the packed projection."""
        return self.count * sum(part.width for part in self.parts)

    @property
    def columns_out(self) -> int:
        """Columns in the result: those that two norms read come once for each."""
        return self.count * sum(part.width * max(1, len(part.norms)) for part in self.parts)


class HeadNorms:
    """Normalises the heads of packed projections (..., N) that are laid out alike.

    Args:
        heads: where the heads are, in the order of the columns, none left out.
        eps: by norm index; positive.
        one_plus: by norm index, whether the gain is 1 + its weight.

    Calls are pure: what is kept between them are compiled kernels and the table of heads.
    """

    def __init__(
        self, heads: tuple[Heads, ...], eps: tuple[float, ...], one_plus: tuple[bool, ...]
    ) -> None:
        self.heads, self.eps, self.one_plus = heads, eps, one_plus
        self._ready: dict[tuple, Callable[..., Tensor]] = {}
        self._kernels: dict[tuple, HeadNorm] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.heads, self.eps, self.one_plus)

    def __call__(
        self,
        z: Tensor,
        gains: tuple[Tensor | None, ...],
        x: Tensor | None = None,
        x_eps: float = 0.0,
    ) -> Tensor:
        """The heads of z (..., N), normalised in float32 and rounded once.

        Args:
            z: bfloat16, float16, float32 or float64 (computed in float64).
            gains: by norm index its weight (width,), or None.
            x: (..., K), the rows that z is the unscaled product of; None for z that was scaled.
            x_eps: the eps of the norm that was dropped.

        Returns:
            (..., N') in z's dtype. N' is N, and more where two norms read one linear: its columns
            then come twice, all heads for the first norm and then all for the second.
        """
        # Interpreted kernels are for tests of the kernel itself: they take seconds.
        if fallback.has_kernels(z) and plain_eager(z, x, *gains):
            return self._launched(z, gains, x, x_eps)
        return self.in_torch(z, gains, x, x_eps)

    def in_torch(
        self,
        z: Tensor,
        gains: tuple[Tensor | None, ...],
        x: Tensor | None = None,
        x_eps: float = 0.0,
    ) -> Tensor:
        """As a call, in torch operations: differentiable, and what compilers fuse."""
        factor = scale = None
        if x is not None:
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            factor = (wide.square().mean(-1, keepdim=True) + x_eps).unsqueeze(-1)
            scale = torch.rsqrt(factor)
        pieces = []
        for group in self.heads:
            block = z.narrow(-1, group.start, group.columns).unflatten(-1, (group.count, -1))
            results: list[list[Tensor]] = [[]]
            for part, piece in zip(
                group.parts, block.split([part.width for part in group.parts], -1), strict=True
            ):
                if not part.norms:
                    scaled = piece if scale is None else (piece.to(scale.dtype) * scale).to(z.dtype)
                    results[0].append(scaled)
                for place, norm in enumerate(part.norms):
                    if place == len(results):
                        results.append([])
                    results[place].append(self._normed(piece, norm, gains[norm], factor))
            for parts in results:
                joined = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
                pieces.append(joined.flatten(-2))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)

    def _normed(
        self, piece: Tensor, norm: int, gain: Tensor | None, factor: Tensor | None
    ) -> Tensor:
        wide = piece.to(torch.promote_types(piece.dtype, torch.float32))
        eps = self.eps[norm] if factor is None else self.eps[norm] * factor
        unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        if gain is not None:
            unit = unit * (1.0 + gain.to(unit.dtype) if self.one_plus[norm] else gain)
        return unit.to(piece.dtype)

    def entries(self, gains: tuple[Tensor | None, ...]) -> Iterator[Entry]:
        """The kernel's table: one entry a head and norm. Gains are counted without the missing."""
        places = {norm: n for n, norm in enumerate(i for i, g in enumerate(gains) if g is not None)}
        target = 0
        for group in self.heads:
            width = group.columns // group.count
            for head in range(group.count):
                column = 0
                for part in group.parts:
                    here = head * width + column
                    plain = Entry(group.start + here, target + here, part.width)
                    if not part.norms:
                        yield plain
                    for place, norm in enumerate(part.norms):
                        yield plain._replace(
                            target=target + place * group.columns + here,
                            gain=places.get(norm, -1),
                            eps=self.eps[norm],
                            normed=True,
                            one_plus=self.one_plus[norm] and norm in places,
                        )
                    column += part.width
            target += group.columns_out

    def _launched(
        self, z: Tensor, gains: tuple[Tensor | None, ...], x: Tensor | None, x_eps: float
    ) -> Tensor:
        """The kernel's result; torch's where the kernel does not serve a call, or fails."""
        key = (
            z.shape,
            z.dtype,
            z.get_device(),
            z.data_ptr() & 15,
            z.is_contiguous(),
            x_eps,
            None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() & 15),
            *(None if g is None else (g.dtype, g.stride(), g.data_ptr() & 15) for g in gains),
        )
        run = self._ready.get(key)
        if run is not None:
            return run(z, x, gains)

        def in_torch(z: Tensor, x: Tensor | None, gains: tuple[Tensor | None, ...]) -> Tensor:
            return self.in_torch(z, gains, x, x_eps)

        def prepare() -> Callable[..., Tensor]:
            if reason := fallback.unavailable(z):
                fallback.warn_once(reason, f"running plain torch: {reason}", stacklevel=5)
                return in_torch
            return self._prepare(z, gains, x, x_eps) or in_torch

        y, run = fallback.first_call("the kernel of head norms", prepare, in_torch, z, x, gains)
        if len(self._ready) >= _READY_MOST:
            self._ready.clear()
        self._ready[key] = run
        return y

    def _prepare(
        self, z: Tensor, gains: tuple[Tensor | None, ...], x: Tensor | None, x_eps: float
    ) -> Callable[..., Tensor] | None:
        """What runs calls like this one with the kernel; None for what it does not serve."""
        given = [gain for gain in gains if gain is not None]
        tensors = [z, *given] if x is None else [z, x, *given]
        entries = list(self.entries(gains))
        widest = max((entry.width for entry in entries if entry.normed), default=1)
        fits = len(given) <= GAINS and widest <= WIDEST and z.numel() > 0
        if not fits or any(t.dtype not in _HALVES_AND_FLOAT for t in tensors):
            return None
        if not z.is_contiguous() or any(gain.stride(-1) != 1 for gain in given):
            return None
        k, stride = None, 0
        if x is not None:
            rows = x.reshape(-1, x.shape[-1])
            if rows.data_ptr() != x.data_ptr() or rows.stride(-1) != 1:
                return None
            k, stride = rows.shape[1], rows.stride(0)
        # What the compiled code takes for granted, whatever the number of rows.
        kept = (
            z.get_device(),
            k,
            (stride % 16 == 0, stride == 1, stride >= 1 << 31),
            *((t.dtype, t.data_ptr() % 16 == 0) for t in tensors),
            *(gain is not None for gain in gains),
        )
        if kept not in self._kernels:
            n_out = sum(group.columns_out for group in self.heads)
            self._kernels[kept] = HeadNorm(entries, z.shape[-1], n_out, k, len(given), z.device)
        kernel = self._kernels[kept]
        m = z.numel() // z.shape[-1]
        run = kernel.bind(Geometry(m, stride, z.shape[:-1], z.get_device()), float(x_eps))
        places = [i for i, gain in enumerate(gains) if gain is not None]

        def launch(z: Tensor, x: Tensor | None, gains: tuple[Tensor | None, ...]) -> Tensor:
            taken = tuple(gains[i] for i in places)
            return run(z, x, taken + (None,) * (GAINS - len(taken)))

        return on_device(launch, z)
