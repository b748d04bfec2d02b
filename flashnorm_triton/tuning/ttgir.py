"""Reads the printed form of Triton's GPU dialect (TTGIR) into a tree of operations.

Only the structure is read: which operation defines a value, which use it, and how regions nest.
MLIR prints one operation a line and braces around regions, so lines are enough. Whatever does not
fit that picture raises `UnreadableTtgir`: a reader that skips what it does not know would let a
check built on it pass by accident.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_PLAIN_STRING = re.compile(r"[\w.:]*")
_LOCATION = re.compile(r"(?<![\w.])loc\(")
_RESULTS = re.compile(r"((?:%[\w$.-]+(?::\d+)?(?:, )?)+) = ")
_NAME = re.compile(r'"?(module|[a-z_]\w*(?:\.\w+)+)"?(?=[\s(<{]|$)')
_USE = re.compile(r"(%[\w$.-]+)(?:#(\d+))?")
_PAIR = re.compile(r"(%[\w$.-]+) = (%[\w$.-]+(?:#\d+)?)")
_ARGUMENT = re.compile(r"(%[\w$.-]+):")
_LATER_REGION = re.compile(r"(?:default|partition\d+\(.*\) num_warps\(\d+\)) \{$")


class UnreadableTtgir(ValueError):
    """The text is not printed TTGIR as far as this reader knows it; the message names the line."""


class Value:
    """One SSA value. Compared by identity: sibling regions may reuse a name."""

    def __init__(self, name: str, line: int) -> None:
        self.name = name
        self.line = line

    def __repr__(self) -> str:
        return f"{self.name} (line {self.line})"


@dataclass(eq=False)
class Region:
    """A brace block: its arguments and operations; `blocks` > 1 means unstructured control flow."""

    args: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    blocks: int = 1


@dataclass(eq=False)
class Op:
    """One operation. `text` is its line without results, locations and free-form strings.

    `operands` are in printed order; for a loop, bounds first and then the initial values of the
    carried ones, whose names inside the loop are the region's arguments.
    """

    name: str
    line: int
    text: str
    results: list[Value]
    operands: list[Value]
    regions: list[Region] = field(default_factory=list)

    def walk(self) -> Iterator[Op]:
        """This operation and everything nested in it, in printed order."""
        yield self
        for region in self.regions:
            for op in region.ops:
                yield from op.walk()


def _without_locations(line: str) -> str:
    while match := _LOCATION.search(line):
        depth = 0
        for end in range(match.end() - 1, len(line)):
            depth += {"(": 1, ")": -1}.get(line[end], 0)
            if depth == 0:
                break
        else:
            raise UnreadableTtgir(f"unclosed location: {line.strip()!r}")
        line = line[: match.start()].rstrip() + line[end + 1 :]
    return line


def _clean(line: str) -> str:
    # Strings may hold anything, braces and parentheses too; only simple ones (names) matter here.
    line = _STRING.sub(lambda m: m[0] if _PLAIN_STRING.fullmatch(m[1]) else '"..."', line)
    return _without_locations(line).strip()


class _Reader:
    def __init__(self) -> None:
        self.top = Region()
        self.regions = [self.top]
        self.scopes: list[dict[str, Value]] = [{}]
        self.owners: list[Op] = []
        self.line = 0

    def fail(self, why: str, text: str) -> UnreadableTtgir:
        return UnreadableTtgir(f"line {self.line}: {why}: {text[:160]!r}")

    def define(self, name: str) -> Value:
        value = Value(name, self.line)
        self.scopes[-1][name] = value
        return value

    def use(self, name: str, index: str | None, text: str) -> Value:
        key = name if index in (None, "", "0") else f"{name}#{index}"
        for scope in reversed(self.scopes):
            if key in scope:
                return scope[key]
        raise self.fail(f"{key} is used but nothing above defines it", text)

    def uses(self, text: str) -> list[Value]:
        return [self.use(name, index, text) for name, index in _USE.findall(text)]

    def open(self, owner: Op, args: list[str]) -> None:
        region = Region()
        owner.regions.append(region)
        self.regions.append(region)
        self.scopes.append({})
        self.owners.append(owner)
        region.args = [self.define(name) for name in args]

    def close(self, text: str) -> Op:
        if not self.owners:
            raise self.fail("a brace closes nothing", text)
        self.regions.pop()
        self.scopes.pop()
        return self.owners.pop()

    def block_label(self, text: str) -> None:
        region = self.regions[-1]
        args = _ARGUMENT.findall(text)
        if region.ops or region.args:
            region.blocks += 1
            for name in args:
                self.define(name)
        else:
            region.args = [self.define(name) for name in args]

    def operation(self, text: str) -> None:
        names: list[str] = []
        match = _RESULTS.match(text)
        if match:
            for name in match[1].split(", "):
                base, _, count = name.partition(":")
                names += [base, *(f"{base}#{i}" for i in range(1, int(count or 1)))]
            text = text[match.end() :]
        named = _NAME.match(text)
        if not named:
            raise self.fail("not an operation", text)
        args: list[str] = []
        if named[1] in ("scf.for", "scf.while"):
            carried = _PAIR.findall(text)
            args = [name for name, _ in carried]
            operands = [v for _, init in carried for v in self.uses(init)]
            if named[1] == "scf.for":
                # The first pair is the induction variable and its lower bound.
                bounds = re.search(r" to (%[\w$.-]+(?:#\d+)?) step (%[\w$.-]+(?:#\d+)?)", text)
                if not bounds or not operands:
                    raise self.fail("a loop without bounds", text)
                operands[1:1] = self.uses(f"{bounds[1]} {bounds[2]}")
        elif named[1].endswith(".func"):
            args, operands = _ARGUMENT.findall(text), []
        else:
            operands = self.uses(text)
        op = Op(named[1], self.line, text, [], operands)
        op.results = [self.define(name) for name in names]
        self.regions[-1].ops.append(op)
        if text.endswith("{"):
            self.open(op, args)

    def read(self, text: str) -> None:
        if text.startswith("}"):
            owner = self.close(text)
            if text.endswith("{"):
                if text not in ("} else {", "} do {", "}, {"):
                    raise self.fail("an unknown kind of region", text)
                self.open(owner, [])
        elif text.startswith("^"):
            self.block_label(text)
        elif _LATER_REGION.match(text):
            if not self.regions[-1].ops or self.regions[-1].ops[-1].name != "ttg.warp_specialize":
                raise self.fail("a partition that belongs to nothing", text)
            self.open(self.regions[-1].ops[-1], _ARGUMENT.findall(text))
        else:
            self.operation(text)


def functions(ttgir: str) -> list[Op]:
    """The `tt.func` operations of a printed module, each a tree of operations and regions.

    Raises UnreadableTtgir, naming the line, for anything that is not a printed TTGIR module.
    """
    reader = _Reader()
    for number, raw in enumerate(ttgir.splitlines(), 1):
        reader.line = number
        if raw.startswith("#") or not raw.strip():
            continue
        text = _clean(raw)
        if text:
            reader.read(text)
    if reader.owners:
        raise UnreadableTtgir(f"the text ends inside {reader.owners[-1].name}: it is cut short")
    found = [op for top in reader.top.ops for op in top.walk() if op.name == "tt.func"]
    if not found:
        raise UnreadableTtgir("no tt.func in the text: this is not a TTGIR module")
    return found


def integer_result(op: Op, operands: list[int | None]) -> int | None:
    """What a scalar integer operation of the arith dialect gives for these operands.

    None stands for a value that is not known, and is the answer for every operation that is not
    listed here. Booleans are 0 and 1.
    """
    if op.name == "arith.constant":
        literal = re.match(r"arith\.constant (true|false|-?\d+)(?: : (?:i\d+|index))?$", op.text)
        if not literal:
            return None
        return {"true": 1, "false": 0}.get(literal[1]) if literal[1].isalpha() else int(literal[1])
    if any(v is None for v in operands) or len(operands) != 2:
        return None
    a, b = operands
    if op.name == "arith.cmpi":
        predicate = op.text.split()[1].rstrip(",")
        if predicate[0] == "u" and (a < 0 or b < 0):
            return None
        order = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}
        return int(order[predicate[-2:]])
    if op.name in ("arith.divsi", "arith.divui", "arith.remsi", "arith.remui"):
        if b == 0 or (op.name.endswith("ui") and (a < 0 or b < 0)):
            return None
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        return quotient if "div" in op.name else a - quotient * b
    simple = {
        "arith.addi": lambda: a + b,
        "arith.subi": lambda: a - b,
        "arith.muli": lambda: a * b,
        "arith.andi": lambda: a & b,
        "arith.xori": lambda: a ^ b,
        "arith.minsi": lambda: min(a, b),
        "arith.maxsi": lambda: max(a, b),
    }.get(op.name)
    return simple() if simple else None
