"""A decoder layer as a block: its class's forward where that is called for, else few launches.

The layer stays the object that it was, with its children, hooks and attributes; its class becomes a
subclass of its own. Training, gradients, autocast, hooks on what is inside, recorded attentions and
modules that were exchanged all go through the layer's own code, over its patched norms.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from flashnorm_triton import attention
from flashnorm_triton.block_ops import add_rms_norm, linear, rotary_heads
from flashnorm_triton.models.block.caches import (
    move_on,
    places_in,
    written_kinds,
)
from flashnorm_triton.models.block.gain import Gain
from flashnorm_triton.models.block.probe import CACHE_NAMES
from flashnorm_triton.models.block.spec import BlockSpec, MlpSpec, NormUse
from flashnorm_triton.models.block.tables import ROPES, factors_of, numbers_of, tables_of
from flashnorm_triton.ops import norm_linear

_CAPTURING = "transformers.utils.output_capturing"
_LOCAL = getattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", {})
_GLOBAL = getattr(ALL_ATTENTION_FUNCTIONS, "_global_mapping", {})
# What else torch's attention is told: the masked one here is not told.
_SDPA_READS = frozenset({"is_causal", "position_bias"})
_any_autocast = torch._C._is_any_autocast_enabled
_is_compiling = torch.compiler.is_compiling


class Block:
    """What a block's class adds to the layer's own: a forward that asks, and chooses."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's own forward, or one launch for each of the block's steps."""
        runner = self.runner
        if len(args) == 1 and not self.training and runner.fits(args[0], kwargs):
            return runner.run(args[0], kwargs)
        return super().forward(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _made_anew, (type(self).__mro__[2],), vars(self)


@functools.cache
def block_class(stock: type[nn.Module]) -> type[nn.Module]:
    """The class of a block whose layer is of class ``stock``; it goes by the same name."""
    own = {"__module__": stock.__module__, "__qualname__": stock.__qualname__}
    return type(stock.__name__, (Block, stock), {**own, "__doc__": stock.__doc__})


def _made_anew(stock: type[nn.Module]) -> nn.Module:
    kind = block_class(stock)
    return kind.__new__(kind)


class Runner:
    """What a block does in place of its layer's own code. Holds no tensors: all are looked up.

    ``layer`` has been patched already: its two norms emit the packed outputs of their linears.
    """

    def __init__(self, layer: nn.Module, spec: BlockSpec) -> None:
        attention, mlp = spec.attention, spec.mlp
        get = layer.get_submodule
        self.spec = spec
        self.whole = isinstance(mlp, MlpSpec)
        self.first, self.second = get(attention.norm), get(mlp.norm)
        self.output, self.down = get(attention.output), get(mlp.down if self.whole else mlp.module)
        self.attention = get(attention.attention)
        self.after = _Added(layer, attention.post), _Added(layer, mlp.post)
        norms = attention.q_norm, attention.k_norm
        self.gains = tuple(None if norm is None else Gain(layer, norm) for norm in norms)
        q_norm = attention.q_norm
        self.layout = {
            "heads": (attention.heads, attention.kv_heads),
            "head_dim": attention.head_dim,
            "eps": None if q_norm is None else q_norm.eps,
            "one_plus": q_norm is not None and q_norm.convention == "1+w",
            "interleaved": attention.rope is not None and ROPES[attention.rope][0],
        }
        self.rewrites = attention.rope is not None and ROPES[attention.rope][1] is not None
        self.constants = dict(attention.constants)
        self.static_kinds = written_kinds()
        forwards = [inspect.unwrap(type(m).forward) for m in (layer, self.attention)]
        if isinstance(layer, Block):
            forwards[0] = inspect.unwrap(type(layer).__mro__[2].forward)
        self.eager = forwards[1].__globals__.get("eager_attention_forward", _no_eager)
        named: dict[str, Any] = {}
        for forward in reversed(forwards):
            named.update(inspect.signature(forward).parameters)
        passes = set(attention.passes)
        self.defaults = {
            name: named[name].default
            for name in attention.passes
            if name in named and named[name].default is not inspect.Parameter.empty
        }
        plain = {n for n, p in named.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
        # Arguments that mean something to the layer's own code, or that were never tried.
        self.special = frozenset(
            (plain | CACHE_NAMES | {"output_attentions"} | set(self.constants))
            - {spec.cache, spec.mask, spec.angles}
            - passes
        )
        self.inside = tuple(module for module in layer.modules() if module is not layer)
        # What is called as a module is its own affair, with all that is inside it.
        called = set() if self.whole else {*self.down.modules(), *self.second.modules()}
        inside = [module for module in self.inside if module not in called]
        holders = [layer, *(module for module in inside if module._modules)]
        self.tables = [(m._modules, list(m._modules.values())) for m in holders]
        # The others have accelerate's hooks, which move inputs to where they are already.
        self.bare = tuple(module for module in inside if "forward" not in vars(module))
        self._attributes: tuple[dict[str, Any], ...] | None = None
        self.hooks = tuple(
            table for m in inside for table in (m._forward_hooks, m._forward_pre_hooks)
        )

    def fits(self, x: Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether this call is the one that was proven, and nobody watches what is passed by."""
        weight = self.first._buffers["packed_weight"]
        return (
            x.dtype is weight.dtype
            and x.dim() == 3
            and not _any_autocast()
            and not (torch.is_grad_enabled() and self._learns(x))
            and self.special.isdisjoint(kwargs)
            and (self.spec.attention.rope is None or kwargs.get(self.spec.angles) is not None)
            and (self.spec.attention.growth is None or kwargs.get("position_ids") is not None)
            and not (any(self.hooks) and self._watched())
            and self._is_intact()
        )

    def _learns(self, x: Tensor) -> bool:
        if x.requires_grad:
            return True
        tensors = (p for m in self.inside for p in m._parameters.values() if p is not None)
        return any(tensor.requires_grad for tensor in tensors)

    def _watched(self) -> bool:
        """Whether a hook inside would see something: transformers' own see only what is asked."""
        hooks = [hook for table in self.hooks for hook in table.values()]
        if any(getattr(hook, "__module__", "") != _CAPTURING for hook in hooks):
            return True
        wanted = sys.modules[_CAPTURING]._active_collector.get()
        return wanted is not None and any(
            not key.startswith("_") for key in wanted if key != _STATES
        )

    def _is_intact(self) -> bool:
        """Whether every module inside is the one that was there, with the forward that it had."""
        for table, modules in self.tables:
            if list(table.values()) != modules:
                return False
        if _is_compiling():
            return True
        if self._attributes is None:
            self._attributes = tuple(vars(module) for module in self.bare)
        for attributes in self._attributes:
            if "forward" in attributes:
                return False
        return not (self.first.site.scattered or (self.whole and self.second.site.scattered))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_attributes": None}

    def run(self, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """The block of hidden states ``x`` (B, T, K), with the layer's arguments by name."""
        x, half = self.first_half(x, kwargs), self.spec.mlp
        if self.whole:
            inner = _normed(self.second, x, half.activation, half.gated)
            return self.after[1](self.down, inner, x, half.scale)
        inner = self.down(self.second(x))
        return self.after[1].sum(inner[0] if half.in_tuple else inner, x, half.scale)

    def first_half(self, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """``x`` (B, T, K) with what its attention adds; takes the arguments out of ``kwargs``."""
        spec = self.spec
        mask = kwargs.pop(spec.mask, None)
        angles = kwargs.pop(spec.angles, None)
        cache = kwargs.pop(spec.cache, None)
        if not kwargs.keys() >= self.defaults.keys():
            kwargs = {**self.defaults, **kwargs}
        half = spec.attention
        q, k, v, fixed = self._heads(_normed(self.first, x), angles, cache, kwargs)
        interface = _interface(self.attention.config, self.eager)
        if (
            fixed
            and interface is sdpa_attention_forward
            and attention.serves(q, k, mask)
            and not self.constants.get("dropout")
            and _SDPA_READS.isdisjoint(self.constants.keys() | kwargs.keys())
        ):
            scale = self.constants.get("scaling") or q.shape[-1] ** -0.5
            added = numbers_of(self, q.dtype, mask)
            mixed = attention.grouped_attention(q, k, v, added, scale)
        else:
            own = {name: self.attention._parameters[key] for name, key in half.owned}
            given = {**self.constants, **own}
            mixed = interface(self.attention, q, k, v, mask, **given, **kwargs)[0]
        return self.after[0](self.output, mixed.reshape(*x.shape[:-1], -1), x, half.scale)

    def _heads(
        self, qkv: Tensor, angles: Any, cache: Any, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor, bool]:
        """q, k and v as the attention function takes them, the cache updated; and whether their
        length stays what it is, for what takes its time with a new one."""
        half, (q_norm, k_norm) = self.spec.attention, self.gains
        cos, sin = (None, None) if half.rope is None else angles
        if self.rewrites:
            cos, sin = tables_of(self, half.rope, cos, sin)
        tokens, room, more = qkv.shape[1], None, {}
        if cache is not None:
            room = places_in(cache, half.layer_index, tokens, self.static_kinds)
            if room is not None:
                more = {"key_cache": room.keys, "value_cache": room.values}
                more["cache_position"] = room.cumulative_length
        if q_norm is not None:
            more["q_gain"], more["k_gain"] = q_norm.weight, k_norm.weight
        q, k, v = rotary_heads(qkv, cos, sin, **self.layout, **more)
        if half.growth is not None:
            q = q * factors_of(self, (*half.growth, q.dtype), kwargs["position_ids"])
        if room is not None:
            move_on(room, tokens)
        elif cache is not None and half.update_kwargs is None:
            k, v = cache.update(k, v, half.layer_index)
        elif cache is not None:
            given = {n: value for n, value in kwargs.items() if n not in half.withheld}
            given = {**dict(half.update_constants), **given}
            k, v = cache.update(k, v, half.layer_index, **{half.update_kwargs: given})
        return q, k, v, room is not None


_STATES = "hidden_states"


def _normed(
    norm: nn.Module, x: Tensor, activation: str | None = None, gated: bool = False
) -> Tensor:
    """The packed linears of a patched norm, with the activation that follows, in one launch."""
    buffers, source = norm._buffers, norm.site.source
    return norm_linear(
        x,
        buffers["packed_weight"],
        source.eps,
        buffers["packed_bias"],
        None if norm.site.folded else source.live_gain(),
        activation=activation,
        gated=gated,
    )


class _Added:
    """What a half adds to its input: its last linear's product, or the norm of that."""

    def __init__(self, layer: nn.Module, post: NormUse | None) -> None:
        self.gain = None if post is None else Gain(layer, post)

    def __call__(self, last: nn.Module, x: Tensor, residual: Tensor, scale: float) -> Tensor:
        weight, bias = last._parameters["weight"], last._parameters["bias"]
        if self.gain is None:
            return linear(x, weight, bias, residual=residual, scale=scale)
        return self.sum(linear(x, weight, bias), residual, scale)

    def sum(self, inner: Tensor, residual: Tensor, scale: float) -> Tensor:
        """The same of what the last module has given."""
        if self.gain is None:
            return torch.add(residual, inner, alpha=scale)
        gain = self.gain
        return add_rms_norm(inner, residual, gain.eps, gain.weight, one_plus=gain.one_plus)


def _interface(config: Any, eager: Callable[..., Any]) -> Callable[..., Any]:
    """The attention function that the config names at this moment."""
    if _is_compiling():
        return ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager)
    # The config's and the interface's own ways there take longer than a launch.
    name = object.__getattribute__(config, "__dict__").get("_attn_implementation_internal")
    function = _LOCAL.get(name) or _GLOBAL.get(name)
    if function is not None:
        return function
    return ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager)


def _no_eager(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "this layer has no eager attention: choose another with set_attn_implementation"
    )
