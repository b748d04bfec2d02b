"""The plans that a soak launches: which there are, and one of them made ready on the GPU.

A family is a strategy, a form, the way it gets the squares, whether programs share K, and the
epilogue. Its members are plans of the tables that may serve this GPU, of the built-in choice, and
of the tuner's search space, each with a problem that it serves and a row count drawn within its
bucket.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashnorm_triton import limits, ops, plans, tables
from flashnorm_triton.bench.shapes import SHAPES
from flashnorm_triton.plans import Device, Plan, Problem
from flashnorm_triton.tuning import measure, rig, space, validate
from flashnorm_triton.tuning.rig import EPS, floor_us
from flashnorm_triton.tuning.tuner import plan_text

NORM = "unfused/rms_norm"
"""The family of the unfused pair: its norm kernel alone, for the matmul is the library's."""
MOST_US = 150.0
_GRAPH_US = 1000.0
_MOST_LAUNCHES, _MOST_BYTES = 256, 48 << 20
_PLAIN_LAUNCHES = 16
_DRAWS = 3


# A LayerNorm; a gated pair with all that can follow it; an activation alone; no norm, as a block's
# second linears are.
_EPILOGUES: tuple[dict[str, Any], ...] = (
    {"centred": True},
    {"activation": "silu", "gated": True, "has_residual": True},
    {"activation": "gelu_tanh"},
    {"normed": False, "has_residual": True},
)


@dataclass(frozen=True)
class Member:
    """A plan and a problem that it serves."""

    problem: Problem
    plan: Plan

    @property
    def family(self) -> str:
        plan = self.plan
        if plan.form == "library":
            return NORM
        parts = [plan.strategy, plan.form]
        parts += [plan.squares] if plan.form in ("tiles", "hopper_rows") else []
        parts += ["split"] if plan.split_k > 1 else []
        parts += [self.problem.epilogue] if self.problem.epilogue else []
        return "/".join(parts)


def pool(gpu: tables.Gpu, device: Device) -> Iterator[Member]:
    """Every plan that tables, the built-in choice or tuning can give here, with its problems."""
    for _, _, table in tables.survey(gpu):
        if isinstance(table, tables.Table):
            for key, entry in table.entries.items():
                tma = key.k * limits.ELEMENT_BYTES[key.dtype] % 16 == 0
                problem = Problem(key.dtype, key.m, key.n, key.k, False, key.has_gain, tma)
                yield Member(problem, entry.plan)
    for shape in SHAPES:
        for dtype in ("bfloat16", "float16", "float32"):
            for m in (1 << power for power in range(13)):
                for more in ({}, {"has_gain": True}, *_EPILOGUES):
                    problem = Problem(dtype, m, shape.n, shape.k, True, **more)
                    for plan in space.candidates(problem, device, "quick"):
                        yield Member(problem, plan)  # the built-in choice is among them
    for plan in plans.other_plans():
        for shape in SHAPES:
            yield Member(Problem("bfloat16", 64, shape.n, shape.k), plan)
            yield Member(Problem("float16", 512, shape.n, shape.k, True), plan)


def with_epilogues(members: Iterable[Member]) -> Iterator[Member]:
    """The members, each also with the epilogues that a patched model can ask for."""
    for member in members:
        yield member
        if member.plan.form == "library" or member.problem.epilogue:  # its epilogues are torch's
            continue
        for epilogue in _EPILOGUES:
            yield replace(member, problem=replace(member.problem, **epilogue))


def families(
    members: Iterable[Member], device: Device, most: int, rng: random.Random
) -> dict[str, tuple[Member, ...]]:
    """At most ``most`` members of every family (a third where it is an epilogue that makes it
    another), drawn over plans and sizes.

    Plans that cannot run here, and calls that take so long that few fit the time, are left out. A
    member's row count is drawn within its bucket.
    """
    found: dict[str, dict[Plan, list[Member]]] = {}
    for member in members:
        fits = limits.unfit(member.plan, member.problem, device) is None
        if fits and floor_us(member.problem) <= MOST_US:
            found.setdefault(member.family, {}).setdefault(member.plan, []).append(member)
    chosen = {}
    for family, by_plan in sorted(found.items()):
        plain = not next(iter(by_plan.values()))[0].problem.epilogue
        count = most if plain else -(-most // 3)
        drawn = rng.sample(list(by_plan.values()), min(count, len(by_plan)))
        while len(drawn) < count and any(len(same) > 1 for same in drawn):
            drawn.append(rng.choice([same for same in by_plan.values() if len(same) > 1]))
        sized = (_within_bucket(rng.choice(same), rng) for same in drawn)
        picked = dict.fromkeys(odd_sized(member, device, rng) for member in sized)
        chosen[family] = tuple(picked)
    return chosen


def _within_bucket(member: Member, rng: random.Random) -> Member:
    m = rng.randint(member.problem.m // 2 + 1, member.problem.m)
    return replace(member, problem=replace(member.problem, m=m))


def odd_sized(member: Member, device: Device, rng: random.Random) -> Member:
    """Every other member at N and K of no model, where its plan serves them: rows of 16 bytes."""
    if rng.random() < 0.5:
        return member
    problem = member.problem
    n, k = (8 * rng.randint(-(-size // 16), -(-size // 8)) for size in (problem.n, problem.k))
    n += n % 16 if problem.gated else 0
    odd = replace(problem, n=n, k=k)
    return (
        replace(member, problem=odd) if limits.unfit(member.plan, odd, device) is None else member
    )


def differing(outputs: Sequence[Tensor], wanted: Tensor) -> Tensor:
    """In how many of the outputs any bit differs from ``wanted`` (launches, …), as a tensor."""
    got = torch.stack([validate.bits(output) for output in outputs])
    return (got != wanted).flatten(1).any(1).sum()


class Ready:
    """A member on the GPU: checked against float64, and captured in a graph of many launches.

    ``run`` takes one of ``parts`` and launches; ``wanted`` are the outputs of the first launches,
    which everything after is compared with, on the device. Raises ValueError when those are wrong.
    """

    def __init__(
        self,
        member: Member,
        run: Callable[[Tensor], Tensor],
        parts: Sequence[Tensor],
        wanted: Sequence[Tensor],
        streams: Sequence[torch.cuda.Stream],
        verdict: validate.Verdict,
    ) -> None:
        self.member, self.run, self.streams, self.verdict = member, run, streams, verdict
        size = wanted[0].numel() * wanted[0].element_size()
        most = max(1, min(_MOST_LAUNCHES, _MOST_BYTES // size))
        count = max(1, min(most, int(_GRAPH_US / (2.0 + floor_us(member.problem)))))
        self.parts = [parts[i % len(parts)] for i in range(count)]
        self.wanted = torch.stack([validate.bits(wanted[i % len(parts)]) for i in range(count)])
        device = self.wanted.device
        # The graph's, then one a stream: nothing adds to a counter from two places at once.
        self.counts = torch.zeros(1 + len(streams), dtype=torch.int64, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self.us = _GRAPH_US
        self._seen = 0

    def capture(self, backend: measure.CudaBackend) -> None:
        """Capture one launch a part, each on fresh memory filled with NaN, and their comparison."""

        def everything(i: int) -> None:
            self._compared(len(self.parts), self.counts[0])

        self._graph = backend.capture(everything, 1, 1)
        self.us = min(backend.time_ms([self._graph])[0] for _ in range(2)) * 1e3

    def _compared(self, count: int, counter: Tensor) -> None:
        with validate.poisoned_memory():
            outputs = [self.run(part) for part in self.parts[:count]]
        counter += differing(outputs, self.wanted[:count])

    def replay(self, stream: int) -> int:
        """Replay the graph on a stream; how many launches that is."""
        with torch.cuda.stream(self.streams[stream]):
            self._graph.replay()
        return len(self.parts)

    def launch(self, stream: int) -> int:
        """Launch a few times as a model in eager mode does; how many times."""
        count = min(_PLAIN_LAUNCHES, len(self.parts))
        with torch.cuda.stream(self.streams[stream]):
            self._compared(count, self.counts[1 + stream])
        return count

    def settle(self) -> int:
        """Launches with other bits since the last time; the GPU must have finished them."""
        total = int(self.counts.sum())
        fresh, self._seen = total - self._seen, total
        return fresh


def make_ready(member: Member, streams: Sequence[torch.cuda.Stream], device: str = "cuda") -> Ready:
    """Inputs, a checked first launch of each, and what launches again.

    Raises ValueError, with the reason, when the first outputs are not right. The largest error of a
    row is a noisy figure: only what passes its limit in each of a few draws is wrong by it.
    """
    for _ in range(_DRAWS):
        case, run = _case(member, device)
        verdict, outputs = validate.check_values(case, run)
        if verdict.reason is None:
            return Ready(member, run, case.parts, outputs, streams, verdict)
        if not verdict.reason.startswith("largest error"):
            break
    raise ValueError(f"wrong at the first launch: {verdict.reason}")


def _case(member: Member, device: str) -> tuple[validate.Case, validate.Run]:
    """Fresh inputs with what is wanted of them, and the member as a function of them."""
    problem = member.problem
    if member.family == NORM:
        case = validate.make_norm_case(problem, device, EPS)
        return case, lambda part: ops.rms_norm(part, case.eps, case.gain)
    weight = torch.randn(problem.n, problem.k, device=device) * problem.k**-0.5
    case = validate.make_case(problem, weight.to(getattr(torch, problem.dtype)), EPS)
    return case, rig.run_of(case, member.plan)


def describe(member: Member, ready: Ready | None) -> dict[str, object]:
    """The member as its record has it."""
    problem = member.problem
    extras = [name for name in ("bias", "gain") if getattr(problem, f"has_{name}")]
    extras += [problem.epilogue] if problem.epilogue else []
    if not isinstance(member, Member):  # soak_blocks has members of its own
        return {"problem": member.described, "plan": member.family, **_errors_of(ready)}
    size = f"{problem.k}→{problem.n} M={problem.m} {problem.dtype}"
    told: dict[str, object] = {
        "problem": " ".join([size, *extras]),
        "plan": plan_text(member.plan),
    }
    return told | _errors_of(ready)


def _errors_of(ready: Ready | None) -> dict[str, object]:
    if ready is None:
        return {}
    return {"rel_err": ready.verdict.rel_err, "rel_err_stock": ready.verdict.rel_err_stock}
