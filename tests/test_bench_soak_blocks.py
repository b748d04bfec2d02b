"""The soak's members beside norm_linear's plans, and sizes of no model: right, seen to fail."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
from conftest import HAS_GPU
from torch import Tensor

from bench import soak_blocks, soak_members
from flashnorm_triton import block_ops, limits, tables
from flashnorm_triton.plans import Device, Problem

H200 = Device("cuda", 90, 132, gluon=True)
DEVICE = "cuda" if HAS_GPU else "cpu"
SMALL = Problem("float16", 5, 256, 256)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    if HAS_GPU:
        return [torch.cuda.Stream() for _ in range(3)]
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return [None] * 3


@pytest.mark.parametrize("family", soak_blocks._MAKERS)
def test_a_member_is_right_and_launches_again(family: str, streams: list[Any]) -> None:
    torch.manual_seed(0)
    ready = soak_blocks.make_ready(soak_blocks.Member(family, SMALL), streams, DEVICE)
    assert 0 < ready.verdict.rel_err < 8e-4
    launches = sum(ready.launch(stream) for stream in range(3))
    if HAS_GPU:
        torch.cuda.synchronize()
    assert launches > 20 and ready.settle() == 0
    told = soak_members.describe(ready.member, ready)
    assert told["plan"] == family and "256→256 M=5 float16" in told["problem"]
    assert "rel_err" in told and "rel_err" not in soak_members.describe(ready.member, None)


def test_a_wrong_or_moving_operation_is_seen(streams: list[Any], monkeypatch: Any) -> None:
    true_op, calls = block_ops.add_rms_norm, []

    def moving(x: Tensor, *rest: Any) -> Tensor:
        calls.append(x)
        y = true_op(x, *rest)
        if len(calls) == 10:
            y.view(torch.int16)[1, 3] ^= 1
        return y

    member = soak_blocks.Member("block/add_rms_norm", SMALL)
    monkeypatch.setattr(block_ops, "add_rms_norm", moving)
    ready = soak_blocks.make_ready(member, streams, DEVICE)
    ready.launch(0)
    if HAS_GPU:
        torch.cuda.synchronize()
    assert ready.settle() == 1
    monkeypatch.setattr(block_ops, "add_rms_norm", lambda x, *rest: 1.01 * true_op(x, *rest))
    with pytest.raises(ValueError, match="wrong at the first launch: relative error"):
        soak_blocks.make_ready(member, streams, DEVICE)


def test_members_are_drawn_anew_and_fit_their_operations() -> None:
    drawn = [soak_blocks.families(random.Random(seed), 6) for seed in range(3)]
    assert drawn[0] == soak_blocks.families(random.Random(0), 6) and drawn[0] != drawn[1]
    for families in drawn:
        for name, members in families.items():
            assert 1 <= len(members) <= 6 and {member.family for member in members} == {name}
            for member in members:
                problem = member.problem
                assert problem.n % 8 == 0 and problem.k % 8 == 0
                assert "heads" not in name or problem.k == problem.n and problem.k % 128 == 0


def test_every_other_member_has_sizes_of_no_model() -> None:
    rng = random.Random(0)
    pool = list(soak_members.pool(tables.Gpu("NVIDIA H200", 132, 90), H200))
    members = [member for member in rng.sample(pool, 300)]
    fit = [m for m in members if limits.unfit(m.plan, m.problem, H200) is None]
    sized = [soak_members.odd_sized(member, H200, rng) for member in fit]
    odd = [new for new, old in zip(sized, fit, strict=True) if new != old]
    assert len(fit) / 3 < len(odd) < 2 * len(fit) / 3
    for member in sized:
        assert limits.unfit(member.plan, member.problem, H200) is None
    assert len({(m.problem.n, m.problem.k) for m in odd}) > len(odd) / 2
