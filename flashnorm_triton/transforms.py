"""torch.func over the operations: which calls its transforms take over, and how ``vmap`` batches.

``grad``, ``vjp`` and ``jvp`` need operations that torch can take apart, to any order and in any
nesting; a registered operation is not one of these. Such calls are computed with torch's own
operations. Under ``vmap`` alone a batch of x is just more rows, and stays one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_is_compiling = torch.compiler.is_compiling
_level = torch._C._functorch.maybe_current_level
_levels = torch._C._functorch.get_interpreter_stack
_VMAP = torch._C._functorch.TransformType.Vmap
_X, _RESIDUAL = 0, 6


def differentiated() -> bool:
    """Whether forward-mode gradients, or any of torch.func's, may be wanted of what is called."""
    if _is_compiling():
        return _compiled_under_gradients()
    return forward_ad._current_level >= 0 or _under_gradients()


def transformed() -> bool:
    """Whether one of torch.func's transforms is at work: tensors may then be without memory."""
    return _level() is not None


def _under_gradients() -> bool:
    return transformed() and any(level.key() != _VMAP for level in _levels())


# The transforms around a call are the same at every run of what is compiled: torch guards them.
_compiled_under_gradients = torch.compiler.assume_constant_result(_under_gradients)


def batched_norm_linear(info: Any, dims: tuple, *args: Any) -> tuple[Tensor, int]:
    """The rule of ``vmap`` for norm_linear; ``dims`` says which dimension of each is the batch."""
    op, many = torch.ops.flashnorm.norm_linear, info.batch_size
    rows = (_X, _RESIDUAL)
    if dims[_X] is None or any(d is not None for i, d in enumerate(dims) if i not in rows):
        return _one_by_one(op, many, dims, args)
    args = [part if dim is None else part.movedim(dim, 0) for part, dim in _paired(args, dims)]
    if len(args) > _RESIDUAL and args[_RESIDUAL] is not None and dims[_RESIDUAL] is None:
        args[_RESIDUAL] = args[_RESIDUAL].expand(many, *args[_RESIDUAL].shape)
    return op(*args), 0


def batched_rms_norm(info: Any, dims: tuple, *args: Any) -> tuple[Tensor, int]:
    """The rule of ``vmap`` for rms_norm."""
    op, (x, eps, gain) = torch.ops.flashnorm.rms_norm, args
    if dims[_X] is None or dims[2] is not None:
        return _one_by_one(op, info.batch_size, dims, args)
    return op(x.movedim(dims[_X], 0), eps, gain), 0


def _one_by_one(op: Any, many: int, dims: tuple, args: tuple) -> tuple[Tensor, int]:
    """Other weights for each: a call for each."""
    calls = (
        [part if dim is None else part.select(dim, index) for part, dim in _paired(args, dims)]
        for index in range(many)
    )
    return torch.stack([op(*call) for call in calls]), 0


def _paired(args: Sequence[Any], dims: tuple) -> list[tuple[Any, int | None]]:
    # torch leaves out trailing arguments that have their default.
    return list(zip(args, dims[: len(args)], strict=True))
