"""norm_linear and rms_norm in plain torch: the path of the CPU and of a GPU without Triton.

The numerics contract holds here too: the sum of squares and the scale in fp32 (fp64 for fp64
inputs), and never an unnormalised half-precision value in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)


def scale_of(x: Tensor, eps: float) -> Tensor:
    """s = 1 / sqrt(mean(x^2) + eps) over the last dimension: (..., 1), fp32 or fp64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, eps: float, gain: Tensor | None = None) -> Tensor:
    """x * s (* gain), in x's dtype, rounded once."""
    y = x * scale_of(x, eps)
    if gain is not None:
        y = y * gain
    return y.to(x.dtype)


def norm_linear(
    x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None, gain: Tensor | None = None
) -> Tensor:
    """s * ((x * gain) @ weight.T) + bias in x's dtype.

    Half precision normalises first and lets the library's matmul accumulate: the deferred form
    would have to store the unnormalised product, which overflows fp16, or to widen the whole
    weight. Wider dtypes defer the scale (paper, section 2).
    """
    if x.dtype in _HALF:
        return torch.nn.functional.linear(rms_norm(x, eps, gain), weight, bias)
    y = torch.nn.functional.linear(x if gain is None else x * gain, weight) * scale_of(x, eps)
    return (y if bias is None else y + bias).to(x.dtype)


def norm_linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, gain: Tensor | None, eps: float, needs: list[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of norm_linear for x, weight, bias and gain; None where ``needs`` is False.

    With n = x * s and z = n * gain: y = z @ W.T + c, so dz = dy @ W, dn = dz * gain and
    dx = s * (dn - n * mean(dn * n)). Matmuls in the input's dtype, as the stock modules' backward.
    """
    need_x, need_weight, need_bias, need_gain = needs
    d_x = d_weight = d_bias = d_gain = None
    flat = grad.reshape(-1, grad.shape[-1])
    if need_x or need_gain:
        d_x, d_gain = rms_norm_backward(grad @ weight, x, gain, eps, need_x, need_gain)
    if need_weight:
        d_weight = flat.T @ rms_norm(x, eps, gain).reshape(-1, x.shape[-1])
    if need_bias:
        d_bias = flat.sum(0)
    return d_x, d_weight, d_bias, d_gain


def rms_norm_backward(
    grad: Tensor, x: Tensor, gain: Tensor | None, eps: float, need_x: bool, need_gain: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of rms_norm for x and gain, computed in fp32 (fp64 for fp64)."""
    s = scale_of(x, eps)
    normed = x * s
    wide = grad.to(normed.dtype)
    d_gain = None
    if need_gain and gain is not None:
        d_gain = (wide * normed).reshape(-1, x.shape[-1]).sum(0).to(gain.dtype)
    if not need_x:
        return None, d_gain
    d_n = wide if gain is None else wide * gain
    return (s * (d_n - normed * (d_n * normed).mean(-1, keepdim=True))).to(x.dtype), d_gain
