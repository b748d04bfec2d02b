"""From a call of the decode block's operations to its launch, kept for the next call.

Flat, as ``dispatch``: in eager decoding the key of a kept call is host time at every layer.
"""

from __future__ import annotations

from torch import Tensor

from flashnorm_triton import block_reference
from flashnorm_triton.block_checks import check_add_rms_norm, check_caches, check_rotary_heads
from flashnorm_triton.block_reference import Layout


def add_rms_norm(x: Tensor, residual: Tensor, eps: float, gain: Tensor | None) -> Tensor:
    """``block_ops.add_rms_norm`` without gradients, of tensors that are just that."""
    check_add_rms_norm(x, residual, eps, gain)
    return block_reference.add_rms_norm(x, residual, eps, gain).contiguous()


def rotary_heads(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    layout: Layout,
) -> tuple[Tensor, Tensor, Tensor]:
    """``block_ops.rotary_heads`` without caches and gradients, of tensors that are just that."""
    check_rotary_heads(qkv, cos, sin, q_gain, k_gain, layout)
    return block_reference.rotary_heads(qkv, cos, sin, q_gain, k_gain, layout)


def rotary_heads_cached(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_position: Tensor,
    layout: Layout,
) -> Tensor:
    """The same with caches, which k and v are written into: q alone."""
    check_rotary_heads(qkv, cos, sin, q_gain, k_gain, layout)
    check_caches(qkv, key_cache, value_cache, cache_position, layout)
    q, k, v = block_reference.rotary_heads(qkv, cos, sin, q_gain, k_gain, layout)
    key_cache.index_copy_(2, cache_position.long(), k)
    value_cache.index_copy_(2, cache_position.long(), v)
    return q
