"""What the tests measure with: a float64 reference, the stock modules, hard inputs, poison.

The contract: relative Frobenius error and maximum error against float64 are at most 1.25 times
those of the stock modules, with an allowance for the rounding that nothing can avoid. A cosine
would not see a scale error, so none is used.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LIMIT = 1.25
EPS = 1e-6


class Case(NamedTuple):
    """The arguments of ``norm_linear``, in its order: ``norm_linear(*case)``."""

    x: Tensor
    weight: Tensor
    eps: float = EPS
    bias: Tensor | None = None
    gain: Tensor | None = None


def hard_rows(
    m: int, k: int, dtype: torch.dtype, device: torch.device | str = "cpu", zero: bool = True
) -> Tensor:
    """x (m, k): rows scaled by 1e-4 to 1e4 in random order, most with an outlier channel (x 1e3).

    Every third row has no outlier, so that its smallest are ruled by eps. The middle row of more
    than two is zero. fp16 reaches 65504 only: what lies above 6e4 is cut off there.
    """
    exponents = torch.linspace(-4, 4, m)[torch.randperm(m)] if m > 1 else torch.rand(1) * 8 - 4
    x = torch.randn(m, k, device=device) * (10 ** exponents[:, None]).to(device)
    channels = torch.randint(k, (m, 1), device=device)
    outliers = torch.where(torch.arange(m, device=device) % 3 > 0, 1e3, 1.0)[:, None]
    x.scatter_(1, channels, x.gather(1, channels) * outliers)
    if zero and m > 2:
        x[m // 2] = 0
    if dtype == torch.float16:
        x.clamp_(-6e4, 6e4)
    return x.to(dtype)


def make_case(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    bias: bool = False,
    gain: bool = False,
    x: Tensor | None = None,
) -> Case:
    """Hard rows (or ``x``), weights of variance 1 / k, random bias, gains ±0.1 to ±3."""
    x = hard_rows(m, k, dtype, device) if x is None else x
    weight = (torch.randn(n, k, device=device) / math.sqrt(k)).to(dtype)
    gains = (0.1 + 2.9 * torch.rand(k)) * torch.where(torch.rand(k) < 0.5, -1.0, 1.0)
    return Case(
        x,
        weight,
        EPS,
        torch.randn(n).to(device, dtype) if bias else None,
        gains.to(device, dtype) if gain else None,
    )


def norm64(x: Tensor, eps: float, gain: Tensor | None = None) -> Tensor:
    """The norm in float64 from the values as stored."""
    wide = x.double()
    normed = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed if gain is None else normed * gain.double()


def reference(
    x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None, gain: Tensor | None = None
) -> Tensor:
    """norm_linear in float64 from the values as stored."""
    y = norm64(x, eps, gain) @ weight.double().T
    return y if bias is None else y + bias.double()


def stock_norm(x: Tensor, eps: float, gain: Tensor | None = None) -> Tensor:
    """transformers' LlamaRMSNorm: normalised in fp32, rounded to x's dtype, then the gain."""
    wide = x.to(torch.float32)
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return normed if gain is None else gain * normed


def stock(
    x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None, gain: Tensor | None = None
) -> Tensor:
    """The two stock modules, LlamaRMSNorm then nn.Linear, in x's dtype.

    An fp32 gain beside a narrower x widens the norm's output; it is rounded for the linear.
    """
    normed = stock_norm(x, eps, gain).to(weight.dtype)
    return torch.nn.functional.linear(normed, weight, bias)


def errors(y: Tensor, ref: Tensor) -> tuple[float, float]:
    """Relative Frobenius error and largest absolute error of y against ref (float64)."""
    off = y.double() - ref
    scale = float(ref.norm())
    relative = float(off.norm()) / scale if scale else float(off.norm())
    return relative, float(off.abs().max()) if off.numel() else 0.0


def unavoidable(case: Case, expected: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """The errors that no implementation can be blamed for, against ``expected`` in float64.

    A few values can flatter the stock modules, so the least to expect is what exact arithmetic
    gives that rounds to ``dtype`` once, at the end, or twice, after the norm too, as any unfused
    pair must. fp32 adds the rounding of K sums in any order, which grows like sqrt(K) and is as
    large as stock's own: neither of the two is then better, only luckier.
    """
    x, weight, eps, bias, gain = case
    normed = norm64(x, eps, gain).to(dtype).double()
    twice = normed @ weight.double().T
    twice = (twice if bias is None else twice + bias.double()).to(dtype)
    least = zip(errors(expected.to(dtype), expected), errors(twice, expected), strict=True)
    relative, most = (max(pair) for pair in least)
    if dtype == torch.float32 and expected.numel():
        walk = math.sqrt(x.shape[-1]) * 2.0**-24
        relative, most = max(relative, walk), max(most, walk * float(expected.abs().max()))
    return relative, most


def assert_contract(
    y: Tensor, case: Case, stock_y: Tensor | None = None, limit: float = LIMIT
) -> None:
    """y is norm_linear(*case), within the contract, contiguous, of the right shape and dtype."""
    expected = reference(*case)
    assert y.shape == expected.shape and y.is_contiguous()
    assert stock_y is not None or y.dtype == case.x.dtype
    assert torch.isfinite(y).all(), f"{int((~torch.isfinite(y)).sum())} values are not finite"
    if y.dtype == torch.float64:
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
        return
    ours = errors(y, expected)
    theirs = errors(stock(*case) if stock_y is None else stock_y, expected)
    floor = unavoidable(case, expected, y.dtype)
    for name, mine, other, least in zip(
        ("relative Frobenius", "maximum"), ours, theirs, floor, strict=True
    ):
        assert mine <= limit * max(other, least), (
            f"{name} error {mine:.3g} is over {limit} x stock's {other:.3g} (floor {least:.3g})"
        )


def assert_right(y: Tensor, case: Case) -> None:
    """The contract with twice stock's error: for a few rows, where stock may just be lucky."""
    assert_contract(y, case, limit=2.0)


def _nearness(outputs: Sequence[Tensor], exact: Sequence[Tensor]) -> tuple[float, float]:
    """The geometric mean of the rows' relative errors, and the sum of the draws'."""
    off = [ours.double() - right for ours, right in zip(outputs, exact, strict=True)]
    rows = [
        (wrong.norm(dim=-1) / right.norm(dim=-1)).flatten()
        for wrong, right in zip(off, exact, strict=True)
    ]
    whole = sum(float(wrong.norm() / right.norm()) for wrong, right in zip(off, exact, strict=True))
    return float(torch.cat(rows).clamp_min(2.0**-30).log().mean().exp()), whole


def assert_as_near(
    ours: Sequence[Tensor], stock: Sequence[Tensor], exact: Sequence[Tensor], floor: float
) -> None:
    """A model's float32 outputs (..., features) are as near to float64 as the stock model's.

    One sequence entry a draw of the inputs. ``floor`` is the rounding of one draw where stock's own
    error happens to be below it. Layers amplify roundings, in a few rows a hundred times as much as
    in others, and a norm over all rows is then the luck of those few: in float32 the typical row's
    error must be within 1.25 times stock's, and the norm, which sees every row, within twice.
    """
    row, whole = _nearness(ours, exact)
    stock_row, stock_whole = _nearness(stock, exact)
    assert row <= LIMIT * stock_row + floor, f"a row is off by {row:.3g}, stock's {stock_row:.3g}"
    assert whole <= 2.0 * stock_whole + floor * len(exact), (
        f"{len(exact)} draws are off by {whole:.3g}, stock's {stock_whole:.3g}"
    )


def in_parts(op: Callable[[Tensor], Tensor], x: Tensor, m: int) -> Tensor:
    """``op`` on m rows of x at a time: many rows to judge an error by, few rows a call."""
    return torch.cat([op(part) for part in x.split(m)])


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Every tensor that is allocated inside starts out as NaN, on any device.

    A value that a kernel forgets to write then shows, where memory fresh from the system is zero.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


LAYOUTS = ("contiguous", "padded", "offset", "transposed", "expanded", "batched")


def laid_out(x: Tensor, layout: str) -> Tensor:
    """x (m, k) with the same values (one row repeated if "expanded") and other strides.

    "padded": the row stride is k rounded up to 8 elements and 8 more. "offset": a misaligned base
    and an odd row stride. "transposed": k is the slow dimension. "expanded": row stride 0.
    "batched": (1, m, k), sliced from a longer batch.
    """
    m, k = x.shape
    if layout == "padded":
        padded = torch.full((m, -(-k // 8) * 8 + 8), math.nan, dtype=x.dtype, device=x.device)
        return padded[:, :k].copy_(x)
    if layout == "offset":
        stride = k + 3 + k % 2
        flat = torch.full((m * stride + 1,), math.nan, dtype=x.dtype, device=x.device)
        return flat[1:].view(m, stride)[:, :k].copy_(x)
    if layout == "transposed":
        return x.T.contiguous().T
    if layout == "expanded":
        return laid_out(x[:1], "padded").expand(m, k)  # its base is aligned
    if layout == "batched":
        longer = torch.full((3, m, k), math.nan, dtype=x.dtype, device=x.device)
        longer[1:2] = x
        return longer[1:2]
    return x
