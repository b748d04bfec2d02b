"""What kind of normalisation a module is: found by running its class, never by its values.

A norm's class is called once on a stand-in of the module: same class and attributes, own random
float32 gain on the CPU. Its answer says which formula the class computes. The module itself, its
weight and the random state are not touched, and a module on the meta device can be asked too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_EPS_NAMES = ("variance_epsilon", "eps")
_UNGAINED_SIZE = 64
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class NormTraits:
    """``kind`` is "rms", "layer" or "other"; ``convention`` and ``eps`` as the class uses them.

    ``size`` is the normalised length K, or None where the module does not know it (no gain).
    """

    kind: str
    convention: str
    eps: float | None
    size: int | None


_OTHER = NormTraits("other", "none", None, None)


def is_candidate(module: nn.Module) -> bool:
    """True for a childless module that could be a norm: it has an epsilon, or is called one."""
    if next(module.children(), None) is not None:
        return False
    return "norm" in type(module).__name__.lower() or bool(_eps_values(module))


def _eps_values(module: nn.Module) -> list[float]:
    values = (getattr(module, name, None) for name in _EPS_NAMES)
    return [float(v) for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]


class NormReader:
    """Reads :class:`NormTraits` off modules, running each distinct kind of module once."""

    def __init__(self) -> None:
        self._seen: dict[Any, NormTraits] = {}

    def read(self, module: nn.Module) -> NormTraits:
        """The traits of one norm; ``kind == "other"`` for whatever is not recognised."""
        plain = {
            name: value
            for name, value in vars(module).items()
            if isinstance(value, (int, float, str, bool, tuple, type(None)))
        }
        plain.pop("training", None)
        shapes = tuple(
            (n, None if p is None else tuple(p.shape)) for n, p in module._parameters.items()
        )
        key = (type(module), shapes, repr(sorted(plain.items(), key=lambda item: item[0])))
        if key not in self._seen:
            self._seen[key] = _probe(module)
        return self._seen[key]


def _probe(module: nn.Module) -> NormTraits:
    parameters = {n: p for n, p in module._parameters.items() if p is not None}
    has_buffers = any(b is not None for b in module._buffers.values())
    epsilons = _eps_values(module)
    if not epsilons or has_buffers or not set(parameters) <= {"weight", "bias"}:
        return _OTHER
    shapes = {tuple(p.shape) for p in parameters.values()}
    if len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
        return _OTHER
    size = next(iter(shapes))[0] if shapes else _declared_size(module)
    draw = torch.Generator(device="cpu").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device="cpu", dtype=torch.float32)

    stand_in = type(module).__new__(type(module))
    stand_in.__dict__.update(vars(module))
    stand_in.__dict__.update(nn.Module().__dict__)
    stand_in.training = False
    stand_in._parameters = dict.fromkeys(module._parameters)
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        for name in parameters:
            values = random(size).mul_(0.3).add_(0.8)
            stand_in._parameters[name] = nn.Parameter(values, requires_grad=False)
        # One row where eps hardly counts and two where it does, all off centre, so that a norm
        # that subtracts the mean, or adds eps elsewhere, cannot pass for one that does not.
        rows = random(2, 3, size or _UNGAINED_SIZE) + 0.7
        eps_scale = max(epsilons) ** 0.5 if max(epsilons) > 0 else 1.0
        rows[:, 1:] *= torch.tensor([eps_scale, 3 * eps_scale]).view(2, 1)
        try:
            with torch.autocast("cpu", enabled=False):
                answer = type(module).forward(stand_in, rows.clone())
        except Exception:
            return _OTHER  # it wants other inputs: not a norm of one tensor
        if not isinstance(answer, Tensor) or answer.shape != rows.shape:
            return _OTHER
        return _match(rows, answer, stand_in._parameters, epsilons, size)


def _declared_size(module: nn.Module) -> int | None:
    """The length that a norm without parameters was built for, where it keeps it (torch's do)."""
    shape = getattr(module, "normalized_shape", None)
    return shape[0] if isinstance(shape, tuple) and len(shape) == 1 else None


def _match(
    rows: Tensor,
    answer: Tensor,
    parameters: dict[str, nn.Parameter | None],
    epsilons: list[float],
    size: int | None,
) -> NormTraits:
    rows, answer = rows.double(), answer.double()
    weight, bias = parameters.get("weight"), parameters.get("bias")
    for kind, x in (("rms", rows), ("layer", rows - rows.mean(-1, keepdim=True))):
        if kind == "rms" and bias is not None:
            continue
        for eps in epsilons:
            unit = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
            conventions = {"none": unit}
            if weight is not None:
                conventions = {"w": unit * weight, "1+w": unit * (1 + weight.double())}
            for convention, expected in conventions.items():
                if bias is not None:
                    expected = expected + bias
                worst = (answer - expected).abs().amax() / expected.abs().amax()
                if worst <= _TOLERANCE:
                    return NormTraits(kind, convention, eps, size)
    return _OTHER
