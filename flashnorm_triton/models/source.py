"""The norm of a site: its parameters and what they do to the weights that follow it."""

from __future__ import annotations

from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flashnorm_triton.algebra import effective_gain
from flashnorm_triton.models.report import SiteReport


class NormSource:
    """A stock norm whose parameters have been lent to a site.

    ``parameters`` is the very dictionary in which the module in the norm's place keeps them, so
    that moving or loading them there is seen here. ``kind``, ``convention`` and ``eps`` are the
    audit's; a ``"dyt"`` norm is tanh(alpha·x)·gain + bias and has no eps.
    """

    def __init__(self, norm: nn.Module, report: SiteReport) -> None:
        self.norm = norm
        self.name = report.norm
        self.kind = report.kind
        self.convention = report.convention
        self.eps = 0.0 if report.eps is None else float(report.eps)
        self.parameters: dict[str, nn.Parameter | None] = dict(norm._parameters)
        self.recognise()
        self._frozen: set[str] = set()

    @property
    def has_gain(self) -> bool:
        """Whether the norm multiplies by anything."""
        return self.convention != "none" and self.parameters.get("weight") is not None

    def gain(self, like: Tensor | None = None) -> Tensor | None:
        """The factor (K,) in float32 or float64; with the dtype and device of ``like`` first."""
        if not self.has_gain:
            return None
        weight = self.parameters["weight"].detach()
        return effective_gain(weight if like is None else weight.to(like), self.convention)

    def live_gain(self) -> Tensor | None:
        """The factor (K,) as the operations take it, differentiable."""
        weight = self.parameters.get("weight")
        return 1.0 + weight.float() if weight is not None and self.convention == "1+w" else weight

    def shift(self) -> Tensor | None:
        """The bias (K,) that the norm adds after its gain."""
        return self.parameters.get("bias")

    def recognise(self) -> None:
        """Take the parameters that are there for the norm's own, after they have moved."""
        self._own = tuple(self.parameters.values())

    @property
    def swapped(self) -> bool:
        """Whether other parameters stand in for the norm's own (torch.func.functional_call)."""
        # Every call of eager decoding asks: keep it short.
        return not all(map(is_, self.parameters.values(), self._own))

    @property
    def learns(self) -> bool:
        """Whether one of the parameters asks for a gradient, or did before it was frozen."""
        return bool(self._frozen) or any(p.requires_grad for p in present(self.parameters))

    def take(self, freeze: bool) -> None:
        """Leave the stock norm without its parameters; ``freeze`` stops them learning."""
        for key, parameter in self.parameters.items():
            self.norm._parameters[key] = None
            if parameter is not None and freeze and parameter.requires_grad:
                parameter.requires_grad_(False)
                self._frozen.add(key)

    def give_back(self) -> None:
        """Undo :meth:`take`."""
        for key, parameter in self.parameters.items():
            self.norm._parameters[key] = parameter
            if parameter is not None and key in self._frozen:
                parameter.requires_grad_(True)
        self._frozen.clear()

    def neutralise(self) -> None:
        """Make gain and bias do nothing: what they did is in the weights, for good."""
        if self.has_gain:
            self.parameters["weight"].data.fill_(0.0 if self.convention == "1+w" else 1.0)
        if self.shift() is not None:
            self.shift().data.zero_()

    @property
    def is_neutral(self) -> bool:
        """Whether gain and bias do nothing."""
        gain, shift = self.gain(), self.shift()
        return (gain is None or bool((gain == 1).all())) and (shift is None or not shift.any())

    def normalise(self, x: Tensor) -> Tensor:
        """What the stock norm computes, from the current parameters: a LayerNorm or a DyT."""
        gain, shift = self.parameters.get("weight"), self.shift()
        if self.kind == "dyt":
            y = self.squash(x) * gain
            return y if shift is None else y + shift
        if gain is not None and self.convention == "1+w":
            gain = 1.0 + gain
        wide = torch.promote_types(x.dtype, x.dtype if gain is None else gain.dtype)
        return functional.layer_norm(x.to(wide), x.shape[-1:], gain, shift, self.eps)

    def squash(self, x: Tensor) -> Tensor:
        """tanh(alpha·x), the part of a DyT that stays where it is."""
        return torch.tanh(x * self.parameters["alpha"])


def present(parameters: dict[str, Any]) -> list[nn.Parameter]:
    """The parameters that are there, of a module's table of them."""
    return [parameter for parameter in parameters.values() if parameter is not None]
