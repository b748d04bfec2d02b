"""Where a norm could be fused, and nothing would be gained: no option of ``patch`` changes that."""

from __future__ import annotations

from flashnorm_triton.models.linears import CONV1D
from flashnorm_triton.models.report import SiteReport
from flashnorm_triton.models.sightings import PASSTHROUGH


def nothing_gained(site: SiteReport) -> str | None:
    """Why the launches of a site with decision "fuse" would stay as many as they are, or None.

    What depends on options (``fold=False``) or on the weights' values is left to the installers.
    """
    if site.form == "experts" and site.kind == "layer":
        return "a LayerNorm is that one launch in torch already"
    if site.form == "experts" and site.kind != "rms":
        return f"a norm of kind {site.kind!r} before experts stays the launches that it is"
    if site.form != PASSTHROUGH:
        return None
    if site.kind == "dyt" and len(site.consumers) > 1:
        return (
            f"each of its {len(site.consumers)} linears would compute the tanh anew, "
            "which saves no launch"
        )
    has_gain = site.kind != "rms" or site.convention != "none"
    if site.foldable and has_gain:
        return None
    if CONV1D in site.consumer_kinds:
        return "a Conv1D's weight lies the wrong way round for the kernel and is not copied"
    if site.kind == "dyt":
        return "without a fold its linear computes the tanh anew, which saves no launch"
    return None
