"""The decode block's kernels, interpreted on a CPU or run on a GPU, against float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from conftest import HAS_GPU
from numerics import LIMIT, errors, norm64, poisoned, stock_norm
from test_block_ops import LAYOUTS, assert_heads, call, heads_case
from torch import Tensor

from flashnorm_triton import block_dispatch, block_ops, fallback
from flashnorm_triton.block_reference import Layout
from flashnorm_triton.plans import UNFUSED, Plan, Problem
from flashnorm_triton.tuning import rig, validate

pytest.importorskip("triton")

# The interpreter truncates where it should round to bfloat16.
DTYPES = (torch.float16, torch.float32) + ((torch.bfloat16,) if HAS_GPU else ())
WIDE = {
    "odd": Layout(3, 1, 72, 1e-3),
    "one kv head": Layout(8, 1, 64),
    "widest": Layout(2, 1, 256, 1e-3, True),
    "many": Layout(9, 5, 96, interleaved=True),
}


def _no_way_out(reason: str, *more: Any, **others: Any) -> None:
    raise AssertionError(f"a kernel gave way to torch: {reason}")


@pytest.fixture(autouse=True)
def _by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels on a CPU as well, and nothing kept from or for other tests."""
    monkeypatch.setattr(block_dispatch, "_served", lambda x: x.dtype != torch.float64)
    monkeypatch.setattr(block_dispatch, "_ready", {})
    monkeypatch.setattr(block_dispatch, "_kernels", {})
    monkeypatch.setattr(fallback, "warn_once", _no_way_out)


def _launched(case: dict[str, Any], layout: Layout, **more: Any) -> tuple[Tensor, ...]:
    with poisoned():
        result = call(case, layout, **more)
    assert block_dispatch._kernels, "no kernel ran"
    return result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_rotary_heads(name: str, dtype: torch.dtype, device: torch.device) -> None:
    shapes = ((1, 1), (3, 1), (2, 5), (2, 300)) if HAS_GPU else ((1, 1), (2, 3))
    for batch, tokens in shapes:
        for angles in (dtype, torch.float32):
            case, layout = heads_case(name, batch, tokens, dtype, device, angles)
            assert_heads(_launched(case, layout), case, layout)


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("tile", [64, 512, 2048])
def test_head_shapes_and_tiles(
    name: str, tile: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_dispatch, "_FEW_TILES", tile)
    monkeypatch.setitem(LAYOUTS, name, (WIDE[name], WIDE[name].head_dim // 4 * 2))
    case, layout = heads_case(name, 2, 2, torch.float16, device, torch.float32)
    # An angle of its own for each sequence.
    turn = torch.rand(2, 2, case["cos"].shape[-1], device=device)
    case |= {"cos": turn.cos(), "sin": turn.sin()}
    assert_heads(_launched(case, layout), case, layout)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_into_caches(dtype: torch.dtype, device: torch.device) -> None:
    """k and v where they belong, bit by bit as without caches, and nothing beside them."""
    for name, tokens in (("qk-norm", 1), ("partial", 4)):
        case, layout = heads_case(name, 2, tokens, torch.float16, device)
        shape = (2, layout.kv_heads, 9, layout.head_dim)
        keys, values = torch.randn(2, *shape, device=device).half()
        before = keys.clone(), values.clone()
        position = torch.randperm(9)[:tokens].to(device, dtype)
        q, k, v = _launched(case, layout)
        first = torch.tensor(9 - tokens, device=device, dtype=dtype)
        for places in (position, first):
            keys.copy_(before[0]), values.copy_(before[1])
            more = {"key_cache": keys, "value_cache": values, "cache_position": places}
            assert torch.equal(_launched(case, layout, **more)[0], q)
            there = position if places.dim() else torch.arange(9 - tokens, 9, device=device)
            for cache, old, new in zip((keys, values), before, (k, v), strict=True):
                assert torch.equal(cache, old.index_copy(2, there.long(), new))


def test_places_that_a_cache_has_not_are_left_out(device: torch.device) -> None:
    case, layout = heads_case("llama", 2, 3, torch.float32, device)
    memory = torch.zeros(2, 4, 2, 5, 16, device=device)
    position = torch.tensor([5, 1, -1], device=device)
    _launched(
        case, layout, key_cache=memory[0, 1:3], value_cache=memory[1, 1:3], cache_position=position
    )
    written = memory.any(-1)
    assert written[:, 1:3, :, 1].all()
    written[:, 1:3, :, 1] = False
    assert not written.any()


def test_operands_laid_out_otherwise(device: torch.device) -> None:
    """Strided rows and tables, and caches that are no whole memory, give the same."""
    case, layout = heads_case("qk-norm", 2, 3, torch.float16, device)
    right = _launched(case, layout)
    strided = {key: torch.stack([value, value + 1], -1)[..., 0] for key, value in case.items()}
    assert not any(value.is_contiguous() for value in strided.values())
    for ours, wanted in zip(_launched(strided, layout), right, strict=True):
        assert torch.equal(ours, wanted)
    wide = torch.zeros(2, 2, 2, 7, 20, device=device, dtype=torch.float16)
    caches = wide[..., 2:18]
    position = torch.arange(3, device=device)
    call(case, layout, key_cache=caches[0], value_cache=caches[1], cache_position=position)
    assert (caches[0, :, :, :3].double() - right[1].double()).abs().max() < 0.05
    assert torch.equal(caches[1, :, :, :3], right[2]) and not wide[..., 18:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm(dtype: torch.dtype, device: torch.device) -> None:
    for m, k in ((1, 48), (5, 100), (2, 9000)):
        size = torch.logspace(-2, 2, m)[:, None]
        x, residual = ((torch.randn(m, k) * size).to(device, dtype) for _ in range(2))
        vector = torch.rand(k).add_(0.3).to(device, dtype)
        for gain, plus in ((None, False), (vector, False), (vector, True)):
            whole = gain.double() + 1 if plus else gain
            with poisoned():
                ours = block_ops.add_rms_norm(x, residual, 1e-3, gain, one_plus=plus)
            right = norm64(x, 1e-3, whole) + residual.double()
            stock_gain = 1 + gain if plus else gain
            theirs = errors(stock_norm(x, 1e-3, stock_gain) + residual, right)
            least = errors(right.to(dtype), right)
            floor = 2e-7 if dtype == torch.float32 else 0.0
            for value, *allowed in zip(errors(ours, right), theirs, least, strict=True):
                assert value <= LIMIT * max(*allowed, floor)
    strided = torch.stack([x, x + 1], -1)[..., 0]
    ours = block_ops.add_rms_norm(strided, residual, 1e-3, gain, one_plus=plus)
    assert errors(ours, right)[0] <= LIMIT * max(theirs[0], floor)


PLANS = (
    Plan("single_pass", "gemv", 1, 8, 256, 1, 1),
    Plan("single_pass", "gemv", 2, 4, 512, 1, 1),
    Plan("single_pass", "gemv", 4, 16, 256, 1, 3),
)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.block_m}x{plan.block_n}")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear(plan: Plan, dtype: torch.dtype, device: torch.device) -> None:
    for m, k, bias, scale, more in (
        (plan.block_m, 264, True, 0.22, True), (3, 256, False, -1.5, False),
    ):  # fmt: skip
        # Rows of one size: a norm's scale would be seen.
        x = (3 * torch.randn(m, k)).to(device, dtype)
        weight = (torch.randn(11, k) / k**0.5).to(device, dtype)
        vector = torch.randn(11).to(device, dtype) if bias else None
        residual = torch.randn(m, 11).to(device, dtype) if more else None
        with poisoned():
            ours = block_ops.linear(x, weight, vector, residual=residual, scale=scale, plan=plan)
        z = x.double() @ weight.double().T
        right = scale * (z if vector is None else z + vector.double())
        right = right if residual is None else right + residual.double()
        allowed = errors(right.to(dtype), right)
        # Once rounded; fp32 sums in any order.
        walk = k**0.5 * 2.0**-24
        floor = (walk, walk * float(right.abs().max()))
        for value, least, sums in zip(errors(ours, right), allowed, floor, strict=True):
            assert value <= LIMIT * least + sums, (m, k, bias, scale)


def test_the_tuners_check_takes_a_linear_without_a_norm(device: torch.device) -> None:
    """Right values pass; those of one that forgets the residual, or norms its rows, do not."""
    problem = Problem("float16", 64, 24, 256, normed=False, has_residual=True)
    weight = (torch.randn(24, 256) / 16).half().to(device)
    case = validate.make_case(problem, weight)
    for changes, right in (({}, True), ({"epilogue": {}}, False), ({"normed": True}, False)):
        run = rig.run_of(dataclasses.replace(case, **changes), UNFUSED)
        assert (validate.check(case, run, 2).reason is None) is right, changes


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 2, 3, 8, 16, 33, 64, 100, 512, 2048])
def test_linear_with_chosen_plans(m: int, device: torch.device) -> None:
    """As near to float64 as the library and an addition, and the same bits each time."""
    for n, k in ((2048, 2048), (2048, 8192), (1000, 576), (72, 4096)):
        x, weight, residual = (
            torch.randn(shape, device=device, dtype=torch.bfloat16)
            for shape in ((m, k), (n, k), (m, n))
        )
        weight /= k**0.5
        right = 0.7 * (x.double() @ weight.double().T) + residual.double()
        stock = 0.7 * torch.nn.functional.linear(x, weight) + residual
        with poisoned():
            first, again = (
                block_ops.linear(x, weight, residual=residual, scale=0.7) for _ in range(2)
            )
        assert torch.equal(first, again)
        for value, most in zip(errors(first, right), errors(stock, right), strict=True):
            assert value <= LIMIT * most
