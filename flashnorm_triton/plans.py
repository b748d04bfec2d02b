"""Plans: which strategy, with which parameters, serves a problem; and the heuristic that picks one.

A plan is looked up once per problem and kept by the caller. Nothing here measures or compiles, and
nothing needs a GPU: the heuristic reads the facts of the device that it is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

STRATEGIES = ("single_pass", "stats_then_gemm", "overlap", "unfused", "torch")
FORMS = (
    "gemv", "tiles", "hopper_swap", "hopper_rows", "scaled_gemm", "library", "two_streams",
    "reference",
)  # fmt: skip
WITHOUT_BLOCKS = ("library", "two_streams", "reference")
"""Forms whose matmul is the library's: they have no tiles of their own."""
_WHOLE = ("centred", "activation", "gated", "residual")
EPILOGUES: dict[str, tuple[str, ...]] = {
    "gemv": (*_WHOLE, "bare"), "tiles": (*_WHOLE, "bare"),
    "scaled_gemm": ("centred", "activation", "residual"), "hopper_swap": (*_WHOLE, "bare"),
    "hopper_rows": (*_WHOLE, "bare"), "library": (*_WHOLE, "bare"), "two_streams": _WHOLE,
    "reference": (*_WHOLE, "bare"),
}  # fmt: skip
"""What each form can do to the scaled product beside a bias (``Problem.epilogue``); "bare" is to
do without a norm."""


@dataclass(frozen=True)
class Plan:
    """How one norm_linear problem is run.

    ``strategy`` is what is done, ``form`` the kernel family that does it: "gemv", "tiles",
    "hopper_swap", "hopper_rows" (single pass), "tiles", "hopper_rows" or "scaled_gemm"
    (stats_then_gemm), "library" (unfused: the norm kernel, then the library's matmul),
    "two_streams" (overlap: the library's matmul of the raw x beside the statistics, then the
    scale), "reference" (plain torch). Blocks count elements: ``block_m`` rows of x, ``block_n``
    output features, ``block_k`` hidden features a step. ``squares`` says how the tiles get the sum
    of squares: "own", "shared" or "given" (kernels/tiles.py), "own", "registers" or "given"
    (kernels/hopper_rows.py). ``max_registers`` caps the registers of a thread (0: no cap); half of
    the register file lets two programs share a multiprocessor. ``in_flight`` is how many matrix
    instructions hopper_swap leaves running when it gives a slot back: 0 or 1; ``split_k`` how many
    programs share K.
    """

    strategy: str
    form: str
    block_m: int = 0
    block_n: int = 0
    block_k: int = 0
    num_warps: int = 4
    num_stages: int = 3
    group_m: int = 8
    squares: str = "shared"
    max_registers: int = 0
    in_flight: int = 0
    split_k: int = 1

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES or self.form not in FORMS:
            raise ValueError(
                f"plan {self.strategy!r}/{self.form!r}: strategies are {STRATEGIES}, forms {FORMS}"
            )
        if self.squares not in ("own", "shared", "given", "registers"):
            raise ValueError(
                f"squares is {self.squares!r}; it must be own, shared, given or registers"
            )
        if self.in_flight not in (0, 1) or self.split_k < 1 or self.num_stages < 1:
            raise ValueError(
                f"in_flight {self.in_flight} must be 0 or 1, split_k {self.split_k} and num_stages "
                f"{self.num_stages} at least 1"
            )
        # A slot kept by a running instruction must leave another one to fill: else a dead lock.
        kept = 1 if self.form == "hopper_rows" else self.in_flight
        if self.form.startswith("hopper") and self.num_stages <= kept:
            raise ValueError(
                f"num_stages {self.num_stages} must exceed the {kept} instruction(s) in flight"
            )

    def as_dict(self) -> dict[str, object]:
        """The plan as JSON-ready fields, without those that its form does not read."""
        fields = asdict(self)
        if self.form in WITHOUT_BLOCKS:
            return {key: fields[key] for key in ("strategy", "form")}
        if self.form not in ("tiles", "hopper_rows"):
            del fields["squares"]
        if self.form not in ("tiles", "hopper_rows", "scaled_gemm"):
            del fields["group_m"]
        if self.form != "hopper_swap":
            del fields["max_registers"], fields["in_flight"]
            if self.form != "gemv" or self.split_k == 1:
                del fields["split_k"]
        return fields


@dataclass(frozen=True)
class Device:
    """What a choice of plan needs to know of a device.

    ``backend`` is "cuda", "hip" or "cpu"; ``capability`` the CUDA compute capability as 10 * major
    + minor (0 elsewhere); ``sm_count`` the number of multiprocessors; ``gluon`` whether this
    Triton's Gluon can drive Hopper's barriers and copies.
    """

    backend: str
    capability: int = 0
    sm_count: int = 1
    gluon: bool = False


@dataclass(frozen=True)
class Problem:
    """One norm_linear: x (m, k) by weight (n, k). ``dtype`` is torch's short name ("bfloat16").

    ``tma`` says whether x and weight meet the copy engine's needs: 16-byte base and row stride.
    The epilogue: ``centred`` takes the mean off (LayerNorm, through the weight's row sums);
    ``activation`` is one of ``checks.ACTIVATIONS`` or ""; ``gated`` halves the output to
    act(gate) * up, the n rows of the weight being [gate, up]; ``has_residual`` adds a tensor last.
    A problem that is not ``normed`` is a linear layer alone, whose product and bias are multiplied
    by ``scale``.
    """

    dtype: str
    m: int
    n: int
    k: int
    has_bias: bool = False
    has_gain: bool = False
    tma: bool = True
    centred: bool = False
    activation: str = ""
    gated: bool = False
    has_residual: bool = False
    normed: bool = True
    scale: float = 1.0

    @property
    def width(self) -> int:
        """The columns of the result: n, or half of it for a gated pair."""
        return self.n // 2 if self.gated else self.n

    @property
    def epilogue(self) -> str:
        """What is done to the scaled product beside a bias; "" for a plain norm and linear.

        It begins with "bare" where no norm is.
        """
        bare = "bare" * (not self.normed)
        parts = (bare, "centred" * self.centred, self.activation, "gated" * self.gated)
        return "+".join(filter(None, (*parts, "residual" * self.has_residual)))


MIN_CAPABILITY = 80
"""The oldest CUDA compute capability, as 10 * major + minor, that the kernels are compiled for."""

TORCH = Plan("torch", "reference")
UNFUSED = Plan("unfused", "library")
OVERLAP = Plan("overlap", "two_streams")


def bucket(m: int) -> int:
    """The row-count bucket of m: the next power of two, at most 8192; 0 for no rows."""
    return min(1 << (m - 1).bit_length(), 8192) if m else 0


def _gemv(rows: int, block_n: int, block_k: int, num_warps: int, num_stages: int = 1) -> Plan:
    return Plan("single_pass", "gemv", rows, block_n, block_k, num_warps, num_stages)


def _swap(
    block_m: int,
    block_n: int,
    block_k: int,
    num_stages: int,
    max_registers: int = 0,
    in_flight: int = 0,
) -> Plan:
    return Plan(
        "single_pass", "hopper_swap", block_m, block_n, block_k, 4, num_stages,
        max_registers=max_registers, in_flight=in_flight,
    )  # fmt: skip


def _rows(squares: str, block_n: int, num_stages: int) -> Plan:
    strategy = "stats_then_gemm" if squares == "given" else "single_pass"
    return Plan(strategy, "hopper_rows", 128, block_n, 64, 4, num_stages, squares=squares)


def cannot_run(problem: Problem, device: Device) -> bool:
    """Whether no kernel serves this dtype or device, so that it is plain torch's."""
    too_old = device.backend == "cuda" and device.capability < MIN_CAPABILITY
    return device.backend == "cpu" or problem.dtype == "float64" or too_old


def choose(problem: Problem, device: Device) -> Plan:
    """The heuristic plan for a problem on a device.

    The figures behind it are interleaved runs on an NVIDIA H200 (bench/results/nvidia_h200): one
    row always takes the GEMV; some rows take Hopper tiles where the device has them; from a few
    hundred rows on, the library's matmul wins wherever the norm is less than what its better tiles
    gain. A device that was not measured gets the fused kernels only where they won by a margin
    here, and the unfused pair elsewhere.
    """
    if not problem.normed:
        from flashnorm_triton import bare_plans

        return bare_plans.choose(problem, device)
    if cannot_run(problem, device):
        return TORCH
    rows = bucket(problem.m)
    plan = _few_rows(problem, rows, device)
    if plan is not None:
        return plan
    half = problem.dtype in ("bfloat16", "float16")
    if half and device.gluon and problem.tma and not problem.has_gain:
        if problem.gated:
            plan = _gated(problem, rows, device.sm_count)
        elif problem.epilogue and rows > 64:
            plan = _finished(problem, rows, device.sm_count)
        else:
            plan = _hopper(problem, rows, device.sm_count)
        # The row tiles write y by TMA: 16-byte rows.
        return UNFUSED if plan.form == "hopper_rows" and problem.width % 8 else plan
    # x * gain in fp16 before the division could overflow, so fp16 keeps gains out of the tiles.
    safe_gain = not problem.has_gain or problem.dtype == "bfloat16"
    if half and not problem.centred and safe_gain and rows <= 8 and problem.k <= 1024:
        return Plan("single_pass", "tiles", 16, 32, 256, num_stages=3)
    return UNFUSED


def _few_rows(problem: Problem, rows: int, device: Device) -> Plan | None:
    """GEMV plans for one and a few rows; None where tensor cores are better.

    A K step holds 16 bytes for every lane of every warp, so that x and the weights are loaded in
    one layout (with fewer, x crosses shared memory at every step), and divides K where it can: what
    a step reads beyond K is wasted. A multiply-add for each row and weight is what the plain cores
    can hide behind the copies for two rows, and for more only where launches decide.
    """
    k, narrow = problem.k, problem.n <= 8 * device.sm_count
    if rows == 1 and not problem.epilogue:
        if k == 2048:
            return _gemv(1, 4, 2048, 4)
        if k > 2048 and k % 2048 == 0:
            # Long rows keep a loop, and small code.
            return _gemv(1, 2, 2048, 8, num_stages=1 if k <= 32768 else 3)
        return _gemv(1, 2, 256, 1) if k <= 4096 else _gemv(1, 2, 1024, 4, 1 if k <= 16384 else 3)
    if device.backend == "hip":
        return None  # the blocks below are those of 32 lanes, and nothing was measured
    if not problem.tma or k % 8:
        return None  # what a thread folds it has loaded at once: 16 bytes
    if rows > (8 if narrow and k <= 1024 else 4 if k <= 1024 else 2):
        return None
    if rows == 8:
        return _gemv(4, 8, 1024, 4)
    if k <= 1024:
        return _gemv(rows, 4, 1024, 4) if narrow or problem.gated else _gemv(rows, 2, 256, 1)
    if k <= 2048 and not problem.gated:
        return _gemv(rows, 2, 256, 1)
    if rows == 1 and problem.gated and k > 2048 and k % 2048 == 0 and k <= 32768:
        return _gemv(1, 4, 2048, 8)
    if rows == 1 and problem.gated and k == 2048:
        return _gemv(1, 4, 1024, 4)
    return _gemv(rows, 4, 512, 2) if k <= 8192 else _gemv(rows, 8, 512, 2, 3)


def _gated(problem: Problem, rows: int, sm_count: int) -> Plan:
    """Tiles with two weight tiles, of the gate and the up projection (docs/measured.md)."""
    n, shallow = problem.n, problem.k <= 1024
    wide = n > 96 * sm_count
    if rows <= 64:
        if rows <= 16 and wide:
            return _swap(16, 64, 128, 3, max_registers=128)
        if rows == 64 and n > 128 * sm_count:
            return _swap(64, 128, 64, 4, in_flight=1)
        if rows == 64 and n <= 32 * sm_count:
            return _swap(32, 64, 128, 4, in_flight=1)
        return _swap(max(rows, 16), 64, 128, {32: 5, 64: 4}.get(rows, 6), in_flight=1)
    narrow_tiles, tiles = (-(-rows // 128) * -(-problem.width // side) for side in (64, 128))
    if rows == 128 and wide:
        return _rows("registers", 64, 5)
    if not shallow:
        even = rows >= 1024 and wide and _evenness(tiles, sm_count) >= 0.9
        # The widest lost at 4096 rows.
        return _rows("given", 128, 3) if even and (rows < 4096 or n <= 128 * sm_count) else UNFUSED
    if rows <= 512:
        if narrow_tiles > sm_count:
            return UNFUSED
        return _swap(64, 64, 128, 4, in_flight=1) if rows <= 256 else _rows("own", 64, 4)
    if tiles <= sm_count or _evenness(tiles, sm_count) >= 0.9:
        return _rows("registers", 128, 3)
    return _rows("registers", 64, 5) if _evenness(narrow_tiles, sm_count) >= 0.9 else UNFUSED


def _finished(problem: Problem, rows: int, sm_count: int) -> Plan:
    """From 128 rows on with an epilogue but for a gated pair: swapped tiles of shallow layers.

    From 512 rows on the pair's second launch works beside nothing and still costs less than the
    error function at the end of row tiles, whose matrix units wait for it.
    """
    tiles = -(-rows // 64) * -(-problem.n // 64)
    if problem.k > 1024 or rows > 256 or tiles > 2 * sm_count:
        return UNFUSED
    if rows == 128:
        return _swap(64, 64, 128, 6, in_flight=1)
    return _swap(64, 64, 64, 4, max_registers=128)


def _hopper(problem: Problem, rows: int, sm_count: int) -> Plan:
    """Plans where Gluon drives Hopper's copy engine: swapped tiles, then row tiles.

    ``narrow`` layers have a 64-feature tile for at most half of the multiprocessors, ``double``
    ones more of them than multiprocessors, ``wide`` ones a 128-feature tile for most of them,
    ``crowded`` ones more of those than multiprocessors. ``shallow`` layers end before a ring of
    tiles has filled. A second round of tiles for few is a round for all, so ``double`` layers take
    rings small enough for two tiles on a multiprocessor.
    """
    n = problem.n
    narrow = n <= 32 * sm_count
    double = n > 64 * sm_count
    wide = n > 96 * sm_count
    crowded = n > 128 * sm_count
    shallow = problem.k <= 1024
    if rows <= 16:
        if double:
            return _swap(16, 64, 128, 3, max_registers=128)
        return _swap(16, 64, 128, 6, in_flight=1) if shallow else _swap(16, 64, 256, 3 + narrow)
    if rows == 32:
        if double:
            return _swap(32, 64, 128, 3, max_registers=128)
        if shallow:
            return _swap(16 if narrow else 32, 64, 128, 6, in_flight=1)
        return _swap(32, 64, 256, 3 + narrow)
    if rows == 64:
        if crowded:
            return _swap(64, 128, 64, 4, max_registers=128, in_flight=1)
        if wide:
            return _swap(64, 128, 128, 3)
        if double:
            return UNFUSED
        return _swap(32 if narrow else 64, 64, 128, 6, in_flight=1)
    return _many_rows(problem, rows, sm_count)


def _many_rows(problem: Problem, rows: int, sm_count: int) -> Plan:
    """From 128 rows on: row tiles where they fill the multiprocessors evenly, else unfused.

    A last round of tiles that leaves a fifth of the device idle costs more than a free norm gives.
    """
    n, k = problem.n, problem.k
    wide, crowded, shallow = n > 96 * sm_count, n > 128 * sm_count, k <= 1024
    if rows == 128:
        return _rows("own", 128, 5) if wide and not crowded else UNFUSED
    if rows <= 512:
        one_round = rows == 512 and shallow and 8 * -(-n // 64) <= sm_count
        return _swap(64, 64, 128, 6, in_flight=1) if one_round else UNFUSED
    if wide:
        even = rows >= 4096 or (not crowded and (rows == 2048 or k >= 2048))
        return _rows("given", 128, 5) if even else UNFUSED
    blocks = rows // 128
    if rows == 1024 and not shallow:
        return UNFUSED
    if n <= 64 * sm_count and _evenness(blocks * -(-n // 256), sm_count) >= 0.84:
        return _rows("own", 256, 3)
    if rows == 1024:
        one_round = blocks * -(-n // 64) <= sm_count
        return _rows("own", 64, 6) if one_round else UNFUSED
    if _evenness(blocks * -(-n // 128), sm_count) >= 0.9:
        if not shallow:
            return _rows("given", 128, 5)
        return _rows("own", 128, 4) if n <= 32 * sm_count else UNFUSED
    return UNFUSED


def _evenness(tiles: int, sm_count: int) -> float:
    """The share of the device's time, in whole rounds of tiles, that is spent on tiles."""
    return tiles / (-(-tiles // sm_count) * sm_count)


def shipped_plans() -> Iterator[tuple[Problem, Plan]]:
    """Every distinct plan the heuristic can give on a current device, each with a problem for it.

    For ahead-of-time compiles, the lint and the tests: what can be launched is what is checked.
    """
    device = Device("cuda", capability=90, sm_count=132, gluon=True)
    seen: set[tuple[Plan, str, bool]] = set()
    shapes = (
        (960, 576), (3072, 576), (3072, 2048), (16384, 2048), (6144, 4096), (28672, 4096),
        (10240, 5120), (4096, 21504), (4096, 65536),
    )  # fmt: skip
    for n, k in shapes:
        for dtype in ("bfloat16", "float16", "float32"):
            for has_gain in (False, True):
                for m in (2**power for power in range(14)):
                    for tma in (True, False):
                        problem = Problem(dtype, m, n, k, has_gain=has_gain, tma=tma)
                        plan = choose(problem, device)
                        if (plan, dtype, has_gain) not in seen:
                            seen.add((plan, dtype, has_gain))
                            # A bias adds code and takes none away; fp16 goes without, for both.
                            yield replace(problem, has_bias=dtype != "float16"), plan


def other_plans() -> tuple[Plan, ...]:
    """Plans of forms that the heuristic leaves to tuning, for the same checks."""
    return (
        Plan("single_pass", "tiles", 64, 64, 64, 4, 4, squares="own"),
        Plan("stats_then_gemm", "tiles", 128, 128, 64, 8, 3, squares="given"),
        Plan("stats_then_gemm", "scaled_gemm", 128, 256, 64, 8, 4),
        Plan("single_pass", "hopper_swap", 16, 64, 128, 4, 3, max_registers=128, split_k=3),
        Plan("single_pass", "hopper_rows", 128, 256, 64, 4, 4, squares="registers"),
        OVERLAP,
    )


def interpretable_plans() -> tuple[Plan, ...]:
    """Small plans of every kernel family that Triton's CPU interpreter can run."""
    return (
        Plan("single_pass", "gemv", 1, 16, 64),
        Plan("single_pass", "gemv", 4, 16, 64),
        Plan("single_pass", "tiles", 16, 32, 64, squares="shared"),
        Plan("single_pass", "tiles", 16, 32, 64, squares="own"),
        Plan("stats_then_gemm", "tiles", 16, 32, 64, squares="given"),
        Plan("stats_then_gemm", "scaled_gemm", 16, 32, 64),
        Plan("single_pass", "gemv", 1, 16, 64, num_stages=1),
        Plan("single_pass", "gemv", 4, 16, 64, num_stages=1),
        Plan("single_pass", "gemv", 2, 8, 32, num_stages=1),
        UNFUSED,
        OVERLAP,
    )
