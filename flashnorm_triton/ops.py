"""norm_linear and rms_norm: check the arguments, choose a plan, launch; registered with torch.

An eager call without gradients goes straight to the kernel: torch's dispatcher would cost more
host time than the kernel takes on the GPU. Everything else (torch.compile, autograd, fake tensors,
export) goes through ``torch.ops.flashnorm``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

from flashnorm_triton import launch, plans, reference, runtime
from flashnorm_triton.checks import check_norm_linear, check_rms_norm
from flashnorm_triton.plans import Plan, Problem

_PLAIN = (Tensor, Parameter)
_ready: dict[tuple, Callable[..., Tensor]] = {}


def norm_linear(
    x: Tensor,
    weight: Tensor,
    eps: float,
    bias: Tensor | None = None,
    gain: Tensor | None = None,
    *,
    plan: Plan | None = None,
) -> Tensor:
    """RMSNorm and the linear layer after it, as one operation.

    y = (x / sqrt(mean(x^2) + eps) * gain) @ weight.T + bias, with the divide deferred past the
    matmul (FlashNorm, arXiv 2407.09577, section 2). Fold the gain into the weight once
    (``algebra.fold``) or give it here.

    Args:
        x: (..., K), bfloat16, float16, float32 or float64; any strides.
        weight: (N, K), as in ``nn.Linear``, same dtype and device, last dimension contiguous.
        eps: added to the mean square; positive.
        bias: (N,), same dtype; added after the scale.
        gain: (K,), same dtype or float32; multiplies the normalised x. A ``1 + w`` norm passes
            1 + w.
        plan: runs this plan rather than the chosen one; for tests and tuning.

    Returns:
        (..., N) in x's dtype, contiguous. Products and sums in fp32, rounded once (float64 stays
        float64). Differentiable in x, weight, bias and gain. Under autocast it computes as the
        two stock modules would.

    Raises:
        TypeError: a dtype that is not supported, or dtypes that differ.
        ValueError: shapes, devices, strides or an eps that do not fit; the message names them.
    """
    if torch.is_autocast_enabled(x.device.type):
        check_norm_linear(x, weight, eps, bias, gain, same_dtype=False)
        normed = reference.rms_norm(x.float(), eps, gain)
        return torch.nn.functional.linear(normed, weight, bias)
    if plan is not None:
        return _with_plan(plan, x, weight, eps, bias, gain)
    if _plain_eager(x, weight, bias, gain):
        return _norm_linear(x, weight, eps, bias, gain)
    return torch.ops.flashnorm.norm_linear(x, weight, eps, bias, gain)


def rms_norm(x: Tensor, eps: float, gain: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gain over the last dimension, as one launch.

    x (..., K) in bfloat16, float16, float32 or float64; gain (K,) in x's dtype or float32. Returns
    x's shape and dtype, rounded once. Raises as ``norm_linear`` does.
    """
    if _plain_eager(x, gain, None, None):
        return _rms_norm(x, eps, gain)
    return torch.ops.flashnorm.rms_norm(x, eps, gain)


def _plain_eager(x: Tensor, a: Tensor | None, b: Tensor | None, c: Tensor | None) -> bool:
    """Whether nothing but a launch is wanted: no trace, no gradient, no mode, no subclass."""
    if torch.compiler.is_compiling() or type(x) not in _PLAIN:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.maybe_current_level():
        return False
    if torch.is_grad_enabled():
        for tensor in (x, a, b, c):
            if tensor is not None and tensor.requires_grad:
                return False
    return all(t is None or type(t) in _PLAIN for t in (a, b, c))


def _norm_linear(
    x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None, gain: Tensor | None = None
) -> Tensor:
    rows = _rows_of(x)
    key = (
        plans.bucket(rows.m),
        x.dtype,
        x.device,
        weight.dtype,
        weight.shape,
        weight.stride(),
        x.shape[-1:],
        eps,
        _alignment(rows, weight, bias, gain),
        None if bias is None else (bias.dtype, bias.shape, bias.stride()),
        None if gain is None else (gain.dtype, gain.shape, gain.stride()),
    )
    run = _ready.get(key)
    if run is None:
        check_norm_linear(x, weight, eps, bias, gain)
        run = _ready[key] = _prepare(_plan_for(rows, weight, bias, gain), rows, weight, bias, gain)
    return run(rows, weight, eps, bias, gain)


def _with_plan(
    plan: Plan,
    x: Tensor,
    weight: Tensor,
    eps: float,
    bias: Tensor | None,
    gain: Tensor | None,
) -> Tensor:
    check_norm_linear(x, weight, eps, bias, gain)
    if not (x.is_cuda or plan == plans.TORCH or runtime.interpreting()):
        raise ValueError(
            f"plan {plan.form!r} needs a GPU, but x is on {x.device}; on a CPU use "
            "TRITON_INTERPRET=1 (set before the first import) or no plan"
        )
    rows = _rows_of(x)
    key = (
        plan,
        x.dtype,
        x.device,
        weight.shape,
        weight.stride(),
        None if gain is None else gain.dtype,
        bias is None,
        _alignment(rows, weight, bias, gain),
    )
    run = _ready.get(key)
    if run is None:
        run = _ready[key] = _prepare(plan, rows, weight, bias, gain)
    return run(rows, weight, eps, bias, gain)


def _rows_of(x: Tensor) -> launch.Rows:
    """x as M rows of K elements each, copied only if its strides cannot say so."""
    k = x.shape[-1] if x.dim() else 0
    if x.is_contiguous():
        return launch.Rows(x, x.numel() // k if k else 0, k, x.shape[:-1])
    matrix = x.reshape(-1, k)
    if matrix.stride(-1) != 1 and k > 1:
        matrix = matrix.contiguous()
    return launch.Rows(matrix, matrix.shape[0], matrix.stride(0), x.shape[:-1])


def _alignment(rows: launch.Rows, weight: Tensor, bias: Tensor | None, gain: Tensor | None) -> int:
    """What a compiled kernel takes for granted of its pointers and strides, as bits."""
    x_stride = rows.stride * rows.x.element_size()
    bits = _misaligned(rows.x) | _misaligned(weight) << 1 | (x_stride & 15 != 0) << 2
    if bias is not None:
        bits |= _misaligned(bias) << 3
    if gain is not None:
        bits |= _misaligned(gain) << 4
    return bits | (rows.stride >= 1 << 31) << 5


def _misaligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() & 15 != 0


def _plan_for(rows: launch.Rows, weight: Tensor, bias: Tensor | None, gain: Tensor | None) -> Plan:
    problem = _problem(rows, weight, bias, gain)
    if not rows.x.is_cuda:
        return plans.TORCH
    reason = runtime.triton_unavailable()
    if reason is not None:
        warnings.warn(f"flashnorm_triton uses plain torch: {reason}", stacklevel=4)
        return plans.TORCH
    return plans.choose(problem, runtime.device_facts(rows.x.get_device()))


def _problem(
    rows: launch.Rows, weight: Tensor, bias: Tensor | None, gain: Tensor | None
) -> Problem:
    size = weight.element_size()
    tma = (
        (rows.x.data_ptr() | weight.data_ptr()) % 16 == 0
        and (rows.stride * size) % 16 == 0
        and (weight.stride(0) * size) % 16 == 0
    )
    return Problem(
        str(weight.dtype).removeprefix("torch."),
        rows.m,
        weight.shape[0],
        weight.shape[1],
        bias is not None,
        gain is not None,
        tma,
    )


def _prepare(
    plan: Plan, rows: launch.Rows, weight: Tensor, bias: Tensor | None, gain: Tensor | None
) -> Callable[..., Tensor]:
    """What runs a plan on a problem of these shapes: callable(rows, weight, eps, bias, gain)."""
    if rows.m == 0 or weight.shape[0] == 0:
        return _run_empty
    if plan == plans.TORCH:
        return _run_reference
    problem = _problem(rows, weight, bias, gain)
    family = launch.FAMILIES[plan.form](plan, problem, weight.stride(0))
    return _on_device_of(rows.x, family)


def _run_empty(
    rows: launch.Rows, weight: Tensor, eps: float, bias: Tensor | None, gain: Tensor | None
) -> Tensor:
    return rows.x.new_empty((*rows.lead, weight.shape[0]))


def _run_reference(
    rows: launch.Rows, weight: Tensor, eps: float, bias: Tensor | None, gain: Tensor | None
) -> Tensor:
    x = rows.x.view(*rows.lead, weight.shape[1])
    return reference.norm_linear(x, weight, eps, bias, gain)


def _on_device_of(x: Tensor, family: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The family, launched on x's device even when another one is current."""
    if not x.is_cuda:
        return family
    index = x.get_device()

    def run(*args: object) -> Tensor:
        if torch._C._cuda_getDevice() == index:
            return family(*args)
        with torch.cuda.device(index):
            return family(*args)

    return run


def _rms_norm(x: Tensor, eps: float, gain: Tensor | None = None) -> Tensor:
    rows = _rows_of(x)
    key = (
        rows.m > 0,
        x.dtype,
        x.device,
        x.shape[-1:],
        eps,
        _misaligned(rows.x),
        rows.stride >= 1 << 31,
        None if gain is None else (gain.dtype, gain.shape, gain.stride(), _misaligned(gain)),
    )
    run = _ready.get(key)
    if run is None:
        check_rms_norm(x, eps, gain)
        run = _ready[key] = _prepare_rms_norm(x, gain)
    return run(rows, eps, gain)


def _prepare_rms_norm(x: Tensor, gain: Tensor | None) -> Callable[..., Tensor]:
    on_gpu = x.is_cuda and x.dtype != torch.float64 and runtime.triton_available()
    if x.numel() and on_gpu:
        return _on_device_of(x, launch.RmsNorm(x.shape[-1], gain is not None))
    return _run_reference_norm


def _run_reference_norm(rows: launch.Rows, eps: float, gain: Tensor | None) -> Tensor:
    x = rows.x
    return reference.rms_norm(x.view(*rows.lead, x.shape[-1]), eps, gain)


# Registration. The schemas are the operations' contract with torch.compile and export.
_library = torch.library.Library("flashnorm", "DEF")
_library.define(
    "norm_linear(Tensor x, Tensor weight, float eps, Tensor? bias, Tensor? gain) -> Tensor"
)
_library.define("rms_norm(Tensor x, float eps, Tensor? gain) -> Tensor")
for _key in ("CPU", "CUDA"):
    _library.impl("norm_linear", _norm_linear, _key)
    _library.impl("rms_norm", _rms_norm, _key)


@torch.library.register_fake("flashnorm::norm_linear", lib=_library)
def _(
    x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None, gain: Tensor | None = None
) -> Tensor:
    check_norm_linear(x, weight, eps, bias, gain)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.register_fake("flashnorm::rms_norm", lib=_library)
def _(x: Tensor, eps: float, gain: Tensor | None = None) -> Tensor:
    check_rms_norm(x, eps, gain)
    return x.new_empty(x.shape)


def _save_norm_linear(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor):
    x, weight, ctx.eps, bias, gain = inputs
    ctx.save_for_backward(x, weight, gain)


def _backward_norm_linear(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple:
    x, weight, gain = ctx.saved_tensors
    need_x, need_weight, _, need_bias, need_gain = ctx.needs_input_grad
    d_x, d_weight, d_bias, d_gain = reference.norm_linear_backward(
        grad, x, weight, gain, ctx.eps, [need_x, need_weight, need_bias, need_gain]
    )
    return d_x, d_weight, None, d_bias, d_gain


def _save_rms_norm(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor):
    x, ctx.eps, gain = inputs
    ctx.save_for_backward(x, gain)


def _backward_rms_norm(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple:
    x, gain = ctx.saved_tensors
    need_x, _, need_gain = ctx.needs_input_grad
    d_x, d_gain = reference.rms_norm_backward(grad, x, gain, ctx.eps, need_x, need_gain)
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
