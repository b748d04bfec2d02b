"""The modules of a passthrough site: a norm's place that does nothing, linears that normalise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flashnorm_triton.models.adapters import AskedBy
from flashnorm_triton.models.fused import (
    Replacing,
    apply_folded,
    apply_unfolded,
    refuse_others,
    refuse_to_learn,
    widened,
)
from flashnorm_triton.models.passthrough import PassthroughSite
from flashnorm_triton.models.placement import own_attributes
from flashnorm_triton.models.weights import is_transposed
from flashnorm_triton.ops import norm_linear


class PassedThrough(nn.Module):
    """In the norm's place: returns its input itself. Holds the norm's parameters by stock names."""

    def __init__(self, site: PassthroughSite) -> None:
        super().__init__()
        vars(self).update(own_attributes(site.norm))
        self.site = site
        self.training = site.norm.training
        self._parameters = site.source.parameters

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    @property
    def stock(self) -> nn.Module:
        """The stock norm, which waits outside the model."""
        return self.site.norm

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.site.source.recognise()
        self.site.norm_loaded()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PassedThrough:
        super()._apply(fn, recurse)
        self.site.source.recognise()
        return self

    def extra_repr(self) -> str:
        """Class of the norm and who does its work, for ``print(model)``."""
        return f"{type(self.site.norm).__name__}, done by {', '.join(self.site.report.consumers)}"


class Normalising(Replacing):
    """norm and linear of x (..., K) -> (..., out_features), with the gain folded into ``weight``.

    Raises RuntimeError in a training forward when the site could learn.
    """

    def __init__(self, site: PassthroughSite, index: int) -> None:
        nn.Module.__init__(self)
        self._stand_in(site.parts[index], 0)
        self.site = site
        self._buffers = self.weights.buffers
        self._non_persistent_buffers_set.update(self._buffers)

    def forward(self, hidden_states: Tensor) -> Tensor:
        buffers, weights = self._buffers, self.weights
        weight = buffers["packed_weight"]
        if not torch.compiler.is_compiling() and (
            weights.scattered or (weights.folded and weights.source.swapped)
        ):
            refuse_others(weights)
        if weights.folded:
            if self.training:
                refuse_to_learn(weights)
            return apply_folded(hidden_states, weights.source, weight, buffers)
        return apply_unfolded(hidden_states, weights.source, weight, buffers["packed_bias"])


class NormedLinear(Normalising, nn.Linear):
    """An ``nn.Linear`` that normalises its input, the gain in its own weights."""

    in_features = AskedBy()


class GainedLinear(nn.Linear):
    """An ``nn.Linear`` that normalises its input; the gain stays the norm's, applied in the kernel.

    Its parameters are the stock linear's own, shared with whatever else shares them.

    Raises RuntimeError in a training forward after a LayerNorm, whose row sums are kept.
    """

    in_features = AskedBy()

    def __init__(self, site: PassthroughSite, index: int) -> None:
        nn.Module.__init__(self)
        stock = site.linears[index]
        vars(self).update(own_attributes(stock))
        self.site = site
        self.index = index
        self.training = stock.training
        self._parameters = stock._parameters
        self._buffers = site.derived[index]
        self._non_persistent_buffers_set.update(self._buffers)

    def forward(self, hidden_states: Tensor) -> Tensor:
        source, weight = self.site.source, self.weight
        if source.kind == "rms":
            return apply_unfolded(hidden_states, source, weight, self.bias)
        if not torch.compiler.is_compiling() and self.site.swapped(self.index):
            x = source.normalise(widened(hidden_states, weight))
            return functional.linear(x, weight, self.bias)
        if self.training and self.site.trainable and torch.is_grad_enabled():
            raise RuntimeError(
                f"{source.name}: the row sums of the weights that follow it are kept, which cannot "
                "learn so. Call handle.revert() and patch(model, fold=False) to train, or "
                "model.eval() / torch.no_grad() to run it as it is"
            )
        x, buffers = widened(hidden_states, weight), self._buffers
        gain, sums = source.live_gain(), buffers["row_sums"]
        return norm_linear(x, weight, source.eps, buffers["moved_bias"], gain, row_sums=sums)

    @property
    def stock(self) -> nn.Linear:
        """The stock linear, which waits outside the model."""
        return self.site.linears[self.index]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GainedLinear:
        super()._apply(fn, recurse)
        self._derive()
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._derive()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refused for a sharded or quantized parameter, which the fused operation cannot take."""
        if param is not None and type(param) is not nn.Parameter:
            raise RuntimeError(
                f"cannot make {name!r} of a linear that is fused with its norm "
                f"({self.site.report.norm}) a {type(param).__name__}: call handle.revert() first"
            )
        super().register_parameter(name, param)
        if param is not None:
            self._derive()

    def _derive(self) -> None:
        with torch.no_grad():
            self.site.derive(self.index)

    def extra_repr(self) -> str:
        """Sizes and the norm, for ``print(model)``."""
        return f"{super().extra_repr()}, after {self.site.report.norm}"


def normed_linear(site: PassthroughSite, index: int) -> nn.Module:
    """What stands in the place of the site's linear number ``index``."""
    if not site.folded:
        return GainedLinear(site, index)
    if is_transposed(site.linears[index]):
        from flashnorm_triton.models.conv1d import NormedConv1D

        return NormedConv1D(site, index)
    return NormedLinear(site, index)
