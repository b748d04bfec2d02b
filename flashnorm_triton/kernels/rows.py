"""Row kernels: the scale of every row (LayerNorm: and its mean), the stand-alone norm, its end.

``row_rstd_kernel`` is the first launch of ``stats_then_gemm``; ``rms_norm_kernel`` the first of
``unfused``, ``finish_kernel`` its last where something follows the matmul. With a residual the norm
is the end of a sandwich. One program a row; a row that fits in one block is read once.
"""

import triton
import triton.language as tl

from flashnorm_triton.kernels.epilogue import activate, plus_residual, rstd_of


@triton.jit
def sum_of_squares(x_row, K: tl.constexpr, BLOCK_K: tl.constexpr):
    ks = tl.arange(0, BLOCK_K)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        x = tl.load(x_row + ks + k, mask=ks + k < K, other=0.0).to(tl.float32)
        squares += x * x
    return tl.sum(squares, axis=0)


@triton.jit
def _mean_and_squares(x_row, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The mean of a row and the sum of squares about it.

    Two passes (the second finds a short row in registers, a long one in the cache), and what the
    mean's own rounding left is taken off again: right where the mean is far above the deviation.
    """
    ks = tl.arange(0, BLOCK_K)
    sums = tl.zeros((BLOCK_K,), tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        sums += tl.load(x_row + ks + k, mask=ks + k < K, other=0.0).to(tl.float32)
    mean = tl.sum(sums, axis=0) / K
    squares = tl.zeros((BLOCK_K,), tl.float32)
    sums = tl.zeros((BLOCK_K,), tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        inside = ks + k < K
        x = tl.load(x_row + ks + k, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(inside, x - mean, 0.0)
        squares += x * x
        sums += x
    left = tl.sum(sums, axis=0)
    return mean + left / K, tl.sum(squares, axis=0) - left * (left / K)


@triton.jit
def row_rstd_kernel(
    x_ptr, s_ptr, mean_ptr, stride_xm, eps, K: tl.constexpr, BLOCK_K: tl.constexpr,
    CENTRED: tl.constexpr,
):  # fmt: skip
    """s[m] = 1 / sqrt(mean_k x[m, k]^2 + eps), fp32. Grid: (M,).

    CENTRED: mean[m] of the row as well, and s of its variance.
    """
    row = tl.program_id(0).to(tl.int64)
    if CENTRED:
        mean, total = _mean_and_squares(x_ptr + row * stride_xm, K, BLOCK_K)
        tl.store(mean_ptr + row, mean)
    else:
        total = sum_of_squares(x_ptr + row * stride_xm, K, BLOCK_K)
    tl.store(s_ptr + row, rstd_of(total, K, eps))


@triton.jit
def rms_norm_kernel(
    x_ptr,
    gain_ptr,
    residual_ptr,
    y_ptr,
    stride_xm,
    eps,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ONE_PLUS: tl.constexpr,
):
    """y[m, k] = x[m, k] * s[m] (* gain[k]) (+ residual[m, k]), one rounding.

    The gain is 1 + what is stored if ONE_PLUS.

    Grid: (M,). residual and y (M, K) contiguous.
    """
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * stride_xm
    y_row = y_ptr + row * K
    ks = tl.arange(0, BLOCK_K)
    if K <= BLOCK_K:
        mask = ks < K
        x = tl.load(x_row + ks, mask=mask, other=0.0).to(tl.float32)
        y = x * rstd_of(tl.sum(x * x, axis=0), K, eps)
        if HAS_GAIN:
            gain = tl.load(gain_ptr + ks, mask=mask, other=0.0).to(tl.float32)
            y *= gain + 1.0 if ONE_PLUS else gain
        y = plus_residual(y, residual_ptr, row * K + ks, mask, HAS_RESIDUAL)
        tl.store(y_row + ks, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        s = rstd_of(sum_of_squares(x_row, K, BLOCK_K), K, eps)
        for k in tl.range(0, K, BLOCK_K):
            tail = ks + k < K
            y_k = tl.load(x_row + ks + k, mask=tail, other=0.0).to(tl.float32) * s
            if HAS_GAIN:
                gain = tl.load(gain_ptr + ks + k, mask=tail, other=0.0).to(tl.float32)
                y_k *= gain + 1.0 if ONE_PLUS else gain
            y_k = plus_residual(y_k, residual_ptr, row * K + ks + k, tail, HAS_RESIDUAL)
            tl.store(y_row + ks + k, y_k.to(y_ptr.dtype.element_ty), mask=tail)


@triton.jit
def finish_kernel(
    z_ptr, residual_ptr, y_ptr, stride_zm, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """y = act(z) + residual, or act(gate) * up + residual with z's row = [gate, up]; fp32 within.

    Grid: (M, cdiv(WIDTH, BLOCK)). z (M, WIDTH or 2 * WIDTH) with row stride ``stride_zm``, residual
    and y (M, WIDTH) contiguous.
    """
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < WIDTH
    z_row = z_ptr + row * stride_zm
    y = activate(tl.load(z_row + cols, mask=mask, other=0.0).to(tl.float32), ACTIVATION)
    if GATED:
        y *= tl.load(z_row + WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
    offsets = row * WIDTH + cols
    y = plus_residual(y, residual_ptr, offsets, mask, HAS_RESIDUAL)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)
