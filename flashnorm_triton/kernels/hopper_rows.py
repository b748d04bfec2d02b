"""Row tiles for many rows on Hopper, in Gluon: persistent, s computed on the way or given.

acc (64 rows of x a warp group, BLOCK_N features) = x_tile @ w_tile.T. One producer warp keeps a
ring of tiles filled by TMA, across output tiles, so the copies of the next tile run under the
epilogue of this one. The sums of squares come from

* SQUARES "own": the group issues step i, adds up the squares of its rows of step i from shared
  memory while that runs, and waits for step i - 1;
* "registers": the group loads its rows once, in the layout in which the instruction takes its
  first operand from registers, and adds up the squares of those registers. The instruction then
  reads no x from shared memory, so the squares cost no traffic there. A step ends with a wait for
  its own instruction, by when the rows of the next step are there; the other group's instruction
  runs meanwhile;
* "given": a statistics launch before this one (``stats_then_gemm``);
* "none": nowhere, and s is 1: a linear layer without a norm.

Who may reuse what, and when: a slot is refilled after its ``free`` barrier completed, which takes
one arrival of each consumer group. A group gives the slot of step i - 1 back behind a barrier of
its four warps, after each has waited for the instruction of step i - 1 and after its reads of that
slot (in "registers", the rows of step i - 1 came before its instruction). The staging buffer of y
is written after the group's previous copy out of it has been waited for.

A tile may have a second accumulator, fed by a second weight tile a slot: up beside gate ("gated"),
or the second half of a tile's columns ("wide", whose halves leave through one staging buffer).
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
    tile_of,
    weighed,
)


@gluon.jit
def _produce(
    x_desc, w_desc, x_ring, w_ring, v_ring, ready, free, M, N: gl.constexpr, K: gl.constexpr,
    GROUP_M: gl.constexpr, SECOND: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = w_ring.shape[0]
    BLOCK_K: gl.constexpr = w_ring.shape[2]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    WIDTH: gl.constexpr = w_ring.shape[1]
    BLOCK_N: gl.constexpr = 2 * WIDTH if SECOND == "wide" else WIDTH
    # Where the second weight tile begins, counted from the first.
    BESIDE: gl.constexpr = WIDTH if SECOND == "wide" else N
    WEIGHT_TILES: gl.constexpr = 2 if SECOND != "" else 1
    TILE_BYTES: gl.constexpr = x_desc.block_type.nbytes + WEIGHT_TILES * w_desc.block_type.nbytes
    blocks_m = (M + BLOCK_M - 1) // BLOCK_M
    blocks_n: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    slot = 0
    # The first round finds every slot free: the phase before the first has passed.
    phase = 1
    for tile in range(gl.program_id(0), blocks_m * blocks_n, gl.num_programs(0)):
        block_m, block_n = tile_of(tile, blocks_m, blocks_n, GROUP_M)
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(free.index(slot), phase)
            mbarrier.expect(ready.index(slot), TILE_BYTES)
            tma.async_copy_global_to_shared(
                w_desc, [block_n * BLOCK_N, k], ready.index(slot), w_ring.index(slot)
            )
            if SECOND != "":
                tma.async_copy_global_to_shared(
                    w_desc, [block_n * BLOCK_N + BESIDE, k], ready.index(slot), v_ring.index(slot)
                )
            tma.async_copy_global_to_shared(
                x_desc, [block_m * BLOCK_M, k], ready.index(slot), x_ring.index(slot)
            )
            slot = (slot + 1) % STAGES
            phase = phase ^ (slot == 0)


@gluon.jit
def _from_shared(
    x_ring, w_ring, v_ring, ready, free, slot, phase, previous, k_tiles, acc, second,
    SQUARES: gl.constexpr, CENTRED: gl.constexpr, SECOND: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """One tile, x from shared memory: (acc, second, squares, sums, slot, phase, previous)."""
    STAGES: gl.constexpr = w_ring.shape[0]
    BLOCK_K: gl.constexpr = w_ring.shape[2]
    ROWS: gl.constexpr = 64
    STEP: gl.constexpr = 2 if SECOND != "" else 1
    LANES_K: gl.constexpr = BLOCK_K // 8 if BLOCK_K // 8 < 32 else 32
    x_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES_K, LANES_K], [4, 1], [1, 0])
    squares = gl.zeros([ROWS, BLOCK_K], gl.float32, x_layout)
    # Eight neighbours of a thread make one value: sums cost an eighth of the squares' registers.
    sums = gl.sum(gl.reshape(squares, [ROWS, BLOCK_K // 8, 8]), axis=2)
    for i in range(k_tiles):
        mbarrier.wait(ready.index(slot), phase)
        x_rows = x_ring.index(slot).slice(GROUP * ROWS, ROWS)
        running = warpgroup_mma(x_rows, w_ring.index(slot).permute((1, 0)), acc, is_async=True)
        if SECOND != "":
            beside = warpgroup_mma(
                x_rows, v_ring.index(slot).permute((1, 0)), second, is_async=True
            )
        if SQUARES == "own":
            x = x_rows.load(x_layout).to(gl.float32)
            squares += x * x
            if CENTRED:
                sums += gl.sum(gl.reshape(x, [ROWS, BLOCK_K // 8, 8]), axis=2)
        if SECOND != "":
            acc, second = warpgroup_mma_wait(STEP, deps=(running, beside))
        else:
            acc = warpgroup_mma_wait(STEP, deps=(running,))
        block_barrier()
        mbarrier.arrive(free.index(previous), count=1, pred=i > 0)
        previous = slot
        slot = (slot + 1) % STAGES
        phase = phase ^ (slot == 0)
    if SECOND != "":
        acc, second = warpgroup_mma_wait(0, deps=(acc, second))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    block_barrier()
    mbarrier.arrive(free.index(previous), count=1)
    return acc, second, gl.sum(squares, axis=1), gl.sum(sums, axis=1), slot, phase, previous


@gluon.jit
def _step(
    x, x_ring, w_ring, v_ring, ready, free, slot, phase, previous, acc, second, squares, sums,
    first, last, CENTRED: gl.constexpr, SECOND: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """One step of K from registers; loads the rows of the step after, unless it is the last."""
    STAGES: gl.constexpr = w_ring.shape[0]
    BLOCK_K: gl.constexpr = w_ring.shape[2]
    ROWS: gl.constexpr = 64
    running = warpgroup_mma(x, w_ring.index(slot).permute((1, 0)), acc, is_async=True)
    if SECOND != "":
        beside = warpgroup_mma(x, v_ring.index(slot).permute((1, 0)), second, is_async=True)
    # The step before ended with a wait for its instruction.
    block_barrier()
    mbarrier.arrive(free.index(previous), count=1, pred=first == 0)
    wide = x.to(gl.float32)
    squares += gl.sum(gl.reshape(wide * wide, [ROWS, BLOCK_K // 16, 16]), axis=1)
    if CENTRED:
        sums += gl.sum(gl.reshape(wide, [ROWS, BLOCK_K // 16, 16]), axis=1)
    previous = slot
    slot = (slot + 1) % STAGES
    phase = phase ^ (slot == 0)
    # After the last step this reads what nobody uses.
    mbarrier.wait(ready.index(slot), phase, pred=last == 0)
    following = x_ring.index(slot).slice(GROUP * ROWS, ROWS).load(x.type.layout)
    if SECOND != "":
        acc, second, _ = warpgroup_mma_wait(0, deps=(running, beside, x))
    else:
        acc, _ = warpgroup_mma_wait(0, deps=(running, x))
    return following, slot, phase, previous, acc, second, squares, sums


@gluon.jit
def _from_registers(
    x_ring, w_ring, v_ring, ready, free, slot, phase, previous, k_tiles: gl.constexpr, acc, second,
    CENTRED: gl.constexpr, SECOND: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """One tile, x from registers: (acc, second, squares, sums, slot, phase, previous)."""
    BLOCK_K: gl.constexpr = w_ring.shape[2]
    ROWS: gl.constexpr = 64
    x_layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    # A thread holds every 16th value of its rows (and three of its neighbours): those make one sum.
    nothing = gl.zeros([ROWS, BLOCK_K], gl.float32, x_layout)
    squares = gl.sum(gl.reshape(nothing, [ROWS, BLOCK_K // 16, 16]), axis=1)
    sums = squares
    mbarrier.wait(ready.index(slot), phase)
    even = x_ring.index(slot).slice(GROUP * ROWS, ROWS).load(x_layout)
    # Two steps a trip: the rows of one are loaded into registers that the instruction of the other
    # does not read. With one set of registers the assembler makes every instruction wait.
    for i in range(0, k_tiles - 1, 2):
        odd, slot, phase, previous, acc, second, squares, sums = _step(
            even, x_ring, w_ring, v_ring, ready, free, slot, phase, previous, acc, second, squares,
            sums, i == 0, 0, CENTRED, SECOND, GROUP,
        )  # fmt: skip
        even, slot, phase, previous, acc, second, squares, sums = _step(
            odd, x_ring, w_ring, v_ring, ready, free, slot, phase, previous, acc, second, squares,
            sums, 0, i + 2 >= k_tiles, CENTRED, SECOND, GROUP,
        )  # fmt: skip
    if k_tiles % 2:
        even, slot, phase, previous, acc, second, squares, sums = _step(
            even, x_ring, w_ring, v_ring, ready, free, slot, phase, previous, acc, second, squares,
            sums, k_tiles == 1, 1, CENTRED, SECOND, GROUP,
        )  # fmt: skip
    block_barrier()
    mbarrier.arrive(free.index(previous), count=1)
    return acc, second, gl.sum(squares, axis=1), gl.sum(sums, axis=1), slot, phase, previous


@gluon.jit
def _store(out, y_desc, y_stage, first_m, first_n, GROUP: gl.constexpr):
    """Round once and send one accumulator's tile out by TMA."""
    # The staging buffer is free once the copy of the previous tile has read it.
    tma.store_wait(0)
    block_barrier()
    y_stage.index(GROUP).store(out.to(y_desc.dtype))
    fence_async_shared()
    block_barrier()
    tma.async_copy_shared_to_global(y_desc, [first_m, first_n], y_stage.index(GROUP))


@gluon.jit
def _result(
    acc, s, mean, bias_ptr, row_sums_ptr, residual_ptr, first_m, first_n, M, N: gl.constexpr,
    HAS_BIAS: gl.constexpr, CENTRED: gl.constexpr, ACTIVATION: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, SCALE: gl.constexpr,
):  # fmt: skip
    """The epilogue of one accumulator, in fp32."""
    layout: gl.constexpr = acc.type.layout
    cols = first_n + gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    out = scaled(acc, s, mean, row_sums_ptr, cols, cols < N, 0, CENTRED)
    out = activate(plus_bias(out, bias_ptr, cols, cols < N, 0, HAS_BIAS), ACTIVATION)
    out = weighed(out, SCALE)
    rows = first_m + gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout))
    offsets = rows.to(gl.int64)[:, None] * N + cols[None, :]
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    return plus_residual(out, residual_ptr, offsets, inside, HAS_RESIDUAL)


@gluon.jit
def _paired(
    gate, up, s, mean, bias_ptr, row_sums_ptr, residual_ptr, first_m, first_n, M, N: gl.constexpr,
    HAS_BIAS: gl.constexpr, CENTRED: gl.constexpr, ACTIVATION: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """The epilogue of a gated pair, in fp32."""
    layout: gl.constexpr = gate.type.layout
    cols = first_n + gl.arange(0, gate.shape[1], gl.SliceLayout(0, layout))
    gate = scaled(gate, s, mean, row_sums_ptr, cols, cols < N, 0, CENTRED)
    gate = activate(plus_bias(gate, bias_ptr, cols, cols < N, 0, HAS_BIAS), ACTIVATION)
    up = scaled(up, s, mean, row_sums_ptr, N + cols, cols < N, 0, CENTRED)
    up = plus_bias(up, bias_ptr, N + cols, cols < N, 0, HAS_BIAS)
    rows = first_m + gl.arange(0, gate.shape[0], gl.SliceLayout(1, layout))
    offsets = rows.to(gl.int64)[:, None] * N + cols[None, :]
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    return plus_residual(gate * up, residual_ptr, offsets, inside, HAS_RESIDUAL)


@gluon.jit
def _consume(
    y_desc, bias_ptr, row_sums_ptr, residual_ptr, s_ptr, mean_ptr, x_ring, w_ring, v_ring,
    y_stage, ready, free, M, eps, N: gl.constexpr, K: gl.constexpr, GROUP_M: gl.constexpr,
    SQUARES: gl.constexpr, HAS_BIAS: gl.constexpr, CENTRED: gl.constexpr, ACTIVATION: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, SECOND: gl.constexpr, SCALE: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = w_ring.shape[0]
    WIDTH: gl.constexpr = w_ring.shape[1]
    BLOCK_N: gl.constexpr = 2 * WIDTH if SECOND == "wide" else WIDTH
    BLOCK_K: gl.constexpr = w_ring.shape[2]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    ROWS: gl.constexpr = 64
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16]
    )
    blocks_m = (M + BLOCK_M - 1) // BLOCK_M
    blocks_n: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    k_tiles: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    slot = 0
    phase = 0
    previous = STAGES - 1
    for tile in range(gl.program_id(0), blocks_m * blocks_n, gl.num_programs(0)):
        block_m, block_n = tile_of(tile, blocks_m, blocks_n, GROUP_M)
        acc = gl.zeros([ROWS, WIDTH], gl.float32, acc_layout)
        second = acc
        if SQUARES == "registers":
            acc, second, squares, sums, slot, phase, previous = _from_registers(
                x_ring, w_ring, v_ring, ready, free, slot, phase, previous, k_tiles, acc, second,
                CENTRED, SECOND, GROUP,
            )  # fmt: skip
        else:
            acc, second, squares, sums, slot, phase, previous = _from_shared(
                x_ring, w_ring, v_ring, ready, free, slot, phase, previous, k_tiles, acc, second,
                SQUARES, CENTRED, SECOND, GROUP,
            )  # fmt: skip

        first_m = block_m * BLOCK_M + GROUP * ROWS
        first_n = block_n * BLOCK_N
        if SQUARES == "given":
            rows = first_m + gl.arange(0, ROWS, gl.SliceLayout(1, acc_layout))
            s = gl.load(s_ptr + rows, mask=rows < M, other=0.0)
            mean = s
            if CENTRED:
                mean = gl.load(mean_ptr + rows, mask=rows < M, other=0.0)
        elif SQUARES == "none":
            s = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, acc_layout))
            mean = s
        else:
            squares = gl.convert_layout(squares, gl.SliceLayout(1, acc_layout))
            sums = gl.convert_layout(sums, gl.SliceLayout(1, acc_layout))
            s, mean = scale_of(squares, sums, K, eps, CENTRED)
        if SECOND == "gated":
            out = _paired(
                acc, second, s, mean, bias_ptr, row_sums_ptr, residual_ptr, first_m, first_n, M, N,
                HAS_BIAS, CENTRED, ACTIVATION, HAS_RESIDUAL,
            )  # fmt: skip
        else:
            out = _result(
                acc, s, mean, bias_ptr, row_sums_ptr, residual_ptr, first_m, first_n, M, N,
                HAS_BIAS, CENTRED, ACTIVATION, HAS_RESIDUAL, SCALE,
            )  # fmt: skip
        _store(out, y_desc, y_stage, first_m, first_n, GROUP)
        if SECOND == "wide":
            out = _result(
                second, s, mean, bias_ptr, row_sums_ptr, residual_ptr, first_m, first_n + WIDTH, M,
                N, HAS_BIAS, CENTRED, ACTIVATION, HAS_RESIDUAL, SCALE,
            )  # fmt: skip
            _store(out, y_desc, y_stage, first_m, first_n + WIDTH, GROUP)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def norm_rows_kernel(
    x_desc,
    w_desc,
    y_desc,
    bias_ptr,
    row_sums_ptr,
    residual_ptr,
    s_ptr,
    mean_ptr,
    M,
    eps,
    N: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    SQUARES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    CENTRED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    SECOND: gl.constexpr,
    SCALE: gl.constexpr,
):
    """y = act(s * (x @ w.T - mean * row_sums) + bias) + residual; x (M, K), y and residual (M, N).

    SQUARES "own" or "registers": s = 1/rms of x's rows, in the same pass; "given": s (M,) fp32;
    "none": s is 1. Without a second accumulator, or with a "wide" one, all but the residual is
    multiplied by SCALE.
    ``row_sums`` (fp32) and the mean are there with CENTRED (LayerNorm; then s = 1 / standard
    deviation, and "given" takes mean (M,) fp32 as well). SECOND names the second accumulator: "",
    "gated" (y = act(gate) * up + residual, where w, bias and row_sums have 2N rows, gate's and then
    up's) or "wide" (a tile is two accumulators wide).

    x (M, K), w (N or 2N, K) and y (M, N) are TMA descriptors. The blocks of w and y are those of
    one accumulator, y's 64 rows high; x's are 128, one 64-row half for each of two consumer warp
    groups. Grid: (min(number of tiles, number of SMs),). Launch with 4 warps.
    """
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    WIDTH: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[1]
    gl.static_assert(BLOCK_M == 128, "two consumer groups of 64 rows")
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, WIDTH, BLOCK_K], w_desc.layout)
    y_stage = gl.allocate_shared_memory(y_desc.dtype, [2, 64, WIDTH], y_desc.layout)
    v_ring = w_ring
    if SECOND != "":
        v_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, WIDTH, BLOCK_K], w_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=2)
    fence_async_shared()
    block_barrier()
    gl.warp_specialize(
        [
            (_consume, (y_desc, bias_ptr, row_sums_ptr, residual_ptr, s_ptr, mean_ptr, x_ring,
                        w_ring, v_ring, y_stage, ready, free, M, eps, N, K, GROUP_M, SQUARES,
                        HAS_BIAS, CENTRED, ACTIVATION, HAS_RESIDUAL, SECOND, SCALE, 0)),
            (_consume, (y_desc, bias_ptr, row_sums_ptr, residual_ptr, s_ptr, mean_ptr, x_ring,
                        w_ring, v_ring, y_stage, ready, free, M, eps, N, K, GROUP_M, SQUARES,
                        HAS_BIAS, CENTRED, ACTIVATION, HAS_RESIDUAL, SECOND, SCALE, 1)),
            (_produce, (x_desc, w_desc, x_ring, w_ring, v_ring, ready, free, M, N, K, GROUP_M,
                        SECOND)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
