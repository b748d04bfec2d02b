"""The algebra of FlashNorm as plain functions on tensors: no model, no kernel.

Source: FlashNorm (arXiv 2407.09577). Proposition 1: with x of length K, gain g and a linear map
W (N, K), ``(x·s∘g) Wᵀ = (x·s) W*ᵀ`` where ``W* = W·diag(g)`` and ``s = 1/sqrt(mean(x²) + eps)``.
So the gain of a normalisation can live in the weight that follows it.
"""

from __future__ import annotations

import torch
from torch import Tensor

CONVENTIONS = ("w", "1+w", "none")

# Elements multiplied at a time, so that the wide product of a large weight never exists whole.
_FOLD_CHUNK = 1 << 24


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


def fold(weight: Tensor, gain: Tensor | None, out: Tensor | None = None) -> Tensor:
    """``W* = W·diag(g)`` (FlashNorm, proposition 1): the product in float32, one rounding.

    ``weight`` is (N, K), ``gain`` (K,) as :func:`effective_gain` returns it, or None for a copy.
    The result has the weight's dtype; it is written to ``out`` (N, K) when that is given.

    Raises ValueError when the gain's length is not K.
    """
    folded = torch.empty_like(weight) if out is None else out
    if gain is None:
        return folded.copy_(weight)
    if gain.shape != weight.shape[-1:]:
        raise ValueError(
            f"gain of shape {tuple(gain.shape)} does not fit a weight of shape "
            f"{tuple(weight.shape)}: it must have one entry per input column"
        )
    rows = max(1, _FOLD_CHUNK // max(1, weight.shape[-1]))
    wide = torch.promote_types(torch.promote_types(weight.dtype, gain.dtype), torch.float32)
    gain = gain.to(device=weight.device, dtype=wide)
    for start in range(0, weight.shape[0], rows):
        part = weight[start : start + rows]
        folded[start : start + rows].copy_(
            part.to(wide).mul_(gain) if part.dtype != wide else part * gain
        )
    return folded


def fold_error(weight: Tensor, gain: Tensor, folded: Tensor) -> float:
    """Relative Frobenius distance of ``folded`` from the unrounded ``W·diag(g)``.

    About 0.3 units in the last place for a healthy fold; far larger, infinite or NaN when the
    product leaves the range of the weight's dtype (float16 overflows and goes subnormal).
    Shapes as in :func:`fold`; computed in float32 chunks, in float64 sums.
    """
    rows = max(1, _FOLD_CHUNK // max(1, weight.shape[-1]))
    gain = gain.to(device=weight.device)
    missed = total = 0.0
    for start in range(0, weight.shape[0], rows):
        exact = weight[start : start + rows].to(gain.dtype) * gain
        off = folded[start : start + rows].to(gain.dtype) - exact
        missed += float(torch.linalg.vector_norm(off, dtype=torch.float64)) ** 2
        total += float(torch.linalg.vector_norm(exact, dtype=torch.float64)) ** 2
    return (missed / total) ** 0.5 if total else missed**0.5
