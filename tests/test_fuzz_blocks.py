"""Random calls of the head norms and of the decode block's operations, judged in float64.

Profiles and sizes are those of test_fuzz.py.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from conftest import HAS_GPU
from fake_gpu import AMPERE, gpu
from fuzzing import EPS, rounding_of, rows_of, strided
from hypothesis import given
from hypothesis import strategies as st
from test_fuzz import DEVICE, DTYPES, PLANS, SIZES, profile, serves, strict
from torch import Tensor

from flashnorm_triton import block_ops, dispatch
from flashnorm_triton.heads import Head, HeadNorms, Heads

pytest.importorskip("triton")
WIDTHS = st.sampled_from((2, 8, 16, 64)) if HAS_GPU else st.integers(1, 12).map(lambda i: 2 * i)
TOKENS = st.integers(0, 5)


def on_a_gpu() -> Any:
    return nullcontext() if HAS_GPU else gpu(AMPERE)


class Drawn(NamedTuple):
    """Where a test's tensors come from: numbers of a seed in a dtype, laid out by hypothesis."""

    draw: Any
    dtype: torch.dtype
    generator: torch.Generator

    def new(self, *shape: int, strange: bool = True, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(*shape, generator=self.generator).to(DEVICE, dtype or self.dtype)
        if not strange or not self.draw(st.booleans()):
            return values
        return self.draw(strided(len(shape), repeats=False)).lay(values)

    def rows(self, *shape: int) -> Tensor:
        """Rows (..., K) of all kinds, NaN and inf among them."""
        kinds, values = rows_of(self.draw, shape, self.dtype, self.generator)
        values = values.to(DEVICE)
        if not self.draw(st.booleans()):
            return values
        return self.draw(strided(len(shape), repeats=False)).lay(values)


@st.composite
def drawn(draw: Any) -> Drawn:
    seed = draw(st.integers(0, 2**31))
    return Drawn(draw, draw(st.sampled_from(DTYPES)), torch.Generator().manual_seed(seed))


def close(
    y: Tensor, ref: Tensor, off: Tensor | float, shape: tuple[int, ...] | None = None
) -> None:
    """y is ``ref`` within its dtype's rounding and ``off``, NaN where ref is."""
    assert y.shape == (shape or ref.shape)
    u, least, top = rounding_of(y.dtype)
    allowed = 1.02 * (u * ref.abs() + off + least)
    known = ref.abs() + allowed < top
    assert not (y.isnan() & known).any(), "NaN where a number is wanted"
    assert y[ref.isnan()].isnan().all(), "a number where NaN is wanted"
    wrong = known & ~((y.double() - ref).abs() <= allowed)
    assert not wrong.any(), f"{int(wrong.sum())} wrong: {y[wrong][:3]}, wanted {ref[wrong][:3]}"


def unit(x: Tensor, eps: Any) -> Tensor:
    """x / rms(x) in float64; where float32's squares overflow, its scale is 0."""
    s = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps)
    overflow = x.float().square().mean(-1, keepdim=True).isinf()
    return x.double() * torch.where(overflow, 0.0, s)


def subnormal(x: Tensor, eps: float) -> Tensor:
    """What counting subnormal numbers as zero, or reading them wrongly, may change of a unit."""
    return 2.0**-126 * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps)


@profile(40)
@given(drawn(), SIZES.rows, SIZES.n, SIZES.k, st.sampled_from((1.0, 0.22)), st.data())
def test_linear(source: Drawn, m: int, n: int, k: int, scale: float, data: Any) -> None:
    x, weight = source.new(m, k), source.new(n, k, strange=False) / math.sqrt(k)
    bias = source.new(n) if data.draw(st.booleans()) else None
    residual = source.new(m, n) if data.draw(st.booleans()) else None
    more = dispatch.Epilogue(residual=residual, normed=False, scale=scale)
    problem = dispatch.Call(x, weight, 0.0, bias, None, more).problem(dispatch._matrix(x))
    able = [plan for plan in PLANS if m and n and serves(plan, problem)]
    plan = data.draw(st.sampled_from([None, *able]))
    with on_a_gpu(), strict():
        y = block_ops.linear(x, weight, bias, residual=residual, scale=scale, plan=plan)
    assert y.is_contiguous() and y.dtype == x.dtype
    z = x.double() @ weight.double().T
    z = z if bias is None else z + bias.double()
    ref = z * scale if residual is None else z * scale + residual.double()
    size = x.double().abs() @ weight.double().abs().T
    # The library's product is rounded once more where something follows it.
    again = 2 if plan is None or plan.form == "library" else 0
    off = scale * (rounding_of(x.dtype)[0] * z.abs() * again + 4 * (k + 16) * 2.0**-24 * size)
    close(y, ref, off + rounding_of(x.dtype)[1])


@profile(40)
@given(drawn(), SIZES.rows, SIZES.k, st.sampled_from(EPS), st.data())
def test_add_rms_norm(source: Drawn, m: int, k: int, eps: float, data: Any) -> None:
    x, residual = source.rows(2, m, k), source.new(2, m, k)
    gain = source.new(k) if data.draw(st.booleans()) else None
    with on_a_gpu(), strict():
        y = block_ops.add_rms_norm(x, residual, eps, gain)
    assert y.is_contiguous() and y.dtype == x.dtype
    normed = unit(x, eps) * (1.0 if gain is None else gain.double())
    gains = 1.0 if gain is None else gain.double().abs()
    close(y, normed + residual.double(), 2.0**-18 * normed.abs() + subnormal(x, eps) * gains)


@profile(40)
@given(drawn(), st.integers(1, 2), TOKENS, st.integers(1, 4), st.integers(1, 2), WIDTHS, st.data())
def test_rotary_heads(
    source: Drawn, batch: int, tokens: int, q: int, kv: int, width: int, data: Any
) -> None:
    flag = st.booleans()
    eps = data.draw(st.sampled_from((None, 1e-6, 1e-2)))
    one_plus, interleaved, cached = data.draw(flag), data.draw(flag), data.draw(flag)
    turned = 2 * data.draw(st.integers(0, width // 2))
    qkv = source.rows(batch, tokens, q + 2 * kv, width).flatten(2)
    more: dict[str, Any] = {"eps": eps, "one_plus": one_plus, "interleaved": interleaved}
    cos = sin = None
    if turned:
        shape = data.draw(st.sampled_from((1, batch))), tokens, turned
        kind = data.draw(st.sampled_from((source.dtype, torch.float32)))
        cos, sin = source.new(*shape, dtype=kind), source.new(*shape, dtype=kind)
    gains = [None, None]
    if eps is not None:
        gains = [source.new(width) if data.draw(flag) else None for _ in range(2)]
    more |= {"q_gain": gains[0], "k_gain": gains[1]}
    places = None
    if cached:
        length = tokens + data.draw(st.integers(0, 3)) + 1
        places = torch.randperm(length, generator=source.generator)[:tokens].to(DEVICE)
        kept = [torch.randn(batch, kv, length, width).to(DEVICE, source.dtype) for _ in range(2)]
        before = [cache.clone() for cache in kept]
        given = places
        if data.draw(flag):  # one place after the other from the first on
            given = torch.tensor(data.draw(st.integers(0, length - tokens)), device=DEVICE)
            places = given + torch.arange(tokens, device=DEVICE)
        more |= {"key_cache": kept[0], "value_cache": kept[1], "cache_position": given}
    with on_a_gpu(), strict():
        found = block_ops.rotary_heads(qkv, cos, sin, heads=(q, kv), head_dim=width, **more)
    heads = qkv.unflatten(-1, (-1, width)).transpose(1, 2)
    wanted = heads.split([q, kv, kv], dim=1)
    for place, (y, x) in enumerate(zip(found, wanted, strict=True)):
        gain = gains[place] if place < 2 else None
        ref, off = _head(x, cos, sin, gain, eps, one_plus, interleaved, place < 2)
        if cached and place:
            assert y is kept[place - 1]
            untouched = torch.ones(y.shape[2], dtype=torch.bool, device=y.device)
            untouched[places] = False
            assert torch.equal(y[:, :, untouched], before[place - 1][:, :, untouched])
            y = y[:, :, places]
        close(y, ref, off)


def _head(
    x: Tensor, cos: Any, sin: Any, gain: Any, eps: Any, one_plus: bool, apart: bool, turns: bool
) -> tuple[Tensor, Tensor]:
    """Heads (B, H, T, D) of q, k or v in float64, and how far off they may be."""
    wide, off = x.double(), 2.0**-126 * torch.ones_like(x, dtype=torch.float64)
    if turns and eps is not None:
        wide, off = unit(x, eps), off + subnormal(x, eps)
        factor = 1.0 if gain is None else gain.double() + (1.0 if one_plus else 0.0)
        wide, off = wide * factor, off * abs(factor)
    if turns and cos is not None:
        width = cos.shape[-1]
        first, rest = wide[..., :width], wide[..., width:]
        slip, slip_rest = off.broadcast_to(wide.shape)[..., :width], off[..., width:]
        pairs = (first, slip.clone())
        across = [torch.empty_like(first) for _ in pairs]
        for new, old, sign in zip(across, pairs, (-1.0, 1.0), strict=True):
            if apart:
                new[..., 0::2], new[..., 1::2] = sign * old[..., 1::2], old[..., 0::2]
            else:
                half = width // 2
                new[..., :half], new[..., half:] = sign * old[..., half:], old[..., :half]
        c, s = cos.double()[:, None], sin.double()[:, None]
        size = first.abs() * c.abs() + across[0].abs() * s.abs()
        slip = slip * c.abs() + across[1] * s.abs() + 2.0**-18 * size
        wide = torch.cat([first * c + across[0] * s, rest], -1)
        off = torch.cat([slip, slip_rest.broadcast_to(rest.shape)], -1)
    return wide, off + 2.0**-18 * wide.abs()


@st.composite
def head_layouts(draw: Any) -> tuple[Heads, ...]:
    """Groups of heads, some of whose parts are normed, by at most four norms."""
    groups, start, norm = [], 0, 0
    for _ in range(draw(st.integers(1, 3))):
        parts = []
        for _ in range(draw(st.integers(1, 2))):
            normed = norm < 4 and draw(st.booleans())
            parts.append(Head(draw(WIDTHS), (norm,) if normed else ()))
            norm += normed
        groups.append(Heads(start, draw(st.integers(1, 3)), tuple(parts)))
        start += groups[-1].columns
    return tuple(groups)


@profile(40)
@given(drawn(), head_layouts(), SIZES.rows, SIZES.k, st.sampled_from(EPS[1:]), st.data())
def test_head_norms(
    source: Drawn, groups: tuple[Heads, ...], m: int, k: int, x_eps: float, data: Any
) -> None:
    flag = st.booleans()
    eps = tuple(data.draw(st.sampled_from(EPS[1:])) for _ in range(4))
    one_plus = tuple(data.draw(flag) for _ in range(4))
    norms = HeadNorms(groups, eps, one_plus)
    gains: list[Tensor | None] = [None] * 4
    for group in groups:
        for part in group.parts:
            for norm in part.norms:
                gains[norm] = source.new(part.width) if data.draw(flag) else None
    columns = sum(group.columns for group in groups)
    # Kinds by piece of two columns: a head has several.
    z = source.rows(m, columns // 2, 2).flatten(1)
    x = source.new(m, k) if data.draw(flag) else None
    with on_a_gpu(), strict():
        y = norms(z, tuple(gains), x, x_eps)
    factor = torch.ones(m, 1, dtype=torch.float64, device=z.device)
    if x is not None:
        factor = x.double().square().mean(-1, keepdim=True) + x_eps
    pieces, offs = [], []
    for group in groups:
        column = group.start
        for part in group.parts * group.count:
            piece = z[:, column : column + part.width]
            column += part.width
            if part.norms:
                (norm,) = part.norms
                gain = 1.0 if gains[norm] is None else gains[norm].double()
                gain = gain + 1.0 if one_plus[norm] and gains[norm] is not None else gain
                off = subnormal(piece, eps[norm] * factor) * abs(gain)
                piece = unit(piece, eps[norm] * factor) * gain
            else:
                off = 2.0**-126 / factor.sqrt()
                piece = piece.double() / factor.sqrt()
            pieces.append(piece)
            offs.append(2.0**-18 * piece.abs() + off)
    close(y, torch.cat(pieces, -1), torch.cat(offs, -1))
