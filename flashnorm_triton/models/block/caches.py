"""Writing keys and values into a static cache from the launch that makes them.

transformers' static layers write at positions that they count themselves. Where a layer's class has
been seen to do just that and no more, the launch writes there, and the counts are moved on as the
class moves them. Any other cache is given its keys and values through its own ``update``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, StaticLayer, StaticSlidingWindowLayer


def places_in(cache: Any, index: int | None, tokens: int, kinds: tuple[type, ...]) -> Any:
    """The static layer of ``cache`` that ``tokens`` more keys and values are just written into.

    None where the cache's own update is to be used: for another kind of cache, one that moves its
    layers to and from the host, one that holds nothing yet, or a window that is running over.
    ``kinds`` are :func:`written_kinds`.
    """
    if type(cache).update is not Cache.update or getattr(cache, "offloading", True):
        return None
    layers = cache.layers
    if index is None or index >= len(layers):
        return None
    layer = layers[index]
    if type(layer) not in kinds or not layer.is_initialized:
        return None
    if type(layer) is StaticLayer or layer.cumulative_length_int + tokens <= layer.max_cache_len:
        return layer
    return None


def move_on(layer: Any, tokens: int) -> None:
    """Count ``tokens`` more, as the layer's update does."""
    layer.cumulative_length.add_(tokens)
    if type(layer) is StaticSlidingWindowLayer:
        layer.cumulative_length_int += tokens


@functools.cache
def written_kinds() -> tuple[type, ...]:
    """The classes of static layers that have been seen to do what :func:`places_in` says."""
    return tuple(kind for kind in (StaticLayer, StaticSlidingWindowLayer) if _writes(kind))


def _writes(kind: type) -> bool:
    """Whether the class, as it is installed, writes at its count, moves it on, and no more."""
    draw = torch.Generator(device="cpu").manual_seed(0)
    room, shapes = 9, [(2, 3, tokens, 4) for tokens in (3, 1, 2)]
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        sizes = (room,) if kind is StaticLayer else (room, room)
        layers = [kind(*sizes) for _ in "ab"]
        given = [[torch.randn(*shape, generator=draw) for _ in "kv"] for shape in shapes]
        layers[0].lazy_initialization(*given[0])
        layers[1].lazy_initialization(*given[0])
        for k, v in given:
            tokens = k.shape[2]
            keys, values = layers[0].update(k, v)
            places = torch.arange(tokens) + layers[1].cumulative_length
            layers[1].keys.index_copy_(2, places, k)
            layers[1].values.index_copy_(2, places, v)
            move_on(layers[1], tokens)
            if keys is not layers[0].keys or values is not layers[0].values:
                return False
            if _state(layers[0]) != _state(layers[1]):
                return False
    return True


def _state(layer: Any) -> dict[str, Any]:
    """All that a layer holds, in plain values."""
    return {
        key: value.tolist() if isinstance(value, Tensor) else value
        for key, value in vars(layer).items()
    }
