"""Compiles kernels ahead of time for GPUs that need not be there, and says what they cost.

    python -m flashnorm_triton.tuning.aot --json report.json [--targets sm80 sm90] [--units m:f ...]

compiles every unit that a launcher describes (`flashnorm_triton.launch.compile_units` unless
`--units` names others) for each target it claims, lints the sm90 ones (`tuning/lint.py`), writes
one record a compile and prints a table. It ends with status 1 when a compile fails, needs more
shared memory than the target has, or does not pass the lint.

Run it in a process of its own where TRITON_INTERPRET is set: the interpreter replaces kernels when
they are decorated, and there is nothing left to compile. Triton's disk cache makes a second run
cheap; TRITON_CACHE_DIR says where it is.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashnorm_triton.compile_unit import TARGETS, CompileUnit
from flashnorm_triton.tuning import lint

SHARED_LIMIT = {"sm80": 166_912, "sm90": 232_448, "sm100": 232_448, "gfx942": 65_536}
"""Most shared memory, in bytes, that one block of threads can have."""

_GPU = {
    "sm80": ("cuda", 80, 32),
    "sm90": ("cuda", 90, 32),
    "sm100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
DEFAULT_UNITS = "flashnorm_triton.launch:compile_units"


class AotError(RuntimeError):
    """A kernel could not be compiled ahead of time; the subclasses say why."""


class UnknownTarget(AotError):
    """The target is none of `TARGETS`."""


class UnsupportedTarget(AotError):
    """The unit does not claim to support the target."""


class InterpretedKernel(AotError):
    """The function is not a compilable kernel: TRITON_INTERPRET was set when it was decorated."""


class CompileFailed(AotError):
    """Triton, LLVM or the assembler refused the kernel; the cause's message is kept."""


@dataclass(frozen=True)
class Compiled:
    """What one unit became for one target.

    `assembly` is PTX or AMD GCN. `registers` is a thread's (a warp-specialised kernel shares them
    out again while it runs, so there it is only the limit). `spill_bytes` is a thread's stack, in
    which a Triton kernel keeps nothing but registers that did not fit. `shared_bytes` is a block's.
    `num_warps` counts every warp of the block, producers too. `seconds` is the time it took here,
    near zero for a hit in Triton's disk cache.
    """

    name: str
    target: str
    ttgir: str
    assembly: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    num_warps: int
    seconds: float

    @property
    def fits(self) -> bool:
        """Whether the target has that much shared memory."""
        return self.shared_bytes <= SHARED_LIMIT[self.target]


@dataclass(frozen=True)
class Failure:
    """One unit that did not compile for one target, and the message that said so."""

    name: str
    target: str
    error: str


def _cubin_usage(cubin: bytes) -> tuple[int, int]:
    """(registers, stack bytes) of a thread, as recorded in the binary that would be loaded."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", said)
    if not usage:
        raise AotError(f"cuobjdump names no registers: {said!r}")
    return int(usage[1]), int(usage[2])


def _gcn_usage(assembly: str) -> tuple[int, int]:
    """(vector registers, scratch bytes) of a work item, from the metadata in the text."""
    counts = {
        key: int(value) for key, value in re.findall(r"^ +\.(\w+): +(\d+)$", assembly, re.MULTILINE)
    }
    try:
        scratch = max(counts["private_segment_fixed_size"], 4 * counts["vgpr_spill_count"])
        return counts["vgpr_count"], scratch
    except KeyError as missing:
        raise AotError(f"the GCN metadata has no {missing}") from None


def compile_unit(unit: CompileUnit, target: str) -> Compiled:
    """Compile one unit for one target ("sm80", "sm90", "sm100" or "gfx942"); no GPU is used.

    Raises UnknownTarget, UnsupportedTarget, InterpretedKernel or CompileFailed, each naming the
    unit, the target and what to do.
    """
    if target not in TARGETS:
        raise UnknownTarget(f"{unit.name}: target {target!r} is none of {', '.join(TARGETS)}")
    if target not in unit.targets:
        claimed = ", ".join(unit.targets)
        raise UnsupportedTarget(f"{unit.name}: claims {claimed}, so it is not built for {target}")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    if not isinstance(unit.fn, JITFunction):
        raise InterpretedKernel(
            f"{unit.name}: {type(unit.fn).__name__} is not a compilable kernel. Unset "
            "TRITON_INTERPRET before the module that defines it is imported"
        )
    source: type[ASTSource] = ASTSource
    if unit.gluon:
        from triton.experimental.gluon._runtime import GluonASTSource as source
    position = {name: i for i, name in enumerate(unit.signature)}
    started = time.perf_counter()
    try:
        kernel = triton.compile(
            source(
                unit.fn,
                dict(unit.signature),
                {(position[name],): value for name, value in unit.constexprs.items()},
                {(i,): [["tt.divisibility", 16]] for i in unit.divisible_by_16},
            ),
            target=GPUTarget(*_GPU[target]),
            options={
                "num_warps": unit.num_warps,
                "num_stages": unit.num_stages,
                **({"maxnreg": unit.max_registers} if unit.max_registers else {}),
            },
        )
        if target.startswith("sm"):
            assembly = kernel.asm["ptx"]
            registers, spill = _cubin_usage(kernel.asm["cubin"])
        else:
            assembly = kernel.asm["amdgcn"]
            registers, spill = _gcn_usage(assembly)
    except Exception as error:  # Triton's errors share no base class
        raise CompileFailed(f"{unit.name} for {target}: {type(error).__name__}: {error}") from error
    return Compiled(
        name=unit.name,
        target=target,
        ttgir=kernel.asm["ttgir"],
        assembly=assembly,
        registers=registers,
        spill_bytes=spill,
        shared_bytes=kernel.metadata.shared,
        num_warps=kernel.metadata.num_warps,
        seconds=time.perf_counter() - started,
    )


# Kernels cannot be pickled: workers are forked and find the work here, by its place in the list.
_work: list[tuple[CompileUnit, str]] = []


def _attempt(index: int) -> Compiled | Failure:
    unit, target = _work[index]
    try:
        return compile_unit(unit, target)
    except AotError as error:
        return Failure(unit.name, target, str(error))


def _pool(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork"))


def _isolated(index: int) -> Compiled | Failure:
    unit, target = _work[index]
    with _pool(1) as alone:
        try:
            return alone.submit(_attempt, index).result()
        except BrokenProcessPool:
            return Failure(unit.name, target, "the compiler crashed the process that ran it")


def compile_all(
    units: Iterable[CompileUnit], targets: Sequence[str] = TARGETS, jobs: int | None = None
) -> list[Compiled | Failure]:
    """Compile every unit for each of `targets` that it claims, in `jobs` processes.

    `jobs` defaults to the number of cores. Results come in the order of units, then targets; what
    does not compile is a Failure in its place, also when the compiler takes its process down.
    Workers are forked, so call this before anything has started threads or a CUDA context.
    Raises UnknownTarget, and ValueError where two units share a name.
    """
    global _work
    units = list(units)
    unknown = [t for t in targets if t not in TARGETS]
    if unknown:
        raise UnknownTarget(f"targets {unknown} are none of {', '.join(TARGETS)}")
    names = [unit.name for unit in units]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"units must have different names; repeated: {', '.join(repeated)}")
    _work = [(unit, target) for unit in units for target in targets if target in unit.targets]
    results: dict[int, Compiled | Failure] = {}
    with _pool(jobs or os.cpu_count() or 1) as pool, contextlib.suppress(BrokenProcessPool):
        for i, result in zip(range(len(_work)), pool.map(_attempt, range(len(_work))), strict=True):
            results[i] = result
    # One crash breaks the whole pool: what is left runs one by one, so that it names its unit.
    return [results[i] if i in results else _isolated(i) for i in range(len(_work))]


def units_from(place: str) -> list[CompileUnit]:
    """The units that `"module:function"` yields.

    Raises AotError where there is no such function or where it yields something else.
    """
    module, _, function = place.partition(":")
    try:
        units = list(getattr(importlib.import_module(module), function)())
    except (ImportError, AttributeError, TypeError) as error:
        raise AotError(f"no compile units at {place!r} (module:function): {error}") from error
    if stray := [type(unit).__name__ for unit in units if not isinstance(unit, CompileUnit)]:
        raise AotError(f"{place} yields {stray[0]}, not CompileUnit")
    return units


def record(result: Compiled | Failure) -> dict[str, Any]:
    """A result as plain data, without its texts; an sm90 compile has its lint findings."""
    row: dict[str, Any] = {"error": None, **asdict(result)}
    if isinstance(result, Compiled):
        row["fits"] = result.fits
        found = lint.check(result.ttgir, result.assembly) if result.target == "sm90" else ()
        row["findings"] = [asdict(finding) for finding in found]
        del row["ttgir"], row["assembly"]
    return row


def _line(row: dict[str, Any]) -> str:
    if row["error"]:
        return f"{row['name']:<44} {row['target']:<7} FAILED {row['error'].splitlines()[0]}"
    verdict = list(dict.fromkeys(finding["rule"] for finding in row["findings"]))
    verdict += (
        [] if row["fits"] else [f"more than the {SHARED_LIMIT[row['target']]} bytes there are"]
    )
    return (
        f"{row['name']:<44} {row['target']:<7} {row['num_warps']:>5} {row['registers']:>9} "
        f"{row['spill_bytes']:>6} {row['shared_bytes']:>7} {row['seconds']:>6.2f}  "
        f"{', '.join(verdict) or 'ok'}"
    )


def stem(name: str, target: str) -> str:
    """How the files of a unit's texts for a target are called, but for their kind."""
    return re.sub(r"[^\w.=-]+", "_", f"{name}.{target}")


def _write_texts(result: Compiled, folder: Path) -> None:
    path = folder / stem(result.name, result.target)
    path.with_name(f"{path.name}.ttgir").write_text(result.ttgir)
    kind = "ptx" if result.target.startswith("sm") else "amdgcn"
    path.with_name(f"{path.name}.{kind}").write_text(result.assembly)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of the module's docstring; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m flashnorm_triton.tuning.aot")
    parser.add_argument("--json", type=Path, required=True, help="where to write the records")
    parser.add_argument("--targets", nargs="+", default=TARGETS, metavar="TARGET")
    parser.add_argument("--units", nargs="+", default=[DEFAULT_UNITS], metavar="MODULE:FUNCTION")
    parser.add_argument("--jobs", type=int, default=None, help="processes (default: cores)")
    parser.add_argument("--texts", type=Path, help="a folder for the TTGIR and assembly texts")
    args = parser.parse_args(argv)
    started = time.perf_counter()
    try:
        units = [unit for place in args.units for unit in units_from(place)]
        results = compile_all(units, args.targets, args.jobs)
    except (AotError, ValueError) as error:
        parser.error(str(error))
    rows = [record(result) for result in results]
    if args.texts:
        args.texts.mkdir(parents=True, exist_ok=True)
        for result in results:
            if isinstance(result, Compiled):
                _write_texts(result, args.texts)
    import triton

    seconds = time.perf_counter() - started
    report = {"schema": 1, "triton": triton.__version__, "seconds": seconds, "records": rows}
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{'kernel':<44} {'target':<7} warps registers  spill  shared  secs")
    for row in rows:
        print(_line(row))
    bad = [row for row in rows if row["error"] or not row["fits"] or row["findings"]]
    spilled = sum(row.get("spill_bytes", 0) > 0 for row in rows)
    print(
        f"{len(rows)} compiles in {seconds:.0f} s with Triton {triton.__version__}: "
        f"{len(bad)} refused, {spilled} with register spills"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
