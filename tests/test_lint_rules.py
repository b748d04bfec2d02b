"""The rules of the buffer-depth lint, one at a time, on small TTGIR texts written by hand."""

from __future__ import annotations

import re

import pytest

from flashnorm_triton.tuning import lint
from flashnorm_triton.tuning.ttgir import Op, UnreadableTtgir, Value, functions, integer_result

TILE = "!ttg.memdesc<64x64xbf16, #shared, #smem, mutable>"
RING = "!ttg.memdesc<2x64x64xbf16, #shared, #smem, mutable>"
ACC = "tensor<64x64xf32, #mma>"
WAIT0 = f"%w = ttng.warp_group_dot_wait %d {{pendings = 0 : i32}} : {ACC}"
WAIT1 = f"%v = ttng.warp_group_dot_wait %d {{pendings = 1 : i32}} : {ACC}"


def dot(a: str = "%a", b: str = "%b", acc: str = "%acc", out: str = "%d") -> str:
    attributes = "{inputPrecision = 0 : i32, isAsync = true}"
    return f"{out} = ttng.warp_group_dot {a}, {b}, {acc} {attributes} : {TILE} * {TILE} -> {ACC}"


def fill(slot: str = "%a") -> str:
    return f"ttg.local_store %t, {slot} : tensor<64x64xbf16, #blocked> -> {TILE}"


def slot(name: str, index: str, ring: str = "%x", kind: str = RING) -> str:
    return f"{name} = ttg.memdesc_index {ring}[{index}] : {kind} -> {TILE}"


def function(*lines: str, given: str = "i1") -> str:
    """A module of one function over two filled rings of two slots.

    %a and %b are slot 0 of each, %a1 and %b1 slot 1; %p is an argument of type `given`.
    """
    head = [
        "#smem = #ttg.shared_memory",
        'module attributes {ttg.target = "cuda:90"} {',
        f"tt.func @f(%acc: {ACC}, %t: tensor<64x64xbf16, #blocked>, %n: i32, %p: {given}) {{",
        '%c0 = arith.constant 0 : i32 loc("we(ird}" at #loc)',
        "%c1 = arith.constant 1 : i32 loc(#loc7)",
        f"%x = ttg.local_alloc : () -> {RING}",
        f"%y = ttg.local_alloc : () -> {RING}",
        slot("%a", "%c0"),
        slot("%b", "%c0", "%y"),
        slot("%a1", "%c1"),
        slot("%b1", "%c1", "%y"),
        fill("%a"),
        fill("%b"),
    ]
    return "\n".join([*head, *lines, "tt.return", "}", "}"])


def in_loop(*lines: str, head: tuple[str, ...] = (), carried: str = "", given: str = "i1") -> str:
    """A counted loop over `lines` that carries the accumulator %g, with a wait behind it."""
    kinds = ", ".join([ACC, *["i32"] * carried.count("=")])
    return function(
        *head,
        f"%l = scf.for %i = %c0 to %n step %c1 iter_args(%g = %acc{carried}) -> ({kinds}) : i32 {{",
        *lines,
        "}",
        WAIT0.replace("%d", "%l"),
        given=given,
    )


def rules(ttgir: str) -> set[str]:
    return {finding.rule for finding in lint.check(ttgir)}


# What is in flight, and what may touch it


def test_no_loop_passes():
    assert rules(function(dot(), WAIT0, fill())) == set()


def test_a_store_into_the_slot_being_read():
    assert rules(function(dot(), fill(), WAIT0)) == {"refilled"}
    assert rules(function(dot(), fill("%b"), WAIT0)) == {"refilled"}
    assert rules(function(dot(), fill("%a1"), WAIT0)) == set()


def test_a_synchronous_instruction_is_never_in_flight():
    synchronous = dot(out="%e").replace(", isAsync = true", "")
    assert rules(function(synchronous, fill())) == set()
    # It is lowered with a wait for everything before it, too.
    assert rules(function(dot(), synchronous, fill())) == set()


def test_a_register_operand_is_not_in_shared_memory():
    registers = dot("%t").replace(f" : {TILE} *", " : tensor<64x64xbf16, #op> *")
    assert rules(function(registers, fill(), WAIT0)) == set()
    assert rules(function(registers, fill("%b"), WAIT0)) == {"refilled"}
    assert rules(function(registers, WAIT1, WAIT0)) == set()


def test_memory_given_as_an_argument_is_not_traced():
    assert rules(function(dot(), WAIT1, WAIT0)) == set()
    assert rules(function(dot("%p"), WAIT1, WAIT0, given=TILE)) == {"untraced"}
    assert rules(function(dot("%p"), WAIT0, given=TILE)) == set()
    # It may be any slot, so a store into it may hit the one being read.
    assert rules(function(dot(), fill("%p"), WAIT0, given=TILE)) == {"untraced"}


def test_an_unknown_operation_on_the_slot_being_read():
    assert rules(function(dot(), f"ttg.new_thing %a : {TILE}", WAIT0)) == {"untraced"}
    assert rules(function(dot(), f"ttg.new_thing %a1 : {TILE}", WAIT0)) == set()
    assert rules(function(dot(), f"%q = ttg.local_load %a : {TILE}", WAIT0)) == set()


def test_a_buffer_that_nothing_fills():
    empty = f"%z = ttg.local_alloc : () -> {TILE}"
    assert rules(function(empty, dot("%z"), WAIT1, WAIT0)) == {"untraced"}
    assert rules(function(empty, fill("%z"), dot("%z"), WAIT1, WAIT0)) == set()


def test_leaving_or_calling_with_an_instruction_in_flight():
    assert rules(function(dot())) == {"unwaited"}
    assert rules(function(dot(), "tt.call @g() : () -> ()", WAIT0)) == {"unwaited"}


def test_a_barrier_without_an_index_gives_back_any_slot():
    barrier = "!ttg.memdesc<1xi64, #shared1, #smem, mutable>"
    alloc = f"%m = ttg.local_alloc : () -> {barrier}"
    arrive = f"ttng.arrive_barrier %m, 1 : {barrier}"
    assert rules(function(alloc, dot(), arrive, WAIT0)) == {"released"}
    assert rules(function(alloc, dot(), WAIT0, arrive)) == set()


# Branches and partitions


def test_both_ways_through_a_branch_count():
    def branch(first: str, second: str) -> str:
        return function(dot(), "scf.if %p {", first, "} else {", second, "}", WAIT0)

    assert rules(branch("tt.nothing", "tt.nothing")) == set()
    assert rules(branch(fill(), "tt.nothing")) == {"refilled"}
    assert rules(branch("tt.nothing", fill())) == {"refilled"}
    # Each way knows for itself whether it has waited.
    waits = WAIT0.replace("%w", "%u")
    assert rules(function(dot(), "scf.if %p {", waits, fill(), "}", WAIT0)) == set()
    assert rules(function(dot(), "scf.if %p {", waits, "}", fill(), WAIT0)) == {"refilled"}


def test_a_branch_that_is_never_taken_does_not_count():
    text = function("%no = arith.constant false", dot(), "scf.if %no {", fill(), "}", WAIT0)
    assert rules(text) == set()
    assert rules(text.replace("constant false", "constant true")) == {"refilled"}


def test_a_slot_chosen_in_a_branch():
    def chosen(first: str, second: str) -> str:
        branch = ("scf.if %p -> (i32) {", f"scf.yield {first} : i32", "} else {")
        return function(
            f"%s = {branch[0]}",
            *branch[1:],
            f"scf.yield {second} : i32",
            "}",
            slot("%to", "%s"),
            dot(),
            fill("%to"),
            WAIT0,
        )

    assert rules(chosen("%c1", "%c1")) == set()
    assert rules(chosen("%c1", "%c0")) == {"refilled"}
    assert rules(chosen("%c0", "%c1")) == {"refilled"}


def test_more_alternatives_than_can_be_followed():
    def optional(count: int) -> list[str]:
        return [f"scf.if %p {{\n{dot(out=f'%d{i}')}\n}}" for i in range(count)]

    finish = WAIT0.replace("%d", "%acc")
    assert rules(function(*optional(4), finish)) == set()
    assert rules(function(*optional(8), finish)) == {"untraced"}


def test_partitions_start_and_end_with_nothing_in_flight():
    def partitions(*worker: str, before: str = "tt.nothing") -> str:
        return function(
            before,
            "ttg.warp_specialize(%a, %b, %acc, %t)",
            "default {",
            "ttg.warp_yield",
            "}",
            f"partition0(%pa: {TILE}, %pb: {TILE}, %pacc: {ACC}, %pt: i1) num_warps(4) {{",
            *(re.sub(r"%(a|b|acc|t)\b", r"%p\1", line) for line in worker),
            "ttg.warp_return",
            f"}} : ({TILE}, {TILE}, {ACC}, i1) -> ()",
            WAIT0.replace("%d", "%acc"),
        )

    assert rules(partitions(dot(), WAIT0, fill())) == set()
    assert rules(partitions(dot(), fill(), WAIT0)) == {"refilled"}
    assert rules(partitions(dot())) == {"unwaited"}
    assert rules(partitions(fill(), before=dot(out="%e"))) == {"unwaited"}


def test_unstructured_control_flow_is_a_finding():
    assert rules(function("cf.br ^bb1", "^bb1:", dot(), WAIT0)) == {"untraced"}
    assert rules(function("cf.br ^bb1", "^bb1:", fill())) == set()


# Loops


def test_a_loop_may_run_no_trip_at_all():
    loop = ("scf.for %i = %c0 to %n step %c1 : i32 {", WAIT0.replace("%w", "%u"), "scf.yield", "}")
    assert rules(function(dot(), *loop, fill(), WAIT0)) == {"refilled"}


def test_the_slot_index_follows_the_loop_counter():
    def loop(ahead: str) -> str:
        return in_loop(
            "%s = arith.remsi %i, %c2 : i32",
            f"%f = arith.addi %i, {ahead} : i32",
            "%o = arith.remsi %f, %c2 : i32",
            *(slot("%as", "%s"), slot("%bs", "%s", "%y")),
            *(slot("%to", "%o"), slot("%uo", "%o", "%y")),
            dot("%as", "%bs", "%g"),
            WAIT1,
            fill("%to"),
            fill("%uo"),
            f"scf.yield %d : {ACC}",
            head=("%c2 = arith.constant 2 : i32",),
        )

    assert rules(loop("%c1")) == set()
    assert rules(loop("%c2")) == {"refilled"}
    assert rules(loop("%n")) == {"refilled"}  # any distance: not known, so not passed


def test_the_slot_index_can_be_carried_from_trip_to_trip():
    def loop(first: str, second: str) -> str:
        return in_loop(
            *(slot("%as", "%s"), slot("%bs", "%s", "%y"), slot("%to", "%o")),
            dot("%as", "%bs", "%g"),
            WAIT1,
            fill("%to"),
            f"scf.yield %d, {first}, {second} : {ACC}, i32, i32",
            carried=", %s = %c0, %o = %c1",
        )

    assert rules(loop("%o", "%s")) == set()  # the two swap places: never the same
    assert rules(loop("%s", "%s")) == {"refilled"}


def test_a_slot_that_is_only_hit_on_a_late_trip():
    ring = RING.replace("<2x", "<5x")

    def loop(fixed: int) -> str:
        return in_loop(
            "%s = arith.remsi %i, %c5 : i32",
            slot("%as", "%s", "%big", ring),
            dot("%as", acc="%g"),
            WAIT1,
            fill("%last"),
            f"scf.yield %d : {ACC}",
            head=(
                "%c5 = arith.constant 5 : i32",
                f"%cl = arith.constant {fixed} : i32",
                f"%big = ttg.local_alloc : () -> {ring}",
                slot("%last", "%cl", "%big", ring),
            ),
        )

    assert rules(loop(4)) == {"refilled"}
    assert rules(loop(5)) == set()


def test_what_is_in_flight_between_trips_has_to_be_traced():
    def loop(operand: str, given: str) -> str:
        return in_loop(dot(operand, acc="%g"), f"scf.yield %d : {ACC}", given=given)

    assert rules(loop("%a", "i1")) == set()
    assert rules(loop("%p", TILE)) == {"untraced"}


def test_only_operands_that_are_refilled_need_their_siblings_depth():
    deep = RING.replace("<2x", "<3x")

    def loop(also: str) -> str:
        return in_loop(
            dot("%a3", acc="%g"),
            WAIT1,
            fill("%b1"),
            also,
            f"scf.yield %d : {ACC}",
            head=(
                f"%x3 = ttg.local_alloc : () -> {deep}",
                slot("%a3", "%c0", "%x3", deep),
                slot("%other", "%c1", "%x3", deep),
                fill("%a3"),
            ),
        )

    assert rules(loop("tt.nothing")) == set()
    assert rules(loop(fill("%other"))) == {"shallow"}


def test_a_tile_put_into_shared_memory_on_every_trip_has_one_slot():
    tile = f"%as = ttg.local_alloc %t : (tensor<64x64xbf16, #blocked>) -> {TILE}"

    def loop(wait: str) -> str:
        return in_loop(tile, dot("%as", acc="%g"), wait, f"scf.yield %d : {ACC}")

    assert rules(loop(WAIT1.replace("= 1", "= 0"))) == set()
    assert rules(loop(WAIT1)) == {"refilled"}


def test_a_while_loop_is_followed():
    def loop(*body: str) -> str:
        return function(
            "%r = scf.while (%i = %c0) : (i32) -> i32 {",
            "%more = arith.cmpi slt, %i, %n : i32",
            "scf.condition(%more) %i : i32",
            "} do {",
            "^bb0(%j: i32):",
            *body,
            "%next = arith.addi %j, %c1 : i32",
            "scf.yield %next : i32",
            "}",
        )

    assert rules(loop(fill(), dot(), WAIT0)) == set()
    assert rules(loop(fill(), dot())) == {"refilled", "unwaited"}


def test_a_while_loop_carries_the_slot_index():
    def loop(following: str) -> str:
        return function(
            "%r:2 = scf.while (%i = %c0, %j = %c1) : (i32, i32) -> (i32, i32) {",
            "scf.condition(%p) %i, %j : i32, i32",
            "} do {",
            "^bb0(%s: i32, %o: i32):",
            *(slot("%as", "%s"), slot("%to", "%o")),
            *(dot("%as"), fill("%to"), WAIT0),
            f"scf.yield {following} : i32, i32",
            "}",
        )

    assert rules(loop("%o, %s")) == set()
    assert rules(loop("%o, %o")) == {"refilled"}


# Reading


@pytest.mark.parametrize(
    ("text", "operands", "result"),
    [
        ("arith.remsi %a, %b : i32", [-1, 4], -1),  # as in C: towards zero
        ("arith.remsi %a, %b : i32", [7, 4], 3),
        ("arith.divsi %a, %b : i32", [-7, 4], -1),
        ("arith.divsi %a, %b : i32", [7, 0], None),
        ("arith.remui %a, %b : i32", [-1, 4], None),
        ("arith.cmpi ult, %a, %b : i32", [-1, 4], None),
        ("arith.cmpi slt, %a, %b : i32", [-1, 4], 1),
        ("arith.cmpi sge, %a, %b : i32", [-1, 4], 0),
        ("arith.cmpi ne, %a, %b : i32", [3, 4], 1),
        ("arith.subi %a, %b : i32", [3, 4], -1),
        ("arith.muli %a, %b : i32", [3, None], None),
        ("arith.xori %a, %b : i32", [1, 1], 0),
        ("arith.maxsi %a, %b : i32", [3, 4], 4),
        ("arith.shli %a, %b : i32", [3, 4], None),
        ("arith.constant -1 : i32", [], -1),
        ("arith.constant true", [], 1),
        ("arith.constant dense<0> : tensor<4xi32>", [], None),
    ],
)
def test_integer_results(text, operands, result):
    op = Op(text.split()[0], 1, text, [], [Value("%a", 1)] * len(operands))
    assert integer_result(op, operands) == result


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not a TTGIR module"),
        ("module {\n}", "not a TTGIR module"),
        ("def f(x):\n    return x", "not an operation"),
        (function(dot(), WAIT0)[:-2], "cut short"),
        (function("}", "}", "}"), "closes nothing"),
        (function("scf.if %p {", "} otherwise {", "}"), "unknown kind of region"),
        (function("%q = arith.addi %gone, %c1 : i32"), "%gone is used but nothing above defines"),
        (function("scf.if %p {", "%in = tt.one", "}", "tt.use %in"), "%in is used but nothing"),
        (function("partition0(%q: i32) num_warps(1) {", "}"), "belongs to nothing"),
        (function("scf.for %i in %n {", "}"), "a loop without bounds"),
        (function("tt.nothing loc(callsite(#a"), "unclosed location"),
        (function("1 + 1"), "not an operation"),
    ],
)
def test_text_that_is_not_ttgir(text, why):
    (finding,) = lint.check(text)
    assert finding.rule == "unreadable" and why in finding.message
    with pytest.raises(UnreadableTtgir, match=re.escape(why)):
        functions(text)


def test_a_loop_without_a_body_is_a_finding_not_an_exception():
    assert rules(function("scf.for %i = %c0 to %n step %c1 : i32 {", "}")) == {"unreadable"}


def test_a_finding_reads_as_a_sentence_with_its_place():
    (finding,) = lint.check(function(dot(), fill(), WAIT0))
    assert str(finding) == (
        "f:15: refilled: ttg.local_store overwrites slot 0 of %x (line 6) (2 slots) that the "
        "wgmma of line 14 still reads"
    )
