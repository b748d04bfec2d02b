"""norm_linear and rms_norm: check the arguments, choose a plan, launch; registered with torch.

An eager call without gradients goes straight to the kernel: torch's dispatcher would cost more
host time than the kernel takes on the GPU. Everything else (torch.compile, autograd, fake tensors,
export) goes through ``torch.ops.flashnorm``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from flashnorm_triton import dispatch, reference, transforms
from flashnorm_triton.checks import check_rms_norm
from flashnorm_triton.dispatch import PLAIN, Call, Epilogue, forget_plans
from flashnorm_triton.plans import Plan
from flashnorm_triton.transforms import differentiated

__all__ = ["forget_plans", "norm_linear", "rms_norm"]

_PLAIN = (Tensor, Parameter)


def norm_linear(
    x: Tensor,
    weight: Tensor,
    eps: float,
    bias: Tensor | None = None,
    gain: Tensor | None = None,
    *,
    row_sums: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
    plan: Plan | None = None,
) -> Tensor:
    """A norm and the linear layer after it, as one operation; what follows may join it.

    z = (x / sqrt(mean(x^2) + eps) * gain) @ weight.T + bias, with the divide deferred past the
    matmul (FlashNorm, arXiv 2407.09577, section 2). Fold the gain into the weight once
    (``algebra.fold``) or give it here. Then y = act(z) + residual, or, ``gated``,
    y = act(z_gate) * z_up + residual with z = [z_gate, z_up].

    Args:
        x: (..., K), bfloat16, float16, float32 or float64; any strides.
        weight: (N, K), as in ``nn.Linear``, same dtype and device, last dimension contiguous.
        eps: added to the mean square, or to the variance; positive.
        bias: (N,), same dtype; added after the scale.
        gain: (K,), same dtype or float32; multiplies the normalised x. A ``1 + w`` norm passes
            1 + w.
        row_sums: (N,), float32: the sum over k of gain[k] * weight[n, k], of the weight as stored.
            Given, the norm is a LayerNorm: the mean of x is taken off, as
            s * (x @ weight.T - mean(x) * row_sums), s = 1 / sqrt(var(x) + eps), which holds
            whether the weight was centred or not. A gradient counts it as part of the weight and
            the gain, and gives it none of its own.
        residual: the result's shape, same dtype; added last.
        activation: None, "silu", "gelu", "gelu_tanh", "relu" or "relu2" (ReLU squared).
        gated: the rows of the weight are [gate; up], N / 2 each, and the result is half as wide.
        plan: runs this plan rather than the chosen one, without gradients and regardless of
            autocast; for tests and tuning.

    Returns:
        (..., N) in x's dtype, or (..., N / 2) if ``gated``; contiguous. Products, sums and all
        that follows in fp32, rounded once (float64 stays float64); where the norm and the matmul
        are the library's, what it returns is rounded as well. Differentiable in x, weight, bias,
        gain and residual. Under autocast it computes as the stock modules would.

    Raises:
        TypeError: a dtype that is not supported, or dtypes that differ.
        ValueError: shapes, devices, strides, an activation or an eps that do not fit; the message
            names them.
    """
    more = None
    if row_sums is not None or residual is not None or activation is not None or gated:
        more = Epilogue(row_sums, residual, activation, gated)
    if plan is not None:
        dispatch.check_forced(plan, Call(x, weight, eps, bias, gain, more or PLAIN))
        return dispatch.norm_linear(x, weight, eps, bias, gain, more, plan)
    if _eager() and _plain(x, weight, bias, gain) and (more is None or _plain(x, *more[:2])):
        return dispatch.norm_linear(x, weight, eps, bias, gain, more)
    if _autocasting(x):
        return _under_autocast(Call(x, weight, eps, bias, gain, more or PLAIN))
    if differentiated():
        call = Call(x, weight, eps, bias, gain, more or PLAIN)
        call.check()
        return call.in_torch()
    return torch.ops.flashnorm.norm_linear(
        x, weight, eps, bias, gain, row_sums, residual, activation, gated
    )


def _under_autocast(call: Call) -> Tensor:
    """The stock modules, which autocast converts as it does; the rest in fp32."""
    call.check(same_dtype=False)
    x, weight, eps, bias, gain, (row_sums, residual, activation, gated, *_) = call
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = reference.normalise(wide, eps, gain, centred=row_sums is not None).to(wide.dtype)
    z = torch.nn.functional.linear(normed, weight, bias)
    return reference.finish(z, residual, activation, gated).to(z.dtype)


def rms_norm(x: Tensor, eps: float, gain: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gain over the last dimension, as one launch.

    x (..., K) in bfloat16, float16, float32 or float64; gain (K,) in x's dtype or float32. Returns
    x's shape and dtype, rounded once. Raises as ``norm_linear`` does.
    """
    if _eager() and _plain(x, gain):
        return dispatch.rms_norm(x, eps, gain)
    if differentiated():
        check_rms_norm(x, eps, gain)
        return reference.rms_norm(x, eps, gain)
    return torch.ops.flashnorm.rms_norm(x, eps, gain)


# Bound once: each of these questions is asked at every call of eager decoding.
_is_compiling = torch.compiler.is_compiling
_any_autocast = torch._C._is_any_autocast_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.maybe_current_level
_tracing_state = torch._C._get_tracing_state
_grad_enabled = torch.is_grad_enabled


def _autocasting(x: Tensor) -> bool:
    """Whether torch.autocast is on for x's device."""
    kind = x.device.type
    return kind in ("cuda", "cpu") and torch.is_autocast_enabled(kind)


def _eager() -> bool:
    """Whether nothing watches or changes what operations run: no trace, mode or transform."""
    return not (
        _is_compiling()
        or _any_autocast()
        or _dispatch_modes()
        or _functorch_level()
        or _tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def plain_eager(x: Tensor, *others: Tensor | None) -> bool:
    """Whether nothing but a launch is wanted: no trace, no gradient, no mode, no subclass."""
    return _eager() and all(_plain(x, other) for other in others or (None,))


def _plain(x: Tensor, a: Tensor | None, b: Tensor | None = None, c: Tensor | None = None) -> bool:
    """Whether nothing but a launch is wanted of these: no gradient, no subclass, memory behind."""
    if type(x) not in _PLAIN:
        return False
    # A tensor without memory is told apart by its device where x is on a GPU.
    real, track = x.is_cuda, _grad_enabled()
    if (not real and x.is_meta) or (track and x.requires_grad):
        return False
    for tensor in (a, b, c):
        if tensor is not None and (
            type(tensor) not in _PLAIN
            or (track and tensor.requires_grad)
            or (not real and tensor.is_meta)
        ):
            return False
    return True


# Registration. The schemas are the operations' contract with torch.compile and export.
_library = torch.library.Library("flashnorm", "DEF")
_library.define(
    "norm_linear(Tensor x, Tensor weight, float eps, Tensor? bias, Tensor? gain, "
    "Tensor? row_sums=None, Tensor? residual=None, str? activation=None, bool gated=False) "
    "-> Tensor"
)
_library.define("rms_norm(Tensor x, float eps, Tensor? gain) -> Tensor")


def _norm_linear(
    x: Tensor,
    weight: Tensor,
    eps: float,
    bias: Tensor | None,
    gain: Tensor | None,
    row_sums: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
) -> Tensor:
    more = Epilogue(row_sums, residual, activation, gated)
    more = None if more.is_plain else more
    return dispatch.norm_linear(x, weight, eps, bias, gain, more)


for _key in ("CPU", "CUDA"):
    _library.impl("norm_linear", _norm_linear, _key)
    _library.impl("rms_norm", dispatch.rms_norm, _key)


@torch.library.register_fake("flashnorm::norm_linear", lib=_library)
def _(
    x: Tensor,
    weight: Tensor,
    eps: float,
    bias: Tensor | None = None,
    gain: Tensor | None = None,
    row_sums: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
) -> Tensor:
    call = Call(x, weight, eps, bias, gain, Epilogue(row_sums, residual, activation, gated))
    call.check()
    return x.new_empty(call.shape)


@torch.library.register_fake("flashnorm::rms_norm", lib=_library)
def _(x: Tensor, eps: float, gain: Tensor | None = None) -> Tensor:
    check_rms_norm(x, eps, gain)
    return x.new_empty(x.shape)


def _save_norm_linear(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor):
    x, weight, ctx.eps, bias, gain, row_sums, _, ctx.activation, ctx.gated = inputs
    ctx.centred = row_sums is not None
    ctx.save_for_backward(x, weight, bias, gain)


def _backward_norm_linear(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple:
    x, weight, bias, gain = ctx.saved_tensors
    # torch leaves out trailing arguments that have their default.
    given = len(ctx.needs_input_grad)
    need_x, need_weight, _, need_bias, need_gain = ctx.needs_input_grad[:5]
    d_residual = grad if given > 6 and ctx.needs_input_grad[6] else None
    if ctx.activation is not None or ctx.gated:
        # Computed again, rather than a wider output kept.
        z = reference.norm_linear(x, weight, ctx.eps, bias, gain, centred=ctx.centred)
        grad = reference.finish_backward(grad, z, ctx.activation, ctx.gated).to(x.dtype)
    d_x, d_weight, d_bias, d_gain = reference.norm_linear_backward(
        grad, x, weight, gain, ctx.eps, [need_x, need_weight, need_bias, need_gain], ctx.centred
    )
    return (d_x, d_weight, None, d_bias, d_gain, None, d_residual, None, None)[:given]


def _save_rms_norm(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor):
    x, ctx.eps, gain = inputs
    ctx.save_for_backward(x, gain)


def _backward_rms_norm(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple:
    x, gain = ctx.saved_tensors
    need_x, _, need_gain = ctx.needs_input_grad
    d_x, d_gain = reference.norm_backward(grad, x, gain, ctx.eps, need_x, need_gain)
    return d_x, None, d_gain


torch.library.register_autograd(
    "flashnorm::norm_linear",
    _backward_norm_linear,
    setup_context=_save_norm_linear,
    lib=_library,
)
torch.library.register_autograd(
    "flashnorm::rms_norm", _backward_rms_norm, setup_context=_save_rms_norm, lib=_library
)
torch.library.register_vmap("flashnorm::norm_linear", transforms.batched_norm_linear, lib=_library)
torch.library.register_vmap("flashnorm::rms_norm", transforms.batched_rms_norm, lib=_library)
