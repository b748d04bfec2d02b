"""What the torch functions that a model's code calls mean for a tensor that is followed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.nn import functional as F


def _named(owners: tuple[Any, ...], *names: str) -> set[Any]:
    return {getattr(owner, name) for owner in owners for name in names if hasattr(owner, name)}


METADATA = {
    getattr(Tensor, name).__get__
    for name in (
        "dtype",
        "device",
        "layout",
        "ndim",
        "requires_grad",
        "grad_fn",
        "is_leaf",
        "is_cuda",
        "is_cpu",
        "is_meta",
        "is_sparse",
        "is_quantized",
        "is_nested",
        "is_mps",
        "is_xpu",
    )
} | {
    Tensor.dim,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.element_size,
    Tensor.get_device,
    Tensor.is_contiguous,
    Tensor.is_inference,
    Tensor.ndimension,
    torch.is_floating_point,
    torch.is_complex,
    torch.is_grad_enabled,
}
SHAPE = Tensor.shape.__get__

VIEWS = _named(
    (Tensor, torch),
    *("view", "reshape", "contiguous", "clone", "detach", "to", "type", "type_as", "float", "half"),
    *("bfloat16", "double", "unsqueeze", "squeeze", "transpose", "permute", "swapaxes", "flatten"),
    *("unflatten", "expand", "expand_as", "view_as", "reshape_as", "__getitem__", "narrow"),
    *("select", "index_select", "alias", "repeat", "repeat_interleave", "cpu", "cuda"),
)
# Of these, what only reads the elements in their order into another shape.
RESHAPES = _named(
    (Tensor, torch),
    *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "expand_as"),
    *("view_as", "reshape_as", "broadcast_to"),
)
# Through these a module's weight stays its weight, transposed or one expert's part of it.
WEIGHT_VIEWS = (
    VIEWS
    | _named((Tensor, torch), "t", "movedim", "swapdims", "adjoint")
    | {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "data")}
)
# Tensors made in the likeness of another: only its shape is read.
LIKE = _named(
    (Tensor, torch),
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"),
)
# Of these, an argument after the first gives no more than its shape or dtype.
MODELLED_ON = _named((Tensor, torch), "type_as", "to", "expand_as", "view_as", "reshape_as")
PRODUCTS = {F.linear} | _named(
    (Tensor, torch),
    *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "addbmm", "einsum"),
    *("_grouped_mm",),
)
PRODUCTS |= _named((F,), "grouped_mm")
SCALINGS = _named(
    (Tensor, torch),
    *("mul", "__mul__", "__rmul__", "mul_", "__imul__", "multiply", "multiply_"),
    *("div", "__truediv__", "div_", "__itruediv__", "divide", "divide_", "true_divide"),
)
DROPOUTS = {F.dropout, torch.dropout}
_FOUND = 2  # places that a search over unknown data is taken to find
_NUMBERS = {Tensor.__bool__: False, Tensor.__int__: 0, Tensor.__index__: 0, Tensor.__float__: 0.0}
_SEARCHES = {Tensor.nonzero, torch.nonzero, torch.where, torch.argwhere, Tensor.argwhere}
_CHECKS = _named((Tensor, torch), "_is_all_true")
_IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__"}


def name_of(func: Any) -> str:
    """The function's name, for a reader."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        return f"Tensor.{func.__self__.__name__}"
    return name.strip("_")


def writes_in_place(func: Any) -> bool:
    """Whether the function changes its first argument."""
    name = getattr(func, "__name__", "")
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def is_scaling(args: tuple[Any, ...], kwargs: dict) -> bool:
    """Whether one of two factors (the divisor, of a quotient) is a single number."""
    if len(args) != 2 or kwargs:
        return False
    return any(
        isinstance(a, (int, float)) or (isinstance(a, Tensor) and a.dim() == 0) for a in args
    )


def drops_nothing(func: Any, args: tuple[Any, ...], kwargs: dict) -> bool:
    """Whether a call of dropout is the identity."""
    given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
    on = given.get("training", given.get("train", True))
    return not on or given.get("p", 0.5) == 0


def answer(func: Any, args: tuple[Any, ...], kwargs: dict) -> Any:
    """Call ``func``; where the answer depends on data there is not, a plausible one is given.

    A truth value is False, a number 0, and a search (``nonzero``, a mask) finds two places at 0: so
    a loop over the chosen experts passes once, over the first. What torch is asked to check holds.
    Raises what ``func`` raises where no such answer is at hand.
    """
    if func in _CHECKS and isinstance(args[0], FakeTensor):
        return torch.tensor(True)  # a constant, of which the value is known
    try:
        return func(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException):
        if func in _NUMBERS:
            return _NUMBERS[func]
        tensor = args[0]
        if func is Tensor.item:
            return 0.0 if tensor.is_floating_point() else 0
        if func is Tensor.tolist:
            return _zeros(tuple(tensor.shape))
        if func in _SEARCHES:
            as_tuple = kwargs.get("as_tuple", func is torch.where or True in args[1:])
            return _places(tensor) if as_tuple else tensor.new_zeros((_FOUND, tensor.dim())).long()
        if func is Tensor.__getitem__:
            return func(tensor, _without_data(args[1]))
        raise


def _zeros(shape: tuple[int, ...]) -> Any:
    return [_zeros(shape[1:]) for _ in range(shape[0])] if shape else 0


def _places(tensor: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.new_zeros(_FOUND, dtype=torch.long) for _ in range(tensor.dim()))


def _without_data(index: Any) -> Any:
    """An index that needs no data, for one with masks or numbers that are tensors."""
    parts: list[Any] = []
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, Tensor) and part.dtype == torch.bool and part.dim() > 0:
            parts.extend(_places(part))
        else:
            parts.append(0 if isinstance(part, Tensor) and part.dim() == 0 else part)
    return tuple(parts)
