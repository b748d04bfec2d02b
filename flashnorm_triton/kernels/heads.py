"""The norms of all heads of a packed projection in one launch, and the scale of the rest.

What lies where comes in a table, one entry a head; see ``launch/heads.py``.
"""

import triton
import triton.language as tl

from flashnorm_triton.kernels.rows import sum_of_squares


@triton.jit
def _gain_of(pointer, mine, mask, ds, HAS: tl.constexpr):
    """A gain for the rows that are ``mine``, 0 elsewhere."""
    gain = tl.zeros(mask.shape, tl.float32)
    if HAS:
        gain += tl.load(pointer + ds[None, :], mask=mask & mine[:, None], other=0.0).to(tl.float32)
    return gain


@triton.jit(do_not_specialize=["per_program"])
def heads_kernel(
    z_ptr,
    x_ptr,
    y_ptr,
    table_ptr,
    gain_ptr,
    gain1_ptr,
    gain2_ptr,
    gain3_ptr,
    stride_xm,
    eps,
    per_program,
    K: tl.constexpr,
    N: tl.constexpr,
    N_OUT: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    GAINS: tl.constexpr,
    HAS_X: tl.constexpr,
):
    """y[m, head] = z[m, head] / sqrt(mean(z[m, head]^2) + eps2 t) * gain, or z[m, head] / sqrt(t).

    t = mean_k(x[m, k]^2) + eps with HAS_X, else 1. z (M, N) and y (M, N_OUT) contiguous. An entry
    of the table is first column in z, in y, width, which gain (-1: none), the bits of eps2, and
    flags (1: normalised, 2: the gain is 1 + w). Grid: (M, parts); fp32, one rounding.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * per_program
    last = tl.minimum(first + per_program, ENTRIES)
    t = 1.0
    if HAS_X:
        t = sum_of_squares(x_ptr + row * stride_xm, K, BLOCK_K) / K + eps
    ds = tl.arange(0, BLOCK_D)
    for i in tl.range(first, last, ROWS):
        entries = i + tl.arange(0, ROWS)
        live = entries < last
        entry = table_ptr + entries * 6
        source = tl.load(entry, mask=live, other=0)
        target = tl.load(entry + 1, mask=live, other=0)
        width = tl.load(entry + 2, mask=live, other=0)
        which = tl.load(entry + 3, mask=live, other=-1)
        own_eps = tl.load(entry + 4, mask=live, other=0).to(tl.float32, bitcast=True)
        flags = tl.load(entry + 5, mask=live, other=0)
        mask = ds[None, :] < width[:, None]
        z = tl.load(z_ptr + row * N + source[:, None] + ds[None, :], mask=mask, other=0.0)
        z = z.to(tl.float32)
        mean = tl.sum(z * z, axis=1) / tl.maximum(width, 1).to(tl.float32)
        under = tl.where((flags & 1) != 0, mean + own_eps * t, t)
        # Entries past the last have nothing to divide by, and are not stored.
        unit = z * tl.div_rn(1.0, tl.sqrt_rn(tl.where(live, under, 1.0)))[:, None]
        gain = _gain_of(gain_ptr, which == 0, mask, ds, GAINS > 0)
        gain += _gain_of(gain1_ptr, which == 1, mask, ds, GAINS > 1)
        gain += _gain_of(gain2_ptr, which == 2, mask, ds, GAINS > 2)
        gain += _gain_of(gain3_ptr, which == 3, mask, ds, GAINS > 3)
        gain += tl.where((which < 0) | ((flags & 2) != 0), 1.0, 0.0)[:, None]
        y = (unit * gain).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + row * N_OUT + target[:, None] + ds[None, :], y, mask=mask)
