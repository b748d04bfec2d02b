"""``flashnorm info``: what runs here, which tables serve this GPU, and which plan serves a cell."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashnorm_triton import tables
from flashnorm_triton.plans import Device, Problem
from flashnorm_triton.tables import Gpu, Table

if TYPE_CHECKING:
    from rich.table import Table as RichTable

_SHAPES = "2048:3072,2048:16384"


def info(
    model: Annotated[
        str | None,
        typer.Option(help="Show a model's cells: a config.json, its folder or a hub id."),
    ] = None,
    shapes: Annotated[
        str | None, typer.Option(help=f"Show the cells of these K:N. Left out: {_SHAPES}.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32, or several.")] = "bf16",
    epilogue: Annotated[
        str, typer.Option(help="What follows the linear, as in flashnorm tune.")
    ] = "plain",
) -> None:
    """Print the device, the versions, and which plans norm_linear uses here, and why."""
    import torch
    from rich.console import Console

    from flashnorm_triton import __version__, runtime
    from flashnorm_triton.tuning import sites

    try:
        if model is not None and shapes is not None:
            raise ValueError("give --model or --shapes, not both")
        wanted = sites.parse_shapes(shapes or _SHAPES)
        dtypes, epilogues = sites.parse_dtypes(dtype), sites.parse_epilogues(epilogue)
        if model is not None:
            wanted = sites.sites_of(sites.skeleton(model))
        cells = sites.problems(wanted, dtypes, epilogues=epilogues)
    except ValueError as error:
        typer.echo(f"flashnorm info: {error}", err=True)
        raise typer.Exit(2) from error
    console = Console()
    console.print(f"flashnorm_triton {__version__} on Python {platform.python_version()}")
    for name in ("torch", "triton", "transformers"):
        try:
            console.print(f"  {name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            console.print(f"  {name} is not installed")
    if not torch.cuda.is_available():
        console.print(f"GPU: none that torch can use; CPU threads: {os.cpu_count()}")
    reason = runtime.triton_unavailable()
    if reason:
        console.print(f"Triton kernels: not used, {reason}")
        console.print("norm_linear runs in plain torch at every size")
        return
    index = torch.cuda.current_device()
    facts = runtime.device_facts(index)
    gpu = Gpu(torch.cuda.get_device_name(index), facts.sm_count, facts.capability)
    console.print(f"GPU: {gpu.name}, {gpu.sm_count} multiprocessors")
    console.print("Triton kernels: used")
    for line in table_lines(gpu):
        console.print(f"  {line}", soft_wrap=True)
    console.print(plan_table(gpu, facts, cells))


def table_lines(gpu: Gpu) -> list[str]:
    """What each table that may serve a GPU holds, one line each, in the order of lookups."""
    found = list(tables.survey(gpu))
    lines = [_line(source, path, table) for source, path, table in found]
    if all(source != "user" for source, _, _ in found):
        lines.insert(0, f"your table: none ({_place(gpu)}); flashnorm tune makes it")
    if os.environ.get("FLASHNORM_TABLES"):
        lines.append(f"FLASHNORM_TABLES={os.environ['FLASHNORM_TABLES']}")
    return lines


def _place(gpu: Gpu) -> str:
    try:
        return str(tables.user_path(gpu))
    except tables.TableError as error:
        return str(error)


def _line(source: str, path: Path, table: Table | Exception) -> str:
    whose = {
        "user": "your table",
        "shipped": "shipped table",
        "capability": "shipped table of a like GPU",
    }[source]
    if isinstance(table, Exception):
        return f"{whose}: {path}: not used, {table}"
    dates = sorted(entry.run.date[:10] for entry in table.entries.values())
    when = f", {dates[0]} to {dates[-1]}" if dates else ""
    from flashnorm_triton.results import kernel_hash  # imports torch, which --help must not

    here = kernel_hash()
    stale = sum(entry.run.kernel_hash != here for entry in table.entries.values())
    old = f"; {stale} cells stale (tuned with other kernel sources)" if stale else ""
    return f"{whose}: {path}: {table.gpu.name}, {len(table.entries)} cells{when}{old}"


def plan_table(gpu: Gpu, device: Device, problems: Iterable[Problem]) -> RichTable:
    """A rich table of the plan that serves each problem, from where, and why.

    Problems come by rising row counts; one whose plan and source are those of the row count before
    is left out.
    """
    from rich.table import Table as RichTable

    from flashnorm_triton.tuning.tuner import plan_text

    table = RichTable(title=f"Plans on {gpu.name}")
    for heading in ("K → N", "rows", "plan", "from", "why"):
        table.add_column(heading, overflow="fold")
    before = None
    for problem in problems:
        chosen = tables.choice(problem, device, gpu.name)
        same = replace(problem, m=0), replace(chosen, reason="", entry=None)
        if same != before:
            where = f"{chosen.source}: {chosen.path.name}" if chosen.path else chosen.source
            cell = f"{problem.k} → {problem.n} {problem.dtype} {problem.epilogue}".strip()
            table.add_row(cell, f"{problem.m}…", plan_text(chosen.plan), where, _why(chosen))
        before = same
    return table


def _why(chosen: tables.Choice) -> str:
    if chosen.entry is None:
        return chosen.reason
    from flashnorm_triton.results import kernel_hash

    gain = chosen.entry.baseline_us / chosen.entry.us
    stale = "" if chosen.entry.run.kernel_hash == kernel_hash() else "; other kernel sources"
    return f"{chosen.entry.us:.1f} µs, {gain:.2f}x unfused; {chosen.reason}{stale}"
