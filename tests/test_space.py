"""The search space: small, fitting, and holding a nearly best plan wherever plans were measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashnorm_triton import limits
from flashnorm_triton.plans import UNFUSED, Device, Plan, Problem, choose
from flashnorm_triton.tuning import space

H200 = Device("cuda", 90, 132, gluon=True)
DEVICES = {
    "h200": H200,
    "h100, no gluon": Device("cuda", 90, 114),
    "a100": Device("cuda", 80, 108),
    "ada": Device("cuda", 89, 128),
    "b200": Device("cuda", 100, 148),
    "mi300": Device("hip", 0, 304),
}
SHAPES = ((960, 576), (3072, 2048), (28672, 4096), (57344, 8192), (77, 63), (1, 8))
ROWS = tuple(1 << power for power in range(14))


def measured() -> Iterator[tuple[Problem, dict[Plan, float]]]:
    """Every measured cell and its plans' times over the unfused pair's."""
    data = json.loads((Path(__file__).parent / "measured_plans.json").read_text())
    for k, n, m, rows in data["cells"]:
        times = {
            Plan(**dict(zip(data["fields"], fields, strict=True))): time for time, *fields in rows
        }
        yield Problem("bfloat16", m, n, k), {**times, UNFUSED: 1.0}


def regret(problem: Problem, times: dict[Plan, float], effort: str) -> float:
    """How much slower the best plan of the space is than the best that was measured.

    The heuristic's plan counts only where the lists have it too: they do not lean on it.
    """
    listed = set(space.candidates(problem, H200, effort))
    own = {plan for plan in space._listed(problem, H200) if plan in listed}
    listed = own | {UNFUSED} if effort == "quick" else listed
    return min(times[plan] for plan in listed if plan in times) / min(times.values()) - 1


@pytest.mark.parametrize(
    ("effort", "worst", "mean"), [("quick", 0.02, 0.002), ("full", 0.01, 0.001)]
)
def test_every_measured_cell_has_a_nearly_best_candidate(effort, worst, mean, capsys):
    regrets = {problem: regret(problem, times, effort) for problem, times in measured()}
    by_size = sorted(regrets.items(), key=lambda item: -item[1])
    with capsys.disabled():
        average = sum(regrets.values()) / len(regrets)
        print(f"\n{effort}: {len(regrets)} cells, mean regret {average:.2%}; the worst:")
        for problem, value in by_size[:4]:
            print(f"  {problem.k}→{problem.n} M={problem.m}: {value:.2%}")
    assert len(regrets) >= 70
    assert by_size[0][1] <= worst
    assert average <= mean


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("effort", space.EFFORTS)
def test_candidates_are_few_fit_and_hold_the_incumbent_and_the_unfused_pair(device, effort):
    for dtype in ("bfloat16", "float16", "float32"):
        for has_gain in (False, True):
            for n, k in SHAPES:
                for m in (1, 2, 4, 8, 32, 128, 512, 4096):
                    tma = k * limits.ELEMENT_BYTES[dtype] % 16 == 0
                    problem = Problem(dtype, m, n, k, has_gain=has_gain, tma=tma)
                    listed = space.candidates(problem, device, effort)
                    assert len(set(listed)) == len(listed) <= space.EFFORTS[effort]
                    assert UNFUSED in listed
                    assert choose(problem, device) in listed
                    for plan in listed:
                        assert limits.unfit(plan, problem, device) is None, (plan, problem)
                        # What is stored must be what is read: nothing in a plan that its form
                        # does not keep.
                        assert limits.plan_from(plan.as_dict()) == plan


def test_quick_is_small_and_full_holds_it():
    for m in ROWS:
        problem = Problem("bfloat16", m, 3072, 2048)
        quick, full = (space.candidates(problem, H200, effort) for effort in ("quick", "full"))
        assert len(quick) <= 14 and set(quick) <= set(full)
    assert len(space.candidates(Problem("bfloat16", 64, 3072, 2048), H200, "full")) > 20


def test_no_candidate_for_hopper_has_the_racing_form():
    """One load for the squares and the asynchronous instruction: only where it is synchronous."""
    for device in DEVICES.values():
        for has_gain in (False, True):
            for m in ROWS:
                problem = Problem("bfloat16", m, 6144, 4096, has_gain=has_gain)
                for plan in space.candidates(problem, device, "full"):
                    if device.capability == 90 and plan.form == "tiles" and plan.block_m >= 32:
                        assert plan.squares != "shared"


def test_shared_memory_and_registers_prune():
    problem = Problem("bfloat16", 64, 6144, 4096)
    fits = Plan("single_pass", "hopper_swap", 64, 128, 128, 4, 4)
    assert limits.shared_bytes(fits, "bfloat16") == (64 + 128) * 128 * 2 * 4
    assert limits.unfit(fits, problem, H200) is None
    too_deep = Plan("single_pass", "hopper_swap", 64, 128, 128, 4, 5)
    assert "shared memory" in limits.unfit(too_deep, problem, H200)
    # Two blocks on a multiprocessor need twice the memory.
    assert not space._sensible(
        Plan("single_pass", "hopper_swap", 64, 128, 64, 4, 6, max_registers=128), problem, H200
    )
    assert not space._sensible(Plan("single_pass", "gemv", 8, 32, 1024, 4, 1), problem, H200)
    # A GEMV that would be unrolled 32 times, and one whose block is twice the matrix.
    assert not space._sensible(Plan("single_pass", "gemv", 1, 4, 128, 1, 1), problem, H200)
    small = Problem("bfloat16", 1, 6144, 512)
    assert not space._sensible(Plan("single_pass", "gemv", 1, 2, 1024, 4, 1), small, H200)


@pytest.mark.parametrize(
    ("plan", "problem", "device", "why"),
    [
        (Plan("single_pass", "hopper_swap", 16, 64, 128, 4, 3), {}, DEVICES["a100"], "9.0"),
        (Plan("single_pass", "hopper_swap", 16, 64, 128, 4, 3), {}, DEVICES["b200"], "Gluon"),
        (Plan("single_pass", "hopper_swap", 16, 64, 128, 4, 3), {"tma": False}, H200, "aligned"),
        (Plan("single_pass", "hopper_swap", 16, 64, 128, 4, 3), {"has_gain": True}, H200, "gain"),
        (
            Plan("stats_then_gemm", "scaled_gemm", 128, 256, 64, 8, 3),
            {"dtype": "float32"},
            H200,
            "float32",
        ),
        (
            Plan("single_pass", "hopper_rows", 128, 128, 64, 4, 4, squares="own"),
            {"n": 77},
            H200,
            "77",
        ),
        (
            Plan("single_pass", "tiles", 16, 32, 64),
            {"dtype": "float16", "has_gain": True},
            H200,
            "overflow",
        ),
        (Plan("torch", "reference"), {}, H200, "plain torch"),
        (Plan("single_pass", "gemv", 1, 4, 256), {}, Device("cpu"), "needs a GPU"),
        (Plan("single_pass", "gemv", 2, 4, 256, 2), {"m": 2}, H200, "each lane of 2 warps"),
        (Plan("single_pass", "gemv", 1, 4, 256), {"activation": "relu"}, H200, "of 4 warps"),
        (Plan("single_pass", "gemv", 2, 4, 256, 1), {"m": 2, "k": 1999}, H200, "pieces of 16"),
        (Plan("single_pass", "gemv", 2, 4, 256, 1), {"m": 2, "tma": False}, H200, "pieces of 16"),
    ],
)
def test_a_plan_that_cannot_run_says_why(plan, problem, device, why):
    fields = {"dtype": "bfloat16", "m": 16, "n": 3072, "k": 2048, **problem}
    assert why in limits.unfit(plan, Problem(**fields), device)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"block_n": 48}, "power of two"),
        ({"block_n": True}, "whole number"),
        ({"block_n": 4.0}, "whole number"),
        ({"block_n": -4}, "power of two"),
        ({"block_n": 1 << 20}, "too large"),
        ({"num_stages": 0}, "too small"),
        ({"form": 3}, "must be a text"),
        ({"form": "warp_magic"}, "warp_magic"),
        ({"strategy": "unfused"}, "does not serve"),
        ({"swizzle": 3}, "swizzle"),
        ({"squares": "none"}, "squares"),
    ],
)
def test_a_stored_plan_is_checked_field_by_field(changed, why):
    stored = {**Plan("single_pass", "gemv", 1, 4, 256).as_dict(), **changed}
    with pytest.raises(ValueError, match=why):
        limits.plan_from(stored)


def test_a_stored_plan_must_be_whole():
    stored = Plan("single_pass", "gemv", 1, 4, 256).as_dict()
    for name in ("strategy", "form", "block_m", "block_k"):
        with pytest.raises(ValueError):
            limits.plan_from({key: value for key, value in stored.items() if key != name})
    with pytest.raises(ValueError, match="given"):
        limits.plan_from(Plan("single_pass", "tiles", 64, 64, 64, squares="given").as_dict())


def test_an_unknown_effort_is_refused():
    with pytest.raises(ValueError, match="'heroic'.*quick, full"):
        space.candidates(Problem("bfloat16", 1, 64, 64), H200, "heroic")


@pytest.mark.parametrize("m", [1, 2, 4, 16, 32, 4096])
@pytest.mark.parametrize(("n", "k"), [(2048, 2048), (2048, 8192), (4096, 14336), (1152, 6912)])
def test_linears_without_a_norm(m: int, n: int, k: int):
    problem = Problem("bfloat16", m, n, k, normed=False, has_residual=True)
    for device in (H200, Device("cuda", 80, 108), Device("hip", 0, 304)):
        plans = space.candidates(problem, device)
        assert plans[0] == choose(problem, device) and UNFUSED in plans
        assert all(limits.unfit(plan, problem, device) is None for plan in plans)
        assert not any(plan.squares in ("own", "registers") for plan in plans)
    assert len(space.candidates(problem, H200)) >= (5 if m < 33 else 3)
