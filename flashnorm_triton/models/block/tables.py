"""The tables that a block turns its heads by, made of the model's own once a step.

Models write the same rotation in several ways. The launch knows two: partners half a width apart,
or neighbours, and tables as wide as what is turned. Others are rewritten: of tables whose halves
are equal GLM, Helium and Ernie 4.5 take the first and repeat each of its columns for two
neighbours; GPT-OSS has one half only. All layers of a step are given the same tables, so that the
first of them rewrites them for the rest.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashnorm_triton import attention

# By name: whether partners are neighbours, and what the model's cosines and sines are made into.
ROPES: dict[str, tuple[bool, Callable[[Tensor], Tensor] | None]] = {
    "half": (False, None),
    "interleaved": (True, None),
    "neighbours": (True, lambda table: _repeated(table[..., : table.shape[-1] // 2])),
    "doubled": (False, lambda table: torch.cat((table, table), -1)),
}
_is_compiling = torch.compiler.is_compiling


def _repeated(table: Tensor) -> Tensor:
    return torch.stack((table, table), -1).flatten(-2)


def rewritten(rope: str, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """(cos, sin) as ``rotary_heads`` takes them, of the model's own (1 or B, T, R)."""
    make = ROPES[rope][1]
    return tuple(angles) if make is None else tuple(make(table) for table in angles)


def growth(positions: Tensor, beta: float, period: float) -> Tensor:
    """1 + beta · log(1 + floor(position / period)), (B, 1, T, 1): what the queries of Ministral 3
    are multiplied with after their rotation."""
    return (1 + beta * torch.log(1 + torch.floor(positions / period)))[:, None, :, None]


class OnceAStep:
    """``make`` of tensors that every layer of a step is given: done by the layer that comes first.

    What was made is used again for the very same tensors, unchanged, and only once by each asker:
    who asks for the second time is in another step, whatever has become of the tensors meanwhile.
    Layers of two kinds may take turns with tensors of their own. Kept for each thread, no longer
    than the tensors live. A compiled graph makes it where it is used.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._local = threading.local()

    def __call__(self, asker: object, key: Any, *tensors: Tensor) -> Any:
        """``make(key, *tensors)`` for the layer ``asker``."""
        if _is_compiling():
            return self._make(key, *tensors)
        step = getattr(self._local, "step", None)
        if step is None or id(asker) in step[0]:
            step = self._local.step = set(), {}
        askers, kept = step
        askers.add(id(asker))
        now = [0 if t.is_inference() else t._version for t in tensors]
        name = (key, *map(id, tensors))
        found = kept.get(name)
        if found is not None:
            refs, versions, made = found
            # As many references as tensors.
            if versions == now and all(r() is t for r, t in zip(refs, tensors, strict=False)):
                return made
        made = self._make(key, *tensors)
        if not any(made is t for t in tensors):  # else it would keep itself alive
            refs = [weakref.ref(t, lambda _: kept.pop(name, None)) for t in tensors]
            kept[name] = refs, now, made
        return made


tables_of = OnceAStep(lambda rope, cos, sin: rewritten(rope, (cos, sin)))
numbers_of = OnceAStep(lambda dtype, mask: attention.numbers(mask, dtype))
factors_of = OnceAStep(lambda key, positions: growth(positions, *key[:2]).to(key[2]))
