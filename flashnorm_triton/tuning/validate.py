"""What a candidate must show before it is timed: the right values, everywhere, every time.

1. *Values.* Relative Frobenius error and largest row-relative error against float64 are at most
   1.25 times those of the stock modules (norm, linear, and what follows, each rounded) on the same
   inputs: plain rows, rows with an outlier channel (×1e3), rows scaled by 1e-4…1e4 so that eps
   matters, a zero row, for a LayerNorm all of them far off centre; weights whose columns carry
   random gains. Every tensor that the plan allocates is filled with NaN first, so what it forgets
   to write, or reads before writing, shows.
2. *Bits.* Repeated launches on the same inputs give the same bits while another stream keeps the
   GPU busy: a race (kernels/tiles.py: one loaded tile feeding an asynchronous instruction and
   registers) moves bits from launch to launch, and rarely shows on an idle GPU.

The buffer-depth lint comes before both (tuning/build.py). Each is meant to catch a race alone.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flashnorm_triton.plans import Problem

LIMIT = 1.25
LAUNCHES = {"quick": 24, "full": 200}
# Rows whose values are compared with float64; all rows are checked for NaN and for equal bits.
_MOST_REFERENCE_ROWS = 512
_LEAST_ROWS, _LEAST_OUTPUTS = 64, 1 << 18
_WEIGHT_ROWS = 8192  # widened to float64 at a time
# Of two right fp32 results in other orders, one has twice the other's largest error now and then.
_FLOOR = {torch.float32: 1e-6}
_LARGEST = {torch.float16: 6e4, torch.bfloat16: 1e38, torch.float32: 1e38}

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda z: z,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda z: functional.relu(z).square(),
}

Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Verdict:
    """What a check found: ``reason`` is None for a candidate that may be timed."""

    reason: str | None
    rel_err: float = math.nan
    rel_err_stock: float = math.nan


@dataclass(frozen=True)
class Case:
    """Inputs of one problem and what they should give.

    ``parts``: inputs (m, K), one a call, which together are many rows even where m is 1. ``rows``:
    indices, in the parts behind one another, of the rows that ``wanted`` (rows, N) holds in
    float64. ``stock``: the stock modules' relative and row-relative error. ``epilogue``: the
    further arguments of ``norm_linear``, or of ``linear`` if not ``normed``; every part has the
    same residual.
    """

    parts: tuple[Tensor, ...]
    weight: Tensor
    gain: Tensor | None
    bias: Tensor | None
    eps: float
    rows: Tensor
    wanted: Tensor
    stock: tuple[float, float]
    epilogue: dict[str, Any] = field(default_factory=dict)
    normed: bool = True


def make_rows(
    count: int, k: int, dtype: torch.dtype, device: torch.device, off_centre: bool = False
) -> Tensor:
    """Hard inputs (count, k): plain, outlier and scaled rows by turns, and one zero row.

    ``off_centre``: every row has a mean of its own, 3 ± 1 standard deviations to either side.
    """
    x = torch.randn(count, k, device=device)
    if off_centre:
        side = 1 - 2 * torch.randint(2, (count, 1), device=device)
        x += side * (3 + torch.randn(count, 1, device=device))
    outliers = torch.arange(1, count, 3, device=device)
    x[outliers, torch.randint(k, outliers.shape, device=device)] *= 1e3
    scaled = torch.arange(2, count, 3, device=device)
    x[scaled] *= 10 ** (torch.rand(len(scaled), 1, device=device) * 8 - 4)
    if count > 2:
        x[count // 2] = 0
    largest = _LARGEST[dtype]
    return x.clamp_(-largest, largest).to(dtype)


def make_case(problem: Problem, weight: Tensor, eps: float = 1e-6) -> Case:
    """A case for a problem, with the given weight (N, K), on the weight's device.

    Takes about rows × (N + K) × 8 bytes beside it, for at most 512 rows.
    """
    n, device, dtype = problem.n, weight.device, weight.dtype
    x, gain, rows = _inputs(problem, max(_LEAST_OUTPUTS // n, _LEAST_ROWS), dtype, device)
    bias = torch.randn(n, device=device).to(dtype) if problem.has_bias else None
    normed, stock_normed = x[rows].double(), x[rows]
    if problem.normed:
        normed, stock_normed = _normed(x[rows], gain, eps, problem.centred)
    wanted = torch.cat([normed @ some.double().T for some in weight.split(_WEIGHT_ROWS)], dim=1)
    if bias is not None:
        wanted += bias.double()
    # Stock modules as transformers writes them: each of them rounds its result.
    got = functional.linear(stock_normed, weight, bias)
    epilogue = _epilogue(problem, weight, gain)
    residual = epilogue.get("residual")
    wanted = _finish(wanted, problem, residual, rows)
    got = _finish(got, problem, residual, rows)
    parts, stock = x.split(problem.m), _errors(got, wanted)
    return Case(parts, weight, gain, bias, eps, rows, wanted, stock, epilogue, problem.normed)


def _epilogue(problem: Problem, weight: Tensor, gain: Tensor | None) -> dict[str, Any]:
    """The arguments of ``norm_linear`` that a plain problem has not."""
    found: dict[str, Any] = {}
    if problem.centred:
        parts = weight.split(_WEIGHT_ROWS)
        gains = 1.0 if gain is None else gain.double()
        found["row_sums"] = torch.cat([(some.double() * gains).sum(1) for some in parts]).float()
    if problem.has_residual:
        residual = torch.randn(problem.m, problem.width, device=weight.device)
        found["residual"] = residual.to(weight.dtype)
    if problem.activation:
        found["activation"] = problem.activation
    if problem.gated:
        found["gated"] = True
    return found


def _finish(z: Tensor, problem: Problem, residual: Tensor | None, rows: Tensor) -> Tensor:
    """What follows the linear, operation by operation in z's dtype."""
    activate = _ACTIVATIONS[problem.activation]
    if problem.gated:
        gate, up = z.chunk(2, -1)
        z = activate(gate) * up
    else:
        z = activate(z)
    return z if residual is None else z + residual[rows % problem.m].to(z.dtype)


def make_norm_case(problem: Problem, device: torch.device | str, eps: float = 1e-6) -> Case:
    """A case of the norm alone: what is wanted is the normalised rows (rows, K)."""
    dtype = getattr(torch, problem.dtype)
    x, gain, rows = _inputs(problem, _LEAST_ROWS, dtype, torch.device(device))
    wanted, stock = _normed(x[rows], gain, eps)
    return Case(x.split(problem.m), x, gain, None, eps, rows, wanted, _errors(stock, wanted))


def _inputs(
    problem: Problem, least: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Rows for whole calls (at least ``least``), a gain or None, and which rows are compared."""
    least = min(least, _MOST_REFERENCE_ROWS)
    count = -(-least // problem.m) * problem.m
    # Where rows have next to no mean, what takes it off does next to nothing, right or wrong.
    x = make_rows(count, problem.k, dtype, device, off_centre=problem.centred)
    if not problem.normed:
        # Rows of one size, whose products no dtype overflows with.
        x = torch.randn(count, problem.k, device=device).to(dtype)
    gain = (0.5 + torch.rand(problem.k, device=device)).to(dtype) if problem.has_gain else None
    return x, gain, _spread(len(x), device)


def _normed(
    x: Tensor, gain: Tensor | None, eps: float, centred: bool = False
) -> tuple[Tensor, Tensor]:
    """The norm of x in float64, and as the stock module has it: in fp32, rounded to x's dtype."""
    found = []
    for wide in (x.double(), x.float()):
        if centred:
            normed = functional.layer_norm(wide, wide.shape[-1:], eps=eps)
        else:
            normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        found.append(normed if gain is None else normed * gain.to(wide.dtype))
    return found[0], found[1].to(x.dtype)


def _spread(count: int, device: torch.device) -> Tensor:
    """At most 512 row indices that meet every block of rows, at every place within a block."""
    step = -(-count // _MOST_REFERENCE_ROWS)
    starts = torch.arange(0, count, step, device=device)
    places = starts + (torch.arange(len(starts), device=device) * 7) % step
    return places.clamp_(max=count - 1)


def _errors(got: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Relative Frobenius error, and the largest error of a row over its largest wanted value."""
    off = got.double() - wanted
    relative = float(off.norm() / wanted.norm())
    worst, scale = off.abs().amax(1), wanted.abs().amax(1)
    # A zero row has no scale of its own: any error there is infinitely bad.
    by_row = torch.where(scale > 0, worst / scale, torch.where(worst > 0, math.inf, 0.0))
    return relative, float(by_row.max())


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within the block, torch fills every new tensor with NaN (the largest value, for integers)."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = before[2]


def check_values(case: Case, run: Run) -> tuple[Verdict, list[Tensor]]:
    """Check 1; returns the outputs too, one a part, as what check 2 compares with.

    ``run`` takes one part (m, K) and returns (m, N).
    """
    with poisoned_memory():
        outputs = [run(part) for part in case.parts]
    got = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if not bool(torch.isfinite(got).all()):
        return Verdict("leaves values unwritten, or not finite"), outputs
    relative, largest = _errors(got[case.rows], case.wanted)
    stock_relative, stock_largest = case.stock
    reason = None
    if not relative <= LIMIT * stock_relative:
        reason = f"relative error {relative:.2e}, stock has {stock_relative:.2e}"
    elif not largest <= max(LIMIT * stock_largest, _FLOOR.get(got.dtype, 0.0)):
        reason = f"largest error {largest:.2e} of a row, stock has {stock_largest:.2e}"
    return Verdict(reason, relative, stock_relative), outputs


def check_bits(
    case: Case, run: Run, outputs: list[Tensor], launches: int, load: Callable[[], None]
) -> str | None:
    """Check 2: why the candidate fails it, or None.

    ``load`` is called before every launch and enqueues work on another stream.
    """
    moved = torch.zeros((), dtype=torch.int64, device=case.weight.device)
    for launch in range(launches):
        place = launch % len(case.parts)
        load()
        again = run(case.parts[place])
        moved += (bits(again) != bits(outputs[place])).any()
    count = int(moved)
    return f"other bits in {count} of {launches} repeated launches" if count else None


def bits(values: Tensor) -> Tensor:
    """The values as integers: equal only where every bit is."""
    return values.view(torch.int16 if values.element_size() == 2 else torch.int32)


def check(case: Case, run: Run, launches: int, load: Callable[[], None] = lambda: None) -> Verdict:
    """Both checks, one after the other; the first failure is the verdict."""
    verdict, outputs = check_values(case, run)
    if verdict.reason is None:
        reason = check_bits(case, run, outputs, launches, load)
        verdict = Verdict(reason, verdict.rel_err, verdict.rel_err_stock)
    return verdict
