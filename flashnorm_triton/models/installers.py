"""Who carries out which decision of an audit: the registry of installers, and what each must offer.

An installer owns one site. It reads the stock modules when it is made, ``take``s their weights,
hands out the modules that go in their places, and can ``give_back`` everything, bit for bit. Every
module that it puts in carries it as ``site`` and the module it stands in for as ``stock``; nothing
else keeps track of what was patched, so a copied or unpickled model can be reverted too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from flashnorm_triton.models.report import AuditReport, SiteReport


@dataclass(frozen=True)
class Options:
    """The options of ``patch`` that installers follow; its docstring says what each one means."""

    fold: bool = True
    cancel: bool | str = False
    head: bool = False
    revertible: bool = True


class Declined(Exception):
    """Raised by an installer that finds nothing to gain at its site: the norm is kept, no fault."""


class Installer:
    """One site of a model being patched. Subclasses change nothing before ``take``.

    ``report`` is the audit's record, with what was learned while patching. ``audit`` is the whole
    report, set once the model is patched. ``freed`` says that the stock weights are gone for good.
    """

    report: SiteReport
    audit: AuditReport | None = None
    freed: bool = False
    folded: bool = False

    def __init__(self, model: nn.Module, report: SiteReport, options: Options) -> None:
        self.report = report

    def take(self) -> None:
        """Make the stock modules' weights the site's own. Fails before it has changed anything."""
        raise NotImplementedError

    def replacements(self) -> dict[str, nn.Module]:
        """The new modules by the path of the module each of them replaces; after ``take``."""
        raise NotImplementedError

    def give_back(self) -> None:
        """Undo ``take``: the stock modules hold their own parameters again, bit for bit."""
        raise NotImplementedError

    def output_hook(self) -> Callable[..., Any] | None:
        """A forward hook for the whole model, picklable and with the installer as ``site``."""
        return None

    @property
    def nbytes(self) -> int:
        """Device memory, in bytes, that the site's own tensors take while both copies exist."""
        return 0


# decision, form -> where the class is; imported when first needed, so that rooms stay apart.
_INSTALLERS: dict[tuple[str, str], str] = {
    ("fuse", "packed"): "flashnorm_triton.models.packed:PackedSite",
    ("fuse", "experts"): "flashnorm_triton.models.experts:ExpertsSite",
    ("norm_only", ""): "flashnorm_triton.models.norm_only:NormOnlySite",
    ("cancel", ""): "flashnorm_triton.models.cancel_sites:CancelInstaller",
    ("partial", ""): "flashnorm_triton.models.cancel_sites:CancelInstaller",
    ("fuse", "passthrough"): "flashnorm_triton.models.passthrough:PassthroughSite",
}


def installer_for(report: SiteReport) -> type[Installer] | None:
    """The class that carries out a site's decision; None when the norm is kept as it is.

    Raises LookupError for a decision that no installer is registered for.
    """
    if report.decision == "keep":
        return None
    key = (report.decision, report.form)
    home = _INSTALLERS.get(key) or _INSTALLERS.get((report.decision, ""))
    if home is None:
        raise LookupError(f"no installer for decision {report.decision!r}, form {report.form!r}")
    module, _, name = home.partition(":")
    return getattr(importlib.import_module(module), name)


def replacements_in(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a patched model that stand in for stock ones."""
    for module in model.modules():
        if isinstance(vars(module).get("site"), Installer):
            yield module


def sites_of(model: nn.Module) -> list[Installer]:
    """The installers at work in a patched model, in the order of its modules."""
    return list({id(m.site): m.site for m in replacements_in(model)}.values())
