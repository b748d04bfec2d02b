"""A GPU made of arithmetic for the tuner's tests: a made-up clock, and verdicts as one likes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from flashnorm_triton.plans import Device, Plan, Problem
from flashnorm_triton.tables import Gpu
from flashnorm_triton.tuning.build import Built, Job, Target
from flashnorm_triton.tuning.validate import Verdict

GOOD = Verdict(None, 0.0016, 0.0021)


class FakeMachine:
    """``us`` gives a plan's microseconds for a problem; ``verdict`` what its check finds (it may
    raise). ``events`` tells what was done, in order. Every replay slows the clock by ``drift``."""

    gpu = Gpu("NVIDIA H200", 132, 90)
    device = Device("cuda", 90, 132, gluon=True)
    target = Target("cuda", 90, 32)
    rebuilt = 0

    def __init__(
        self,
        us: Callable[[Problem, Plan], float],
        verdict: Callable[[Problem, Plan], Verdict] = lambda problem, plan: GOOD,
        drift: float = 0.0,
    ) -> None:
        self.us, self.verdict, self.drift = us, verdict, drift
        self.backend = self
        self.events: list[tuple[str, Plan]] = []
        self.opened: list[Problem] = []
        self.broken = False
        self.replays = 0
        self.now = 0.0

    def open(self, problem: Problem) -> FakeSession:
        self.opened.append(problem)
        return FakeSession(self, problem)

    def alive(self) -> bool:
        return not self.broken

    def clock(self) -> float:
        return self.now

    # measure.Backend

    def capture(self, fn, calls, rotations):
        plan, us = fn(0)
        self.events.append(("capture", plan))
        return plan, us * calls

    def time_ms(self, handles):
        times = []
        for plan, us in handles:
            self.replays += 1
            self.events.append(("time", plan))
            times.append(us * (1 + self.drift * self.replays) / 1e3)
            self.now += times[-1] / 1e3
        return times


class FakeSession:
    rotations = 4

    def __init__(self, machine: FakeMachine, problem: Problem) -> None:
        self.machine, self.problem = machine, problem

    def verify(self, plan: Plan, launches: int) -> Verdict:
        self.machine.events.append(("verify", plan))
        return self.machine.verdict(self.problem, plan)

    def call(self, plan: Plan) -> Callable[[int], tuple[Plan, float]]:
        return lambda i: (plan, self.machine.us(self.problem, plan))


class FakeCompiler:
    """Answers at once with what ``built`` says of a plan."""

    def __init__(self, built: Callable[[Plan], Built] = lambda plan: Built()) -> None:
        self.built = built
        self.jobs: list[Job] = []
        self.closed = False

    def submit(self, job: Job) -> Future:
        self.jobs.append(job)
        future: Future = Future()
        future.set_result(self.built(job.plan))
        return future

    def close(self) -> None:
        self.closed = True
