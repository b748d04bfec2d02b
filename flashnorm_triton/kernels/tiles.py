"""Portable tensor-core tiles in plain Triton: single pass, or with s from a statistics kernel.

On Hopper one loaded x tile must not feed both an asynchronous ``tl.dot`` and register arithmetic:
Triton's pipeliner then gives x's buffer a slot too few and the next copy overtakes the running
instruction. Three forms keep clear of it, and the buffer-depth lint checks each compiled result:
``own`` loads x for the squares through a pointer argument of its own (the same address: two
arguments, so that the compiler cannot merge the loads); ``shared`` uses one load, for targets and
tiles whose matrix instruction is synchronous; ``given`` reads s instead of computing it. ``none``
is a linear layer without a norm: s is 1.
"""

import triton
import triton.language as tl

from flashnorm_triton.kernels.epilogue import (
    activated,
    plus_residual,
    rstd_of,
    scaled,
    weighed,
    weight_rows,
)


@triton.jit(do_not_specialize=["M"])
def norm_tiles_kernel(
    x_ptr,
    x_squares_ptr,
    w_ptr,
    bias_ptr,
    gain_ptr,
    s_ptr,
    mean_ptr,
    row_sums_ptr,
    residual_ptr,
    y_ptr,
    M,
    stride_xm,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE_WN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SQUARES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    CENTRED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
    SCALE: tl.constexpr,
):
    """z = s * (x (* gain)) @ w.T (+ bias) for a BLOCK_M x BLOCK_N tile, then kernels/epilogue.py.

    Grid: (cdiv(M, BLOCK_M) * cdiv(N, BLOCK_N),), walked GROUP_M row blocks at a time so that
    neighbours share weights in L2. SQUARES is "own", "shared", "given" or "none" (see the module);
    all but the residual is multiplied by SCALE. UPCAST multiplies in fp32: for the CPU interpreter,
    whose bf16 dot is wrong. CENTRED needs "given"; it takes the mean off after the product, to
    fp32's rounding: enough for a half-precision result while the mean is below some 1000 deviations
    (the GEMV has no such bound).
    """
    pid = tl.program_id(0)
    blocks_m = tl.cdiv(M, BLOCK_M)
    blocks_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    group = pid // (GROUP_M * blocks_n)
    group_size = min(blocks_m - group * GROUP_M, GROUP_M)
    within = pid % (GROUP_M * blocks_n)
    block_m = group * GROUP_M + within % group_size
    block_n = within // group_size

    rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    features = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = rows < M
    col_mask = features < N
    cols = weight_rows(features, N, GATED)
    ks = tl.arange(0, BLOCK_K)
    x_offsets = rows.to(tl.int64)[:, None] * stride_xm + ks[None, :]
    x_tile = x_ptr + x_offsets
    x_squares_tile = x_squares_ptr + x_offsets
    w_tile = w_ptr + cols.to(tl.int64)[None, :] * STRIDE_WN + ks[:, None]
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    # Out-of-range columns read a valid row and are not stored: the loop then needs no column mask.
    if N % BLOCK_N != 0:
        inside = weight_rows(features % N, N, GATED)
        w_tile = w_ptr + inside.to(tl.int64)[None, :] * STRIDE_WN + ks[:, None]

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            x = tl.load(x_tile + k, mask=row_mask[:, None], other=0.0)
            w = tl.load(w_tile + k)
        else:
            k_mask = ks + k < K
            x = tl.load(x_tile + k, mask=row_mask[:, None] & k_mask[None, :], other=0.0)
            w = tl.load(w_tile + k, mask=k_mask[:, None], other=0.0)
        if SQUARES == "own":
            if EVEN_K:
                z = tl.load(x_squares_tile + k, mask=row_mask[:, None], other=0.0)
            else:
                in_k = ks + k < K
                z = tl.load(x_squares_tile + k, mask=row_mask[:, None] & in_k[None, :], other=0.0)
            zf = z.to(tl.float32)
            squares += zf * zf
        elif SQUARES == "shared":
            xf = x.to(tl.float32)
            squares += xf * xf
        if HAS_GAIN:
            g = tl.load(gain_ptr + ks + k, mask=ks + k < K, other=0.0).to(tl.float32)
            x = (x.to(tl.float32) * g[None, :]).to(x.dtype)
        if UPCAST:
            acc = tl.dot(x.to(tl.float32), w.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, w, acc, input_precision="ieee")
    if SQUARES == "given":
        s = tl.load(s_ptr + rows, mask=row_mask, other=0.0)
    elif SQUARES == "none":
        s = tl.full((BLOCK_M,), 1.0, tl.float32)
    else:
        tl.static_assert(not CENTRED, "the mean is given, with the scale")
        s = rstd_of(tl.sum(squares, axis=1), K, eps)
    mean = s
    if CENTRED:
        mean = tl.load(mean_ptr + rows, mask=row_mask, other=0.0)
    z = scaled(acc, s, mean, bias_ptr, row_sums_ptr, cols, col_mask, HAS_BIAS, CENTRED)
    y = weighed(activated(z, ACTIVATION, GATED), SCALE)
    WIDTH: tl.constexpr = N // 2 if GATED else N
    ACROSS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    out = block_n * ACROSS + tl.arange(0, ACROSS)
    offsets = rows.to(tl.int64)[:, None] * WIDTH + out[None, :]
    mask = row_mask[:, None] & (out < WIDTH)[None, :]
    y = plus_residual(y, residual_ptr, offsets, mask, HAS_RESIDUAL)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)
