"""The racing form of a fused norm and matmul, kept so that the lint is seen to find it.

One loaded tile of x feeds both `tl.dot` (wgmma, asynchronous on sm_90) and the sum of squares.
Measured on an H200 with Triton 3.6: 64x64x128, 3 stages, 4 warps, M=256, K=4096, N=6144 gives other
bits in every launch and a relative error of 0.006 to 0.008 where rounding is 0.0017; with one stage
it is right. No kernel of the package may have this form where it compiles to wgmma.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from flashnorm_triton.compile_unit import CompileUnit


@triton.jit
def racing_pointer_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    N,
    K,
    eps,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y (M, N) = x (M, K) * rsqrt(mean(x²) + eps) @ w (N, K).T; every size a multiple of its block.

    Grid: (M / BLOCK_M, N / BLOCK_N).
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for k in range(0, K, BLOCK_K):
        x = tl.load(x_ptr + rows[:, None] * K + (k + ks)[None, :])
        w = tl.load(w_ptr + cols[:, None] * K + (k + ks)[None, :])
        x32 = x.to(tl.float32)
        squares += tl.sum(x32 * x32, axis=1)
        acc = tl.dot(x, w.T, acc)
    out = acc * tl.rsqrt(squares / K + eps.to(tl.float32))[:, None]
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], out.to(y_ptr.dtype.element_ty))


@triton.jit
def racing_descriptor_kernel(
    x_desc,
    w_desc,
    y_ptr,
    N,
    K,
    eps,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`racing_pointer_kernel` with x and w copied by the TMA engine."""
    first_row = tl.program_id(0) * BLOCK_M
    first_col = tl.program_id(1) * BLOCK_N
    rows = first_row + tl.arange(0, BLOCK_M)
    cols = first_col + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for k in range(0, K, BLOCK_K):
        x = x_desc.load([first_row, k])
        w = w_desc.load([first_col, k])
        x32 = x.to(tl.float32)
        squares += tl.sum(x32 * x32, axis=1)
        acc = tl.dot(x, w.T, acc)
    out = acc * tl.rsqrt(squares / K + eps.to(tl.float32))[:, None]
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], out.to(y_ptr.dtype.element_ty))


def tile_unit(
    name: str,
    fn: object,
    operands: dict[str, str],
    stages: int,
    warps: int = 4,
    blocks: tuple[int, int, int] = (64, 64, 128),
    targets: tuple[str, ...] = ("sm90",),
) -> CompileUnit:
    """The unit of a tiled kernel whose arguments after `operands` are N, K, eps and the blocks.

    "M" and "N" in an operand's type stand for a TMA descriptor of BLOCK_M or BLOCK_N rows.
    """
    rows = {"M": blocks[0], "N": blocks[1]}
    signature = {
        arg: f"tensordesc<bf16[{rows[kind]}, {blocks[2]}]>" if kind in rows else kind
        for arg, kind in operands.items()
    }
    signature |= {"N": "i32", "K": "i32", "eps": "fp32"}
    constexprs = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), blocks, strict=True))
    signature |= dict.fromkeys(constexprs, "constexpr")
    aligned = tuple(
        i for i, (arg, kind) in enumerate(signature.items()) if kind[0] == "*" or arg in ("N", "K")
    )
    return CompileUnit(
        f"{name}-w{warps}s{stages}",
        fn,
        signature,
        constexprs,
        aligned,
        warps,
        stages,
        targets=targets,
    )


FORMS = {
    "racing_pointer": (racing_pointer_kernel, {"x_ptr": "*bf16", "w_ptr": "*bf16"}),
    "racing_descriptor": (racing_descriptor_kernel, {"x_desc": "M", "w_desc": "N"}),
}


def compile_units() -> Iterator[CompileUnit]:
    """Both forms with 1 stage (not pipelined: right) to 5, and with two warp groups."""
    for name, (fn, operands) in FORMS.items():
        operands = operands | {"y_ptr": "*bf16"}
        for stages in (1, 2, 3, 4, 5):
            yield tile_unit(name, fn, operands, stages)
        yield tile_unit(name, fn, operands, 3, warps=8, blocks=(128, 128, 64))
