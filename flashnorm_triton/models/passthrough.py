"""The passthrough form: the norm's place returns its input, every linear normalises for itself.

Used where a packed tensor cannot travel between the modules: its shape is looked at, it is also the
model's output, or a linear's weight belongs to another module too (a tied head). Every linear is
one launch, norm included.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flashnorm_triton.algebra import move_bias, row_sums
from flashnorm_triton.models.installers import Declined, Installer, Options
from flashnorm_triton.models.packed import SPOILT
from flashnorm_triton.models.report import SiteReport
from flashnorm_triton.models.source import NormSource
from flashnorm_triton.models.weights import PackedWeights, is_transposed, sizes
from flashnorm_triton.ops import rms_norm


class NormedOutputs:
    """A forward hook of the whole model: the last of its hidden states is the normed one.

    Next to nothing unless ``output_hidden_states`` was asked for; without names
    (``return_dict=False``) the first tuple of (batch, tokens, K) tensors is taken for them: the
    decoder's come before the encoder's.

    Raises RuntimeError where something else has been put in the place of a linear that normalises
    (``resize_token_embeddings`` makes a new head): nothing would apply the norm then.
    """

    def __init__(self, site: PassthroughSite) -> None:
        self.site = site

    def __call__(self, model: nn.Module, args: Any, output: Any) -> Any:
        if not torch.compiler.is_compiling():
            self._check(model)
        if not self.site.report.outputs:
            return output
        if isinstance(output, tuple):
            place = next((i for i, part in enumerate(output) if self._are_states(part)), None)
            if place is None:
                return output
            return (*output[:place], self._normed(output[place]), *output[place + 1 :])
        for name in self.site.report.outputs:
            states = getattr(output, name, None)
            if isinstance(states, tuple) and states:
                setattr(output, name, self._normed(states))
        return output

    def _normed(self, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        source, x = self.site.source, states[-1]
        if source.kind == "rms":
            normed = rms_norm(x, source.eps, source.live_gain())
        else:
            normed = source.normalise(x)
        return (*states[:-1], normed)

    def _are_states(self, part: Any) -> bool:
        size = sizes(self.site.linears[0])[0]
        return (
            isinstance(part, tuple)
            and bool(part)
            and all(isinstance(t, Tensor) and t.dim() == 3 and t.shape[-1] == size for t in part)
        )

    def _check(self, model: nn.Module) -> None:
        for name in self.site.report.consumers:
            if vars(model.get_submodule(name)).get("site") is not self.site:
                raise RuntimeError(
                    f"{name} is not the module that patch put there, and nothing applies the norm "
                    f"before it ({self.site.report.norm}): load the model again, change {name}, "
                    "then patch"
                )


class PassthroughSite(Installer):
    """A norm and linears that normalise for themselves.

    Where the gain is folded, each linear has packed weights of its own (``parts``). Elsewhere the
    weights stay where they are, shared ones too, and the gain is applied in the kernel; what a
    LayerNorm needs beside them (row sums, moved bias) is computed once and kept in ``derived``,
    one dictionary a linear, which is that module's table of buffers.
    """

    def __init__(self, model: nn.Module, report: SiteReport, options: Options) -> None:
        super().__init__(model, report, options)
        self.norm = model.get_submodule(report.norm)
        self.linears = [model.get_submodule(name) for name in report.consumers]
        self.source = NormSource(self.norm, report)
        self.parts: list[PackedWeights] = []
        self.derived: list[dict[str, Tensor | None]] = []
        self._derived_from: dict[int, dict[str, nn.Parameter | None]] = {}
        foldable = options.fold and report.foldable
        if report.outputs and not options.revertible:
            foldable = False  # the norm is still computed by itself at times: its gain must stay
        if foldable and (report.kind != "rms" or self.source.has_gain):
            self._fold(options.revertible)
        self.folded = bool(self.parts)
        if not self.folded:
            self._check_gains(options.fold)
            for index in range(len(self.linears)):
                self.derived.append({})
                self.derive(index)

    def _fold(self, revertible: bool) -> None:
        if self.source.shift() is not None and any(m.bias is None for m in self.linears):
            revertible = True  # the folded weights could not be written as stock ones
        for linear in self.linears:
            part = PackedWeights(self.source, [linear], fold=True, revertible=revertible)
            if part.spoilt:
                self.report = replace(self.report, reason=f"{self.report.reason}; {SPOILT}")
                self.parts.clear()
                return
            self.parts.append(part)

    def _check_gains(self, frozen: bool) -> None:
        """Whether anything is won by gains in the kernel."""
        why = None
        if any(map(is_transposed, self.linears)):
            why = "a Conv1D's weight lies the wrong way round for the kernel and is not copied"
        elif self.source.kind != "rms" and not (frozen and self.source.kind == "layer"):
            why = "without a fold its linears would each compute the norm anew, in as many launches"
        if why is not None:
            raise Declined(f"{self.report.reason}; {why}")

    @property
    def frozen(self) -> bool:
        """Whether the weights must not learn: something that depends on them has been stored."""
        return self.folded or self.source.kind == "layer"

    @property
    def nbytes(self) -> int:
        """Bytes of all folded weights."""
        return sum(part.nbytes for part in self.parts)

    def derive(self, index: int) -> None:
        """Compute what a LayerNorm needs beside the weight of linear ``index``, as it is now."""
        if self.source.kind != "layer":
            return
        linear, source = self.linears[index], self.source
        weight = linear.weight.detach()
        bias = None if linear.bias is None else linear.bias.detach()
        if source.shift() is not None:
            bias = move_bias(weight, source.shift().detach().to(weight), bias).to(weight.dtype)
        sums = row_sums(weight, source.gain(weight))
        self.derived[index].update(row_sums=sums, moved_bias=bias)
        self._derived_from[index] = dict(linear._parameters)

    def swapped(self, index: int) -> bool:
        """Whether what is kept for linear ``index`` is of other parameters than it now has."""
        if self.source.swapped:
            return True
        own = self._derived_from[index]
        return any(self.linears[index]._parameters[key] is not own[key] for key in own)

    def norm_loaded(self) -> None:
        """The norm's parameters have changed."""
        for part in self.parts:
            part.norm_loaded()
        for index in range(len(self.derived)):
            self.derive(index)

    def take(self) -> None:
        """Lend out the parameters of the norm and, where folded, of the linears."""
        taken: list[PackedWeights] = []
        try:
            for part in self.parts:
                part.take()
                taken.append(part)
        except BaseException:
            for part in taken:
                part.give_back()
            raise
        self.freed = any(part.freed for part in self.parts)
        self.trainable = self.source.learns or any(
            p.requires_grad for m in self.linears for p in m.parameters()
        )
        self.source.take(freeze=self.folded)
        if self.freed:
            self.source.neutralise()

    def replacements(self) -> dict[str, nn.Module]:
        """A module that returns its input, and one for every linear."""
        from flashnorm_triton.models.normed import PassedThrough, normed_linear

        modules: dict[str, nn.Module] = {self.report.norm: PassedThrough(self)}
        for index, name in enumerate(self.report.consumers):
            modules[name] = normed_linear(self, index)
        return modules

    def output_hook(self) -> NormedOutputs | None:
        """What normalises the last of the hidden states, where the stock model returns it so."""
        return NormedOutputs(self) if self.report.returned_as else None

    def give_back(self) -> None:
        """The stock modules hold their own parameters again, bit for bit."""
        for part in self.parts:
            part.give_back()
        self.source.give_back()
