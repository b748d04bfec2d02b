"""Planted faults are real within their block, and gone after it."""

from __future__ import annotations

import threading

import pytest
import torch
from conftest import HAS_GPU
from fake_streams import FakeCuda
from numerics import assert_right, make_case, reference
from planted_faults import FAULTS, RESET, healthy, planted, without

from flashnorm_triton import dispatch, launch, plans, runtime, streams, workspace
from flashnorm_triton.ops import norm_linear

each_fault = pytest.mark.parametrize("name", FAULTS)


def off(y: torch.Tensor, case) -> float:
    expected = reference(*case)
    return float((y.double() - expected).norm() / expected.norm())


def seams() -> list[object]:
    return [
        streams.Join.wait, streams.Join.start, launch.FAMILIES["two_streams"],
        launch.FAMILIES["tiles"], workspace.parts, workspace.counters, dispatch._candidates,
        dispatch.reference.norm_linear,
    ]  # fmt: skip


def may_plant(name: str) -> None:
    if not HAS_GPU and FAULTS[name].where == "hopper":
        pytest.skip("its kernel is for a GPU")


@each_fault
def test_every_seam_is_put_back(name):
    may_plant(name)
    before = seams()
    with pytest.raises(ZeroDivisionError), planted(name):
        assert seams() != before or name == "no_counter_reset"
        raise ZeroDivisionError
    assert seams() == before
    with healthy(name):
        pass
    assert seams() == before


@pytest.mark.parametrize("name", ["stale_scale", "swapped_buffers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_scale_of_the_call_before(name, dtype, device):
    """Right at first; then y of this x with s of the last one; two layers do not mix."""
    if not (HAS_GPU or runtime.interpreting() or name == "stale_scale"):
        pytest.skip("needs the interpreter")
    xs = [torch.randn(2, 64, device=device) * factor for factor in (1.0, 3.0, 0.2)]
    cases = [make_case(2, 24, 64, dtype, device, bias=True, x=x.to(dtype)) for x in xs]
    cases = [case._replace(weight=cases[0].weight, bias=cases[0].bias) for case in cases]
    other = make_case(2, 24, 64, dtype, device, bias=True)

    def s_of(case) -> torch.Tensor:
        return torch.rsqrt(case.x.double().square().mean(-1, keepdim=True) + case.eps)

    with planted(name):
        assert_right(norm_linear(*cases[0]), cases[0])
        for before, case in zip(cases, cases[1:], strict=False):
            y = norm_linear(*case)
            assert_right(norm_linear(*other), other)
            unbiased = reference(*case) - case.bias.double()
            stale = unbiased * s_of(before) / s_of(case) + case.bias.double()
            torch.testing.assert_close(y.double(), stale, rtol=2e-2, atol=2e-2)
            assert off(y, case) > 0.3
    for case in cases:
        assert_right(norm_linear(*case), case)
    with healthy(name):
        for case in cases:
            assert_right(norm_linear(*case), case)


def test_a_step_after_a_prompt_takes_its_last_row():
    case = make_case(3, 24, 64, torch.float32, x=torch.randn(3, 64))
    step = case._replace(x=2 * torch.randn(1, 64))
    with planted("stale_scale"):
        norm_linear(*case)
        y = norm_linear(*step)
    s = torch.rsqrt(case.x[-1].square().mean() + case.eps)
    torch.testing.assert_close(y, s * step.x @ step.weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["no_wait", "no_fork"])
def test_a_missing_wait_is_missing(name, monkeypatch):
    """On the made-up CUDA, whose order is known."""
    fake = FakeCuda()
    monkeypatch.setattr(streams, "cuda", fake)
    monkeypatch.setattr(streams, "_thread", threading.local())

    def call(tag: str) -> None:
        fake.work(f"x{tag}")
        join = streams.join_on(0)
        with join:
            with join.beside():
                fake.work(f"statistics{tag}")
            fake.work(f"product{tag}")
        fake.work(f"scale{tag}")

    def ordered(tag: str) -> tuple[bool, bool]:
        x, statistics, scale = (fake.place(part + tag) for part in ("x", "statistics", "scale"))
        return fake.before(x, statistics), fake.before(statistics, scale)

    with planted(name):
        call(" faulty")
    call(" right")
    assert ordered(" faulty") == ((True, False) if name == "no_wait" else (False, True))
    assert ordered(" right") == (True, True)


def test_the_line_that_resets_a_counter_is_there_once():
    assert RESET not in without("kernels/hopper_swap", RESET)
    with pytest.raises(AssertionError, match="0 times"):
        without("kernels/gemv", RESET)


def test_a_plan_that_is_not_the_faults_is_untouched(device):
    if not (HAS_GPU or runtime.interpreting()):
        pytest.skip("needs the interpreter")
    case = make_case(2, 24, 64, torch.bfloat16, device)
    with planted("swapped_buffers", force=False):
        for _ in range(3):
            case = case._replace(x=torch.randn_like(case.x) * 10 * torch.rand(1).item())
            assert off(norm_linear(*case, plan=plans.UNFUSED), case) < 0.01
            assert off(norm_linear(*case), case) < 0.01


def test_the_registry():
    for name, fault in FAULTS.items():
        assert fault.name == name and fault.description and fault.instruments
        assert fault.where in ("any", "interpreter", "gpu", "hopper")
    with pytest.raises(KeyError), planted("nothing"):
        pass
