"""Writing keys and values into a static cache from the launch that makes them.

transformers' static layers write at positions that they count themselves. Where the class of a
layer has been seen to do just that, and no more, the launch writes there and the count is moved on
as the class moves it; any other cache is given its keys and values through its own ``update``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


class StaticPlaces:
    """A static layer of a cache, ready to be written to."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def room_for(self, tokens: int) -> dict[str, Tensor]:
        """The buffers and the next positions, as ``rotary_heads`` takes them; moves the count on."""
        layer = self.layer
        count = layer.cumulative_length
        if tokens == 1:
            position = count.reshape(1).clone()
        else:
            position = torch.arange(tokens, device=count.device) + count
        count.add_(tokens)
        return {
            "key_cache": layer.keys,
            "value_cache": layer.values,
            "cache_position": position,
        }


def static_layer(cache: Any, index: int | None) -> StaticPlaces | None:
    """The static layer ``index`` of ``cache``, or None where the cache's own update is to be used."""
    return None
