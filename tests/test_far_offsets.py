"""Tensors whose elements lie past 2**31 from their first one: every kernel family, every operand.

On a GPU with real memory, and without one by reading the compiled code: an offset that rows and a
stride make must be 64 bits wide before they are multiplied.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from aot_runs import FIXTURES, SHIPPED, compiled
from numerics import Case, assert_right, make_case
from plan_params import one_of_each_form, skip_unless_it_runs_here
from torch import Tensor

from flashnorm_triton import limits, runtime
from flashnorm_triton.heads import Head, HeadNorms, Heads
from flashnorm_triton.ops import norm_linear, rms_norm
from flashnorm_triton.plans import Plan, Problem
from flashnorm_triton.tuning.ttgir import Op, Value, functions

pytest.importorskip("triton")

# Without a GPU


def narrow_products(function: Op) -> list[str]:
    """Pointer offsets that go back to a 32-bit product which can pass 2**31.

    A product of a constant below 2**16 and a program's number counts rows or columns. Any other
    one in 32 bits, of a whole tile's indices or with an argument (a stride), is one too narrow.
    """
    makes: dict[Value, Op] = {}
    inner: dict[Value, Value] = {}
    for op in function.walk():
        makes |= dict.fromkeys(op.results, op)
    small = {
        op.results[0]
        for op in function.walk()
        if op.name == "arith.constant"
        and re.search(r"(?:constant |dense<)\d{1,5}(?:>| |$)", op.text)
    }
    found, seen = [], set()

    def follow(value: Value, pointer: Op) -> None:
        value = inner.get(value, value)
        if value in seen or value not in makes:
            return
        seen.add(value)
        op = makes[value]
        if op.name == "arith.muli" and op.text.rstrip("}").rstrip().endswith("i32"):
            scalar = "tensor<" not in op.text
            if not (scalar and any(operand in small for operand in op.operands)):
                found.append(f"line {op.line}: {op.text} (address of line {pointer.line})")
                return
        if op.name in ("tt.load", "scf.for", "scf.while", "scf.if", "ttg.local_load"):
            return
        for operand in op.operands:
            follow(operand, pointer)

    for op in function.walk():
        if op.name == "tt.addptr":
            seen.clear()
            follow(op.operands[1], op)
    return found


def test_no_shipped_kernel_multiplies_a_stride_in_32_bits():
    run, seen = compiled(SHIPPED), 0
    for target in ("sm80", "sm90"):
        for name, _ in run.records(target):
            for function in functions(run.text(name, target)):
                seen += sum(op.name == "tt.addptr" for op in function.walk())
                assert not narrow_products(function), name
    assert seen > 1000


def test_a_narrow_product_is_found():
    """The racing kernel's own: rows times K in 32 bits, which is enough for its test."""
    (function,) = functions(compiled(FIXTURES).text("racing_pointer-w4s3"))
    assert narrow_products(function)


# On a GPU

FAR = 2**31 + 8
gpu = pytest.mark.gpu


def far(values: Tensor, stride: int = FAR) -> Tensor:
    """The rows of ``values``, so far apart that their offsets pass 2**31 elements."""
    rows, columns = values.shape
    needed = ((rows - 1) * stride + columns) * values.element_size()
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < needed + (4 << 30):
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free GPU memory")
    flat = torch.empty((rows - 1) * stride + columns, dtype=values.dtype, device=values.device)
    return flat.as_strided(values.shape, (stride, 1)).copy_(values)


def plain_problem(plan: Plan, problem: Problem) -> Problem:
    return replace(problem, m=5, n=8, k=1024, has_bias=True, has_gain=False, tma=True)


@gpu
@pytest.mark.parametrize("operand", ["x", "weight"])
@pytest.mark.parametrize(("problem", "plan"), one_of_each_form())
def test_rows_far_apart(problem: Problem, plan: Plan, operand: str):
    skip_unless_it_runs_here(plan)
    if plan.form in ("library", "two_streams") and operand == "weight":
        pytest.skip("the library's own limit: it raises, as the stock linear does")
    facts = runtime.device_facts(torch.cuda.current_device())
    if obstacle := limits.unfit(plan, plain_problem(plan, problem), facts):
        pytest.skip(obstacle)
    case = make_case(5, 8, 1024, getattr(torch, problem.dtype), "cuda", bias=True)
    moved = case._replace(**{operand: far(getattr(case, operand), 2**30 + 8)})
    y = norm_linear(*moved, plan=plan)
    assert_right(y, case)
    assert torch.equal(y, norm_linear(*case, plan=plan))


@gpu
def test_rows_far_apart_in_the_other_kernels():
    x = torch.randn(3, 64, device="cuda").bfloat16()
    gain = torch.rand(64, device="cuda").bfloat16()
    assert torch.equal(rms_norm(far(x), 1e-6, gain), rms_norm(x, 1e-6, gain))
    norms = HeadNorms((Heads(0, 2, (Head(16, (0,)),)),), (1e-6,), (False,))
    z = torch.randn(3, 32, device="cuda").bfloat16()
    gains = (gain[:16].clone(),)
    assert torch.equal(norms(z, gains, far(x), 1e-6), norms(z, gains, x, 1e-6))


def last_rows(case: Case, rows: int = 130) -> Case:
    return case._replace(x=case.x[-rows:])


@gpu
@pytest.mark.parametrize("what", ["rms_norm", "heads", "finish", "residual"])
def test_outputs_and_residuals_past_2_to_the_31(what: str):
    """M * N over 2**31: the last rows of what is read and of what is written are far away."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 36 * 2**30:
        pytest.skip("needs 36 GiB of free GPU memory")
    m, n, tail = 33_000, 65_600, 130
    if what in ("rms_norm", "heads"):
        x = torch.randn(tail, n, device="cuda", dtype=torch.bfloat16)
        wide = torch.zeros(m, n, device="cuda", dtype=torch.bfloat16)
        wide[-tail:] = x
        if what == "rms_norm":
            assert torch.equal(rms_norm(wide, 1e-6)[-tail:], rms_norm(x, 1e-6))
            return
        norms = HeadNorms((Heads(0, n // 64, (Head(64, (0,)),)),), (1e-6,), (False,))
        gains = (torch.rand(64, device="cuda").bfloat16(),)
        assert torch.equal(norms(wide, gains)[-tail:], norms(x, gains))
        return
    case = make_case(m, n, 64, torch.bfloat16, "cuda", bias=True)
    residual = torch.zeros(m, n, device="cuda", dtype=torch.bfloat16)
    residual[-tail:] = torch.randn(tail, n, device="cuda")
    plan = (
        Plan("unfused", "library") if what == "finish" else Plan("single_pass", "gemv", 4, 16, 1024)
    )
    more = {"activation": "relu", "residual": residual}
    y = norm_linear(*case, plan=plan, **more)[-tail:]
    more["residual"] = residual[-tail:].clone()
    few = norm_linear(*last_rows(case), plan=plan, **more)
    torch.testing.assert_close(y, few, rtol=2e-2, atol=2e-2)
