"""Ring lint: do the producer and the consumers of a warp-specialised kernel agree about a slot?

A Gluon kernel fills a ring of shared-memory slots in one partition and reads it in others. Slot i
is guarded by two barriers: ``ready`` counts the copies' bytes, ``free`` the consumers' arrivals.
Nothing but these keeps a copy from overtaking a reader, so their counts must match the code:

- `unguarded`: a partition copies into a ring that another one reads, without waiting for a barrier
  in the same block of code;
- `arrivals`: the barrier that it waits for is initialised with another count than the number of
  partitions that read the ring, or one of those never arrives there. Too low a count refills a slot
  that is still being read, too high a one waits for ever;
- `bytes`: a barrier expects other bytes than the copies that signal it bring: too few releases
  readers before their tile is there, too many waits for ever.

The order of reads, instructions and arrivals inside one partition is the other lint's (lint.py).
Rings are followed to their allocation by name; how often each side walks around is not counted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from flashnorm_triton.tuning.ttgir import Op, Region, UnreadableTtgir, Value

_COPY = "ttng.async_tma_copy_global_to_local"
_VIEWS = (
    "ttg.memdesc_index", "ttg.memdesc_trans", "ttg.memdesc_reshape", "ttg.memdesc_subslice",
)  # fmt: skip
_READS = ("ttng.warp_group_dot", "ttg.local_load")
_COUNT = re.compile(r"^ttng\.(?:init|arrive)_barrier %[\w$.#-]+, (\d+)")
_EXPECTED = re.compile(r"^ttng\.barrier_expect %[\w$.#-]+, (\d+)")
_TENSOR = re.compile(r"tensordesc<tensor<([\dx]+)x[a-z]+(\d+)")


@dataclass(frozen=True)
class Broken:
    """One disagreement: the rule, the line of the text, what is wrong."""

    rule: str
    line: int
    message: str


@dataclass
class _Partition:
    """What one group of warps does to the allocations, by the block of code it does it in."""

    reads: set[Value] = field(default_factory=set)
    arrives: set[Value] = field(default_factory=set)
    blocks: list[_Block] = field(default_factory=list)


@dataclass
class _Block:
    waits: set[Value] = field(default_factory=set)
    copies: list[tuple[Op, Value, Value, int]] = field(default_factory=list)
    expects: list[tuple[Op, Value, int]] = field(default_factory=list)


def _number(pattern: re.Pattern[str], op: Op) -> int:
    found = pattern.search(op.text)
    if not found:
        raise UnreadableTtgir(f"line {op.line}: no count in {op.text[:160]!r}")
    return int(found[1])


def _bytes(copy: Op) -> int:
    found = _TENSOR.search(copy.text)
    if not found:
        raise UnreadableTtgir(f"line {copy.line}: no tile in {copy.text[:200]!r}")
    return math.prod(map(int, found[1].split("x"))) * int(found[2]) // 8


class _Reader:
    """Follows views of shared memory to the allocation they are of."""

    def __init__(self) -> None:
        self.root: dict[Value, Value] = {}

    def of(self, value: Value) -> Value:
        return self.root.get(value, value)

    def follow(self, op: Op) -> None:
        if op.name in _VIEWS:
            self.root[op.results[0]] = self.of(op.operands[0])

    def partition(self, region: Region) -> _Partition:
        found = _Partition()
        self._walk(region, found)
        return found

    def _walk(self, region: Region, into: _Partition) -> None:
        block = _Block()
        for op in region.ops:
            self.follow(op)
            if op.name in _READS:
                into.reads |= {self.of(operand) for operand in op.operands}
            elif op.name == "ttng.wait_barrier":
                block.waits.add(self.of(op.operands[0]))
            elif op.name == "ttng.arrive_barrier":
                into.arrives.add(self.of(op.operands[0]))
            elif op.name == "ttng.barrier_expect":
                block.expects.append((op, self.of(op.operands[0]), _number(_EXPECTED, op)))
            elif op.name == _COPY:
                # %descriptor[%row, %column] %slot, %barrier, %predicate
                at = op.text.partition("] ")[0].count("%")
                slot, barrier = map(self.of, op.operands[at : at + 2])
                block.copies.append((op, slot, barrier, _bytes(op)))
            for inner in op.regions:
                self._walk(inner, into)
        into.blocks.append(block)


def check(function: Op) -> Iterator[Broken]:
    """Every disagreement about a ring in one function; none without warp specialisation."""
    reader, counts = _Reader(), {}
    special = []
    for op in function.walk():
        reader.follow(op)
        if op.name == "ttng.init_barrier":
            counts.setdefault(reader.of(op.operands[0]), set()).add(_number(_COUNT, op))
        elif op.name == "ttg.warp_specialize":
            special.append(op)
    for op in special:
        default, *workers = op.regions
        for worker in workers:
            captured = zip(worker.args, op.operands, strict=False)
            reader.root.update({inner: reader.of(outer) for inner, outer in captured})
        yield from _compare([reader.partition(region) for region in (default, *workers)], counts)


def _compare(partitions: list[_Partition], counts: dict[Value, set[int]]) -> Iterator[Broken]:
    for producer in partitions:
        for block in producer.blocks:
            for op, barrier, expected in block.expects:
                brought = sum(
                    size for _, _, signalled, size in block.copies if signalled is barrier
                )
                if brought != expected:
                    yield Broken(
                        "bytes", op.line, f"expects {expected} bytes, {brought} are copied with it"
                    )
            for op, ring, _, _ in block.copies:
                readers = [p for p in partitions if p is not producer and ring in p.reads]
                if not readers:
                    continue
                if not block.waits:
                    yield Broken("unguarded", op.line, f"refills {ring.name} without a wait")
                for barrier in block.waits:
                    arriving = sum(barrier in reading.arrives for reading in readers)
                    initial = counts.get(barrier, set())
                    if initial != {len(readers)} or arriving != len(readers):
                        yield Broken(
                            "arrivals", op.line,
                            f"{len(readers)} partitions read {ring.name}, {arriving} arrive at "
                            f"{barrier.name}, which is initialised with {sorted(initial)}",
                        )  # fmt: skip
