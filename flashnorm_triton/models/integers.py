"""Integers that a model decides by, kept real while all else of its double is fake.

How many patches an image has, where its windows begin: some code reads that off a small tensor of
sizes (``grid_thw``) and loops over it. Where such a tensor is given, whatever is computed from
integers alone is computed; what has no memory stays without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils import _pytree

from flashnorm_triton.models import torch_functions as known

_MOST = 1 << 16  # values of a tensor; beyond that it is no table of sizes
_MADE_OF_NUMBERS = {torch.arange, torch.tensor, torch.as_tensor}


def real(make: Callable[[], Tensor]) -> Tensor:
    """What ``make`` returns, with memory behind it, also under a fake tensor mode."""
    with unset_fake_temporarily():
        return make()


def are_real(values: Any) -> bool:
    """Whether an integer tensor with memory is among ``values``."""
    return any(map(is_real, _tensors(values)))


def answer(func: Any, args: tuple[Any, ...], kwargs: dict) -> Any:
    """Call ``func``: for real where all it is given, and all it returns, are integers; else as
    :func:`torch_functions.answer` does, with fake tensors for the real ones."""
    tensors = list(_tensors((args, kwargs)))
    if all(map(is_real, tensors)) and (tensors or func in _MADE_OF_NUMBERS):
        with unset_fake_temporarily():
            result = func(*args, **kwargs)
        if not any(t.is_floating_point() or t.is_complex() for t in _tensors(result)):
            return result
    return known.answer(func, args, kwargs)


def _tensors(values: Any) -> Iterator[Tensor]:
    return (v for v in _pytree.tree_leaves(values) if isinstance(v, Tensor))


def is_real(tensor: Tensor) -> bool:
    """Whether these are a few integers (or truth values) with memory behind them."""
    return (
        not isinstance(tensor, FakeTensor)
        and not tensor.is_meta
        and not tensor.is_floating_point()
        and tensor.numel() <= _MOST
    )
