"""The modules that a patched model has in place of a norm and the linears that read it.

The norm's place emits the packed output of all its linears, from one launch; each linear's place
takes its own columns of it. Data flows as before, from module to module: nothing is kept between
calls, so compilation, graph capture, checkpointing and hand-written layer loops see pure functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flashnorm_triton.models.packed import PackedSite
from flashnorm_triton.ops import norm_linear


class FusedNormLinear(nn.Module):
    """In the norm's place: (..., K) -> (..., N), the packed outputs of every linear of the site.

    ``weight`` is the stock gain (K,), unused in the forward when it is folded into the weights. The
    output has the packed weights' dtype (under autocast, autocast's).

    Raises RuntimeError in a training forward when the gain is folded and the site could learn.
    """

    def __init__(self, site: PackedSite) -> None:
        super().__init__()
        self.site = site
        self.eps = float(site.report.eps)
        self.convention = site.report.convention
        self.folded = site.folded
        self.training = site.norm.training
        if "weight" in site.norm._parameters:
            self._parameters["weight"] = site.gain
        self._buffers = site.buffers
        self._non_persistent_buffers_set.update(site.buffers)
        self._seen = site.generation

    def forward(self, hidden_states: Tensor) -> Tensor:
        buffers = self._buffers
        weight = buffers["packed_weight"]
        if hidden_states.dtype is not weight.dtype:
            hidden_states = _widened(hidden_states, weight)
        if self.folded:
            if self.training:
                self._refuse_to_learn()
            return norm_linear(hidden_states, weight, self.eps, buffers["packed_bias"])
        bias, gain = buffers["packed_bias"], self._parameters.get("weight")
        if self.convention == "1+w":
            gain = 1.0 + gain.float()
        if torch.is_grad_enabled():
            weight, bias = self._joined(weight, "weight"), self._joined(bias, "bias")
        return norm_linear(hidden_states, weight, self.eps, bias, gain)

    @property
    def stock(self) -> nn.Module:
        """The stock norm, which waits outside the model."""
        return self.site.norm

    def _joined(self, packed: Tensor | None, key: str) -> Tensor | None:
        """The packed tensor as a differentiable function of the linears' own parameters."""
        parts = [view.get(key) for view in self.site.views]
        if packed is None or not any(p is not None and p.requires_grad for p in parts):
            return packed
        sizes = [stop - start for start, stop in self.site.columns]
        parts = [
            packed.new_zeros(size) if part is None else part
            for part, size in zip(parts, sizes, strict=True)
        ]
        if torch.compiler.is_compiling():
            return torch.cat(parts)
        return _Joined.apply(packed, sizes, *parts)

    def _refuse_to_learn(self) -> None:
        if not torch.is_grad_enabled():
            return
        if self.site.trainable or any(
            p is not None and p.requires_grad for view in self.site.views for p in view.values()
        ):
            raise RuntimeError(
                f"{self.site.report.norm}: its gain is folded into the weights that follow, which "
                "cannot learn so. Call handle.revert() and patch(model, fold=False) to train, or "
                "model.eval() / torch.no_grad() to run it as it is"
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedNormLinear:
        buffers, self._buffers = self._buffers, {}
        try:
            super()._apply(fn, recurse)
        finally:
            self._buffers = buffers
        self.site.gain = self._parameters.get("weight")
        self._seen = self.site.apply(self._seen, fn)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.site.gain = self._parameters.get("weight")
        if self.folded:
            self.site.rewrite(range(len(self.site.linears)))

    def extra_repr(self) -> str:
        """Class of the norm, sizes and form, for ``print(model)``."""
        weight = self._buffers["packed_weight"]
        form = "folded" if self.folded else "in the kernel"
        return (
            f"{type(self.site.norm).__name__}, {weight.shape[1]} -> {weight.shape[0]}, "
            f"eps={self.eps:g}, gain {self.convention} {form}"
        )


class PackedSlice(nn.Linear):
    """In a linear's place: takes its columns of the packed output (..., N) -> (..., out_features).

    ``weight`` and ``bias`` are views of the packed tensors, under the stock names. When the gain is
    folded, ``weight`` is W·diag(g), while ``state_dict`` and ``load_state_dict`` speak of W.

    Raises ValueError for an input that is not the site's packed output.
    """

    def __init__(self, site: PackedSite, index: int) -> None:
        nn.Module.__init__(self)
        stock = site.linears[index]
        self.in_features, self.out_features = stock.in_features, stock.out_features
        self.training = stock.training
        self.site = site
        self.index = index
        self.start = site.columns[index][0]
        self.width = site.width
        self._parameters = site.views[index]
        self._seen = site.generation

    def forward(self, packed: Tensor) -> Tensor:
        if packed.shape[-1] != self.width:
            raise ValueError(
                f"input of shape {tuple(packed.shape)}: this linear is fused with its norm "
                f"({self.site.report.norm}) and takes that module's packed output, "
                f"{self.width} columns; call handle.revert() to use it on other inputs"
            )
        if self.out_features == self.width:
            return packed
        return packed.narrow(-1, self.start, self.out_features)

    @property
    def stock(self) -> nn.Linear:
        """The stock linear, which waits outside the model."""
        return self.site.linears[self.index]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refused: a parameter of its own would no longer be part of the packed weights."""
        raise RuntimeError(
            f"cannot replace {name!r} of a linear that is packed with its norm "
            f"({self.site.report.norm}): call handle.revert() first"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedSlice:
        self._seen = self.site.apply(self._seen, fn)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self.site.folded:
            self.stock._save_to_state_dict(destination, prefix, keep_vars)
        else:
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        if self.site.folded:
            self.stock._load_from_state_dict(state_dict, prefix, local_metadata, *args)
            self.site.rewrite([self.index])
            return
        # Assigning would take the parameter out of the packed weights: copy into them.
        local_metadata = {**local_metadata, "assign_to_params_buffers": False}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_parameters"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_parameters": state["site"].views[state["index"]]})

    def extra_repr(self) -> str:
        """Sizes and columns, for ``print(model)``."""
        bias = self._parameters.get("bias") is not None
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, "
            f"columns {self.start}:{self.start + self.out_features} of {self.width}"
        )


class _Joined(torch.autograd.Function):
    """Concatenation of tensors that already lie behind one another: no copy, gradients split."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, sizes: list[int], *parts: Tensor) -> Tensor:
        ctx.sizes = sizes
        return packed.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *grad.split(ctx.sizes)


def _widened(hidden_states: Tensor, weight: Tensor) -> Tensor:
    """As stock modules do: a narrower input meets wider weights in the wider dtype."""
    if torch.promote_types(hidden_states.dtype, weight.dtype) == weight.dtype:
        return hidden_states.to(weight.dtype)
    return hidden_states
