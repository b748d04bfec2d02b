"""The weights of one launch: packed behind one another, seen by name as the stock ones.

The linears that read a norm lie in one matrix (q|k|v, or gate|up). Every linear's parameters are
views into it, so nothing is stored twice on the device. When the norm's gain and bias are folded
in, the stock weights wait in host memory, and are what ``state_dict`` and ``revert`` return.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from flashnorm_triton.algebra import fold, fold_error, move_bias, row_sums
from flashnorm_triton.models.source import NormSource, present

# A healthy float16 fold is off by about 2e-4; beyond this, subnormal values were hit.
_FOLD_ERROR = 5e-4


class PackedWeights:
    """The packed weights (N, K), bias (N,) and row sums (N,) of a norm and linears that read it.

    Shared by the site's modules; ``buffers`` and ``views[i]`` are the very dictionaries in which
    those modules keep them, so all follow when the tensors move. ``folded`` says whether the norm's
    gain and bias are in the weights; a LayerNorm's fold also centres them and keeps their row sums.
    A float16 fold that would leave float16's range is not made (``spoilt``): gain and bias are then
    applied at run time. ``freed``: a fold for good, of which no stock weights are kept.

    Making it takes the weights' own size in device memory and leaves the stock modules alone.
    """

    def __init__(
        self, source: NormSource, linears: list[nn.Module], fold: bool, revertible: bool
    ) -> None:
        self.source = source
        self.linears = linears
        self.columns = _columns(linears)
        self.buffers: dict[str, Tensor | None] = {"packed_weight": None, "packed_bias": None}
        if source.kind == "layer":
            self.buffers["row_sums"] = None
        self.views: list[dict[str, nn.Parameter | None]] = []
        self.generation = 0
        self.freed = False
        self.trainable = False
        self._last_fn: Callable[[], Any] | None = None
        # An RMS norm without a gain has nothing to fold: its weights stay the stock ones.
        self.folded = fold and (source.kind != "rms" or source.has_gain)
        self._pack()
        self.spoilt = self.folded and self._fold_spoils()
        if self.spoilt:
            self.folded = False
            self._pack()
        self._revertible = revertible or not self.folded or not self._can_be_stock()

    @property
    def width(self) -> int:
        """N, the number of packed output columns."""
        return self.columns[-1][1]

    @property
    def nbytes(self) -> int:
        """Bytes of all packed tensors."""
        return sum(tensor.nbytes for tensor in self.buffers.values() if tensor is not None)

    @property
    def scattered(self) -> bool:
        """Whether a weight, as its module has it, no longer lies in the packed ones.

        Whoever swaps parameters (functional_call, sharding, ``.data = ...``) asks nobody.
        """
        packed = self.buffers["packed_weight"]
        place = packed.data_ptr()
        if not place:
            return False  # no memory: on the meta device
        # The views lie one behind another. Every call of eager decoding asks: keep it short.
        for view in self.views:
            weight = view["weight"]
            if type(weight) is not Parameter or weight.data_ptr() != place:
                return True
            place += weight.nbytes
        return False

    @property
    def keeps_stock(self) -> bool:
        """Whether the stock weights wait beside folded ones."""
        return self.folded and not self.freed

    def _moves_bias(self) -> bool:
        return self.folded and self.source.shift() is not None

    def _can_be_stock(self) -> bool:
        """Whether the folded weights fit into the stock modules: a moved bias needs a bias."""
        return not self._moves_bias() or all(linear.bias is not None for linear in self.linears)

    def _pack(self) -> None:
        first = _matrix(self.linears[0])
        if self.buffers["packed_weight"] is None:
            self.buffers["packed_weight"] = first.new_empty((self.width, first.shape[1]))
        with_bias = any(linear.bias is not None for linear in self.linears) or self._moves_bias()
        self.buffers["packed_bias"] = first.new_zeros(self.width) if with_bias else None
        for index in range(len(self.linears)):
            self._write(index)
        self._sum_rows()

    def _write(self, index: int) -> None:
        """Fill the rows of one linear from its stock parameters, wherever those are."""
        linear, (start, stop) = self.linears[index], self.columns[index]
        rows = self.buffers["packed_weight"].detach()[start:stop]
        weight = _matrix(linear).to(rows)
        if not self.folded:
            fold(weight, None, out=rows)
        else:
            fold(weight, self.source.gain(rows), out=rows, centre=self.source.kind == "layer")
        bias = None if linear.bias is None else linear.bias.detach()
        if self._moves_bias():
            bias = move_bias(weight, self.source.shift().detach().to(rows), bias)
        if bias is not None:
            self.buffers["packed_bias"][start:stop].copy_(bias)

    def _sum_rows(self) -> None:
        if "row_sums" in self.buffers and self.folded:
            self.buffers["row_sums"] = row_sums(self.buffers["packed_weight"].detach())

    def _fold_spoils(self) -> bool:
        weight, bias = self.buffers["packed_weight"], self.buffers["packed_bias"]
        if weight.dtype != torch.float16:
            return False
        if bias is not None and not bias.isfinite().all():
            return True
        gain, centre = self.source.gain(weight), self.source.kind == "layer"
        if gain is None and not centre:
            return False
        return any(
            not fold_error(_matrix(linear).to(weight), gain, weight[start:stop], centre=centre)
            <= _FOLD_ERROR
            for linear, (start, stop) in zip(self.linears, self.columns, strict=True)
        )

    def take(self) -> None:
        """Make the packed weights the model's: lend out the linears' parameters.

        Nothing before this call has changed the stock modules.
        """
        # The copies to the host come first: they alone can fail.
        on_host = {}
        if self.folded and self._revertible:
            on_host = {p: p.data.to("cpu") for m in self.linears for p in present(m._parameters)}
        self.freed = self.folded and not self._revertible
        self.trainable = self.source.learns or any(
            p.requires_grad for m in self.linears for p in present(m._parameters)
        )
        for linear, (start, stop) in zip(self.linears, self.columns, strict=True):
            stock = dict(linear._parameters)
            seen = self._slices(start, stop)
            view = stock
            if self.folded:
                view = {
                    key: None if p is None else nn.Parameter(seen[key], requires_grad=False)
                    for key, p in stock.items()
                }
            self.views.append(view)  # before anything moves: what give_back goes by
            for key, parameter in stock.items():
                if parameter is not None and self.keeps_stock:
                    parameter.data = on_host.pop(parameter)
                elif parameter is not None:
                    if not self.freed:
                        parameter.data = seen[key]
                    linear._parameters[key] = None

    def give_back(self) -> None:
        """Undo :meth:`take`: the stock linears hold their own parameters again, bit for bit.

        After a ``take`` that was interrupted, undoes what it had done.
        """
        weight = self.buffers["packed_weight"]
        if weight is None:
            return  # given back already
        self.buffers.update(dict.fromkeys(self.buffers))
        target = weight.new_empty(0)  # says device and dtype without keeping the packed memory
        del weight
        for linear, view in zip(self.linears, self.views, strict=False):
            for key, parameter in view.items():
                if parameter is None:
                    continue
                if self.folded:
                    parameter.data = target
                    _set(linear._parameters, key, linear._parameters[key].data.to(target))
                else:
                    parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
                    linear._parameters[key] = parameter
        self.views.clear()

    def _slices(self, start: int, stop: int) -> dict[str, Tensor | None]:
        bias, weight = self.buffers["packed_bias"], self.buffers["packed_weight"][start:stop]
        return {
            "weight": weight.T if is_transposed(self.linears[0]) else weight,
            "bias": None if bias is None else bias[start:stop],
        }

    def rewrite(self, indices: Iterable[int]) -> None:
        """Fold the stock weights anew, after they, the norm or the dtype changed."""
        with torch.no_grad():
            if self.keeps_stock:
                for index in indices:
                    self._write(index)
            self._sum_rows()
            if self.keeps_stock and self._fold_spoils():
                raise RuntimeError(
                    f"{self.source.name}: with these weights the folded gain leaves float16's "
                    "range: call handle.revert() first, then change the weights and patch again"
                )

    def rest(self, index: int) -> None:
        """Stock weights that were assigned from a device's memory wait on the host like others."""
        parameters = self.linears[index]._parameters
        for key, parameter in parameters.items():
            if parameter is not None and parameter.device.type not in ("cpu", "meta"):
                # Not the object itself: it is the caller's.
                on_host = parameter.data.to("cpu")
                parameters[key] = nn.Parameter(on_host, requires_grad=parameter.requires_grad)

    def norm_loaded(self) -> None:
        """The norm's parameters have changed."""
        if self.freed:
            # The folded weights had neutral ones. A stock checkpoint's apply at run time.
            self.folded = self.source.is_neutral
        self.rewrite(range(len(self.linears)))

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
            if self.keeps_stock:
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


def is_transposed(linear: nn.Module) -> bool:
    """Whether the module keeps its weight as (K, N), as transformers' Conv1D does."""
    return not isinstance(linear, nn.Linear) and hasattr(linear, "nf")


def sizes(linear: nn.Module) -> tuple[int, int]:
    """(K, N) of a linear or a Conv1D."""
    if is_transposed(linear):
        return linear.nx, linear.nf
    return linear.in_features, linear.out_features


def _matrix(linear: nn.Module) -> Tensor:
    """The weight as (N, K)."""
    weight = linear.weight.detach()
    return weight.T if is_transposed(linear) else weight


def _columns(linears: list[nn.Module]) -> list[tuple[int, int]]:
    ranges, start = [], 0
    for linear in linears:
        ranges.append((start, start + sizes(linear)[1]))
        start = ranges[-1][1]
    return ranges


def _set(parameters: dict[str, nn.Parameter | None], key: str, value: Tensor) -> nn.Parameter:
    """Give a parameter another tensor, keeping the object where torch can (not to or from meta)."""
    parameter = parameters[key]
    if torch._has_compatible_shallow_copy_type(parameter, value):
        parameter.data = value
    else:
        parameters[key] = parameter = nn.Parameter(value, requires_grad=parameter.requires_grad)
    return parameter
