"""The instruments of bench/faults.py: what each does to look for a fault, and what it says.

An instrument runs within ``planted(name)`` or ``healthy(name)`` (tests/planted_faults.py) and does
not know which.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from planted_faults import Fault, serves
from torch import Tensor

from flashnorm_triton import launch, ops
from flashnorm_triton.plans import Problem
from flashnorm_triton.tuning import validate

EPS = 1e-6
INPUTS = 8
MOST_DELAYED = 400
BATCH, SLEEP = 40, 20_000_000  # launches that wait together, for some 10 ms
LIMIT = 1.25
PERPLEXITY_RATIO = 1.005
# (M, N, K) of the plan's form: its tiles whole, its launches a few microseconds.
SIZES = {
    "two_streams": (512, 1024, 1024),
    "hopper_swap": (16, 1024, 2048),
    "tiles": (256, 6144, 4096),
    "reference": (64, 960, 576),
}


@dataclass(frozen=True)
class Seen:
    """What an instrument said: after how many launches it saw something, or None."""

    launches: int
    caught: bool
    detail: str


class Case:
    """``INPUTS`` inputs of one problem whose rows differ in size, and y in float64."""

    def __init__(self, fault: Fault, device: str = "cuda") -> None:
        m, n, k = SIZES[fault.plan.form]
        self.problem = Problem("bfloat16", m, n, k)
        draw = torch.Generator(device=device).manual_seed(1)
        scale = 10 ** (torch.rand(INPUTS, m, 1, device=device, generator=draw) * 2 - 1)
        x = torch.randn(INPUTS, m, k, device=device, generator=draw) * scale
        weight = torch.randn(n, k, device=device, generator=draw) * k**-0.5
        self.x, self.weight = x.bfloat16(), weight.bfloat16()
        wide = self.x.double()
        normed = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + EPS)
        self.wanted = normed @ self.weight.double().T
        self.norms = self.wanted.flatten(1).norm(dim=1)
        stock = torch.nn.functional.linear(normed.bfloat16(), self.weight)
        self.limit = LIMIT * float(self.errors(stock, slice(None)).max())

    def run(self, x: Tensor) -> Tensor:
        return ops.norm_linear(x, self.weight, EPS)

    def errors(self, y: Tensor, which: Any) -> Tensor:
        """Relative error of y (…, M, N) against the wanted ones at ``which``."""
        off = (y.double() - self.wanted[which]).flatten(-2).norm(dim=-1)
        return off / self.norms[which]

    def is_wrong(self, y: Tensor, which: int) -> Tensor:
        """Whether y is off by more than the contract, or not finite, as a tensor."""
        return ~(self.errors(y, which) <= self.limit)


def unit(case: Case, launches: int) -> Seen:
    """One launch with nothing else on the device: what a unit test does."""
    torch.cuda.synchronize()
    y = case.run(case.x[0])
    torch.cuda.synchronize()
    error = float(case.errors(y, 0))
    return Seen(1, not error <= case.limit, f"relative error {error:.2e}, limit {case.limit:.2e}")


def _contended(
    case: Case,
    launches: int,
    check: Callable[[int, int, Tensor], Tensor],
    poison: bool,
    before: Callable[[], None] = lambda: None,
) -> tuple[Tensor, int]:
    """Launches by turns on two streams, beside a load on a third; a flag a launch, on the device.

    Each has an x that its stream wrote just before, in memory of its own (``poison``: NaN until
    then, as everything that is allocated). Some dozens are enqueued behind a sleep, so that the
    host does not keep the streams apart. ``before`` is called before x is written.
    """
    from flashnorm_triton.tuning.rig import Load

    load, streams = Load(), [torch.cuda.Stream() for _ in range(2)]
    flags = torch.zeros(launches, dtype=torch.bool, device="cuda")
    torch.cuda.synchronize()
    for turn in range(launches):
        side = turn % 2
        if turn % BATCH == 0:
            for stream in streams:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(SLEEP)
        if turn % 4 == 0:
            load(1)
        with torch.cuda.stream(streams[side]):
            before()
            which = turn % INPUTS if poison else side
            if poison:
                with validate.poisoned_memory():
                    y = case.run(case.x[which].clone())
            else:
                y = case.run(case.x[which].clone())
            flags[turn] = check(turn, which, y)
    torch.cuda.synchronize()
    return flags, launches


def _first(flags: Tensor, launches: int, what: str) -> Seen:
    wrong = flags.nonzero().flatten()
    count = len(wrong)
    told = f"{count} of {launches} launches {what}"
    return Seen(int(wrong[0]) + 1 if count else launches, count > 0, told)


def bits(case: Case, launches: int) -> Seen:
    """Equal bits under load: every launch beside the first one of its input."""
    first = [case.run(case.x[i]).clone() for i in range(2)]
    torch.cuda.synchronize()

    def differs(turn: int, which: int, y: Tensor) -> Tensor:
        return (validate.bits(y) != validate.bits(first[which])).any()

    return _first(*_contended(case, launches, differs, poison=False), "have other bits")


def float64(case: Case, launches: int) -> Seen:
    """Changing inputs against float64, under load, on memory filled with NaN."""
    flags = _contended(case, launches, lambda _, which, y: case.is_wrong(y, which), poison=True)
    return _first(*flags, "are wrong")


@contextlib.contextmanager
def delays(rng: random.Random) -> Iterator[None]:
    """In half of the calls the join's two streams are late, each by up to 0.2 ms."""
    from flashnorm_triton.streams import Join

    start, wait = Join.start, Join.wait

    def late_start(self: Join) -> None:
        start(self)
        _perhaps_sleep(rng)  # the side stream is the current one

    def late_wait(self: Join, here: torch.cuda.Stream) -> None:
        wait(self, here)
        _perhaps_sleep(rng)

    Join.start, Join.wait = late_start, late_wait
    try:
        yield
    finally:
        Join.start, Join.wait = start, wait


def _perhaps_sleep(rng: random.Random) -> None:
    if rng.random() < 0.5:
        torch.cuda._sleep(rng.randrange(400_000))


def delay(case: Case, launches: int) -> Seen:
    """As ``float64``, with delays drawn at random: before x, and in a fork's and join's streams."""
    launches, rng = min(launches, MOST_DELAYED), random.Random(0)
    with delays(rng):
        flags = _contended(
            case,
            launches,
            lambda _, which, y: case.is_wrong(y, which),
            poison=True,
            before=lambda: _perhaps_sleep(rng),
        )
    return _first(*flags, "are wrong")


def graph(case: Case, launches: int) -> Seen:
    """Captured once, replayed with other inputs in the same memory."""
    static = case.x[0].clone()
    case.run(static)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(captured):
            y = case.run(static)
    except RuntimeError as error:
        reason = str(error.__context__ or error).strip().splitlines()[0]
        return Seen(1, True, f"capture refuses: {reason}"[:200])
    flags = torch.zeros(launches, dtype=torch.bool, device="cuda")
    for turn in range(launches):
        static.copy_(case.x[turn % INPUTS])
        y.fill_(torch.nan)
        captured.replay()
        flags[turn] = case.is_wrong(y, turn % INPUTS)
    torch.cuda.synchronize()
    return _first(flags, launches, "are wrong")


class Perplexity:
    """The shipped model's held-out perplexity, patched under a fault, beside its own."""

    def __init__(self, tokens: int = 8192, length: int = 512, device: str = "cuda") -> None:
        from flashnorm_triton import demo_model

        ids = demo_model.tokenizer()(demo_model.heldout_text())["input_ids"][: tokens + 1]
        self.text, self.length = torch.tensor(ids, device=device), length
        self.device, self.load = device, demo_model.load
        self.stock = self.of(self.load(device=device))

    @torch.no_grad()
    def of(self, model: Any) -> float:
        """exp of the mean loss over the windows."""
        from flashnorm_triton.demo.accuracy import windows

        total, count = 0.0, 0
        for inputs, targets in windows(self.text, self.length):
            logits = model(inputs[None], use_cache=False).logits[0].double()
            loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
            total, count = total + float(loss), count + len(targets)
        return math.exp(total / count) if math.isfinite(total) else math.inf

    def __call__(self) -> Seen:
        from flashnorm_triton import patch

        model = self.load(device=self.device)
        with torch.no_grad():
            patch(model, level="norm", revertible=False)
            found = self.of(model)
        forwards = -(-(len(self.text) - 1) // self.length)
        told = f"perplexity {found:.4f}, stock {self.stock:.4f}"
        return Seen(forwards, not found / self.stock <= PERPLEXITY_RATIO, told)


def lint(fault: Fault, faulty: bool) -> Seen:
    """The buffer-depth lint over the kernels of the plan, compiled for sm_90; nothing runs."""
    from flashnorm_triton.tuning import aot
    from flashnorm_triton.tuning import lint as rules

    found, units = [], list(_units(fault, faulty))
    for one in units:
        compiled = aot.compile_unit(one, "sm90")
        found += [str(finding) for finding in rules.check(compiled.ttgir, compiled.assembly)]
    told = found[0].splitlines()[0] if found else f"{len(units)} kernels pass"
    return Seen(0, bool(found), told[:200])


def _units(fault: Fault, faulty: bool) -> Iterator[Any]:
    plan = fault.plan if faulty else fault.healthy_plan or fault.plan
    m, n, k = SIZES[plan.form]
    if plan.form == "tiles":
        import racing_kernel

        name = f"racing_pointer-w{plan.num_warps}s{plan.num_stages}"
        yield next(u for u in racing_kernel.compile_units() if u.name == name)
        return
    family = launch.FAMILIES[plan.form](plan, Problem("bfloat16", m, n, k), k)
    if plan.form == "two_streams":
        yield family.scale.unit("scale")
        yield family.stats.kernel.unit("statistics", "bfloat16")
    else:
        yield family.kernel.unit("kernel", "bfloat16", ("sm90",))


RUN = {"unit": unit, "bits": bits, "float64": float64, "delay": delay, "graph": graph}


class Looker:
    """Puts an instrument to a fault; what takes long to prepare is prepared once."""

    def __init__(self, launches: int) -> None:
        self.launches = launches
        self._perplexity: Perplexity | None = None

    def __call__(self, instrument: str, fault: Fault, faulty: bool) -> Seen:
        with warnings.catch_warnings():
            # A plan that failed and gave way to another would be seen by nothing.
            warnings.filterwarnings("error", "flashnorm_triton: plan", RuntimeWarning)
            return self._look(instrument, fault, faulty)

    def _look(self, instrument: str, fault: Fault, faulty: bool) -> Seen:
        if instrument == "lint":
            return lint(fault, faulty)
        if instrument == "perplexity":
            return self._perplexity()
        return RUN[instrument](Case(fault), self.launches)

    def prepare(self, instrument: str) -> None:
        """To be called before a fault is planted."""
        if instrument == "perplexity" and self._perplexity is None:
            self._perplexity = Perplexity()


INSTRUMENTS = (*RUN, "perplexity", "lint")


def applies(fault: Fault, instrument: str) -> str | None:
    """Why an instrument has nothing to say of a fault here; None when it has."""
    if instrument == "lint":
        return "no kernel of ours" if fault.plan.form == "reference" else None
    if fault.where != "any" and not torch.cuda.is_available():
        return "needs a GPU"
    m, n, k = SIZES[fault.plan.form]
    if not serves(fault.plan, Problem("bfloat16", m, n, k), torch.cuda.is_available()):
        return "its plan does not run on this GPU"
    return None
