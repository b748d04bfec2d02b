"""Plans: what the heuristic picks, that the list of shipped plans is whole, and what a plan is."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields, replace
from types import SimpleNamespace

import pytest
import torch

from flashnorm_triton import plans, runtime, tables
from flashnorm_triton.plans import TORCH, UNFUSED, Device, Plan, Problem, bucket, choose

H200 = Device("cuda", capability=90, sm_count=132, gluon=True)
A100 = Device("cuda", capability=80, sm_count=108)
B200 = Device("cuda", capability=100, sm_count=148)
MI300 = Device("hip", sm_count=304)
SHAPES = ((960, 576), (3072, 576), (3072, 2048), (16384, 2048), (6144, 4096), (28672, 4096))
DTYPES = ("bfloat16", "float16", "float32")
SHARED_BYTES = 227 * 1024  # compute capability 9.0, a block's most
GLUON = ("hopper_swap", "hopper_rows")
DESCRIPTORS = (*GLUON, "scaled_gemm")


def problems(**fixed: object) -> list[Problem]:
    """A grid of problems: the measured shapes and others beside every threshold."""
    shapes = [*SHAPES, (1024, 1024), (4224, 4096), (4232, 512), (12672, 8192), (16896, 1024),
              (17000, 768), (20000, 16384), (128256, 2048), (7, 4096), (2560, 960),
              (2564, 960), (16384, 53248), (10240, 5120), (960, 20000)]  # fmt: skip
    rows = [1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 64, 65, 128, 129, 256, 512, 1024, 2048, 4096, 10**5]
    return [
        Problem(**({"dtype": dtype, "m": m, "n": n, "k": k, "has_gain": gain, "tma": tma} | fixed))
        for n, k in shapes
        for m in rows
        for dtype in DTYPES
        for gain in (False, True)
        for tma in (True, False)
    ]


def element_size(problem: Problem) -> int:
    return torch.finfo(getattr(torch, problem.dtype)).bits // 8


# Buckets


def test_bucket_is_the_next_power_of_two():
    assert [bucket(m) for m in (0, 1, 2, 3, 4, 5, 8, 9, 128, 129)] == [
        0, 1, 2, 4, 4, 8, 8, 16, 128, 256,
    ]  # fmt: skip
    assert bucket(8192) == bucket(8193) == bucket(10**9) == 8192


def test_a_bucket_has_one_plan():
    for m in range(1, 300):
        for n, k in SHAPES:
            problem = Problem("bfloat16", m, n, k)
            assert choose(problem, H200) == choose(replace(problem, m=bucket(m)), H200)


# Choices


@pytest.mark.parametrize("m", [1, 7, 4096])
def test_cpu_and_float64_take_torch(m):
    problem = Problem("float32", m, 960, 576)
    assert choose(problem, Device("cpu")) == TORCH
    for device in (H200, A100, MI300):
        assert choose(replace(problem, dtype="float64"), device) == TORCH


@pytest.mark.parametrize("device", [H200, A100, B200, MI300], ids=lambda d: f"{d.capability}")
def test_one_row_takes_a_gemv_of_one_row(device):
    for problem in problems(m=1):
        plan = choose(problem, device)
        assert (plan.strategy, plan.form, plan.block_m) == ("single_pass", "gemv", 1)


def test_gluon_and_descriptors_only_where_they_can_run():
    for problem in problems():
        for device in (H200, A100, B200, MI300, replace(H200, gluon=False)):
            plan = choose(problem, device)
            if plan.form in GLUON:
                assert device.gluon
            if plan.form in DESCRIPTORS:
                assert problem.tma and not problem.has_gain
                assert problem.dtype in ("bfloat16", "float16")
            if plan.form == "hopper_rows":
                assert problem.n % 8 == 0


def test_fp16_tiles_never_multiply_by_a_gain():
    for device in (H200, A100, MI300):
        for problem in problems(dtype="float16", has_gain=True):
            assert choose(problem, device).form != "tiles"


def test_hopper_tiles_serve_some_rows():
    for n, k in SHAPES:
        for m in (16, 32, 64):
            assert choose(Problem("bfloat16", m, n, k), H200).form == "hopper_swap"


def test_unfused_is_what_is_left():
    assert (UNFUSED.strategy, UNFUSED.form) == ("unfused", "library")
    for problem in (
        Problem("bfloat16", 512, 6144, 4096),
        Problem("float32", 64, 960, 576),
        Problem("bfloat16", 4096, 960, 576, has_gain=True),
        Problem("bfloat16", 16, 6144, 4096, tma=False),
    ):
        assert choose(problem, H200) == UNFUSED
    assert choose(Problem("bfloat16", 64, 6144, 4096), A100) == UNFUSED


def test_a_choice_is_well_formed():
    for device in (H200, A100, B200, MI300, Device("cpu")):
        for problem in problems():
            plan = choose(problem, device)
            assert plan.strategy in plans.STRATEGIES and plan.form in plans.FORMS
            if plan.form in ("library", "reference"):
                continue
            for size in (plan.block_m, plan.block_n, plan.block_k, plan.num_warps):
                assert size > 0 and size & (size - 1) == 0
            assert plan.num_stages >= 1
            # A ring gives a slot back one step late where one instruction stays in flight.
            assert plan.in_flight in (0, 1) and plan.num_stages > plan.in_flight
            assert plan.form != "hopper_rows" or (plan.block_m == 128 and plan.num_stages >= 2)


# Shipped plans: what can be launched is what is compiled ahead of time, linted and tested.


def test_shipped_plans_are_distinct_and_each_fits_its_problem():
    seen = set()
    for problem, plan in plans.shipped_plans():
        key = plan, problem.dtype, problem.has_gain, problem.has_bias
        assert key not in seen
        seen.add(key)
        assert choose(problem, H200) == plan
    assert {plan.form for plan, *_ in seen} >= {"gemv", "tiles", "hopper_swap", "library"}


def test_every_choice_is_among_the_shipped_plans():
    shipped = {(plan, problem.dtype, problem.has_gain) for problem, plan in plans.shipped_plans()}
    for device in (H200, A100, B200, MI300, replace(H200, sm_count=114)):
        for problem in problems():
            plan = choose(problem, device)
            assert (plan, problem.dtype, problem.has_gain) in shipped, (problem, plan)


def test_many_rows_stay_unfused_wherever_tuning_left_them_so():
    """Built-in plans made from six layers alone lost up to a quarter on other ones."""
    table = json.loads((tables.SHIPPED / "nvidia_h200.json").read_text(encoding="utf-8"))
    unfused = [e for e in table["entries"] if e["plan"]["strategy"] == "unfused" and e["m"] >= 128]
    assert len(unfused) > 50
    for e in unfused:
        problem = Problem(e["dtype"], e["m"], e["n"], e["k"])
        assert choose(problem, H200) == UNFUSED, problem


def test_every_shipped_form_comes_with_a_bias_and_without():
    forms: dict[bool, set[str]] = {True: set(), False: set()}
    for problem, plan in plans.shipped_plans():
        forms[problem.has_bias].add(plan.form)
    assert forms[True] == forms[False]


def shared_bytes(problem: Problem, plan: Plan) -> int:
    """What a plan's buffers take: rings of x and w tiles, and staged output, without barriers."""
    size = element_size(problem)
    x_tile, w_tile = plan.block_m * plan.block_k * size, plan.block_n * plan.block_k * size
    if plan.form == "gemv":  # one stage loads to registers
        return plan.num_stages * (x_tile + w_tile) if plan.num_stages > 1 else 0
    if plan.form in ("tiles", *DESCRIPTORS):
        copies = 2 if plan.form == "tiles" and plan.squares == "own" else 1
        staged = 2 * 64 * plan.block_n * size if plan.form == "hopper_rows" else 0
        return plan.num_stages * (copies * x_tile + w_tile) + staged
    return 0


def test_every_shipped_plan_fits_shared_memory():
    most = 0
    for problem, plan in plans.shipped_plans():
        needed = shared_bytes(problem, plan)
        assert needed + 1024 <= SHARED_BYTES, (problem, plan, needed)
        if plan.max_registers:  # so that two programs share a multiprocessor
            assert 2 * (needed + 1024) <= SHARED_BYTES, (problem, plan, needed)
        most = max(most, needed)
    assert most > SHARED_BYTES // 2  # the estimate is one of the buffers that there are


def test_interpretable_plans_cover_every_family_that_the_interpreter_can_run():
    forms = {plan.form for plan in plans.interpretable_plans()}
    assert forms == set(plans.FORMS) - {*GLUON, "reference"}
    squares = {plan.squares for plan in plans.interpretable_plans() if plan.form == "tiles"}
    assert squares == {"shared", "own", "given"}


# A plan as a value


def test_plans_are_values():
    plan = Plan("single_pass", "gemv", 1, 16, 64)
    twin = Plan("single_pass", "gemv", 1, 16, 64)
    assert plan == twin and hash(plan) == hash(twin) and {plan: 1}[twin] == 1
    other = {"strategy": "unfused", "form": "tiles", "squares": "own", "in_flight": 1}
    for field in fields(Plan):
        changed = replace(plan, **{field.name: other.get(field.name, 99)})
        assert changed != plan and len({plan, changed}) == 2, field.name
    with pytest.raises(FrozenInstanceError):
        plan.block_m = 2
    for value in (H200, Problem("bfloat16", 1, 2, 3)):
        assert hash(value) == hash(replace(value))


BLOCKS = ("block_m", "block_n", "block_k", "num_warps", "num_stages")
READ_BY = {
    "gemv": BLOCKS,
    "tiles": (*BLOCKS, "group_m", "squares"),
    "scaled_gemm": (*BLOCKS, "group_m"),
    "hopper_rows": (*BLOCKS, "group_m", "squares"),
    "hopper_swap": (*BLOCKS, "max_registers", "in_flight", "split_k"),
    "library": (),
    "two_streams": (),
    "reference": (),
}


def test_as_dict_goes_through_json_and_back():
    everything = {plan for _, plan in plans.shipped_plans()} | set(plans.interpretable_plans())
    for plan in [*everything, *plans.other_plans(), TORCH]:
        stored = json.loads(json.dumps(plan.as_dict()))
        assert set(stored) == {"strategy", "form", *READ_BY[plan.form]}
        assert all(stored[name] == getattr(plan, name) for name in stored)
        left_out = {field.name: field.default for field in fields(Plan) if field.name not in stored}
        assert Plan(**stored) == replace(plan, **left_out)
    assert len({json.dumps(plan.as_dict()) for plan in everything}) == len(everything)


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": "guess"},
        {"form": "guess"},
        {"squares": "guess"},
        {"num_stages": 0},
        {"split_k": 0},
        {"in_flight": 2},
        {"in_flight": 1, "num_stages": 1},
        {"form": "hopper_rows", "num_stages": 1},
    ],
    ids=str,
)
def test_a_plan_that_would_hang_or_race_cannot_be_made(changes):
    """A slot that a running instruction holds must leave another one to fill."""
    *_, (name, value) = changes.items()
    word = value if value == "guess" else name if name != "form" else "num_stages"
    with pytest.raises(ValueError, match=word):
        Plan(**{"strategy": "single_pass", "form": "hopper_swap"} | changes)


# The facts that a choice rests on


@pytest.fixture
def a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(runtime.shutil, "which", lambda name: f"/usr/bin/{name}")
    return monkeypatch


def reason() -> str | None:
    return runtime.triton_unavailable.__wrapped__()


def test_what_triton_needs_is_named_with_the_remedy(a_gpu, tmp_path):
    (tmp_path / "Python.h").touch()
    a_gpu.setattr(runtime.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert reason() is None
    with a_gpu.context() as patch:
        patch.setattr(runtime.shutil, "which", lambda name: None)
        assert "C compiler" in reason() and "apt install gcc" in reason()
    with a_gpu.context() as patch:
        patch.setenv("CC", "nothing-of-this-name")
        patch.setattr(runtime.shutil, "which", lambda name: None if "nothing" in name else name)
        assert "C compiler" in reason()
        patch.setenv("CC", "gcc")
        assert reason() is None
    with a_gpu.context() as patch:
        patch.setattr(runtime.sysconfig, "get_paths", lambda: {"include": str(tmp_path / "no")})
        assert "python3-dev" in reason() and "Python.h" in reason()
    with a_gpu.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
        assert "7.5 is below 8.0" in reason() or torch.version.hip
        patch.setattr(torch.cuda, "get_device_capability", lambda i: ((7, 5), (9, 0))[i])
        assert reason() is None  # the older one is told apart by its plans
    with a_gpu.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        assert "no GPU" in reason()
    with a_gpu.context() as patch:
        patch.setattr(runtime.importlib.util, "find_spec", lambda name: None)
        assert "pip install triton" in reason()


def test_a_gpu_that_is_too_old_runs_plain_torch():
    for rows in (1, 16, 4096):
        problem = Problem("float16", rows, 3072, 2048)
        assert choose(problem, Device("cuda", capability=75, sm_count=40)) == plans.TORCH
        assert choose(problem, Device("cuda", capability=80, sm_count=40)) != plans.TORCH


def test_device_facts(monkeypatch):
    def facts(major: int, minor: int) -> Device:
        properties = SimpleNamespace(major=major, minor=minor, multi_processor_count=7)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        return runtime.device_facts.__wrapped__(0)

    if torch.version.hip is not None:
        assert facts(9, 4) == Device("hip", 0, 7)
        return
    monkeypatch.setattr(runtime, "gluon_supported", lambda: True)
    assert facts(8, 6) == Device("cuda", 86, 7, gluon=False)
    assert facts(10, 0) == Device("cuda", 100, 7, gluon=False)
    assert facts(9, 0) == Device("cuda", 90, 7, gluon=True)
    monkeypatch.setattr(runtime, "gluon_supported", lambda: False)
    assert facts(9, 0) == Device("cuda", 90, 7, gluon=False)


@pytest.mark.parametrize(
    ("version", "supported"),
    [("3.5.1", False), ("3.6.0", True), ("3.7.1+git", True), ("3.10.0", False), ("4.6.0", False)],
)
def test_gluon_is_gated_by_the_release(version, supported, monkeypatch):
    monkeypatch.setattr(runtime.metadata, "version", lambda name: version)
    monkeypatch.setattr(runtime, "triton_release", runtime.triton_release.__wrapped__)
    assert runtime.gluon_supported.__wrapped__() is supported
