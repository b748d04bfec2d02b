"""From a call of the decode block's operations to its launch, kept for the next call.

Flat, as ``dispatch``: in eager decoding the key of a kept call is host time at every layer. Plain
torch serves a CPU, float64, and what the kernels do not hold: heads wider than a block, caches that
are not contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashnorm_triton import block_reference, fallback, launch
from flashnorm_triton.block_checks import check_add_rms_norm, check_caches, check_rotary_heads
from flashnorm_triton.block_reference import Layout
from flashnorm_triton.dispatch import on_device
from flashnorm_triton.launch.common import empty_of
from flashnorm_triton.launch.rotary import WIDEST, RotaryHeads

_READY_MOST = 2048
_ready: dict[tuple, Callable[..., Any]] = {}
_kernels: dict[tuple, Any] = {}
_FEW_TILES, _MANY_TILES = 256, 1024


def add_rms_norm(
    x: Tensor, residual: Tensor, eps: float, gain: Tensor | None, one_plus: bool = False
) -> Tensor:
    """``block_ops.add_rms_norm`` without gradients, of tensors that are just that."""
    key = (
        x.shape,
        eps,
        one_plus,
        _traits(x),
        _traits(residual),
        residual.shape,
        None if gain is None else (_traits(gain), gain.shape),
    )
    run = _ready.get(key)
    if run is None:
        check_add_rms_norm(x, residual, eps, gain)

        def in_torch(x: Tensor, gain: Tensor | None, residual: Tensor) -> Tensor:
            return block_reference.add_rms_norm(x, residual, eps, gain, one_plus).contiguous()

        def prepare() -> Callable[..., Tensor]:
            return _prepare_norm(x, residual, float(eps), gain, one_plus) or in_torch

        return _first_call(key, "add_rms_norm", prepare, in_torch, x, gain, residual)
    return run(x, gain, residual)


def _prepare_norm(
    x: Tensor, residual: Tensor, eps: float, gain: Tensor | None, one_plus: bool
) -> Callable[..., Tensor] | None:
    given = [tensor for tensor in (x, residual, gain) if tensor is not None]
    if not _served(x) or not all(tensor.is_contiguous() for tensor in given):
        return None
    k = x.shape[-1]
    kept = ("norm", k, one_plus, x.get_device(), *map(_compiled_for, (x, residual, gain)))
    if kept not in _kernels:
        _kernels[kept] = launch.RmsNorm(k, gain is not None, x.dtype, True, one_plus)
    geometry = launch.Geometry(x.numel() // k, k, x.shape[:-1], x.get_device())
    return on_device(_kernels[kept].bind(geometry, eps), x)


def rotary_heads(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    layout: Layout,
) -> tuple[Tensor, Tensor, Tensor]:
    """``block_ops.rotary_heads`` without caches and gradients, of tensors that are just that."""
    key = (qkv.shape, layout, *map(_shaped, (qkv, cos, sin, q_gain, k_gain)))
    run = _ready.get(key)
    if run is None:
        check_rotary_heads(qkv, cos, sin, q_gain, k_gain, layout)
        given = qkv, cos, sin, q_gain, k_gain

        def in_torch(*given: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
            return block_reference.rotary_heads(*given, layout)

        def prepare() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
            return _prepare_heads(given, layout) or in_torch

        return _first_call(key, "rotary_heads", prepare, in_torch, *given)
    return run(qkv, cos, sin, q_gain, k_gain)


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
    caches = key_cache, value_cache, cache_position
    key = (qkv.shape, layout, *map(_shaped, (qkv, cos, sin, q_gain, k_gain, *caches)))
    run = _ready.get(key)
    if run is None:
        check_rotary_heads(qkv, cos, sin, q_gain, k_gain, layout)
        check_caches(qkv, *caches, layout)
        given = qkv, cos, sin, q_gain, k_gain

        def prepare() -> Callable[..., Tensor]:
            return _launcher(given, caches, layout) or in_torch

        def in_torch(*operands: Tensor) -> Tensor:
            position, key_cache, value_cache = operands[5:]
            q, k, v = block_reference.rotary_heads(*operands[:5], layout)
            if position.dim() == 0:
                position = position + torch.arange(k.shape[2], device=k.device)
            key_cache.index_copy_(2, position.long(), k)
            value_cache.index_copy_(2, position.long(), v)
            return q

        operands = *given, cache_position, key_cache, value_cache
        return _first_call(key, "rotary_heads", prepare, in_torch, *operands)
    return run(qkv, cos, sin, q_gain, k_gain, cache_position, key_cache, value_cache)


def _prepare_heads(
    given: tuple[Tensor | None, ...], layout: Layout
) -> Callable[..., tuple[Tensor, Tensor, Tensor]] | None:
    launched = _launcher(given, None, layout)
    if launched is None:
        return None
    batch, tokens = given[0].shape[:2]
    shape = batch, layout.kv_heads, tokens, layout.head_dim
    empty = empty_of(shape, given[0].dtype, given[0].get_device())

    def run(
        qkv: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        q_gain: Tensor | None,
        k_gain: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        k, v = empty(qkv), empty(qkv)
        return launched(qkv, cos, sin, q_gain, k_gain, None, k, v), k, v

    return run


def _launcher(
    given: tuple[Tensor | None, ...],
    caches: tuple[Tensor, Tensor, Tensor] | None,
    layout: Layout,
) -> Callable[..., Tensor] | None:
    """run(qkv, cos, sin, q_gain, k_gain, position, k, v) -> q; None where it is torch's."""
    qkv, cos, sin, q_gain, k_gain = given
    written = caches[:2] if caches is not None else ()
    if not _served(qkv) or layout.head_dim > WIDEST:
        return None
    if not all(cache.is_contiguous() and cache.data_ptr() % 16 == 0 for cache in written):
        return None
    batch, tokens = qkv.shape[:2]
    few = batch * tokens * layout.columns < 1 << 18
    how = {
        "rotary": 0 if cos is None else cos.shape[-1],
        "q_gain": q_gain is not None,
        "k_gain": k_gain is not None,
        "shared": cos is None or cos.shape[0] == 1,
        "places": "" if caches is None else "each" if caches[2].dim() else "first",
        "tile": _FEW_TILES if few else _MANY_TILES,
    }
    position = None if caches is None else caches[2]
    kept = (layout, qkv.get_device(), *how.values(), *map(_compiled_for, (*given, position)))
    if kept not in _kernels:
        _kernels[kept] = RotaryHeads(layout, **how)
    places = tokens if caches is None else caches[0].shape[2]
    run = _kernels[kept].bind(batch, tokens, places, qkv)
    if not all(t is None or t.is_contiguous() for t in (*given, position)):
        run = _dense(run)
    return on_device(run, qkv)


def _served(x: Tensor) -> bool:
    """Whether x is a kernel's: on a GPU with Triton, neither float64 nor empty.

    Interpreted kernels are for tests of the kernels themselves: they take seconds.
    """
    if not fallback.has_kernels(x) or x.dtype == torch.float64 or x.numel() == 0:
        return False
    if reason := fallback.unavailable(x):
        fallback.warn_once(reason, f"running plain torch: {reason}", stacklevel=6)
        return False
    return True


def _traits(tensor: Tensor) -> tuple:
    return tensor.dtype, tensor.get_device(), tensor.data_ptr() & 15, tensor.stride()


def _shaped(tensor: Tensor | None) -> tuple | None:
    """What decides of a tensor which compiled code serves it, and whether it is copied."""
    if tensor is None:
        return None
    place = tensor.get_device(), tensor.data_ptr() & 15
    return tensor.shape, tensor.dtype, *place, tensor.is_contiguous()


def _compiled_for(tensor: Tensor | None) -> tuple | None:
    """What Triton specialises on; a copy of a tensor that is not contiguous is aligned."""
    if tensor is None:
        return None
    return tensor.dtype, not tensor.is_contiguous() or tensor.data_ptr() % 16 == 0


def _dense(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``run`` with what it reads made contiguous; what it writes is."""

    def copied(*operands: Tensor | None) -> Tensor:
        read = (None if t is None else t.contiguous() for t in operands[:6])
        return run(*read, *operands[6:])

    return copied


def _first_call(
    key: tuple,
    name: str,
    prepare: Callable[[], Callable[..., Any]],
    in_torch: Callable[..., Any],
    *operands: Tensor | None,
) -> Any:
    """Make a call of a new key, and keep what made it."""
    result, run = fallback.first_call(f"the {name} kernel", prepare, in_torch, *operands)
    # Keys hold exact shapes; prompts of ever new lengths must not fill the memory.
    if len(_ready) >= _READY_MOST:
        _ready.clear()
    _ready[key] = run
    return result
