"""norm_linear: the operation, its checks and its torch path."""

from __future__ import annotations

import torch
from torch import Tensor


def norm_linear(
    x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None, gain: Tensor | None = None
) -> Tensor:
    xw = x.double() if x.dtype == torch.float64 else x.float()
    s = torch.rsqrt(xw.square().mean(-1, keepdim=True) + eps)
    if gain is not None:
        xw = xw * gain.to(xw.dtype)
    y = (xw @ weight.to(xw.dtype).T) * s
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.to(x.dtype)
