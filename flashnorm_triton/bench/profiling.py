"""What a contender's step launches, asked in the process that has it ready (contenders.py)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flashnorm_triton.bench import launch_groups, marks
from flashnorm_triton.bench.launch_groups import Launch

_WALL_STEPS = 5


def trace(call: Callable[[], object], device: str) -> list[Launch]:
    """The launches of one call."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with profile(activities=activities) as profiler:
        call()
        if device == "cuda":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return launch_groups.launches_in(json.loads(path.read_text(encoding="utf-8")))


def of(steps: Any) -> dict[str, Any]:
    """Fields of a record (``launch_groups.summary``) of one step of ``contenders.Steps``.

    Calls are marked module by module; a replayed graph is told by the marked calls that it was
    captured from; a compiled step, in which no module is called, by its own names.
    ``norms``: how many the model has, counted from its modules.
    """
    norms = norm_paths(steps)
    mode = steps.what.mode
    fields: dict[str, Any] = {"norms": len(norms)}
    if mode in ("eager", "graph"):
        called = trace_marked(steps, norms)
        groups = None
        launches = called
        if steps.graphed:
            steps.rewind()
            launches = trace(steps.step, steps.device)
            groups = launch_groups.groups_of_replay(launches, called)
        fields |= launch_groups.summary(launches, groups)
        fields["norms_launched"] = launch_groups.norms_launched(called)
        if mode == "eager" and steps.device == "cuda":
            fields |= wall(steps, norms)
    else:
        steps.rewind()
        steps.step()
        fields |= launch_groups.summary(trace(steps.step, steps.device))
    if marks.block_paths(steps.model):
        # Most of a block's norms are inside of kernels, which do not tell them from none.
        fields["norms_launched"] = None
    return fields


def norm_paths(steps: Any) -> tuple[str, ...]:
    """Where the norms of a contender's model are, or were before it was patched."""
    handle = steps.handle
    if handle is None:
        return marks.norm_paths(steps.model)
    return tuple(site.norm for site in handle.report.sites)


def trace_marked(steps: Any, norms: tuple[str, ...]) -> list[Launch]:
    """The launches of an eager call of the model, with what was around each."""
    steps.rewind()
    with marks.marked(steps.model, norms, steps.cache):
        steps.forward(steps.tokens)
        steps.rewind()
        return trace(lambda: steps.forward(steps.tokens), steps.device)


def wall(steps: Any, norms: tuple[str, ...]) -> dict[str, Any]:
    """The share of an eager step's time that passes in norms, launch gaps included: events around
    each, as the paper's table of the decode step has it; the median of a few steps."""
    found = []
    for _ in range(_WALL_STEPS):
        steps.rewind()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with marks.timed(steps.model, norms) as pairs:
            start.record()
            steps.forward(steps.tokens)
            stop.record()
            torch.cuda.synchronize()
        spent = sum(before.elapsed_time(after) for before, after in pairs)
        found.append((spent / start.elapsed_time(stop), spent, start.elapsed_time(stop)))
    share, norm_ms, step_ms = sorted(found)[len(found) // 2]
    return {"norm_wall_share": share, "norm_wall_ms": norm_ms, "step_wall_ms": step_ms}
