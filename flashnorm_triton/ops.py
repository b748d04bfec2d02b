"""norm_linear and rms_norm: check the arguments, choose a plan, launch; registered with torch.

An eager call without gradients goes straight to the kernel: torch's dispatcher would cost more
host time than the kernel takes on the GPU. Everything else (torch.compile, autograd, fake tensors,
export) goes through ``torch.ops.flashnorm``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from flashnorm_triton import launch, plans, reference, runtime, tables
from flashnorm_triton.checks import check_norm_linear, check_rms_norm
from flashnorm_triton.limits import unfit
from flashnorm_triton.plans import Plan, Problem

_PLAIN = (Tensor, Parameter)
_READY_MOST = 4096
_ready: dict[tuple, Callable[..., Tensor]] = {}
_families: dict[tuple, Any] = {}
_failed: set[tuple] = set()


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
        plan: runs this plan rather than the chosen one, without gradients and regardless of
            autocast; for tests and tuning.

    Returns:
        (..., N) in x's dtype, contiguous. Products and sums in fp32, rounded once (float64 stays
        float64). Differentiable in x, weight, bias and gain. Under autocast it computes as the
        two stock modules would.

    Raises:
        TypeError: a dtype that is not supported, or dtypes that differ.
        ValueError: shapes, devices, strides or an eps that do not fit; the message names them.
    """
    if plan is not None:
        _check_forced(plan, x, weight, bias, gain)
        return _norm_linear(x, weight, eps, bias, gain, plan)
    if _autocasting(x):
        check_norm_linear(x, weight, eps, bias, gain, same_dtype=False)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return torch.nn.functional.linear(reference.rms_norm(wide, eps, gain), weight, bias)
    if _plain_eager(x, weight, bias, gain):
        return _norm_linear(x, weight, eps, bias, gain)
    if _forward_mode():
        check_norm_linear(x, weight, eps, bias, gain)
        return reference.norm_linear(x, weight, eps, bias, gain)
    return torch.ops.flashnorm.norm_linear(x, weight, eps, bias, gain)


def rms_norm(x: Tensor, eps: float, gain: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gain over the last dimension, as one launch.

    x (..., K) in bfloat16, float16, float32 or float64; gain (K,) in x's dtype or float32. Returns
    x's shape and dtype, rounded once. Raises as ``norm_linear`` does.
    """
    if _plain_eager(x, gain, None, None):
        return _rms_norm(x, eps, gain)
    if _forward_mode():
        check_rms_norm(x, eps, gain)
        return reference.rms_norm(x, eps, gain)
    return torch.ops.flashnorm.rms_norm(x, eps, gain)


def _autocasting(x: Tensor) -> bool:
    """Whether torch.autocast is on for x's device; the first question is cheap and mostly no."""
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return False
    kind = x.device.type
    return kind in ("cuda", "cpu") and torch.is_autocast_enabled(kind)


def _forward_mode() -> bool:
    """Whether forward-mode gradients may be wanted: registered operations would drop them."""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def _check_forced(
    plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None, gain: Tensor | None
) -> None:
    if plan == plans.TORCH:
        return
    if not (x.is_cuda or runtime.interpreting()):
        raise ValueError(
            f"plan {plan.form!r} needs a GPU, but x is on {x.device}; on a CPU use "
            "TRITON_INTERPRET=1 (set before the first import) or no plan"
        )
    if x.is_cuda and x.dim() and weight.dim() == 2 and x.numel() and weight.dtype == x.dtype:
        problem = _problem(_matrix(x), weight, bias, gain)
        obstacle = unfit(plan, problem, runtime.device_facts(x.get_device()))
        if obstacle is not None:
            raise ValueError(f"plan {plan.strategy}/{plan.form} cannot run this call: {obstacle}")
    if x.dtype == torch.float64:
        raise TypeError(f"plan {plan.form!r} computes in fp32, but x is float64: use no plan")
    operands = (x, weight, bias, gain)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands):
        raise ValueError(
            f"plan {plan.form!r} was asked for by name and keeps no gradient: call it under "
            "torch.no_grad(), or without a plan"
        )


def _plain_eager(x: Tensor, a: Tensor | None, b: Tensor | None, c: Tensor | None) -> bool:
    """Whether nothing but a launch is wanted: no trace, no gradient, no mode, no subclass."""
    if torch.compiler.is_compiling() or type(x) not in _PLAIN or x.is_meta:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.maybe_current_level():
        return False
    if torch._C._get_tracing_state() is not None:
        return False
    if forward_ad._current_level >= 0:
        return False
    if torch.is_grad_enabled():
        for tensor in (x, a, b, c):
            if tensor is not None and tensor.requires_grad:
                return False
    return all(t is None or (type(t) in _PLAIN and not t.is_meta) for t in (a, b, c))


def _norm_linear(
    x: Tensor,
    weight: Tensor,
    eps: float,
    bias: Tensor | None,
    gain: Tensor | None,
    plan: Plan | None = None,
) -> Tensor:
    # All that decides what is run and with which compiled code. In eager decoding this key and
    # the launch are the whole host cost of a call, so it is flat and its parts are cheap.
    key = (
        x.shape,
        weight.shape,
        eps,
        plan,
        x.dtype,
        weight.dtype,
        x.get_device(),
        weight.get_device(),
        x.data_ptr() & 15,
        weight.data_ptr() & 15,
        None if x.is_contiguous() else x.stride(),
        None if weight.is_contiguous() else weight.stride(),
        None if bias is None else _traits(bias),
        None if gain is None else _traits(gain),
    )
    run = _ready.get(key)
    if run is None:
        check_norm_linear(x, weight, eps, bias, gain)
        return _first_call(key, x, weight, eps, bias, gain, plan)
    return run(x, weight, bias, gain)


def _first_call(
    key: tuple,
    x: Tensor,
    weight: Tensor,
    eps: float,
    bias: Tensor | None,
    gain: Tensor | None,
    plan: Plan | None,
) -> Tensor:
    """Prepare a call, make it, and keep what ran it.

    Unless a plan was asked for by name, one that cannot be built or launched here (a table's plan
    under another Triton, a compiler's fault) gives way to the heuristic's and then to the unfused
    pair, with one warning; running out of memory is the caller's affair.
    """
    for candidate in (plan,) if plan is not None else _candidates(x, weight, bias, gain):
        try:
            run = _prepare(x, weight, eps, bias, gain, candidate)
            y = run(x, weight, bias, gain)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if plan is not None or candidate == plans.TORCH:
                raise
            _failed.add(_failure(candidate, x, weight))
            reason = str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)
            warnings.warn(
                f"flashnorm_triton: plan {candidate.strategy}/{candidate.form} failed for K = "
                f"{weight.shape[1]}, N = {weight.shape[0]} ({type(error).__name__}: {reason}); "
                "falling back",
                RuntimeWarning,
                stacklevel=4,
            )
        else:
            _keep(key, run)
            return y
    raise AssertionError("the torch plan neither ran nor raised")


def _failure(plan: Plan, x: Tensor, weight: Tensor) -> tuple:
    """What a failed plan is remembered by: another row count must not pay for it again."""
    return plan, x.dtype, weight.shape, x.get_device()


def forget_plans() -> None:
    """Choose plans anew at the next calls: after tuning, or when tables were changed."""
    _ready.clear()
    _failed.clear()


def _traits(vector: Tensor) -> tuple:
    """What a compiled kernel takes for granted of a bias or a gain."""
    stride = vector.stride()
    return vector.shape, vector.dtype, vector.get_device(), vector.data_ptr() & 15, stride


def _keep(key: tuple, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # Keys hold exact shapes; prompts of ever new lengths must not fill the memory.
    if len(_ready) >= _READY_MOST:
        _ready.clear()
    _ready[key] = run
    return run


def _prepare(
    x: Tensor,
    weight: Tensor,
    eps: float,
    bias: Tensor | None,
    gain: Tensor | None,
    plan: Plan,
) -> Callable[..., Tensor]:
    """What runs calls like this one with a plan: callable(x, weight, bias, gain)."""
    # Triton would compile an int eps as a type, or a constant, of its own.
    eps = float(eps)
    if x.numel() == 0 or weight.shape[0] == 0:
        shape = (*x.shape[:-1], weight.shape[0])
        return lambda x, weight, bias, gain: x.new_empty(shape)
    if plan == plans.TORCH:
        return lambda x, weight, bias, gain: reference.norm_linear(x, weight, eps, bias, gain)
    matrix = _matrix(x)
    geometry = launch.Geometry(matrix.shape[0], matrix.stride(0), x.shape[:-1], x.get_device())
    problem = _problem(matrix, weight, bias, gain)
    family = _family(plan, problem, matrix, weight, _contiguous(bias), _contiguous(gain))
    return _around(family.bind(geometry, eps), x, bias, gain)


def _matrix(x: Tensor) -> Tensor:
    """x as (M, K) with a contiguous last dimension; a copy only if its strides cannot say so."""
    matrix = x.reshape(-1, x.shape[-1])
    return matrix if matrix.stride(-1) == 1 or matrix.shape[-1] == 1 else matrix.contiguous()


def _contiguous(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.contiguous()


def _problem(matrix: Tensor, weight: Tensor, bias: Tensor | None, gain: Tensor | None) -> Problem:
    strides = (matrix.stride(0) | weight.stride(0)) * weight.element_size()
    return Problem(
        str(weight.dtype).removeprefix("torch."),
        matrix.shape[0],
        weight.shape[0],
        weight.shape[1],
        bias is not None,
        gain is not None,
        tma=(matrix.data_ptr() | weight.data_ptr() | strides) % 16 == 0,
    )


def _candidates(
    x: Tensor, weight: Tensor, bias: Tensor | None, gain: Tensor | None
) -> Iterator[Plan]:
    """The plans to try for a call, the best first; plain torch is the last resort."""
    if x.is_cuda and x.numel() and weight.shape[0]:
        reason = runtime.triton_unavailable()
        if reason is None:
            problem = _problem(_matrix(x), weight, bias, gain)
            index = x.get_device()
            facts = runtime.device_facts(index)
            chosen = tables.lookup(problem, facts, torch.cuda.get_device_name(index))
            for plan in dict.fromkeys((chosen, plans.choose(problem, facts), plans.UNFUSED)):
                if _failure(plan, x, weight) not in _failed:
                    yield plan
        else:
            warnings.warn(f"flashnorm_triton uses plain torch: {reason}", stacklevel=5)
    yield plans.TORCH


def _family(
    plan: Plan,
    problem: Problem,
    matrix: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gain: Tensor | None,
) -> Any:
    """The compiled kernels of a plan, shared by all row counts that the same code serves."""
    stride = matrix.stride(0)
    key = (
        plan,
        replace(problem, m=0),
        weight.stride(0),
        matrix.get_device(),
        # What Triton specialises on: pointer alignment, and the stride's width and divisibility.
        *(t is not None and t.data_ptr() % 16 for t in (matrix, weight, bias, gain)),
        None if gain is None else gain.dtype,
        (stride % 16 == 0, stride == 1, stride >= 1 << 31),
    )
    family = _families.get(key)
    if family is None:
        made = launch.FAMILIES[plan.form](plan, problem, weight.stride(0))
        family = _families[key] = made
    return family


def _around(
    run: Callable[..., Tensor], x: Tensor, bias: Tensor | None, gain: Tensor | None
) -> Callable[..., Tensor]:
    """``run`` on x's device, whatever the current one, and with operands made contiguous."""
    copies = not x.is_contiguous() or any(
        v is not None and not v.is_contiguous() for v in (bias, gain)
    )
    inner = run
    if copies:

        def inner(x: Tensor, weight: Tensor, bias: Tensor | None, gain: Tensor | None) -> Tensor:
            return run(_matrix(x), weight, _contiguous(bias), _contiguous(gain))

    if not x.is_cuda:
        return inner
    index = x.get_device()

    def on_device(x: Tensor, weight: Tensor, bias: Tensor | None, gain: Tensor | None) -> Tensor:
        if torch._C._cuda_getDevice() == index:
            return inner(x, weight, bias, gain)
        with torch.cuda.device(index):
            return inner(x, weight, bias, gain)

    return on_device


def _rms_norm(x: Tensor, eps: float, gain: Tensor | None) -> Tensor:
    key = (
        x.shape,
        eps,
        x.dtype,
        x.get_device(),
        x.data_ptr() & 15,
        None if x.is_contiguous() else x.stride(),
        None if gain is None else _traits(gain),
    )
    run = _ready.get(key)
    if run is None:
        check_rms_norm(x, eps, gain)
        run = _keep(key, _prepare_rms_norm(x, eps, gain))
    return run(x, gain)


def _prepare_rms_norm(x: Tensor, eps: float, gain: Tensor | None) -> Callable[..., Tensor]:
    eps = float(eps)  # as in _prepare
    on_gpu = x.is_cuda and x.dtype != torch.float64 and runtime.triton_available()
    if not on_gpu or x.numel() == 0:
        return lambda x, gain: reference.rms_norm(x, eps, gain).contiguous()
    matrix = _matrix(x)
    stride, dense_gain = matrix.stride(0), _contiguous(gain)
    key = (
        "rms_norm",
        x.shape[-1],
        x.dtype,
        x.get_device(),
        *(t is not None and t.data_ptr() % 16 for t in (matrix, dense_gain)),
        None if gain is None else gain.dtype,
        (stride % 16 == 0, stride == 1, stride >= 1 << 31),
    )
    family = _families.get(key)
    if family is None:
        family = _families[key] = launch.RmsNorm(x.shape[-1], gain is not None)
    geometry = launch.Geometry(matrix.shape[0], stride, x.shape[:-1], x.get_device())
    norm = family.bind(geometry, eps)
    run = _around(lambda x, _, __, gain: norm(x, gain), x, None, gain)
    return lambda x, gain: run(x, x, None, gain)


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
