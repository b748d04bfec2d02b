"""Row tiles for many rows on Hopper, in Gluon: persistent, s computed on the way or given.

acc (64 rows of x a warp group, BLOCK_N features) = x_tile @ w_tile.T. One producer warp keeps a
ring of tiles filled by TMA, across output tiles, so the copies of the next tile run under the
epilogue of this one. Each consumer warp group keeps one instruction in flight: it issues step i,
adds up the squares of its rows of step i from shared memory while that runs (SQUARES "own"), waits
for step i - 1, and then gives the slot of step i - 1 back. A slot is given back only behind a
barrier of the group, after both its instruction and its reads have ended.

``stats_then_gemm`` uses the same kernel with SQUARES "given".
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashnorm_triton.kernels.gluon_shim import block_barrier


@gluon.jit
def _tile_of(tile, blocks_m, blocks_n, GROUP_M: gl.constexpr):
    group = tile // (GROUP_M * blocks_n)
    group_size = min(blocks_m - group * GROUP_M, GROUP_M)
    within = tile % (GROUP_M * blocks_n)
    return group * GROUP_M + within % group_size, within // group_size


@gluon.jit
def _produce(
    x_desc, w_desc, x_ring, w_ring, ready, free, M, N: gl.constexpr, K: gl.constexpr,
    GROUP_M: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = w_ring.shape[0]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    BLOCK_K: gl.constexpr = w_ring.shape[2]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    TILE_BYTES: gl.constexpr = x_desc.block_type.nbytes + w_desc.block_type.nbytes
    blocks_m = (M + BLOCK_M - 1) // BLOCK_M
    blocks_n: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    slot = 0
    # The first round finds every slot free: the phase before the first has passed.
    phase = 1
    for tile in range(gl.program_id(0), blocks_m * blocks_n, gl.num_programs(0)):
        block_m, block_n = _tile_of(tile, blocks_m, blocks_n, GROUP_M)
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(free.index(slot), phase)
            mbarrier.expect(ready.index(slot), TILE_BYTES)
            tma.async_copy_global_to_shared(
                w_desc, [block_n * BLOCK_N, k], ready.index(slot), w_ring.index(slot)
            )
            tma.async_copy_global_to_shared(
                x_desc, [block_m * BLOCK_M, k], ready.index(slot), x_ring.index(slot)
            )
            slot = (slot + 1) % STAGES
            phase = phase ^ (slot == 0)


@gluon.jit
def _consume(
    y_desc, bias_ptr, s_ptr, x_ring, w_ring, y_stage, ready, free, M, eps, N: gl.constexpr,
    K: gl.constexpr, GROUP_M: gl.constexpr, SQUARES: gl.constexpr, HAS_BIAS: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = w_ring.shape[0]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    BLOCK_K: gl.constexpr = w_ring.shape[2]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    ROWS: gl.constexpr = 64
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    LANES_K: gl.constexpr = BLOCK_K // 8 if BLOCK_K // 8 < 32 else 32
    x_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES_K, LANES_K], [4, 1], [1, 0])
    blocks_m = (M + BLOCK_M - 1) // BLOCK_M
    blocks_n: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    k_tiles: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    slot = 0
    phase = 0
    previous = STAGES - 1
    for tile in range(gl.program_id(0), blocks_m * blocks_n, gl.num_programs(0)):
        block_m, block_n = _tile_of(tile, blocks_m, blocks_n, GROUP_M)
        acc = gl.zeros([ROWS, BLOCK_N], gl.float32, acc_layout)
        squares = gl.zeros([ROWS, BLOCK_K], gl.float32, x_layout)
        for i in range(k_tiles):
            mbarrier.wait(ready.index(slot), phase)
            x_rows = x_ring.index(slot).slice(GROUP * ROWS, ROWS)
            running = warpgroup_mma(x_rows, w_ring.index(slot).permute((1, 0)), acc, is_async=True)
            if SQUARES == "own":
                x = x_rows.load(x_layout).to(gl.float32)
                squares += x * x
            acc = warpgroup_mma_wait(1, deps=(running,))
            block_barrier()
            mbarrier.arrive(free.index(previous), count=1, pred=i > 0)
            previous = slot
            slot = (slot + 1) % STAGES
            phase = phase ^ (slot == 0)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        block_barrier()
        mbarrier.arrive(free.index(previous), count=1)

        first_m = block_m * BLOCK_M + GROUP * ROWS
        first_n = block_n * BLOCK_N
        if SQUARES == "own":
            total = gl.convert_layout(gl.sum(squares, axis=1), gl.SliceLayout(1, acc_layout))
            s = gl.div_rn(1.0, gl.sqrt_rn(total / K + eps))
        else:
            rows = first_m + gl.arange(0, ROWS, gl.SliceLayout(1, acc_layout))
            s = gl.load(s_ptr + rows, mask=rows < M, other=0.0)
        out = acc * s[:, None]
        if HAS_BIAS:
            cols = first_n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, acc_layout))
            out += gl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(gl.float32)[None, :]
        # The staging buffer is free once the copy of the previous tile has read it.
        tma.store_wait(0)
        block_barrier()
        y_stage.index(GROUP).store(out.to(y_desc.dtype))
        fence_async_shared()
        block_barrier()
        tma.async_copy_shared_to_global(y_desc, [first_m, first_n], y_stage.index(GROUP))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def norm_rows_kernel(
    x_desc,
    w_desc,
    y_desc,
    bias_ptr,
    s_ptr,
    M,
    eps,
    N: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    SQUARES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """y = s * (x @ w.T) (+ bias); x (M, K), w (N, K) and y (M, N) as TMA descriptors.

    SQUARES "own": s = 1/rms of x's rows, in the same pass; "given": s (M,) fp32. The block sizes
    are those of the descriptors, y's 64 rows high; x's are 128, one 64-row half for each of two
    consumer warp groups. Grid: (min(number of tiles, number of SMs),). Launch with 4 warps.
    """
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[1]
    gl.static_assert(BLOCK_M == 128, "two consumer groups of 64 rows")
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    y_stage = gl.allocate_shared_memory(y_desc.dtype, [2, 64, BLOCK_N], y_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=2)
    fence_async_shared()
    block_barrier()
    gl.warp_specialize(
        [
            (_consume, (y_desc, bias_ptr, s_ptr, x_ring, w_ring, y_stage, ready, free, M, eps, N, K,
                        GROUP_M, SQUARES, HAS_BIAS, 0)),
            (_consume, (y_desc, bias_ptr, s_ptr, x_ring, w_ring, y_stage, ready, free, M, eps, N, K,
                        GROUP_M, SQUARES, HAS_BIAS, 1)),
            (_produce, (x_desc, w_desc, x_ring, w_ring, ready, free, M, N, K, GROUP_M)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
