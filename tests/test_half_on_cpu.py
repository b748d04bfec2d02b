"""Half precision on a CPU: one rounding where that is as fast, and never more than stock has."""

from __future__ import annotations

import copy

import pytest
import torch
from family_table import FAMILIES, build, inputs_of
from numerics import errors, make_case, reference, stock
from torch import Tensor, nn

import flashnorm_triton as fn
from flashnorm_triton import reference as in_torch
from flashnorm_triton.ops import norm_linear

HALVES = (torch.bfloat16, torch.float16)
BY_NAME = {family.name: family for family in FAMILIES}


@pytest.fixture(params=[False, True], ids=["made for it", "not made for it"])
def wide(request, monkeypatch) -> bool:
    """Whether the CPU has no instructions for half precision, so that fp32 is as fast."""
    monkeypatch.setattr(in_torch, "_in_hardware", lambda dtype: not request.param)
    return request.param


def named(value: object) -> str:
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize("extras", [{}, {"bias": True, "gain": True}], ids=["bare", "bias+gain"])
@pytest.mark.parametrize("dtype", HALVES, ids=named)
def test_one_rounding_where_fp32_is_as_fast(dtype, extras, wide):
    case = make_case(33, 97, 264, dtype, **extras)
    expected = reference(*case)
    once = errors(expected.to(dtype), expected)
    with torch.no_grad():
        ours = errors(norm_linear(*case), expected)
    theirs = errors(stock(*case), expected)
    if wide:
        assert ours[0] <= 1.01 * once[0] and ours[1] <= 1.05 * once[1]
    assert ours[0] <= theirs[0] * 1.02


@pytest.mark.parametrize("dtype", HALVES, ids=named)
def test_layer_norm_and_epilogue_are_rounded_once_too(dtype, wide):
    case = make_case(9, 64, 264, dtype, x=(3 + torch.randn(9, 264)).to(dtype), bias=True)
    residual = torch.randn(9, 32).to(dtype)
    sums = case.weight.double().sum(1).float()
    more = {"row_sums": sums, "residual": residual, "activation": "silu", "gated": True}
    double = {**more, "residual": residual.double()}
    expected = norm_linear(case.x.double(), case.weight.double(), case.eps, case.bias.double(),
                           **double)  # fmt: skip
    with torch.no_grad():
        ours = errors(norm_linear(*case, **more), expected)
    once = errors(expected.to(dtype), expected)
    assert ours[0] <= (1.01 if wide else 3.0) * once[0]


def test_a_piece_of_the_weight_at_a_time(monkeypatch, wide):
    """No copy of a whole weight; the pieces together are the whole."""
    case = make_case(5, 101, 64, torch.float16, bias=True)
    whole = norm_linear(*case)
    monkeypatch.setattr(in_torch, "_PIECE", 64 * 7)
    seen: list[int] = []
    plain = torch.Tensor.float

    def watched(tensor: Tensor) -> Tensor:
        seen.append(tensor.shape[0])
        return plain(tensor)

    monkeypatch.setattr(torch.Tensor, "float", watched)
    y = norm_linear(*case)
    monkeypatch.undo()
    assert (max(seen, default=0), sum(seen)) == ((7, 101) if wide else (0, 0))
    torch.testing.assert_close(y, whole, rtol=1e-3, atol=1e-3)


def test_few_rows_and_a_gradient_go_the_librarys_way(monkeypatch):
    """Few rows are bound by the weights' bytes; a gradient would keep the widened weights."""
    monkeypatch.setattr(in_torch, "_in_hardware", lambda dtype: False)
    monkeypatch.setattr(in_torch, "_linear_in_fp32", None)
    case = make_case(4, 24, 64, torch.float16)
    for rows in (1, 3):
        norm_linear(*case._replace(x=case.x[:rows]))
    weight = case.weight.clone().requires_grad_()
    in_torch.norm_linear(case.x, weight, case.eps).sum().backward()
    assert weight.grad is not None
    with pytest.raises(TypeError):
        norm_linear(*case)


def test_what_the_library_says_of_this_cpu_is_asked():
    for dtype in HALVES:
        assert in_torch._in_hardware(dtype) in (True, False)


def _output(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        result = model(**inputs)
    return result.logits if "logits" in result else result.last_hidden_state


def error_ratios(name: str, dtype: torch.dtype, draws: int = 3, **options: bool) -> float:
    """The error of a patched model against float64 over the stock model's, over some draws."""
    family, ours, theirs = BY_NAME[name], 0.0, 0.0
    for seed in range(draws):
        try:
            model = build(family, dtype, seed)
        except LookupError:
            pytest.skip(f"this release of transformers has no {name}")
        inputs = inputs_of(family, seed)
        exact = _output(copy.deepcopy(model).double(), inputs)
        theirs += errors(_output(model, inputs), exact)[0]
        fn.patch(model, **options)
        ours += errors(_output(model, inputs), exact)[0]
    return ours / theirs


# By what the norm's gain is: w, 1 + w, none; LayerNorms with w and with 1 + w.
GAINS = {
    "w": ("llama", "qwen3", "helium"),
    "1+w": ("gemma", "gemma3_text", "qwen3_5_text"),
    "none": ("nanochat",),
    "layer": ("opt", "nemotron", "gpt_neox"),
}


@pytest.mark.parametrize("dtype", HALVES, ids=named)
@pytest.mark.parametrize("name", [name for names in GAINS.values() for name in names])
def test_models_with_gains_of_every_convention_err_no_more_than_stock(name, dtype, monkeypatch):
    """With the gain applied where stock applies it, before the rows are rounded.

    As on most CPUs: with instructions for bfloat16, without any for float16.
    """
    monkeypatch.setattr(in_torch, "_in_hardware", lambda half: half == torch.bfloat16)
    ratio = error_ratios(name, dtype, fold=False)
    # A recurrence over the tokens makes more of any change than the layers' own rounding.
    assert ratio <= (1.1 if name == "qwen3_5_text" else 1.02), ratio


@pytest.mark.parametrize("name", ["gemma", "nemotron"])
def test_a_fold_rounds_the_weights_within_the_contract(name):
    """Where stock rounds once after a gain in fp32 (1 + w, LayerNorm) that is one more rounding."""
    assert error_ratios(name, torch.bfloat16) <= 1.15


def test_before_a_recurrence_the_fold_is_within_the_contract_too():
    """Its first norm's weights feed a recurrence, which makes more of any rounding than the layers
    do: of 32 single draws the ratio was 0.6 to 2.3, 1.14 on the whole (standard error 0.05). Three
    of them say nothing."""
    assert error_ratios("qwen3_5_text", torch.bfloat16, draws=8) <= 1.25
