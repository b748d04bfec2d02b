"""The numerics contract on one cell: error against float64, ours beside the stock module's.

Contract: relative Frobenius error and maximum error of the operation are at most 1.25 times those
of the stock module (norm, then linear) against the same float64 reference, on plain rows, on rows
with an outlier channel each (×1e3), and on rows scaled by 1e-4…1e4 (with a zero row among them).

A maximum is a noisy figure, so it is taken where it is least noisy: each row's largest error over
that row's largest reference value, over all kinds of input together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

LIMIT = 1.25
KINDS = ("plain", "outlier", "scaled")
# A few rows are too few to estimate an error from: one lucky rounding in the stock norm moves it
# by half. So a cell of M rows is called often enough to see this many. For the same reason each
# row draws its own outlier channel: an outlier's normalised value is always ±sqrt(K), so with one
# channel for all rows the stock error would be the rounding of one number, sqrt(K)·gain.
LEAST_ROWS = 128
# With one draw, a perfectly rounded operation passes 1.25 times the stock maximum about once in
# a hundred checks. Further draws are pooled with the first: chance fades, a defect stays.
MOST_DRAWS = 4


@dataclass
class Errors:
    """Pooled errors of one implementation: squares of error and reference by kind; the maximum."""

    off: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    of: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    top: float = 0.0

    def add(self, kind: str, got: Tensor, wanted: Tensor) -> None:
        off = got.double() - wanted
        self.off[kind] += float(off.square().sum())
        self.of[kind] += float(wanted.square().sum())
        worst, scale = off.abs().amax(1), wanted.abs().amax(1)
        # A zero row has no scale of its own: any error there is infinitely bad.
        relative = torch.where(scale > 0, worst / scale, torch.where(worst > 0, math.inf, 0.0))
        top = float(relative.max())
        self.top = math.nan if math.isnan(top) or math.isnan(self.top) else max(self.top, top)

    def rel(self, kind: str) -> float:
        return math.sqrt(self.off[kind] / self.of[kind])


@dataclass(frozen=True)
class Verdict:
    """What one cell's check found.

    ``rel_err`` is the relative Frobenius error on the kind of input whose ratio to stock is
    worst; ``max_err`` the largest row-relative error over all kinds.
    """

    rel_err: float
    rel_err_stock: float
    max_err: float
    max_err_stock: float
    finite: bool
    poisoned_calls: int
    calls: int

    @property
    def ratio(self) -> float:
        return over(self.rel_err, self.rel_err_stock)

    @property
    def max_ratio(self) -> float:
        return over(self.max_err, self.max_err_stock)

    @property
    def ok(self) -> bool:
        return self.finite and self.ratio <= LIMIT and self.max_ratio <= LIMIT

    def fields(self) -> dict[str, Any]:
        """The record's fields; a value that is not finite is written as null."""
        values = {
            "rel_err": self.rel_err,
            "rel_err_stock": self.rel_err_stock,
            "max_err": self.max_err,
            "max_err_stock": self.max_err_stock,
            "err_ratio": self.ratio,
            "max_err_ratio": self.max_ratio,
        }
        fields: dict[str, Any] = {
            name: value if math.isfinite(value) else None for name, value in values.items()
        }
        return {
            **fields,
            "finite": self.finite,
            "poisoned_calls": [self.poisoned_calls, self.calls],
            "contract_ok": self.ok,
        }


def over(ours: float, stock: float) -> float:
    """ours / stock, where NaN counts as infinitely bad and 0 / 0 as equal."""
    if math.isnan(ours):
        return math.inf
    if stock == 0:
        return 1.0 if ours == 0 else math.inf
    return ours / stock


def make_rows(kind: str, rows: int, k: int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Random inputs (rows, k) of one kind (see ``KINDS``), drawn from torch's generator."""
    x = torch.randn(rows, k, device=device)
    if kind == "outlier":
        channel = torch.randint(k, (rows, 1), device=device)
        x.scatter_(1, channel, 1e3 * x.gather(1, channel))
    elif kind == "scaled":
        x *= 10 ** (torch.rand(rows, 1, device=device) * 8 - 4)
        x[rows // 2] = 0
    elif kind != "plain":
        raise ValueError(f"unknown kind of input {kind!r}: use one of {', '.join(KINDS)}")
    return x.to(dtype)


def reference(x: Tensor, gain: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y (rows, N) in float64 from the stored x, gain (K,) and unfolded weight (N, K)."""
    wide = x.double()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * gain.double()) @ weight.double().T


def _poison(rows: int, n: int, like: Tensor) -> int:
    """Leave NaNs in the block that the next output of this size is likely to get; its address."""
    return torch.full((rows, n), math.nan, dtype=like.dtype, device=like.device).data_ptr()


def check(
    op: Callable[[Tensor], Tensor],
    stock: Callable[[Tensor], Tensor],
    *,
    gain: Tensor,
    weight64: Tensor,
    eps: float,
    m: int,
    dtype: torch.dtype,
) -> Verdict:
    """Run ``op`` and ``stock`` on fresh inputs, ``m`` rows a call, and compare with float64.

    ``gain`` (K,) and ``weight64`` (N, K), in float64, are the stock module's. The output block
    of each call of ``op`` is filled with NaN beforehand; the verdict counts the calls for which
    the allocator handed that block out, as it does on a GPU unless the operation first allocates
    something of the same size.
    """
    n, k = weight64.shape
    calls = max(1, math.ceil(LEAST_ROWS / m))
    ours, plain = Errors(), Errors()
    finite, poisoned, made = True, 0, 0
    for _ in range(MOST_DRAWS):
        for kind in KINDS:
            x = make_rows(kind, calls * m, k, device=weight64.device, dtype=dtype)
            outputs = []
            for part in x.split(m):
                address = _poison(m, n, part)
                outputs.append(op(part))
                poisoned += outputs[-1].data_ptr() == address
                made += 1
            got = torch.cat(outputs)
            finite &= bool(torch.isfinite(got).all())
            wanted = reference(x, gain, weight64, eps)
            ours.add(kind, got, wanted)
            plain.add(kind, torch.cat([stock(part) for part in x.split(m)]), wanted)
        worst = max(KINDS, key=lambda kind: over(ours.rel(kind), plain.rel(kind)))
        verdict = Verdict(
            rel_err=ours.rel(worst),
            rel_err_stock=plain.rel(worst),
            max_err=ours.top,
            max_err_stock=plain.top,
            finite=finite,
            poisoned_calls=poisoned,
            calls=made,
        )
        if verdict.ok or not finite:
            break
    return verdict
