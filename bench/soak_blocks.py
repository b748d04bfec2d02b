"""The soak's members that are no plan of norm_linear: what else a patched model launches.

Head norms, the sandwich norm's end, rotary heads with and without a cache, the linear with its
residual, what follows the library's matmul. Sizes are drawn anew for every member.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench import soak_members
from flashnorm_triton import block_ops, block_reference, ops, plans, reference
from flashnorm_triton.block_reference import Layout
from flashnorm_triton.heads import Head, HeadNorms, Heads
from flashnorm_triton.plans import Plan, Problem
from flashnorm_triton.tuning import validate

EPS = 1e-6
_PARTS = 4
# One rounding, or two where the library's product is rounded as well.
_LIMITS = {torch.bfloat16: 6e-3, torch.float16: 8e-4}
Pair = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Member:
    """One operation at one size: ``problem`` has its rows (M), what is written (N) and read (K)."""

    family: str
    problem: Problem
    plan: Plan = plans.TORCH

    @property
    def described(self) -> str:
        problem = self.problem
        return f"{problem.k}→{problem.n} M={problem.m} {problem.dtype}"


def families(rng: random.Random, most: int) -> dict[str, tuple[Member, ...]]:
    """``most`` members of each operation."""
    found = {}
    for name in _MAKERS:
        members = []
        for _ in range(most):
            dtype = rng.choice(("bfloat16", "float16"))
            m, heads = rng.randint(1, 300), rng.randint(1, 12)
            k = 8 * rng.randint(8, 512)
            n = 128 * heads if "heads" in name else 8 * rng.randint(8, 512)
            k = n if "heads" in name or name == "block/add_rms_norm" else k
            members.append(Member(name, Problem(dtype, m, n, k)))
        found[name] = tuple(dict.fromkeys(members))
    return found


def make_ready(
    member: Member, streams: Sequence[torch.cuda.Stream], device: str = "cuda"
) -> soak_members.Ready:
    """Inputs, a checked first launch of each, and what launches again.

    Raises ValueError when a first output is not right by float64.
    """
    problem, dtype = member.problem, getattr(torch, member.problem.dtype)
    run, exact = _MAKERS[member.family](problem, dtype, device)
    parts = [torch.randn(problem.m, problem.k, device=device).to(dtype) for _ in range(_PARTS)]
    with validate.poisoned_memory():
        outputs = [run(part) for part in parts]
    worst = 0.0
    for part, y in zip(parts, outputs, strict=True):
        wanted = exact(part.double())
        off = (y.double() - wanted).norm() / wanted.norm()
        worst = max(worst, float(off))
    if not worst <= _LIMITS[dtype]:
        raise ValueError(f"wrong at the first launch: relative error {worst:.2e}")
    verdict = validate.Verdict(None, worst, _LIMITS[dtype])
    return soak_members.Ready(member, run, parts, outputs, streams, verdict)


def _add_norm(problem: Problem, dtype: torch.dtype, device: str) -> Pair:
    residual = torch.randn(problem.m, problem.k, device=device).to(dtype)
    gain = torch.rand(problem.k, device=device).to(dtype)
    return (
        lambda x: block_ops.add_rms_norm(x, residual, EPS, gain),
        lambda x: block_reference.add_rms_norm(x, residual.double(), EPS, gain.double(), False),
    )


def _weight(problem: Problem, dtype: torch.dtype, device: str) -> Tensor:
    return (torch.randn(problem.n, problem.k, device=device) * problem.k**-0.5).to(dtype)


def _linear(problem: Problem, dtype: torch.dtype, device: str) -> Pair:
    weight = _weight(problem, dtype, device)
    residual = torch.randn(problem.m, problem.n, device=device).to(dtype)
    return (
        lambda x: block_ops.linear(x, weight, residual=residual, scale=0.5),
        lambda x: 0.5 * (x @ weight.double().T) + residual.double(),
    )


def _finish(problem: Problem, dtype: torch.dtype, device: str) -> Pair:
    weight = _weight(problem, dtype, device)
    more: dict[str, Any] = {"activation": "silu", "gated": True}
    return (
        lambda x: ops.norm_linear(x, weight, EPS, plan=plans.UNFUSED, **more),
        lambda x: reference.norm_linear(x, weight.double(), EPS, **more),
    )


def _heads(problem: Problem, dtype: torch.dtype, device: str) -> Pair:
    count = problem.k // 128
    groups = (Heads(0, count, (Head(64, (0,)), Head(64))),)
    norms, gains = HeadNorms(groups, (EPS,), (False,)), (torch.rand(64, device=device).to(dtype),)
    return (
        lambda z: norms(z, gains),
        lambda z: norms.in_torch(z, tuple(gain.double() for gain in gains)),
    )


def _rotary(problem: Problem, dtype: torch.dtype, device: str, cached: bool = False) -> Pair:
    q = problem.k // 128 * 2
    layout = Layout(q - 1, 1, 64, EPS) if q > 2 else Layout(2, 1, 32, EPS)
    width, columns = layout.head_dim, layout.columns
    angle = 6.3 * torch.rand(1, problem.m, width, device=device)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    gains = [torch.rand(width, device=device).to(dtype) for _ in range(2)]
    how: dict[str, Any] = {"heads": layout[:2], "head_dim": width, "eps": EPS}
    how |= {"q_gain": gains[0], "k_gain": gains[1]}

    def packed(x: Tensor) -> Tensor:
        return x.repeat(1, -(-columns // problem.k))[:, :columns][None]

    def run(x: Tensor) -> Tensor:
        more = {}
        if cached:
            shape = 1, layout.kv_heads, problem.m, width
            kept = [x.new_full(shape, float("nan")) for _ in range(2)]
            places = torch.arange(problem.m, device=x.device).flip(0)
            more = {"key_cache": kept[0], "value_cache": kept[1], "cache_position": places}
        found = block_ops.rotary_heads(packed(x), cos, sin, **how, **more)
        return torch.cat([t.flip(2).flatten() if cached and i else t.flatten()
                          for i, t in enumerate(found)])[None]  # fmt: skip

    def exact(x: Tensor) -> Tensor:
        tables = cos.double(), sin.double(), *(gain.double() for gain in gains)
        found = block_reference.rotary_heads(packed(x), *tables, layout)
        return torch.cat([t.flatten() for t in found])[None]

    return run, exact


def _rotary_cached(problem: Problem, dtype: torch.dtype, device: str) -> Pair:
    return _rotary(problem, dtype, device, cached=True)


_MAKERS: dict[str, Callable[[Problem, torch.dtype, str], Pair]] = {
    "block/add_rms_norm": _add_norm,
    "block/linear+residual": _linear,
    "block/rotary_heads": _rotary,
    "block/rotary_heads+cache": _rotary_cached,
    "heads": _heads,
    "unfused/finish": _finish,
}
