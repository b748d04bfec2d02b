"""What the tuner spares itself: plans known from the other half type or from older kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_machine import GOOD, FakeCompiler, FakeMachine

from flashnorm_triton import tables
from flashnorm_triton.plans import UNFUSED, Plan, Problem, choose
from flashnorm_triton.tuning.tuner import Tuner

PROBLEM = Problem("bfloat16", 16, 3072, 2048)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "table.json"


MANY = (
    choose(PROBLEM, FakeMachine.device), UNFUSED,
    *(Plan("single_pass", "hopper_swap", 16, 64, 128, 4, stages) for stages in range(3, 12)),
)  # fmt: skip
BEST = MANY[-1]


def make(path, machine, **options) -> Tuner:
    return Tuner(
        machine, FakeCompiler(), path, candidates=lambda problem, device, effort: MANY,
        **{"clock": machine.clock, **options},
    )  # fmt: skip


def changed_run(path, **changed):
    table = tables.read(path)
    for key, entry in table.entries.items():
        table.entries[key] = replace(entry, run=replace(entry.run, **changed))
    tables.write(path, table)


def verified(machine, dtype: str) -> list[Plan]:
    """The plans that were checked, in the order of cells, for one dtype."""
    return [plan for (name, plan), at in machine.checked if name == "verify" and at == dtype]


class Noting(FakeMachine):
    """Notes with every check of which dtype it was."""

    def __init__(self, us) -> None:
        self.checked: list = []
        super().__init__(us, self.note)

    def note(self, problem, plan):
        self.checked.append((("verify", plan), problem.dtype))
        return GOOD


def best_is(plan_wanted):
    return Noting(lambda problem, plan: 5.0 if plan == plan_wanted else 10.0)


HALVES = (replace(PROBLEM, dtype="float16"), PROBLEM)


def test_float16_begins_with_the_plan_of_bfloat16(path):
    machine = best_is(BEST)
    make(path, machine).tune(HALVES)
    assert [problem.dtype for problem in machine.opened] == ["bfloat16", "float16"]
    assert verified(machine, "bfloat16") == list(MANY)
    assert verified(machine, "float16") == [*MANY[:5], BEST]
    entries = tables.read(path).entries
    assert [entries[tables.key_of(problem)].plan for problem in HALVES] == [BEST, BEST]


@pytest.mark.parametrize("why", ["full effort", "other kernels", "nothing known"])
def test_float16_is_tuned_in_full_where_that_is_asked_or_bfloat16_says_nothing(path, why):
    if why != "nothing known":
        make(path, best_is(BEST)).tune([PROBLEM])
    if why == "other kernels":
        changed_run(path, kernel_hash="0" * 40)
    machine = best_is(BEST)
    effort = "full" if why == "full effort" else "quick"
    make(path, machine, effort=effort).tune(HALVES[:1])
    assert set(verified(machine, "float16")) == set(MANY)


def test_refresh_times_the_plan_of_older_kernels_beside_few_others(path):
    make(path, best_is(BEST)).tune([PROBLEM])
    changed_run(path, kernel_hash="0" * 40)
    new = replace(PROBLEM, m=64)
    machine = best_is(BEST)
    make(path, machine, effort="refresh").tune([PROBLEM, new])
    # What the table lacks comes first, in full.
    assert machine.opened == [new, PROBLEM]
    assert verified(machine, "bfloat16") == [*MANY, *MANY[:5], BEST]
    entries = tables.read(path).entries
    efforts = {problem: entries[tables.key_of(problem)].run.effort for problem in (PROBLEM, new)}
    assert efforts == {PROBLEM: "refresh", new: "quick"}
    assert entries[tables.key_of(PROBLEM)].plan == BEST
    # A refreshed cell is not refreshed again, but tuned where more is asked.
    machine = best_is(BEST)
    make(path, machine, effort="refresh").tune([PROBLEM, new])
    assert machine.opened == []
    make(path, machine).tune([PROBLEM, new])
    assert machine.opened == [PROBLEM]


def test_no_cell_is_begun_when_the_time_is_up(path):
    machine = best_is(BEST)
    cells = [replace(PROBLEM, m=m) for m in (1, 2, 4)]
    report = make(path, machine, seconds=1e-9, clock=machine.clock).tune(cells)
    assert machine.opened == cells[:1] and report.left == 2 and len(report.done) == 1
    report = make(path, machine, seconds=1e9).tune(cells)
    assert report.left == 0 and len(report.done) == 2
