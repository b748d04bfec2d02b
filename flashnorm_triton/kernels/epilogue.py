"""What happens to an fp32 accumulator before its one rounding: the vocabulary of the epilogues.

Every kernel composes the same steps in the same order: the mean's share off (LayerNorm), times the
row's scale, plus the bias, the activation or the gated pair, times a constant, plus the residual;
then it rounds. Each step is switched by a constexpr, and one that is off leaves no code.

The two features of a gated pair lie N / 2 rows apart in the weight. A tile takes them as
neighbours (``weight_rows``), so that the same loop computes both and one thread holds both.
"""

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
def weight_rows(features, N: tl.constexpr, GATED: tl.constexpr):
    """The weight's row of each feature of a tile: gates at even places, their partners next."""
    if GATED:
        return features // 2 + (features % 2) * (N // 2)
    else:
        return features


@triton.jit
def scaled(
    acc, s, mean, bias_ptr, row_sums_ptr, cols, col_mask, HAS_BIAS: tl.constexpr,
    CENTRED: tl.constexpr,
):  # fmt: skip
    """(acc - mean * row_sums) * s + bias, in fp32; acc (rows, cols), s and mean (rows).

    ``cols`` are the weight's rows. Without CENTRED mean is not read.
    """
    if CENTRED:
        sums = tl.load(row_sums_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)
        acc -= mean[:, None] * sums[None, :]
    acc = acc * s[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """One of the activations, or z itself for "", in fp32."""
    if ACTIVATION == "silu":
        return z / (1.0 + tl.exp(-z))
    elif ACTIVATION == "gelu":
        return 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)), which loses nothing where tanh nears -1.
        return z / (1.0 + tl.exp(-1.5957691216057308 * (z + 0.044715 * z * z * z)))
    elif ACTIVATION == "relu":
        return tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "relu2":
        positive = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return positive * positive
    else:
        tl.static_assert(ACTIVATION == "", "unknown activation")
        return z


@triton.jit
def activated(z, ACTIVATION: tl.constexpr, GATED: tl.constexpr):
    """act(z), or act(gate) * up of neighbouring columns: z (rows, cols) -> (rows, cols / 2)."""
    if GATED:
        gate, up = tl.split(tl.reshape(z, (z.shape[0], z.shape[1] // 2, 2)))
        return activate(gate, ACTIVATION) * up
    else:
        return activate(z, ACTIVATION)


@triton.jit
def weighed(y, SCALE: tl.constexpr):
    """y times a constant."""
    if SCALE != 1.0:
        y *= SCALE
    return y


@triton.jit
def plus_residual(y, residual_ptr, offsets, mask, HAS_RESIDUAL: tl.constexpr):
    """y plus the residual at the places that y is stored to."""
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    return y
