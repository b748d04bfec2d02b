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
from torch.nn import functional

from flashnorm_triton.models.adapters import AskedBy
from flashnorm_triton.models.packed import PackedSite
from flashnorm_triton.models.placement import own_attributes
from flashnorm_triton.models.source import NormSource
from flashnorm_triton.models.weights import PackedWeights, is_transposed, sizes
from flashnorm_triton.ops import norm_linear
from flashnorm_triton.transforms import transformed


def apply_folded(
    x: Tensor, source: NormSource, weight: Tensor, buffers: dict[str, Tensor | None]
) -> Tensor:
    """Norm and linear of ``x`` (..., K) where the gain and the bias are in the weight (N, K)."""
    x = widened(x, weight)
    if source.kind == "rms":
        return norm_linear(x, weight, source.eps, buffers["packed_bias"])
    if source.kind == "layer":
        sums = buffers["row_sums"]
        return norm_linear(x, weight, source.eps, buffers["packed_bias"], row_sums=sums)
    return functional.linear(source.squash(x), weight, buffers["packed_bias"])


def apply_unfolded(x: Tensor, source: NormSource, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Norm and linear of ``x`` (..., K) with the stock parameters, all of them differentiable.

    An RMS norm's gain goes into the launch. A LayerNorm's row sums and moved bias would have to be
    made anew whenever a weight changes, and these weights may learn: torch's own one-launch
    LayerNorm runs before the packed matmul instead; so does a DyT.
    """
    x = widened(x, weight)
    if source.kind != "rms":
        return functional.linear(source.normalise(x), weight, bias)
    return norm_linear(x, weight, source.eps, bias, source.live_gain())


def refuse_to_learn(site: PackedWeights) -> None:
    """Raise RuntimeError in a training forward of folded weights that could learn."""
    if not torch.is_grad_enabled():
        return
    if site.trainable or any(
        p is not None and p.requires_grad for view in site.views for p in view.values()
    ):
        remedy = "load the model again" if site.freed else "Call handle.revert()"
        raise RuntimeError(
            f"{site.source.name}: its gain is folded into the weights that follow, which "
            f"cannot learn so. {remedy} and patch(model, fold=False) to train, or "
            "model.eval() / torch.no_grad() to run it as it is"
        )


def refuse_others(site: PackedWeights) -> None:
    """Raise RuntimeError: the parameters by name are not the folded weights any more."""
    raise RuntimeError(
        f"{site.source.name}: its weight or one after it has been given other memory "
        "(functional_call, sharding, .data = ...), which the folded weights know nothing of. Call "
        "handle.revert() first and patch(model, fold=False), which computes with such weights"
    )


class FusedNormLinear(nn.Module):
    """In the norm's place: (..., K) -> (..., N), the packed outputs of every linear of the site.

    ``weight`` (and a LayerNorm's ``bias``) are the stock norm's (K,), unused in the forward when
    they are folded into the weights. The output has the packed weights' dtype (under autocast,
    autocast's).

    Raises RuntimeError in a training forward when the gain is folded and the site could learn.
    """

    def __init__(self, site: PackedSite) -> None:
        super().__init__()
        vars(self).update(own_attributes(site.norm))
        self.site = site
        self.eps = site.source.eps
        self.convention = site.source.convention
        self.training = site.norm.training
        self._parameters = site.source.parameters
        self._buffers = site.buffers
        self._non_persistent_buffers_set.update(site.buffers)
        self._seen = site.generation

    @property
    def folded(self) -> bool:
        """Whether the gain is in the packed weights."""
        return self.site.folded

    def forward(self, hidden_states: Tensor) -> Tensor:
        buffers, site = self._buffers, self.site
        weight = buffers["packed_weight"]
        # A compiled graph has its own guards, and its parameters are joined in the graph.
        scattered = not torch.compiler.is_compiling() and site.scattered
        if site.folded:
            if self.training:
                refuse_to_learn(site)
            # Export puts stand-ins of its own in the parameters' places.
            if scattered or (site.source.swapped and not torch.compiler.is_exporting()):
                refuse_others(site)
            return apply_folded(hidden_states, site.source, weight, buffers)
        bias = buffers["packed_bias"]
        if scattered or torch.is_grad_enabled():
            weight = self._joined(weight, "weight", scattered)
            bias = self._joined(bias, "bias", scattered)
        return apply_unfolded(hidden_states, site.source, weight, bias)

    @property
    def stock(self) -> nn.Module:
        """The stock norm, which waits outside the model."""
        return self.site.norm

    def _joined(self, packed: Tensor | None, key: str, scattered: bool) -> Tensor | None:
        """The packed tensor as a differentiable function of the linears' own parameters.

        ``scattered``: those lie elsewhere, and are what counts.
        """
        parts = [view.get(key) for view in self.site.views]
        learn = any(p is not None and p.requires_grad for p in parts)
        if packed is None or not (learn or scattered):
            return packed
        rows = [stop - start for start, stop in self.site.columns]
        parts = [
            packed.new_zeros(size) if part is None else part
            for part, size in zip(parts, rows, strict=True)
        ]
        if key == "weight" and is_transposed(self.site.linears[0]):
            parts = [part.T for part in parts]
        if scattered or torch.compiler.is_compiling() or transformed():
            return torch.cat(parts)
        return _Joined.apply(packed, rows, *parts)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedNormLinear:
        buffers, self._buffers = self._buffers, {}
        try:
            super()._apply(fn, recurse)
        finally:
            self._buffers = buffers
        self.site.source.recognise()
        self._seen = self.site.apply(self._seen, fn)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.site.source.recognise()
        self.site.norm_loaded()

    def extra_repr(self) -> str:
        """Class of the norm, sizes and form, for ``print(model)``."""
        weight = self._buffers["packed_weight"]
        form = "folded" if self.folded else "in the kernel"
        return (
            f"{type(self.site.norm).__name__}, {weight.shape[1]} -> {weight.shape[0]}, "
            f"eps={self.eps:g}, gain {self.convention} {form}"
        )


class Replacing:
    """What stands in a linear's place: parameters that are views of packed ones, by stock names.

    When the gain is folded, ``weight`` is W·diag(g), while ``state_dict`` and ``load_state_dict``
    speak of W. For a module class that comes after it in the order of bases.
    """

    def _stand_in(self, weights: PackedWeights, index: int) -> None:
        stock = weights.linears[index]
        vars(self).update(own_attributes(stock))
        self.training = stock.training
        self.weights = weights
        self.index = index
        self._parameters = weights.views[index]
        self._seen = weights.generation

    @property
    def stock(self) -> nn.Module:
        """The stock linear, which waits outside the model."""
        return self.weights.linears[self.index]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refused: a parameter of its own would no longer be part of the packed weights."""
        raise RuntimeError(
            f"cannot replace {name!r} of a linear that is packed with its norm "
            f"({self.weights.source.name}): call handle.revert() first"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        self._seen = self.weights.apply(self._seen, fn)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self.weights.keeps_stock:
            self.stock._save_to_state_dict(destination, prefix, keep_vars)
        else:
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        if self.weights.keeps_stock:
            self.stock._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        else:
            # Assigning would take the parameter out of the packed weights: copy into them.
            local_metadata = {**local_metadata, "assign_to_params_buffers": False}
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        if self.weights.folded:
            self.weights.rewrite([self.index])
            self.weights.rest(self.index)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_parameters"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        views = state["weights"].views
        super().__setstate__({**state, "_parameters": views[state["index"]]})


class Columns(Replacing):
    """Takes its columns of the packed output (..., N) -> (..., out_features).

    Raises ValueError for an input that is not the site's packed output.
    """

    def __init__(self, site: PackedSite, index: int) -> None:
        nn.Module.__init__(self)
        self._stand_in(site, index)
        self.site = site
        self.start, stop = site.columns[index]
        self.size = stop - self.start
        self.width = site.width

    def forward(self, packed: Tensor) -> Tensor:
        if packed.shape[-1] != self.width:
            raise ValueError(
                f"input of shape {tuple(packed.shape)}: this linear is fused with its norm "
                f"({self.site.report.norm}) and takes that module's packed output, "
                f"{self.width} columns; call handle.revert() to use it on other inputs"
            )
        if self.size == self.width:
            return packed
        return packed.narrow(-1, self.start, self.size)

    def extra_repr(self) -> str:
        """Sizes and columns, for ``print(model)``."""
        bias = self._parameters.get("bias") is not None
        return (
            f"in_features={sizes(self.stock)[0]}, out_features={self.size}, bias={bias}, "
            f"columns {self.start}:{self.start + self.size} of {self.width}"
        )


class PackedSlice(Columns, nn.Linear):
    """The columns of one ``nn.Linear``."""

    in_features = AskedBy()


def packed_slice(site: PackedSite, index: int) -> nn.Module:
    """What stands in the place of the site's linear number ``index``."""
    if is_transposed(site.linears[index]):
        # transformers is there, since the model has a Conv1D; without it nothing needs it.
        from flashnorm_triton.models.conv1d import PackedConv1D

        return PackedConv1D(site, index)
    return PackedSlice(site, index)


class _Joined(torch.autograd.Function):
    """Concatenation of tensors that already lie behind one another: no copy, gradients split."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, sizes: list[int], *parts: Tensor) -> Tensor:
        ctx.sizes = sizes
        return packed.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *grad.split(ctx.sizes)


def widened(hidden_states: Tensor, weight: Tensor) -> Tensor:
    """As stock modules do: a narrower input meets wider weights in the wider dtype."""
    if hidden_states.dtype is weight.dtype:
        return hidden_states
    if torch.promote_types(hidden_states.dtype, weight.dtype) == weight.dtype:
        return hidden_states.to(weight.dtype)
    return hidden_states
