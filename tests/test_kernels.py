"""Every kernel family against float64: the interpreter on a CPU, the shipped plans on a GPU.

On a CPU each family runs in a small plan, in fp16 and fp32 (the interpreter's bf16 dot is wrong).
On a GPU the same tests take larger sizes and bf16, and every shipped plan joins them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import HAS_GPU
from numerics import (
    Case,
    assert_contract,
    assert_right,
    hard_rows,
    laid_out,
    make_case,
    poisoned,
    stock,
)
from plan_params import (
    DESCRIPTORS,
    SMALL,
    distinct_plans,
    dtype_name,
    one_of_each_form,
    plan_name,
    skip_unless_it_runs_here,
    takes_dtype,
    takes_gain,
    takes_whole_pieces,
)
from torch import Tensor

from flashnorm_triton import plans, runtime
from flashnorm_triton.ops import norm_linear
from flashnorm_triton.plans import WITHOUT_BLOCKS, Plan

pytest.importorskip("triton")

DTYPES = (torch.float16, torch.float32) + ((torch.bfloat16,) if HAS_GPU else ())
ROWS = (1, 2, 3, 5, 8, 16, 17, 33, 64, 65, 129)
# Primes: no block divides them. On a GPU there are more tiles, and pipelines that fill.
N, K = (509, 331) if HAS_GPU else (37, 131)
# Interpreted, fp16 takes every row count; compiled, where each costs a compile, bf16 a few.
FEW = (1, 3, 17, 65)
LAYOUTS = ("contiguous", "padded", "offset", "transposed", "expanded", "batched")


def run(plan: Plan, case: Case) -> Tensor:
    with poisoned():
        return norm_linear(*case, plan=plan)


def check(plan: Plan, case: Case, m: int, layout: str = "contiguous") -> None:
    """The contract for m rows a call, over all rows of the case, each call's in the layout."""
    parts = [laid_out(part, layout) for part in case.x.split(m)]
    y = torch.cat([run(plan, case._replace(x=part)) for part in parts])
    assert y.dtype == case.x.dtype
    # Stock in the same parts: the library's matmul rounds otherwise for other row counts.
    stock_y = torch.cat([stock(*case._replace(x=part)) for part in parts])
    assert_contract(y, case._replace(x=torch.cat(parts)), stock_y.to(y.dtype))


def sample(plan: Plan, m: int) -> int:
    """How many rows to judge a plan by that is called with m.

    A kernel that rounds once is compared with the perfectly rounded result, so few rows do; and
    interpreted ones are slow. Where something is rounded twice (the norm, or x times the gain)
    few values could be lucky for the stock modules.
    """
    return -(-128 // m) * m if HAS_GPU or plan.form == "library" else m


def params(*dtypes: torch.dtype) -> list[Any]:
    return [
        pytest.param(plan, dtype, id=f"{plan_name(plan)}-{dtype_name(dtype)}")
        for plan in SMALL
        for dtype in dtypes
        if takes_dtype(plan, dtype)
    ]


def for_plans(*dtypes: torch.dtype) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("plan", "dtype"), params(*dtypes))


def odd_sizes() -> list[Any]:
    rows = dict.fromkeys(DTYPES, FEW) | {torch.bfloat16: (*FEW, 2, 8, 129)}
    if not HAS_GPU:
        rows[torch.float16] = ROWS
    return [
        pytest.param(*param.values, m, id=f"{param.id}-{m}")
        for param in params(*DTYPES)
        for m in rows[param.values[1]]
    ]


@pytest.mark.parametrize(("plan", "dtype", "m"), odd_sizes())
def test_contract_on_odd_sizes(plan, dtype, m, device):
    """Every row count beside the block edges, with bias, gain and every layout by turns."""
    n, k = N, K
    if not HAS_GPU and plan.form == "gemv" and m > 33:
        n, k = 13, 67  # one interpreted program for each row and column block
    whole = takes_whole_pieces(plan)
    if whole:
        k += -k % 8  # a row that counts as contiguous has stride K
    turn = ROWS.index(m)
    layouts = ("padded", "expanded") if whole else LAYOUTS
    weights = ("padded",) if whole else ("offset", "padded", "contiguous")
    bias, gain = turn % 2 == 1, turn % 4 > 1 and takes_gain(plan, dtype)
    case = make_case(sample(plan, m), n, k, dtype, device, bias=bias, gain=gain)
    case = case._replace(weight=laid_out(case.weight, weights[turn % len(weights)]))
    check(plan, case, m, layouts[turn % len(layouts)])


@for_plans(*DTYPES)
def test_gain_and_bias_together(plan, dtype, device):
    if not takes_gain(plan, dtype):
        pytest.skip("this form takes no gain in this dtype")
    k = K + (-K % 8 if takes_whole_pieces(plan) else 0)
    case = make_case(sample(plan, 5), N, k, dtype, device, bias=True, gain=True)
    check(plan, case, 5)
    if dtype != torch.float32:  # a gain may be fp32 beside a narrower x
        check(plan, case._replace(gain=case.gain.float() * (1 + 2.0**-12)), 5)


@for_plans(torch.float16)
def test_bias_and_gain_of_any_stride(plan, dtype, device):
    case = make_case(6, 40, 72, dtype, device, bias=True, gain=takes_gain(plan, dtype))

    def spread(vector: Tensor) -> Tensor:
        return torch.stack([vector, torch.full_like(vector, math.nan)], 1)[:, 0]

    gain = None if case.gain is None else spread(case.gain)
    strided = case._replace(bias=spread(case.bias), gain=gain)
    assert_right(run(plan, strided), case)
    assert torch.equal(run(plan, strided), run(plan, case))


@for_plans(torch.float16)
def test_zero_row_gives_exactly_the_bias(plan, dtype, device):
    case = make_case(5, 40, 72, dtype, device, bias=True, x=hard_rows(5, 72, dtype, device))
    assert not case.x[2].any()
    assert torch.equal(run(plan, case)[2], case.bias)
    assert not run(plan, case._replace(bias=None))[2].any()


@for_plans(torch.float16, torch.float32)
def test_inf_and_nan_stay_in_their_rows_as_in_stock(plan, dtype, device):
    case = make_case(6, 40, 72, dtype, device, bias=True)
    case.x[0, 3] = math.inf
    case.x[1, 71] = math.nan
    case.x[4, 0], case.x[4, 1] = -math.inf, math.inf
    y, expected = run(plan, case), stock(*case)
    assert torch.equal(y.isnan(), expected.isnan()) and torch.equal(y.isinf(), expected.isinf())
    assert y[[0, 1, 4]].isnan().all() and y[[2, 3, 5]].isfinite().all()


def far_rows(rows: int, k: int, stride: int, device: torch.device) -> Tensor:
    """fp16 rows so far apart that their offsets pass 2**31; skips where there is no room.

    Untouched pages cost nothing on a CPU (poison would touch them). With room before the first row
    too, an offset that wraps around reads zeros; without it, it would end the process.
    """
    for before in (2**31, 0):
        try:
            flat = torch.empty(before + (rows - 1) * stride + k, dtype=torch.float16, device=device)
            return flat[before:].as_strided((rows, k), (stride, 1))
        except RuntimeError as error:
            reason = str(error)
    pytest.skip(f"no {2 * (rows - 1) * stride / 2**30:.0f} GiB of address space: {reason}")


@for_plans(torch.float16)
@pytest.mark.parametrize("operand", ["x", "weight"])
@pytest.mark.parametrize("stride", [2**30 + 8, 2**31 + 8])
def test_row_strides_that_pass_2_to_the_31(plan, dtype, operand, stride, device):
    """The first stride fits 32 bits and its multiple does not; the second does not fit itself."""
    case = make_case(3, 3, 72, dtype, device)
    far = far_rows(3, 72, stride, device)
    near, case = case, case._replace(**{operand: far.copy_(getattr(case, operand))})
    if HAS_GPU and plan.form in WITHOUT_BLOCKS and operand == "weight" and stride > 2**31:
        with pytest.raises(RuntimeError, match="ld[ab]"):  # as the stock linear does
            run(plan, case)
        return
    assert_right(run(plan, case), near)


@for_plans(torch.float16)
def test_nothing_is_written_outside_the_output(plan, dtype, device, monkeypatch):
    plain = torch.Tensor.new_empty
    fenced = []

    def new_empty(self: Tensor, shape: tuple[int, ...], **options: object) -> Tensor:
        if set(options) - {"dtype"} or not isinstance(shape, tuple):  # the interpreter's own
            return plain(self, shape, **options)
        size = math.prod(shape)
        block = self.new_full((size + 512,), 7.0, **options)
        fenced.append((block, size))
        return block[256 : 256 + size].view(shape)

    case = make_case(19, 37, 72, dtype, device, bias=True)
    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    y = run(plan, case)
    monkeypatch.undo()
    assert_right(y, case)
    assert fenced
    for block, size in fenced:
        assert (block[:256] == 7).all() and (block[256 + size :] == 7).all()


@for_plans(torch.float16)
def test_k_beyond_one_block_of_a_row_kernel(plan, dtype, device):
    """The statistics and the stand-alone norm hold 8192 values; beyond, they loop."""
    if plan.form != "library" and plan.squares != "given" and plan.form != "scaled_gemm":
        pytest.skip("this form has no row kernel")
    for k in (8192, 8200):
        x = torch.randn(4, k, device=device)
        x[:, 8184:] *= 50  # so that the last values decide
        case = make_case(4, 3, k, dtype, device, bias=True, x=x.to(dtype))
        assert_right(run(plan, case), case)


def test_eps_is_added_to_the_mean_square(device):
    """Rows so small that eps decides: a factor of ten in eps is a factor of three in y."""
    x = 1e-4 * torch.randn(4, 72).to(device)
    for plan in SMALL:
        for eps in (1e-7, 1e-2):
            case = make_case(4, 16, 72, torch.float32, device, x=x)._replace(eps=eps)
            if takes_dtype(plan, torch.float32):
                assert_right(run(plan, case), case)


# Forced plans: what a plan cannot do is refused, never done wrongly.


def a_plan(form: str) -> Plan:
    return next(plan for plan in SMALL if plan.form == form)


def test_descriptor_forms_refuse_a_gain_and_odd_strides(device):
    case = make_case(3, 8, 67, torch.float16, device)
    with pytest.raises(ValueError, match="16-byte aligned"):
        norm_linear(*case, plan=a_plan("scaled_gemm"))
    gained = make_case(3, 8, 64, torch.float16, device, gain=True)
    with pytest.raises(ValueError, match="cannot apply a gain"):
        norm_linear(*gained, plan=a_plan("scaled_gemm"))


def test_tiles_refuse_a_gain_in_fp16(device):
    case = make_case(3, 8, 64, torch.float16, device, gain=True)
    with pytest.raises(ValueError, match="gain"):
        norm_linear(*case, plan=a_plan("tiles"))


@pytest.mark.parametrize("form", ["tiles", "scaled_gemm"])
def test_tensor_core_forms_refuse_fp32(form, device, monkeypatch):
    """Their products would be rounded to TF32, or be slow. The interpreter may: it is exact."""
    compiled = SimpleNamespace(interpreting=lambda: False)
    monkeypatch.setattr("flashnorm_triton.launch.common.runtime", compiled)
    case = make_case(33, 44, 516, torch.float32, device)
    with pytest.raises(ValueError, match=f"{form}.*float32"):
        norm_linear(*case, plan=a_plan(form))


def test_an_empty_batch_first_changes_nothing(device):
    for plan in SMALL:
        case = make_case(3, 11, 56, torch.float16, device)
        assert run(plan, case._replace(x=case.x[:0])).shape == (0, 11)
        assert_right(run(plan, case), case)


def test_forced_plans_refuse_float64_and_gradients(device):
    case = make_case(3, 13, 64, torch.float64, device)
    tracked = make_case(3, 13, 64, torch.float16, device)
    tracked.weight.requires_grad_()
    for plan in SMALL:
        with pytest.raises((TypeError, ValueError), match="float64"):
            norm_linear(*case, plan=plan)
        with pytest.raises(ValueError, match="no gradient.*no_grad"):
            norm_linear(*tracked, plan=plan)
    with torch.no_grad():
        assert_right(norm_linear(*tracked, plan=SMALL[0]), tracked)


def test_forced_plans_need_a_gpu_or_the_interpreter(monkeypatch):
    monkeypatch.setattr(runtime, "interpreting", lambda: False)
    case = make_case(3, 13, 64, torch.float16)
    with pytest.raises(ValueError, match="'gemv' needs a GPU, but x is on cpu.*TRITON_INTERPRET"):
        norm_linear(*case, plan=a_plan("gemv"))
    assert_right(norm_linear(*case, plan=plans.TORCH), case)


# Every plan that the heuristic can give, on sizes that no block divides.


@pytest.mark.gpu
@pytest.mark.parametrize(("problem", "plan"), distinct_plans(by_gain=True))
def test_contract_of_shipped_plans_on_odd_sizes(problem, plan):
    skip_unless_it_runs_here(plan)
    dtype = getattr(torch, problem.dtype)
    # hopper_rows writes rows of 16 bytes; persistent kernels get more tiles than multiprocessors.
    n, k = (1000 if plan.form == "hopper_rows" else 1009), 1999
    if plan.form == "gemv" and takes_whole_pieces(plan):
        k = 2000
    block = plan.block_m or 64
    for m in (1, block - 1 or 3, block + 1, 2 * block + 3, 20 * block + 5):
        if m == 1 and plan.form in DESCRIPTORS:
            continue  # one row counts as contiguous, and K is odd
        gain = problem.has_gain
        case = make_case(sample(plan, m), n, k, dtype, "cuda", bias=True, gain=gain)
        check(plan, case._replace(weight=laid_out(case.weight, "padded")), m, "padded")


@pytest.mark.gpu
@pytest.mark.parametrize(("problem", "plan"), one_of_each_form())
def test_an_output_that_passes_2_to_the_31(problem, plan):
    """M * N over 2**31: the last rows are far from the base of y."""
    m, n, k = 33_000, 65_600, 64
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    skip_unless_it_runs_here(plan)
    if plan.form == "gemv":  # fewer, larger programs
        plan = Plan("single_pass", "gemv", 4, 16, 1024)
    if plan.split_k > 1:  # is for outputs of few tiles
        plan = replace(plan, split_k=1)
    case = make_case(m, n, k, torch.bfloat16, "cuda", bias=True)
    y = norm_linear(*case, plan=plan)
    assert_contract(y[-130:], case._replace(x=case.x[-130:]))
