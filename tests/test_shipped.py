"""Every shipped plan's kernels pass the buffer-depth lint, and the walk leaves none out.

Compiles for sm_90 as far as the TTGIR, without a GPU, on the Triton that is installed; the same
command serves another one: ``python -m flashnorm_triton.tuning.shipped``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aot_runs import TESTS

from flashnorm_triton import limits, plans
from flashnorm_triton.plans import WITHOUT_BLOCKS
from flashnorm_triton.tuning import shipped

pytest.importorskip("triton")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=900
    )


def test_no_shipped_kernel_has_a_finding(tmp_path: Path, capsys: Any) -> None:
    done = run(
        "-m", "flashnorm_triton.tuning.shipped", "--quick", "--json", str(tmp_path / "r.json")
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "r.json").read_text())
    with capsys.disabled():
        print(f"\n{done.stdout.splitlines()[-1]}")
    assert report["refused"] == 0 and report["kernels"] >= report["variants"] >= 180
    assert all(row["kernels"] and not row["findings"] for row in report["records"])


def test_the_walk_meets_every_plan_of_every_table_and_choice() -> None:
    walked = {job.plan for job in shipped.variants(shipped.everything())}
    stored = {plan for _, plan in shipped.entries()}
    assert len(stored) > 20
    for plan in {*stored, *plans.other_plans(), *(plan for _, plan in plans.shipped_plans())}:
        assert plan in walked or plan.form in WITHOUT_BLOCKS, plan
    quick = {job.plan for job in shipped.variants(shipped.everything(), quick=True)}
    assert {plan for plan in walked if plan.form != "gemv"} <= quick
    for job in shipped.variants(shipped.everything(), quick=True):
        assert limits.unfit(job.plan, job.problem, shipped.HOPPER) is None


def test_every_epilogue_that_a_tensor_core_form_serves_is_met() -> None:
    met = {(job.plan.form, job.problem.epilogue) for job in shipped.variants(shipped.everything())}
    for form in ("hopper_swap", "hopper_rows", "tiles", "scaled_gemm"):
        epilogues = {epilogue for name, epilogue in met if name == form}
        assert {"", "gelu_tanh", "residual"} <= epilogues, form
    assert ("hopper_swap", "silu+gated+residual") in met and ("hopper_rows", "centred") in met


def test_the_racing_form_is_refused() -> None:
    """In the place of the tiles: a plan of the shape that raced, and its tame twin."""
    script = """
import json, racing_family
from flashnorm_triton.plans import Problem
from flashnorm_triton.tuning import shipped
from flashnorm_triton.tuning.build import Job
racing_family.register()
problem = Problem("bfloat16", 256, 6144, 4096)
for plan in (racing_family.RACING, racing_family.TAME):
    row = shipped.check(Job(plan, problem, shipped.HOPPER, shipped.SM90))
    assert row["error"] is None, row
    print(json.dumps(row["findings"]))
"""
    done = run("-c", script)
    assert done.returncode == 0, done.stderr[-2000:]
    racing, tame = map(json.loads, done.stdout.splitlines())
    assert len(racing) == 2 and "shallow" in "".join(racing) and tame == []
