"""Tensors whose elements lie past 2**31 from their first one: every kernel family, every operand.

On a GPU with real memory, and without one by reading the compiled code: an offset that rows and a
stride make must be 64 bits wide before they are multiplied.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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


# Programs of these walk the rows along x alone: what comes of y are places within a row.
ALONG_X = ("@heads_kernel", "@rotary_heads_kernel")
_SMALL = re.compile(r"(?:constant |dense<)\d{1,5}(?:>| |$)")


class Slices:
    """The operations that values of a function come from; loops are not followed around."""

    def __init__(self, function: Op) -> None:
        self.makes: dict[Value, Op] = {}
        for op in function.walk():
            self.makes |= dict.fromkeys(op.results, op)

    def of(self, value: Value, stop: tuple[str, ...] = ()) -> Iterator[Op]:
        """Every operation behind a value, but for what is behind those named in ``stop``."""
        todo, seen = [value], set()
        while todo:
            op = self.makes.get(todo.pop())
            if op is None or op in seen:
                continue
            seen.add(op)
            yield op
            if op.name not in ("tt.load", "ttg.local_load", "scf.for", "scf.while", *stop):
                todo += op.operands

    def is_small(self, value: Value) -> bool:
        op = self.makes.get(value)
        return op is not None and op.name == "arith.constant" and bool(_SMALL.search(op.text))

    def is_grid(self, value: Value) -> bool:
        op = self.makes.get(value)
        return op is not None and op.name in ("tt.get_program_id", "tt.get_num_programs")

    def is_closed(self, value: Value) -> bool:
        """Whether all behind a value is made in the function: places within a tile, constants."""
        return all(operand in self.makes for op in self.of(value) for operand in op.operands)

    def is_remainder(self, value: Value) -> bool:
        op = self.makes.get(value)
        return op is not None and op.name[:9] == "arith.rem" and self.is_small(op.operands[1])


def narrow_products(function: Op) -> list[str]:
    """Pointer offsets that go back to a 32-bit product which can pass 2**31.

    A program's number times a constant below 2**16 counts rows or columns, times the number of
    programs it counts tiles, and a remainder is small. Any other product in 32 bits, of a whole
    tile's indices or with an argument (a stride), is one too narrow.
    """
    slices, found = Slices(function), []
    along_x = any(name in function.text for name in ALONG_X)
    for pointer in function.walk():
        if pointer.name != "tt.addptr":
            continue
        for op in slices.of(pointer.operands[1], stop=("arith.muli",)):
            if op.name != "arith.muli" or "i32" not in op.text.rpartition(" : ")[2]:
                continue
            small = any(map(slices.is_small, op.operands))
            programs = {
                behind.text.split()[1]
                for behind in slices.of(op.results[0])
                if behind.name == "tt.get_program_id"
            }
            within = slices.is_closed(op.results[0]) and not programs
            within = within or (along_x and "x" not in programs)
            counts = small and ("tensor<" not in op.text or within)
            counts = counts or (small and any(map(slices.is_remainder, op.operands)))
            if not (counts or all(map(slices.is_grid, op.operands))):
                found.append(f"line {op.line}: {op.text} (address of line {pointer.line})")
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
