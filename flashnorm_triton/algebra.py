"""The algebra of FlashNorm as plain functions on tensors: no model, no kernel.

Source: FlashNorm (arXiv 2407.09577). Proposition 1: with x of length K, gain g and a linear map
W (N, K), ``(x·s∘g) Wᵀ = (x·s) W*ᵀ`` where ``W* = W·diag(g)`` and ``s = 1/sqrt(mean(x²) + eps)``.
So the gain of a normalisation can live in the weight that follows it. A LayerNorm's mean and bias
can go there too: the weight is centred and the bias becomes part of the linear's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CONVENTIONS = ("w", "1+w", "none")

# Elements multiplied at a time, so that the wide product of a large weight never exists whole.
_FOLD_CHUNK = 1 << 22


def effective_gain(weight: Tensor | None, convention: str) -> Tensor | None:
    """The factor g (K,) that multiplies the normalised row, in at least float32.

    ``convention`` says how the norm's class uses its parameter: ``"w"`` (g = w), ``"1+w"``
    (g = 1 + w, the Gemma form) or ``"none"`` (no gain: returns None). ``weight`` is (K,), any
    floating dtype; the result is float32, or float64 for a float64 weight.

    Raises ValueError for an unknown convention, or for a convention that needs a weight and has
    none.
    """
    if convention not in CONVENTIONS:
        raise ValueError(f"unknown gain convention {convention!r}: use one of {CONVENTIONS}")
    if convention == "none":
        return None
    if weight is None:
        raise ValueError(f"gain convention {convention!r} needs the norm's weight, which is None")
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return wide + 1.0 if convention == "1+w" else wide


def fold(
    weight: Tensor, gain: Tensor | None, out: Tensor | None = None, *, centre: bool = False
) -> Tensor:
    """``W* = W·diag(g)`` (FlashNorm, proposition 1): the product in float32, one rounding.

    ``weight`` is (N, K), ``gain`` (K,) as :func:`effective_gain` returns it, or None for a copy.
    ``centre`` takes each row's mean off, ``W** = W* - rowmean(W*)·1ᵀ`` (the paper's treatment of
    LayerNorm): the mean of x then falls out of the product by itself, whatever its size.
    The result has the weight's dtype; it is written to ``out`` (N, K) when that is given.

    Raises ValueError when the gain's length is not K.
    """
    folded = torch.empty_like(weight) if out is None else out
    if gain is None and not centre:
        return folded.copy_(weight)
    for rows, exact in _exact_parts(weight, gain, centre):
        folded[rows].copy_(exact)
    return folded


def fold_error(
    weight: Tensor, gain: Tensor | None, folded: Tensor, *, centre: bool = False
) -> float:
    """Relative Frobenius distance of ``folded`` from the unrounded fold.

    About 0.3 units in the last place for a healthy fold; far larger, infinite or NaN when the
    product leaves the range of the weight's dtype (float16 overflows and goes subnormal).
    Arguments as of :func:`fold`; computed in float32 chunks, in float64 sums.
    """
    missed = total = 0.0
    for rows, exact in _exact_parts(weight, gain, centre):
        off = folded[rows].to(exact.dtype) - exact
        missed += float(torch.linalg.vector_norm(off, dtype=torch.float64)) ** 2
        total += float(torch.linalg.vector_norm(exact, dtype=torch.float64)) ** 2
    return (missed / total) ** 0.5 if total else missed**0.5


def move_bias(weight: Tensor, shift: Tensor, bias: Tensor | None = None) -> Tensor:
    """``c* = c + β·Wᵀ`` (N,): a norm's bias β moved past the linear W with bias c, in float32.

    ``weight`` is (N, K) before any fold (β is added after the gain), ``shift`` β (K,), ``bias``
    c (N,) or None. float64 for a float64 weight.

    Raises ValueError when the shift's length is not K.
    """
    if shift.shape != weight.shape[-1:]:
        raise ValueError(
            f"a norm bias of shape {tuple(shift.shape)} does not fit a weight of shape "
            f"{tuple(weight.shape)}: it must have one entry per input column"
        )
    moved = _row_sums(weight, shift)
    return moved if bias is None else moved.add_(bias.to(moved))


def row_sums(weight: Tensor, gain: Tensor | None = None) -> Tensor:
    """``sum over k of g[k]·W[n, k]`` (N,) of the weight as stored: what LayerNorm needs.

    ``s·(x·Wᵀ - mean(x)·row_sums)`` is exact for a rounded weight, centred or not. ``gain`` is the
    factor that is applied in the kernel, None for a folded one. float32; float64 for float64.
    """
    return _row_sums(weight, gain)


def _row_sums(weight: Tensor, factor: Tensor | None) -> Tensor:
    wide = torch.promote_types(weight.dtype, torch.float32)
    sums = torch.empty(weight.shape[0], dtype=wide, device=weight.device)
    for rows, exact in _exact_parts(weight, factor, centre=False):
        sums[rows] = exact.sum(-1, dtype=torch.float64)
    return sums


def _exact_parts(
    weight: Tensor, factor: Tensor | None, centre: bool
) -> Iterator[tuple[slice, Tensor]]:
    """``W·diag(factor)``, centred or not, in at least float32, some rows at a time.

    A part is at most a 32nd of the weight (but one row at least): beside a bfloat16 weight and its
    fold, the float32 product is then no more than a sixteenth.
    """
    if factor is not None and factor.shape != weight.shape[-1:]:
        raise ValueError(
            f"gain of shape {tuple(factor.shape)} does not fit a weight of shape "
            f"{tuple(weight.shape)}: it must have one entry per input column"
        )
    wide = torch.promote_types(weight.dtype, torch.float32)
    if factor is not None:
        wide = torch.promote_types(wide, factor.dtype)
        factor = factor.to(device=weight.device, dtype=wide)
    most = min(_FOLD_CHUNK, weight.numel() // 32)
    step = max(1, most // max(1, weight.shape[-1]))
    for start in range(0, weight.shape[0], step):
        part = weight[start : start + step]
        if factor is not None:
            exact = part.to(wide).mul_(factor) if part.dtype != wide else part * factor
        else:
            exact = part.to(wide, copy=centre)
        if centre:
            exact = exact.sub_(exact.mean(-1, keepdim=True))
        yield slice(start, start + step), exact
