"""Random calls of every operation: the interpreter on a CPU, compiled kernels on a GPU.

FLASHNORM_FUZZ=long draws many more calls, new ones each time; without it they are always the same.
"""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import pytest
import torch
from conftest import HAS_GPU
from fake_gpu import AMPERE, gpu
from fuzzing import Call, Sizes, calls, judge, judge_norm
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from numerics import poisoned
from plan_params import (
    SMALL,
    one_of_each_form,
    plan_name,
    takes_dtype,
    takes_gain,
    takes_whole_pieces,
)
from torch import Tensor

from flashnorm_triton import dispatch, limits, runtime
from flashnorm_triton.ops import norm_linear, rms_norm
from flashnorm_triton.plans import Plan, Problem

pytest.importorskip("triton")
LONG = os.environ.get("FLASHNORM_FUZZ") == "long"
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Compiled, N and K are constants of the code, and rows are not.
SIZES = (
    Sizes(
        st.one_of(st.integers(0, 20), st.sampled_from((31, 64, 65, 127, 200, 513))),
        st.sampled_from((8, 17, 64, 130)),
        st.sampled_from((1, 24, 128, 333, 1024)),
    )
    if HAS_GPU
    else Sizes(
        st.one_of(st.integers(0, 5), st.sampled_from((8, 17))),
        st.one_of(st.integers(0, 24), st.sampled_from((33, 64))),
        st.one_of(st.integers(1, 70), st.sampled_from((64, 72, 131))),
    )
)
on_cpu = pytest.mark.skipif(HAS_GPU, reason="the interpreter stands in for a GPU")
PLANS = [param.values[1] for param in one_of_each_form()] if HAS_GPU else list(SMALL)


def profile(examples: int) -> settings:
    """So many calls a test; thirty times as many, other ones every time, in the long profile.

    On a GPU fewer: nearly each is a compile.
    """
    return settings(
        max_examples=max(4, examples * (30 if LONG else 1) // (6 if HAS_GPU else 1)),
        derandomize=not LONG,
        database=None,
        deadline=timedelta(seconds=60),
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


def profile_of(plan: Plan, examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """``profile`` with calls of the plan's own.

    Derandomized, hypothesis draws by the test's source alone: all plans would see the same calls.
    """
    if LONG:
        return profile(examples)
    own = settings(profile(examples), derandomize=False)
    return lambda test: seed(zlib.crc32(plan_name(plan).encode()))(own(test))


@contextmanager
def strict() -> Iterator[None]:
    """Within, memory is poisoned, and a plan that gives way is an error."""
    with poisoned(), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # NumPy warns of the inf and NaN that are drawn
        warnings.filterwarnings("error", message="flashnorm_triton")
        yield


def run(call: Call, plan: Plan | None = None) -> Tensor:
    before = [t.clone() for t in call.tensors]
    x, weight, eps, bias, gain, more, _, _ = call
    y = norm_linear(x, weight, eps, bias, gain, plan=plan, **more)
    for old, now in zip(before, call.tensors, strict=True):
        assert torch.equal(old.nan_to_num(7.0), now.nan_to_num(7.0)), "an input was written to"
    return y


def roundings(call: Call, plan: Plan | None) -> int:
    """How often the plan rounds to the dtype; 2 where it is not known which one runs."""
    if plan is None or plan.form not in (
        "gemv",
        "tiles",
        "scaled_gemm",
        "hopper_swap",
        "hopper_rows",
    ):
        return 2
    return 2 if plan.form == "tiles" and call.gain is not None else 1


def serves(plan: Plan, problem: Problem) -> bool:
    """Whether the plan has to run the problem; it refuses any other."""
    dtype = getattr(torch, problem.dtype)
    if HAS_GPU:
        facts = runtime.device_facts(torch.cuda.current_device())
        return limits.unfit(plan, problem, facts) is None
    if limits.unserved(plan, problem) or not takes_dtype(plan, dtype):
        return False
    if problem.has_gain and not takes_gain(plan, dtype):
        return False
    return problem.tma or not takes_whole_pieces(plan)


def problem_of(call: Call) -> Problem:
    x, weight, eps, bias, gain, more, _, _ = call
    whole = dispatch.Call(x, weight, eps, bias, gain, dispatch.Epilogue(**more))
    return whole.problem(dispatch._matrix(x))


@pytest.mark.parametrize("plan", PLANS, ids=plan_name)
def test_a_plan_runs_right_or_refuses(plan: Plan) -> None:
    # The interpreter's bf16 dot is wrong but for tiles, which widen there.
    dtypes = tuple(
        d for d in DTYPES if HAS_GPU or d != torch.bfloat16 or plan.form != "scaled_gemm"
    )

    @profile_of(plan, 12 if plan.form == "gemv" else 30)
    @given(calls(SIZES, dtypes, DEVICE))
    def check(call: Call) -> None:
        empty = not call.x.numel() or not call.weight.numel()
        with strict():
            if empty or serves(plan, problem_of(call)):
                judge(call, run(call, plan), roundings(call, plan))
            else:
                with pytest.raises((ValueError, TypeError), match="plan"):
                    run(call, plan)

    check()


@profile(60)
@given(calls(SIZES, DTYPES, DEVICE))
def test_the_chosen_plan(call: Call) -> None:
    """As a user calls it: on a CPU in torch, on a GPU with the plan of the table or the choice."""
    with strict():
        judge(call, run(call), 2)


@on_cpu
@profile(60)
@given(calls(SIZES, DTYPES, DEVICE))
def test_the_plan_chosen_on_a_gpu(call: Call) -> None:
    """The dispatch and the kernels of an Ampere GPU, interpreted."""
    with gpu(AMPERE), strict():
        judge(call, run(call), 2)


@profile(40)
@given(calls(SIZES, DTYPES, DEVICE))
def test_the_registered_operation(call: Call) -> None:
    x, weight, eps, bias, gain, more, _, _ = call
    with strict():
        y = torch.ops.flashnorm.norm_linear(x, weight, eps, bias, gain, **more)
        assert torch.equal(y.nan_to_num(7.0), run(call).nan_to_num(7.0))


@profile(60)
@given(calls(SIZES._replace(n=st.just(1)), DTYPES, DEVICE))
def test_rms_norm(call: Call) -> None:
    with gpu(AMPERE) if not HAS_GPU else nullcontext(), strict():
        y = rms_norm(call.x, call.eps, call.gain)
    assert y.shape == call.x.shape and y.dtype == call.x.dtype and y.is_contiguous()
    judge_norm(call, y)
