"""The modules of a site whose pre-norm is dropped, and the installer that puts them in.

The norm's place emits the packed projection with every later norm already done, the linears' places
take their columns, and the later norms' places hand on what they are given. So the statistics of x
and of the heads meet inside one module: nothing is kept between calls, and nothing but that
module's own result is written.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from flashnorm_triton.heads import Head, HeadNorms, Heads
from flashnorm_triton.models.cancel import CancelReport
from flashnorm_triton.models.fused import FusedNormLinear, PackedSlice
from flashnorm_triton.models.installers import Options
from flashnorm_triton.models.packed import PackedSite
from flashnorm_triton.models.placement import own_attributes

# Up to here the fused single pass runs as fast as the bare product (docs/measured.md) and applies s
# for nothing; above, the library's product on raw x, with x's statistics taken by the head norms,
# saves the launch of the norm and the writing of the normed x.
_SINGLE_PASS_ROWS = 64


class CancelInstaller(PackedSite):
    """A site with decision "cancel" or "partial": packed weights, and the norms done with them.

    ``norms`` does the later norms' work; ``later`` are the stock ones, which share their parameter
    tables with the modules in their places.
    """

    report: CancelReport

    def __init__(self, model: nn.Module, report: CancelReport, options: Options) -> None:
        super().__init__(model, report, options)
        if report.how == "fast" and not self.holds_all:
            told = "exact after all, as the gain is applied in the kernel and not folded"
            self.report = replace(self.report, how="exact", reason=f"{self.report.reason}; {told}")
        elif report.how == "fast" and self.linears[0].weight.dtype == torch.float16:
            told = "exact after all, as an unscaled product can leave float16's range"
            self.report = replace(self.report, how="exact", reason=f"{self.report.reason}; {told}")
        self.later = [model.get_submodule(norm.norm) for norm in report.later]
        places = {norm.norm: index for index, norm in enumerate(report.later)}
        heads = tuple(
            Heads(
                start,
                layout.heads,
                tuple(Head(p.width, tuple(places[n] for n in p.norms)) for p in layout.pieces),
            )
            for layout, (start, _) in zip(report.layouts, self.columns, strict=True)
        )
        eps = tuple(norm.eps for norm in report.later)
        self.norms = HeadNorms(heads, eps, tuple(n.convention == "1+w" for n in report.later))

    @property
    def holds_all(self) -> bool:
        """Whether the packed weights are all that the norm and the linears do to the unit rows."""
        return self.folded or not self.source.has_gain

    def replacements(self) -> dict[str, nn.Module]:
        """One module in the pre-norm's place, one in each linear's and each later norm's."""
        modules: dict[str, nn.Module] = {self.report.norm: CancelledNorm(self)}
        for index, name in enumerate(self.report.consumers):
            modules[name] = CancelledSlice(self, index)
        for index, norm in enumerate(self.report.later):
            modules[norm.norm] = DoneNorm(self, index)
        return modules

    def gains(self) -> tuple[Tensor | None, ...]:
        """The later norms' weights as they are now, by index."""
        return tuple(module._parameters.get("weight") for module in self.later)


class CancelledNorm(FusedNormLinear):
    """In the pre-norm's place: (..., K) -> (..., N'), all heads of the site, normalised.

    With few rows (and wherever gradients, autocast or float16 ask for it) the fused operation gives
    s·p and the heads are normed as the stock model does. With many, p is the library's product on
    raw x, and the heads' eps is multiplied by mean(x^2) + eps1; "fast" leaves that factor out.
    """

    site: CancelInstaller

    def __init__(self, site: CancelInstaller) -> None:
        super().__init__(site)
        self.how = site.report.how

    def forward(self, hidden_states: Tensor) -> Tensor:
        site = self.site
        if not self._takes_raw_product(hidden_states):
            return site.norms(super().forward(hidden_states), site.gains())
        z = nn.functional.linear(hidden_states, self._buffers["packed_weight"])
        if self.how == "fast":
            return site.norms(z, site.gains())
        return site.norms(z, site.gains(), hidden_states, self.eps)

    def _takes_raw_product(self, x: Tensor) -> bool:
        weight, bias = self._buffers["packed_weight"], self._buffers["packed_bias"]
        if not self.site.holds_all or self.training or bias is not None:
            return False
        if not self.folded and torch.is_grad_enabled():
            return False  # the linears' own parameters, of which these are views, may learn
        if x.dtype is not weight.dtype or x.dtype is torch.float16:
            return False
        if torch.is_autocast_enabled(x.device.type):
            return False
        if not torch.compiler.is_compiling() and self.site.scattered:
            return False  # which the fused module then says
        if self.how == "fast":
            return True
        # A compiled graph leaves the choice to the fused operation, which makes it at run time.
        return not torch.compiler.is_compiling() and x.numel() > _SINGLE_PASS_ROWS * x.shape[-1]

    def extra_repr(self) -> str:
        """As the fused module's, with the later norms."""
        later = ", ".join(norm.norm.rpartition(".")[2] for norm in self.site.report.later)
        return f"{super().extra_repr()}, {self.how}, with {later}"


class CancelledSlice(PackedSlice):
    """In a linear's place: its heads, (..., N') -> (..., columns), normalised where they must be.

    ``columns`` is ``out_features``, and twice that where two norms read this linear.
    """

    def __init__(self, site: CancelInstaller, index: int) -> None:
        super().__init__(site, index)
        widths = [group.columns_out for group in site.norms.heads]
        self.start, self.width = sum(widths[:index]), sum(widths)
        self.columns = widths[index]

    def forward(self, packed: Tensor) -> Tensor:
        if packed.shape[-1] != self.width:
            return super().forward(packed)  # which says what is wrong
        if self.columns == self.width:
            return packed
        return packed.narrow(-1, self.start, self.columns)


class DoneNorm(nn.Module):
    """In a later norm's place: hands on its heads, which come normalised.

    Where two norms read one linear, all heads came twice in dimension -2, and each norm takes its
    half. ``weight`` is the stock parameter, used in the pre-norm's place.
    """

    def __init__(self, site: CancelInstaller, index: int) -> None:
        super().__init__()
        vars(self).update(own_attributes(site.later[index]))
        self.site = site
        self.index = index
        self.eps = site.norms.eps[index]
        self.training = self.stock.training
        self._parameters = self.stock._parameters
        parts = (part.norms for group in site.norms.heads for part in group.parts)
        self.share = next((n.index(index), len(n)) for n in parts if index in n)

    def forward(self, hidden_states: Tensor) -> Tensor:
        place, of = self.share
        if of == 1:
            return hidden_states
        heads = hidden_states.shape[-2] // of
        return hidden_states.narrow(-2, place * heads, heads)

    @property
    def stock(self) -> nn.Module:
        """The stock norm, which waits outside the model."""
        return self.site.later[self.index]

    def extra_repr(self) -> str:
        """Where its work is done, for ``print(model)``."""
        return f"{type(self.stock).__name__}, done in {self.site.report.norm}"
