"""What norm_linear does beside RMSNorm and a bias: LayerNorm, activations, gated pairs, residuals.

Every combination against float64, by the contract, through every path of torch.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from conftest import HAS_GPU
from numerics import EPS, LIMIT, errors, laid_out, make_case, poisoned
from plan_params import SMALL, plan_name
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flashnorm_triton import launch, plans, reference
from flashnorm_triton.checks import ACTIVATIONS
from flashnorm_triton.ops import norm_linear
from flashnorm_triton.plans import Plan, Problem

HALF = (torch.bfloat16, torch.float16)
BACKEND = "inductor" if HAS_GPU else "aot_eager"
# Parts by name; every combination that differs in more than one of them is met somewhere.
SOME = (
    {"centred": True},
    {"activation": "silu", "gated": True},
    {"activation": "gelu_tanh", "residual": True},
    {"gated": True, "residual": True, "bias": True},
    {"centred": True, "activation": "relu2", "gated": True, "residual": True, "bias": True},
    {"centred": True, "gain": True, "activation": "gelu", "bias": True},
)


def spelled(parts: dict[str, Any]) -> str:
    return "+".join(key if value is True else str(value) for key, value in parts.items())


def act64(z: Tensor, activation: str | None) -> Tensor:
    """The activations by their formulas, in float64."""
    match activation:
        case "silu":
            return z / (1 + torch.exp(-z))
        case "gelu":
            return z * 0.5 * (1 + torch.erf(z / math.sqrt(2)))
        case "gelu_tanh":
            return z * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
        case "relu":
            return z.clamp(min=0)
        case "relu2":
            return z.clamp(min=0) ** 2
    return z


class Inputs:
    """The tensors of one call, its arguments, and what it should give."""

    def __init__(
        self,
        m: int,
        n: int,
        k: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        centred: bool = False,
        activation: str | None = None,
        gated: bool = False,
        residual: bool = False,
        bias: bool = False,
        gain: bool = False,
        shift: float = 3.0,
        x: Tensor | None = None,
    ) -> None:
        if x is None:
            x = torch.randn(m, k, device=device) * 10 ** (torch.rand(m, 1, device=device) * 4 - 2)
            # A row's mean is several times its deviation: an RMSNorm would be far off.
            x = (x + shift * x.std(1, keepdim=True) * centred).to(dtype)
        self.case = make_case(m, n, k, dtype, device, bias=bias, gain=gain, x=x)
        self.centred, self.activation, self.gated = centred, activation, gated
        wide = self.case.weight.double()
        if gain:
            wide = wide * self.case.gain.double()
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        self.more: dict[str, Any] = {"activation": activation, "gated": gated}
        if centred:
            self.more["row_sums"] = wide.sum(1).to(sums)
        if residual:
            self.more["residual"] = torch.randn(m, n // 2 if gated else n).to(device, dtype)

    def call(self, **more: Any) -> Tensor:
        return norm_linear(*self.case, **{**self.more, **more})

    def finish64(self, z: Tensor) -> Tensor:
        y = act64(z, self.activation)
        if self.gated:
            gate, up = z.chunk(2, -1)
            y = act64(gate, self.activation) * up
        residual = self.more.get("residual")
        return y if residual is None else y + residual.double()

    def product64(self) -> Tensor:
        """What the epilogue is given, in float64."""
        x, weight, eps, bias, gain = (t.double() if isinstance(t, Tensor) else t for t in self.case)
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        normed = x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
        z = (normed if gain is None else normed * gain) @ weight.T
        return z if bias is None else z + bias

    def wanted(self) -> Tensor:
        return self.finish64(self.product64())

    def stock(self) -> Tensor:
        """The modules one after the other, each rounding what it returns."""
        x, weight, eps, bias, gain = self.case
        if self.centred:
            normed = torch.nn.functional.layer_norm(x, x.shape[-1:], gain, None, eps)
        else:
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
            normed = (wide * scale).to(x.dtype)
            normed = normed if gain is None else normed * gain
        z = torch.nn.functional.linear(normed, weight, bias)
        if self.gated:
            gate, up = z.chunk(2, -1)
            y = act64(gate.double(), self.activation).to(z.dtype) * up
        else:
            y = act64(z.double(), self.activation).to(z.dtype)
        residual = self.more.get("residual")
        return y if residual is None else y + residual


def assert_contract(y: Tensor, inputs: Inputs, limit: float = LIMIT) -> None:
    wanted = inputs.wanted()
    assert y.shape == wanted.shape and y.dtype == inputs.case.x.dtype and y.is_contiguous()
    if y.dtype == torch.float64:
        torch.testing.assert_close(y, wanted, rtol=1e-10, atol=1e-10)
        return
    least = errors(wanted.to(y.dtype), wanted)
    if y.dtype == torch.float32:
        # K sums in any order, and what the epilogue makes of them: a gated pair is off by both,
        # and a residual may take off most of what the pair's error is measured by.
        walk = math.sqrt(inputs.case.x.shape[-1]) * 2.0**-24
        z = inputs.product64()
        draw = torch.Generator(z.device).manual_seed(0)
        noise = torch.randn(z.shape, generator=draw, device=z.device, dtype=z.dtype)
        moved = errors(inputs.finish64(z + walk * z.square().mean().sqrt() * noise), wanted)
        least = (max(walk, moved[0]), max(walk * float(wanted.abs().max()), moved[1]))
    for name, mine, stock, floor in zip(
        ("relative", "largest"),
        errors(y, wanted),
        errors(inputs.stock(), wanted),
        least,
        strict=True,
    ):
        assert mine <= limit * max(stock, floor), f"{name} error {mine:.3g}, stock's {stock:.3g}"


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


each_form = pytest.mark.parametrize("parts", SOME, ids=spelled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF], ids=str)
@each_form
def test_contract(parts, dtype, device):
    inputs = Inputs(130, 48, 72, dtype, device, **parts)
    assert_contract(inputs.call(), inputs)


def test_every_combination_in_fp32(device):
    flags = itertools.product((None, *ACTIVATIONS), (False, True), (False, True), (False, True))
    for activation, gated, residual, centred in flags:
        inputs = Inputs(
            16, 10, 24, torch.float32, device,
            activation=activation, gated=gated, residual=residual, centred=centred,
        )  # fmt: skip
        assert_contract(inputs.call(), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_a_mean_far_above_the_deviation(dtype, device):
    """As far as the dtype lets a deviation be told at all."""
    shift = {torch.float32: 3e4, torch.float16: 30.0, torch.bfloat16: 10.0}[dtype]
    inputs = Inputs(64, 40, 96, dtype, device, centred=True, shift=shift)
    assert_contract(inputs.call(), inputs)


def test_row_sums_make_it_a_layer_norm_of_any_weight(device):
    """Centred or not, the weight gives the same: what the row sums say is what is taken off."""
    inputs = Inputs(20, 16, 64, torch.float32, device, centred=True)
    weight = inputs.case.weight
    centred = weight - weight.mean(1, keepdim=True)
    y = norm_linear(inputs.case.x, centred, EPS, row_sums=centred.double().sum(1).float())
    torch.testing.assert_close(y, inputs.call(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["padded", "transposed", "batched"])
def test_operands_of_any_layout(layout, device):
    parts = SOME[4]
    inputs = Inputs(12, 24, 40, torch.float32, device, **parts)
    expected = inputs.call()
    inputs.case = inputs.case._replace(x=laid_out(inputs.case.x, layout))
    residual, sums = inputs.more["residual"], inputs.more["row_sums"]
    if layout == "batched":
        residual = residual[None]
    inputs.more["residual"] = torch.stack([residual, residual * math.nan], -1)[..., 0]
    inputs.more["row_sums"] = torch.stack([sums, sums * math.nan], -1)[..., 0]
    torch.testing.assert_close(inputs.call().reshape(12, 12), expected, rtol=1e-5, atol=1e-5)


@each_form
def test_gradcheck_twice_in_float64(parts, device):
    parts = {**parts, "activation": {"relu2": "gelu"}.get(parts.get("activation"))}
    inputs = Inputs(3, 6, 8, torch.float64, device, **parts)
    centred, residual = parts.get("centred"), inputs.more.get("residual")
    tensors = [t for t in (*inputs.case[:2], *inputs.case[3:], residual) if t is not None]
    tensors[0] = torch.randn(3, 8, dtype=torch.float64, device=device) + 0.5

    def op(x: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
        rest = list(rest)
        bias = rest.pop(0) if parts.get("bias") else None
        gain = rest.pop(0) if parts.get("gain") else None
        product = weight if gain is None else weight * gain
        return norm_linear(
            x, weight, 0.1, bias, gain,
            row_sums=product.sum(1) if centred else None,
            residual=rest[0] if rest else None,
            activation=parts["activation"], gated=parts.get("gated", False),
        )  # fmt: skip

    leaves = [t.clone().requires_grad_() for t in tensors]
    assert torch.autograd.gradcheck(op, leaves)
    assert torch.autograd.gradgradcheck(op, leaves)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_every_activation(activation, device):
    inputs = Inputs(5, 8, 12, torch.float64, device, activation=activation, gated=True)
    leaves = [t.clone().requires_grad_() for t in inputs.case[:2]]
    norm_linear(*leaves, EPS, **inputs.more).sum().backward()
    wide = [t.clone().requires_grad_() for t in inputs.case[:2]]
    inputs.case = inputs.case._replace(x=wide[0], weight=wide[1])
    inputs.wanted().sum().backward()
    for mine, theirs in zip(leaves, wide, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@each_form
def test_in_torch(parts, device):
    """Fake tensors, the schema, a whole graph of any row count, autocast."""
    inputs = Inputs(9, 24, 40, torch.bfloat16, device, **parts)
    expected = inputs.call()
    more = inputs.more
    arguments = (*inputs.case, more.get("row_sums"), more.get("residual"))
    arguments += (more["activation"], more["gated"])
    torch.library.opcheck(torch.ops.flashnorm.norm_linear.default, arguments)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = norm_linear(mode.from_tensor(inputs.case.x), *inputs.case[1:], **more)
    assert fake.shape == expected.shape and fake.dtype == expected.dtype

    @torch.compile(fullgraph=True, backend=BACKEND)
    def layer(x: Tensor, residual: Tensor | None) -> Tensor:
        return norm_linear(x, *inputs.case[1:], **{**more, "residual": residual})

    residual = more.get("residual")
    with torch.no_grad():
        for m in (9, 4, 1):
            part = None if residual is None else residual[:m]
            eager = norm_linear(inputs.case.x[:m], *inputs.case[1:], **{**more, "residual": part})
            assert torch.equal(layer(inputs.case.x[:m], part), eager)
    with torch.autocast(device.type, torch.bfloat16):
        mixed = norm_linear(inputs.case.x.float(), *inputs.case[1:], **more)
    assert mixed.dtype == torch.bfloat16 and mixed.shape == expected.shape
    torch.testing.assert_close(mixed, expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("plan", [plans.TORCH, plans.UNFUSED], ids=["torch", "library"])
@each_form
def test_both_unfused_plans(plan, parts, device):
    pytest.importorskip("triton")
    inputs = Inputs(130, 48, 72, torch.float16, device, **parts)
    assert_contract(inputs.call(plan=plan), inputs)


def test_an_empty_batch(device):
    inputs = Inputs(3, 8, 16, torch.float32, device, activation="silu", gated=True)
    assert norm_linear(inputs.case.x[:0], *inputs.case[1:], **inputs.more).shape == (0, 4)


WRONG = {
    "row sums of another length": ({"row_sums": torch.ones(7)}, ValueError, r"\(7,\).*\(8,\)"),
    "row sums in half": ({"row_sums": torch.ones(8).half()}, TypeError, "row_sums is torch.fl"),
    "row sums elsewhere": ({"row_sums": torch.ones(8, device="meta")}, ValueError, "on meta"),
    "an unknown activation": ({"activation": "swish"}, ValueError, "'swish'.*silu, gelu"),
    "a gate that is no flag": ({"gated": 2}, TypeError, "gated is 2"),
    "a narrow residual": ({"residual": torch.ones(3, 7)}, ValueError, r"\(3, 7\).*\(3, 8\)"),
    "a wide residual": (
        {"residual": torch.ones(3, 8), "gated": True}, ValueError, r"\(3, 8\).*\(3, 4\)",
    ),
    "a residual in half": ({"residual": torch.ones(3, 8).half()}, TypeError, "residual is"),
}  # fmt: skip


@pytest.mark.parametrize(("more", "error", "text"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused(more, error, text):
    x, weight = torch.randn(3, 16), torch.randn(8, 16)
    for call in (norm_linear, torch.ops.flashnorm.norm_linear):
        if "gated" in more and not isinstance(more["gated"], bool) and call is not norm_linear:
            continue  # the dispatcher converts a flag itself
        bias_and_gain = (None, None)
        with pytest.raises(error, match=text):
            call(x, weight, EPS, *bias_and_gain, **more)


def test_an_odd_gated_weight_is_refused():
    with pytest.raises(ValueError, match="N = 7 rows.*even"):
        norm_linear(torch.randn(3, 16), torch.randn(7, 16), EPS, gated=True)


def test_a_changed_epilogue_is_seen(device):
    """Calls that differ in one part only, one after the other, in both orders."""
    base = Inputs(6, 8, 16, torch.float32, device, centred=True, residual=True, activation="relu")
    variants = [
        {},
        {"activation": "silu"},
        {"residual": None},
        {"row_sums": None},
        {"gated": True, "residual": base.more["residual"][:, :4].contiguous()},
    ]
    first = [base.call(**variant) for variant in variants]
    again = [base.call(**variant) for variant in reversed(variants)][::-1]
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one, two)
    for one, two in itertools.combinations(first[:4], 2):
        assert not torch.equal(one, two)


# Kernels: in the interpreter on a CPU, compiled on a GPU.


def served(plan: Plan, parts: dict[str, Any]) -> bool:
    """Whether a form is meant to take these parts; what it refuses is another test's."""
    if plan.form == "scaled_gemm" and (parts.get("gated") or parts.get("gain")):
        return False
    if plan.form in ("tiles", "two_streams") and parts.get("gain"):
        return False  # not in fp16, and not with a mean
    return not (plan.form == "tiles" and plan.squares != "given" and parts.get("centred"))


def kernel_cases() -> list[Any]:
    return [
        pytest.param(plan, parts, id=f"{plan_name(plan)}-{spelled(parts)}")
        for plan in SMALL
        for parts in SOME[1:]
        if served(plan, parts)
    ]


def launched(plan: Plan, inputs: Inputs) -> Tensor:
    with poisoned():
        return inputs.call(plan=plan)


@pytest.mark.parametrize(("plan", "parts"), kernel_cases())
def test_kernels_keep_the_contract(plan, parts, device):
    """Odd sizes, so that a tile has rows, features and a K step that are not there."""
    n, k = (24, 72) if plan.form == "scaled_gemm" else (22, 67)
    if HAS_GPU and plan.form == "gemv":
        k = 72  # compiled, it folds pieces of 16 bytes
    inputs = Inputs(5, n, k, torch.float16, device, **parts)
    assert_contract(launched(plan, inputs), inputs, limit=2.0)


@pytest.mark.parametrize("plan", [plan for plan in SMALL if plan.form == "gemv"], ids=plan_name)
def test_the_gemv_in_fp32_far_from_the_mean(plan, device):
    """Above a mean of 30,000 deviations, and where two of the three values looked at first lie."""
    for shift in (3e4, 0.0):
        inputs = Inputs(3, 8, 96, torch.float32, device, centred=True, shift=shift)
        inputs.case.x[1, 0] += 1e3
        assert_contract(launched(plan, inputs), inputs, limit=2.0)


@pytest.mark.parametrize("k", [96, 8200])
def test_statistics_far_from_the_mean(k, device):
    """The row kernel on its own, below and beyond one block of it."""
    pytest.importorskip("triton")
    x = (3e4 + torch.randn(3, k)).to(device)
    problem = Problem("float32", 3, 8, k, centred=True)
    geometry = launch.Geometry(3, k, (3,), x.get_device())
    s, mean = launch.RowStats(problem).bind(geometry, EPS)(x)
    wide = x.double()
    torch.testing.assert_close(mean.double(), wide.mean(1), rtol=1e-7, atol=0)
    expected = 1 / torch.sqrt(wide.var(1, unbiased=False) + EPS)
    torch.testing.assert_close(s.double(), expected, rtol=1e-6, atol=0)


def test_a_constant_row_is_the_bias(device):
    """Its variance is exactly zero; anything else would be blown up by 1 / sqrt(eps)."""
    for plan in SMALL:
        parts = {"centred": True, "bias": True}
        if served(plan, parts) and plan.form != "library":  # torch's own has the bound below too
            inputs = Inputs(4, 24, 72, torch.float16, device, **parts)
            # After the product a mean can be taken off to fp32's rounding only.
            inputs.case.x[2] = 1000.0 if plan.form == "gemv" else 0.05
            y = launched(plan, inputs)
            torch.testing.assert_close(y[2], inputs.case.bias, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_and_inf_pass_through_the_activation(activation, device):
    inputs = Inputs(3, 8, 64, torch.float16, device, activation=activation)
    inputs.case.x[1, 5] = math.nan
    y = launched(SMALL[1], inputs)
    assert y[1].isnan().all() and y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_and_inf_pass_through_plain_torch_too(activation):
    # Of infinity, torch's own GELU makes what it will.
    large = math.inf if activation[:4] == "relu" else 1e30
    x = torch.tensor([[math.nan, 1.0], [large, 1.0], [-2.0, 3.0]])
    y = reference.finish(x, None, activation)
    assert y[0, 0].isnan() and y[1, 0] >= large and y[2].isfinite().all()
    y = reference.finish(x.flip(-1), None, activation, gated=True)
    assert y[0].isnan() and y[2].isfinite()


def test_forms_refuse_what_they_lack(device):
    inputs = Inputs(5, 24, 72, torch.float16, device, gated=True)
    scaled_gemm = next(plan for plan in SMALL if plan.form == "scaled_gemm")
    with pytest.raises(ValueError, match="no epilogue gated"):
        inputs.call(plan=scaled_gemm)
    centred = Inputs(5, 24, 72, torch.float16, device, centred=True)
    own = next(plan for plan in SMALL if plan.squares == "own")
    with pytest.raises(ValueError, match="no epilogue centred"):
        centred.call(plan=own)
