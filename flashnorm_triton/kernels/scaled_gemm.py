"""Persistent TMA GEMM with the row scale in its epilogue: the second launch of ``stats_then_gemm``.

For many rows. s comes from ``row_rstd_kernel`` (or from whichever kernel wrote x), so x feeds the
matrix instruction alone and the pipeliner keeps both operands equally deep.
"""

import triton
import triton.language as tl

from flashnorm_triton.kernels.epilogue import activated, plus_residual, scaled


@triton.jit
def _tile_of(tile, blocks_m, blocks_n: tl.constexpr, GROUP_M: tl.constexpr):
    group = tile // (GROUP_M * blocks_n)
    group_size = min(blocks_m - group * GROUP_M, GROUP_M)
    within = tile % (GROUP_M * blocks_n)
    return group * GROUP_M + within % group_size, within // group_size


@triton.jit(do_not_specialize=["M"])
def scaled_gemm_kernel(
    x_desc,
    w_desc,
    bias_ptr,
    s_ptr,
    mean_ptr,
    row_sums_ptr,
    residual_ptr,
    y_ptr,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CENTRED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """z = s * (x @ w.T) (+ bias), then kernels/epilogue.py, without its gated pair.

    x (M, K) and w (N, K) as TMA descriptors, s and (CENTRED) mean (M,) fp32.

    Grid: (min(number of tiles, number of SMs),); each program walks the tiles with that stride.
    The tile is scaled and stored in two halves, which halves the registers that the epilogue holds
    beside the accumulator.
    """
    blocks_m = tl.cdiv(M, BLOCK_M)
    blocks_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    HALF: tl.constexpr = BLOCK_N // 2
    for tile in tl.range(tl.program_id(0), blocks_m * blocks_n, tl.num_programs(0), flatten=True):
        block_m, block_n = _tile_of(tile, blocks_m, blocks_n, GROUP_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            x = x_desc.load([block_m * BLOCK_M, k])
            w = w_desc.load([block_n * BLOCK_N, k])
            acc = tl.dot(x, w.T, acc)
        # Recomputed from the tile number: flattening moves the epilogue, and values that live
        # across it would cost registers through the whole main loop.
        out_m, out_n = _tile_of(tile, blocks_m, blocks_n, GROUP_M)
        rows = out_m * BLOCK_M + tl.arange(0, BLOCK_M)
        row_mask = rows < M
        s = tl.load(s_ptr + rows, mask=row_mask, other=0.0)
        mean = s
        if CENTRED:
            mean = tl.load(mean_ptr + rows, mask=row_mask, other=0.0)
        halves = tl.permute(tl.reshape(acc, (BLOCK_M, 2, HALF)), (0, 2, 1))
        left, right = tl.split(halves)
        cols = out_n * BLOCK_N + tl.arange(0, HALF)
        _store(
            left, s, mean, bias_ptr, row_sums_ptr, residual_ptr, y_ptr, rows, cols, row_mask, N,
            HAS_BIAS, CENTRED, ACTIVATION, HAS_RESIDUAL,
        )  # fmt: skip
        _store(
            right, s, mean, bias_ptr, row_sums_ptr, residual_ptr, y_ptr, rows, cols + HALF,
            row_mask, N, HAS_BIAS, CENTRED, ACTIVATION, HAS_RESIDUAL,
        )  # fmt: skip


@triton.jit
def _store(
    acc, s, mean, bias_ptr, row_sums_ptr, residual_ptr, y_ptr, rows, cols, row_mask,
    N: tl.constexpr, HAS_BIAS: tl.constexpr, CENTRED: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    col_mask = cols < N
    z = scaled(acc, s, mean, bias_ptr, row_sums_ptr, cols, col_mask, HAS_BIAS, CENTRED)
    y = activated(z, ACTIVATION, False)
    offsets = rows.to(tl.int64)[:, None] * N + cols[None, :]
    mask = row_mask[:, None] & col_mask[None, :]
    y = plus_residual(y, residual_ptr, offsets, mask, HAS_RESIDUAL)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)
