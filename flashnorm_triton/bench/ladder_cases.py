"""The operations of a model for the ladder, each rung's ways to run them, and their timing."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashnorm_triton import runtime, tables
from flashnorm_triton.bench import accuracy, building, decoders, overlap, rungs
from flashnorm_triton.bench.contenders import Contender
from flashnorm_triton.models import auditor
from flashnorm_triton.plans import Plan, Problem
from flashnorm_triton.tuning import measure

SCALE_AFTER = "library matmul, then the statistics and the scale"
# The normalised outlier of a short row is sqrt(K) to the last bit, at the sizes of trials a
# power of two: stock rounds nothing there, and no folded weight can be as near.
_LEAST_K, _TRIAL_LIMIT = 256, 2.0
# A model of a contender on the GPU beside its weights: cache, graphs, the compiler's buffers.
_ROOM = 1.5
_CONTEXT_BYTES = 1 << 30


@dataclass(frozen=True)
class Case:
    """A norm and the linears that read it: ``parts`` are their output sizes."""

    name: str
    k: int
    parts: tuple[int, ...]
    eps: float
    dtype: str = "bfloat16"

    @property
    def n(self) -> int:
        return sum(self.parts)

    def problem(self, m: int) -> Problem:
        return Problem(self.dtype, m, self.n, self.k)


def cases(model: str, dtype: str = "bfloat16") -> list[Case]:
    """The distinct norm → linears of a named model, from its modules without their weights."""
    meta = decoders.make(model, "meta")
    found: dict[tuple[int, tuple[int, ...]], Case] = {}
    for site in auditor.audit(meta).fused:
        linears = [meta.get_submodule(path) for path in site.consumers]
        stems = [path.rpartition(".")[2].removesuffix("_proj") for path in site.consumers]
        name = ("" if max(map(len, stems)) == 1 else "_").join(stems)
        parts = tuple(linear.weight.shape[0] for linear in linears)
        k = linears[0].weight.shape[1]
        name = f"{decoders.label(model)}.{name}"
        found.setdefault((k, parts), Case(name, k, parts, float(site.eps), dtype))
    return list(found.values())


class Weights:
    """The weights of a case: as many copies as one row needs to get past the L2 cache."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, torch.device(device)
        self.on_gpu = self.device.type == "cuda"
        k, self.dtype = case.k, getattr(torch, case.dtype)
        copies = range(self.copies(1))
        self.gains = [(1 + 0.5 * torch.randn(k, device=device)).to(self.dtype) for _ in copies]
        weights = [
            [(torch.randn(n, k, device=device) * k**-0.5).to(self.dtype) for n in case.parts]
            for _ in self.gains
        ]
        self.weight64 = torch.cat(weights[0]).double()
        self.operations = [
            rungs.Operation(own, gain, case.eps)
            for own, gain in zip(weights, self.gains, strict=True)
        ]

    def copies(self, m: int) -> int:
        """How many sets of weights and inputs are rotated at ``m`` rows."""
        if not self.on_gpu:
            return 1
        properties = torch.cuda.get_device_properties(self.device)
        return measure.copies_past_cache(
            2 * self.case.k * (self.case.n + m),
            cache_bytes=properties.L2_cache_size,
            memory_bytes=properties.total_memory // 8,
        )

    def tried(self, m: int) -> tuple[dict[str, tuple[Plan | None, ...]], Plan | None]:
        """The plans of each rung that is one strategy, and the plan that the package chooses; on a
        CPU the one way there is."""
        if not self.on_gpu:
            return {rung: (None,) for rung in rungs.STRATEGY}, None
        index = torch.cuda.current_device()
        device, name = runtime.device_facts(index), torch.cuda.get_device_name(index)
        problem = self.case.problem(m)
        found = {rung: rungs.plans_of(rung, problem, device, name) for rung in rungs.STRATEGY}
        return found, tables.lookup(problem, device, name)


@dataclass(frozen=True)
class Way:
    """How a rung is run: a plan of its strategy, or what ``name`` says."""

    rung: str
    plan: Plan | None = None
    name: str = ""

    @property
    def label(self) -> str:
        plan = self.plan
        if plan is None:
            return self.name or self.rung
        blocks = f" {plan.block_m}x{plan.block_n}x{plan.block_k}" if plan.block_m else ""
        return f"{plan.form}{blocks} {plan.num_warps}w {plan.num_stages}s"


Call = Callable[[Tensor, int], tuple[Tensor, ...]]


def ways(made: Weights, m: int, tried: Mapping[str, Sequence[Plan | None]]) -> dict[Way, Call]:
    """What runs each way on x (m, K) with one of the sets of weights."""
    found: dict[Way, Call] = {}
    for rung in rungs.RUNGS[:-1]:
        for plan in tried.get(rung, (None,)):
            found[Way(rung, plan)] = lambda x, i, rung=rung, plan=plan: made.operations[i](
                rung, x, plan
            )
    if made.on_gpu:
        index = torch.cuda.current_device()
        run = overlap.one_after_the_other(made.case.problem(m), index, made.case.eps)
        found[Way("deferred", None, SCALE_AFTER)] = lambda x, i: (
            run(x, made.operations[i].packed, None, None),
        )
    return found


def measure_cell(
    made: Weights, m: int, args: argparse.Namespace, refused: Mapping[Any, str]
) -> tuple[dict[str, dict[str, Any]], dict[str, Plan]]:
    """By rung the fields of its record (``error`` where it failed), and the best plan of each that
    is one strategy. ``refused``: plans that may not be launched, and why (building.py)."""
    tried, chosen = made.tried(m)
    copies = min(made.copies(m), len(made.operations))
    x = [torch.randn(m, made.case.k, device=made.device).to(made.dtype) for _ in range(copies)]
    calls = ways(made, m, tried)
    backend = measure.CudaBackend() if made.on_gpu else HostBackend()
    failed: dict[Way, str] = {}
    verdicts: dict[Way, accuracy.Verdict] = {}
    replays: dict[Way, measure.Replay] = {}
    problem = made.case.problem(m)
    for way, call in calls.items():
        try:
            why = way.plan and refused.get(building.key(way.plan, problem))
            if why:
                raise ValueError(why)
            verdicts[way] = _verdict(made, m, call, calls[Way("stock")])
            if told := broken(verdicts[way], made.case.k):
                raise ValueError(told)
            replays[way] = measure.prepare(
                way.label, lambda i, call=call: call(x[i], i), rotations=copies, backend=backend
            )
        except Exception as error:
            failed[way] = f"{type(error).__name__}: {error}"[:800]
    budget = args.seconds
    timings = measure.interleave(replays, rounds=args.rounds, budget_s=budget, backend=backend)
    fields: dict[str, dict[str, Any]] = {}
    best: dict[str, Plan] = {}
    for rung in rungs.RUNGS[:-1]:
        mine = [way for way in calls if way.rung == rung]
        good = sorted((way for way in mine if way in timings), key=lambda way: timings[way].us)
        if not good:
            told = [failed[way] for way in mine] or ["no kernel of this strategy serves the shape"]
            fields[rung] = {"error": "; ".join(dict.fromkeys(told))}
            continue
        way = good[0]
        if planned := [one.plan for one in good if one.plan is not None]:
            best[rung] = planned[0]
        fields[rung] = _fields(timings, way, chosen, verdicts[way])
        call = calls[way]
        fields[rung]["launches"] = _launches(lambda call=call: call(x[0], 0), made.on_gpu)
        if len(good) > 1:
            fields[rung]["others_us"] = {one.label: timings[one].us for one in good[1:]}
        if told := {one.label: failed[one] for one in mine if one in failed}:
            fields[rung]["failed"] = told
    return fields, best


def broken(verdict: accuracy.Verdict, k: int) -> str | None:
    """What is wrong with a way, or None."""
    limit = accuracy.LIMIT if k >= _LEAST_K else _TRIAL_LIMIT
    if verdict.finite and max(verdict.ratio, verdict.max_ratio) <= limit:
        return None
    return (
        f"breaks the numerics contract: finite {verdict.finite}, error ratio {verdict.ratio:.3g}, "
        f"maximum ratio {verdict.max_ratio:.3g} (limit {limit})"
    )


def _fields(
    timings: Mapping[Way, measure.Timing],
    way: Way,
    chosen: Plan | None,
    verdict: accuracy.Verdict,
) -> dict[str, Any]:
    mine, stock = timings[way], timings.get(Way("stock"))
    ratio = None if stock is None else measure.ratio(stock, mine)
    return {
        "us": mine.us,
        "us_q20": mine.us_q20,
        "us_q80": mine.us_q80,
        "speedup": None if ratio is None else ratio.median,
        "speedup_q20": None if ratio is None else ratio.q20,
        "speedup_q80": None if ratio is None else ratio.q80,
        "plan": None if way.plan is None else way.plan.as_dict(),
        "how": way.name or None,
        "chosen": way.plan is not None and way.plan == chosen,
        **verdict.fields(),
    }


def _verdict(made: Weights, m: int, call: Call, stock: Call) -> accuracy.Verdict:
    """One way against float64, beside the stock modules."""

    def joined(call: Call) -> Callable[[Tensor], Tensor]:
        def run(rows: Tensor) -> Tensor:
            outputs = call(rows, 0)
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

        return run

    return accuracy.check(
        joined(call),
        joined(stock),
        gain=made.gains[0],
        weight64=made.weight64,
        eps=made.case.eps,
        m=m,
        dtype=made.dtype,
    )


def _launches(call: Callable[[], Any], on_gpu: bool) -> int | None:
    return measure.count_launches(call).kernels if on_gpu else None


class HostBackend:
    """For trials without a GPU: calls timed by the host's clock."""

    def capture(self, fn: Callable[[int], object], calls: int, rotations: int) -> Any:
        def replay() -> None:
            for i in range(calls):
                fn(i % rotations)

        return replay

    def time_ms(self, handles: Sequence[Any]) -> list[float]:
        times = []
        for handle in handles:
            started = time.perf_counter()
            handle()
            times.append((time.perf_counter() - started) * 1e3)
        return times


def waves(everyone: Sequence[Contender], device: str) -> list[list[Contender]]:
    """Contenders that are there at the same time, by their set-up: those of the first, the
    baseline, in every wave, and as many more as the GPU's memory holds, a model a process."""
    models: dict[Any, set[Any]] = {}
    for what in everyone:
        models.setdefault(what.setup, set()).add(what if what.compiles else None)
    if not models:
        return []
    most = float("inf")
    if device == "cuda":
        meta = decoders.make(everyone[0].model, "meta")
        weights = sum(p.numel() for p in set(meta.parameters())) * 2
        free, _ = torch.cuda.mem_get_info()
        most = 0.9 * free / (_ROOM * weights + _CONTEXT_BYTES)
    first, *others = models
    groups: list[list[Any]] = [[]]
    for setup in others:
        there = sum(len(models[one]) for one in (first, *groups[-1], setup))
        if groups[-1] and there > most:
            groups.append([])
        groups[-1].append(setup)
    return [[what for what in everyone if what.setup in (first, *group)] for group in groups]
