"""The decode block's operations in plain torch: differentiable, and the path of a CPU.

As in ``reference``: fp32 inside (fp64 for fp64), one rounding at the end, but for what the
library's matmul returns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from flashnorm_triton import reference


class Layout(NamedTuple):
    """How a packed projection's heads lie, and what is done to the queries and keys among them.

    ``eps`` is that of the heads' own RMS norm, None without one; ``one_plus`` says that its gain is
    1 + the weight given; ``interleaved`` that rotary pairs are neighbours, not half a width apart.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    eps: float | None = None
    one_plus: bool = False
    interleaved: bool = False

    @property
    def columns(self) -> int:
        """Columns of a packed row: the heads of q, k and v."""
        return (self.q_heads + 2 * self.kv_heads) * self.head_dim


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, scale: float
) -> Tensor:
    """scale * (x @ weight.T + bias) + residual in x's dtype."""
    z = functional.linear(x, weight, bias)
    if residual is None and scale == 1.0:
        return z
    wide = z.to(torch.promote_types(z.dtype, torch.float32))
    wide = wide * scale if residual is None else torch.add(residual, wide, alpha=scale)
    return wide.to(z.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, eps: float, gain: Tensor | None, one_plus: bool
) -> Tensor:
    """residual + x / rms(x) * gain in x's dtype; the gain is 1 + what is given if ``one_plus``."""
    if gain is not None and one_plus:
        gain = 1.0 + gain.to(torch.promote_types(x.dtype, torch.float32))
    return (reference.normalise(x, eps, gain) + residual).to(x.dtype)


def rotary_heads(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    layout: Layout,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v (B, heads, T, D) of packed rows, q and k normed and rotated; k and v contiguous,
    q as the transpose of (B, T, heads, D).

    None shares memory with another or with ``qkv``: of one token, ``contiguous`` would.
    """
    heads = qkv.unflatten(-1, (-1, layout.head_dim))
    q, k, v = heads.split([layout.q_heads, layout.kv_heads, layout.kv_heads], dim=-2)
    q = _head(q, cos, sin, q_gain, layout)
    k = _head(k, cos, sin, k_gain, layout)
    v = v.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    return q.transpose(1, 2), k.transpose(1, 2).contiguous(), v


def _head(
    x: Tensor, cos: Tensor | None, sin: Tensor | None, gain: Tensor | None, layout: Layout
) -> Tensor:
    if layout.eps is None and cos is None:
        return x.clone(memory_format=torch.contiguous_format)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if layout.eps is not None:
        if gain is not None and layout.one_plus:
            gain = 1.0 + gain.to(wide.dtype)
        wide = reference.normalise(wide, layout.eps, gain)
    if cos is not None and sin is not None:
        wide = _rotated(wide, cos.unsqueeze(-2), sin.unsqueeze(-2), layout.interleaved)
    return wide.to(x.dtype).contiguous()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Pairs of the first R columns turned by their angles; the columns beyond stay."""
    width = cos.shape[-1]
    turned = x if width == x.shape[-1] else x[..., :width]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        across = torch.stack((-second, first), dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        across = torch.cat((-second, first), dim=-1)
    turned = turned * cos + across * sin
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)
