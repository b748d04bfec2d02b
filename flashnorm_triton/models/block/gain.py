"""The gain of a norm that a block applies itself, in the place of the norm's module."""

from __future__ import annotations

from torch import Tensor, nn

from flashnorm_triton.models.block.spec import NormUse


class Gain:
    """An RMS norm's eps and gain, read off the norm's module at every call."""

    def __init__(self, layer: nn.Module, norm: NormUse) -> None:
        self.module = layer.get_submodule(norm.path)
        self.eps = norm.eps
        self.one_plus = norm.convention == "1+w"
        self.ungained = norm.convention == "none"

    @property
    def weight(self) -> Tensor | None:
        """The norm's parameter (K,) as it is; its gain is 1 + that if ``one_plus``."""
        return None if self.ungained else self.module._parameters["weight"]
