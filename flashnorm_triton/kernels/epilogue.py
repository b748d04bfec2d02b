"""What happens to an fp32 accumulator before its one rounding: the vocabulary of the epilogues."""

import triton
import triton.language as tl


@triton.jit
def rstd_of(sum_of_squares, K: tl.constexpr, eps):
    """s = 1 / sqrt(sum/K + eps), in fp32: the launcher's Python float is an fp32 argument.

    Correctly rounded steps, once a row: the approximate rsqrt alone errs by 2 ulp, which is twice
    the stock module's error in fp32.
    """
    return tl.div_rn(1.0, tl.sqrt_rn(sum_of_squares / K + eps))


@triton.jit
def scale_bias(acc, s, bias_ptr, cols, col_mask, HAS_BIAS: tl.constexpr):
    """acc (rows, cols) * s (rows) + bias (cols), in fp32. The bias is added after the scale."""
    acc = acc * s[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    return acc
