"""Single pass on Hopper for some rows, in Gluon: weights on the 64-wide side of the instruction.

``wgmma`` is at least 64 rows tall. With few rows of x the tall side goes to the weights ("swap"):
acc (BLOCK_N weights, BLOCK_M rows of x) = w_tile @ x_tile.T. One producer warp copies both tiles by
TMA; one consumer warp group issues the instruction and, while it runs, reads the same x tile from
shared memory into registers and adds up its squares. Then it waits for the instruction, and only
then tells the producer that the slot is free. Every reuse of a slot is behind an explicit barrier,
so no copy can overtake a running instruction.
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
def _produce(x_desc, w_desc, x_ring, w_ring, ready, free, first_m, first_n, first_k, k_tiles):
    STAGES: gl.constexpr = w_ring.shape[0]
    BLOCK_K: gl.constexpr = w_ring.shape[2]
    TILE_BYTES: gl.constexpr = x_desc.block_type.nbytes + w_desc.block_type.nbytes
    slot = 0
    # The first round finds every slot free: the phase before the first has passed.
    phase = 1
    for i in range(k_tiles):
        mbarrier.wait(free.index(slot), phase)
        mbarrier.expect(ready.index(slot), TILE_BYTES)
        k = first_k + i * BLOCK_K
        tma.async_copy_global_to_shared(w_desc, [first_n, k], ready.index(slot), w_ring.index(slot))
        tma.async_copy_global_to_shared(x_desc, [first_m, k], ready.index(slot), x_ring.index(slot))
        slot = (slot + 1) % STAGES
        phase = phase ^ (slot == 0)


@gluon.jit
def _consume(
    bias_ptr,
    y_ptr,
    x_ring,
    w_ring,
    ready,
    free,
    first_m,
    first_n,
    k_tiles,
    M,
    eps,
    N: gl.constexpr,
    K: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    IN_FLIGHT: gl.constexpr,
):
    STAGES: gl.constexpr = w_ring.shape[0]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    BLOCK_K: gl.constexpr = w_ring.shape[2]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BLOCK_M, 16]
    )
    # 16-byte reads; a warp spans 32 / LANES_K rows.
    LANES_K: gl.constexpr = BLOCK_K // 8 if BLOCK_K // 8 < 32 else 32
    x_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES_K, LANES_K], [WARPS, 1], [1, 0])
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, acc_layout)
    squares = gl.zeros([BLOCK_M, BLOCK_K], gl.float32, x_layout)
    slot = 0
    phase = 0
    previous = STAGES - 1
    for i in range(k_tiles):
        mbarrier.wait(ready.index(slot), phase)
        running = warpgroup_mma(
            w_ring.index(slot), x_ring.index(slot).permute((1, 0)), acc, is_async=True
        )
        x = x_ring.index(slot).load(x_layout).to(gl.float32)
        squares += x * x
        acc = warpgroup_mma_wait(IN_FLIGHT, deps=(running,))
        # All four warps have finished reading the slot before one thread gives it back.
        block_barrier()
        if IN_FLIGHT == 0:
            mbarrier.arrive(free.index(slot), count=1)
        else:
            mbarrier.arrive(free.index(previous), count=1, pred=i > 0)
        previous = slot
        slot = (slot + 1) % STAGES
        phase = phase ^ (slot == 0)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    total = gl.convert_layout(gl.sum(squares, axis=1), gl.SliceLayout(0, acc_layout))
    s = gl.rsqrt(total / K + eps)
    out = acc * s[None, :]

    # Consecutive threads hold consecutive columns of y.
    y_layout: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, WARPS], [0, 1])
    out = gl.convert_layout(out, y_layout)
    cols = first_n + gl.arange(0, BLOCK_N, gl.SliceLayout(1, y_layout))
    rows = first_m + gl.arange(0, BLOCK_M, gl.SliceLayout(0, y_layout))
    if HAS_BIAS:
        out += gl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(gl.float32)[:, None]
    target = y_ptr + rows.to(gl.int64)[None, :] * N + cols[:, None]
    gl.store(
        target,
        out.to(y_ptr.dtype.element_ty),
        mask=(rows < M)[None, :] & (cols < N)[:, None],
    )


@gluon.jit(do_not_specialize=["M"])
def norm_swap_kernel(
    x_desc,
    w_desc,
    bias_ptr,
    y_ptr,
    M,
    eps,
    N: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    IN_FLIGHT: gl.constexpr,
):
    """y = s * (x @ w.T) (+ bias) for one BLOCK_M x BLOCK_N tile of y (M, N); s = 1/rms of the row.

    Grid: (cdiv(N, BLOCK_N), cdiv(M, BLOCK_M)). The block sizes are those of the descriptors of
    x (M, K) and w (N, K). Launch with 4 warps: the consumer is one warp group.
    """
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[1]
    k_tiles: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    fence_async_shared()
    block_barrier()
    first_n = gl.program_id(0) * BLOCK_N
    first_m = gl.program_id(1) * BLOCK_M
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    bias_ptr,
                    y_ptr,
                    x_ring,
                    w_ring,
                    ready,
                    free,
                    first_m,
                    first_n,
                    k_tiles,
                    M,
                    eps,
                    N,
                    K,
                    HAS_BIAS,
                    IN_FLIGHT,
                ),
            ),
            (
                _produce,
                (x_desc, w_desc, x_ring, w_ring, ready, free, first_m, first_n, 0, k_tiles),
            ),
        ],
        [1],
        [24],
    )
