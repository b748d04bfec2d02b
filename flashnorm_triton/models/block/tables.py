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
    Kept for each thread. A compiled graph makes it where it is used.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._local = threading.local()

    def __call__(self, asker: object, key: Any, *tensors: Tensor) -> Any:
        """``make(key, *tensors)`` for the layer ``asker``."""
        if _is_compiling():
            return self._make(key, *tensors)
        kept = getattr(self._local, "kept", None)
        now = [0 if t.is_inference() else t._version for t in tensors]
        if kept is not None:
            refs, versions, other, made, askers = kept
            # As many versions as tensors.
            same = other == key and versions == now and id(asker) not in askers
            if same and all(ref() is t for ref, t in zip(refs, tensors, strict=False)):
                askers.add(id(asker))
                return made
        made = self._make(key, *tensors)
        refs = [weakref.ref(t) for t in tensors]
        self._local.kept = refs, now, key, made, {id(asker)}
        return made


tables_of = OnceAStep(lambda rope, cos, sin: rewritten(rope, (cos, sin)))
numbers_of = OnceAStep(lambda dtype, mask: attention.numbers(mask, dtype))
factors_of = OnceAStep(lambda key, positions: growth(positions, *key[:2]).to(key[2]))
