"""The weights of one patched site: packed for one launch, seen by name as the stock ones.

A site's linears lie behind one another in one matrix (q|k|v, or gate|up). Every linear's parameters
are views into it, so nothing is stored twice on the device. When the gain is folded in, the stock
weights wait in host memory, and are what ``state_dict`` and ``revert`` return.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flashnorm_triton.algebra import effective_gain, fold, fold_error
from flashnorm_triton.models.installers import Installer, Options
from flashnorm_triton.models.report import SiteReport

# A healthy float16 fold is off by about 2e-4; beyond this, subnormal values were hit.
_FOLD_ERROR = 5e-4


class PackedSite(Installer):
    """The packed weights (N, K) and bias (N,) of one norm and the linears that read it.

    Shared by the site's modules; ``buffers`` and ``views[i]`` are the very dictionaries in which
    those modules keep them, so all follow when the tensors move. ``folded`` says whether the gain
    is in the weights. A float16 fold that would leave float16's range is not made: the site then
    applies its gain in the kernel.

    Building it takes the site's own size in device memory, and gives the stock weights back.
    """

    def __init__(self, model: nn.Module, report: SiteReport, options: Options) -> None:
        super().__init__(model, report, options)
        folded = options.fold
        self.norm = norm = model.get_submodule(report.norm)
        self.linears = linears = [model.get_submodule(name) for name in report.consumers]
        self.gain: nn.Parameter | None = norm._parameters.get("weight")
        self.columns = _columns(linears)
        self.buffers: dict[str, Tensor | None] = {"packed_weight": None, "packed_bias": None}
        self.views: list[dict[str, nn.Parameter | None]] = []
        self.generation = 0
        self._last_fn: Callable[[], Any] | None = None
        self._pack(folded)
        self.folded = folded and not self._fold_spoils()
        if folded and not self.folded:
            self._pack(folded=False)
            spoilt = "gain applied in the kernel, as folding it would leave float16's range"
            self.report = replace(report, reason=f"{report.reason}; {spoilt}")

    @property
    def width(self) -> int:
        """N, the number of packed output columns."""
        return self.columns[-1][1]

    def _pack(self, folded: bool) -> None:
        first = self.linears[0].weight
        if self.buffers["packed_weight"] is None:
            self.buffers["packed_weight"] = first.new_empty((self.width, first.shape[1]))
            if any(linear.bias is not None for linear in self.linears):
                self.buffers["packed_bias"] = first.new_zeros(self.width)
        for index in range(len(self.linears)):
            self._write(index, folded)

    def _write(self, index: int, folded: bool) -> None:
        """Fill the rows of one linear from its stock parameters, wherever those are."""
        linear, (start, stop) = self.linears[index], self.columns[index]
        weight = self.buffers["packed_weight"]
        rows = weight.detach()[start:stop]
        gain = self._effective_gain() if folded else None
        fold(linear.weight.detach().to(rows), gain, out=rows)
        if linear.bias is not None:
            self.buffers["packed_bias"][start:stop].copy_(linear.bias.detach())

    def _effective_gain(self) -> Tensor | None:
        if self.gain is None:
            return None
        gain = self.gain.detach().to(self.buffers["packed_weight"])
        return effective_gain(gain, self.report.convention)

    def _fold_spoils(self) -> bool:
        weight, gain = self.buffers["packed_weight"], self._effective_gain()
        if weight.dtype != torch.float16 or gain is None:
            return False
        return any(
            not fold_error(linear.weight.detach(), gain, weight[start:stop]) <= _FOLD_ERROR
            for linear, (start, stop) in zip(self.linears, self.columns, strict=True)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights and bias."""
        return sum(tensor.nbytes for tensor in self.buffers.values() if tensor is not None)

    def replacements(self) -> dict[str, nn.Module]:
        """One module in the norm's place, one in each linear's."""
        from flashnorm_triton.models.fused import FusedNormLinear, PackedSlice

        modules: dict[str, nn.Module] = {self.report.norm: FusedNormLinear(self)}
        for index, name in enumerate(self.report.consumers):
            modules[name] = PackedSlice(self, index)
        return modules

    def take(self) -> None:
        """Make the packed weights the model's: lend out the gain and the linears' parameters.

        Nothing before this call has changed the stock modules.
        """
        # The copies to the host come first: they alone can fail.
        if self.folded:
            on_host = {p: p.data.to("cpu") for m in self.linears for p in _present(m._parameters)}
        self.trainable = any(
            p.requires_grad for m in (self.norm, *self.linears) for p in _present(m._parameters)
        )
        self._gain_learns = self.folded and self.gain is not None and self.gain.requires_grad
        if self.gain is not None:
            self.norm._parameters["weight"] = None
            if self._gain_learns:
                self.gain.requires_grad_(False)
        for linear, (start, stop) in zip(self.linears, self.columns, strict=True):
            stock = dict(linear._parameters)
            seen = self._slices(start, stop)
            view = stock
            if self.folded:
                view = {
                    key: None if p is None else nn.Parameter(seen[key], requires_grad=False)
                    for key, p in stock.items()
                }
            for key, parameter in stock.items():
                if parameter is not None and self.folded:
                    parameter.data = on_host.pop(parameter)
                elif parameter is not None:
                    parameter.data = seen[key]
                    linear._parameters[key] = None
            self.views.append(view)

    def give_back(self) -> None:
        """Undo :meth:`take`: the stock modules hold their own parameters again, bit for bit."""
        weight = self.buffers["packed_weight"]
        self.buffers.update(packed_weight=None, packed_bias=None)
        if self.gain is not None:
            self.norm._parameters["weight"] = self.gain
            if self._gain_learns:
                self.gain.requires_grad_(True)
        target = weight.new_empty(0)  # says device and dtype without keeping the packed memory
        del weight
        for linear, view in zip(self.linears, self.views, strict=True):
            for key, parameter in view.items():
                if parameter is None:
                    continue
                if self.folded:
                    parameter.data = target
                    _set(linear._parameters, key, linear._parameters[key].data.to(target))
                else:
                    parameter.data = parameter.data.clone()
                    linear._parameters[key] = parameter
        self.views.clear()

    def _slices(self, start: int, stop: int) -> dict[str, Tensor | None]:
        bias = self.buffers["packed_bias"]
        return {
            "weight": self.buffers["packed_weight"][start:stop],
            "bias": None if bias is None else bias[start:stop],
        }

    def rewrite(self, indices: Iterable[int]) -> None:
        """Fold the stock weights anew, after they, the gain or the dtype changed."""
        with torch.no_grad():
            for index in indices:
                self._write(index, folded=True)
            if self._fold_spoils():
                raise RuntimeError(
                    f"{self.report.norm}: with these weights the folded gain leaves float16's "
                    "range: call handle.revert() first, then change the weights and patch again"
                )

    def apply(self, seen: int, fn: Callable[[Tensor], Tensor]) -> int:
        """``nn.Module._apply`` for the shared tensors: once, however many modules pass it on.

        ``seen`` is the generation that the calling module knows; returns the one to remember. The
        first module to come with a new ``fn`` moves the tensors, the others find them moved.
        """
        last = self._last_fn() if self._last_fn is not None else None
        if last is not fn or seen == self.generation:
            self._move(fn)
            self.generation += 1
            self._last_fn = weakref.ref(fn)
        return self.generation

    def _move(self, fn: Callable[[Tensor], Tensor]) -> None:
        before = self.buffers["packed_weight"].dtype
        with torch.no_grad():
            for key, tensor in self.buffers.items():
                if tensor is not None:
                    self.buffers[key] = fn(tensor)
        for view, (start, stop) in zip(self.views, self.columns, strict=True):
            seen = self._slices(start, stop)
            for key, parameter in view.items():
                if parameter is not None:
                    grad, parameter.grad = parameter.grad, None
                    parameter = _set(view, key, seen[key])
                    parameter.grad = None if grad is None else fn(grad)
        after = self.buffers["packed_weight"].dtype
        if self.folded and after != before:
            for linear in self.linears:
                for key, parameter in linear._parameters.items():
                    if parameter is not None:
                        _set(linear._parameters, key, parameter.data.to(after))
            # Folding anew from the stock weights rounds once, in the new dtype.
            self.rewrite(range(len(self.linears)))

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self), _last_fn=None)
        state["views"] = [
            {key: None if p is None else p.requires_grad for key, p in view.items()}
            for view in self.views
        ]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.views = [
            {
                key: None if learns is None else nn.Parameter(seen, requires_grad=learns)
                for (key, learns), seen in zip(
                    view.items(), map(self._slices(*columns).get, view), strict=True
                )
            }
            for view, columns in zip(state["views"], self.columns, strict=True)
        ]


def _columns(linears: list[nn.Linear]) -> list[tuple[int, int]]:
    ranges, start = [], 0
    for linear in linears:
        ranges.append((start, start + linear.out_features))
        start += linear.out_features
    return ranges


def _set(parameters: dict[str, nn.Parameter | None], key: str, value: Tensor) -> nn.Parameter:
    """Give a parameter another tensor, keeping the object where torch can (not to or from meta)."""
    parameter = parameters[key]
    if torch._has_compatible_shallow_copy_type(parameter, value):
        parameter.data = value
    else:
        parameters[key] = parameter = nn.Parameter(value, requires_grad=parameter.requires_grad)
    return parameter


def _present(parameters: dict[str, nn.Parameter | None]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters.values() if parameter is not None]
