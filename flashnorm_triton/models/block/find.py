"""Which modules of a model are decoder blocks: what the audit reports beside its norms."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from flashnorm_triton.models.alike import attributes_of
from flashnorm_triton.models.norms import NormTraits
from flashnorm_triton.models.report import BLOCK, BlockReport, SiteReport
from flashnorm_triton.models.sightings import PACKED

if TYPE_CHECKING:
    from flashnorm_triton.models.block.spec import BlockSpec

_HALVES = 2
_NUMBER = "layer_idx"  # what transformers' layers that are alike differ in


def find_blocks(
    modules: Mapping[str, nn.Module],
    sites: Iterable[SiteReport],
    calls: Mapping[str, tuple[Any, Any]],
    traits: Mapping[str, NormTraits],
    operations: Mapping[str, int],
) -> tuple[BlockReport, ...]:
    """One record for each module in which two packed norms meet, proven to be a block or not.

    ``calls`` are the arguments with which a trace has seen each module called; ``traits`` and
    ``operations`` (launches of its own code) are those of every norm of the model.
    """
    if "transformers" not in sys.modules:
        return ()  # no attention interface, and no layer that calls it
    meeting: dict[str, list[SiteReport]] = {}
    for site in sites:
        if site.decision == "fuse" and site.form == PACKED:
            meeting.setdefault(_meet(site), []).append(site)
    blocks: list[BlockReport] = []
    known: dict[Any, tuple[BlockSpec, int]] = {}
    for path, found in meeting.items():
        if path and len(found) == _HALVES:
            blocks.append(_judge(path, modules[path], found, calls, traits, operations, known))
    return tuple(blocks)


def still_blocks(
    blocks: Iterable[BlockReport], sites: Iterable[SiteReport]
) -> tuple[BlockReport, ...]:
    """The same records after something else has been decided about some of the norms."""
    decided = {site.norm: site.decision for site in sites}
    told = []
    for block in blocks:
        if block.spec is not None:
            for half in (block.spec.attention, block.spec.mlp):
                norm = f"{block.layer}.{half.norm}"
                if decided.get(norm) != "fuse":
                    why = f"{norm} is not fused with its linears ({decided.get(norm)})"
                    block = at_norm_level(block, why)
                    break
        told.append(block)
    return tuple(told)


def at_norm_level(block: BlockReport, reason: str) -> BlockReport:
    """The record of a layer whose norms alone are patched."""
    return replace(block, level="norm", reason=reason, launches_saved=0, spec=None)


def _meet(site: SiteReport) -> str:
    """The smallest module that holds a norm and all its linears."""
    paths = [path.split(".") for path in (site.norm, *site.consumers)]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _judge(
    path: str,
    layer: nn.Module,
    sites: list[SiteReport],
    calls: Mapping[str, tuple[Any, Any]],
    traits: Mapping[str, NormTraits],
    operations: Mapping[str, int],
    known: dict[Any, tuple[BlockSpec, int]],
) -> BlockReport:
    from flashnorm_triton.models.block.obstacles import obstacle_to
    from flashnorm_triton.models.block.probe import CallShape, Unproven
    from flashnorm_triton.models.block.proof import prove

    inside = f"{path}."
    start = len(inside)
    looks, numbers = attributes_of(layer)
    kind = looks, frozenset(item for item in numbers.items() if item[0][1] != _NUMBER)
    try:
        why = obstacle_to(path, layer, sites)
        if why is not None:
            raise Unproven(why)
        if path not in calls:
            raise Unproven("it was not seen called")
        proven = prove(
            layer,
            CallShape.read(*calls[path]),
            {name[start:]: t for name, t in traits.items() if name.startswith(inside)},
            {s.norm[start:]: tuple(c[start:] for c in s.consumers) for s in sites},
            known.get(kind),
        )
    except Unproven as reason:
        return BlockReport(path, "norm", str(reason))
    # One launch prepares queries, keys and values, their norms included; one ends a sandwich.
    known[kind] = spec, launches = proven
    attention, posts = spec.attention, [n for n in (spec.attention.post, spec.mlp.post) if n]
    inner = [n for n in (attention.q_norm, attention.k_norm, *posts) if n is not None]
    saved = launches - 1 - len(posts) + sum(operations[inside + norm.path] for norm in inner)
    return BlockReport(path, BLOCK, "proven by its data flow", saved, spec)
