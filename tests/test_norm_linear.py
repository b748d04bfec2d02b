"""norm_linear and rms_norm as called: values, shapes, layouts, bad input. On a GPU, on the GPU."""

from __future__ import annotations

import math

import pytest
import torch
from numerics import (
    LIMIT,
    Case,
    assert_contract,
    assert_right,
    errors,
    in_parts,
    laid_out,
    make_case,
    norm64,
    poisoned,
    stock,
    stock_norm,
)
from torch import Tensor

import flashnorm_triton
from flashnorm_triton import dispatch, fallback, plans, runtime
from flashnorm_triton.ops import norm_linear, rms_norm

HALF = (torch.bfloat16, torch.float16)
DTYPES = (*HALF, torch.float32, torch.float64)
LAYOUTS = ("contiguous", "padded", "offset", "transposed", "expanded", "batched")


def name(value: object) -> str:
    return str(value).removeprefix("torch.")


each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name)


@pytest.fixture(params=["bare", "bias", "gain", "bias+gain"])
def epilogue(request) -> dict[str, bool]:
    return {"bias": "bias" in request.param, "gain": "gain" in request.param}


# Values


@each_dtype
@pytest.mark.parametrize("m", [1, 2, 4, 7, 16, 33, 130])
def test_contract(dtype, m, epilogue, device):
    case = make_case(-(-130 // m) * m, 121, 264, dtype, device, **epilogue)
    with poisoned():
        y = in_parts(lambda part: norm_linear(part, *case[1:]), case.x, m)
    assert_contract(y, case)


@pytest.mark.parametrize("shape", [(72,), (5, 72), (2, 5, 72), (2, 3, 5, 72)], ids=str)
def test_leading_dimensions(shape, device):
    case = make_case(30, 11, 72, torch.bfloat16, device, bias=True)
    x = case.x[: math.prod(shape[:-1])].reshape(shape)
    y = norm_linear(x, *case[1:])
    assert y.shape == (*shape[:-1], 11) and y.dtype == x.dtype and y.device == x.device
    assert_right(y, case._replace(x=x))
    assert torch.equal(y.reshape(-1, 11), norm_linear(x.reshape(-1, 72), *case[1:]))
    assert rms_norm(x, 1e-6).shape == shape


@each_dtype
@pytest.mark.parametrize("k", [1, 67, 72])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_x(layout, k, dtype, device):
    case = make_case(18, 13, k, dtype, device, bias=True)
    strided = case._replace(x=laid_out(case.x, layout))
    assert_right(norm_linear(*strided), strided)
    normed = rms_norm(strided.x, strided.eps)
    assert normed.is_contiguous()
    expected = rms_norm(strided.x.contiguous(), strided.eps)
    torch.testing.assert_close(normed, expected, rtol=2e-6, atol=0)


def test_leading_dimensions_that_do_not_collapse(device):
    case = make_case(30, 13, 72, torch.float16, device)
    x = case.x.view(5, 6, 72).transpose(0, 1)
    assert_right(norm_linear(x, *case[1:]), case._replace(x=x))
    assert rms_norm(x, 1e-6).is_contiguous()


@pytest.mark.parametrize("layout", ["padded", "offset"])
def test_weight_as_rows_of_a_larger_matrix(layout, device):
    case = make_case(18, 13, 72, torch.bfloat16, device)
    sliced = case._replace(weight=laid_out(case.weight, layout))
    assert sliced.weight.stride(0) > 72
    assert_right(norm_linear(*sliced), case)
    packed = torch.cat([torch.full_like(case.weight, math.nan), case.weight])
    assert torch.equal(norm_linear(*case._replace(weight=packed[13:])), norm_linear(*case))


def test_alignment_may_change_between_calls(device):
    """A kernel compiled for aligned pointers must not serve misaligned ones of the same shape."""
    case = make_case(4, 40, 72, torch.bfloat16, device, bias=True, gain=True)
    for field in ("x", "weight", "bias", "gain"):
        aligned = norm_linear(*case)
        tensor = getattr(case, field)
        odd = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=device)[1:]
        shifted = case._replace(**{field: odd.view(tensor.shape).copy_(tensor)})
        assert_right(norm_linear(*shifted), case)
        assert torch.equal(norm_linear(*case), aligned)


def test_bias_and_gain_of_any_stride(device):
    case = make_case(18, 13, 72, torch.bfloat16, device, bias=True, gain=True)
    for stretch in (
        lambda t: torch.stack([t, torch.full_like(t, math.nan)], 1)[:, 0],
        lambda t: t[:1].expand(t.shape),
    ):
        strided = case._replace(bias=stretch(case.bias), gain=stretch(case.gain))
        assert strided.bias.stride() != (1,)
        assert_right(norm_linear(*strided), strided)
        dense = rms_norm(case.x, 1e-6, strided.gain.contiguous())
        assert torch.equal(rms_norm(case.x, 1e-6, strided.gain), dense)


def test_other_sizes_between_calls(device):
    """Neither M, N, K, the epilogue nor eps of an earlier call sticks."""
    for m, n, k in ((1, 24, 64), (3, 24, 64), (1, 24, 72), (1, 25, 64), (40, 24, 64), (1, 24, 64)):
        for bias, gain in ((False, False), (True, False), (False, True)):
            case = make_case(m, n, k, torch.float32, device, bias=bias, gain=gain)
            for eps in (1e-6, 1e-2):
                assert_right(norm_linear(*case._replace(eps=eps)), case._replace(eps=eps))


@each_dtype
def test_rms_norm(dtype, device):
    x = make_case(130, 1, 131, dtype, device).x
    gain = make_case(1, 1, 131, dtype, device, gain=True).gain
    for g in {None: None, dtype: gain, torch.float32: gain.float()}.values():
        with poisoned():
            y = rms_norm(x, 1e-6, g)
        assert y.dtype == x.dtype and y.shape == x.shape
        expected = norm64(x, 1e-6, g)
        theirs = errors(stock_norm(x, 1e-6, g).to(dtype), expected)
        least = errors(expected.to(dtype), expected)
        for mine, other, floor in zip(errors(y, expected), theirs, least, strict=True):
            assert mine <= LIMIT * max(other, floor)


def test_the_stock_modules_that_we_measure_against_are_those_of_transformers(device):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    case = make_case(20, 24, 72, torch.bfloat16, device, bias=True, gain=True)
    norm = llama.LlamaRMSNorm(72, eps=case.eps).to(device, torch.bfloat16)
    linear = torch.nn.Linear(72, 24).to(device, torch.bfloat16)
    with torch.no_grad():
        norm.weight.copy_(case.gain)
        linear.weight.copy_(case.weight)
        linear.bias.copy_(case.bias)
        assert torch.equal(linear(norm(case.x)), stock(*case))


def test_the_contract_sees_a_scale_error_of_one_percent(device):
    """What a cosine would not see; and poison is poison."""
    case = make_case(65, 40, 72, torch.bfloat16, device)
    y = norm_linear(*case).float()
    assert_contract(y, case, stock_y=stock(*case))
    with pytest.raises(AssertionError, match="error .* over 1.25 x stock"):
        assert_contract(1.01 * y, case, stock_y=stock(*case))
    with poisoned():
        assert torch.empty(9, device=device).isnan().all()
        assert case.x.new_empty((3, 3)).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


@each_dtype
def test_inf_and_nan_propagate_as_in_stock(dtype, epilogue, device):
    case = make_case(7, 40, 72, dtype, device, **epilogue)
    case.x[0, 3] = math.inf
    case.x[1, 71] = math.nan
    case.x[4, 0], case.x[4, 1] = -math.inf, math.inf
    for rows in (slice(None), slice(0, 1), slice(0, 2), slice(2, 3)):
        part = case._replace(x=case.x[rows])
        y, expected = norm_linear(*part), stock(*part)
        assert torch.equal(y.isnan(), expected.isnan()) and torch.equal(y.isinf(), expected.isinf())
    assert norm_linear(*case)[[0, 1, 4]].isnan().all()


# Empty


@each_dtype
def test_empty_batch_and_no_outputs(dtype, device):
    case = make_case(4, 11, 56, dtype, device, bias=True)
    for lead in ((0,), (0, 3), (2, 0, 3)):
        assert norm_linear(case.x.new_empty((*lead, 56)), *case[1:]).shape == (*lead, 11)
        assert rms_norm(case.x.new_empty((*lead, 56)), 1e-6).shape == (*lead, 56)
    y = norm_linear(case.x, case.weight[:0], case.eps, case.bias[:0])
    assert y.shape == (4, 0) and y.dtype == dtype
    assert_right(norm_linear(*case), case)


# Paths


def test_direct_launch_and_dispatcher_give_equal_bits(epilogue, device):
    for m in (1, 3, 20):
        for dtype in DTYPES:
            case = make_case(m, 40, 72, dtype, device, **epilogue)
            assert torch.equal(norm_linear(*case), torch.ops.flashnorm.norm_linear(*case))
            gain = case.gain
            direct = rms_norm(case.x, case.eps, gain)
            assert torch.equal(direct, torch.ops.flashnorm.rms_norm(case.x, case.eps, gain))


def test_an_output_is_the_callers_own(device):
    """Results of equal shape, all kept: no later call writes into an earlier one's."""
    for m in (1, 3, 64):
        cases = [make_case(m, 40, 72, torch.bfloat16, device, bias=True) for _ in range(3)]
        outputs = [norm_linear(*case) for case in cases]
        normed = [rms_norm(case.x, case.eps) for case in cases]
        for y, z, case in zip(outputs, normed, cases, strict=True):
            assert_right(y, case)
            assert torch.equal(z, rms_norm(case.x, case.eps))


def test_public_names():
    assert flashnorm_triton.norm_linear is norm_linear and flashnorm_triton.rms_norm is rms_norm
    assert "norm_linear" in dir(flashnorm_triton)
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = flashnorm_triton.nothing_here


@pytest.mark.gpu
def test_without_triton_it_warns_once_and_uses_torch(monkeypatch, device):
    monkeypatch.setattr(dispatch, "_ready", {})
    monkeypatch.setattr(runtime, "triton_unavailable", lambda: "no C compiler (apt install gcc)")
    monkeypatch.setattr(fallback, "_told", set())
    case = make_case(65, 40, 72, torch.bfloat16, device, bias=True)
    with pytest.warns(RuntimeWarning, match=r"plain torch: no C compiler \(apt install gcc\)"):
        y = norm_linear(*case)
    assert_right(y, case)
    assert torch.equal(norm_linear(*case), y)


# Bad input: an error that names the value and the remedy. Also after a good call of those shapes.


def good(device: torch.device, **changes: object) -> Case:
    case = make_case(5, 7, 64, torch.float32, device, bias=True, gain=True)
    norm_linear(*case)
    return case._replace(**changes)


def refused(case: Case, error: type[Exception], *words: str) -> None:
    for call in (norm_linear, torch.ops.flashnorm.norm_linear):
        with pytest.raises(error) as caught:
            call(*case)
        for word in words:
            assert word in str(caught.value)


def test_wrong_rank(device):
    case = good(device)
    refused(case._replace(x=torch.tensor(1.0, device=device)), ValueError, "shape ()", "K >= 1")
    refused(case._replace(weight=case.weight[0]), ValueError, "(64,)", "(N, K)")
    refused(case._replace(weight=case.weight[None]), ValueError, "(1, 7, 64)", "(N, K)")
    refused(case._replace(bias=case.bias[None]), ValueError, "(1, 7)", "must be (7,)")
    refused(case._replace(gain=case.gain[None]), ValueError, "(1, 64)", "must be (64,)")


def test_k_mismatch(device):
    case = good(device)
    refused(case._replace(x=case.x[:, :63]), ValueError, "63", "64")
    refused(case._replace(gain=None, weight=case.weight[:, :32]), ValueError, "32", "64")
    refused(case._replace(bias=case.bias[:6]), ValueError, "(6,)", "N = 7")
    refused(case._replace(gain=case.gain[:63]), ValueError, "(63,)", "K = 64")
    refused(case._replace(x=case.x[:, :0], gain=None), ValueError, "(5, 0)", "K >= 1")


def test_mixed_dtypes(device):
    case = good(device)
    refused(case._replace(weight=case.weight.half()), TypeError, "float32", "float16", "convert")
    refused(case._replace(bias=case.bias.bfloat16()), TypeError, "bfloat16", "convert")
    refused(case._replace(gain=case.gain.double()), TypeError, "float64", "use x's dtype")
    refused(case._replace(x=case.x.half(), gain=None), TypeError, "float16", "torch.autocast")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.bool, torch.complex64], ids=name)
def test_integer_and_complex_dtypes(dtype, device):
    case = good(device)
    refused(case._replace(x=case.x.to(dtype)), TypeError, str(dtype), ".to(")
    refused(case._replace(weight=case.weight.to(dtype)), TypeError, f"weight is {dtype}")
    refused(case._replace(bias=case.bias.to(dtype)), TypeError, f"bias is {dtype}", "convert")
    refused(case._replace(gain=case.gain.to(dtype)), TypeError, f"gain is {dtype}", "float32")
    with pytest.raises(TypeError, match=name(dtype)):
        rms_norm(case.x.to(dtype), 1e-6)


@pytest.mark.parametrize("eps", [0.0, 0, -1e-6, math.nan, math.inf, -math.inf])
def test_eps_that_is_not_positive_and_finite(eps, device):
    refused(good(device, eps=eps), ValueError, f"eps is {eps}", "positive")
    with pytest.raises(ValueError, match="positive and finite"):
        rms_norm(torch.ones(3, 4, device=device), eps)


@pytest.mark.parametrize("eps", ["1e-6", None, True, torch.tensor(1e-6)], ids=repr)
def test_eps_that_is_not_a_number(eps, device):
    with pytest.raises(TypeError, match="eps is .*Python number"):
        norm_linear(*good(device, eps=eps))
    with pytest.raises(TypeError, match="eps is .*Python number"):
        rms_norm(torch.ones(3, 4, device=device), eps)


def test_eps_may_be_a_whole_number(device):
    case = good(device)
    for eps in (1, 1.0, 2, 2.0):
        assert torch.equal(
            norm_linear(*case._replace(eps=eps)), norm_linear(*case[:2], float(eps), *case[3:])
        )


def test_weight_whose_last_dimension_is_not_contiguous(device):
    case = good(device)
    refused(case._replace(weight=case.weight.T.contiguous().T), ValueError, "(1, 7)", "contiguous")
    every_second = torch.randn(7, 128, device=device)[:, ::2]
    refused(case._replace(weight=every_second), ValueError, "(128, 2)", ".contiguous()")


def test_meta_weight_on_its_own(device):
    """Other shapes than any good call: the device is what is wrong."""
    case = make_case(5, 9, 48, torch.float32, device)
    refused(case._replace(weight=case.weight.to("meta")), ValueError, "meta", ".to(")


@pytest.mark.parametrize("field", ["weight", "bias", "gain"])
@pytest.mark.parametrize("other", ["meta", "cpu"])
def test_mixed_devices_after_a_good_call(field, other, device, monkeypatch):
    if torch.device(other) == device:
        pytest.skip("x is on the CPU here: meta is the other device")
    case = good(device)
    # Should the check be missing, a kernel must not get a pointer that is not its GPU's.
    sentinel = {key: (_must_not_run, -1) for key in dispatch._ready}
    monkeypatch.setattr(dispatch, "_ready", sentinel)
    wrong = case._replace(**{field: getattr(case, field).to(other)})
    with pytest.raises(ValueError, match=f"{field} is on {other}: move"):
        norm_linear(*wrong)
    if field == "gain":
        rms_norm(case.x, case.eps, case.gain)
        monkeypatch.setattr(
            dispatch, "_ready", {key: (_must_not_run, -1) for key in dispatch._ready}
        )
        with pytest.raises(ValueError, match=f"gain is on {other}: move"):
            rms_norm(case.x, case.eps, wrong.gain)


def _must_not_run(*args: object) -> Tensor:
    raise AssertionError("launched with a tensor on another device")


def test_a_refused_call_changes_nothing(device):
    case = good(device)
    before, ready = [t.clone() for t in case if isinstance(t, Tensor)], dict(dispatch._ready)
    with pytest.raises(ValueError):
        norm_linear(*case._replace(eps=-1.0))
    assert dispatch._ready == ready
    after = [t for t in case if isinstance(t, Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_row_stride_that_passes_2_to_the_31(device):
    stride = 2**31 + 8
    try:
        flat = torch.empty(stride + 64, dtype=torch.float16, device=device)
    except RuntimeError as error:
        pytest.skip(f"no 4 GiB of address space: {error}")
    case = make_case(2, 24, 64, torch.float16, device)
    far = flat.as_strided((2, 64), (stride, 1)).copy_(case.x)
    assert torch.equal(norm_linear(far, *case[1:]), norm_linear(*case))
    assert torch.equal(rms_norm(far, 1e-6), rms_norm(case.x, 1e-6))


def test_plans_are_kept_between_calls(device, monkeypatch):
    """The second call of a shape looks nothing up: no plan is chosen, nothing is checked."""
    case = good(device)
    monkeypatch.setattr(plans, "choose", _must_not_run)
    for function in ("check_norm_linear", "_prepare"):
        monkeypatch.setattr(dispatch, function, _must_not_run)
    assert_right(norm_linear(*case), case)


def test_ever_new_lengths_do_not_fill_the_memory(device, monkeypatch):
    monkeypatch.setattr(dispatch, "_ready", {})
    monkeypatch.setattr(dispatch, "_READY_MOST", 8)
    case = make_case(40, 24, 64, torch.bfloat16, device)
    for m in range(1, 41):
        assert_right(norm_linear(case.x[:m], *case[1:]), case._replace(x=case.x[:m]))
        assert len(dispatch._ready) <= 8
