"""Kernels beside the racing ones that the lint has to tell apart: right forms, and rings by hand.

The plain kernels are pipelined by Triton and race-free. The Gluon kernel manages its slots itself,
and its constants decide whether it gives a slot back too early.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from racing_kernel import tile_unit
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashnorm_triton.compile_unit import TARGETS, CompileUnit


@triton.jit
def gemm_kernel(
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
    """y = x @ w.T: every loaded tile has the matrix instruction as its only user. eps is unused."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        x = tl.load(x_ptr + rows[:, None] * K + (k + ks)[None, :])
        w = tl.load(w_ptr + cols[:, None] * K + (k + ks)[None, :])
        acc = tl.dot(x, w.T, acc)
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], acc.to(y_ptr.dtype.element_ty))


@triton.jit
def own_load_kernel(
    x_ptr,
    x_again_ptr,
    w_ptr,
    y_ptr,
    N,
    K,
    eps,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The fused norm and matmul with x loaded a second time, by itself, for the squares."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for k in range(0, K, BLOCK_K):
        x = tl.load(x_ptr + rows[:, None] * K + (k + ks)[None, :])
        w = tl.load(w_ptr + cols[:, None] * K + (k + ks)[None, :])
        acc = tl.dot(x, w.T, acc)
        x32 = tl.load(x_again_ptr + rows[:, None] * K + (k + ks)[None, :]).to(tl.float32)
        squares += tl.sum(x32 * x32, axis=1)
    out = acc * tl.rsqrt(squares / K + eps.to(tl.float32))[:, None]
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], out.to(y_ptr.dtype.element_ty))


@triton.jit
def refusing_kernel(
    x_ptr, N, K, eps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Does not compile, by its own assertion."""
    tl.static_assert(BLOCK_K == 1, "this kernel never compiles")
    tl.store(x_ptr, 0.0)


@gluon.jit
def _copy_tiles(x_desc, w_desc, x_ring, w_ring, ready, free, tiles):
    STAGES: gl.constexpr = x_ring.shape[0]
    for i in range(tiles):
        slot = i % STAGES
        mbarrier.wait(free.index(slot), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(slot), x_desc.block_type.nbytes + w_desc.block_type.nbytes)
        k = i * x_ring.shape[2]
        tma.async_copy_global_to_shared(x_desc, [0, k], ready.index(slot), x_ring.index(slot))
        tma.async_copy_global_to_shared(w_desc, [0, k], ready.index(slot), w_ring.index(slot))


@gluon.jit
def _multiply_tiles(
    y_ptr, x_ring, w_ring, ready, free, tiles, IN_FLIGHT: gl.constexpr, LAG: gl.constexpr
):
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
    for i in range(tiles):
        slot = i % STAGES
        mbarrier.wait(ready.index(slot), (i // STAGES) & 1)
        running = warpgroup_mma(
            x_ring.index(slot), w_ring.index(slot).permute((1, 0)), acc, is_async=True
        )
        acc = warpgroup_mma_wait(IN_FLIGHT, deps=(running,))
        # With LAG = IN_FLIGHT this is the slot of the newest instruction that has finished.
        mbarrier.arrive(free.index((i + STAGES - LAG) % STAGES), count=1, pred=i >= LAG)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    gl.store(y_ptr + rows[:, None] * BLOCK_N + cols[None, :], acc)


@gluon.jit
def ring_kernel(
    x_desc,
    w_desc,
    y_ptr,
    tiles,
    STAGES: gl.constexpr,
    IN_FLIGHT: gl.constexpr,
    LAG: gl.constexpr,
):
    """One tile of x @ w.T, float32, through a ring of slots guarded by mbarriers."""
    x_ring = gl.allocate_shared_memory(
        x_desc.dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout
    )
    w_ring = gl.allocate_shared_memory(
        w_desc.dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout
    )
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    gl.warp_specialize(
        [
            (_multiply_tiles, (y_ptr, x_ring, w_ring, ready, free, tiles, IN_FLIGHT, LAG)),
            (_copy_tiles, (x_desc, w_desc, x_ring, w_ring, ready, free, tiles)),
        ],
        [1],
        [24],
    )


def _ring_unit(name: str, in_flight: int, lag: int) -> CompileUnit:
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    descriptor = f"tensordesc<bf16[64, 64],{layout!r}>"
    signature = {"x_desc": descriptor, "w_desc": descriptor, "y_ptr": "*fp32", "tiles": "i32"}
    constexprs = {"STAGES": 4, "IN_FLIGHT": in_flight, "LAG": lag}
    signature |= dict.fromkeys(constexprs, "constexpr")
    return CompileUnit(
        name, ring_kernel, signature, constexprs, (2,), gluon=True, targets=("sm90",)
    )


def compile_units() -> Iterator[CompileUnit]:
    """The right forms with 1 to 4 stages, and rings that wait well, late enough, or too little."""
    pointers = {"x_ptr": "*bf16", "w_ptr": "*bf16", "y_ptr": "*bf16"}
    twice = {"x_ptr": "*bf16", "x_again_ptr": "*bf16", "w_ptr": "*bf16", "y_ptr": "*bf16"}
    for stages in (1, 2, 3, 4):
        yield tile_unit("gemm", gemm_kernel, pointers, stages)
        yield tile_unit("own_load", own_load_kernel, twice, stages)
    yield tile_unit("everywhere", gemm_kernel, pointers, 2, targets=TARGETS, blocks=(64, 64, 64))
    # 128x256 over four warps: 256 accumulators a thread, more than there are registers.
    yield tile_unit("spilling", gemm_kernel, pointers, 2, blocks=(128, 256, 64))
    yield tile_unit("oversize", gemm_kernel, pointers, 5, warps=8, blocks=(256, 128, 128))
    yield tile_unit("refusing", refusing_kernel, {"x_ptr": "*fp32"}, 1)
    yield _ring_unit("ring_waits", in_flight=0, lag=0)
    yield _ring_unit("ring_lags", in_flight=1, lag=1)
    yield _ring_unit("ring_hurries", in_flight=1, lag=0)
