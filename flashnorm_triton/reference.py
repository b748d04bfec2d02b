"""norm_linear and rms_norm in plain torch: the path of the CPU and of a GPU without Triton.

The numerics contract holds here too: the sum of squares and the scale in fp32 (fp64 for fp64
inputs), and never an unnormalised half-precision value in memory. ``centred`` is LayerNorm: the
row's mean is taken off first.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional

_HALF = (torch.bfloat16, torch.float16)
# Weights are widened so many values at a time: with their fp32 copy they stay in a core's cache.
_PIECE = 1 << 18
_SEVERAL = 4  # rows, from which fp32 costs no more (docs/measured.md, "Half precision on a CPU")


def scale_of(x: Tensor, eps: float) -> Tensor:
    """s = 1 / sqrt(mean(x^2) + eps) over the last dimension: (..., 1), fp32 or fp64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def _centre(x: Tensor) -> Tensor:
    """x - mean(x) over the last dimension, in fp32 or fp64.

    Where x is as wide as its mean, the mean's own rounding may pass the deviations: what is left of
    it is taken off as well.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide - wide.mean(-1, keepdim=True)
    return wide if x.dtype in _HALF else wide - wide.mean(-1, keepdim=True)


def rms_norm(x: Tensor, eps: float, gain: Tensor | None = None) -> Tensor:
    """x * s (* gain), in x's dtype, rounded once."""
    return normalise(x, eps, gain).to(x.dtype)


def normalise(x: Tensor, eps: float, gain: Tensor | None = None, centred: bool = False) -> Tensor:
    """The norm of x before its rounding, in fp32 or fp64 (or wider: the gain's)."""
    wide = _centre(x) if centred else x
    y = wide * scale_of(wide, eps)
    return y if gain is None else y * gain


def norm_linear(
    x: Tensor,
    weight: Tensor,
    eps: float,
    bias: Tensor | None = None,
    gain: Tensor | None = None,
    *,
    centred: bool = False,
    residual: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
) -> Tensor:
    """s * ((x * gain) @ weight.T) + bias in x's dtype, then what ``finish`` does.

    Half precision normalises first and lets the library's matmul accumulate: the deferred form
    would have to store the unnormalised product, which overflows fp16. The rows and the product
    are rounded, as stock's; once only, where the library has no arithmetic for the dtype on this
    CPU, for there fp32 is faster as well. Wider dtypes defer the scale (paper, section 3.2).
    """
    if x.dtype in _HALF:
        normed = normalise(x, eps, gain, centred)
        if _better_in_fp32(x, weight):
            z = _linear_in_fp32(normed, weight, bias)
        else:
            z = functional.linear(normed.to(x.dtype), weight, bias)
    else:
        wide = _centre(x) if centred else x
        z = functional.linear(wide if gain is None else wide * gain, weight) * scale_of(wide, eps)
        z = z if bias is None else z + bias
    return finish(z, residual, activation, gated).to(x.dtype)


def _better_in_fp32(x: Tensor, weight: Tensor) -> bool:
    """Whether a product of several half-precision rows costs no more in fp32, here and now.

    Few rows are a matter of the weights' bytes, where widening them loses. A gradient would keep
    the wide weights.
    """
    learns = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    several = x.numel() >= _SEVERAL * x.shape[-1]
    return x.device.type == "cpu" and several and not learns and not _in_hardware(x.dtype)


@functools.cache
def _in_hardware(dtype: torch.dtype) -> bool:
    """Whether torch's CPU library multiplies a half precision with instructions made for it."""
    if not torch.backends.mkldnn.is_available():
        return True  # another library, which nothing is known of here
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _linear_in_fp32(normed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """normed (..., K) @ weight.T + bias in fp32, the weight widened a piece at a time."""
    rows = max(1, _PIECE // weight.shape[1])
    z = torch.cat([functional.linear(normed, some.float()) for some in weight.split(rows)], -1)
    return z if bias is None else z + bias


def finish(
    z: Tensor, residual: Tensor | None = None, activation: str | None = None, gated: bool = False
) -> Tensor:
    """act(z) + residual, or act(gate) * up + residual with z = [gate, up], in fp32 or fp64.

    z itself, in its own dtype, where there is nothing to do.
    """
    if activation is None and not gated and residual is None:
        return z
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    if gated:
        gate, up = z.chunk(2, -1)
        y = activate(gate, activation) * up
    else:
        y = activate(z, activation)
    return y if residual is None else y + residual


def activate(z: Tensor, activation: str | None) -> Tensor:
    """One of ``checks.ACTIVATIONS`` applied to z; z itself for None."""
    match activation:
        case "silu":
            return functional.silu(z)
        case "gelu":
            return functional.gelu(z)
        case "gelu_tanh":
            return functional.gelu(z, approximate="tanh")
        case "relu":
            return functional.relu(z)
        case "relu2":
            return functional.relu(z).square()
    return z


def _slope(z: Tensor, activation: str | None) -> Tensor:
    """The derivative of ``activate`` at z; 0 at a ReLU's kink, as in torch."""
    match activation:
        case "silu":
            sigmoid = torch.sigmoid(z)
            return sigmoid * (1 + z * (1 - sigmoid))
        case "gelu":
            below = 0.5 * (1 + torch.erf(z / math.sqrt(2)))
            return below + z * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        case "gelu_tanh":
            root = math.sqrt(2 / math.pi)
            tanh = torch.tanh(root * (z + 0.044715 * z * z * z))
            inner = root * (1 + 3 * 0.044715 * z * z)
            return 0.5 * (1 + tanh) + 0.5 * z * (1 - tanh * tanh) * inner
        case "relu":
            return (z > 0).to(z.dtype)
        case "relu2":
            return 2 * functional.relu(z)
    return torch.ones_like(z)


def finish_backward(grad: Tensor, z: Tensor, activation: str | None, gated: bool) -> Tensor:
    """The gradient of ``finish`` for z, in z's width or fp32, whichever is wider."""
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    if not gated:
        return grad * _slope(z, activation)
    gate, up = z.chunk(2, -1)
    return torch.cat([grad * up * _slope(gate, activation), grad * activate(gate, activation)], -1)


def norm_linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    gain: Tensor | None,
    eps: float,
    needs: list[bool],
    centred: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of norm_linear for x, weight, bias and gain; None where ``needs`` is False.

    With n = x * s and z = n * gain: y = z @ W.T + c, so dz = dy @ W, dn = dz * gain and
    dx = s * (dn - n * mean(dn * n)), less its mean where the norm is ``centred``. Matmuls in the
    input's dtype, as the stock modules' backward.
    """
    need_x, need_weight, need_bias, need_gain = needs
    d_x = d_weight = d_bias = d_gain = None
    flat = grad.reshape(-1, grad.shape[-1])
    if need_x or need_gain:
        d_x, d_gain = norm_backward(grad @ weight, x, gain, eps, need_x, need_gain, centred)
    if need_weight:
        normed = normalise(x, eps, gain, centred).to(x.dtype)
        d_weight = flat.T @ normed.reshape(-1, x.shape[-1])
    if need_bias:
        d_bias = flat.sum(0)
    return d_x, d_weight, d_bias, d_gain


def norm_backward(
    grad: Tensor,
    x: Tensor,
    gain: Tensor | None,
    eps: float,
    need_x: bool,
    need_gain: bool,
    centred: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the norm for x and gain, computed in fp32 (fp64 for fp64)."""
    wide = _centre(x) if centred else x
    s = scale_of(wide, eps)
    normed = wide * s
    grad = grad.to(normed.dtype)
    d_gain = None
    if need_gain and gain is not None:
        d_gain = (grad * normed).reshape(-1, x.shape[-1]).sum(0).to(gain.dtype)
    if not need_x:
        return None, d_gain
    d_n = grad if gain is None else grad * gain
    d_x = s * (d_n - normed * (d_n * normed).mean(-1, keepdim=True))
    return (_centre(d_x) if centred else d_x).to(x.dtype), d_gain
