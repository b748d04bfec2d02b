"""What the Gluon kernels share: the walk over tiles, and the epilogue's vocabulary.

The same steps in the same order as ``kernels/epilogue.py``, for accumulators that may lie either
way up: ROWS is the dimension along which the rows of x lie (0 in row tiles, 1 in swapped tiles);
the features lie along the other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def tile_of(tile, blocks_m, blocks_n, GROUP_M: gl.constexpr):
    """(block of rows, block of features) of a tile number; GROUP_M blocks of rows share L2."""
    group = tile // (GROUP_M * blocks_n)
    group_size = min(blocks_m - group * GROUP_M, GROUP_M)
    within = tile % (GROUP_M * blocks_n)
    return group * GROUP_M + within % group_size, within // group_size


@gluon.jit
def scale_of(squares, sums, K: gl.constexpr, eps, CENTRED: gl.constexpr):
    """(s, mean) of rows from their sums of squares and, for LayerNorm, their sums.

    s = 1 / sqrt(mean of squares (- mean squared) + eps), in correctly rounded steps. Without
    CENTRED there is no mean, and ``sums`` is returned in its place.
    """
    spread = squares / K
    mean = sums
    if CENTRED:
        mean = sums / K
        spread = gl.maximum(spread - mean * mean, 0.0)
    return gl.div_rn(1.0, gl.sqrt_rn(spread + eps)), mean


@gluon.jit
def scaled(acc, s, mean, row_sums_ptr, features, inside, ROWS: gl.constexpr, CENTRED: gl.constexpr):
    """(acc - mean * row_sums) * s; without CENTRED acc * s."""
    if CENTRED:
        row_sums = gl.load(row_sums_ptr + features, mask=inside, other=0.0)
        acc = acc - gl.expand_dims(mean, 1 - ROWS) * gl.expand_dims(row_sums, ROWS)
    return acc * gl.expand_dims(s, 1 - ROWS)


@gluon.jit
def plus_bias(out, bias_ptr, features, inside, ROWS: gl.constexpr, HAS_BIAS: gl.constexpr):
    """out + bias, in fp32."""
    if HAS_BIAS:
        bias = gl.load(bias_ptr + features, mask=inside, other=0.0).to(gl.float32)
        out += gl.expand_dims(bias, ROWS)
    return out


@gluon.jit
def activate(z, ACTIVATION: gl.constexpr):
    """The activation in fp32; z itself for ""."""
    if ACTIVATION == "silu":
        z = z / (1.0 + gl.exp(-z))
    elif ACTIVATION == "gelu":
        z = 0.5 * z * (1.0 + gl.erf(z * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # z/2 * (1 + tanh(u)) with 1 + tanh(u) = 2 / (1 + exp(-2u)).
        u = 0.7978845608028654 * (z + 0.044715 * z * z * z)
        z = z / (1.0 + gl.exp(-2.0 * u))
    elif ACTIVATION == "relu" or ACTIVATION == "relu2":
        z = gl.where(z < 0.0, 0.0, z)  # keeps a NaN
        if ACTIVATION == "relu2":
            z = z * z
    else:
        gl.static_assert(ACTIVATION == "", "unknown activation")
    return z


@gluon.jit
def weighed(out, SCALE: gl.constexpr):
    """out times a constant, in fp32."""
    if SCALE != 1.0:
        out = out * SCALE
    return out


@gluon.jit
def plus_residual(out, residual_ptr, offsets, inside, HAS_RESIDUAL: gl.constexpr):
    """out + residual, in fp32, the last step before the rounding."""
    if HAS_RESIDUAL:
        out += gl.load(residual_ptr + offsets, mask=inside, other=0.0).to(gl.float32)
    return out
