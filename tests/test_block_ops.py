"""The decode block's operations against float64, and inside torch: gradients, compile, fakes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import HAS_GPU
from numerics import LIMIT, errors, norm64, stock_norm
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from flashnorm_triton import attention, block_ops  # noqa: F401  registers its operation
from flashnorm_triton.block_reference import Layout

BACKEND = "inductor" if HAS_GPU else "aot_eager"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
LAYOUTS = {
    "llama": (Layout(4, 2, 16), 16),
    "partial": (Layout(3, 1, 20), 6),
    "interleaved": (Layout(2, 2, 12, interleaved=True), 8),
    "qk-norm": (Layout(4, 2, 16, 1e-3), 16),
    "gemma": (Layout(2, 1, 24, 1e-3, True), 24),
    "nope": (Layout(4, 1, 16), 0),
}


def _name(value: object) -> str:
    return str(value).removeprefix("torch.")


each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=_name)
each_layout = pytest.mark.parametrize("name", LAYOUTS)


def heads_case(
    name: str, batch: int, tokens: int, dtype: torch.dtype, device: Any, angles: Any = None
) -> tuple[dict[str, Any], Layout]:
    """Arguments of ``rotary_heads``, heads of sizes from 1/32 to 32, and the layout."""
    layout, rotary = LAYOUTS[name]
    size = 2 ** (10 * torch.rand(batch, tokens, layout.columns // layout.head_dim, 1) - 5)
    qkv = (torch.randn(batch, tokens, size.shape[2], layout.head_dim) * size).flatten(-2)
    angle = 6.3 * torch.rand(1 if tokens > 1 else batch, tokens, rotary)
    table = {"cos": None, "sin": None}
    if rotary:
        table = {"cos": angle.cos() * 1.1, "sin": angle.sin() * 1.1}
    gains = {}
    if layout.eps is not None:
        gains = {"q_gain": 0.3 + torch.rand(layout.head_dim)}
        gains |= {"k_gain": 0.3 + torch.rand(layout.head_dim)}
    tensors = {"qkv": qkv, **gains}
    found: dict[str, Any] = {key: value.to(device, dtype) for key, value in tensors.items()}
    for key, value in table.items():
        found[key] = None if value is None else value.to(device, angles or dtype)
    return found, layout


def call(case: dict[str, Any], layout: Layout, **more: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``block_ops.rotary_heads`` of a case."""
    q_heads, kv_heads, head_dim, eps, one_plus, interleaved = layout
    return block_ops.rotary_heads(
        **case, heads=(q_heads, kv_heads), head_dim=head_dim, eps=eps, one_plus=one_plus,
        interleaved=interleaved, **more,
    )  # fmt: skip


def stock_heads(case: dict[str, Any], layout: Layout, wide: bool) -> tuple[Tensor, ...]:
    """As transformers' attention modules do it, rounding after each operation; or in float64."""
    values = {key: v.double() if wide and v is not None else v for key, v in case.items()}
    qkv, cos, sin = values["qkv"], values["cos"], values["sin"]
    d = layout.head_dim
    widths = [n * d for n in (layout.q_heads, layout.kv_heads, layout.kv_heads)]
    parts = [part.unflatten(-1, (-1, d)).transpose(1, 2) for part in qkv.split(widths, -1)]
    out = []
    for part, gain in zip(parts[:2], (values.get("q_gain"), values.get("k_gain")), strict=True):
        if layout.eps is not None:
            gain = 1 + gain if layout.one_plus else gain
            part = (norm64 if wide else stock_norm)(part, layout.eps, gain)
        if cos is not None:
            c, s, r = cos[:, None].to(part.dtype), sin[:, None].to(part.dtype), cos.shape[-1]
            turned, rest = part[..., :r], part[..., r:]
            across = torch.empty_like(turned)
            if layout.interleaved:
                across[..., 0::2], across[..., 1::2] = -turned[..., 1::2], turned[..., 0::2]
            else:
                half = r // 2
                across[..., :half], across[..., half:] = -turned[..., half:], turned[..., :half]
            part = torch.cat([turned * c + across * s, rest], -1)
        out.append(part)
    return (*out, parts[2])


def assert_heads(ours: tuple[Tensor, ...], case: dict[str, Any], layout: Layout) -> None:
    """Nearer to float64 than 1.25 times stock, head by head in size, and laid out as promised."""
    wanted, stock = stock_heads(case, layout, True), stock_heads(case, layout, False)
    for mine, right, theirs in zip(ours, wanted, stock, strict=True):
        assert mine.shape == right.shape and mine.dtype == case["qkv"].dtype
        assert torch.isfinite(mine).all()
        if mine.dtype == torch.float64:
            torch.testing.assert_close(mine, right, rtol=1e-6, atol=1e-6)
            continue
        size = right.norm(dim=-1, keepdim=True) + 1e-9
        off = errors(mine / size, right / size)
        once = errors(right.to(mine.dtype).double() / size, right / size)
        allowed = errors(theirs.double() / size, right / size)
        floor = 2.0**-22 if mine.dtype == torch.float32 else 0.0
        for value, most, least in zip(off, allowed, once, strict=True):
            assert value <= LIMIT * max(most, least, floor), (value, most, least)
    q, k, v = ours
    assert q.transpose(1, 2).is_contiguous()
    assert k.stride(-1) == v.stride(-1) == 1


@each_dtype
@each_layout
def test_rotary_heads(name: str, dtype: torch.dtype, device: torch.device) -> None:
    for batch, tokens in ((1, 1), (3, 1), (2, 5)):
        case, layout = heads_case(name, batch, tokens, dtype, device)
        ours = call(case, layout)
        assert_heads(ours, case, layout)
        assert ours[1].is_contiguous() and ours[2].is_contiguous()


@each_layout
def test_rotary_heads_into_caches(name: str, device: torch.device) -> None:
    for batch, tokens, dtype in ((2, 1, torch.float16), (2, 3, torch.float32)):
        case, layout = heads_case(name, batch, tokens, dtype, device)
        shape = (batch, layout.kv_heads, 7, layout.head_dim)
        caches = torch.randn(2, *shape).to(device, dtype)
        before = caches.clone()
        position = torch.randperm(7)[:tokens].to(device)
        q, keys, values = call(
            case, layout, key_cache=caches[0], value_cache=caches[1], cache_position=position
        )
        assert keys.data_ptr() == caches[0].data_ptr()
        written = keys[:, :, position], values[:, :, position]
        assert_heads((q, *written), case, layout)
        others = [n for n in range(7) if n not in position.tolist()]
        assert torch.equal(caches[:, :, :, others], before[:, :, :, others])


@each_dtype
def test_linear(dtype: torch.dtype, device: torch.device) -> None:
    for m, bias, scale in ((1, False, 1.0), (3, True, 0.22), (130, False, 1.5), (200, True, 1.0)):
        x = torch.randn(m, 1, 72).to(device, dtype)
        weight = (torch.randn(24, 72) / 8).to(device, dtype)
        vector = torch.randn(24).to(device, dtype) if bias else None
        for residual in (None, torch.randn(m, 1, 24).to(device, dtype)):
            before = None if residual is None else residual.clone()
            ours = block_ops.linear(x, weight, vector, residual=residual, scale=scale)
            z = x.double() @ weight.double().T
            right = scale * (z if vector is None else z + vector.double())
            theirs = scale * functional.linear(x, weight, vector)
            if residual is not None:
                right, theirs = right + residual.double(), theirs + residual
                assert torch.equal(residual, before)
            assert ours.shape == right.shape and ours.dtype == dtype and ours.is_contiguous()
            if dtype == torch.float64:
                torch.testing.assert_close(ours, right)
                continue
            least = errors(right.to(dtype), right)
            for value, most, floor in zip(
                errors(ours, right), errors(theirs, right), least, strict=True
            ):
                assert value <= LIMIT * max(most, floor), (m, bias, scale)


@each_dtype
def test_add_rms_norm(dtype: torch.dtype, device: torch.device) -> None:
    for m, k in ((1, 48), (5, 100)):
        size = torch.logspace(-2, 2, m)[:, None, None]
        x, residual = ((torch.randn(m, 1, k) * size).to(device, dtype) for _ in range(2))
        vector = torch.rand(k).add_(0.3).to(device, dtype)
        for gain, plus in ((None, False), (vector, False), (vector, True)):
            whole = gain.double() + 1 if plus else gain
            ours = block_ops.add_rms_norm(x, residual, 1e-3, gain, one_plus=plus)
            right = norm64(x, 1e-3, whole) + residual.double()
            stock_gain = 1 + gain if plus else gain
            theirs = errors(stock_norm(x, 1e-3, stock_gain) + residual, right)
            assert ours.shape == x.shape and ours.dtype == dtype and ours.is_contiguous()
            tolerance = max(theirs[0], errors(right.to(dtype), right)[0], 1e-7)
            assert errors(ours, right)[0] <= LIMIT * tolerance


def _all_three(case: dict[str, Any], layout: Layout, x: Tensor, weight: Tensor) -> tuple:
    qkv = block_ops.linear(x, weight, residual=case["qkv"], scale=0.5)
    qkv = block_ops.add_rms_norm(qkv, case["qkv"], 1e-3)
    return call({**case, "qkv": qkv}, layout)


@pytest.mark.parametrize("grad", [False, True])
def test_compiled_whole(grad: bool, device: torch.device) -> None:
    """One graph, equal to eager; under no_grad, and with gradients of everything."""
    torch._dynamo.reset()
    case, layout = heads_case("qk-norm", 2, 3, torch.float32, device)
    x = torch.randn(2, 3, 24, device=device)
    weight = torch.randn(layout.columns, 24, device=device)
    leaves = [*case.values(), x, weight]
    compiled = torch.compile(_all_three, fullgraph=True, backend=BACKEND)
    results = []
    for function in (_all_three, compiled):
        for leaf in leaves:
            leaf.requires_grad_(grad).grad = None
        with torch.set_grad_enabled(grad):
            out = function(case, layout, x, weight)
        if grad:
            sum((part * part).sum() for part in out).backward()
        results.append([*out, *(leaf.grad for leaf in leaves if grad)])
    for ours, right in zip(results[1], results[0], strict=True):
        assert ours.stride() == right.stride()
        torch.testing.assert_close(ours, right, rtol=2e-4, atol=2e-4)


def test_gradients(device: torch.device) -> None:
    case, layout = heads_case("gemma", 1, 2, torch.float64, device)
    tensors = [value.requires_grad_() for value in case.values()]
    names = list(case)

    def heads(*values: Tensor) -> tuple[Tensor, ...]:
        return call(dict(zip(names, values, strict=True)), layout)

    assert torch.autograd.gradcheck(heads, tensors)
    x, weight, residual = (torch.randn(3, 4, dtype=torch.float64) for _ in range(3))
    leaves = [t.to(device).requires_grad_() for t in (x, weight[:, :4], residual[:, :3])]
    assert torch.autograd.gradcheck(
        lambda x, w, r: block_ops.linear(x, w, residual=r, scale=0.3), leaves
    )
    pair = [torch.randn(2, 5, dtype=torch.float64, device=device).requires_grad_() for _ in "xr"]
    assert torch.autograd.gradcheck(lambda x, r: block_ops.add_rms_norm(x, r, 1e-2), pair)


def test_caches_in_a_compiled_graph(device: torch.device) -> None:
    """The caches are written once, where they are, by a graph as by an eager call."""
    torch._dynamo.reset()
    case, layout = heads_case("llama", 2, 1, torch.float32, device)
    caches = [torch.zeros(2, 2, 6, 16, device=device) for _ in range(4)]

    def step(keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
        q, keys, values = call(
            case, layout, key_cache=keys, value_cache=values, cache_position=position
        )
        return torch.cat([part.flatten() for part in (q, keys, values)])

    compiled = torch.compile(step, fullgraph=True, backend=BACKEND)
    for position in (torch.tensor([2]), torch.tensor([5]), torch.tensor(3)):
        position = position.to(device)
        with torch.no_grad():
            right = step(*caches[:2], position)
            ours = compiled(*caches[2:], position)
        assert torch.equal(ours, right)
    for mine, right in zip(caches[2:], caches[:2], strict=True):
        assert torch.equal(mine, right)
        assert mine.any(-1).all(1).all(0).tolist() == [False, False, True, True, False, True]


@pytest.mark.filterwarnings("ignore")
def test_what_is_registered_is_what_runs(device: torch.device) -> None:
    """Arguments that are written to are declared, others stay; fake results are as real ones."""
    ops = torch.ops.flashnorm
    case, layout = heads_case("qk-norm", 2, 1, torch.float16, device)
    packed = tuple(case.get(key) for key in ("qkv", "cos", "sin", "q_gain", "k_gain"))
    caches = torch.zeros(2, 2, 2, 5, 16, device=device, dtype=torch.float16).unbind()
    x, weight, residual = (torch.randn(3, 3, device=device) for _ in range(3))
    q, mask = torch.randn(2, 4, 1, 16, device=device), torch.zeros(2, 1, 1, 5, device=device)
    k = torch.randn(2, 2, 5, 16, device=device)
    calls = {
        ops.linear.default: (x, weight, None, residual, 0.5),
        ops.add_rms_norm.default: (x, residual, 1e-3, x[0], True),
        ops.rotary_heads.default: (*packed, *layout),
        ops.rotary_heads_cached.default: (
            *packed, *caches, torch.tensor([3], device=device), *layout
        ),
        ops.grouped_attention.default: (q, k, k + 1, mask, 0.3),
    }  # fmt: skip
    for op, args in calls.items():
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("tokens", (1, 3))
@each_layout
def test_no_result_shares_memory(name: str, tokens: int, device: str) -> None:
    """Of one token of one row, every head is contiguous where it lies in the packed projection."""
    case, layout = heads_case(name, 1, tokens, torch.float32, device)
    made = call(case, layout)
    places = {tensor.untyped_storage().data_ptr() for tensor in (case["qkv"], *made)}
    assert len(places) == 4


def test_fake_tensors() -> None:
    with FakeTensorMode():
        case, layout = heads_case("partial", 2, 3, torch.bfloat16, "cpu")
        q, k, v = call(case, layout)
        assert (q.shape, k.shape, v.shape) == ((2, 3, 3, 20), (2, 1, 3, 20), (2, 1, 3, 20))
        assert q.transpose(1, 2).is_contiguous()
        x, weight = torch.empty(4, 8), torch.empty(6, 8)
        assert block_ops.linear(x, weight).shape == (4, 6)
        assert block_ops.add_rms_norm(x, x, 1e-6).shape == (4, 8)


def test_autocast(device: torch.device) -> None:
    x, weight = torch.randn(3, 16, device=device), torch.randn(8, 16, device=device)
    residual = torch.randn(3, 8, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        ours = block_ops.linear(x, weight, residual=residual)
        product = functional.linear(x, weight)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, (product.float() + residual).to(ours.dtype))


REFUSED = {
    "qkv has shape": lambda c: c.update(qkv=c["qkv"][0]),
    "cos has shape": lambda c: c.update(cos=c["cos"][..., :3], sin=c["sin"][..., :3]),
    "go together": lambda c: c.update(sin=None),
    "q_gain has shape": lambda c: c.update(q_gain=c["q_gain"][:3]),
    "sin is torch.float64": lambda c: c.update(sin=c["sin"].double()),
    "one is missing": lambda c: c.update(key_cache=c["qkv"]),
    "key_cache has shape": lambda c: c.update(
        key_cache=c["qkv"], value_cache=c["qkv"], cache_position=torch.arange(2)
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message: str) -> None:
    case, layout = heads_case("qk-norm", 2, 2, torch.float32, "cpu")
    REFUSED[message](case)
    with pytest.raises((TypeError, ValueError), match=message):
        call(case, layout)


def test_refused_before_anything_is_written() -> None:
    case, layout = heads_case("llama", 1, 2, torch.float32, "cpu")
    caches = torch.zeros(2, 1, 2, 4, 16)
    for position in (torch.arange(3), torch.arange(2.0), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="cache_position is"):
            call(case, layout, key_cache=caches[0], value_cache=caches[1], cache_position=position)
    case["qkv"].requires_grad_()
    with pytest.raises(RuntimeError, match="without autograd"):
        call(
            case, layout, key_cache=caches[0], value_cache=caches[1],
            cache_position=torch.arange(2),
        )  # fmt: skip
    assert not caches.any()
    with pytest.raises(TypeError, match="residual is"):
        block_ops.add_rms_norm(case["qkv"], case["qkv"].double(), 1e-6)
    with pytest.raises(ValueError, match="scale is nan"):
        block_ops.linear(torch.ones(1, 2), torch.ones(3, 2), scale=float("nan"))
    with pytest.raises(ValueError, match="residual has shape"):
        block_ops.linear(torch.ones(1, 2), torch.ones(3, 2), residual=torch.ones(2, 3))
