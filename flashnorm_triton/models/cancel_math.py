"""Norms of heads inside a packed projection, as torch operations: the formula of cancelled sites.

One row z (N,) of a packed projection holds the heads of several linears. Each head that a later
norm reads is normalised here; the eps of that norm may be given a factor for every row, which is
what makes dropping the norm before the projection exact (FlashNorm, arXiv 2407.09577, section 3):
with z = x W*ᵀ unscaled and t = mean(x^2) + eps1 the head's norm needs eps2·t.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Head:
    """``width`` columns of every head of a linear, and the indices of the norms that read them."""

    width: int
    norms: tuple[int, ...]


@dataclass(frozen=True)
class Heads:
    """One linear's columns from ``start`` on: ``count`` times the same ``parts``."""

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


def normalise_heads(
    z: Tensor,
    heads: tuple[Heads, ...],
    gains: tuple[Tensor | None, ...],
    eps: tuple[float, ...],
    eps_factor: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """Normalise the heads of a packed projection z (..., N), in float32, rounded once.

    Args:
        z: bfloat16, float16, float32 or float64 (computed in float64).
        heads: where the heads are, in the order of the columns, none left out.
        gains: by norm index the factor (width,), or None.
        eps: by norm index.
        eps_factor: (..., 1), multiplies every eps row by row; None leaves eps as it is.
        scale: (..., 1), multiplies what no norm reads; None leaves that as it is.

    Returns:
        (..., N'), z's dtype. N' is N, and more where two norms read one linear: its columns then
        come twice, all heads for the first norm and then all for the second.
    """
    pieces = []
    for group in heads:
        block = z.narrow(-1, group.start, group.columns).unflatten(-1, (group.count, -1))
        results: list[list[Tensor]] = [[]]
        for part, piece in zip(
            group.parts, block.split([part.width for part in group.parts], -1), strict=True
        ):
            if not part.norms:
                scaled = piece if scale is None else _times(piece, scale.unsqueeze(-1))
                results[0].append(scaled)
                continue
            wide = piece.to(torch.promote_types(piece.dtype, torch.float32))
            square = wide.square().mean(-1, keepdim=True)
            for place, norm in enumerate(part.norms):
                extra = eps[norm] if eps_factor is None else eps[norm] * eps_factor.unsqueeze(-1)
                unit = wide * torch.rsqrt(square + extra)
                gain = gains[norm]
                if gain is not None:
                    unit = unit * gain
                if place == len(results):
                    results.append([])
                results[place].append(unit.to(z.dtype))
        for parts in results:
            joined = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
            pieces.append(joined.flatten(-2))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)


def _times(piece: Tensor, scale: Tensor) -> Tensor:
    return (piece.to(scale.dtype) * scale).to(piece.dtype)
