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

from flashnorm_triton.models.linears import MODULE_STATE, stand_in_for

_EPS_NAMES = ("variance_epsilon", "eps")
# For a class that keeps its epsilon in its code: tried one by one.
_LITERAL_EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12)
_UNGAINED_SIZE = 64
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class NormTraits:
    """``kind`` is "rms", "layer", "dyt" or "other"; ``convention`` and ``eps`` as the class uses.

    DyT (tanh(alpha * x) * w + b) has no eps. ``size`` is the normalised length K, or None where the
    module does not know it (no gain).
    """

    kind: str
    convention: str
    eps: float | None
    size: int | None


_OTHER = NormTraits("other", "none", None, None)


def is_candidate(module: nn.Module) -> bool:
    """True for a childless module that could be a norm: an epsilon, a DyT's alpha, or the name."""
    if next(module.children(), None) is not None:
        return False
    if "norm" in type(module).__name__.lower() or _alpha(module) is not None:
        return True
    # Something with an epsilon and a matrix is a layer of its own, not a norm of one tensor.
    matrices = any(p is not None and p.dim() > 1 for p in module._parameters.values())
    return bool(_eps_values(module)) and not matrices


def _alpha(module: nn.Module) -> nn.Parameter | None:
    """The one learned number of a DyT, beside a gain."""
    alpha, gain = (module._parameters.get(name) for name in ("alpha", "weight"))
    one = alpha is not None and alpha.numel() == 1
    return alpha if one and gain is not None and gain.dim() == 1 else None


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
        # What else a norm holds, a config for one, may say other things to it than to the next.
        held = tuple(
            (name, id(value))
            for name, value in vars(module).items()
            if name not in plain and name not in MODULE_STATE
        )
        shapes = tuple(
            (n, None if p is None else tuple(p.shape)) for n, p in module._parameters.items()
        )
        told = repr(sorted(plain.items(), key=lambda item: item[0]))
        key = (type(module), shapes, told, held)
        if key not in self._seen:
            self._seen[key] = _probe(module)
        return self._seen[key]


def _probe(module: nn.Module) -> NormTraits:
    parameters = {n: p for n, p in module._parameters.items() if p is not None}
    alpha = _alpha(module)
    if alpha is not None:
        del parameters["alpha"]
    epsilons = _eps_values(module)
    if not epsilons and alpha is None and not any(hasattr(module, name) for name in _EPS_NAMES):
        tried = (_run(module, parameters, None, [eps]) for eps in _LITERAL_EPSILONS)
        return next((traits for traits in tried if traits.kind != "other"), _OTHER)
    return _run(module, parameters, alpha, epsilons)


def _run(
    module: nn.Module,
    parameters: dict[str, nn.Parameter],
    alpha: nn.Parameter | None,
    epsilons: list[float],
) -> NormTraits:
    """Run the class on a stand-in and compare with every formula, for each of the epsilons."""
    has_buffers = any(b is not None for b in module._buffers.values())
    unclear = has_buffers or not (epsilons or alpha is not None)
    if unclear or not set(parameters) <= {"weight", "bias"}:
        return _OTHER
    shapes = {tuple(p.shape) for p in parameters.values()}
    if len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
        return _OTHER
    size = next(iter(shapes))[0] if shapes else _declared_size(module)
    draw = torch.Generator(device="cpu").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device="cpu", dtype=torch.float32)

    stand_in = stand_in_for(module)
    stand_in._parameters = dict.fromkeys(module._parameters)
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        for name in parameters:
            values = random(size).mul_(0.3).add_(0.8)
            stand_in._parameters[name] = nn.Parameter(values, requires_grad=False)
        if alpha is not None:
            values = random(*alpha.shape).abs().add_(0.4)
            stand_in._parameters["alpha"] = nn.Parameter(values, requires_grad=False)
        # One row where eps hardly counts and two where it does, all off centre, so that a norm
        # that subtracts the mean, or adds eps elsewhere, cannot pass for one that does not.
        rows = random(2, 3, size or _UNGAINED_SIZE) + 0.7
        eps_scale = max(epsilons) ** 0.5 if epsilons and max(epsilons) > 0 else 1.0
        rows[:, 1:] *= torch.tensor([eps_scale, 3 * eps_scale]).view(2, 1)
        try:
            with torch.autocast("cpu", enabled=False):
                answer = type(module).forward(stand_in, rows.clone())
        except Exception:
            return _OTHER  # it wants other inputs: not a norm of one tensor
        if not isinstance(answer, Tensor) or answer.shape != rows.shape:
            return _OTHER
        if alpha is not None:
            return _match_dyt(rows, answer, stand_in._parameters, size)
        return _match(rows, answer, stand_in._parameters, epsilons, size)


def _declared_size(module: nn.Module) -> int | None:
    """The length that a norm without parameters was built for, where it keeps it (torch's do)."""
    shape = getattr(module, "normalized_shape", None)
    return shape[0] if isinstance(shape, tuple) and len(shape) == 1 else None


def _match_dyt(
    rows: Tensor, answer: Tensor, parameters: dict[str, nn.Parameter | None], size: int | None
) -> NormTraits:
    expected = torch.tanh(parameters["alpha"].double() * rows.double()) * parameters["weight"]
    if parameters.get("bias") is not None:
        expected = expected + parameters["bias"]
    worst = (answer - expected).abs().amax() / expected.abs().amax()
    return NormTraits("dyt", "w", None, size) if worst <= _TOLERANCE else _OTHER


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
