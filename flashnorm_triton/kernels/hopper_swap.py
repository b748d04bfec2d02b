"""Single pass on Hopper for some rows, in Gluon: weights on the 64-wide side of the instruction.

``wgmma`` is at least 64 rows tall. With few rows of x the tall side goes to the weights ("swap"):
acc (BLOCK_N weights, BLOCK_M rows of x) = w_tile @ x_tile.T. One producer warp copies both tiles by
TMA; one consumer warp group issues the instruction and, while it runs, reads the same x tile from
shared memory into registers and adds up its squares (and its values, for LayerNorm's mean).

Who may reuse what, and when: a slot of the rings is refilled after its ``free`` barrier completed,
which takes one arrival. The consumer arrives behind a barrier of its four warps, after it has
waited for the instruction that read the slot and after its reads of the x tile: no copy can
overtake a running instruction.

A gated pair (GATED) has two accumulators, fed by two weight tiles a slot: gate rows and up rows.
With too few tiles for the device, K is shared among programs as well (split-K, see the kernel).
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
from flashnorm_triton.kernels.hopper_epilogue import (
    activate,
    plus_bias,
    plus_residual,
    scale_of,
    scaled,
    weighed,
)


@gluon.jit
def _produce(
    x_desc, w_desc, x_ring, w_ring, up_ring, ready, free, first_m, first_n, first_k, k_tiles,
    N: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = w_ring.shape[0]
    BLOCK_K: gl.constexpr = w_ring.shape[2]
    WEIGHT_TILES: gl.constexpr = 2 if GATED else 1
    TILE_BYTES: gl.constexpr = x_desc.block_type.nbytes + WEIGHT_TILES * w_desc.block_type.nbytes
    slot = 0
    # The first round finds every slot free: the phase before the first has passed.
    phase = 1
    for i in range(k_tiles):
        mbarrier.wait(free.index(slot), phase)
        mbarrier.expect(ready.index(slot), TILE_BYTES)
        k = first_k + i * BLOCK_K
        tma.async_copy_global_to_shared(w_desc, [first_n, k], ready.index(slot), w_ring.index(slot))
        if GATED:
            tma.async_copy_global_to_shared(
                w_desc, [N + first_n, k], ready.index(slot), up_ring.index(slot)
            )
        tma.async_copy_global_to_shared(x_desc, [first_m, k], ready.index(slot), x_ring.index(slot))
        slot = (slot + 1) % STAGES
        phase = phase ^ (slot == 0)


@gluon.jit
def _consume(
    bias_ptr, row_sums_ptr, residual_ptr, y_ptr, partial_ptr, counter_ptr, x_ring, w_ring, up_ring,
    ready, free, first_m, first_n, k_tiles, M, eps, N: gl.constexpr, K: gl.constexpr,
    HAS_BIAS: gl.constexpr, CENTRED: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, IN_FLIGHT: gl.constexpr, SPLIT: gl.constexpr,
    NORMED: gl.constexpr, SCALE: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = w_ring.shape[0]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    BLOCK_K: gl.constexpr = w_ring.shape[2]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    # Instructions that are left running when the slot of the step before is given back.
    PENDING: gl.constexpr = IN_FLIGHT * (2 if GATED else 1)
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BLOCK_M, 16]
    )
    # 16-byte reads; a warp spans 32 / LANES_K rows.
    LANES_K: gl.constexpr = BLOCK_K // 8 if BLOCK_K // 8 < 32 else 32
    x_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES_K, LANES_K], [WARPS, 1], [1, 0])
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, acc_layout)
    up = acc
    squares = gl.zeros([BLOCK_M, BLOCK_K], gl.float32, x_layout)
    # Eight neighbours of a thread make one value: sums cost an eighth of the squares' registers.
    sums = gl.sum(gl.reshape(squares, [BLOCK_M, BLOCK_K // 8, 8]), axis=2)
    slot = 0
    phase = 0
    previous = STAGES - 1
    for i in range(k_tiles):
        mbarrier.wait(ready.index(slot), phase)
        x_columns = x_ring.index(slot).permute((1, 0))
        running = warpgroup_mma(w_ring.index(slot), x_columns, acc, is_async=True)
        if GATED:
            beside = warpgroup_mma(up_ring.index(slot), x_columns, up, is_async=True)
        if NORMED:
            x = x_ring.index(slot).load(x_layout).to(gl.float32)
            squares += x * x
            if CENTRED:
                sums += gl.sum(gl.reshape(x, [BLOCK_M, BLOCK_K // 8, 8]), axis=2)
        if GATED:
            acc, up = warpgroup_mma_wait(PENDING, deps=(running, beside))
        else:
            acc = warpgroup_mma_wait(PENDING, deps=(running,))
        # All four warps have finished reading the slot before one thread gives it back.
        block_barrier()
        if IN_FLIGHT == 0:
            mbarrier.arrive(free.index(slot), count=1)
        else:
            mbarrier.arrive(free.index(previous), count=1, pred=i > 0)
        previous = slot
        slot = (slot + 1) % STAGES
        phase = phase ^ (slot == 0)
    if GATED:
        acc, up = warpgroup_mma_wait(0, deps=(acc, up))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    total = gl.convert_layout(gl.sum(squares, axis=1), gl.SliceLayout(0, acc_layout))
    shares = gl.convert_layout(gl.sum(sums, axis=1), gl.SliceLayout(0, acc_layout))
    if SPLIT == 1:
        _finish(
            acc, up, total, shares, bias_ptr, row_sums_ptr, residual_ptr, y_ptr, first_m, first_n,
            M, eps, N, K, HAS_BIAS, CENTRED, ACTIVATION, GATED, HAS_RESIDUAL, NORMED, SCALE,
        )  # fmt: skip
    else:
        tile = gl.program_id(1).to(gl.int64) * gl.num_programs(0) + gl.program_id(0)
        PART: gl.constexpr = (BLOCK_N + 1) * BLOCK_M
        m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, acc_layout))
        n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, acc_layout))
        cells = n[:, None] * BLOCK_M + m[None, :]
        parts = partial_ptr + tile * SPLIT * PART
        mine = parts + gl.program_id(2) * PART
        gl.store(mine + cells, acc)
        gl.store(mine + BLOCK_N * BLOCK_M + m, total)
        # The barrier orders the group's stores before the release of one thread's atomic.
        block_barrier()
        arrived = gl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLIT - 1:
            # Every part is summed in the order of K, whoever came last: the same bits each time.
            acc = gl.load(parts + cells, cache_modifier=".cg")
            total = gl.load(parts + BLOCK_N * BLOCK_M + m, cache_modifier=".cg")
            for part in gl.static_range(1, SPLIT):
                acc += gl.load(parts + part * PART + cells, cache_modifier=".cg")
                squares_of = parts + part * PART + BLOCK_N * BLOCK_M + m
                total += gl.load(squares_of, cache_modifier=".cg")
            gl.store(counter_ptr + tile, 0)
            _finish(
                acc, acc, total, total, bias_ptr, row_sums_ptr, residual_ptr, y_ptr, first_m,
                first_n, M, eps, N, K, HAS_BIAS, CENTRED, ACTIVATION, GATED, HAS_RESIDUAL, NORMED,
                SCALE,
            )  # fmt: skip


@gluon.jit
def _finish(
    acc, up, total, sums, bias_ptr, row_sums_ptr, residual_ptr, y_ptr, first_m, first_n, M, eps,
    N: gl.constexpr, K: gl.constexpr, HAS_BIAS: gl.constexpr, CENTRED: gl.constexpr,
    ACTIVATION: gl.constexpr, GATED: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    NORMED: gl.constexpr, SCALE: gl.constexpr,
):  # fmt: skip
    """The epilogue, one rounding, the store: acc and up (BLOCK_N, BLOCK_M), totals (BLOCK_M)."""
    BLOCK_N: gl.constexpr = acc.shape[0]
    BLOCK_M: gl.constexpr = acc.shape[1]
    if NORMED:
        s, mean = scale_of(total, sums, K, eps, CENTRED)
    else:
        s = gl.full([BLOCK_M], 1.0, gl.float32, gl.SliceLayout(0, acc.type.layout))
        mean = s
    n = first_n + gl.arange(0, BLOCK_N, gl.SliceLayout(1, acc.type.layout))
    acc = scaled(acc, s, mean, row_sums_ptr, n, n < N, 1, CENTRED)
    if GATED:
        # Before the change of layout, so that one tile changes it instead of two.
        up = scaled(up, s, mean, row_sums_ptr, N + n, n < N, 1, CENTRED)
        gate = plus_bias(acc, bias_ptr, n, n < N, 1, HAS_BIAS)
        up = plus_bias(up, bias_ptr, N + n, n < N, 1, HAS_BIAS)
        acc = activate(gate, ACTIVATION) * up
    # Consecutive threads hold consecutive columns of y.
    y_layout: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, gl.num_warps()], [0, 1])
    out = gl.convert_layout(acc, y_layout)
    cols = first_n + gl.arange(0, BLOCK_N, gl.SliceLayout(1, y_layout))
    rows = first_m + gl.arange(0, BLOCK_M, gl.SliceLayout(0, y_layout))
    if not GATED:
        out = activate(plus_bias(out, bias_ptr, cols, cols < N, 1, HAS_BIAS), ACTIVATION)
    offsets = rows.to(gl.int64)[None, :] * N + cols[:, None]
    inside = (rows < M)[None, :] & (cols < N)[:, None]
    out = plus_residual(weighed(out, SCALE), residual_ptr, offsets, inside, HAS_RESIDUAL)
    gl.store(y_ptr + offsets, out.to(y_ptr.dtype.element_ty), mask=inside)


@gluon.jit(do_not_specialize=["M"])
def norm_swap_kernel(
    x_desc,
    w_desc,
    bias_ptr,
    row_sums_ptr,
    residual_ptr,
    y_ptr,
    partial_ptr,
    counter_ptr,
    M,
    eps,
    N: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    CENTRED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    IN_FLIGHT: gl.constexpr,
    SPLIT: gl.constexpr,
    NORMED: gl.constexpr,
    SCALE: gl.constexpr,
):
    """y = act(s * (x @ w.T - mean * row_sums) + bias) + residual, for one BLOCK_M x BLOCK_N tile.

    y and residual are (M, N) contiguous, s = 1/rms of a row of x (M, K). ``row_sums`` (fp32) and
    the mean are there with CENTRED, which makes it LayerNorm: s = 1 / standard deviation. GATED:
    y = act(gate) * up + residual, where w, bias and row_sums have 2N rows, gate's and then up's.
    s is 1 if not NORMED; all but the residual is multiplied by SCALE.

    Grid: (cdiv(N, BLOCK_N), cdiv(M, BLOCK_M), SPLIT). The block sizes are those of the descriptors
    of x and w (N or 2N, K). Launch with 4 warps: the consumer is one warp group.

    SPLIT > 1 shares K among that many programs. Each writes its fp32 part of the products and of
    the sum of squares to ``partial_ptr`` (tiles * SPLIT * (BLOCK_N + 1) * BLOCK_M values) and
    counts itself in ``counter_ptr`` (one int32 a tile, zero before the launch and after it); the
    last one adds the parts up in the order of K and scales once. Without CENTRED and GATED.
    """
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[1]
    k_tiles: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    gl.static_assert(SPLIT == 1 or not (CENTRED or GATED), "split-K adds up one accumulator")
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    up_ring = w_ring
    if GATED:
        up_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    fence_async_shared()
    block_barrier()
    first_n = gl.program_id(0) * BLOCK_N
    first_m = gl.program_id(1) * BLOCK_M
    SHARE: gl.constexpr = (k_tiles + SPLIT - 1) // SPLIT
    if SPLIT == 1:
        first_k = 0
        my_tiles = k_tiles
    else:
        first_k = gl.program_id(2) * SHARE
        my_tiles = min(k_tiles - first_k, SHARE)
    gl.warp_specialize(
        [
            (_consume, (bias_ptr, row_sums_ptr, residual_ptr, y_ptr, partial_ptr, counter_ptr,
                        x_ring, w_ring, up_ring, ready, free, first_m, first_n, my_tiles, M, eps, N,
                        K, HAS_BIAS, CENTRED, ACTIVATION, GATED, HAS_RESIDUAL, IN_FLIGHT, SPLIT,
                        NORMED, SCALE)),
            (_produce, (x_desc, w_desc, x_ring, w_ring, up_ring, ready, free, first_m, first_n,
                        first_k * BLOCK_K, my_tiles, N, GATED)),
        ],
        [1],
        [24],
    )  # fmt: skip
