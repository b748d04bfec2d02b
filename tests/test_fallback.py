"""A plan that cannot run here gives way, with one warning; no forward fails because of it."""

from __future__ import annotations

import warnings

import pytest
import torch

from flashnorm_triton import dispatch, launch, ops, plans, reference, tables
from flashnorm_triton.ops import norm_linear
from flashnorm_triton.plans import Plan

BROKEN = Plan("single_pass", "gemv", 1, 16, 64)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch):
    """A CPU call whose first plan is BROKEN and whose second is plain torch."""
    monkeypatch.setattr(dispatch, "_candidates", lambda *_: iter((BROKEN, plans.TORCH)))
    ops.forget_plans()
    x, w = torch.randn(3, 32), torch.randn(8, 32)
    yield x, w
    ops.forget_plans()


def break_gemv(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setitem(launch.FAMILIES, "gemv", fail)


def test_the_next_plan_runs_and_one_warning_says_why(monkeypatch, call) -> None:
    break_gemv(monkeypatch, RuntimeError("PassManager::run failed"))
    x, w = call
    with pytest.warns(RuntimeWarning, match="single_pass/gemv.*K = 32, N = 8.*PassManager"):
        y = norm_linear(x, w, 1e-6)
    torch.testing.assert_close(y, reference.norm_linear(x, w, 1e-6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(norm_linear(x, w, 1e-6), y)


def test_out_of_memory_is_not_hidden(monkeypatch, call) -> None:
    break_gemv(monkeypatch, torch.OutOfMemoryError("no room"))
    with pytest.raises(torch.OutOfMemoryError):
        norm_linear(*call, 1e-6)


def test_a_plan_asked_for_by_name_does_not_give_way(monkeypatch, call) -> None:
    monkeypatch.setattr(dispatch, "check_forced", lambda *_: None)
    break_gemv(monkeypatch, RuntimeError("PassManager::run failed"))
    with pytest.raises(RuntimeError, match="PassManager"):
        norm_linear(*call, 1e-6, plan=BROKEN)


@pytest.mark.gpu
def test_a_table_plan_that_needs_too_much_shared_memory_gives_way(monkeypatch) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the plan is one of Hopper's")
    huge = Plan("single_pass", "hopper_swap", 64, 128, 128, 4, 12)
    monkeypatch.setattr(tables, "lookup", lambda *_: huge)
    ops.forget_plans()
    x = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    with pytest.warns(RuntimeWarning, match="hopper_swap"):
        y = norm_linear(x, w, 1e-6)
    expected = reference.norm_linear(x.double(), w.double(), 1e-6)
    assert (y.double() - expected).norm() / expected.norm() < 4e-3
    ops.forget_plans()
