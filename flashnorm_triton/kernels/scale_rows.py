"""The end of ``overlap``: the library's product of the raw x, scaled row by row, and what follows.

The statistics come from ``row_rstd_kernel``, which ran beside the product; one program a row and
block of columns.
"""

import triton
import triton.language as tl

from flashnorm_triton.kernels.epilogue import activate, plus_residual, scaled


@triton.jit
def scale_rows_kernel(
    z_ptr, s_ptr, mean_ptr, row_sums_ptr, bias_ptr, residual_ptr, y_ptr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, CENTRED: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """y = act(s * (z - mean * row_sums) + bias) + residual, z = x @ w.T; fp32, one rounding.

    GATED: y = act(gate) * up + residual, with z's row = [gate, up]. z (M, WIDTH or 2 * WIDTH), y
    and residual (M, WIDTH) contiguous, s and mean (M,) fp32. Grid: (M, cdiv(WIDTH, BLOCK)).
    """
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < WIDTH
    here = row + tl.arange(0, 1)
    s = tl.load(s_ptr + here)
    mean = s
    if CENTRED:
        mean = tl.load(mean_ptr + here)
    COLUMNS: tl.constexpr = 2 * WIDTH if GATED else WIDTH
    z_row = z_ptr + row.to(tl.int64) * COLUMNS
    z = tl.load(z_row + cols, mask=mask, other=0.0).to(tl.float32)[None, :]
    z = scaled(z, s, mean, bias_ptr, row_sums_ptr, cols, mask, HAS_BIAS, CENTRED)
    y = activate(z, ACTIVATION)
    if GATED:
        up = tl.load(z_row + WIDTH + cols, mask=mask, other=0.0).to(tl.float32)[None, :]
        y *= scaled(up, s, mean, bias_ptr, row_sums_ptr, WIDTH + cols, mask, HAS_BIAS, CENTRED)
    offsets = (row.to(tl.int64) * WIDTH + cols)[None, :]
    y = plus_residual(y, residual_ptr, offsets, mask[None, :], HAS_RESIDUAL)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask[None, :])
