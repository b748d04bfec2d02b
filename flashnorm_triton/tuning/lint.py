"""Buffer-depth lint: does an instruction still running on Hopper lose its operand to the next copy?

Hopper's matrix instruction (wgmma, `ttng.warp_group_dot` in TTGIR) is asynchronous: it goes on
reading its operands from shared memory until a `ttng.warp_group_dot_wait {pendings = P}` has left
at most the P newest in flight. A pipelined loop refills shared memory slots meanwhile.

How Triton comes to race. Its pipeliner gives a load as many slots as there are stages between the
copy and its use, plus one for the instruction in flight, but adds that one only when the matrix
instruction is the load's single user (`loadRequiresAdditionalBuffer` in LowerLoops.cpp). The later
pass that decides to leave an instruction in flight (`dotCanBeProperlyAsync` in WGMMAPipeline.cpp)
checks that operands are multi-buffered, not how deeply. With d copies in the air and
num_stages = d + 1, an operand read by wgmma alone has d + 1 slots; one that also feeds register
arithmetic (a sum of squares) has d. In iteration i the loop issues wgmma i on slot i mod D, waits
until only that one runs, and copies tile i + d into slot (i + d) mod D: for D = d, the slot that is
being read. In general a ring is safe when d + P - 1 < D, so D = d + P slots are needed, P counted
in iterations. Known upstream as triton-lang/triton issue 6691 (pull request 7110).

The rule here is checked on the text, by running each function's integer arithmetic: slot counters
start from constants and wrap at constants, so a few trips through a loop visit every relation
between the slot copied into and the slots being read. A finding is reported when

- `refilled`: a copy, store or release writes a slot that a wgmma in flight reads;
- `shallow`: one refilled operand of a wgmma left in flight has fewer slots than its sibling;
- `released`: an mbarrier arrive may hand a slot back while a wgmma in flight reads it. Kernels that
  manage slots by hand (Gluon, warp-specialised) are checked so: after `pendings = 0` nothing is in
  flight and every arrive passes; otherwise the barrier's index must be known and differ from the
  index of every slot being read (barrier i of a ring guards slot i);
- `untraced`: a wgmma left in flight, or a write beside one, whose slot cannot be followed to a
  `ttg.local_alloc` and an index, or whose buffer nothing in the function fills;
- `unwaited`: a function or partition ends, calls another or starts one with a wgmma in flight;
- `unreadable`: the text is not TTGIR as this reader knows it, or disagrees with the PTX;
- `unguarded`, `arrivals`, `bytes`: the partitions of a warp-specialised kernel do not agree about a
  ring (rings.py).

So what is not understood is a finding, not a pass. Not covered: instructions other than wgmma.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from flashnorm_triton.tuning import rings
from flashnorm_triton.tuning.ttgir import (
    Op,
    Region,
    UnreadableTtgir,
    Value,
    functions,
    integer_result,
)

DOT = "ttng.warp_group_dot"
WAIT = "ttng.warp_group_dot_wait"
_VIEWS = ("ttg.memdesc_trans", "ttg.memdesc_reshape", "ttg.memdesc_subslice")
_READERS = (
    *_VIEWS,
    "ttg.memdesc_index",
    "ttg.local_load",
    "ttng.async_tma_copy_local_to_global",
    "ttng.wait_barrier",
    "ttng.barrier_expect",
    "ttng.async_copy_mbarrier_arrive",
    WAIT,
    "ttg.warp_specialize",
)
# Operations that change shared memory, and which operand they change: a position, or "after the
# coordinates" of a TMA copy (`%descriptor[%row, %column] %destination, ...`).
_COORDINATES = -1
_WRITERS = {
    "ttg.local_dealloc": 0,
    "ttg.local_store": 1,
    "ttg.async_copy_global_to_local": 1,
    "ttng.async_tma_copy_global_to_local": _COORDINATES,
    "ttng.async_tma_gather": _COORDINATES,
}
_STRUCTURED = ("scf.for", "scf.while", "scf.if", "ttg.warp_specialize")
_MAX_ALTERNATIVES = 64
_MAX_TRIPS = 2048
_DOT_TYPES = re.compile(r" : (!?[\w.]+)<[^*]*> \* (!?[\w.]+)<[^*]*> -> ")
_PENDINGS = re.compile(r"pendings = (\d+)")
_SLOTS = re.compile(r"!ttg\.memdesc<(\d+)x")


@dataclass(frozen=True)
class Finding:
    """One reason to refuse a compiled kernel. `line` counts from 1 in the TTGIR text.

    `alloc` and `slots` name the buffer and its depth where there is one to name.
    """

    rule: str
    function: str
    line: int
    message: str
    alloc: str | None = None
    slots: int | None = None

    def __str__(self) -> str:
        return f"{self.function}:{self.line}: {self.rule}: {self.message}"


@dataclass(frozen=True)
class _Slot:
    """A place in shared memory: an allocation and the indices taken into it (None: unknown)."""

    alloc: Op
    path: tuple[int | None, ...]

    @property
    def known(self) -> bool:
        return None not in self.path

    def may_be(self, other: _Slot) -> bool:
        return self.alloc is other.alloc and not any(
            a is not None and b is not None and a != b
            for a, b in zip(self.path, other.path, strict=False)
        )


@dataclass(frozen=True)
class _Flight:
    """A wgmma in flight and what it reads (None: a shared-memory operand that was not traced)."""

    dot: Op
    reads: tuple[_Slot | None, ...]


_State = tuple[_Flight, ...]  # oldest first; several states are alternatives


def _name(alloc: Op) -> str:
    return f"{alloc.results[0].name} (line {alloc.line})"


def _depth(alloc: Op) -> int:
    shape = _SLOTS.search(alloc.text)
    return int(shape[1]) if shape else 0


class _Run:
    """Runs one function's integers and slots, keeping the wgmmas that may be in flight."""

    def __init__(self, function: Op) -> None:
        named = re.search(r"@([\w$.-]+)", function.text)
        self.function = named[1] if named else function.text
        self.values: dict[Value, int | _Slot] = {}
        self.findings: dict[tuple[str, int, str | None], Finding] = {}
        self.filled: set[Op] = set()
        self.refilled: set[Op] = set()
        self.kept: dict[_Flight, Op] = {}
        self.loops = 0
        indexed = [op for op in function.walk() if op.name == "ttg.memdesc_index"]
        self.trips = 2 * max((_depth(op) for op in indexed), default=1) + 2
        end = self.region(function.regions[0], {()})
        self.unwaited(function, end)
        self.depths()

    def report(self, rule: str, op: Op, message: str, alloc: Op | None = None) -> None:
        name = alloc.results[0].name if alloc else None
        self.findings.setdefault(
            (rule, op.line, name),
            Finding(rule, self.function, op.line, message, name, _depth(alloc) if alloc else None),
        )

    def get(self, value: Value) -> int | _Slot | None:
        return self.values.get(value)

    def put(self, value: Value, content: int | _Slot | None) -> None:
        if content is None:
            self.values.pop(value, None)
        else:
            self.values[value] = content

    def bind(self, targets: list[Value], sources: list[Value]) -> None:
        contents = [self.get(source) for source in sources]  # all read before any is replaced
        for target, content in zip(targets, contents, strict=False):
            self.put(target, content)

    # Control flow

    def region(self, region: Region, states: set[_State]) -> set[_State]:
        if region.blocks > 1 and any(o.name == DOT for op in region.ops for o in op.walk()):
            self.report("untraced", region.ops[0], "wgmma under unstructured control flow")
        for op in region.ops:
            states = self.step(op, states)
            if len(states) > _MAX_ALTERNATIVES:
                self.report("untraced", op, "too many possible sets of wgmmas in flight to follow")
                states = set(sorted(states, key=len)[-_MAX_ALTERNATIVES:])
        return states

    def step(self, op: Op, states: set[_State]) -> set[_State]:
        if op.name in ("scf.for", "scf.while"):
            self.loops += 1
            states = (self.for_loop if op.name == "scf.for" else self.while_loop)(op, states)
            self.loops -= 1
        elif op.name == "scf.if":
            states = self.branch(op, states)
        elif op.name == "ttg.warp_specialize":
            states = self.partitions(op, states)
        elif op.name == DOT:
            states = self.dot(op, states)
        elif op.name == WAIT:
            states = self.wait(op, states)
        elif op.name == "tt.call":
            self.unwaited(op, states)
        elif op.name == "ttng.arrive_barrier":
            self.arrive(op, states)
        elif op.name in _WRITERS or (op.name == "ttg.local_alloc" and op.operands):
            self.write(op, states)
        if op.name not in _STRUCTURED:
            self.define(op, states)
        return states

    def for_loop(self, op: Op, states: set[_State]) -> set[_State]:
        """Run a loop: exactly, if its bounds are known; else a few trips, and results unknown."""
        body = op.regions[0]
        low, high, step, *initial = op.operands
        counter, *carried = body.args
        trips = self.known_trips(low, high, step)
        self.bind([counter, *carried], [low, *initial])
        if trips is not None:
            for _ in range(trips):
                states = self.region(body, states)
                self.keep(op, states)
                self.put(counter, self.get(counter) + self.get(step))
                self.bind(carried, body.ops[-1].operands)
            self.bind(op.results, carried if trips else initial)
            return states
        exits = set(states)
        for _ in range(self.trips):
            states = self.region(body, states)
            self.keep(op, states)
            exits |= states
            here, by = self.get(counter), self.get(step)
            known = isinstance(here, int) and isinstance(by, int)
            self.put(counter, here + by if known else None)
            self.bind(carried, body.ops[-1].operands)
        return exits

    def known_trips(self, low: Value, high: Value, step: Value) -> int | None:
        """The number of trips of a loop between constants, if it is worth running them all."""
        start, end, by = (self.get(value) for value in (low, high, step))
        if not all(isinstance(value, int) for value in (start, end, by)) or by <= 0:
            return None
        trips = max(0, -(-(end - start) // by))
        return trips if trips <= _MAX_TRIPS else None

    def while_loop(self, op: Op, states: set[_State]) -> set[_State]:
        before, after = op.regions
        self.bind(before.args, op.operands)
        exits: set[_State] = set()
        for _ in range(self.trips):
            states = self.region(before, states)
            exits |= states
            self.bind(after.args, before.ops[-1].operands[1:])
            states = self.region(after, states)
            self.keep(op, states)
            self.bind(before.args, after.ops[-1].operands)
        return exits

    def branch(self, op: Op, states: set[_State]) -> set[_State]:
        condition = self.get(op.operands[0])
        after: set[_State] = set()
        yielded: list[list[int | _Slot | None]] = []
        for taken, region in zip((1, 0), (*op.regions, None), strict=False):
            if condition in (None, taken):
                after |= self.region(region, states) if region else states
                if op.results:
                    yielded.append([self.get(v) for v in region.ops[-1].operands])
        for i, result in enumerate(op.results):
            contents = [values[i] for values in yielded]
            self.put(result, contents[0] if contents.count(contents[0]) == len(contents) else None)
        return after

    def partitions(self, op: Op, states: set[_State]) -> set[_State]:
        default, *workers = op.regions
        self.unwaited(op, states)  # the workers cannot wait for an instruction of the caller's
        for worker in workers:
            self.bind(worker.args, op.operands)
            # Warps of its own: nothing is in flight when they start, nor may be when they end.
            self.unwaited(op, self.region(worker, {()}))
        return self.region(default, states)

    # wgmma

    def dot(self, op: Op, states: set[_State]) -> set[_State]:
        types = _DOT_TYPES.search(op.text)
        if not types:
            raise UnreadableTtgir(f"line {op.line}: operand types of {DOT}: {op.text[:160]!r}")
        if "isAsync = true" not in op.text:
            return {()}  # lowered with a wait for everything behind it
        reads: list[_Slot | None] = []
        for operand, kind in zip(op.operands, types.groups(), strict=False):
            if kind == "!ttg.memdesc":
                content = self.get(operand)
                reads.append(content if isinstance(content, _Slot) else None)
        return {(*state, _Flight(op, tuple(reads))) for state in states}

    def wait(self, op: Op, states: set[_State]) -> set[_State]:
        pendings = _PENDINGS.search(op.text)
        if not pendings:
            raise UnreadableTtgir(f"line {op.line}: no pendings in {op.text[:160]!r}")
        left = int(pendings[1])
        states = {state[len(state) - left :] if left else () for state in states}
        self.keep(op, states)
        return states

    def keep(self, where: Op, states: set[_State]) -> None:
        for state in states:
            for flight in state:
                self.kept.setdefault(flight, where)

    def unwaited(self, op: Op, states: set[_State]) -> None:
        for dot in {flight.dot for state in states for flight in state}:
            self.report("unwaited", dot, f"still in flight at line {op.line} ({op.name})")

    def depths(self) -> None:
        """What can only be judged once the whole function has been seen."""
        for flight, where in self.kept.items():
            left = f"wgmma is left in flight at line {where.line}"
            if None in flight.reads:
                self.report(
                    "untraced", flight.dot, f"{left}, but an operand leads to no allocation"
                )
            traced = {read.alloc: read for read in flight.reads if read}
            for alloc in traced:
                if alloc not in self.filled:
                    why = f"{left}, and nothing is seen to fill its operand {_name(alloc)}"
                    self.report("untraced", flight.dot, why, alloc)
            rings = [a for a, read in traced.items() if read.path and a in self.refilled]
            deepest = max(rings, key=_depth, default=None)
            for alloc in rings:
                if _depth(alloc) < _depth(deepest):
                    why = (
                        f"{left}, while its operand {_name(alloc)} has {_depth(alloc)} slots and "
                        f"the sibling {_name(deepest)} {_depth(deepest)}"
                    )
                    self.report("shallow", flight.dot, why, alloc)

    # Memory

    def write(self, op: Op, states: set[_State]) -> None:
        if op.name == "ttg.local_alloc":
            target: int | _Slot | None = _Slot(op, ())
        else:
            at = _WRITERS[op.name]
            if at == _COORDINATES:
                at = op.text.partition("] ")[0].count("%")
            target = self.get(op.operands[at]) if at < len(op.operands) else None
        if isinstance(target, _Slot) and op.name != "ttg.local_dealloc":
            self.filled.add(target.alloc)
            if self.loops:
                self.refilled.add(target.alloc)
        for flight in {flight for state in states for flight in state}:
            if not isinstance(target, _Slot):
                why = (
                    f"its destination is not traced while the wgmma of line {flight.dot.line} runs"
                )
                self.report("untraced", op, why)
                continue
            for read in flight.reads:
                if read and target.may_be(read):
                    known = target.known and read.known
                    slot = f"slot {target.path[0]}" if known and target.path else "a slot"
                    why = (
                        f"{op.name} overwrites {slot} of {_name(target.alloc)} "
                        f"({_depth(target.alloc)} slots) that the wgmma of line {flight.dot.line} "
                        f"{'still reads' if known else 'may still read (index not traced)'}"
                    )
                    self.report("refilled", op, why, target.alloc)

    def arrive(self, op: Op, states: set[_State]) -> None:
        barrier = self.get(op.operands[0])
        index = barrier.path[:1] if isinstance(barrier, _Slot) and barrier.known else ()
        for flight in {flight for state in states for flight in state}:
            for read in flight.reads:
                if not (index and read and read.known and read.path and index != read.path[:1]):
                    what = _name(read.alloc) if read else "an untraced operand"
                    why = (
                        f"may give back the slot of {what} that the wgmma of line "
                        f"{flight.dot.line} still reads"
                    )
                    self.report("released", op, why, read.alloc if read else None)

    def define(self, op: Op, states: set[_State]) -> None:
        """Follow integers and slots through one plain operation; refuse an unknown toucher."""
        contents = [self.get(operand) for operand in op.operands]
        if op.name not in (*_READERS, *_WRITERS, DOT, "ttg.local_alloc", "ttng.arrive_barrier"):
            for slot in (c for c in contents if isinstance(c, _Slot)):
                if any(r and slot.may_be(r) for state in states for f in state for r in f.reads):
                    why = f"{op.name} touches {_name(slot.alloc)} while a wgmma reads it"
                    self.report("untraced", op, why, slot.alloc)
        if op.name == "ttg.local_alloc":
            self.put(op.results[0], _Slot(op, ()))
        elif op.name in _VIEWS:
            self.put(op.results[0], contents[0])
        elif op.name == "ttg.memdesc_index":
            base, index = contents[0], contents[1] if len(contents) > 1 else None
            index = index if isinstance(index, int) else None
            slot = _Slot(base.alloc, (*base.path, index)) if isinstance(base, _Slot) else None
            self.put(op.results[0], slot)
        elif op.name == "arith.select":
            condition, yes, no = contents
            chosen = {1: yes, 0: no}.get(condition, yes if yes == no else None)
            self.put(op.results[0], chosen)
        elif len(op.results) == 1:
            integers = [c if isinstance(c, int) else None for c in contents]
            self.put(op.results[0], integer_result(op, integers))


def _against_ptx(dots: int, pendings: set[int], ptx: str) -> str | None:
    """A contradiction between what was read in the TTGIR and what the PTX does, if there is one."""
    if "wgmma.mma_async" in ptx and not dots:
        return "the PTX issues wgmma but no ttng.warp_group_dot was read in the TTGIR"
    waits = {int(n) for n in re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", ptx)}
    if not waits <= pendings | {0}:
        return f"the PTX waits for {sorted(waits)} pending wgmmas, the TTGIR for {sorted(pendings)}"
    return None


def check(ttgir: str, ptx: str | None = None) -> tuple[Finding, ...]:
    """Every reason why a kernel compiled for sm_90 may lose an operand of a running wgmma.

    `ttgir` is the text of `compiled.asm["ttgir"]`; `ptx`, where given, is checked to agree with it
    about wgmma being there and about how many stay in flight. Empty when the kernel is clean, which
    it always is without wgmma (other architectures). Nothing is raised for bad text: it is a
    finding (`unreadable`).
    """
    findings: list[Finding] = []
    dots, pendings = 0, set()
    try:
        for function in functions(ttgir):
            ops = list(function.walk())
            dots += sum(op.name == DOT for op in ops)
            pendings |= {
                int(n) for op in ops if op.name == WAIT for n in _PENDINGS.findall(op.text)
            }
            run = _Run(function)
            findings += run.findings.values()
            findings += [
                Finding(broken.rule, run.function, broken.line, broken.message)
                for broken in rings.check(function)
            ]
    except (ValueError, LookupError) as error:
        findings.append(Finding("unreadable", "?", 0, str(error)))
    else:
        if ptx is not None and (why := _against_ptx(dots, pendings, ptx)):
            findings.append(Finding("unreadable", "?", 0, why))
    return tuple(sorted(findings, key=lambda f: (f.function, f.line, f.rule)))
