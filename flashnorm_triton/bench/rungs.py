"""The ladder of the technique, rung by rung: one operation, or a whole model, on each.

Every rung computes the same. A model is put on one by what the package has: gains folded into stock
modules, one-launch norms, ``patch`` with the plans of one strategy alone, blocks. The plans come
from a table of the user's own place, in which each problem of the model has the rung's plan.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flashnorm_triton import algebra, limits, ops, plans, tables
from flashnorm_triton.models import auditor
from flashnorm_triton.plans import Device, Plan, Problem
from flashnorm_triton.tuning import space

RUNGS = (
    "stock", "fold_only", "weightless", "packed", "deferred", "overlap", "fused", "block",
)  # fmt: skip
"""stock modules; the gains folded, norm weights one; one launch a norm, without a gain; beside it
one library matmul for q | k | v and for gate | up; statistics, then a matmul whose epilogue applies
s; the library's matmul of the raw x beside the statistics, then the scale; norm and matmul in one
pass; whole decoder layers. All but the last change norms and their linears alone."""
STRATEGY = {
    "packed": "unfused", "deferred": "stats_then_gemm", "overlap": "overlap",
    "fused": "single_pass",
}  # fmt: skip
_MOST_TRIED = 3
# Statistics first, for few rows: the tuner's lists have it only where it was ever best.
_GIVEN = ((16, 64, 128, 4, 4), (16, 32, 256, 4, 3), (64, 64, 64, 4, 4))

Forced = tuple[tuple[Problem, Plan], ...]
"""The plan that each problem of a model gets."""


def plans_of(rung: str, problem: Problem, device: Device, name: str = "") -> tuple[Plan, ...]:
    """Up to three plans of a rung's strategy for a problem, the likeliest first; the one of the
    tables, or else the built-in one, leads if it is of that strategy.

    ``device`` and ``name`` are the GPU's. Empty where no kernel of the strategy serves the problem.
    """
    strategy = STRATEGY[rung]
    listed = [tables.lookup(problem, device, name), plans.choose(problem, device)]
    if strategy == "stats_then_gemm":
        # Above the few rows of the tiles, the lists of the tuner know better.
        rows = plans.bucket(problem.m)
        tiles = [
            Plan(strategy, "tiles", *blocks, squares="given")
            for blocks in _GIVEN
            if blocks[0] <= max(16, rows) and rows <= 64
        ]
        listed += [*tiles, Plan(strategy, "hopper_rows", 128, 128, 64, 4, 5, squares="given")]
        listed += [Plan(strategy, "scaled_gemm", 128, 256, 64, 8, 4)]
        listed += [Plan(strategy, "tiles", 64, 64, 64, 4, 4, squares="given")]
    else:
        listed += [plans.UNFUSED, plans.OVERLAP, *space.candidates(problem, device, "full")]
    fitting = dict.fromkeys(
        plan
        for plan in listed
        if plan.strategy == strategy and limits.unfit(plan, problem, device) is None
    )
    return tuple(fitting)[:_MOST_TRIED]


def problems_of(model: nn.Module, rows: Sequence[int]) -> list[Problem]:
    """The norm → packed linear problems of a stock model at these row counts."""
    dtype = str(model.dtype).removeprefix("torch.")
    found: dict[Problem, None] = {}
    for site in auditor.audit(model).fused:
        weights = [model.get_submodule(path).weight for path in site.consumers]
        n, k = sum(w.shape[0] for w in weights), weights[0].shape[1]
        found |= dict.fromkeys(Problem(dtype, m, n, k) for m in rows)
    return list(found)


@contextmanager
def only(forced: Forced, device: Device, name: str) -> Iterator[None]:
    """Within the block each of these problems runs the plan it is given, on the GPU ``name``.

    A table is written where the user's would be, in a folder of its own; the shipped ones stay
    behind it. A plan that cannot be run is an error: another one would be timed in its name.
    """
    gpu = tables.Gpu(name, device.sm_count, device.capability)
    run = tables.Run("", torch.__version__, "", "", "quick")
    entries = {
        tables.key_of(problem): tables.Entry(plan, 0.0, 0.0, 0.0, 0.0, 0.0, run)
        for problem, plan in forced
    }
    names = ("FLASHNORM_CACHE_DIR", "FLASHNORM_TABLES")
    before = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory(prefix="flashnorm-rung-") as folder:
        os.environ["FLASHNORM_CACHE_DIR"] = folder
        os.environ.pop("FLASHNORM_TABLES", None)
        tables.write(tables.user_path(gpu), tables.Table(gpu, entries))
        _choose_anew()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="flashnorm_triton")
                yield
        finally:
            for variable, value in before.items():
                os.environ.pop(variable, None)
                os.environ.update({} if value is None else {variable: value})
            _choose_anew()


def _choose_anew() -> None:
    tables.forget()
    ops.forget_plans()


@torch.no_grad()
def fold_in_place(model: nn.Module) -> tuple[str, ...]:
    """Fold every gain that may be folded into the stock modules' weights, and set it to what
    multiplies by one; the paths of those norms."""
    done = []
    for site in auditor.audit(model).fused:
        norm = model.get_submodule(site.norm)
        if not site.foldable or site.convention == "none":
            continue
        gain = algebra.effective_gain(norm.weight, site.convention)
        for path in site.consumers:
            linear = model.get_submodule(path)
            linear.weight.copy_(algebra.fold(linear.weight, gain))
        norm.weight.fill_(0.0 if site.convention == "1+w" else 1.0)
        done.append(site.norm)
    return tuple(done)


class OneLaunch(nn.Module):
    """A norm as one launch: x / rms(x), times a gain (K,) where there is one."""

    def __init__(self, eps: float, gain: Tensor | None) -> None:
        super().__init__()
        self.eps, self.gain = eps, gain

    def forward(self, hidden_states: Tensor) -> Tensor:
        return ops.rms_norm(hidden_states, self.eps, self.gain)


def _weightless(model: nn.Module) -> None:
    report = auditor.audit(model)
    folded = set(fold_in_place(model))
    for site in report.sites:
        if site.kind != "rms" or site.eps is None:
            continue
        holder, _, key = site.norm.rpartition(".")
        norm = model.get_submodule(site.norm)
        gain = None
        if site.norm not in folded and site.convention != "none":
            gain = algebra.effective_gain(norm.weight.detach(), site.convention)
            gain = gain.to(norm.weight.dtype) if site.convention == "w" else gain
        model.get_submodule(holder)._modules[key] = OneLaunch(site.eps, gain)


def install(model: nn.Module, rung: str) -> Any:
    """Put a stock model on a rung; what ``patch`` returned, or None.

    The rungs that are one strategy (``STRATEGY``) are this patched model under ``only``. Raises
    ValueError for an unknown rung, and as ``patch`` does.
    """
    from flashnorm_triton import patch

    if rung not in RUNGS:
        raise ValueError(f"rung {rung!r} is unknown: use one of {', '.join(RUNGS)}")
    if rung == "fold_only":
        fold_in_place(model)
    elif rung == "weightless":
        _weightless(model)
    elif rung != "stock":
        level = "block" if rung == "block" else "norm"
        return patch(model, level=level, revertible=False)
    return None


# One operation --------------------------------------------------------------------------------


class Operation:
    """A norm and the linears that read it, on every rung but the last.

    ``weights``: one (N, K) a linear, as a stock model has them; ``gain`` (K,).
    """

    def __init__(self, weights: Sequence[Tensor], gain: Tensor, eps: float) -> None:
        self.weights, self.eps = tuple(weights), eps
        self.folded = tuple(algebra.fold(w, gain.float()) for w in weights)
        self.packed = torch.cat(self.folded)
        self.norm, self.neutral = (_stock_norm(g, eps) for g in (gain, torch.ones_like(gain)))

    def __call__(self, rung: str, x: Tensor, plan: Plan | None = None) -> tuple[Tensor, ...]:
        """The linears' outputs for x (M, K): one tensor each, or one in all where they are packed.

        ``plan``: what a rung that is one strategy runs.
        """
        if rung in STRATEGY:
            return (ops.norm_linear(x, self.packed, self.eps, plan=plan),)
        if rung == "stock":
            y, weights = self.norm(x), self.weights
        elif rung == "fold_only":
            y, weights = self.neutral(x), self.folded
        elif rung == "weightless":
            y, weights = ops.rms_norm(x, self.eps), self.folded
        else:
            raise ValueError(f"rung {rung!r} is no operation: use one of {', '.join(RUNGS[:-1])}")
        return tuple(nn.functional.linear(y, weight) for weight in weights)


def _stock_norm(gain: Tensor, eps: float) -> nn.Module:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    with torch.device("meta"):
        norm = LlamaRMSNorm(gain.shape[0], eps=eps)
    norm.weight = nn.Parameter(gain, requires_grad=False)
    return norm
