"""norm_linear and rms_norm inside torch: gradients, autocast, fake tensors, compile, modes."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import HAS_GPU
from numerics import LIMIT, Case, assert_contract, errors, laid_out, make_case, reference, stock
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from flashnorm_triton.ops import norm_linear, rms_norm

HALF = (torch.bfloat16, torch.float16)
# Inductor needs a compiler; without a GPU none is presumed.
BACKEND = "inductor" if HAS_GPU else "aot_eager"
EPILOGUES = {"bare": {}, "bias": {"bias": True}, "bias+gain": {"bias": True, "gain": True}}


def name(value: object) -> str:
    return str(value).removeprefix("torch.")


each_epilogue = pytest.mark.parametrize("epilogue", EPILOGUES.values(), ids=EPILOGUES)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def soft_case(m: int, dtype: torch.dtype, device: torch.device, **epilogue: bool) -> Case:
    """Rows of like sizes: gradients of hard rows are as hard for the stock modules."""
    x = (torch.randn(m, 72) * 2 ** torch.linspace(-3, 3, m)[:, None]).to(device, dtype)
    return make_case(m, 24, 72, dtype, device, x=x, **epilogue)


# Gradients


def gradients(op, case: Case, upstream: Tensor) -> dict[str, Tensor]:
    leaves = {
        field: value.detach().clone().requires_grad_()
        for field, value in case._asdict().items()
        if isinstance(value, Tensor)
    }
    op(*case._replace(**leaves)).backward(upstream)
    return {field: leaf.grad for field, leaf in leaves.items()}


@each_epilogue
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=name)
def test_gradients_against_stock(dtype, epilogue, device):
    case = soft_case(130, dtype, device, **epilogue)
    upstream = torch.randn(130, 24).to(device, dtype)
    ours = gradients(norm_linear, case, upstream)
    theirs = gradients(stock, case, upstream)
    wide = Case(*(v.double() if isinstance(v, Tensor) else v for v in case))
    truth = gradients(reference, wide, upstream.double())
    for field, grad in ours.items():
        assert grad.dtype == dtype and grad.shape == getattr(case, field).shape
        least = errors(truth[field].to(dtype), truth[field])
        if dtype == torch.float32:  # sums of a hundred values in any order
            least = tuple(12 * value for value in least)
        for mine, other, floor in zip(
            errors(grad, truth[field]), errors(theirs[field], truth[field]), least, strict=True
        ):
            assert mine <= LIMIT * max(other, floor), f"gradient of {field}"


@each_epilogue
@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8), (8,)], ids=str)
def test_gradcheck_twice_in_float64(shape, epilogue, device):
    case = make_case(1, 5, 8, torch.float64, device, **epilogue)
    x = torch.randn(shape, dtype=torch.float64, device=device)
    tensors = [x, case.weight, *(t for t in (case.bias, case.gain) if t is not None)]

    def op(x: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
        return norm_linear(x, weight, 0.1, *rest)

    inputs = [t.requires_grad_() for t in tensors]
    assert torch.autograd.gradcheck(op, inputs)
    assert torch.autograd.gradgradcheck(op, inputs)
    norm_inputs = [x] if case.gain is None else [x, case.gain]
    assert torch.autograd.gradcheck(lambda x, *g: rms_norm(x, 0.1, *g), norm_inputs)
    assert torch.autograd.gradgradcheck(lambda x, *g: rms_norm(x, 0.1, *g), norm_inputs)


@pytest.mark.parametrize("field", ["x", "weight", "bias", "gain"])
def test_only_what_asks_for_a_gradient_gets_one(field, device):
    case = soft_case(6, torch.float32, device, bias=True, gain=True)
    all_of_them = gradients(norm_linear, case, torch.ones(6, 24, device=device))
    leaf = getattr(case, field).detach().clone().requires_grad_()
    norm_linear(*case._replace(**{field: leaf})).sum().backward()
    torch.testing.assert_close(leaf.grad, all_of_them[field])
    assert all(t.grad is None for t in case if isinstance(t, Tensor))


def test_a_strided_leaf_and_an_expanded_upstream(device):
    case = soft_case(6, torch.float32, device)
    x = laid_out(case.x, "transposed").requires_grad_()
    norm_linear(x, *case[1:]).sum().backward()  # the gradient of a sum is expanded from a scalar
    expected = gradients(stock, case, torch.ones(6, 24, device=device))["x"]
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-5)


def test_grad_modes(device):
    case = soft_case(6, torch.bfloat16, device, bias=True)
    plain = norm_linear(*case)
    weight = torch.nn.Parameter(case.weight)
    tracked = case._replace(weight=weight)
    assert norm_linear(*tracked).requires_grad and not plain.requires_grad
    with torch.no_grad():
        y = norm_linear(*tracked)
    assert not y.requires_grad and torch.equal(y, plain)
    with torch.inference_mode():
        y = norm_linear(*tracked)
        assert y.is_inference() and torch.equal(y, plain)
        # Rows made in inference mode, used there and, without gradients, outside.
        inside = case.x.clone()
        assert torch.equal(norm_linear(inside, *tracked[1:]), plain)
    with torch.no_grad():
        assert torch.equal(norm_linear(inside, *tracked[1:]), plain)
        assert rms_norm(inside, 1e-6).shape == inside.shape


def test_forward_mode_is_right_or_refused(device):
    case = soft_case(6, torch.float32, device)
    tangent = torch.randn_like(case.x)
    expected = torch.func.jvp(lambda x: reference(x, *case[1:]), (case.x,), (tangent,))[1].float()
    try:
        got = torch.func.jvp(lambda x: norm_linear(x, *case[1:]), (case.x,), (tangent,))[1]
        with forward_ad.dual_level():
            dual = norm_linear(forward_ad.make_dual(case.x, tangent), *case[1:])
            other = forward_ad.unpack_dual(dual).tangent
    except (NotImplementedError, RuntimeError):
        return
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
    assert other is not None
    torch.testing.assert_close(other, expected, rtol=1e-3, atol=1e-4)


# Autocast


@each_epilogue
@pytest.mark.parametrize("to", HALF, ids=name)
@pytest.mark.parametrize("x_dtype", [torch.float32, *HALF], ids=name)
def test_autocast_computes_as_stock_does(x_dtype, to, epilogue, device):
    """Parameters in fp32 and activations of any kind, as in mixed-precision training."""
    case = make_case(130, 24, 72, torch.float32, device, **epilogue)
    case = case._replace(x=case.x.clamp(-6e4, 6e4).to(x_dtype))
    with torch.autocast(device.type, to):
        y, expected = norm_linear(*case), stock(*case._replace(x=case.x.float()))
    assert y.dtype == expected.dtype == to
    assert_contract(y, case, expected)


@each_epilogue
def test_autocast_off_inside_on(epilogue, device):
    case = make_case(5, 24, 72, torch.float32, device, **epilogue)
    with torch.autocast(device.type, torch.bfloat16), torch.autocast(device.type, enabled=False):
        assert torch.equal(norm_linear(*case), norm_linear(*case))
        assert norm_linear(*case).dtype == torch.float32


def test_autocast_gradients(device):
    case = soft_case(130, torch.float32, device, bias=True, gain=True)
    upstream = torch.randn(130, 24, device=device)

    def under(op):
        def run(*args: object) -> Tensor:
            with torch.autocast(device.type, torch.bfloat16):
                return op(*args).float()

        return gradients(run, case, upstream)

    ours, theirs = under(norm_linear), under(stock)
    truth = gradients(reference, case, upstream.double())
    for field, grad in ours.items():
        assert grad.dtype == torch.float32
        for mine, other in zip(
            errors(grad, truth[field].double()),
            errors(theirs[field], truth[field].double()),
            strict=True,
        ):
            assert mine <= LIMIT * other, f"gradient of {field}"


def test_autocast_leaves_float64_alone(device):
    case = make_case(5, 24, 72, torch.float64, device, bias=True)
    with torch.autocast(device.type, torch.bfloat16):
        y = norm_linear(*case)
    assert y.dtype == torch.float64
    torch.testing.assert_close(y, reference(*case), rtol=1e-5, atol=1e-5)


def test_autocast_checks_the_arguments_too(device):
    case = make_case(5, 24, 72, torch.float32, device, gain=True)
    wrong = (case.gain[:1], case.gain[:71], case.gain.expand(5, 72), case.gain.to("meta"))
    with torch.autocast(device.type, torch.bfloat16):
        for gain in wrong:
            with pytest.raises(ValueError, match="gain"):
                norm_linear(*case._replace(gain=gain))


def test_autocast_refuses_bad_input(device):
    case = make_case(5, 24, 72, torch.float32, device)
    with torch.autocast(device.type, torch.bfloat16):
        with pytest.raises(ValueError, match="K differs: x has 71"):
            norm_linear(case.x[:, :71], *case[1:])
        with pytest.raises(ValueError, match="eps is 0"):
            norm_linear(*case._replace(eps=0.0))
        with pytest.raises(TypeError, match="x is torch.int32"):
            norm_linear(case.x.int(), *case[1:])
        with pytest.raises(TypeError, match="weight is torch.int8.*quantized"):
            norm_linear(*case._replace(weight=case.weight.to(torch.int8)))


# Fake tensors, meta, compile


SOME = ["contiguous", "padded", "transposed", "expanded", "batched"]


@each_epilogue
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
@pytest.mark.parametrize("layout", SOME)
def test_opcheck(layout, dtype, epilogue, device):
    """Schema, fake implementation (strides too), autograd registration, dynamic shapes."""
    case = soft_case(6, dtype, device, **epilogue)
    x = laid_out(case.x, layout)
    ops = torch.ops.flashnorm
    torch.library.opcheck(ops.norm_linear.default, (x, *case[1:]))
    torch.library.opcheck(ops.rms_norm.default, (x, case.eps, case.gain))
    if layout == "contiguous":
        leaves = [t.requires_grad_() if isinstance(t, Tensor) else t for t in case]
        torch.library.opcheck(ops.norm_linear.default, tuple(leaves))


@pytest.mark.parametrize("shape", [(72,), (0, 72), (2, 5, 72)], ids=str)
def test_fake_and_meta_tensors(shape, device):
    case = make_case(5, 24, 72, torch.bfloat16, device, bias=True)
    x = torch.randn(shape).to(device, torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = norm_linear(mode.from_tensor(x), *case[1:])
        normed = rms_norm(mode.from_tensor(x), 1e-6)
    assert y.shape == (*shape[:-1], 24) and y.dtype == x.dtype and y.device == x.device
    assert normed.shape == shape and normed.device == x.device
    meta = Case(*(t.to("meta") if isinstance(t, Tensor) else t for t in case._replace(x=x)))
    assert torch.ops.flashnorm.norm_linear(*meta).device.type == "meta"
    assert rms_norm(meta.x, 1e-6).shape == shape
    with pytest.raises(ValueError, match="K differs"):
        torch.ops.flashnorm.norm_linear(meta.x[..., :71], *meta[1:])


def test_meta_tensors_through_the_public_name():
    case = make_case(5, 24, 72, torch.bfloat16)
    meta = Case(*(t.to("meta") if isinstance(t, Tensor) else t for t in case))
    assert norm_linear(*meta).shape == (5, 24)
    with torch.autocast("cpu", torch.bfloat16):
        assert norm_linear(*meta).shape == (5, 24)


@each_epilogue
def test_compile_whole_graph_with_any_number_of_rows(epilogue, device):
    counter = CompileCounterWithBackend(BACKEND)
    case = soft_case(129, torch.bfloat16, device, **epilogue)

    @torch.compile(fullgraph=True, backend=counter)
    def layer(x: Tensor) -> Tensor:
        return norm_linear(x, *case[1:]) * 2

    with torch.no_grad():
        for m in (7, 3, 5, 8, 16, 17, 33, 64, 65, 129, 2, 1, 0, 1, 40):
            assert torch.equal(layer(case.x[:m]), norm_linear(case.x[:m], *case[1:]) * 2)
    # Static once, dynamic once; 1 and 0 rows are torch's own special cases.
    assert counter.frame_count <= 4


def test_compile_takes_eps_as_an_argument(device):
    """Dynamo makes a changing float an input of the graph: an fp64 scalar to the kernel."""
    case = soft_case(5, torch.float32, device)
    case = case._replace(x=1e-4 * case.x)
    layer = torch.compile(
        lambda x, eps: rms_norm(norm_linear(x, case.weight, eps), eps),
        fullgraph=True,
        backend=BACKEND,
    )
    for eps in (1e-6, 1e-5, 1e-3, 1e-2, 1e-6):
        expected = rms_norm(norm_linear(case.x, case.weight, eps), eps)
        torch.testing.assert_close(layer(case.x, eps), expected, rtol=1e-6, atol=1e-9)
    with pytest.raises(Exception, match="positive and finite"):
        layer(case.x, -1.0)


def test_compile_with_gradients(device):
    case = soft_case(6, torch.float32, device, bias=True, gain=True)
    upstream = torch.randn(6, 24, device=device)
    compiled = torch.compile(norm_linear, fullgraph=True, backend=BACKEND)
    expected = gradients(norm_linear, case, upstream)
    for field, grad in gradients(compiled, case, upstream).items():
        torch.testing.assert_close(grad, expected[field], rtol=1e-4, atol=1e-5)


def test_compile_under_autocast(device):
    case = soft_case(6, torch.float32, device, bias=True, gain=True)
    compiled = torch.compile(norm_linear, fullgraph=True, backend=BACKEND)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        y, eager = compiled(*case), norm_linear(*case)
    assert y.dtype == torch.bfloat16
    assert_contract(y, case, eager, limit=2.0)


def test_export_keeps_the_operation(device):
    case = soft_case(6, torch.bfloat16, device, bias=True)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(case.weight)

        def forward(self, x: Tensor) -> Tensor:
            return norm_linear(x, self.weight, case.eps, case.bias)

    layer = Layer()
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(layer, (case.x,), dynamic_shapes={"x": {0: rows}})
    targets = [str(node.target) for node in program.graph.nodes]
    assert any("flashnorm.norm_linear" in target for target in targets)
    assert torch.equal(program.module()(case.x[:4]), copy.deepcopy(layer)(case.x[:4]))
