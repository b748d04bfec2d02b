"""Plans: which strategy, with which parameters, serves a problem; and the heuristic that picks one.

A plan is looked up once per problem and kept by the caller. Nothing here measures or compiles, and
nothing needs a GPU: the heuristic reads the facts of the device that it is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

STRATEGIES = ("single_pass", "stats_then_gemm", "unfused", "torch")
FORMS = ("gemv", "tiles", "hopper_swap", "scaled_gemm", "library", "reference")


@dataclass(frozen=True)
class Plan:
    """How one norm_linear problem is run.

    ``strategy`` is what is done (docs: DESIGN, "Strategies and plans"), ``form`` the kernel family
    that does it: "gemv", "tiles", "hopper_swap" (single pass), "tiles" or "scaled_gemm"
    (stats_then_gemm), "library" (unfused: the norm kernel, then the library's matmul), "reference"
    (plain torch). Blocks count elements: ``block_m`` rows of x, ``block_n`` output features,
    ``block_k`` hidden features a step. ``squares`` says how the tiles get x for the sum of
    squares: "own", "shared" or "given" (kernels/tiles.py).
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

    def as_dict(self) -> dict[str, object]:
        """The plan as JSON-ready fields, without those that its form does not read."""
        fields = asdict(self)
        if self.form in ("library", "reference"):
            return {key: fields[key] for key in ("strategy", "form")}
        if self.form != "tiles":
            del fields["squares"]
        if self.form not in ("tiles", "scaled_gemm"):
            del fields["group_m"]
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
    """

    dtype: str
    m: int
    n: int
    k: int
    has_bias: bool = False
    has_gain: bool = False
    tma: bool = True


TORCH = Plan("torch", "reference")
UNFUSED = Plan("unfused", "library")


def bucket(m: int) -> int:
    """The row-count bucket of m: the next power of two, at most 8192; 0 for no rows."""
    return min(1 << (m - 1).bit_length(), 8192) if m else 0


def _pow2_at_most(value: int, low: int, high: int) -> int:
    return max(low, min(high, 1 << (max(value, 1).bit_length() - 1)))


def _pow2_at_least(value: int, low: int, high: int) -> int:
    return max(low, min(high, 1 << max(value - 1, 0).bit_length()))


def gemv(problem: Problem, rows: int, sm_count: int) -> Plan:
    """The GEMV plan for up to ``rows`` rows: enough programs to fill the device several times."""
    block_k = _pow2_at_least(problem.k, 64, 512 if rows == 1 else 256)
    want = problem.n // (sm_count * 4)
    block_n = _pow2_at_most(want, 4, 16) if rows == 1 else 4
    return Plan("single_pass", "gemv", rows, block_n, block_k, num_warps=4, num_stages=4)


def choose(problem: Problem, device: Device) -> Plan:
    """The heuristic plan for a problem on a device.

    Few rows take the GEMV. Some rows take tensor-core tiles that compute the RMS on the way.
    Many rows, where the norm is a few percent and the library's matmul is hard to beat, are left
    unfused. float32 has no tensor-core tile here (its products must not be rounded to tf32).
    """
    if device.backend == "cpu" or problem.dtype == "float64":
        return TORCH
    rows = bucket(problem.m)
    if rows == 1:
        return gemv(problem, 1, device.sm_count)
    if problem.dtype == "float32":
        return gemv(problem, rows, device.sm_count) if rows <= 4 else UNFUSED
    if problem.dtype == "float16" and problem.has_gain:
        # x * gain would be held in fp16 before it is normalised, where it can overflow.
        return gemv(problem, rows, device.sm_count) if rows <= 4 else UNFUSED
    if rows <= 16:
        return Plan("single_pass", "tiles", 16, 32, 128, num_warps=4, num_stages=4)
    return UNFUSED


def shipped_plans() -> Iterator[tuple[Problem, Plan]]:
    """Every distinct plan the heuristic can give on a current device, each with a problem for it.

    For ahead-of-time compiles, the lint and the tests: what can be launched is what is checked.
    """
    device = Device("cuda", capability=90, sm_count=132, gluon=True)
    seen: set[tuple[Plan, str, bool]] = set()
    for n, k in ((960, 576), (3072, 576), (3072, 2048), (16384, 2048), (6144, 4096), (28672, 4096)):
        for dtype in ("bfloat16", "float16", "float32"):
            for has_gain in (False, True):
                for m in (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048, 8192):
                    for tma in (True, False):
                        problem = Problem(dtype, m, n, k, has_gain=has_gain, tma=tma)
                        plan = choose(problem, device)
                        if (plan, dtype, has_gain) not in seen:
                            seen.add((plan, dtype, has_gain))
                            yield replace(problem, has_bias=has_gain), plan


def interpretable_plans() -> tuple[Plan, ...]:
    """Small plans of every kernel family that Triton's CPU interpreter can run."""
    return (
        Plan("single_pass", "gemv", 1, 16, 64),
        Plan("single_pass", "gemv", 4, 16, 64),
        Plan("single_pass", "tiles", 16, 32, 64, squares="shared"),
        Plan("single_pass", "tiles", 16, 32, 64, squares="own"),
        Plan("stats_then_gemm", "tiles", 16, 32, 64, squares="given"),
        Plan("stats_then_gemm", "scaled_gemm", 16, 32, 64),
        Plan("unfused", "library"),
    )
