"""Single pass for one or a few rows: no tensor cores, every weight read once.

Paper: FlashNorm, arXiv 2407.09577, section 2 (deferred normalisation). Each program owns BLOCK_N
features and streams their weights; the squares of x are accumulated from the same registers that
feed the products, so the norm costs no second read. There is no ``tl.dot``, hence no asynchronous
matrix instruction that a later copy could overtake.

A thread multiplies what it loaded: with BLOCK_K at least 16 bytes for every lane of every warp, x
and the weights have one layout along K, and a step touches no shared memory.
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


@triton.jit
def _load_weights(w_tile, k, k_mask, col_mask, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr):
    if EVEN_K and EVEN_N:
        w = tl.load(w_tile + k, eviction_policy="evict_first")
    else:
        mask = k_mask[None, :] & col_mask[:, None]
        w = tl.load(w_tile + k, mask=mask, other=0.0, eviction_policy="evict_first")
    return w.to(tl.float32)


@triton.jit
def _step_one_row(
    acc,
    squares,
    x_row,
    w_tile,
    gain_ptr,
    k,
    ks,
    col_mask,
    K: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    HAS_GAIN: tl.constexpr,
):
    """acc (BLOCK_N, BLOCK_K) and squares (BLOCK_K) after one more BLOCK_K of one row."""
    k_mask = ks + k < K
    if EVEN_K:
        x = tl.load(x_row + k).to(tl.float32)
    else:
        x = tl.load(x_row + k, mask=k_mask, other=0.0).to(tl.float32)
    w = _load_weights(w_tile, k, k_mask, col_mask, EVEN_K, EVEN_N)
    squares += x * x
    if HAS_GAIN:
        x *= tl.load(gain_ptr + ks + k, mask=k_mask, other=0.0).to(tl.float32)
    acc += w * x[None, :]
    return acc, squares


@triton.jit
def _halves(t):
    """Even and odd columns; neighbours are in one thread's registers, so nothing moves."""
    return tl.split(tl.reshape(t, (t.shape[0], t.shape[1] // 2, 2)))


@triton.jit
def _fold1(acc, squares, sums, w, x, z, CENTRED: tl.constexpr):
    if CENTRED:
        sums += x
    return acc + w[None, :, :] * z[:, None, :], squares + x * x, sums


@triton.jit
def _fold2(acc, squares, sums, w, x, z, CENTRED: tl.constexpr):
    w0, w1 = _halves(w)
    x0, x1 = _halves(x)
    z0, z1 = _halves(z)
    acc, squares, sums = _fold1(acc, squares, sums, w0, x0, z0, CENTRED)
    return _fold1(acc, squares, sums, w1, x1, z1, CENTRED)


@triton.jit
def _fold4(acc, squares, sums, w, x, z, CENTRED: tl.constexpr):
    w0, w1 = _halves(w)
    x0, x1 = _halves(x)
    z0, z1 = _halves(z)
    acc, squares, sums = _fold2(acc, squares, sums, w0, x0, z0, CENTRED)
    return _fold2(acc, squares, sums, w1, x1, z1, CENTRED)


@triton.jit
def _fold(acc, squares, sums, w, x, z, CENTRED: tl.constexpr, VECTOR: tl.constexpr):
    """Add w * z, x * x and x, folding the VECTOR neighbours that a thread loads at once into one.

    Multiply-adds alone, and an eighth (fp32: a quarter) of the accumulators: w (BLOCK_N, BLOCK_K),
    x and z (ROWS, BLOCK_K), acc (ROWS, BLOCK_N, BLOCK_K / VECTOR), the others without BLOCK_N.
    """
    tl.static_assert(VECTOR == 4 or VECTOR == 8)
    if VECTOR == 4:
        return _fold4(acc, squares, sums, w, x, z, CENTRED)
    else:
        w0, w1 = _halves(w)
        x0, x1 = _halves(x)
        z0, z1 = _halves(z)
        acc, squares, sums = _fold4(acc, squares, sums, w0, x0, z0, CENTRED)
        return _fold4(acc, squares, sums, w1, x1, z1, CENTRED)


@triton.jit
def _step_rows(
    acc,
    squares,
    sums,
    shift,
    x_tile,
    w_tile,
    gain_ptr,
    k,
    ks,
    col_mask,
    K: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    CENTRED: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The accumulators of ``_fold`` after one more BLOCK_K of some rows."""
    k_mask = ks + k < K
    if EVEN_K:
        x = tl.load(x_tile + k).to(tl.float32)
    else:
        x = tl.load(x_tile + k, mask=k_mask[None, :], other=0.0).to(tl.float32)
    w = _load_weights(w_tile, k, k_mask, col_mask, EVEN_K, EVEN_N)
    if CENTRED:
        x -= shift[:, None]
        if not EVEN_K:
            x = tl.where(k_mask[None, :], x, 0.0)
    z = x
    if HAS_GAIN:
        z = x * tl.load(gain_ptr + ks + k, mask=k_mask, other=0.0).to(tl.float32)[None, :]
    return _fold(acc, squares, sums, w, x, z, CENTRED, VECTOR)


@triton.jit
def _middle(x_rows, K: tl.constexpr):
    """A value amid each row's: the median of three. Not an outlier, unless two of three are."""
    a = tl.load(x_rows).to(tl.float32)
    b = tl.load(x_rows + K // 2).to(tl.float32)
    c = tl.load(x_rows + K - 1).to(tl.float32)
    return tl.maximum(tl.minimum(a, b), tl.minimum(tl.maximum(a, b), c))


@triton.jit
def _one_row(
    x_ptr, w_tile, bias_ptr, gain_ptr, y_ptr, first, stride_xm, eps, cols, col_mask,
    N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_GAIN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One row with nothing after the bias: an accumulator a product, reduced once at the end."""
    ks = tl.arange(0, BLOCK_K)
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    x_row = x_ptr + first * stride_xm + ks
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    if STAGES == 1:
        for k in tl.static_range(0, K, BLOCK_K):
            acc, squares = _step_one_row(
                acc, squares, x_row, w_tile, gain_ptr, k, ks, col_mask, K, EVEN_K, EVEN_N, HAS_GAIN
            )
    else:
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            acc, squares = _step_one_row(
                acc, squares, x_row, w_tile, gain_ptr, k, ks, col_mask, K, EVEN_K, EVEN_N, HAS_GAIN
            )
    y = tl.sum(acc, axis=1) * rstd_of(tl.sum(squares, axis=0), K, eps)
    if HAS_BIAS:
        y += tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + first * N + cols, y.to(y_ptr.dtype.element_ty), mask=col_mask)


@triton.jit(do_not_specialize=["M"])
def norm_gemv_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    gain_ptr,
    row_sums_ptr,
    residual_ptr,
    y_ptr,
    M,
    stride_xm,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE_WN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    CENTRED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    STAGES: tl.constexpr,
    VECTOR: tl.constexpr,
    ONE_ROW: tl.constexpr,
    NORMED: tl.constexpr,
    SCALE: tl.constexpr,
):
    """z[m, n] = s[m] * sum_k x[m, k] (* gain[k]) * w[n, k] (+ bias[n]), then kernels/epilogue.py.

    s = 1/rms(x[m]), or 1 if not NORMED; all but the residual is multiplied by SCALE. Grid:
    (cdiv(N, BLOCK_N), cdiv(M, ROWS)). x (M, K) with row stride ``stride_xm``, w (N, K) with row
    stride STRIDE_WN, y (M, N or N / 2) contiguous. STAGES > 1 copies ahead through shared memory;
    STAGES = 1 unrolls the loop over K, and the loads go straight to registers.

    CENTRED (LayerNorm) works on x - c, with c a value amid the row: the variance and the products
    then cancel no more than those of a row whose mean is about its deviation, in one pass.
    """
    features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = features < N
    cols = weight_rows(features, N, GATED)
    ks = tl.arange(0, BLOCK_K)
    w_tile = w_ptr + cols.to(tl.int64)[:, None] * STRIDE_WN + ks[None, :]
    first = tl.program_id(1).to(tl.int64) * ROWS
    if ONE_ROW:
        _one_row(
            x_ptr, w_tile, bias_ptr, gain_ptr, y_ptr, first, stride_xm, eps, cols, col_mask,
            N, K, BLOCK_N, BLOCK_K, HAS_BIAS, HAS_GAIN, STAGES,
        )  # fmt: skip
    else:
        EVEN_K: tl.constexpr = K % BLOCK_K == 0
        EVEN_N: tl.constexpr = N % BLOCK_N == 0
        rows = first + tl.arange(0, ROWS)
        # Rows beyond the last read it again and are not stored: no load needs a row mask.
        x_rows = x_ptr + tl.minimum(rows, M - 1) * stride_xm
        x_tile = x_rows[:, None] + ks[None, :]
        shift = tl.zeros((ROWS,), tl.float32)
        if CENTRED:
            shift = _middle(x_rows, K)
        acc = tl.zeros((ROWS, BLOCK_N, BLOCK_K // VECTOR), tl.float32)
        squares = tl.zeros((ROWS, BLOCK_K // VECTOR), tl.float32)
        sums = tl.zeros((ROWS, BLOCK_K // VECTOR), tl.float32)
        if STAGES == 1:
            for k in tl.static_range(0, K, BLOCK_K):
                acc, squares, sums = _step_rows(
                    acc, squares, sums, shift, x_tile, w_tile, gain_ptr, k, ks, col_mask, K,
                    EVEN_K, EVEN_N, HAS_GAIN, CENTRED, VECTOR,
                )  # fmt: skip
        else:
            for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
                acc, squares, sums = _step_rows(
                    acc, squares, sums, shift, x_tile, w_tile, gain_ptr, k, ks, col_mask,
                    K, EVEN_K, EVEN_N, HAS_GAIN, CENTRED, VECTOR,
                )  # fmt: skip
        _finish(
            tl.sum(acc, axis=2), tl.sum(squares, axis=1), tl.sum(sums, axis=1), bias_ptr,
            row_sums_ptr, residual_ptr, y_ptr, rows, cols, col_mask, M, eps, N, K, BLOCK_N,
            HAS_BIAS, CENTRED, ACTIVATION, GATED, HAS_RESIDUAL, NORMED, SCALE,
        )  # fmt: skip


@triton.jit
def _finish(
    acc, squares, sums, bias_ptr, row_sums_ptr, residual_ptr, y_ptr, rows, cols, col_mask, M, eps,
    N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr,
    CENTRED: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, NORMED: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """The epilogue of acc (ROWS, BLOCK_N) with its rows' squares and sums of x (CENTRED: x - c)."""
    mean = sums / K
    if CENTRED:
        squares = tl.maximum(squares - sums * mean, 0.0, propagate_nan=tl.PropagateNan.ALL)
    s = tl.full(squares.shape, 1.0, tl.float32)
    if NORMED:
        s = rstd_of(squares, K, eps)
    z = scaled(acc, s, mean, bias_ptr, row_sums_ptr, cols, col_mask, HAS_BIAS, CENTRED)
    y = weighed(activated(z, ACTIVATION, GATED), SCALE)
    WIDTH: tl.constexpr = N // 2 if GATED else N
    ACROSS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    out = tl.program_id(0) * ACROSS + tl.arange(0, ACROSS)
    offsets = rows[:, None] * WIDTH + out[None, :]
    mask = (rows < M)[:, None] & (out < WIDTH)[None, :]
    y = plus_residual(y, residual_ptr, offsets, mask, HAS_RESIDUAL)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)
