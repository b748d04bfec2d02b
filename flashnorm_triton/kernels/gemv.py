"""Single pass for one or a few rows: no tensor cores, every weight read once.

Paper: FlashNorm, arXiv 2407.09577, section 2 (deferred normalisation). Each program owns BLOCK_N
output columns and streams their weights; the squares of x are accumulated from the same registers
that feed the products, so the norm costs no second read. There is no ``tl.dot``, hence no
asynchronous matrix instruction that a later copy could overtake.
"""

import triton
import triton.language as tl

from flashnorm_triton.kernels.epilogue import rstd_of


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
def _step_rows(
    acc,
    squares,
    x_tile,
    w_tile,
    gain_ptr,
    k,
    ks,
    row_mask,
    col_mask,
    K: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    HAS_GAIN: tl.constexpr,
):
    """acc (ROWS, BLOCK_N, BLOCK_K) and squares (ROWS, BLOCK_K) after one more BLOCK_K."""
    k_mask = ks + k < K
    if EVEN_K:
        x = tl.load(x_tile + k, mask=row_mask[:, None], other=0.0).to(tl.float32)
    else:
        x_mask = row_mask[:, None] & k_mask[None, :]
        x = tl.load(x_tile + k, mask=x_mask, other=0.0).to(tl.float32)
    w = _load_weights(w_tile, k, k_mask, col_mask, EVEN_K, EVEN_N)
    squares += x * x
    if HAS_GAIN:
        x *= tl.load(gain_ptr + ks + k, mask=k_mask, other=0.0).to(tl.float32)[None, :]
    acc += w[None, :, :] * x[:, None, :]
    return acc, squares


@triton.jit(do_not_specialize=["M"])
def norm_gemv_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    gain_ptr,
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
    STAGES: tl.constexpr,
):
    """y[m, n] = s[m] * sum_k x[m, k] (* gain[k]) * w[n, k] (+ bias[n]); s = 1/rms(x[m]).

    Grid: (cdiv(N, BLOCK_N), cdiv(M, ROWS)). x (M, K) with row stride ``stride_xm``, w (N, K) with
    row stride STRIDE_WN, y (M, N) contiguous. STAGES > 1 copies ahead through shared memory;
    STAGES = 1 unrolls the loop over K, and the loads go straight to registers.
    """
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = cols < N
    ks = tl.arange(0, BLOCK_K)
    w_tile = w_ptr + cols.to(tl.int64)[:, None] * STRIDE_WN + ks[None, :]
    first = tl.program_id(1).to(tl.int64) * ROWS
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    EVEN_N: tl.constexpr = N % BLOCK_N == 0

    if ROWS == 1:
        x_row = x_ptr + first * stride_xm + ks
        acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        squares = tl.zeros((BLOCK_K,), tl.float32)
        if STAGES == 1:
            for k in tl.static_range(0, K, BLOCK_K):
                acc, squares = _step_one_row(
                    acc, squares, x_row, w_tile, gain_ptr, k, ks, col_mask, K, EVEN_K, EVEN_N,
                    HAS_GAIN,
                )  # fmt: skip
        else:
            for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
                acc, squares = _step_one_row(
                    acc, squares, x_row, w_tile, gain_ptr, k, ks, col_mask, K, EVEN_K, EVEN_N,
                    HAS_GAIN,
                )  # fmt: skip
        y = tl.sum(acc, axis=1) * rstd_of(tl.sum(squares, axis=0), K, eps)
        if HAS_BIAS:
            y += tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + first * N + cols, y.to(y_ptr.dtype.element_ty), mask=col_mask)
    else:
        rows = first + tl.arange(0, ROWS)
        row_mask = rows < M
        x_tile = x_ptr + rows[:, None] * stride_xm + ks[None, :]
        acc3 = tl.zeros((ROWS, BLOCK_N, BLOCK_K), tl.float32)
        squares2 = tl.zeros((ROWS, BLOCK_K), tl.float32)
        if STAGES == 1:
            for k in tl.static_range(0, K, BLOCK_K):
                acc3, squares2 = _step_rows(
                    acc3, squares2, x_tile, w_tile, gain_ptr, k, ks, row_mask, col_mask, K, EVEN_K,
                    EVEN_N, HAS_GAIN,
                )  # fmt: skip
        else:
            for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
                acc3, squares2 = _step_rows(
                    acc3, squares2, x_tile, w_tile, gain_ptr, k, ks, row_mask, col_mask, K, EVEN_K,
                    EVEN_N, HAS_GAIN,
                )  # fmt: skip
        s = rstd_of(tl.sum(squares2, axis=1), K, eps)
        y2 = tl.sum(acc3, axis=2) * s[:, None]
        if HAS_BIAS:
            y2 += tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
        out = y_ptr + rows[:, None] * N + cols[None, :]
        tl.store(out, y2.to(y_ptr.dtype.element_ty), mask=row_mask[:, None] & col_mask[None, :])
