"""Which module boundaries of a patched model are watched, and what stock modules make of them.

At a site (a norm and the linears that read it) the candidate's own input is given to the stock
modules in the reference's dtype. Whatever the steps before did to that input, the site's output is
then judged by its own rounding alone, so the fault is found where it is and not downstream of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flashnorm_triton.models.block.layer import Block
from flashnorm_triton.models.report import AuditReport, SiteReport

_LINEAR = {"linear", "conv1d"}


@dataclass(frozen=True)
class Site:
    """One place that is watched: ``norm`` is the path of its norm (or of a layer that is a block),
    ``outputs`` the paths of the modules whose output is compared: its linears; the norm itself
    where only that was replaced; none where neither can be compared from outside, then ``why``.
    ``fused``: norm and linears are one operation."""

    norm: str
    outputs: tuple[str, ...]
    kind: str
    eps: float
    why: str = ""
    fused: bool = False

    @property
    def layer(self) -> int | None:
        """The number in the norm's path."""
        found = re.search(r"\.(\d+)(?:\.|$)", self.norm)
        return int(found[1]) if found else None

    @property
    def places(self) -> list[tuple[str, bool]]:
        """Where taps go: (path, whether it is the input)."""
        return [(self.norm, True), *((path, False) for path in self.outputs)]


def sites_to_watch(model: nn.Module, report: AuditReport, inside: bool) -> list[Site]:
    """Every place of a patched model that computes differently from stock, in its modules' order.

    A layer that runs as a block has none but its input, unless ``inside``: a hook on a module
    within it makes it run its layer's own code, over the sites.
    """
    modules = model.named_modules()
    blocks = [] if inside else [name for name, module in modules if isinstance(module, Block)]
    found = [_site(site) for site in report.sites if site.decision != "keep"]
    places = [site for site in found if not any(site.norm.startswith(f"{b}.") for b in blocks)]
    why = "its layer runs as a block: what enters it is compared"
    places += [Site(name, (), "", 0.0, why) for name in blocks]
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    return sorted(places, key=lambda site: order[site.norm])


def _site(found: SiteReport) -> Site:
    eps = found.eps or 0.0
    if found.decision == "norm_only":
        return Site(found.norm, (found.norm,), found.kind, eps)
    if found.decision in ("cancel", "partial"):
        why = "its linears emit rows that are normalised again: only its input is compared"
        return Site(found.norm, (), found.kind, eps, why)
    if not set(found.consumer_kinds) <= _LINEAR:
        why = "it feeds a router or experts: only its input is compared"
        return Site(found.norm, (), found.kind, eps, why)
    return Site(found.norm, found.consumers, found.kind, eps, fused=True)


@torch.no_grad()
def scale_of(site: Site, x: Tensor) -> Tensor | None:
    """s of rows x (..., K): 1/sqrt(mean(x²) + eps), a LayerNorm's of the variance; else None."""
    if site.kind == "rms":
        return torch.rsqrt(x.square().mean(-1) + site.eps)
    if site.kind == "layer":
        return torch.rsqrt(x.var(-1, correction=0) + site.eps)
    return None


@torch.no_grad()
def stock_output(model: nn.Module, site: Site, x: Tensor) -> tuple[Tensor, Tensor]:
    """(v, y0) of rows x (..., K): the site's output is y0 + v, where v scales with the norm's s.

    y0 (N,) is what the biases give: the linears' own and, through them, the norm's.
    """
    norm = model.get_submodule(site.norm)
    weight = next(model.get_submodule(site.outputs[0]).parameters(), None)
    x = x if weight is None else x.to(weight.dtype)
    shift = getattr(norm, "bias", None)
    nothing = x.new_zeros(x.shape[-1]) if shift is None else shift.to(x.dtype)
    normed = norm(x)
    if site.outputs == (site.norm,):
        return normed - nothing, nothing
    linears = [model.get_submodule(path) for path in site.outputs]
    y0 = torch.cat([linear(nothing[None])[0] for linear in linears])
    return torch.cat([linear(normed) for linear in linears], -1) - y0, y0
