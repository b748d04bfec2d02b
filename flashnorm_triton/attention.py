"""Attention of one query a sequence over a masked static cache, for the implementation "sdpa".

Given a mask, as any static cache gives one, transformers repeats keys and values for every query of
a group before it calls ``scaled_dot_product_attention``, since torch's kernels for masks do not
take groups; the repetition costs more than the attention. Torch's own cuDNN backend takes both.
This is that call. Where cuDNN refuses it the queries of a group are the rows of one head, or, heads
being wide, keys and values are repeated after all. cuDNN builds a plan for each length, tens of
milliseconds a piece: nothing for caches that grow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_HALF = (torch.bfloat16, torch.float16)
_WIDEST = 256
_WIDEST_AS_ROWS = 128
_refused: set[tuple[Any, ...]] = set()


def serves(q: Tensor, k: Tensor, mask: Tensor | None) -> bool:
    """Whether ``grouped_attention`` is the quick way: one masked query each, heads in groups."""
    return (
        mask is not None
        and q.is_cuda
        and q.shape[2] == 1
        and mask.dim() == 4
        and q.dtype in _HALF
        and q.shape[1] != k.shape[1]
        and q.shape[3] <= _WIDEST
        and mask.shape[1] == 1
        and mask.shape[2] == 1
        and mask.shape[3] == k.shape[2]
        and not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad))
    )


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """softmax(scale * q kᵀ + mask) v for one query a head.

    Args:
        q: (B, heads, 1, D), bfloat16 or float16.
        k, v: (B, kv heads, L, D), heads a multiple of kv heads.
        mask: (B or 1, 1, 1, L): True where a key is seen, or what is added to the product.
        scale: usually 1 / sqrt(D).

    Returns (B, 1, heads, D) contiguous: what an attention function of transformers returns.
    """
    return torch.ops.flashnorm.grouped_attention(q, k, v, numbers(mask, q.dtype), scale)


def numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as what is added to a product of ``dtype``; itself where it is that already."""
    return _added(mask, dtype) if mask.dtype == torch.bool else mask.to(dtype)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where the mask is True, else -inf; one launch, or a compiler's to fuse and to share."""
    if torch.compiler.is_compiling():
        return torch.where(mask, 0.0, float("-inf")).to(dtype)
    return torch.log(mask, out=torch.empty(mask.shape, dtype=dtype, device=mask.device))


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    mask = mask.expand(q.shape[0], 1, 1, k.shape[2])
    key = (q.shape, k.shape, k.stride(), v.stride(), mask.stride(), q.dtype, q.get_device())
    if q.is_cuda and key not in _refused and torch.backends.cuda.cudnn_sdp_enabled():
        try:
            out = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
                q, k, v, mask, False, 0.0, False, False, scale=scale
            )[0]
            return out.transpose(1, 2).contiguous()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # a size that this cuDNN has no kernel for
            _refused.add(key)
    if q.shape[3] <= _WIDEST_AS_ROWS:
        return _as_rows(q, k, v, mask, scale)
    group = q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(group, dim=1) for part in (k, v))
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.transpose(1, 2).contiguous()


def _as_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The queries of a group, which see the same keys, as the rows of one head."""
    batch, heads, _, width = q.shape
    rows = q.reshape(batch, k.shape[1], heads // k.shape[1], width)
    mask = mask.expand(batch, 1, rows.shape[2], k.shape[2])
    out = functional.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
    return out.reshape(batch, 1, heads, width)


_library = torch.library.Library("flashnorm", "FRAGMENT")
_library.define(
    "grouped_attention(Tensor q, Tensor k, Tensor v, Tensor mask, float scale) -> Tensor"
)
for _key in ("CPU", "CUDA"):
    _library.impl("grouped_attention", _attend, _key)


@torch.library.register_fake("flashnorm::grouped_attention", lib=_library)
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    batch, heads, tokens, width = q.shape
    return q.new_empty(batch, tokens, heads, width)
