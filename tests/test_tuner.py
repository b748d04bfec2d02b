"""The tuning loop on a made-up machine: what is chosen, refused, stored and taken up again."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace

import pytest
import torch
from fake_machine import GOOD, FakeCompiler, FakeMachine

from flashnorm_triton import atomic, tables
from flashnorm_triton.plans import UNFUSED, Plan, Problem, choose
from flashnorm_triton.tuning import build, run, space
from flashnorm_triton.tuning.tuner import Tuner
from flashnorm_triton.tuning.validate import Verdict

PROBLEM = Problem("bfloat16", 16, 3072, 2048)
PROBLEMS = tuple(replace(PROBLEM, m=m) for m in (1, 2, 4, 8, 16))
HEURISTIC = choose(PROBLEM, FakeMachine.device)
FAST = Plan("single_pass", "hopper_swap", 16, 64, 128, 4, 6, in_flight=1)
OTHER = Plan("single_pass", "hopper_swap", 16, 128, 64, 4, 4, max_registers=128)
LISTED = (HEURISTIC, UNFUSED, FAST, OTHER)


@pytest.fixture(autouse=True)
def _no_memory():
    tables.forget()
    yield
    tables.forget()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "table.json"


def costs(**us: float):
    """Microseconds by name; what is not named costs 10."""
    by_plan = {HEURISTIC: us.get("heuristic", 10.0), UNFUSED: us.get("unfused", 12.0)}
    by_plan |= {FAST: us.get("fast", 10.0), OTHER: us.get("other", 10.0)}
    return lambda problem, plan: by_plan.get(plan, 10.0)


def make(path, machine, compiler=None, listed=LISTED, **options) -> Tuner:
    return Tuner(
        machine,
        compiler or FakeCompiler(),
        path,
        clock=machine.clock,
        candidates=lambda problem, device, effort: listed,
        **options,
    )


def tuned(path, machine, problem=PROBLEM, **options) -> tables.Entry:
    report = make(path, machine, **options).tune([problem])
    assert not report.failed, report.failed
    return tables.read(path).entries[tables.key_of(problem)]


# The decision


def test_the_fastest_is_kept_when_it_clearly_beats_the_built_in_plan(path):
    entry = tuned(path, FakeMachine(costs(fast=9.0)))
    assert entry.plan == FAST
    assert entry.us == pytest.approx(9.0) and entry.heuristic_us == pytest.approx(10.0)
    assert entry.baseline_us == pytest.approx(12.0)
    assert (entry.rel_err, entry.rel_err_stock) == (GOOD.rel_err, GOOD.rel_err_stock)
    assert entry.run.kernel_hash and entry.run.effort == "quick"


def test_the_built_in_plan_stays_unless_clearly_beaten(path):
    assert tuned(path, FakeMachine(costs(fast=9.85))).plan == HEURISTIC  # 1.5 % faster
    path.unlink()
    assert tuned(path, FakeMachine(costs(fast=9.7))).plan == FAST  # 3 % faster


def test_nothing_slower_than_the_unfused_pair_is_kept(path):
    """Also where the unfused pair is too little faster to count as a clear winner."""
    assert tuned(path, FakeMachine(costs(unfused=9.9))).plan == UNFUSED
    path.unlink()
    assert tuned(path, FakeMachine(costs(unfused=10.0))).plan == HEURISTIC


def test_a_clock_that_slows_down_all_the_while_does_not_change_the_winner(path):
    machine = FakeMachine(costs(fast=9.5), drift=0.02)
    assert tuned(path, machine).plan == FAST
    path.unlink()
    assert tuned(path, FakeMachine(costs(fast=9.95), drift=0.02)).plan == HEURISTIC


def test_the_leaders_are_timed_again_against_the_built_in_plan_and_the_unfused_pair(path):
    slow = [replace(OTHER, num_stages=stages) for stages in range(1, 9)]
    machine = FakeMachine(lambda problem, plan: 9.0 if plan == FAST else 20.0 + plan.num_stages)
    tuned(path, machine, listed=(HEURISTIC, UNFUSED, FAST, *slow))
    last = {plan for kind, plan in machine.events[-40:] if kind == "time"}
    assert {FAST, HEURISTIC, UNFUSED} <= last and len(last) <= 5


# What may not be timed


def times_of(machine, plan):
    return sum(event == ("time", plan) for event in machine.events)


def test_every_candidate_is_checked_before_it_is_timed(path):
    machine = FakeMachine(costs())
    tuned(path, machine)
    for plan in LISTED:
        mine = [kind for kind, other in machine.events if other == plan]
        assert mine[0] == "verify" and "time" in mine


@pytest.mark.parametrize(
    ("built", "reason"),
    [
        (build.Built(findings=("f:12: refilled: the copy overwrites a slot",)), "lint: "),
        (build.Built(error="CompilationError: at 3:1"), "does not compile: CompilationError"),
        (build.Built(error="the compiler crashed its process (exit status -6)"), "exit status -6"),
        (build.Built(shared_bytes=240_000), "too much shared memory"),
    ],
)
def test_a_badly_compiled_candidate_is_never_launched(path, built, reason):
    machine = FakeMachine(costs(fast=1.0))
    compiler = FakeCompiler(lambda plan: built if plan == FAST else build.Built())
    work = make(path, machine, compiler)
    report = work.tune([PROBLEM])
    assert ("verify", FAST) not in machine.events and times_of(machine, FAST) == 0
    assert [(plan, reason in why) for _, plan, why in report.rejected] == [(FAST, True)]
    assert report.done[tables.key_of(PROBLEM)].plan == HEURISTIC
    assert reason in report.summary()


def test_a_wrong_candidate_is_never_timed(path):
    wrong = Verdict("other bits in 3 of 24 repeated launches", 0.0016, 0.0021)
    machine = FakeMachine(costs(fast=1.0), lambda p, plan: wrong if plan == FAST else GOOD)
    report = make(path, machine).tune([PROBLEM])
    assert times_of(machine, FAST) == 0
    assert report.rejected == [(PROBLEM, FAST, f"wrong: {wrong.reason}")]
    assert tables.read(path).entries[tables.key_of(PROBLEM)].plan == HEURISTIC


def test_a_built_in_plan_that_fails_its_check_loses_its_place(path):
    wrong = Verdict("relative error 8.0e-03", 0.008, 0.0021)
    machine = FakeMachine(costs(fast=11.9), lambda p, plan: wrong if plan == HEURISTIC else GOOD)
    entry = tuned(path, machine, listed=(HEURISTIC, UNFUSED, FAST))
    assert entry.plan == UNFUSED  # FAST is less than 2 % faster
    assert entry.heuristic_us == entry.baseline_us


def test_a_candidate_that_fails_at_launch_is_left_out(path):
    def verdict(problem, plan):
        if plan == FAST:
            raise RuntimeError("out of resource: shared memory\nmore")
        return GOOD

    report = make(path, FakeMachine(costs(), verdict)).tune([PROBLEM])
    assert [why for *_, why in report.rejected] == ["does not run: out of resource: shared memory"]
    assert len(report.done) == 1


def test_a_cell_that_does_not_fit_the_memory_fails_alone(path):
    def verdict(problem, plan):
        if problem.m == 4:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return GOOD

    report = make(path, FakeMachine(costs(), verdict)).tune(PROBLEMS)
    assert [(p.m, why) for p, why in report.failed] == [(4, "not enough GPU memory")]
    assert len(report.done) == 4


# Stopping and going on


def test_an_interrupt_keeps_what_is_finished_and_a_new_run_does_the_rest(path):
    def verdict(problem, plan):
        if problem.m == 8:
            raise KeyboardInterrupt
        return GOOD

    compiler = FakeCompiler()
    report = make(path, FakeMachine(costs(fast=9.0), verdict), compiler).tune(PROBLEMS)
    assert report.interrupted and compiler.closed
    assert sorted(key.m for key in tables.read(path).entries) == [1, 2, 4]

    again = FakeMachine(costs(fast=9.0))
    report = make(path, again).tune(PROBLEMS)
    assert [problem.m for problem in again.opened] == [8, 16]
    assert report.skipped == 3 and not report.interrupted
    assert sorted(key.m for key in tables.read(path).entries) == [1, 2, 4, 8, 16]

    third = FakeMachine(costs())
    make(path, third).tune(PROBLEMS)
    assert third.opened == []


def test_a_cell_is_stored_within_a_second_of_its_end(path):
    """A run that is killed outright loses no more than that."""
    stored = []

    class Watching(FakeMachine):
        def open(self, problem):
            stored.append(len(tables.read(path).entries))
            self.now += 1.0
            return super().open(problem)

    make(path, Watching(costs())).tune(PROBLEMS)
    assert stored == [0, 1, 2, 3, 4]


def changed_run(path, **changed):
    table = tables.read(path)
    for key, entry in table.entries.items():
        table.entries[key] = replace(entry, run=replace(entry.run, **changed))
    tables.write(path, table)


@pytest.mark.parametrize(
    "changed", [{"kernel_hash": "0" * 40}, {"triton": "3.5.0"}, {"torch": "2.10.0"}]
)
def test_cells_of_other_kernels_or_versions_are_tuned_again_with_their_plan_as_candidate(
    path, changed
):
    special = replace(OTHER, num_stages=5)
    tuned(
        path,
        FakeMachine(lambda p, plan: 5.0 if plan == special else 10.0),
        listed=(*LISTED, special),
    )
    changed_run(path, **changed)
    machine = FakeMachine(lambda problem, plan: 5.0 if plan == special else 10.0)
    make(path, machine).tune([PROBLEM])
    assert ("verify", special) in machine.events
    entry = tables.read(path).entries[tables.key_of(PROBLEM)]
    assert entry.plan == special and all(
        getattr(entry.run, name) != value for name, value in changed.items()
    )


def test_full_effort_redoes_quick_cells_and_not_the_other_way_round(path):
    tuned(path, FakeMachine(costs()))
    machine = FakeMachine(costs())
    make(path, machine, effort="full").tune([PROBLEM])
    assert machine.opened == [PROBLEM]
    machine = FakeMachine(costs())
    make(path, machine, effort="quick").tune([PROBLEM])
    assert machine.opened == []


def test_since_tunes_again_what_is_older(path):
    tuned(path, FakeMachine(costs()))
    changed_run(path, date="2026-01-31T12:00:00Z")
    for since, opened in (("2026-01-31T12:00:00Z", 0), ("2026-01-31T12:00:01Z", 1)):
        machine = FakeMachine(costs())
        make(path, machine, since=since).tune([PROBLEM])
        assert len(machine.opened) == opened


def test_a_plan_that_takes_the_gpu_down_ends_the_run_and_is_not_tried_again(path):
    machine = FakeMachine(costs())

    def verdict(problem, plan):
        if plan == FAST and problem.m == 4:
            machine.broken = True
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return GOOD

    machine.verdict = verdict
    report = make(path, machine).tune(PROBLEMS)
    assert "illegal memory access" in report.lost and "hopper_swap 16x64x128" in report.lost
    assert sorted(key.m for key in tables.read(path).entries) == [1, 2]
    assert len(tables.read(path).refused) == 1

    again = FakeMachine(costs())
    report = make(path, again).tune(PROBLEMS)
    assert report.lost is None and len(report.done) == 3
    assert ("verify", FAST) not in again.events
    # Changed kernels get a new chance.
    renewed = make(path, FakeMachine(costs()))
    renewed.run = replace(renewed.run, kernel_hash="1" * 40)
    renewed.tune(PROBLEMS)
    assert ("verify", FAST) in renewed.machine.events


# The table's file


def test_a_table_that_cannot_be_written_is_told_before_anything_is_measured(path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic.tempfile, "mkstemp", full)
    machine, compiler = FakeMachine(costs()), FakeCompiler()
    with pytest.raises(tables.TableError, match="No space left.*FLASHNORM_CACHE_DIR"):
        make(path, machine, compiler).tune(PROBLEMS)
    assert machine.events == [] and compiler.jobs == [] and machine.opened == []


def test_a_disk_that_fills_up_and_is_freed_loses_nothing(path, monkeypatch):
    class Slow(FakeMachine):
        def open(self, problem):
            self.now += 2.0  # every cell is stored by itself
            full = problem.m in (2, 4, 8)
            monkeypatch.setattr(atomic.os, "fsync", fails if full else works)
            return super().open(problem)

    works = os.fsync

    def fails(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    report = make(path, Slow(costs())).tune(PROBLEMS)
    assert report.unsaved is None and len(tables.read(path).entries) == 5


def test_a_disk_that_stays_full_is_told_at_the_end(path, monkeypatch):
    machine = FakeMachine(costs())
    work = make(path, machine)
    opened = machine.open

    def then_full(problem):
        def fails(_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(atomic.os, "fsync", fails)
        return opened(problem)

    machine.open = then_full
    report = work.tune(PROBLEMS)
    assert "5 cells are not stored" in report.unsaved and report.unsaved in report.summary()
    monkeypatch.undo()
    assert tables.read(path).entries == {}


def test_two_tuners_of_different_gpus_of_one_kind_fill_one_table(path):
    """What the other run stores meanwhile stays, also where this run had stored the cell before."""
    first = FakeMachine(costs(fast=9.0))
    opened = first.open

    def meanwhile(problem):
        first.now += 1.0
        if problem.m == 4:
            other = (replace(PROBLEM, n=6144), PROBLEMS[0])
            make(path, FakeMachine(costs(other=5.0)), since="~").tune(other)
        return opened(problem)

    first.open = meanwhile
    make(path, first).tune(PROBLEMS)
    entries = tables.read(path).entries
    assert len(entries) == 6
    assert entries[tables.key_of(PROBLEMS[0])].plan == OTHER
    assert entries[tables.key_of(PROBLEMS[1])].plan == FAST


def test_one_gpu_has_one_tuner(path):
    with (
        run.only_tuner(path, "GPU-1"),
        run.only_tuner(path, "GPU-2"),
        pytest.raises(tables.TableError, match="another process is tuning this GPU"),
        run.only_tuner(path, "GPU-1"),
    ):
        pytest.fail("two tuners on one GPU")
    with run.only_tuner(path, "GPU-1"):
        pass


def test_the_stored_table_is_what_lookups_use(path, monkeypatch):
    monkeypatch.setenv("FLASHNORM_CACHE_DIR", str(path.parent))
    place = tables.user_path(FakeMachine.gpu)
    make(place, FakeMachine(costs(fast=9.0))).tune([PROBLEM])
    found = tables.choice(PROBLEM, FakeMachine.device, "NVIDIA H200")
    assert (found.plan, found.source) == (FAST, "user")


# Compiles


def test_a_kernel_is_compiled_once_for_all_row_counts(path):
    pool_jobs = []

    class Pool(build.Pool):
        def __init__(self):
            super().__init__(0)

        def submit(self, job):
            future = super().submit(job)
            if not future.done():
                pool_jobs.append(job)
                future.set_result(build.Built())
            return future

    make(path, FakeMachine(costs()), Pool()).tune(PROBLEMS)
    assert len(pool_jobs) == len(LISTED)


def test_what_is_told(path):
    lines, bests, ended = [], [], []

    class Recorder:
        def begin(self, cost, cells):
            self.cost, self.cells = cost, cells

        def best(self, text):
            bests.append(text)

        def cell(self, cost, text):
            self.cost -= cost
            lines.append(text)

        def note(self, text):
            lines.append(text)

        def end(self):
            ended.append(True)

    recorder = Recorder()
    make(path, FakeMachine(costs(fast=9.0)), progress=recorder).tune(PROBLEMS)
    assert recorder.cells == 5 and len(lines) == 5 and ended == [True]
    assert recorder.cost == pytest.approx(0.0, abs=1e-9)
    assert any("hopper_swap 16x64x128 w4 s6 in_flight=1 9.00 µs" in text for text in bests)
    assert "2048→3072 bfloat16 M=1" in lines[0] and "1.33x unfused" in lines[0]


def test_the_space_itself_goes_through_the_loop(path):
    """The real candidates: every quick cell of a layer ends with a plan that fits."""
    machine = FakeMachine(lambda problem, plan: 10.0 + len(json.dumps(plan.as_dict())) % 7)
    problems = [replace(PROBLEM, m=1 << power) for power in range(14)]
    report = Tuner(machine, FakeCompiler(), path, clock=machine.clock).tune(problems)
    assert len(report.done) == 14 and not report.failed
    for key, entry in report.done.items():
        listed = space.candidates(replace(PROBLEM, m=key.m), machine.device)
        assert entry.plan in listed
