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
    from flashnorm_triton.models.trace import Trace

_HALVES = 2  # of a layer, each with a norm at its beginning
_NUMBER = "layer_idx"  # what transformers' layers that are alike differ in


def find_blocks(
    modules: Mapping[str, nn.Module],
    sites: Iterable[SiteReport],
    trace: Trace,
    traits: Mapping[str, NormTraits],
    operations: Mapping[str, int],
) -> tuple[BlockReport, ...]:
    """One record for each module in which two norms meet, one of them packed at least, proven to
    be a block or not.

    ``trace`` has seen the modules called; ``traits`` and
    ``operations`` (launches of its own code) are those of every norm of the model.
    """
    if "transformers" not in sys.modules:
        return ()  # no attention interface, and no layer that calls it
    meeting: dict[str, list[SiteReport]] = {}
    for site in sites:
        if site.consumers:
            meeting.setdefault(_meet(site), []).append(site)
    blocks: list[BlockReport] = []
    known: dict[Any, tuple[BlockSpec, int]] = {}
    for path, found in meeting.items():
        packed = [site for site in found if site.decision == "fuse" and site.form == PACKED]
        if not path or len(found) != _HALVES or not packed:
            continue
        rest = None if len(packed) == _HALVES else _child(path, found, packed[0])
        if len(packed) == _HALVES or rest is not None:
            layer = modules[path]
            blocks.append(_judge(path, layer, packed, rest, trace, traits, operations, known))
    return tuple(blocks)


def _child(path: str, found: list[SiteReport], packed: SiteReport) -> str | None:
    """The child of the layer that all readers of its other norm are in, if there is one."""
    (other,) = (site for site in found if site is not packed)
    children = {reader[len(path) + 1 :].partition(".")[0] for reader in other.consumers}
    taken = {reader[len(path) + 1 :].partition(".")[0] for reader in packed.consumers}
    return children.pop() if len(children) == 1 and not children & taken else None


def still_blocks(
    blocks: Iterable[BlockReport], sites: Iterable[SiteReport]
) -> tuple[BlockReport, ...]:
    """The same records after something else has been decided about some of the norms."""
    decided = {site.norm: site.decision for site in sites}
    told = []
    for block in blocks:
        if block.spec is not None:
            for name in block.spec.packed:
                norm = f"{block.layer}.{name}"
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
    rest: str | None,
    trace: Trace,
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
        why = obstacle_to(path, layer, sites, rest)
        if why is not None:
            raise Unproven(why)
        if path not in trace.calls:
            raise Unproven("it was not seen called")
        proven = prove(
            layer,
            CallShape.read(*trace.calls[path]),
            {name[start:]: t for name, t in traits.items() if name.startswith(inside)},
            {s.norm[start:]: tuple(c[start:] for c in s.consumers) for s in sites},
            known.get(kind),
            rest,
            rest is not None and inside + rest in trace.in_tuples,
        )
    except Unproven as reason:
        return BlockReport(path, "norm", str(reason))
    # One launch prepares queries, keys and values, their norms included; one ends a sandwich.
    known[kind] = spec, launches = proven
    attention, posts = spec.attention, [n for n in (spec.attention.post, spec.mlp.post) if n]
    inner = [n for n in (attention.q_norm, attention.k_norm, *posts) if n is not None]
    summed = rest is not None and spec.mlp.post is None
    saved = launches - 1 - summed - len(posts)
    saved += sum(operations[inside + norm.path] for norm in inner)
    return BlockReport(path, BLOCK, "proven by its data flow", saved, spec)
