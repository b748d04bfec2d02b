"""Proving that a layer is a decoder block, by what its parts are given when they give noise.

Every equation below is checked in float64 for several draws, batch sizes and lengths, with a cache
and without: what holds for random numbers holds for all (a polynomial that is not zero vanishes at
a random point with probability zero), and the activations are told apart the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flashnorm_triton import reference
from flashnorm_triton.block_reference import Layout, rotary_heads
from flashnorm_triton.checks import ACTIVATIONS
from flashnorm_triton.models.block.probe import (
    CallShape,
    Event,
    Owned,
    Probe,
    Run,
    Unproven,
)
from flashnorm_triton.models.block.spec import (
    AttentionSpec,
    BlockSpec,
    MlpSpec,
    NormUse,
    RestSpec,
)
from flashnorm_triton.models.block.tables import ROPES, growth, rewritten
from flashnorm_triton.models.norms import NormTraits

# batch, tokens, with a cache, size of the numbers (clipping shows with large ones). The first is a
# decode step's shape: its launches are counted.
_RUNS = ((1, 1, True, 1.0), (2, 3, True, 1.0), (2, 2, True, 300.0), (2, 3, False, 1.0))
_AGAIN = (1, 2, True, 1.0)  # enough for a layer that is like another
_TOLERANCE = 1e-6
_EXTRA = "flashnorm_extra"


def prove(
    layer: nn.Module,
    call: CallShape,
    traits: Mapping[str, NormTraits],
    columns: Mapping[str, Any],
    like: tuple[BlockSpec, int] | None = None,
    rest: str | None = None,
    in_tuple: bool = False,
) -> tuple[BlockSpec, int]:
    """The spec of ``layer``, and how many launches its own code makes in a decode step.

    ``traits`` are those of its norms and ``columns`` the names of the linears that each packed norm
    feeds, in the packed order, by paths relative to the layer. ``like`` is what was found of
    another layer with equal attributes: where this one does the same in one run, it is as proven.
    ``rest`` names the module, a child of the layer, that its second half calls as it is; what it
    returns is the first of several things if ``in_tuple``.

    Raises Unproven, with the reason, for a layer that is not a block.
    """
    probe = Probe(layer, rest, in_tuple)
    try:
        return _prove(probe, call, traits, columns, like)
    finally:
        probe.close()


def _prove(
    probe: Probe,
    call: CallShape,
    traits: Mapping[str, NormTraits],
    columns: Mapping[str, Any],
    like: tuple[BlockSpec, int] | None,
) -> tuple[BlockSpec, int]:
    tried = replace(call, others=(*call.others, _EXTRA))
    if like is not None:
        run = probe.run(tried, *_AGAIN)
        spec = _Reading(run, call, traits, columns, like[0]).spec(True)
        if _unnumbered(spec) == _unnumbered(like[0]):
            return spec, like[1]
    found: BlockSpec | None = None
    launches = 0
    for batch, tokens, cached, scale in _RUNS:
        if not cached and call.cache is None:
            continue
        run = probe.run(tried, batch, tokens, cached, scale)
        spec = _Reading(run, call, traits, columns, found).spec(cached)
        if found is None:
            found, launches = spec, run.launches
        elif cached and spec != found:
            raise Unproven("it does other things at another length")
        elif not cached and _uncached(spec) != _uncached(found):
            raise Unproven("it does other things without a cache")
    assert found is not None
    return found, launches


def _unnumbered(spec: BlockSpec) -> BlockSpec:
    return replace(spec, attention=replace(spec.attention, layer_index=None))


def _uncached(spec: BlockSpec) -> BlockSpec:
    attention = replace(
        spec.attention, layer_index=None, update_kwargs=None, withheld=(), update_constants=()
    )
    return replace(spec, attention=attention)


class _Reading:
    """One run, read as a block."""

    def __init__(
        self,
        run: Run,
        call: CallShape,
        traits: Mapping[str, NormTraits],
        columns: Mapping[str, Any],
        known: BlockSpec | None,
    ) -> None:
        self.run, self.call, self.traits, self.columns = run, call, traits, columns
        # Of large numbers, activations differ by less than rounding: the known one comes first.
        whole = known is not None and isinstance(known.mlp, MlpSpec)
        self.likely = known.mlp.activation if whole else None

    def spec(self, cached: bool) -> BlockSpec:
        events = self.run.events
        attentions = [i for i, event in enumerate(events) if event.kind == "attention"]
        if len(attentions) != 1:
            raise Unproven("it does not call transformers' attention interface once")
        middle = attentions[0]
        attention, x = self._attention(events[:middle], events[middle], cached)
        output, post, x, scale, rest = self._added(events[middle + 1 :], self.run.x, self._heads)
        attention = replace(attention, output=output, post=post, scale=scale)
        whole = self.run.rest is None
        mlp = self._mlp(rest, x) if whole else self._own_half(rest, x)
        call = self.call
        return BlockSpec(call.cache, call.mask, call.angles, call.rotary, attention, mlp)

    def _attention(
        self, before: list[Event], event: Event, cached: bool
    ) -> tuple[AttentionSpec, Tensor]:
        norm = self._packed_norm(before[:1], self.run.x)
        normed = norm.gave[0]
        linears = [e for e in before[1:] if e.kind == "linear"]
        norms = [e for e in before[1:] if e.kind == "norm"]
        updates = [e for e in before[1:] if e.kind == "update"]
        if len(updates) != (1 if cached and self.call.cache is not None else 0):
            raise Unproven("it does not update its cache once")
        self._must_be_columns(norm, linears, normed)
        q, k, v = event.given
        if updates:
            if not all(_same(a, b) for a, b in zip(updates[0].gave, (k, v), strict=True)):
                raise Unproven("its attention is not given what its cache returned")
            k, v = updates[0].given
        heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[3]
        if k.shape != v.shape or k.shape[3] != head_dim:
            raise Unproven("its keys and values have heads of other sizes than its queries")
        qkv = torch.cat([e.gave[0] for e in linears], -1)
        layout = Layout(heads, kv_heads, head_dim)
        if qkv.shape[-1] != layout.columns:
            raise Unproven("its queries, keys and values are not all that follows its first norm")
        qkv, q_norm, k_norm = self._head_norms(qkv, norms, layout)
        rope, grows = self._rope(qkv, (q, k, v), layout)
        self._heads = event.gave[0].flatten(2)
        spec = AttentionSpec(
            norm=norm.name,
            q_norm=q_norm,
            k_norm=k_norm,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=rope,
            growth=grows,
            attention=event.name,
            layer_index=_layer_index(updates),
            **self._kwargs(event, updates),
            output="",
            post=None,
            scale=1.0,
        )
        return spec, normed

    def _packed_norm(self, events: list[Event], x: Tensor) -> Event:
        """The norm that comes next: one that is packed, of ``x``."""
        if not events or events[0].kind != "norm" or events[0].name not in self.columns:
            raise Unproven("its halves do not begin with a norm that is fused with its linears")
        if not _same(events[0].given[0], x):
            raise Unproven(f"{events[0].name} does not read the sum before it")
        return events[0]

    def _must_be_columns(self, norm: Event, linears: list[Event], normed: Tensor) -> None:
        if tuple(e.name for e in linears) != tuple(self.columns[norm.name]):
            raise Unproven(f"{norm.name} is not read by the linears that follow it, in their order")
        for event in linears:
            if not _same(event.given[0], normed):
                raise Unproven(f"{event.name} reads something else than its norm's output")

    def _head_norms(
        self, qkv: Tensor, norms: list[Event], layout: Layout
    ) -> tuple[Tensor, NormUse | None, NormUse | None]:
        """qkv with the outputs of the norms of the heads in their places, and those norms."""
        if not norms:
            return qkv, None, None
        if len(norms) != 2:
            raise Unproven("not both its queries and its keys are normed by heads")
        sizes = [layout.q_heads, layout.kv_heads, layout.kv_heads]
        parts = list(qkv.unflatten(-1, (-1, layout.head_dim)).split(sizes, -2))
        for index, event in enumerate(norms):
            given, gave = event.given[0], event.gave[0]
            if given.dim() == 4 and _same(given.transpose(1, 2), parts[index]):
                given, gave = given.transpose(1, 2), gave.transpose(1, 2)
            if not _same(given, parts[index]):
                raise Unproven(f"{event.name} does not norm heads of the queries or keys")
            parts[index] = gave
        one, other = (self._norm_use(event) for event in norms)
        if replace(one, path="") != replace(other, path=""):
            raise Unproven("the norms of its queries and keys are not alike")
        return torch.cat(parts, -2).flatten(-2), one, other

    def _norm_use(self, event: Event) -> NormUse:
        trait = self.traits[event.name]
        if trait.kind != "rms" or trait.eps is None or not trait.eps > 0:
            raise Unproven(f"{event.name} is not an RMS norm with an eps")
        return NormUse(event.name, float(trait.eps), trait.convention)

    def _rope(
        self, qkv: Tensor, wanted: tuple[Tensor, ...], layout: Layout
    ) -> tuple[str | None, tuple[float, float] | None]:
        """How queries and keys are turned, and what the queries are then multiplied with."""
        angles = self.run.arguments[self.call.angles] if self.call.angles else None
        for rope in (None, *(ROPES if angles is not None else ())):
            cos, sin = (None, None) if rope is None else rewritten(rope, angles)
            if cos is not None and not 0 < cos.shape[-1] <= layout.head_dim:
                continue
            turned = layout._replace(interleaved=rope is not None and ROPES[rope][0])
            q, k, v = rotary_heads(qkv, cos, sin, None, None, turned)
            if _same(k, wanted[1]) and _same(v, wanted[2]):
                if _same(q, wanted[0]):
                    return rope, None
                places, grows = self.run.arguments.get("position_ids"), self.run.growth
                if grows and places is not None and _same(q * growth(places, *grows), wanted[0]):
                    return rope, grows
        raise Unproven("its queries and keys are turned in a way of its own")

    def _kwargs(self, event: Event, updates: list[Event]) -> dict[str, Any]:
        """What the attention function and the cache are given beside tensors."""
        arguments = self.run.arguments
        mask = arguments.get(self.call.mask) if self.call.mask else None
        if len(event.args) != 1 or event.args[0] is not mask:
            raise Unproven("its attention is not given the mask that the layer is given")
        constants, owned, passes = [], [], []
        for name, value in event.kwargs.items():
            if name in arguments and value is arguments[name] and value is not None:
                passes.append(name)
            elif isinstance(value, Owned):
                owned.append((name, value.name))
            elif isinstance(value, (int, float, str, bool, type(None))):
                constants.append((name, value))
            else:
                raise Unproven(f"its attention is given {name}, a {type(value).__name__}")
        if _EXTRA not in passes:
            raise Unproven("it does not hand further arguments on to its attention")
        dropped = [n for n in self.call.others if n not in passes]
        if any(name in dict(constants) for name in dropped):
            raise Unproven("it makes another argument of one that it is given")
        return {
            "constants": tuple(constants),
            "owned": tuple(owned),
            "passes": tuple(sorted(set(passes) - {_EXTRA})),
            **self._update_kwargs(updates, set(passes), dict(constants)),
        }

    def _update_kwargs(
        self, updates: list[Event], passes: set[str], constants: Mapping[str, Any]
    ) -> dict[str, Any]:
        if not updates or (len(updates[0].args) == 1 and not updates[0].kwargs):
            return {"update_kwargs": None, "withheld": (), "update_constants": ()}
        extra = updates[0].kwargs
        if len(updates[0].args) == 1 and len(extra) == 1:
            ((name, values),) = extra.items()
            if isinstance(values, dict) and _EXTRA in values:
                more = {key: value for key, value in values.items() if key not in passes}
                given, handed = self.run.arguments, passes & set(values)
                handed_on = all(values[key] is given[key] for key in handed)
                known = all(constants.get(key, more) is value for key, value in more.items())
                if handed_on and known:
                    return {
                        "update_kwargs": name,
                        "withheld": tuple(sorted(passes - handed)),
                        "update_constants": tuple(more.items()),
                    }
        raise Unproven("its cache is given more than keys and values")

    def _added(
        self, events: list[Event], x: Tensor, fed: Tensor, kind: str = "linear"
    ) -> tuple[str, NormUse | None, Tensor, float, list[Event]]:
        """A linear of ``fed``, [its norm], times a number, added to ``x``: names and the sum."""
        if not events or events[0].kind != kind or not _same(events[0].given[0], fed):
            raise Unproven(f"what it adds is not one {kind} of what comes before")
        linear, post = events[0], None
        added, rest = linear.gave[0], events[1:]
        if rest and rest[0].kind == "norm" and _same(rest[0].given[0], added):
            post, added, rest = self._norm_use(rest[0]), rest[0].gave[0], rest[1:]
        total = rest[0].given[0] if rest else self.run.output
        if total.shape != x.shape:
            raise Unproven("its residual is not its input")
        scale = float(((total - x) * added).sum() / added.square().sum())
        scale = float(f"{scale:.10g}")
        if not scale or not _same(x + scale * added, total):
            raise Unproven("its residual is not its input")
        if post is not None and scale != 1.0:
            raise Unproven("it scales what it norms before adding it")
        return linear.name, post, total, scale, rest

    def _own_half(self, events: list[Event], x: Tensor) -> RestSpec:
        """A norm of ``x``, a module of the layer's own that reads it, and the sum."""
        if not events or events[0].kind != "norm" or not _same(events[0].given[0], x):
            raise Unproven("its second half does not begin with a norm of the sum before it")
        fed = events[0].gave[0]
        module, post, total, scale, rest = self._added(events[1:], x, fed, "rest")
        if rest or not _same(total, self.run.output):
            raise Unproven("it does more than a block after its last module")
        return RestSpec(events[0].name, module, self.run.in_tuple, post, scale)

    def _mlp(self, events: list[Event], x: Tensor) -> MlpSpec:
        norm = self._packed_norm(events[:1], x)
        count = len(self.columns[norm.name])
        self._must_be_columns(norm, events[1 : 1 + count], norm.gave[0])
        z = torch.cat([e.gave[0] for e in events[1 : 1 + count]], -1)
        rest = events[1 + count :]
        if not rest or rest[0].kind != "linear":
            raise Unproven("no linear follows the activation")
        fed = rest[0].given[0]
        activation, gated = _activation(z, fed, self.likely)
        down, post, total, scale, rest = self._added(rest, x, fed)
        if rest or not _same(total, self.run.output):
            raise Unproven("it does more than a block after its last linear")
        return MlpSpec(norm.name, activation, gated, down, post, scale)


def _layer_index(updates: list[Event]) -> int | None:
    if not updates:
        return None
    if not updates[0].args or type(updates[0].args[0]) is not int:
        raise Unproven("its cache is not told the layer's number")
    return updates[0].args[0]


def _activation(z: Tensor, fed: Tensor, likely: str | None) -> tuple[str | None, bool]:
    for gated in (True, False):
        for name in (likely, None, *ACTIVATIONS):
            if name is None and not gated:
                continue
            if fed.shape[-1] * (2 if gated else 1) != z.shape[-1]:
                continue
            if _same(reference.finish(z, None, name, gated), fed):
                return name, gated
    raise Unproven("its activation is none that the fused operation has, or its gate comes second")


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    largest = float(other.abs().amax()) if other.numel() else 0.0
    return bool((one - other).abs().amax() <= _TOLERANCE * max(largest, 1e-30))
