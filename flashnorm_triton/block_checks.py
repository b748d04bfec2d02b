"""The argument checks of the decode block's operations: messages name the value and the remedy."""

from __future__ import annotations

import torch
from torch import Tensor

from flashnorm_triton.block_reference import Layout
from flashnorm_triton.checks import (
    check_device,
    check_dtype,
    check_eps,
    check_gain,
    check_rms_norm,
)


def check_add_rms_norm(x: Tensor, residual: Tensor, eps: float, gain: Tensor | None) -> None:
    """Raise TypeError or ValueError unless ``add_rms_norm`` of these is well formed."""
    check_rms_norm(x, eps, gain)
    if residual.shape != x.shape:
        raise ValueError(
            f"residual has shape {tuple(residual.shape)}, x has {tuple(x.shape)}: they must be "
            "equal"
        )
    if residual.dtype != x.dtype:
        raise TypeError(f"residual is {residual.dtype}, x is {x.dtype}: convert one of them")
    check_device("residual", residual, x)


def check_rotary_heads(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    layout: Layout,
) -> None:
    """Raise TypeError or ValueError unless ``rotary_heads`` of these is well formed."""
    check_dtype("qkv", qkv)
    for name, count in (("q", layout.q_heads), ("kv", layout.kv_heads)):
        if count < 1:
            raise ValueError(f"heads names {count} {name} heads; there must be at least one")
    if layout.head_dim < 1:
        raise ValueError(f"head_dim is {layout.head_dim}; it must be at least 1")
    if qkv.dim() != 3 or qkv.shape[-1] != layout.columns:
        raise ValueError(
            f"qkv has shape {tuple(qkv.shape)}; {layout.q_heads} heads of q and "
            f"{layout.kv_heads} each of k and v, {layout.head_dim} wide, make it (B, T, "
            f"{layout.columns})"
        )
    if (cos is None) != (sin is None):
        raise ValueError("cos and sin go together: give both, or neither for no rotation")
    if cos is not None and sin is not None:
        _check_angles(qkv, cos, sin, layout)
    if layout.eps is not None:
        check_eps(layout.eps)
    for name, gain in (("q_gain", q_gain), ("k_gain", k_gain)):
        if gain is not None:
            if layout.eps is None:
                raise ValueError(f"{name} is given, but no eps: the gain is that of a norm")
            check_gain(name, gain, qkv, layout.head_dim)


def _check_angles(qkv: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> None:
    batch, tokens = qkv.shape[:2]
    for name, table in (("cos", cos), ("sin", sin)):
        fits = table.dim() == 3 and table.shape[0] in (1, batch) and table.shape[1] == tokens
        width = table.shape[-1] if table.dim() else 0
        if not fits or width % 2 or not 2 <= width <= layout.head_dim:
            raise ValueError(
                f"{name} has shape {tuple(table.shape)}; it must be (1 or {batch}, {tokens}, R) "
                f"with R even and at most the head's {layout.head_dim} columns"
            )
        if table.dtype not in (qkv.dtype, torch.float32):
            raise TypeError(f"{name} is {table.dtype}, qkv is {qkv.dtype}: use qkv's or float32")
        check_device(name, table, qkv)
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise ValueError(
            f"cos is {cos.dtype} {tuple(cos.shape)}, sin is {sin.dtype} {tuple(sin.shape)}: they "
            "must be alike"
        )


def check_caches(
    qkv: Tensor, key_cache: Tensor, value_cache: Tensor, position: Tensor, layout: Layout
) -> None:
    """Raise TypeError or ValueError unless k and v of ``qkv`` can be written into these caches."""
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        wanted = (qkv.shape[0], layout.kv_heads, layout.head_dim)
        if cache.dim() != 4 or (*cache.shape[:2], cache.shape[3]) != wanted:
            raise ValueError(
                f"{name} has shape {tuple(cache.shape)}; it must be ({wanted[0]}, {wanted[1]}, "
                f"length, {wanted[2]})"
            )
        if cache.dtype != qkv.dtype:
            raise TypeError(f"{name} is {cache.dtype}, qkv is {qkv.dtype}: they must be alike")
        check_device(name, cache, qkv)
    if key_cache.shape != value_cache.shape:
        raise ValueError(
            f"key_cache has shape {tuple(key_cache.shape)}, value_cache "
            f"{tuple(value_cache.shape)}: they must be equal"
        )
    fits = position.dim() == 0 or position.shape == qkv.shape[1:2]
    if not fits or position.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"cache_position is {position.dtype} {tuple(position.shape)}; it must be int64 or "
            f"int32 with one place for each of {qkv.shape[1]} tokens, or no dimension: the first's"
        )
    check_device("cache_position", position, qkv)
