"""Compiling in worker processes: crashes, hangs, the cache key, and the racing form's lint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
import racing_family
from fake_machine import FakeMachine

from flashnorm_triton.plans import OVERLAP, UNFUSED, Device, Plan, Problem
from flashnorm_triton.tuning import build
from flashnorm_triton.tuning.build import Built, Job, Pool, Target
from flashnorm_triton.tuning.tuner import Tuner

SM90 = Target("cuda", 90, 32)
H200 = Device("cuda", 90, 132, gluon=True)
PROBLEM = Problem("bfloat16", 256, 512, 256)
GEMV = Plan("single_pass", "gemv", 1, 4, 256, 2, 1)

# A stand-in for a worker: quick to start, and it does what the plan's warps tell it to.
STUB = """
    import os, pickle, sys, time
    from types import SimpleNamespace
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        if job.plan.num_warps == 1:
            os.abort()
        if job.plan.num_warps == 2:
            time.sleep(600)
        if job.plan.num_warps == 8:
            sys.stderr.write("LLVM ERROR: out of registers"); sys.stderr.flush()
            os._exit(7)
        from flashnorm_triton.tuning.build import Built
        pickle.dump(Built(shared_bytes=os.getpid()), sys.stdout.buffer)
        sys.stdout.buffer.flush()
"""


def job(warps: int = 4, **problem: int) -> Job:
    plan = Plan("single_pass", "gemv", 1, 4, 256, warps, 1)
    return Job(plan, Problem("bfloat16", **{"m": 1, "n": 64, "k": 64, **problem}), H200, SM90)


@pytest.fixture
def pool():
    made = Pool(1, [sys.executable, "-c", textwrap.dedent(STUB)])
    yield made
    made.close()


def test_a_crash_costs_its_job_alone(pool):
    """The compiler aborts; the next jobs get a new worker."""
    before, crashed, loud, after = (
        pool.submit(job(warps, n=64 * (1 + i))) for i, warps in enumerate((4, 1, 8, 4))
    )
    first = before.result(60)
    assert first.error is None
    assert "exit status -6" in crashed.result(60).error
    assert "exit status 7" in loud.result(60).error and "out of registers" in loud.result(60).error
    last = after.result(60)
    assert last.error is None and last.shared_bytes != first.shared_bytes


def test_a_compile_that_does_not_end_is_ended(pool, monkeypatch):
    monkeypatch.setattr(build, "JOB_SECONDS", 1.0)
    hung, after = pool.submit(job(2)), pool.submit(job(4))
    assert "exit status -9" in hung.result(60).error
    assert after.result(60).error is None


def test_a_worker_that_cannot_start_fails_its_jobs():
    pool = Pool(1, ["/no/such/python"])
    try:
        assert "No such file" in pool.submit(job()).result(60).error
    finally:
        pool.close()


def test_the_same_kernel_is_built_once_whatever_the_rows(pool):
    assert pool.submit(job(m=1)) is pool.submit(job(m=16))
    assert pool.submit(job(m=1)) is not pool.submit(job(n=128))


def test_close_ends_the_workers_at_once(pool):
    first = pool.submit(job(4)).result(60).shared_bytes
    hung, waiting = pool.submit(job(2)), pool.submit(job(2, n=128))
    time.sleep(0.1)
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 10
    assert hung.result(1).error and waiting.cancelled()
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


@pytest.fixture(scope="module")
def real():
    """A real worker that also knows the racing form."""
    made = Pool(1, racing_family.WORKER)
    yield made
    made.close()


def built(pool: Pool, plan: Plan, problem: Problem = PROBLEM) -> Built:
    return pool.submit(Job(plan, problem, H200, SM90)).result(300)


def test_the_lint_finds_the_racing_form_in_what_a_worker_compiles(real):
    found = built(real, racing_family.RACING)
    assert found.error is None and found.findings
    assert any("refilled" in finding for finding in found.findings), found.findings
    assert built(real, racing_family.TAME).findings == ()


def test_the_tuner_rejects_the_racing_form_by_the_lint_alone(real, tmp_path):
    """Compiled and linted for real; the made-up GPU finds nothing wrong, and finds it fastest."""
    listed = (UNFUSED, racing_family.RACING, GEMV)
    machine = FakeMachine(lambda problem, plan: 1.0 if plan == racing_family.RACING else 10.0)
    report = Tuner(
        machine, _KeptOpen(real), tmp_path / "t.json", candidates=lambda *_: listed
    ).tune([PROBLEM])
    assert ("verify", racing_family.RACING) not in machine.events
    assert [(plan, why[:5]) for _, plan, why in report.rejected] == [
        (racing_family.RACING, "lint:")
    ]
    assert next(iter(report.done.values())).plan != racing_family.RACING
    # Without a pipeline the same kernel passes, and wins.
    listed = (UNFUSED, racing_family.TAME, GEMV)
    tame = FakeMachine(lambda problem, plan: 1.0 if plan == racing_family.TAME else 10.0)
    report = Tuner(tame, _KeptOpen(real), tmp_path / "u.json", candidates=lambda *_: listed).tune(
        [PROBLEM]
    )
    assert next(iter(report.done.values())).plan == racing_family.TAME


class _KeptOpen:
    """The module's pool, which one test must not close for the next."""

    def __init__(self, pool: Pool) -> None:
        self.submit = pool.submit

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    "plan",
    [
        UNFUSED,
        OVERLAP,
        Plan("single_pass", "hopper_swap", 16, 64, 64, 4, 3, in_flight=1),
        Plan("single_pass", "hopper_swap", 16, 64, 64, 4, 3, split_k=2),
        Plan("stats_then_gemm", "hopper_rows", 128, 64, 64, 4, 3, squares="given"),
        Plan("stats_then_gemm", "scaled_gemm", 64, 128, 64, 4, 3),
    ],
    ids=lambda plan: f"{plan.form}-{plan.split_k}",
)
def test_every_family_builds_without_a_gpu(real, plan):
    found = built(real, plan)
    assert found.error is None and found.findings == () and found.shared_bytes > 0


def test_a_plan_that_its_own_family_refuses_is_an_answer(real):
    swap = Plan("single_pass", "hopper_swap", 16, 64, 64, 4, 3)
    refused = built(real, swap, Problem("bfloat16", 16, 512, 256, has_gain=True))
    assert refused.error.startswith("ValueError") and "gain" in refused.error


def test_a_worker_shares_what_was_assigned_in_this_process(tmp_path, monkeypatch):
    """torch's compiler moves Triton's cache: a worker must put its results where we look."""
    from triton import knobs

    started: list[dict[str, str]] = []

    def popen(command: list[str], env: dict[str, str], **_: object) -> None:
        started.append(env)
        raise OSError("not to be started")

    monkeypatch.setattr(build.subprocess, "Popen", popen)
    with knobs.cache.scope(), knobs.nvidia.scope():
        knobs.cache.dir, knobs.nvidia.libdevice_path = str(tmp_path), "/a/libdevice.bc"
        for name in ("TRITON_CACHE_DIR", "TRITON_LIBDEVICE_PATH"):
            os.environ.pop(name, None)  # the scope puts back what was there
        with pytest.raises(OSError, match="not to be started"):
            build._Worker(build.WORKER)
    assert started[0]["TRITON_CACHE_DIR"] == str(tmp_path)
    assert started[0]["TRITON_LIBDEVICE_PATH"] == "/a/libdevice.bc"


def test_a_launch_finds_what_a_worker_compiled():
    """The launch itself (compiled.py) asks for the cache entries that ``build`` made.

    No GPU is there, so it is stopped where the binary would be loaded; by then Triton's cache has
    been asked. A launch with other compile-time arguments misses.
    """
    program = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import json, torch
        from dataclasses import replace
        from test_build import GEMV, H200, PROBLEM, SM90, build
        from triton import knobs
        from triton.compiler.compiler import CompiledKernel
        from triton.runtime import driver
        from flashnorm_triton import launch
        from flashnorm_triton.plans import Plan

        class Loading(Exception):
            pass

        def stop(kernel):
            raise Loading

        def launched(plan, problem):
            \"\"\"Whether a launch of other rows finds every kernel in the cache.\"\"\"
            hits = []
            knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
            driver.set_active(build._NoGpu(SM90))
            x, w = (torch.empty(rows, problem.k, dtype=torch.bfloat16) for rows in (48, problem.n))
            family = launch.FAMILIES[plan.form](plan, replace(problem, m=48), problem.k)
            family.kernel.fn.device_caches.clear()  # what this process remembers
            try:
                family.bind(launch.Geometry(48, problem.k, (48,), 0), 1e-5)(x, w, None, None)
            except Loading:
                return hits
            raise AssertionError("the launch did not come to the loading of its binary")

        swap = Plan("single_pass", "hopper_swap", 16, 64, 64, 4, 3, max_registers=128)
        other = replace(PROBLEM, n=PROBLEM.n + 64)
        for plan in (GEMV, swap):
            assert build.build(build.Job(plan, PROBLEM, H200, SM90)).error is None
        CompiledKernel._init_handles = stop
        found = [launched(GEMV, PROBLEM), launched(swap, PROBLEM), launched(GEMV, other)]
        print(json.dumps(found))
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as cache:
        environment["TRITON_CACHE_DIR"] = cache
        ended = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == [[True], [True], [False]]
