"""What stands in the way of running a layer as a block, apart from what its code computes."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from flashnorm_triton.models.linears import LINEAR, linear_kind
from flashnorm_triton.models.norms import is_candidate
from flashnorm_triton.models.placement import HOOK, only_moves_inputs
from flashnorm_triton.models.report import SiteReport
from flashnorm_triton.models.shadow import HOOK_TABLES

_CAPTURING = "transformers.utils.output_capturing"


def obstacle_to(
    path: str, layer: nn.Module, sites: Iterable[SiteReport], rest: str | None = None
) -> str | None:
    """Why the layer at ``path`` must run module by module, or None.

    ``sites`` are its packed ones, ``rest`` a child that a block calls as it is.
    """
    for site in sites:
        if site.kind != "rms":
            return f"{site.norm} is a norm of kind {site.kind!r}"
    devices = set()
    for name, module in layer.named_modules():
        if rest is not None and (name == rest or name.startswith(f"{rest}.")):
            continue
        told = f"{path}.{name}" if name else path
        if hasattr(module, HOOK):
            if not only_moves_inputs(module):
                return f"accelerate manages {told}"
        elif "forward" in vars(module):
            return f"the forward of {told} was replaced on the instance"
        if name and any(_foreign_hooks(module)):
            return f"{told} has a hook, which a block would pass by"
        kind = linear_kind(module)
        if kind is not None and kind != LINEAR:
            return f"{told} is a {type(module).__qualname__}, not a plain linear"
        if kind == LINEAR or is_candidate(module):
            devices |= {p.device for p in module._parameters.values() if p is not None}
    if len(devices) > 1:
        return f"its weights are on several devices: {', '.join(sorted(map(str, devices)))}"
    return None


def _foreign_hooks(module: nn.Module) -> list[object]:
    """The hooks of a module that somebody but transformers' recording of outputs has put there."""
    hooks = [h for t in HOOK_TABLES[:4] for h in (getattr(module, t, None) or {}).values()]
    return [h for h in hooks if getattr(h, "__module__", "") != _CAPTURING]
