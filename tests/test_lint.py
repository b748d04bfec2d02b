"""The buffer-depth lint on compiled kernels: finds the racing form, passes the right ones.

Texts changed by hand show which property it is that decides, and that what is not understood is
refused. Texts written by hand are in test_lint_rules.py.
"""

from __future__ import annotations

import re

import pytest
from aot_runs import FIXTURES, SHIPPED, Run, compiled

from flashnorm_triton.tuning import lint

RACING = ("racing_pointer", "racing_descriptor")


@pytest.fixture(scope="module")
def fixtures() -> Run:
    return compiled(FIXTURES)


def rules(ttgir: str, ptx: str | None = None) -> set[str]:
    return {finding.rule for finding in lint.check(ttgir, ptx)}


def swap(text: str, old: str, new: str, count: int = 0) -> str:
    """Replace every match of a regular expression (the first `count`), which must be there."""
    changed, replaced = re.subn(old, new, text, count=count)
    assert replaced, f"nothing to replace: {old}"
    return changed


def slots(text: str) -> list[int]:
    """The depths of the two-dimensional tile buffers, in printed order."""
    return [int(n) for n in re.findall(r"local_alloc : \(\) -> !ttg.memdesc<(\d+)x\d+x\d+x", text)]


# Compiled kernels


def test_no_shipped_kernel_has_a_finding_on_sm90():
    rows = compiled(SHIPPED).records("sm90")
    assert rows
    assert not {name: row["findings"] for (name, _), row in rows.items() if row["findings"]}


@pytest.mark.parametrize("form", RACING)
@pytest.mark.parametrize("config", ["w4s2", "w4s3", "w4s4", "w4s5", "w8s3"])
def test_the_racing_form_is_found(fixtures, form, config):
    stages = int(config[-1])
    text = fixtures.text(f"{form}-{config}")
    assert "pendings = 1" in text and slots(text) == [stages - 1, stages]
    found = lint.check(text, fixtures.text(f"{form}-{config}", kind="ptx"))
    shallow, refilled = sorted(found, key=lambda finding: finding.rule, reverse=True)
    assert (shallow.rule, refilled.rule) == ("shallow", "refilled")
    assert shallow.slots == refilled.slots == stages - 1
    assert shallow.alloc == refilled.alloc and shallow.alloc.startswith("%x")
    assert f"has {stages - 1} slots" in shallow.message and shallow.message.endswith(str(stages))
    lines = text.splitlines()
    assert "ttng.warp_group_dot %" in lines[shallow.line - 1]
    assert "global_to_local" in lines[refilled.line - 1]
    # The command line refuses it too.
    row = fixtures.records()[f"{form}-{config}", "sm90"]
    assert {finding["rule"] for finding in row["findings"]} == {"shallow", "refilled"}


@pytest.mark.parametrize(
    ("name", "pendings"),
    [
        *((f"{form}-w4s1", "0") for form in RACING),
        *((f"{form}-w4s1", "0") for form in ("gemm", "own_load")),
        *((f"{form}-w4s{s}", "1") for form in ("gemm", "own_load") for s in (2, 3, 4)),
        ("ring_waits", "0"),
        ("ring_lags", "1"),
    ],
)
def test_race_free_forms_pass(fixtures, name, pendings):
    text = fixtures.text(name)
    assert f"pendings = {pendings}" in text and "ttng.warp_group_dot %" in text
    assert lint.check(text, fixtures.text(name, kind="ptx")) == ()


@pytest.mark.parametrize("target", ["sm80", "sm100"])
def test_text_without_wgmma_passes(fixtures, target):
    name = "everywhere-w4s2"
    assert lint.check(fixtures.text(name, target), fixtures.text(name, target, "ptx")) == ()


def test_a_ring_that_gives_its_slot_back_too_early_is_found(fixtures):
    found = lint.check(fixtures.text("ring_hurries"))
    assert {finding.rule for finding in found} == {"released"}
    assert {finding.alloc for finding in found} == {"%x_ring", "%w_ring"}


# Compiled kernels, changed by hand


def test_one_slot_more_makes_the_racing_form_pass(fixtures):
    text = fixtures.text("racing_pointer-w4s3")
    text = swap(text, r"memdesc<2x64x128", "memdesc<3x64x128")
    text = swap(text, r"(arith\.cmpi sge, %\S+), %c2_i32", r"\1, %c3_i32")
    assert rules(text) == set()


def test_waiting_for_everything_makes_the_racing_form_pass(fixtures):
    assert rules(swap(fixtures.text("racing_descriptor-w4s3"), "pendings = 1", "pendings = 0")) == (
        set()
    )


def test_one_slot_less_is_found(fixtures):
    text = fixtures.text("gemm-w4s3")
    # The counters alone: every copy goes one slot too far back, in both rings.
    wrapped = swap(text, r"%c3_i32 = arith\.constant 3", "%c3_i32 = arith.constant 2")
    found = lint.check(wrapped)
    assert {finding.rule for finding in found} == {"refilled"}
    assert len({finding.alloc for finding in found}) == 2
    # The allocation alone: a depth that differs from its sibling's.
    assert rules(
        swap(text, r"alloc : \(\) -> !ttg.memdesc<3x", "alloc : () -> !ttg.memdesc<2x", 1)
    ) == {"shallow"}


def test_one_instruction_more_in_flight_is_found(fixtures):
    assert rules(swap(fixtures.text("gemm-w4s3"), "pendings = 1", "pendings = 2")) == {"refilled"}


def test_a_lost_wait_is_found(fixtures):
    text = fixtures.text("gemm-w4s3")
    assert "refilled" in rules(swap(text, r"(, %\S+ )\{pendings = 1", r"\1{pendings = 9"))
    assert "unwaited" in rules(swap(text, "pendings = 0", "pendings = 1"))


def test_a_buffer_freed_before_the_wait_is_found(fixtures):
    lines = fixtures.text("gemm-w4s3").splitlines()
    wait = next(i for i, line in enumerate(lines) if "pendings = 0" in line)
    free = next(i for i, line in enumerate(lines) if "local_dealloc" in line)
    lines.insert(wait, lines.pop(free))
    (finding,) = lint.check("\n".join(lines))
    assert finding.rule == "refilled" and "local_dealloc" in finding.message


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        # The operand's slot comes from an operation the lint does not know.
        (r"ttg\.memdesc_trans", "ttg.memdesc_twist", "untraced"),
        (r"ttg\.memdesc_index", "ttg.memdesc_subview", "untraced"),
        (r"ttg\.local_alloc : ", "ttg.global_alloc : ", "untraced"),
        # The copies have another name: they may write anywhere.
        (r"ttg\.async_copy_global_to_local", "ttg.bulk_copy_global_to_local", "untraced"),
        # The counters cannot be followed.
        (r"arith\.select", "arith.choose", "refilled"),
        (r"%c1_i32 = arith\.constant 1", "%c1_i32 = tt.get_program_id x", "refilled"),
        # The instruction itself has another printed form.
        (r"#smem, mutable> \* ", "#smem, mutable> times ", "unreadable"),
        (r"\{pendings = 1", "{outstanding = 1", "unreadable"),
    ],
)
def test_what_is_not_understood_is_a_finding(fixtures, old, new, expected):
    assert expected in rules(swap(fixtures.text("gemm-w4s3"), old, new))


def test_a_ring_whose_barriers_cannot_be_followed_is_found(fixtures):
    text = fixtures.text("ring_lags")
    assert rules(swap(text, r"arith\.remsi", "arith.modulo")) >= {"released"}
    # Two in flight, and the barrier of the second one is released.
    assert "released" in rules(swap(text, r"pendings = 1", "pendings = 2"))


def test_the_ptx_has_to_agree(fixtures):
    text, ptx = fixtures.text("gemm-w4s3"), fixtures.text("gemm-w4s3", kind="ptx")
    assert rules(text, ptx) == set()
    plain = fixtures.text("everywhere-w4s2", "sm80")
    (finding,) = lint.check(plain, ptx)
    assert finding.rule == "unreadable" and "no ttng.warp_group_dot was read" in finding.message
    (finding,) = lint.check(text, swap(ptx, r"(wait_group\.sync\.aligned\s+)1", r"\g<1>3"))
    assert "waits for [0, 3]" in finding.message


@pytest.mark.parametrize("form", ["racing_descriptor-w4s3", "ring_lags"])
def test_no_missing_line_is_an_exception(fixtures, form):
    lines = fixtures.text(form).splitlines()
    code = [i for i, line in enumerate(lines) if not line.startswith("#")]
    seen = set()
    for i in code:
        seen |= rules("\n".join(lines[:i] + lines[i + 1 :]))
    assert "unreadable" in seen
