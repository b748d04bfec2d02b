"""What a decode block takes beside ``norm_linear``, each as one launch; registered with torch.

``linear`` adds the residual in its epilogue, ``rotary_heads`` prepares queries, keys and values for
the attention that the model has, ``add_rms_norm`` is the end of a sandwich norm. As in ``ops``, an
eager call without gradients goes straight to the kernel; where a gradient is wanted these are plain
torch, which differentiates it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashnorm_triton import block_dispatch, block_reference, dispatch, inductor, transforms
from flashnorm_triton.block_checks import check_add_rms_norm, check_caches, check_rotary_heads
from flashnorm_triton.block_reference import Layout
from flashnorm_triton.dispatch import Call, Epilogue
from flashnorm_triton.ops import plain_eager
from flashnorm_triton.plans import Plan

__all__ = ["add_rms_norm", "linear", "rotary_heads"]


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    scale: float = 1.0,
    plan: Plan | None = None,
) -> Tensor:
    """scale * (x @ weight.T + bias) + residual, with all that follows the product in its epilogue.

    Args:
        x: (..., K), bfloat16, float16, float32 or float64; any strides.
        weight: (N, K), same dtype and device, last dimension contiguous.
        bias: (N,), same dtype.
        residual: (..., N), same dtype; added last, and never written to.
        scale: a number, such as Granite's residual multiplier.
        plan: runs this plan rather than the chosen one, without gradients; for tests and tuning.

    Returns:
        (..., N) in x's dtype, contiguous. fp32 inside, rounded once; where many rows make it the
        library's matmul, its product may be rounded before a bias with a residual, or a scale, is
        added. Differentiable. Under autocast the product is what torch makes of it.

    Raises:
        TypeError: a dtype that is not supported, or dtypes that differ.
        ValueError: shapes, devices, strides or a scale that do not fit; the message names them.
    """
    more = Epilogue(residual=residual, normed=False, scale=scale)
    if plan is not None:
        call = Call(x, weight, 0.0, bias, None, more)
        call.check()
        dispatch.check_forced(plan, call)
        return dispatch.norm_linear(x, weight, 0.0, bias, None, more, plan)
    if plain_eager(x, weight, bias, residual):
        return dispatch.norm_linear(x, weight, 0.0, bias, None, more)
    autocasting = _autocasting(x)
    if autocasting or _differentiated(x, weight, bias, residual):
        Call(x, weight, 0.0, bias, None, more).check(same_dtype=not autocasting)
        return block_reference.linear(x, weight, bias, residual, scale)
    return torch.ops.flashnorm.linear(x, weight, bias, residual, scale)


def add_rms_norm(
    x: Tensor, residual: Tensor, eps: float, gain: Tensor | None = None, *, one_plus: bool = False
) -> Tensor:
    """residual + x / sqrt(mean(x^2) + eps) * gain over the last dimension, as one launch.

    x and residual (..., K) in one dtype; gain (K,) in x's dtype or float32, and 1 + that if
    ``one_plus``. Returns x's shape and dtype, contiguous, rounded once. Raises TypeError or
    ValueError for dtypes, shapes, devices or an eps that do not fit.
    """
    if plain_eager(x, residual, gain):
        return block_dispatch.add_rms_norm(x, residual, eps, gain, one_plus)
    if _differentiated(x, residual, gain):
        check_add_rms_norm(x, residual, eps, gain)
        return block_reference.add_rms_norm(x, residual, eps, gain, one_plus)
    return torch.ops.flashnorm.add_rms_norm(x, residual, eps, gain, one_plus)


def rotary_heads(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    *,
    heads: tuple[int, int],
    head_dim: int,
    q_gain: Tensor | None = None,
    k_gain: Tensor | None = None,
    eps: float | None = None,
    one_plus: bool = False,
    interleaved: bool = False,
    key_cache: Tensor | None = None,
    value_cache: Tensor | None = None,
    cache_position: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values for attention from a packed projection, as one launch.

    Heads of q and k are normed where an eps is given (FlashNorm, arXiv 2407.09577, attention with
    QK-normalization), x / sqrt(mean(x^2) + eps) * gain over a head's columns, and their first R
    columns are then rotated: x * cos + across * sin, where ``across`` is the partner of each
    column, negated for the first of a pair.

    Args:
        qkv: (B, T, (q + 2 kv) * head_dim), the heads of q, then of k, then of v.
        cos, sin: (1 or B, T, R), R even and at most head_dim, in qkv's dtype or float32: the
            model's own, scaling included. None, both, for layers without positions.
        heads: how many of q, and of k and v each.
        head_dim: columns of a head, D.
        q_gain, k_gain: (D,), the weights of the heads' norms, in qkv's dtype or float32.
        eps: of the heads' norms; None for no norm.
        one_plus: the gains are 1 + the weights.
        interleaved: partners are neighbours; else they are R / 2 columns apart.
        key_cache, value_cache: (B, kv, length, D), last dimension contiguous. Given, k and v are
            written into them, at ``cache_position`` (T,), int64 or int32, or one after the other
            from ``cache_position`` () on; a place that the cache has not is not written by a
            kernel. Without autograd.

    Returns:
        q (B, q, T, D), the transpose of a contiguous (B, T, q, D), which is how attention kernels
        return what they are given; k and v (B, kv, T, D) contiguous, or the caches.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or numbers that do not fit.
    """
    layout = Layout(*heads, head_dim, eps, one_plus, interleaved)
    if key_cache is None and value_cache is None and cache_position is None:
        tensors = qkv, cos, sin, q_gain, k_gain
        if plain_eager(*tensors):
            return block_dispatch.rotary_heads(*tensors, layout)
        if _differentiated(*tensors):
            check_rotary_heads(*tensors, layout)
            return block_reference.rotary_heads(*tensors, layout)
        return torch.ops.flashnorm.rotary_heads(*tensors, *layout)
    if key_cache is None or value_cache is None or cache_position is None:
        raise ValueError("key_cache, value_cache and cache_position go together: one is missing")
    given = qkv, cos, sin, q_gain, k_gain, key_cache, value_cache, cache_position
    if plain_eager(*given):
        q = block_dispatch.rotary_heads_cached(*given, layout)
    elif _differentiated(*given):
        raise RuntimeError(
            "caches are written without autograd: call under torch.no_grad(), or without caches"
        )
    else:
        q = torch.ops.flashnorm.rotary_heads_cached(*given, *layout)
    return q, key_cache, value_cache


def _differentiated(*tensors: Tensor | None) -> bool:
    """Whether a gradient may be wanted of these, or a transform of torch.func is at work."""
    if transforms.differentiated() or (not _is_compiling() and transforms.transformed()):
        return True
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


_is_compiling = torch.compiler.is_compiling


def _autocasting(x: Tensor) -> bool:
    return x.device.type in ("cuda", "cpu") and torch.is_autocast_enabled(x.device.type)


# Registration. The schemas are the operations' contract with torch.compile and export.
_LAYOUT = "int q_heads, int kv_heads, int head_dim, float? eps, bool one_plus, bool interleaved"
_PACKED = "Tensor qkv, Tensor? cos, Tensor? sin, Tensor? q_gain, Tensor? k_gain"
_CACHES = "Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor cache_position"

_library = torch.library.Library("flashnorm", "FRAGMENT")
_library.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, float scale) -> Tensor"
)
_library.define(
    "add_rms_norm(Tensor x, Tensor residual, float eps, Tensor? gain, bool one_plus) -> Tensor"
)
_library.define(f"rotary_heads({_PACKED}, {_LAYOUT}) -> (Tensor, Tensor, Tensor)")
_library.define(f"rotary_heads_cached({_PACKED}, {_CACHES}, {_LAYOUT}) -> Tensor")


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, scale: float
) -> Tensor:
    more = Epilogue(residual=residual, normed=False, scale=scale)
    return dispatch.norm_linear(x, weight, 0.0, bias, None, more)


def _rotary_heads(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    *layout: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return block_dispatch.rotary_heads(qkv, cos, sin, q_gain, k_gain, Layout(*layout))


def _rotary_heads_cached(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_position: Tensor,
    *layout: int,
) -> Tensor:
    return block_dispatch.rotary_heads_cached(
        qkv, cos, sin, q_gain, k_gain, key_cache, value_cache, cache_position, Layout(*layout)
    )


for _key in ("CPU", "CUDA"):
    _library.impl("linear", _linear, _key)
    _library.impl("add_rms_norm", block_dispatch.add_rms_norm, _key)
    _library.impl("rotary_heads", _rotary_heads, _key)
    _library.impl("rotary_heads_cached", _rotary_heads_cached, _key)


@torch.library.register_fake("flashnorm::linear", lib=_library)
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, scale: float
) -> Tensor:
    inductor.announce()  # a block's graph has this operation
    more = Epilogue(residual=residual, normed=False, scale=scale)
    call = Call(x, weight, 0.0, bias, None, more)
    call.check()
    return x.new_empty(call.shape)


@torch.library.register_fake("flashnorm::add_rms_norm", lib=_library)
def _(x: Tensor, residual: Tensor, eps: float, gain: Tensor | None, one_plus: bool) -> Tensor:
    check_add_rms_norm(x, residual, eps, gain)
    return x.new_empty(x.shape)


def _empty_heads(qkv: Tensor, count: int, head_dim: int, transposed: bool) -> Tensor:
    batch, tokens = qkv.shape[:2]
    if transposed:
        return qkv.new_empty(batch, tokens, count, head_dim).transpose(1, 2)
    return qkv.new_empty(batch, count, tokens, head_dim)


@torch.library.register_fake("flashnorm::rotary_heads", lib=_library)
def _(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    eps: float | None,
    one_plus: bool,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    layout = Layout(q_heads, kv_heads, head_dim, eps, one_plus, interleaved)
    check_rotary_heads(qkv, cos, sin, q_gain, k_gain, layout)
    q, k, v = (
        _empty_heads(qkv, count, head_dim, transposed)
        for count, transposed in ((q_heads, True), (kv_heads, False), (kv_heads, False))
    )
    return q, k, v


@torch.library.register_fake("flashnorm::rotary_heads_cached", lib=_library)
def _(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_position: Tensor,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    eps: float | None,
    one_plus: bool,
    interleaved: bool,
) -> Tensor:
    layout = Layout(q_heads, kv_heads, head_dim, eps, one_plus, interleaved)
    check_rotary_heads(qkv, cos, sin, q_gain, k_gain, layout)
    check_caches(qkv, key_cache, value_cache, cache_position, layout)
    return _empty_heads(qkv, q_heads, head_dim, True)
