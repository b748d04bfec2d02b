"""A forward never fails because of a table, whatever its file is."""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace

import pytest
import torch
from test_tables import DEVICE, H200, KEY, KINDS, PROBLEM, TUNED, broken, put, table_of

from flashnorm_triton import dispatch, ops, plans, runtime, tables
from flashnorm_triton.plans import UNFUSED, Plan
from flashnorm_triton.tables import Gpu, Table


@pytest.fixture(autouse=True)
def _places(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHNORM_CACHE_DIR", str(tmp_path / "user"))
    monkeypatch.delenv("FLASHNORM_TABLES", raising=False)
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "shipped")
    tables.forget()
    ops.forget_plans()
    yield
    tables.forget()
    ops.forget_plans()


def warned(action) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(warning.message) for warning in caught]


@pytest.fixture
def plans_of_a_call(monkeypatch):
    """The plans that a call on an H200 tries, the best first."""
    monkeypatch.setattr(runtime, "triton_unavailable", lambda: None)
    monkeypatch.setattr(runtime, "device_facts", lambda index: DEVICE)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: H200.name)
    weight = torch.empty(PROBLEM.n, PROBLEM.k, dtype=torch.bfloat16)
    x = SimpleNamespace(
        is_cuda=True, numel=lambda: 1, get_device=lambda: 0, dtype=weight.dtype,
        shape=(PROBLEM.m, PROBLEM.k), reshape=lambda *_: weight[: PROBLEM.m],
    )  # fmt: skip
    call = SimpleNamespace(x=x, weight=weight, more=dispatch.PLAIN, problem=lambda matrix: PROBLEM)
    return lambda: list(dispatch._candidates(call))


BUILT_IN = [plans.choose(PROBLEM, DEVICE), UNFUSED, plans.TORCH]


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_table_leaves_a_call_its_built_in_plans(plans_of_a_call, kind):
    put(tables.user_path(H200), broken(kind))
    tried = []
    messages = warned(lambda: tried.extend(plans_of_a_call()))
    assert tried == BUILT_IN and len(messages) == 1
    assert warned(plans_of_a_call) == []  # told once


def test_a_sound_table_goes_first(plans_of_a_call):
    tables.write(tables.user_path(H200), table_of())
    assert plans_of_a_call() == [TUNED, *BUILT_IN]


def test_a_folder_in_the_place_of_the_table(plans_of_a_call):
    tables.user_path(H200).mkdir(parents=True)
    assert len(warned(plans_of_a_call)) == 1 and plans_of_a_call() == BUILT_IN


@pytest.mark.gpu
@pytest.mark.parametrize("what", [*KINDS, "a folder", "no right to read", "a plan of no sense"])
def test_on_a_gpu_a_forward_is_right_whatever_the_table(what):
    index = torch.cuda.current_device()
    facts = runtime.device_facts(index)
    gpu = Gpu(torch.cuda.get_device_name(index), facts.sm_count, facts.capability)
    path = tables.user_path(gpu)
    path.parent.mkdir(parents=True)
    if what == "a folder":
        path.mkdir()
    elif what == "a plan of no sense":
        entry = next(
            iter(table_of(plan=Plan("single_pass", "gemv", 16, 1024, 1024, 1, 8)).entries.values())
        )
        tables.write(path, Table(gpu, {KEY: entry}))
    else:
        path.write_text(tables.dump(Table(gpu)) if what == "no right to read" else broken(what))
        os.chmod(path, 0 if what == "no right to read" else 0o644)
    x = torch.randn(PROBLEM.m, PROBLEM.k, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(PROBLEM.n, PROBLEM.k, device="cuda", dtype=torch.bfloat16) * 0.02
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = ops.norm_linear(x, weight, 1e-6)
    wide = x.double()
    wanted = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) @ weight.double().T
    assert (got.double() - wanted).norm() <= 4e-3 * wanted.norm()
