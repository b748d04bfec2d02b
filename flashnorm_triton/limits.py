"""What a plan asks of a device and a problem: is it well formed, does it fit, what does it occupy.

Used where a plan comes from outside (a table's file) and where candidates are made (tuning): a plan
that cannot run is known here, before anything is compiled. Estimates are on the low side: what a
compiled kernel really needs is known to its compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from flashnorm_triton.plans import EPILOGUES, WITHOUT_BLOCKS, Device, Plan, Problem

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
TMA_FORMS = ("scaled_gemm", "hopper_swap", "hopper_rows")
GLUON_FORMS = ("hopper_swap", "hopper_rows")
_SHARED_LIMIT = {80: 166_912, 87: 166_912, 90: 232_448, 100: 232_448, 103: 232_448}
_LEAST_SHARED = {"cuda": 101_376, "hip": 65_536}
_STRATEGY_OF = {
    "gemv": ("single_pass",),
    "tiles": ("single_pass", "stats_then_gemm"),
    "hopper_swap": ("single_pass",),
    "hopper_rows": ("single_pass", "stats_then_gemm"),
    "scaled_gemm": ("stats_then_gemm",),
    "library": ("unfused",),
    "two_streams": ("overlap",),
    "reference": ("torch",),
}
_MOST = {
    "num_warps": 16, "num_stages": 16, "group_m": 1024, "max_registers": 255, "in_flight": 1,
    "split_k": 64,
}  # fmt: skip
_MOST_GRID_Y = 65_535
MOST_SPLIT_TILES = 1 << 12
_MAY_BE_ZERO = ("max_registers", "in_flight")


def plan_from(stored: Mapping[str, Any]) -> Plan:
    """The plan that ``Plan.as_dict`` wrote.

    Raises ValueError, naming the field, for anything that no plan of this version can be: unknown
    or missing fields, wrong types, blocks that are no powers of two.
    """
    known = {field.name: field for field in fields(Plan)}
    if unknown := [name for name in stored if name not in known]:
        raise ValueError(f"plan has fields that this version does not know: {', '.join(unknown)}")
    for name, value in stored.items():
        if isinstance(known[name].default, int):
            _check_number(name, value)
        elif not isinstance(value, str):
            raise ValueError(f"plan has {name} = {value!r}: it must be a text")
    try:
        plan = Plan(**stored)
    except TypeError as error:
        raise ValueError(f"plan is incomplete: {error}") from None
    if plan.strategy not in _STRATEGY_OF.get(plan.form, (plan.strategy,)):
        raise ValueError(f"form {plan.form!r} does not serve strategy {plan.strategy!r}")
    given = plan.squares == "given"
    two_ways = plan.form in ("tiles", "hopper_rows")
    if two_ways and given is not (plan.strategy == "stats_then_gemm"):
        raise ValueError(f"squares {plan.squares!r} cannot serve strategy {plan.strategy!r}")
    if plan.squares == "registers" and plan.form != "hopper_rows":
        raise ValueError(f"squares 'registers' is a way of hopper_rows, not of {plan.form!r}")
    if plan.form not in WITHOUT_BLOCKS:
        for name in ("block_m", "block_n", "block_k"):
            if not getattr(plan, name):
                raise ValueError(f"plan has no {name}")
    return plan


def _check_number(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"plan has {name} = {value!r}: it must be a whole number")
    if name.startswith("block_") or name == "num_warps":
        if value < 1 or value & (value - 1):
            raise ValueError(f"plan has {name} = {value}: it must be a power of two")
    elif value < (0 if name in _MAY_BE_ZERO else 1):
        raise ValueError(f"plan has {name} = {value}: it is too small")
    if value > _MOST.get(name, 8192):
        raise ValueError(f"plan has {name} = {value}: it is too large")


def shared_limit(device: Device) -> int:
    """Most shared memory, in bytes, that one block of threads can have on the device."""
    return _SHARED_LIMIT.get(device.capability, _LEAST_SHARED.get(device.backend, 0))


def shared_bytes(plan: Plan, dtype: str, gated: bool = False) -> int:
    """Shared memory of a block of threads, in bytes: an estimate from below.

    ``gated``: a tile of a Gluon form holds rows of the gate and as many of the up projection.
    """
    size = ELEMENT_BYTES[dtype]
    pair = 2 if gated and plan.form in GLUON_FORMS else 1
    x_tile, w_tile = plan.block_m * plan.block_k, plan.block_n * plan.block_k * pair
    if plan.form == "gemv":
        return w_tile * size * (plan.num_stages - 1)
    if plan.form == "tiles":
        copies = 2 if plan.squares == "own" else 1
        return (copies * x_tile + w_tile) * size * (plan.num_stages - 1)
    staging = plan.block_m * plan.block_n * size if plan.form == "hopper_rows" else 0
    if two_halves(plan):
        staging //= 2
    if plan.form in TMA_FORMS:
        return (x_tile + w_tile) * size * plan.num_stages + staging
    return 0


def two_halves(plan: Plan) -> bool:
    """Whether a row tile is two accumulators side by side, which leave through one buffer."""
    return plan.form == "hopper_rows" and plan.squares == "registers" and plan.block_n == 256


def accumulators(plan: Plan, gated: bool = False) -> int:
    """Registers of a thread that hold sums of products and of squares: what must not spill."""
    # hopper_rows counts the warps of one of its two consumer groups.
    threads = 32 * plan.num_warps * (2 if plan.form == "hopper_rows" else 1)
    products = plan.block_m * plan.block_n * (2 if gated and plan.form in GLUON_FORMS else 1)
    squares = plan.block_m * plan.block_k
    if plan.form == "gemv":
        # Several rows fold the eight values that a thread loads at once (fp32: four) into one.
        folded = 1 if plan.block_m == 1 else 8
        return (plan.block_m * plan.block_n * plan.block_k + squares) // (threads * folded)
    if plan.form == "scaled_gemm" or (plan.form == "hopper_rows" and plan.squares == "given"):
        return products // threads
    if plan.squares == "registers":
        # Sixteen sums a row, and two sets of rows of x, two values a register.
        squares = plan.block_m * (16 + plan.block_k)
    return (products + squares) // threads


def unserved(plan: Plan, problem: Problem) -> str | None:
    """Why the kernels of a plan do not have a problem's epilogue; None when they do."""
    asked = {
        "centred": problem.centred,
        "activation": problem.activation,
        "gated": problem.gated,
        "residual": problem.has_residual,
        "bare": not problem.normed,
    }
    served = EPILOGUES.get(plan.form, ())
    if plan.form == "tiles" and (plan.squares != "given" or problem.has_gain):
        # No sums of its own; and x * gain is rounded before its mean could be taken off.
        asked["centred with its own squares or a gain"] = asked.pop("centred")
    missing = [name for name, wanted in asked.items() if wanted and name not in served]
    return f"form {plan.form!r} has no epilogue {', '.join(missing)}" if missing else None


def _unfit_gemv(plan: Plan, problem: Problem, lanes: int) -> str | None:
    """What folding asks: neighbours in K that a thread has loaded at once, and by itself.

    Else they would have to change threads first, and what Triton 3.6 makes of that is wrong on the
    device where a step is smaller than the threads (``docs/measured.md``).
    """
    if plan.block_m == 1 and not problem.epilogue:
        return None
    vector = 16 // ELEMENT_BYTES[problem.dtype]
    if plan.block_k < lanes * vector * plan.num_warps:
        return (
            f"a step of {plan.block_k} along K is less than 16 bytes for each lane of "
            f"{plan.num_warps} warps"
        )
    if not problem.tma or problem.k % vector:
        return "rows of x or weight are not whole pieces of 16 bytes"
    return None


def _unfit_hopper(plan: Plan, problem: Problem) -> str | None:
    """What the Gluon kernels' tiles, groups and epilogues do not combine."""
    if plan.form == "hopper_rows":
        if problem.width % 8:
            return f"it writes rows of 16 bytes, and N is {problem.width}"
        if plan.block_m != 128:
            return f"its rows are two groups of 64, not {plan.block_m}"
        if plan.squares == "shared":
            return "its squares are own, registers or given"
        if not problem.normed and plan.squares != "given":
            return "without a norm there are no squares to compute"
        if problem.gated and (plan.block_n > 128 or (plan.squares == "own" and plan.block_n > 64)):
            return "gate and up of that width do not fit the registers"
        if problem.epilogue and plan.squares == "own" and plan.block_n == 256:
            return "tiles of that width with their own squares leave no registers for an epilogue"
    if plan.form == "hopper_swap":
        if plan.block_n % 64 or plan.num_warps != 4:
            return "its consumer is one group of 4 warps and 64 weights, or more of them"
        if plan.split_k > 1 and (problem.centred or problem.gated):
            return "split-K adds up one accumulator and the squares alone"
    return None


def _unfit_two_streams(problem: Problem, device: Device) -> str | None:
    """What the library's product of the raw x cannot be.

    It must stay in fp32 until it is scaled, which the library does for halves on CUDA alone. In
    fp16 it may be larger than the dtype holds. bf16 would hold it, but rounds it once more than the
    contract allows: the largest error is up to 1.4 times the stock modules'. The fp32 product of
    rows far off centre has lost, in fp32, what taking their mean off afterwards would leave: 1.9 to
    2.6 times stock's error where the mean is three deviations.
    """
    if problem.has_gain:
        return "it cannot apply a gain"
    if problem.centred and problem.dtype == "float32":
        return "the product of rows that are off centre is not exact enough in float32"
    if problem.dtype != "float32" and device.backend != "cuda":
        return f"the library keeps no fp32 product of {problem.dtype} there"
    return None


def unfit(plan: Plan, problem: Problem, device: Device) -> str | None:
    """Why a plan cannot serve a problem on a device; None when it can."""
    if plan.form == "reference":
        return None if device.backend == "cpu" else "plain torch is not a plan for a GPU"
    if device.backend == "cpu":
        return "it needs a GPU"
    if plan.form == "library":
        return None
    if obstacle := unserved(plan, problem):
        return obstacle
    if plan.form == "two_streams":
        return _unfit_two_streams(problem, device)
    if plan.form in TMA_FORMS:
        if device.backend != "cuda" or device.capability < 90:
            return "it needs the copy engine of compute capability 9.0 and later"
        if not problem.tma:
            return "x or weight is not 16-byte aligned"
        if problem.has_gain:
            return "it cannot apply a gain"
        if problem.dtype not in ("bfloat16", "float16"):
            return f"it does not take {problem.dtype}"
    if plan.form in GLUON_FORMS and not device.gluon:
        return "it needs Hopper and a Triton whose Gluon drives it"
    if obstacle := _unfit_hopper(plan, problem):
        return obstacle
    if plan.form == "gemv":
        obstacle = _unfit_gemv(plan, problem, 64 if device.backend == "hip" else 32)
        if obstacle:
            return obstacle
    if problem.gated and plan.form in ("gemv", "tiles") and plan.block_n < 2:
        return "a gated pair takes two features"
    if plan.form == "tiles":
        if problem.dtype not in ("bfloat16", "float16"):
            return f"it does not take {problem.dtype}"
        if problem.has_gain and problem.dtype == "float16":
            return "x * gain could overflow float16 before the division"
        if plan.squares == "shared" and plan.block_m >= 64 and device.capability == 90:
            return "one load of x for the product and the squares races on Hopper from 64 rows on"
    down, across = -(-problem.m // plan.block_m), -(-problem.width // plan.block_n)
    if plan.form in ("gemv", "hopper_swap") and down > _MOST_GRID_Y:
        return f"{problem.m} rows are {down} blocks, {_MOST_GRID_Y} can be launched"
    if plan.split_k > 1 and down * across > MOST_SPLIT_TILES:
        return f"{down * across} tiles share K, {MOST_SPLIT_TILES} have counters"
    if (needs := shared_bytes(plan, problem.dtype, problem.gated)) > shared_limit(device):
        return f"it needs {needs} bytes of shared memory, {shared_limit(device)} are there"
    return None
