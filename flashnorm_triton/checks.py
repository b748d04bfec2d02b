"""The argument checks of the operations: every message names the value and the remedy."""

from __future__ import annotations

import math

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


def check_rms_norm(x: Tensor, eps: float, gain: Tensor | None, same_dtype: bool = True) -> None:
    """Raise TypeError or ValueError unless ``rms_norm(x, eps, gain)`` is well formed."""
    _check_rows(x)
    check_eps(eps)
    if gain is not None:
        check_gain("gain", gain, x, x.shape[-1], same_dtype)


def _check_rows(x: Tensor) -> None:
    check_dtype("x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; its last dimension must hold K >= 1 values"
        )


def check_dtype(name: str, tensor: Tensor) -> None:
    """Raise TypeError unless a tensor is of a dtype that the operations compute in."""
    if tensor.dtype not in DTYPES:
        raise TypeError(
            f"{name} is {tensor.dtype}; the operations take bfloat16, float16, float32 or float64: "
            "convert it with .to(...)"
        )


def check_eps(eps: float) -> None:
    """Raise TypeError or ValueError unless eps is a positive number."""
    if isinstance(eps, bool) or not isinstance(eps, (int, float, torch.SymFloat)):
        raise TypeError(f"eps is {eps!r}; it must be a Python number (a usual value is 1e-6)")
    if not (math.isfinite(eps) and eps > 0):
        raise ValueError(f"eps is {eps}; it must be positive and finite (a usual value is 1e-6)")


def check_gain(name: str, gain: Tensor, x: Tensor, k: int, same_dtype: bool = True) -> None:
    """Raise TypeError or ValueError unless ``gain`` fits rows of K values like x's."""
    if gain.shape != (k,):
        raise ValueError(
            f"{name} has shape {tuple(gain.shape)}, but x has K = {k}: it must be ({k},)"
        )
    if gain.dtype not in ((x.dtype, torch.float32) if same_dtype else DTYPES):
        raise TypeError(f"{name} is {gain.dtype}, x is {x.dtype}: use x's dtype or float32")
    check_device(name, gain, x)


def check_norm_linear(
    x: Tensor,
    weight: Tensor,
    eps: float,
    bias: Tensor | None,
    gain: Tensor | None,
    same_dtype: bool = True,
) -> None:
    """Raise TypeError or ValueError unless ``norm_linear`` with these arguments is well formed.

    ``same_dtype`` is False under autocast, which converts.
    """
    check_rms_norm(x, eps, gain, same_dtype)
    _check_weight(x, weight, bias, same_dtype)


def check_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, same_dtype: bool = True
) -> None:
    """Raise TypeError or ValueError unless a linear layer of these is well formed."""
    _check_rows(x)
    _check_weight(x, weight, bias, same_dtype)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale is {scale!r}; it must be a Python number")
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; it must be finite")


def _check_weight(x: Tensor, weight: Tensor, bias: Tensor | None, same_dtype: bool) -> None:
    if weight.dim() != 2:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; it must be (N, K)")
    if weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"K differs: x has {x.shape[-1]} (last dimension of {tuple(x.shape)}), weight has "
            f"{weight.shape[1]} (second dimension of {tuple(weight.shape)})"
        )
    if weight.dtype not in DTYPES:
        raise TypeError(
            f"weight is {weight.dtype}; it must be bfloat16, float16, float32 or float64: a "
            "quantized weight cannot be used here"
        )
    if same_dtype and weight.dtype != x.dtype:
        raise TypeError(
            f"x is {x.dtype}, weight is {weight.dtype}: convert one of them, or use torch.autocast"
        )
    check_device("weight", weight, x)
    if weight.shape[1] > 1 and weight.stride(1) != 1:
        raise ValueError(
            f"weight has strides {tuple(weight.stride())}; its last dimension must be contiguous: "
            "call .contiguous()"
        )
    if bias is not None:
        if bias.shape != weight.shape[:1]:
            raise ValueError(
                f"bias has shape {tuple(bias.shape)}, but weight has N = {weight.shape[0]}: "
                f"it must be ({weight.shape[0]},)"
            )
        if same_dtype and bias.dtype != x.dtype:
            raise TypeError(f"bias is {bias.dtype}, x is {x.dtype}: convert one of them")
        check_device("bias", bias, x)


def check_epilogue(
    x: Tensor,
    weight: Tensor,
    row_sums: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    gated: bool,
    same_dtype: bool = True,
) -> None:
    """Raise TypeError or ValueError unless these arguments go with an x and weight that are right.

    To be called after ``check_norm_linear``. ``same_dtype`` is False under autocast.
    """
    n = weight.shape[0]
    if row_sums is not None:
        if row_sums.shape != weight.shape[:1]:
            raise ValueError(
                f"row_sums has shape {tuple(row_sums.shape)}, but weight has N = {n}: it must be "
                f"({n},), the sum of gain * weight over each row"
            )
        if row_sums.dtype not in (torch.float32, torch.promote_types(x.dtype, torch.float32)):
            raise TypeError(f"row_sums is {row_sums.dtype}: compute it in float32")
        check_device("row_sums", row_sums, x)
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(
            f"activation is {activation!r}; it must be None or one of {', '.join(ACTIVATIONS)}: "
            "apply any other to the result"
        )
    if not isinstance(gated, bool):
        raise TypeError(f"gated is {gated!r}; it must be True or False")
    if gated and n % 2:
        raise ValueError(
            f"weight has N = {n} rows; a gated pair needs an even number, the gate's and then as "
            "many of the up projection"
        )
    if residual is not None:
        wanted = (*x.shape[:-1], n // 2 if gated else n)
        if residual.shape != wanted:
            raise ValueError(
                f"residual has shape {tuple(residual.shape)}, but the result has {wanted}: they "
                "must be equal"
            )
        if residual.dtype not in DTYPES or (same_dtype and residual.dtype != x.dtype):
            raise TypeError(f"residual is {residual.dtype}, x is {x.dtype}: convert one of them")
        check_device("residual", residual, x)


def check_device(name: str, tensor: Tensor, x: Tensor) -> None:
    """Raise ValueError unless a tensor is where x is."""
    if tensor.device != x.device:
        raise ValueError(
            f"x is on {x.device}, {name} is on {tensor.device}: move one of them with .to(...)"
        )
