"""From a packed projection to attention's inputs: head norms, rotary embedding, places, one launch.

Paper: FlashNorm, arXiv 2407.09577, attention with RoPE and with QK-normalization. A program takes
some heads of one token; a head is held whole, and the partner of each column is loaded beside it
(the same lines of the cache), so that any pairing of columns is one form.
"""

import triton
import triton.language as tl

from flashnorm_triton.kernels.epilogue import rstd_of


@triton.jit
def _gain(pointer, ds, mask, HAS: tl.constexpr, ONE_PLUS: tl.constexpr):
    """A gain at columns ds, in fp32; 1 where there is none."""
    if HAS:
        gain = tl.load(pointer + ds, mask=mask, other=0.0).to(tl.float32)
        if ONE_PLUS:
            gain += 1.0
    else:
        gain = tl.full(ds.shape, 1.0, tl.float32)
    return gain


@triton.jit(do_not_specialize=["tokens", "places"])
def rotary_heads_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_gain_ptr,
    k_gain_ptr,
    position_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    tokens,
    places,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NORMED: tl.constexpr,
    HAS_Q_GAIN: tl.constexpr,
    HAS_K_GAIN: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SHARED: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Heads of q and k: y = n * cos + across * sin, n = x / rms(x) * gain if NORMED, else x.

    ``across`` is the partner's n, negated for the first of a pair: R / 2 columns apart, or
    neighbours if INTERLEAVED; columns from R on are n. Heads of v are copied. fp32, one rounding.

    qkv (B * tokens, (Q_HEADS + 2 KV_HEADS) * D), cos and sin (B or 1 if SHARED, tokens, R),
    q (B * tokens, Q_HEADS * D), k and v (B, KV_HEADS, places, D), all contiguous. Token t goes to
    place t, to position[t] if PLACES is "each", or to position[0] + t if it is "first": what is no
    place is left out. Grid: (B * tokens, cdiv(all heads, HEADS)).
    """
    row = tl.program_id(0)
    batch = row // tokens
    token = row % tokens
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    ds = tl.arange(0, BLOCK_D)
    TURNED: tl.constexpr = Q_HEADS + KV_HEADS
    ALL: tl.constexpr = TURNED + KV_HEADS
    live = (heads < ALL)[:, None]
    is_q = (heads < Q_HEADS)[:, None]
    turned = (heads < TURNED)[:, None]
    head = qkv_ptr + row.to(tl.int64) * (ALL * D) + heads[:, None] * D
    mask = live & (ds < D)[None, :]
    x = tl.load(head + ds[None, :], mask=mask, other=0.0).to(tl.float32)
    y = x
    s = tl.full((HEADS,), 1.0, tl.float32)
    if NORMED:
        s = rstd_of(tl.sum(x * x, axis=1), D, eps)
        q_gain = _gain(q_gain_ptr, ds, ds < D, HAS_Q_GAIN, ONE_PLUS)
        k_gain = _gain(k_gain_ptr, ds, ds < D, HAS_K_GAIN, ONE_PLUS)
        y = x * s[:, None] * tl.where(is_q, q_gain[None, :], k_gain[None, :])
    if R > 0:
        inside = ds < R
        if INTERLEAVED:
            first = ds % 2 == 0
            partner = tl.where(first, ds + 1, ds - 1)
        else:
            first = ds < R // 2
            partner = tl.where(first, ds + R // 2, ds - R // 2)
        across = tl.load(head + partner[None, :], mask=turned & inside[None, :], other=0.0)
        across = across.to(tl.float32)
        if NORMED:
            q_gain = _gain(q_gain_ptr, partner, inside, HAS_Q_GAIN, ONE_PLUS)
            k_gain = _gain(k_gain_ptr, partner, inside, HAS_K_GAIN, ONE_PLUS)
            across = across * s[:, None] * tl.where(is_q, q_gain[None, :], k_gain[None, :])
        angle = token if SHARED else row
        angles = angle.to(tl.int64) * R + ds
        cos = tl.load(cos_ptr + angles, mask=inside, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + angles, mask=inside, other=0.0).to(tl.float32)
        sin = tl.where(first, -sin, sin)
        y = tl.where(inside[None, :], y * cos[None, :] + across * sin[None, :], y)
    out = tl.where(turned, y, x).to(q_ptr.dtype.element_ty)
    q_row = q_ptr + row.to(tl.int64) * (Q_HEADS * D) + heads[:, None] * D
    tl.store(q_row + ds[None, :], out, mask=mask & is_q)
    place = token.to(tl.int64)
    if PLACES == "each":
        place = tl.load(position_ptr + token).to(tl.int64)
    elif PLACES == "first":
        place += tl.load(position_ptr).to(tl.int64)
    mask &= (place >= 0) & (place < places)
    k_head = (batch.to(tl.int64) * KV_HEADS + heads - Q_HEADS) * places + place
    v_head = (batch.to(tl.int64) * KV_HEADS + heads - TURNED) * places + place
    tl.store(
        k_ptr + k_head[:, None] * D + ds[None, :],
        out,
        mask=mask & turned & (heads >= Q_HEADS)[:, None],
    )
    tl.store(v_ptr + v_head[:, None] * D + ds[None, :], out, mask=mask & (heads >= TURNED)[:, None])
