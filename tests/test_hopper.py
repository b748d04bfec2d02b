"""The Hopper kernels ahead of time: what they take, what they issue, and how their rings agree."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import hopper_units
import pytest
import torch
from aot_runs import Run, compiled
from plan_params import skip_unless_it_runs_here

from flashnorm_triton import limits
from flashnorm_triton.plans import Device, Plan, Problem, choose
from flashnorm_triton.tuning import lint, rig, validate

H200 = Device("cuda", 90, 132, gluon=True)
CASES = [pytest.param(*case, id=hopper_units.name(*case)) for case in hopper_units.CASES]


@pytest.fixture(scope="module")
def units() -> Run:
    return compiled(("hopper_units:compile_units",))


@pytest.fixture(scope="module")
def two_groups(units) -> str:
    """The TTGIR of a kernel with two consumers."""
    return units.text(hopper_units.name(*hopper_units.CASES[0]))


@pytest.mark.parametrize(("plan", "problem"), CASES)
def test_a_variant_compiles_clean_and_fits_as_its_limits_say(units, plan, problem):
    row = units.records("sm90")[hopper_units.name(plan, problem), "sm90"]
    assert row["findings"] == [] and row["spill_bytes"] == 0 and row["fits"]
    assert limits.unfit(plan, problem, H200) is None
    estimate = limits.shared_bytes(plan, problem.dtype, problem.gated)
    # The rest is barriers, and scratch for the rows' sums and for a change of layout.
    assert 0 <= row["shared_bytes"] - estimate <= 20_000


def test_squares_from_registers_read_no_x_from_shared_memory_but_to_load_it(units):
    """The instruction takes x from registers, and one set of loads serves it and the squares."""
    plan, problem = hopper_units.CASES[0]
    text = units.text(hopper_units.name(plan, problem))
    dots = [line for line in text.splitlines() if "ttng.warp_group_dot " in line]
    assert dots and all(
        re.search(r" : tensor<64x64x\w+, .*> \* !ttg\.memdesc", dot) for dot in dots
    )
    loads = [line for line in text.splitlines() if "ttg.local_load" in line]
    assert loads and all("#ttg.dot_op" in line for line in loads)
    ptx = units.text(hopper_units.name(plan, problem), kind="ptx")
    assert "ldmatrix" in ptx


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("plan", "problem"), CASES)
def test_a_variant_keeps_the_contract_on_a_gpu(plan, problem, dtype):
    """Sizes that no block divides; values on poisoned memory, bits while another stream is busy."""
    skip_unless_it_runs_here(plan)
    load = rig.Load()
    n, k = (1032 if plan.form == "hopper_rows" else 1042), 584
    for m in (1, plan.block_m + 1, 20 * plan.block_m + 5):
        odd = replace(problem, dtype=dtype, m=m, n=2 * n if problem.gated else n, k=k)
        weight = torch.randn(odd.n, k, device="cuda").mul_(k**-0.5).to(getattr(torch, dtype))
        case = validate.make_case(odd, weight)
        verdict = validate.check(case, rig.run_of(case, plan), 24, lambda: load(1))
        assert verdict.reason is None, f"{m} rows: {verdict}"


MEASURED = json.loads(
    (Path(__file__).parents[1] / "bench/results/nvidia_h200/epilogues.json").read_text()
)["records"]


@pytest.mark.parametrize("cell", MEASURED, ids=lambda c: f"{c['k']}to{c['n']}-{c['m']}")
def test_the_built_in_plan_of_an_epilogue_is_no_slower_than_the_chain_where_measured(cell):
    gated = "gated" in cell["epilogue"]
    epilogue = {"gated": True, "activation": "silu"} if gated else {"activation": "gelu", **LAYER}
    of = Problem("bfloat16", cell["m"], cell["n"], cell["k"], **epilogue)
    plan = choose(of, H200)
    if plan.form in ("library", "gemv"):  # the chain itself; the GEMV's figures are elsewhere
        return
    chains = (cell["unfused_us"], cell.get("fused_norm_then_activation_us", cell["unfused_us"]))
    timed = {limits.plan_from(without_time(row)): row["us"] for row in cell["plans"]}
    if plan not in timed:  # of another depth, say
        assert plan.block_m in (16, 32)
        return
    assert timed[plan] <= 1.01 * min(chains)


LAYER = {"has_bias": True, "centred": True}


def without_time(row: dict) -> dict:
    return {field: value for field, value in row.items() if field != "us"}


def rules(text: str) -> set[str]:
    return {finding.rule for finding in lint.check(text)}


def producer(text: str) -> slice:
    """Where the last partition is: the copies' one."""
    return slice(text.rindex("partition1("), len(text))


def test_a_ring_whose_counts_agree_passes(two_groups):
    assert rules(two_groups) == set()


def test_a_barrier_that_waits_for_one_consumer_of_two_is_found(two_groups):
    faulty, changed = re.subn(r"(init_barrier %\w+), 2", r"\1, 1", two_groups)
    assert changed and rules(faulty) == {"arrivals"}


def test_a_consumer_that_never_gives_a_slot_back_is_found(two_groups):
    part = two_groups[two_groups.index("partition0(") : two_groups.index("partition1(")]
    silent = re.sub(r"\n[^\n]*ttng\.arrive_barrier[^\n]*", "", part)
    assert silent != part and rules(two_groups.replace(part, silent)) == {"arrivals"}


def test_a_barrier_that_expects_one_tile_of_two_is_found(two_groups):
    faulty, changed = re.subn(r"(barrier_expect %\w+), \d+", r"\1, 16384", two_groups)
    assert changed and rules(faulty) == {"bytes"}


def test_a_producer_that_refills_without_a_wait_is_found(two_groups):
    place = producer(two_groups)
    faulty = re.sub(r"\n[^\n]*ttng\.wait_barrier[^\n]*", "", two_groups[place])
    assert faulty != two_groups[place]
    assert rules(two_groups[: place.start] + faulty) == {"unguarded"}


@pytest.mark.parametrize(
    ("plan", "problem", "why"),
    [
        (hopper_units.rows("registers", 256, 4), {"gated": True}, "gate and up"),
        (hopper_units.rows("own", 128, 4), {"gated": True}, "gate and up"),
        (hopper_units.rows("own", 256, 3), {"activation": "gelu"}, "no registers"),
        (hopper_units.rows("shared", 128, 3), {}, "own, registers or given"),
        (hopper_units.rows("registers", 128, 3, block_m=256), {}, "two groups of 64"),
        (hopper_units.rows("registers", 128, 3), {"n": 2052}, "16 bytes"),
        (hopper_units.rows("registers", 128, 3), {"n": 2056, "gated": True}, "16 bytes"),
        (hopper_units.swap(16, 64, 128, stages=3, split_k=2), {"gated": True}, "split-K"),
        (hopper_units.swap(64, 128, 128, stages=3), {"gated": True}, "shared memory"),
    ],
)
def test_what_does_not_go_together_is_refused_with_its_reason(plan, problem, why):
    assert why in limits.unfit(plan, hopper_units.problem(**problem), H200)


def test_squares_from_registers_are_a_way_of_row_tiles_alone():
    plan = Plan("single_pass", "tiles", 16, 32, 64, squares="registers")
    with pytest.raises(ValueError, match="'registers' is a way of hopper_rows, not of 'tiles'"):
        limits.plan_from(plan.as_dict())


def test_an_epilogue_that_a_kernel_does_not_combine_is_no_launch():
    from flashnorm_triton.launch import FAMILIES

    plan = hopper_units.rows("registers", 128, 3)
    with pytest.raises(ValueError, match="N a multiple of 8, not 1028"):
        FAMILIES["hopper_rows"](plan, Problem("bfloat16", 8, 2056, 64, gated=True), 64)
