"""From a call to what runs it: the plan, its compiled kernels, and both kept for the next call.

In eager decoding the key of a kept call and the launch are the whole host cost of an operation, so
``norm_linear`` and ``rms_norm`` here are flat. Arguments are checked once, when a key is new.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashnorm_triton import block_reference, fallback, launch, plans, reference, runtime, tables
from flashnorm_triton.checks import (
    check_epilogue,
    check_linear,
    check_norm_linear,
    check_rms_norm,
)
from flashnorm_triton.limits import unfit, unserved
from flashnorm_triton.plans import Plan, Problem

_READY_MOST = 4096
# What runs a call, and the CUDA device that must be current for it: -1 where any will do.
_ready: dict[tuple, tuple[Callable[..., Tensor], int]] = {}
_families: dict[tuple, Any] = {}
_failed: set[tuple] = set()
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)


class Epilogue(NamedTuple):
    """What a call asks for beside a bias; a plain call has none of it and passes None instead.

    Without ``normed`` there is no norm, and the product and its bias are multiplied by ``scale``.
    """

    row_sums: Tensor | None = None
    residual: Tensor | None = None
    activation: str | None = None
    gated: bool = False
    normed: bool = True
    scale: float = 1.0

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing to do."""
        rows_wide = all(part is None for part in self[:3])
        return rows_wide and not self.gated and self.normed and self.scale == 1.0


PLAIN = Epilogue()


class Call(NamedTuple):
    """The arguments of one norm_linear."""

    x: Tensor
    weight: Tensor
    eps: float
    bias: Tensor | None
    gain: Tensor | None
    more: Epilogue

    def check(self, same_dtype: bool = True) -> None:
        """Raise TypeError or ValueError unless the arguments go together."""
        x, weight, eps, bias, gain, more = self
        if more.normed:
            check_norm_linear(x, weight, eps, bias, gain, same_dtype)
        else:
            check_linear(x, weight, bias, more.scale, same_dtype)
        check_epilogue(x, weight, *more[:4], same_dtype=same_dtype)

    @property
    def operands(self) -> tuple[Tensor | None, ...]:
        """What runs a call takes these tensors; a plain one has the first four."""
        x, weight, _, bias, gain, more = self
        return (x, weight, bias, gain, *(() if more is PLAIN else more[:2]))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        n = self.weight.shape[0]
        return (*self.x.shape[:-1], n // 2 if self.more.gated else n)

    def problem(self, matrix: Tensor) -> Problem:
        """What a plan has to serve, for x as rows of a ``matrix``."""
        weight, more = self.weight, self.more
        strides = (matrix.stride(0) | weight.stride(0)) * weight.element_size()
        return Problem(
            str(weight.dtype).removeprefix("torch."),
            matrix.shape[0],
            weight.shape[0],
            weight.shape[1],
            self.bias is not None,
            self.gain is not None,
            tma=(matrix.data_ptr() | weight.data_ptr() | strides) % 16 == 0,
            centred=more.row_sums is not None,
            activation=more.activation or "",
            gated=more.gated,
            has_residual=more.residual is not None,
            normed=more.normed,
            scale=float(more.scale),
        )

    def in_torch(self) -> Tensor:
        """The result in plain torch, differentiable in any mode."""
        x, weight, eps, bias, gain, (row_sums, residual, activation, gated, normed, scale) = self
        if not normed:
            return block_reference.linear(x, weight, bias, residual, scale)
        return reference.norm_linear(
            x, weight, eps, bias, gain, centred=row_sums is not None, residual=residual,
            activation=activation, gated=gated,
        )  # fmt: skip


def norm_linear(
    x: Tensor,
    weight: Tensor,
    eps: float,
    bias: Tensor | None,
    gain: Tensor | None,
    more: Epilogue | None = None,
    plan: Plan | None = None,
) -> Tensor:
    """``ops.norm_linear`` without gradients, of tensors that are just that."""
    # All that decides what is run and with which compiled code.
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
        None if more is None else _epilogue_traits(more),
    )
    ready = _ready.get(key)
    if ready is None:
        call = Call(x, weight, eps, bias, gain, more or PLAIN)
        call.check()
        return _first_call(key, call, plan)
    run, index = ready
    if index >= 0 and index != _current_device():
        run = _there(run, index)
    if more is None:
        return run(x, weight, bias, gain)
    return run(x, weight, bias, gain, more.row_sums, more.residual)


def _traits(vector: Tensor) -> tuple:
    """What a compiled kernel takes for granted of a bias or a gain."""
    stride = vector.stride()
    return vector.shape, vector.dtype, vector.get_device(), vector.data_ptr() & 15, stride


def _epilogue_traits(more: Epilogue) -> tuple:
    row_sums, residual, *others = more
    return (
        None if row_sums is None else _traits(row_sums),
        None if residual is None else _traits(residual),
        *others,
    )


def _first_call(key: tuple, call: Call, plan: Plan | None) -> Tensor:
    """Prepare a call, make it, and keep what ran it.

    Unless a plan was asked for by name, one that cannot be built or launched here (a table's plan
    under another Triton, a compiler's fault) gives way to the heuristic's and then to the unfused
    pair, with one warning a reason; running out of memory is the caller's affair.
    """
    told: tuple[Plan, str] | None = None
    for candidate in (plan,) if plan is not None else _candidates(call):
        try:
            run = _prepare(call, candidate)
            with _device_of(call.x):
                y = run(*call.operands)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if plan is not None or candidate == plans.TORCH:
                raise
            _failed.add(_failure(candidate, call))
            told = told or (candidate, fallback.reason_of(error))
        else:
            _keep(key, run, _index(call.x))
            if told is not None:
                _tell(call, *told, candidate)
            return y
    raise AssertionError("the torch plan neither ran nor raised")


def _tell(call: Call, failed: Plan, reason: str, instead: Plan) -> None:
    """One warning a reason, whatever the number of layers that meet it."""
    n, k = call.weight.shape
    fallback.warn_once(
        reason,
        f"plan {failed.strategy}/{failed.form} failed for K = {k}, N = {n} ({reason}); running "
        f"{instead.strategy}/{instead.form} instead, and elsewhere too where it fails so",
        stacklevel=5,
    )


def _failure(plan: Plan, call: Call) -> tuple:
    """What a failed plan is remembered by: another row count must not pay for it again."""
    row_sums, residual, *others = call.more
    epilogue = (row_sums is not None, residual is not None, *others)
    return plan, call.x.dtype, call.weight.shape, call.x.get_device(), epilogue


def forget_plans() -> None:
    """Choose plans anew at the next calls: after tuning, or when tables were changed."""
    _ready.clear()
    _failed.clear()
    fallback.forget()


def _keep(key: tuple, run: Callable[..., Tensor], index: int) -> None:
    # Keys hold exact shapes; prompts of ever new lengths must not fill the memory.
    if len(_ready) >= _READY_MOST:
        _ready.clear()
    _ready[key] = run, index


def _prepare(call: Call, plan: Plan) -> Callable[..., Tensor]:
    """What runs calls like this one with a plan: callable(x, weight, bias, gain[, row_sums,
    residual])."""
    x, weight, eps, bias, gain, (row_sums, residual, *others) = call
    # Triton would compile an int eps as a type, or a constant, of its own.
    eps = float(eps)
    if x.numel() == 0 or weight.shape[0] == 0:
        shape = call.shape
        return lambda x, *_: x.new_empty(shape)
    if plan == plans.TORCH:

        def in_torch(x: Tensor, weight: Tensor, bias: Any, gain: Any, *more: Any) -> Tensor:
            extra = Epilogue(*more[:2], *others) if more else PLAIN
            return Call(x, weight, eps, bias, gain, extra).in_torch()

        return in_torch
    matrix = _matrix(x)
    geometry = launch.Geometry(matrix.shape[0], matrix.stride(0), x.shape[:-1], x.get_device())
    family = _family(plan, call, matrix)
    run = family.bind(geometry, eps)
    dense = all(map(_is_dense, (x, bias, gain, row_sums, residual)))
    return run if dense else _dense(run)


def _matrix(x: Tensor) -> Tensor:
    """x as (M, K) with a contiguous last dimension; a copy only if its strides cannot say so."""
    matrix = x.reshape(-1, x.shape[-1])
    return matrix if matrix.stride(-1) == 1 or matrix.shape[-1] == 1 else matrix.contiguous()


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _is_dense(tensor: Tensor | None) -> bool:
    return tensor is None or tensor.is_contiguous()


def _candidates(call: Call) -> Iterator[Plan]:
    """The plans to try for a call, the best first; plain torch is the last resort."""
    x = call.x
    if fallback.has_kernels(x) and x.numel() and call.weight.shape[0]:
        reason = fallback.unavailable(x)
        if reason is None:
            problem = call.problem(_matrix(x))
            index = x.get_device()
            facts = runtime.device_facts(index)
            chosen = tables.lookup(problem, facts, torch.cuda.get_device_name(index))
            for plan in dict.fromkeys((chosen, plans.choose(problem, facts), plans.UNFUSED)):
                if _failure(plan, call) not in _failed:
                    yield plan
        else:
            fallback.warn_once(reason, f"running plain torch: {reason}", stacklevel=5)
    yield plans.TORCH


def _family(plan: Plan, call: Call, matrix: Tensor) -> Any:
    """The compiled kernels of a plan, shared by all row counts that the same code serves."""
    problem, weight, gain = call.problem(matrix), call.weight, call.gain
    stride = matrix.stride(0)
    operands = (matrix, weight, *map(_contiguous, call.operands[2:]))
    key = (
        plan,
        replace(problem, m=0),
        weight.stride(0),
        matrix.get_device(),
        # What Triton specialises on: pointer alignment, and the stride's width and divisibility.
        *(t is not None and t.data_ptr() % 16 for t in operands),
        None if gain is None else gain.dtype,
        None if call.more.row_sums is None else call.more.row_sums.dtype,
        (stride % 16 == 0, stride == 1, stride >= 1 << 31),
    )
    family = _families.get(key)
    if family is None:
        if obstacle := unserved(plan, problem):
            raise ValueError(f"plan {plan.strategy}/{plan.form} cannot run this call: {obstacle}")
        made = launch.FAMILIES[plan.form](plan, problem, weight.stride(0))
        family = _families[key] = made
    return family


def _dense(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``run`` with x as a matrix and the other operands made contiguous."""

    def copied(x: Tensor, weight: Tensor, *others: Tensor | None) -> Tensor:
        return run(_matrix(x), weight, *map(_contiguous, others))

    return copied


def _index(x: Tensor) -> int:
    """The CUDA device that must be current for launches on x, or -1."""
    return x.get_device() if x.is_cuda else -1


def _device_of(x: Tensor) -> contextlib.AbstractContextManager:
    """A block in which x's device is the current one."""
    return torch.cuda.device(x.get_device()) if x.is_cuda else contextlib.nullcontext()


def on_device(run: Callable[..., Tensor], x: Tensor) -> Callable[..., Tensor]:
    """``run`` on x's device, whatever the current one."""
    return _there(run, x.get_device()) if x.is_cuda else run


def _there(run: Callable[..., Tensor], index: int) -> Callable[..., Tensor]:
    def there(*operands: Any) -> Tensor:
        if _current_device() == index:
            return run(*operands)
        with torch.cuda.device(index):
            return run(*operands)

    return there


def rms_norm(x: Tensor, eps: float, gain: Tensor | None) -> Tensor:
    """``ops.rms_norm`` without gradients, of tensors that are just that."""
    key = (
        x.shape,
        eps,
        x.dtype,
        x.get_device(),
        x.data_ptr() & 15,
        None if x.is_contiguous() else x.stride(),
        None if gain is None else _traits(gain),
    )
    ready = _ready.get(key)
    if ready is None:
        check_rms_norm(x, eps, gain)
        with _device_of(x):
            y, run = fallback.first_call(
                f"the rms_norm kernel for K = {x.shape[-1]}",
                lambda: _prepare_rms_norm(x, eps, gain),
                _rms_norm_in_torch(eps),
                x,
                gain,
            )
        _keep(key, run, _index(x))
        return y
    run, index = ready
    if index >= 0 and index != _current_device():
        run = _there(run, index)
    return run(x, gain)


def _rms_norm_in_torch(eps: float) -> Callable[..., Tensor]:
    return lambda x, gain: reference.rms_norm(x, eps, gain).contiguous()


def _prepare_rms_norm(x: Tensor, eps: float, gain: Tensor | None) -> Callable[..., Tensor]:
    eps = float(eps)  # as in _prepare
    on_gpu = fallback.has_kernels(x) and x.dtype != torch.float64 and x.numel()
    if not on_gpu:
        return _rms_norm_in_torch(eps)
    if reason := fallback.unavailable(x):
        fallback.warn_once(reason, f"running plain torch: {reason}", stacklevel=6)
        return _rms_norm_in_torch(eps)
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
        family = _families[key] = launch.RmsNorm(x.shape[-1], gain is not None, x.dtype)
    geometry = launch.Geometry(matrix.shape[0], stride, x.shape[:-1], x.get_device())
    norm = family.bind(geometry, eps)
    if x.is_contiguous() and _is_dense(gain):
        return norm
    return lambda x, gain: norm(_matrix(x), _contiguous(gain))


def check_forced(plan: Plan, call: Call) -> None:
    """Raise TypeError or ValueError for a plan, asked for by name, that cannot run a call.

    To be called after the call's own checks, or with what may fail them.
    """
    x, weight = call.x, call.weight
    if plan == plans.TORCH:
        return
    if not (x.is_cuda or runtime.interpreting()):
        raise ValueError(
            f"plan {plan.form!r} needs a GPU, but x is on {x.device}; on a CPU use "
            "TRITON_INTERPRET=1 (set before the first import) or no plan"
        )
    if x.dtype == torch.float64:
        raise TypeError(f"plan {plan.form!r} computes in fp32, but x is float64: use no plan")
    if x.is_cuda and x.dim() and weight.dim() == 2 and x.numel() and weight.dtype == x.dtype:
        facts = runtime.device_facts(x.get_device())
        obstacle = unfit(plan, call.problem(_matrix(x)), facts)
        if obstacle is not None:
            raise ValueError(f"plan {plan.strategy}/{plan.form} cannot run this call: {obstacle}")
    tracked = (t is not None and t.requires_grad for t in call.operands)
    if torch.is_grad_enabled() and any(tracked):
        raise ValueError(
            f"plan {plan.form!r} was asked for by name and keeps no gradient: call it under "
            "torch.no_grad(), or without a plan"
        )
