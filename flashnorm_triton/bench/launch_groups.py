"""What a profiler's trace says of a step: each launch, what launched it, and the group it is in.

A launch is told by what surrounded it on the host, not by its own name: the marks that
``marks.marked`` set around modules, then torch's operations. Names decide only where they are a
contract: this package's kernels go by the names in ``kernels/``, and a compiler's fused kernels by
those of the operations that they are made of. A replayed graph has no surroundings; its kernels are
told by those of the same name in the trace of the calls that were captured.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GROUPS = ("norm", "matmul", "attention", "rotary", "activation", "residual", "cache", "copy",
          "other")  # fmt: skip
MARK = "flashnorm"
"""First word of a mark: ``flashnorm|kind|path``."""
OWN = {
    "rms_norm_kernel": "norm", "row_rstd_kernel": "norm", "scale_rows_kernel": "norm",
    "heads_kernel": "norm", "rotary_heads_kernel": "rotary", "finish_kernel": "activation",
    "norm_gemv_kernel": "matmul", "norm_tiles_kernel": "matmul", "scaled_gemm_kernel": "matmul",
    "norm_rows_kernel": "matmul", "norm_swap_kernel": "matmul",
}  # fmt: skip
"""This package's kernels. A fused one is a matmul: its norm is no launch of its own."""
# Kinds of marks that say it all, and what else happens inside the others.
_SETTLED = ("norm", "matmul", "rotary", "activation", "cache")
_INSIDE = {"attention": "attention", "mlp": "activation"}
# Operations, without their namespace, by group; the first group that one of them is in counts.
_OPERATIONS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (group, re.compile(pattern))
    for group, pattern in (
        ("attention", r"scaled_dot_product|flash_attention|efficient_attention|_fmha"),
        ("matmul", r"^_?(scaled_)?(mm|bmm|addmm|baddbmm|matmul|linear)(_|$)|int\dpack_mm|_int_mm"),
        ("cache", r"^index_(copy|put)"),
        ("norm", r"rms_norm|layer_norm|rsqrt"),
        ("rotary", r"rotary"),
        ("activation", r"silu|gelu|relu|sigmoid|^tanh"),
        ("copy", r"^(copy|clone|contiguous|to|cat)_?$|^_to_copy"),
    )
)
# The same for the words in the name of a compiler's kernel; matmuls before norms: a product that
# was made part of a reduction is most of what the kernel does.
_FUSED: tuple[tuple[str, frozenset[str]], ...] = (
    ("attention", frozenset({"scaled", "sdpa", "flash"})),
    ("matmul", frozenset({"mm", "bmm", "addmm", "linear"})),
    ("norm", frozenset({"rsqrt"})),
    ("cache", frozenset({"index"})),
    ("rotary", frozenset({"cos", "sin", "neg", "cat"})),
    ("activation", frozenset({"silu", "gelu", "relu", "sigmoid"})),
    ("residual", frozenset({"add"})),
    ("copy", frozenset({"copy", "clone"})),
)
_COMPILED = re.compile(r"^(triton|cpp)_[a-z]*_?fused_(.*?)(_\d+)?$")
# What computes nothing, or only for what it is in, in a CPU trace.
_VIEWS = re.compile(
    r"^(empty|as_strided|view|reshape|_?unsafe_view|resize|detach|expand|select|slice|transpose|t$|"
    r"permute|unsqueeze|squeeze|narrow|split|result_type|item|_local_scalar|lift|set_|alias|is_|"
    r"resolve_|promote_types|scalar_tensor|fill_|zero_|to$)"
)
_LAUNCHERS = ("cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver")


@dataclass(frozen=True)
class Launch:
    """A kernel (or a copy of the driver's), its microseconds, and what was around its launch, the
    outermost first: marks as (kind, path), and torch's operations without their namespace."""

    name: str
    us: float
    marks: tuple[tuple[str, str], ...] = ()
    operations: tuple[str, ...] = ()
    copy: bool = False


def launches_in(trace: Mapping[str, Any]) -> list[Launch]:
    """The launches of a Chrome trace of torch's profiler, in the order in which they ran.

    Without any kernel in it (a CPU), the innermost operations that compute something stand for
    launches: enough to try what reads them.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    ranges = defaultdict(list)
    launchers: dict[Any, tuple[Any, float]] = {}
    kernels = []
    for event in events:
        kind, args = event.get("cat"), event.get("args", {})
        if kind in ("cpu_op", "user_annotation"):
            ranges[event["tid"]].append(event)
        elif kind in _LAUNCHERS and "correlation" in args:
            launchers[args["correlation"]] = event["tid"], float(event["ts"])
        elif kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels.append(event)
    for own in ranges.values():
        own.sort(key=lambda event: (float(event["ts"]), -float(event["dur"])))
    if not kernels:
        return [launch for own in ranges.values() for launch in _leaves(own)]
    around = _around(ranges, launchers)
    found = []
    for event in sorted(kernels, key=lambda event: float(event["ts"])):
        marks, operations = around.get(event.get("args", {}).get("correlation"), ((), ()))
        copy = event["cat"] != "kernel"
        found.append(Launch(event["name"], float(event["dur"]), marks, operations, copy))
    return found


_Around = tuple[tuple[tuple[str, str], ...], tuple[str, ...]]


def _around(
    ranges: Mapping[Any, Sequence[Mapping[str, Any]]], launchers: Mapping[Any, tuple[Any, float]]
) -> dict[Any, _Around]:
    """By correlation: what was open in the launching thread."""
    found: dict[Any, _Around] = {}
    by_thread = defaultdict(list)
    for correlation, (thread, at) in launchers.items():
        by_thread[thread].append((at, correlation))
    for thread, calls in by_thread.items():
        waiting = list(ranges.get(thread, ()))[::-1]
        opened: list[Mapping[str, Any]] = []
        for at, correlation in sorted(calls):
            while waiting and float(waiting[-1]["ts"]) <= at:
                opened.append(waiting.pop())
            opened = [e for e in opened if float(e["ts"]) + float(e["dur"]) >= at]
            found[correlation] = _told(opened)
    return found


def _told(opened: Iterable[Mapping[str, Any]]) -> _Around:
    marks, operations = [], []
    for event in opened:
        name = event["name"]
        if name.startswith(f"{MARK}|"):
            _, kind, path = name.split("|", 2)
            marks.append((kind, path))
        elif event["cat"] == "cpu_op":
            operations.append(name.rpartition("::")[2])
    return tuple(marks), tuple(operations)


def _leaves(events: Sequence[Mapping[str, Any]]) -> list[Launch]:
    """The innermost operations of one thread's ranges, which are sorted by their start."""
    events = [e for e in events if not _VIEWS.match(e["name"].rpartition("::")[2])]
    found = []
    opened: list[Mapping[str, Any]] = []
    for index, event in enumerate(events):
        start = float(event["ts"])
        opened = [e for e in opened if float(e["ts"]) + float(e["dur"]) > start]
        opened.append(event)
        after = events[index + 1] if index + 1 < len(events) else None
        inner = after is not None and float(after["ts"]) < start + float(event["dur"])
        marks, operations = _told(opened)
        if event["cat"] == "cpu_op" and not inner:
            found.append(Launch(event["name"], float(event["dur"]), marks, operations))
    return found


def own_name(kernel: str) -> str | None:
    """The name in ``kernels/`` of a launched kernel of this package, else None."""
    return next((own for own in OWN if kernel == own or kernel.startswith(f"{own}_")), None)


def fused_parts(kernel: str) -> tuple[str, ...]:
    """The words of the operations that a compiler's kernel is made of; none for another's."""
    match = _COMPILED.match(kernel)
    return tuple(filter(None, match[2].split("_"))) if match else ()


def group_of(launch: Launch) -> str:
    """The group of a launch (``GROUPS``)."""
    if launch.copy:
        return "copy"
    if (own := own_name(launch.name)) is not None:
        return OWN[own]
    if words := fused_parts(launch.name):
        return next((group for group, any_of in _FUSED if any_of & set(words)), "other")
    by_operation = _by_operation(launch.operations)
    if not launch.marks:
        return by_operation or "other"
    kind = launch.marks[-1][0]
    # Where a patched model has its norms, the products of their linears are launched too.
    if kind == "norm" and by_operation == "matmul":
        return "matmul"
    if kind in _SETTLED:
        return kind
    if by_operation is not None:
        return by_operation
    if kind == "layer" and {"add", "add_"} & set(launch.operations):
        return "residual"
    return _INSIDE.get(kind, "other")


def _by_operation(operations: Sequence[str]) -> str | None:
    """The group that an operation around a launch is in; the outermost one decides."""
    for operation in operations:
        for group, pattern in _OPERATIONS:
            if pattern.search(operation):
                return group
    return None


def groups_of_replay(replayed: Sequence[Launch], captured: Sequence[Launch]) -> list[str]:
    """The group of each launch of a replayed graph, from the trace of the calls captured in it.

    Place by place where both are the same kernels in the same order; else by name, each place the
    group that a kernel of that name was in most often, and the launch's own where none was.
    """
    mine = [launch for launch in captured if not launch.copy]
    kernels = [launch for launch in replayed if not launch.copy]
    if [launch.name for launch in mine] == [launch.name for launch in kernels]:
        told = iter([group_of(launch) for launch in mine])
        return ["copy" if launch.copy else next(told) for launch in replayed]
    seen: dict[str, Counter[str]] = defaultdict(Counter)
    for launch in mine:
        seen[launch.name][group_of(launch)] += 1
    return [
        seen[launch.name].most_common(1)[0][0]
        if not launch.copy and launch.name in seen
        else group_of(launch)
        for launch in replayed
    ]


def summary(launches: Sequence[Launch], groups: Sequence[str] | None = None) -> dict[str, Any]:
    """Fields of a record: ``launches`` (kernels, without the driver's copies), ``busy_ms``, the
    ``groups`` that have any, and of the norms ``norm_launches``, ``norm_ms``, their share of the
    busy time, and ``norms_launched``: how many were seen to run.

    A norm is seen by its module's mark, or where nothing is marked by the reciprocal root in a
    compiler's kernel; None where neither shows (a block's fused kernels).
    """
    groups = groups or [group_of(launch) for launch in launches]
    busy = sum(launch.us for launch in launches)
    rows = []
    for group in GROUPS:
        own = [one for one, its in zip(launches, groups, strict=True) if its == group]
        if own:
            count = sum(not launch.copy for launch in own)
            rows.append({"group": group, "launches": count, "us": sum(one.us for one in own)})
    norms = next((row for row in rows if row["group"] == "norm"), {"launches": 0, "us": 0.0})
    return {
        "launches": sum(not launch.copy for launch in launches),
        "busy_ms": busy / 1e3,
        "norm_launches": norms["launches"],
        "norm_ms": norms["us"] / 1e3,
        "norm_share": norms["us"] / busy if busy else None,
        "norms_launched": norms_launched(launches),
        "groups": rows,
    }


def norms_launched(launches: Sequence[Launch]) -> int | None:
    """How many norms the launches show (``summary``)."""
    marked = {path for one in launches for kind, path in one.marks if kind == "norm"}
    if marked:
        return len(marked)
    return sum("rsqrt" in fused_parts(one.name) for one in launches) or None
