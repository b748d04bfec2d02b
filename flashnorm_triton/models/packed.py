"""The packed form: one module emits what all linears of a norm compute, each takes its columns."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from flashnorm_triton.models.installers import Declined, Installer, Options
from flashnorm_triton.models.report import SiteReport
from flashnorm_triton.models.source import NormSource
from flashnorm_triton.models.weights import PackedWeights

SPOILT = "gain applied in the kernel, as folding it would leave float16's range"


class PackedSite(PackedWeights, Installer):
    """A norm and the linears (or Conv1Ds) that read it, as one launch for all of them."""

    def __init__(self, model: nn.Module, report: SiteReport, options: Options) -> None:
        Installer.__init__(self, model, report, options)
        self.norm = model.get_submodule(report.norm)
        linears = [model.get_submodule(name) for name in report.consumers]
        fold = options.fold and getattr(report, "foldable", True)
        source = NormSource(self.norm, report)
        PackedWeights.__init__(self, source, linears, fold, options.revertible)
        if self.spoilt:
            self.report = replace(report, reason=f"{report.reason}; {SPOILT}")
        if source.kind != "rms" and not self.folded:
            if len(linears) == 1:
                raise Declined(
                    f"{self.report.reason}; without a fold a norm of kind {report.kind!r} and one "
                    "linear stay the launches that they are"
                )
            self.report = replace(self.report, launches_saved=len(linears) - 1)

    def replacements(self) -> dict[str, nn.Module]:
        """One module in the norm's place, one in each linear's."""
        from flashnorm_triton.models.fused import FusedNormLinear, packed_slice

        modules: dict[str, nn.Module] = {self.report.norm: FusedNormLinear(self)}
        for index, name in enumerate(self.report.consumers):
            modules[name] = packed_slice(self, index)
        return modules

    def take(self) -> None:
        """Lend out the parameters of the norm and of the linears."""
        PackedWeights.take(self)
        self.source.take(freeze=self.folded)
        if self.freed:
            self.source.neutralise()

    def give_back(self) -> None:
        """The stock modules hold their own parameters again, bit for bit."""
        PackedWeights.give_back(self)
        self.source.give_back()
