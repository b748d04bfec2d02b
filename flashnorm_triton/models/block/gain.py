"""The gain of a norm that a block applies itself, in the place of the norm's module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashnorm_triton.algebra import effective_gain
from flashnorm_triton.models.block.spec import NormUse


class Gain:
    """An RMS norm's eps and gain, read off the norm's module at every call."""

    def __init__(self, layer: nn.Module, norm: NormUse) -> None:
        self.module = layer.get_submodule(norm.path)
        self.eps = norm.eps
        self.one_plus = norm.convention == "1+w"
        self.ungained = norm.convention == "none"
        self._kept: tuple[Any, Tensor] | None = None

    @property
    def weight(self) -> Tensor | None:
        """The norm's parameter (K,) as it is."""
        return None if self.ungained else self.module._parameters["weight"]

    def effective(self) -> Tensor | None:
        """The factor (K,): the parameter, or 1 + it in fp32, kept while it is not written to."""
        weight = self.weight
        if weight is None or not self.one_plus:
            return weight
        if torch.compiler.is_compiling():
            return effective_gain(weight, "1+w")
        state = weight.data_ptr(), weight.dtype, weight.device
        if not weight.is_inference():
            state = (*state, weight._version)
            if self._kept is not None and self._kept[0] == state:
                return self._kept[1]
        gain = effective_gain(weight.detach(), "1+w")
        # What a graph capture computes exists only after a replay: not for other calls to read.
        if len(state) > 3 and not (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._kept = state, gain
        return gain

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_kept": None}
